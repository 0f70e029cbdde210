//! `tallow generate`: a picture from a sentence.
//!
//! Everything that can be wrong with the request is found before the weights are loaded: first what does not depend on
//! the machine (exit code 2), then the files (exit code 1).

use std::{
    hash::{BuildHasher, RandomState},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, anyhow, bail, ensure};
use candle_core::{DType, Device};
use candle_fork::memory;
use flux2::{Flux2Pipeline, GenerateOptions, GeneratedRgb8, LoadOptions, sizes};
use media::{ImageFormat, OutputFile, Rgb8};
use policy::{AttentionPolicy, ConvPolicy, ExecutionIdentity, ModelFamily};

use crate::{
    cli::{DeviceName, GenerateArgs, Seed, WeightType},
    demo, device, execution,
    failure::Failure,
    interrupt, logging, machine,
    metadata::Recipe,
    model::Model,
    output,
    progress::Progress,
    terminal,
};

/// Pixels on a side of one token in every published model; the loaded model checks its own.
const SIZE_MULTIPLE: usize = 16;
/// Longest prompt that is read from standard input, in bytes.
const MAX_PROMPT_BYTES: u64 = 1 << 20;

/// Makes the pictures.
///
/// # Errors
/// Usage, a failed run or an interruption; files of finished pictures of a batch stay.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    logging::install(args.run.quiet, args.run.verbose);
    let plan = Plan::new(args).map_err(Failure::Usage)?;
    plan.check_files()?;
    let (conv, attention) = execution::backends(ModelFamily::Flux2)?;
    let device = device::open(args.device)?;
    let stop = interrupt::install(args.run.quiet)?;
    let say = |line: &str| args.run.say(line);
    let model = {
        let progress = Progress::new(stop.clone(), 1, args.run.quiet);
        Model::open(&args.model, &progress)?
    };
    let prompt = prompt(args)?;
    args.run.start_threads()?;
    model.notices.iter().for_each(|notice| say(&format!("warning: {notice}")));
    if args.model.model.is_none() {
        say(&format!("using the built-in demonstration model {}: {}", demo::NAME, demo::KNOWS));
    }
    let start = Instant::now();
    let load = load_options(args, (conv, attention), &device);
    let sources = model.sources.clone();
    let pipeline = Flux2Pipeline::load_from(&model.folder, sources, &load).map_err(anyhow::Error::from)?;
    let watch = execution::Watch::new(&load.device, load.dtype, model.hash()?);
    let watch = match args.quant.asked_for() {
        Some(name) if !model.is_quantised()? => {
            say(&format!("warning: --quant {name} changes nothing, no weights of this model are quantised"));
            watch
        }
        quant => watch.with_quant(quant),
    };
    interrupt::check(&stop)?;
    // The model may be stricter than what could be checked without it.
    pipeline.check(&plan.options(&prompt, 0)).map_err(|error| Failure::Usage(error.into()))?;
    say(&plan.summary(&pipeline));
    if args.run.verbose > 0 && !device.is_cpu() {
        let (width, height) = plan.size(&pipeline);
        say(&format!("memory: {}", pipeline.memory_plan(height, width).map_err(anyhow::Error::from)?));
    }

    let progress = Progress::new(stop.clone(), plan.files.len(), args.run.quiet);
    let mut warned = Vec::new();
    for (index, file) in plan.files.iter().enumerate() {
        progress.begin_item(index + 1);
        let options = plan.options(&prompt, index);
        let generated = match pipeline.generate_rgb8(&options, &progress) {
            Ok(generated) => generated,
            Err(_) if stop.is_cancelled() => return Err(Failure::Interrupted),
            Err(error) => return Err(anyhow::Error::from(error).into()),
        };
        interrupt::check(&stop)?;
        progress.clear();
        for notice in &generated.notices {
            // The same for each picture of a batch.
            let notice = notice.to_string();
            if !warned.contains(&notice) {
                say(&format!("warning: {notice}"));
                warned.push(notice);
            }
        }
        if args.run.verbose > 0 && file.exists() {
            say(&format!("replacing {}", file.display()));
        }
        plan.write(file, generated, &options, &model.name, &watch.identity(&args.run)?)?;
        if !args.run.quiet {
            terminal::stdout(&format!("{}\n", file.display()))?;
        }
    }
    let took = format!("done in {:.1} s", start.elapsed().as_secs_f64());
    match memory::peak(&device).map_err(anyhow::Error::from)? {
        Some(bytes) => say(&format!("{took}, at most {} of tensors on the device", terminal::bytes(bytes))),
        None => say(&took),
    }
    Ok(())
}

