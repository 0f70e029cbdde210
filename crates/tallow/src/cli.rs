//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use sampling::NoiseGenerator;

mod model;
mod run;
mod video;
mod weights;

pub(crate) use self::{
    model::{ModelArgs, QuantUse},
    run::RunArgs,
    video::{
        DecodeArgs, DecoderName, DeviceName, EncodeArgs, FramePolicy, LatentKind, TilingName, VaeArgs, WeightType,
    },
    weights::{QuantFormat, QuantizeArgs, VerifyArgs},
};

/// Most pictures of one run.
const MAX_BATCH: u64 = 10_000;

/// Local image and video generation.
#[derive(Debug, Parser)]
#[command(name = "tallow", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a picture from a sentence
    ///
    /// With no --model, the small demonstration model inside this program is used. It knows only coloured shapes, such as
    /// "a red circle on a blue background".
    ///
    /// The path of each written file goes to standard output, everything else to standard error. Exit codes: 0 success,
    /// 1 the run failed, 2 the command line cannot work, 130 interrupted (Ctrl-C stops between two units of work and leaves
    /// no unfinished file; a second Ctrl-C ends at once).
    Generate(Box<GenerateArgs>),
    /// Make a video, or a picture, of latents
    ///
    /// With no LATENTS, the built-in clip is decoded with the built-in demonstration VAE. Latents are those of Wan 2.1 and
    /// Wan 2.2 models, of Qwen-Image and of their relatives, and of LTX-2, 2.3 and 2.5; the tensors of the VAE decide which
    /// it is.
    ///
    /// The path of the written file goes to standard output, everything else to standard error. Exit codes are those of
    /// `tallow generate`; a run that does not finish leaves no file.
    Decode(Box<DecodeArgs>),
    /// Make latents of a video or a picture
    ///
    /// The path of the written file goes to standard output, everything else to standard error. Exit codes are those of
    /// `tallow generate`; a run that does not finish leaves no file.
    Encode(Box<EncodeArgs>),
    /// Say what a checkpoint file, a model folder or a file of latents is
    Inspect(InspectArgs),
    /// Make a checkpoint of half the size or less
    ///
    /// Matrices of the repeated blocks are quantised; layers at the input and the output, norms, modulation and embeddings
    /// stay as they are. Names stay too: the new file serves where the old one does, and in ComfyUI if its names are those
    /// of ComfyUI. The path of the written file goes to standard output; a run that does not finish leaves no file.
    Quantize(QuantizeArgs),
    /// Compare files with their checksums
    ///
    /// Prints a line for each file: ok, BAD, or unchecked where no sha256 is known. Exit code 1 if a file is BAD or missing,
    /// or if nothing could be checked.
    Verify(VerifyArgs),
    /// Say what this build can do on this machine
    Doctor(DoctorArgs),
}

/// Arguments of `tallow generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// What the picture shows; `-` reads standard input
    ///
    /// Names of special tokens, such as <|im_end|>, act as these tokens also inside the prompt, as in the reference
    /// implementation.
    #[arg(value_name = "PROMPT", required_unless_present = "prompt_option", conflicts_with = "prompt_option")]
    pub(crate) prompt: Option<String>,

    /// The same as PROMPT
    #[arg(short = 'p', long = "prompt", value_name = "PROMPT", allow_hyphen_values = true)]
    pub(crate) prompt_option: Option<String>,

    /// Picture file: .png, .jpg or .webp
    ///
    /// %d in the file's name becomes the number of the picture, counted from 1; %03d pads it with zeros to three digits.
    /// Without it, --batch puts the number behind the name: picture-1.png, picture-2.png.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,

    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Width in pixels, a multiple of 16 [default: the model's]
    #[arg(short = 'W', long, value_name = "PIXELS", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) width: Option<usize>,

    /// Height in pixels, a multiple of 16 [default: the model's]
    #[arg(short = 'H', long, value_name = "PIXELS", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) height: Option<usize>,

    /// Number of denoising steps [default: the model's]
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) steps: Option<usize>,

    /// Seed of the noise; -1 is a random one [default: random]
    ///
    /// The same seed gives the same bytes, whatever the number of threads.
    #[arg(short, long, value_name = "SEED", value_parser = seed, default_value = "-1", hide_default_value = true)]
    #[arg(allow_hyphen_values = true)]
    pub(crate) seed: Seed,

    /// Number of pictures
    ///
    /// Picture number i, counted from 0, is the picture of seed + i * seed-step (modulo 2^64) alone.
    #[arg(short, long, value_name = "N", value_parser = batch, default_value = "1", allow_negative_numbers = true)]
    pub(crate) batch: usize,

    /// Distance between the seeds of a batch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), default_value = "1")]
    pub(crate) seed_step: u64,

    /// Guidance scale [default: the model's]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true)]
    pub(crate) guidance: Option<f64>,

    /// Noise generator: philox, or torch-cpu for the noise of PyTorch on a CPU
    #[arg(long, value_name = "NAME", default_value_t)]
    pub(crate) rng: NoiseGenerator,

    /// Write no prompt, seed and settings into the PNG file
    #[arg(long)]
    pub(crate) no_metadata: bool,

    /// Where to compute: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: DeviceName,

    /// Type of activations, and on CUDA of weights; sums are f32 in any case [default: f32 on the CPU, bf16 on CUDA]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) dtype: Option<WeightType>,

    /// How quantised weights (int8, fp8, GGUF) are used
    #[arg(long, value_enum, value_name = "USE", default_value_t = QuantUse::Auto)]
    pub(crate) quant: QuantUse,

    /// Most memory of a CUDA device, such as 8G, 7.5GiB or 8000MB [default: no limit]
    ///
    /// Held against an estimate before the work begins. What does not fit is copied from the host while other parts
    /// compute: slower, with the same picture. -v tells the plan.
    #[arg(long, value_name = "SIZE", value_parser = video::bytes, allow_negative_numbers = true)]
    pub(crate) max_vram: Option<u64>,

    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// Arguments of `tallow inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A safetensors file, an index of shards, a PyTorch checkpoint, a GGUF file, a model folder or a file of latents
    #[arg(value_name = "FILE|DIR")]
    pub(crate) path: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `tallow doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The seed as it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seed {
    /// Choose one and say which.
    Random,
    /// This one.
    Fixed(u64),
}

fn seed(text: &str) -> Result<Seed, String> {
    if text == "-1" {
        return Ok(Seed::Random);
    }
    text.parse()
        .map(Seed::Fixed)
        .map_err(|_| format!("expected an integer from 0 to {}, or -1 for a random seed", u64::MAX))
}

fn integer(text: &str, min: u64, max: u64) -> Result<usize, String> {
    text.parse::<u64>()
        .ok()
        .filter(|value| (min..=max).contains(value))
        .and_then(|value| usize::try_from(value).ok())
        .ok_or_else(|| format!("expected an integer from {min} to {max}"))
}

fn whole_number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a whole number".to_owned())
}

fn batch(text: &str) -> Result<usize, String> {
    integer(text, 1, MAX_BATCH)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn generate(extra: &[&str]) -> Result<GenerateArgs, clap::Error> {
        let line = ["tallow", "generate", "-o", "a.png"].iter().chain(extra);
        Cli::try_parse_from(line).map(|cli| match cli.command {
            Command::Generate(args) => *args,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn seeds() {
        assert_eq!(generate(&["x"]).unwrap().seed, Seed::Random);
        assert_eq!(generate(&["x", "-s", "-1"]).unwrap().seed, Seed::Random);
        assert_eq!(generate(&["x", "-s", "0"]).unwrap().seed, Seed::Fixed(0));
        assert_eq!(generate(&["x", "--seed=18446744073709551615"]).unwrap().seed, Seed::Fixed(u64::MAX));
        for bad in ["abc", "", "-2", "1.5", "18446744073709551616", " 1"] {
            assert!(generate(&["x", "--seed", bad]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn short_h_asks_for_help_and_capital_h_is_the_height() {
        assert_eq!(generate(&["x", "-W", "128", "-H", "64"]).unwrap().height, Some(64));
        assert_eq!(generate(&["x", "-h"]).unwrap_err().kind(), clap::error::ErrorKind::DisplayHelp);
    }

    #[test]
    fn the_prompt_comes_once() {
        assert_eq!(generate(&[""]).unwrap().prompt.as_deref(), Some(""));
        assert_eq!(generate(&["-p", "-x"]).unwrap().prompt_option.as_deref(), Some("-x"));
        assert_eq!(generate(&["-"]).unwrap().prompt.as_deref(), Some("-"));
        assert!(generate(&[]).is_err());
        assert!(generate(&["x", "-p", "y"]).is_err());
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for bad in [
            ["--steps", "-3"],
            ["--width", "64.5"],
            ["--batch", "0"],
            ["--threads", "0"],
            ["--seed-step", "0"],
            ["--guidance", "much"],
            ["--rng", "mersenne"],
        ] {
            assert!(generate(&["x", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
    }
}