/// How the model is loaded.
fn load_options(args: &GenerateArgs, (conv, attention): (ConvPolicy, AttentionPolicy), device: &Device) -> LoadOptions {
    let default = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    let dtype = args.dtype.map_or(default, WeightType::dtype);
    let mut options = LoadOptions::new(device.clone(), dtype)
        .with_backends(conv, attention)
        .with_quant(args.quant.policy())
        .with_max_vram(args.max_vram);
    options.plan_cache = machine::cache_folder("cudnn").map(Into::into);
    options
}

/// What the command line asks for, checked.
struct Plan<'a> {
    args: &'a GenerateArgs,
    format: ImageFormat,
    files: Vec<PathBuf>,
    seed: u64,
}

impl<'a> Plan<'a> {
    fn new(args: &'a GenerateArgs) -> anyhow::Result<Self> {
        let format = ImageFormat::from_path(&args.output)?;
        for (axis, side) in [("width", args.width), ("height", args.height)] {
            if let Some(side) = side {
                sizes::check_side(axis, side, SIZE_MULTIPLE)?;
            }
        }
        if let Some(steps) = args.steps {
            sizes::check_steps(steps).context("--steps")?;
        }
        if let Some(scale) = args.guidance {
            sizes::check_guidance(scale).context("--guidance")?;
        }
        ensure!(
            args.max_vram.is_none() || args.device != DeviceName::Cpu,
            "--max-vram is for a device with memory of its own, expected --device cuda beside it"
        );
        let seed = match args.seed {
            Seed::Fixed(seed) => seed,
            Seed::Random => random_seed(),
        };
        Ok(Self { args, format, files: output::files(&args.output, args.batch), seed })
    }

    /// Tries every place that a picture will go to. Nothing stays there until a picture is finished.
    fn check_files(&self) -> anyhow::Result<()> {
        self.files.iter().try_for_each(|file| output::check_place(file))
    }

    /// Seed of picture `index`, counted from 0.
    fn seed(&self, index: usize) -> u64 {
        self.seed.wrapping_add(self.args.seed_step.wrapping_mul(index as u64))
    }

    fn options(&self, prompt: &str, index: usize) -> GenerateOptions {
        GenerateOptions {
            prompt: prompt.to_owned(),
            height: self.args.height,
            width: self.args.width,
            num_inference_steps: self.args.steps,
            guidance_scale: self.args.guidance,
            seed: self.seed(index),
            noise: self.args.rng,
        }
    }

    fn summary(&self, pipeline: &Flux2Pipeline) -> String {
        let defaults = pipeline.defaults();
        let (first, last) = (self.seed, self.seed(self.files.len() - 1));
        let seeds = match (self.files.len(), self.args.seed_step) {
            (1, _) => format!("seed {first}"),
            (_, 1) => format!("seeds {first} to {last}"),
            (_, step) => format!("seeds {first} to {last} in steps of {step}"),
        };
        let (width, height) = self.size(pipeline);
        format!(
            "{seeds}, steps {}, guidance {}, size {width}x{height}, rng {}",
            self.args.steps.unwrap_or(defaults.num_inference_steps),
            self.args.guidance.unwrap_or(defaults.guidance_scale),
            self.args.rng,
        )
    }

    /// Width and height of the pictures.
    fn size(&self, pipeline: &Flux2Pipeline) -> (usize, usize) {
        let defaults = pipeline.defaults();
        (self.args.width.unwrap_or(defaults.width), self.args.height.unwrap_or(defaults.height))
    }

    fn write(
        &self,
        file: &Path,
        generated: GeneratedRgb8,
        options: &GenerateOptions,
        model: &str,
        execution: &ExecutionIdentity,
    ) -> anyhow::Result<()> {
        let (width, height) = (generated.width, generated.height);
        let texts = if self.args.no_metadata {
            Vec::new()
        } else {
            let recipe = Recipe {
                version: env!("CARGO_PKG_VERSION"),
                model,
                prompt: &options.prompt,
                seed: options.seed,
                steps: generated.num_inference_steps,
                guidance: generated.guidance_scale,
                width,
                height,
                rng: options.noise.to_string(),
                execution,
            };
            recipe.texts().context("cannot describe the picture")?
        };
        let picture = Rgb8::new(generated.pixels, width, height)?;
        let bytes = media::encode(&picture, self.format, &texts)?;
        let mut output = OutputFile::create(file)?;
        output.write_all(&bytes).with_context(|| format!("cannot write {}", file.display()))?;
        output.commit()?;
        Ok(())
    }
}

/// The prompt, from the command line or from standard input without its last line break.
fn prompt(args: &GenerateArgs) -> anyhow::Result<String> {
    let given = args.prompt.as_deref().or(args.prompt_option.as_deref());
    match given {
        Some("-") => read_prompt(std::io::stdin().lock()),
        Some(text) => Ok(text.to_owned()),
        None => bail!("no prompt was given"),
    }
}

fn read_prompt(from: impl Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_PROMPT_BYTES + 1).read_to_end(&mut bytes).context("cannot read the prompt from standard input")?;
    ensure!(
        bytes.len() as u64 <= MAX_PROMPT_BYTES,
        "the prompt on standard input is longer than {MAX_PROMPT_BYTES} bytes"
    );
    let mut text = String::from_utf8(bytes).map_err(|_| anyhow!("the prompt on standard input is not UTF-8"))?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// A seed that is short enough to be typed again. Also `torch-cpu` tells these apart: it uses the low 32 bits only.
fn random_seed() -> u64 {
    // The standard library seeds its hash tables from the operating system.
    RandomState::new().hash_one(std::process::id()) >> 32
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn with_args<T>(line: &[&str], test: impl FnOnce(&GenerateArgs) -> T) -> T {
        match Cli::parse_from(["tallow", "generate", "x"].iter().chain(line)).command {
            Command::Generate(args) => test(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn seeds_of_a_batch_wrap_around() {
        with_args(&["-o", "a.png", "-b", "3", "-s", "18446744073709551615", "--seed-step", "2"], |args| {
            let plan = Plan::new(args).unwrap();
            assert_eq!([0, 1, 2].map(|index| plan.seed(index)), [u64::MAX, 1, 3]);
            assert_eq!(plan.files[2], PathBuf::from("a-3.png"));
        });
    }

    #[test]
    fn impossible_requests_are_refused() {
        for line in [
            ["-o", "a.png", "-W", "1000"],
            ["-o", "a.png", "-H", "0"],
            ["-o", "a.png", "-W", "100000"],
            ["-o", "a.png", "--steps", "0"],
            ["-o", "a.png", "--guidance", "nan"],
            ["-o", "a.png", "--guidance", "-1"],
            ["-o", "a.bmp", "-s", "1"],
            ["-o", "a", "-s", "1"],
        ] {
            assert!(with_args(&line, |args| Plan::new(args).is_err()), "{line:?}");
        }
    }

    #[test]
    fn random_seeds_differ_and_are_short() {
        let seeds: Vec<_> = (0..4).map(|_| random_seed()).collect();
        assert!(seeds.iter().all(|&seed| seed <= u64::from(u32::MAX)));
        assert!(seeds.iter().any(|&seed| seed != seeds[0]), "{seeds:?}");
    }

    #[test]
    fn one_line_break_ends_a_prompt_from_standard_input() {
        assert_eq!(read_prompt(&b"a\nb\r\n"[..]).unwrap(), "a\nb");
        assert_eq!(read_prompt(&b"a\n\n"[..]).unwrap(), "a\n");
        assert_eq!(read_prompt(&b""[..]).unwrap(), "");
        assert!(read_prompt(&b"\xff"[..]).is_err());
        assert!(read_prompt(std::io::repeat(b'a')).is_err());
    }
}
