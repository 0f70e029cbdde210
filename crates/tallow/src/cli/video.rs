//! Arguments of `tallow decode` and `tallow encode`.

use std::{path::PathBuf, str::FromStr};

use candle_core::DType;
use clap::{Args, ValueEnum};
use media::FrameRate;
use sampling::NoiseGenerator;
use wan_vae::{BlendedTiles, Remainder, Tiling};

use super::RunArgs;

/// The video that is made where none is named.
const CLIP: &str = if cfg!(feature = "mp4") { "clip.mp4" } else { "clip.gif" };

/// Arguments of `tallow decode`.
#[derive(Debug, Args)]
pub(crate) struct DecodeArgs {
    /// File of latents: .latent of ComfyUI, .safetensors, .npy, .pt [default: the built-in clip]
    #[arg(value_name = "LATENTS")]
    pub(crate) latents: Option<PathBuf>,

    /// Video file: .mp4, .y4m, .gif, a series of pictures such as frame-%05d.png, or - for Y4M to standard output
    ///
    /// Latents of a single picture can also become a .png, .jpg or .webp file.
    #[arg(short, long, value_name = "FILE", default_value = CLIP)]
    pub(crate) output: PathBuf,

    #[command(flatten)]
    pub(crate) vae: VaeArgs,

    /// Decoder of an LTX VAE: conv, diffusion, or auto: the diffusion decoder if it is there
    #[arg(long, value_enum, value_name = "NAME", default_value_t = DecoderName::Auto)]
    pub(crate) decoder: DecoderName,

    /// Seed of the noise that the diffusion decoder makes pixels of: another seed, another fine texture [default: 0]
    #[arg(long, value_name = "SEED", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,

    /// Generator of that noise: philox, or torch-cpu for that of torch.randn((1, 3, F, H, W)) on a CPU [default: philox]
    #[arg(long, value_name = "NAME")]
    pub(crate) rng: Option<NoiseGenerator>,

    /// Frames a second: a number or a ratio such as 30000/1001 [default: 24 for Wan 2.2 and LTX VAEs, else 16]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) fps: Option<FrameRate>,

    /// Kind of the latents: raw ones are those of a VAE's network, normalized ones those of a transformer [default: what
    /// the file says, else raw for Wan VAEs and normalized for LTX VAEs, as ComfyUI saves them]
    #[arg(long = "latents", value_enum, value_name = "KIND")]
    pub(crate) latents_kind: Option<LatentKind>,

    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// Arguments of `tallow encode`.
#[derive(Debug, Args)]
pub(crate) struct EncodeArgs {
    /// Video or picture: .y4m, .gif, .png, .jpg, .webp, a folder of numbered pictures, a name such as frame-%05d.png, or
    /// - for Y4M from standard input
    #[arg(value_name = "VIDEO|IMAGE")]
    pub(crate) input: PathBuf,

    /// File of latents, .latent or .safetensors, as ComfyUI saves them: raw of a Wan VAE, normalized of an LTX VAE
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,

    #[command(flatten)]
    pub(crate) vae: VaeArgs,

    /// What to do with frames behind the last whole group: latents stand for 1 frame and then 4 each (Wan) or 8
    /// each (LTX)
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = FramePolicy::Error)]
    pub(crate) frames: FramePolicy,

    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// Which VAE, where and how.
#[derive(Debug, Args)]
pub(crate) struct VaeArgs {
    /// VAE: a .safetensors or .pth file of any layout, a folder, or a model folder with a component vae or
    /// diffusion_decoder [default: the built-in demonstration VAE]
    #[arg(long, value_name = "PATH")]
    pub(crate) vae: Option<PathBuf>,

    /// Type that weights are kept in; sums are f32 in any case [default: as stored]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) dtype: Option<WeightType>,

    /// Most memory for the VAE and its work, such as 8G, 1.5GiB or 900MB [default: what is available, or no limit where
    /// that is unknown]
    ///
    /// K, M, G and T are powers of 1024, as are KiB, MiB, GiB and TiB; KB, MB, GB and TB are powers of 1000. Held against
    /// an estimate before the work begins.
    #[arg(long, value_name = "SIZE", value_parser = bytes, allow_negative_numbers = true)]
    pub(crate) max_memory: Option<u64>,

    /// How pictures are cut to save memory: auto, whole, bands:N, blended or blended:TILE:STRIDE
    ///
    /// Bands give the same result as whole pictures, up to the last bits, but hold all frames until the last band is done;
    /// auto takes the fewest that fit. Blended tiles (diffusers' way, sizes in pixels) differ from the whole picture. LTX
    /// VAEs have no bands: they cut time, exactly.
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub(crate) tiling: TilingName,

    /// Where to compute: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: DeviceName,
}

/// Decoder of a VAE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DecoderName {
    /// The diffusion decoder if it is there.
    Auto,
    /// The convolutional one.
    Conv,
    /// The one that makes pixels of noise.
    Diffusion,
}

/// Kind of latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LatentKind {
    /// As the VAE's network makes and takes them.
    Raw,
    /// As a transformer sees them.
    Normalized,
}

/// What happens to frames that fill no group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FramePolicy {
    /// Refuse the clip.
    Error,
    /// Leave them out.
    Trim,
    /// Repeat the last frame until the group is whole.
    Pad,
}

impl FramePolicy {
    pub(crate) fn remainder(self) -> Remainder {
        match self {
            Self::Error => Remainder::Refuse,
            Self::Trim => Remainder::Trim,
            Self::Pad => Remainder::Repeat,
        }
    }
}

/// Type of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightType {
    F32,
    Bf16,
    F16,
}

impl WeightType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// A device by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    Cpu,
    /// CUDA device of this number.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = match text.split_once(':') {
            None if text == "cpu" => return Ok(Self::Cpu),
            None if text == "cuda" => Some(0),
            Some(("cuda", number)) => number.parse().ok(),
            _ => None,
        };
        number.map(Self::Cuda).ok_or_else(|| "expected cpu, cuda or cuda:N".to_owned())
    }
}

/// A tiling by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TilingName {
    Auto,
    Whole,
    /// Bands of rows.
    Bands(usize),
    /// Blended tiles: side and stride in pixels, or those of the family.
    Blended(Option<(usize, usize)>),
}

impl TilingName {
    /// As the VAEs of the Wan family have it.
    pub(crate) fn wan(self) -> Tiling {
        match self {
            Self::Auto => Tiling::Auto,
            Self::Whole => Tiling::Whole,
            Self::Bands(count) => Tiling::Bands(count),
            Self::Blended(None) => Tiling::Blended(BlendedTiles::default()),
            Self::Blended(Some((tile, stride))) => Tiling::Blended(BlendedTiles { tile, stride }),
        }
    }
}

impl FromStr for TilingName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let number = |text: &str| text.parse::<usize>().ok();
        let tiling = match parts.as_slice() {
            ["auto"] => Some(Self::Auto),
            ["whole"] => Some(Self::Whole),
            ["bands", count] => number(count).map(Self::Bands),
            ["blended"] => Some(Self::Blended(None)),
            ["blended", tile, stride] => number(tile).zip(number(stride)).map(|tiles| Self::Blended(Some(tiles))),
            _ => None,
        };
        tiling.ok_or_else(|| "expected auto, whole, bands:N, blended or blended:TILE:STRIDE".to_owned())
    }
}

/// A number of bytes such as `8G`.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor: Option<u64> = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1 << 30),
        "t" | "tib" => Some(1 << 40),
        "kb" => Some(1_000),
        "mb" => Some(1_000_000),
        "gb" => Some(1_000_000_000),
        "tb" => Some(1_000_000_000_000),
        _ => None,
    };
    let size = number.parse::<f64>().ok().zip(factor).map(|(number, factor)| (number * factor as f64).round());
    let legal = size.filter(|size| (1.0..=9e18).contains(size));
    legal.map(|size| size as u64).ok_or_else(|| "expected a size such as 8G, 1.5GiB or 900MB".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn decode(extra: &[&str]) -> Result<DecodeArgs, clap::Error> {
        let line = ["tallow", "decode", "-o", "a.mp4"].iter().chain(extra);
        Cli::try_parse_from(line).map(|cli| match cli.command {
            Command::Decode(args) => *args,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn sizes_have_units() {
        for (text, want) in [
            ("1", 1),
            ("900", 900),
            ("2k", 2048),
            ("1.5G", 3 << 29),
            ("1.5 GiB", 3 << 29),
            ("900MB", 900_000_000),
            ("8g", 8 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(bytes(text), Ok(want), "{text}");
        }
        for text in ["", "0", "G", "-1G", "1X", "1.2.3", "1e9", "9999999999999T", "nan", "0.1"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tilings_and_devices_have_names() {
        assert_eq!(decode(&["--tiling", "bands:3"]).unwrap().vae.tiling.wan(), Tiling::Bands(3));
        let tiles = BlendedTiles { tile: 512, stride: 448 };
        assert_eq!(decode(&["--tiling", "blended:512:448"]).unwrap().vae.tiling.wan(), Tiling::Blended(tiles));
        let tiles = BlendedTiles::default();
        assert_eq!(decode(&["--tiling", "blended"]).unwrap().vae.tiling.wan(), Tiling::Blended(tiles));
        for bad in ["", "bands", "bands:x", "bands:-1", "blended:1", "auto:1", "tiles"] {
            assert!(decode(&["--tiling", bad]).is_err(), "{bad}");
        }
        assert_eq!(decode(&["--device", "cuda:2"]).unwrap().vae.device, DeviceName::Cuda(2));
        assert_eq!(decode(&["--device", "cuda"]).unwrap().vae.device, DeviceName::Cuda(0));
        for bad in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
            assert!(decode(&["--device", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_and_kinds_are_checked() {
        let args = decode(&["x", "--fps", "30000/1001", "--latents", "normalized", "--dtype", "bf16"]).unwrap();
        assert_eq!(args.fps, Some(FrameRate::new(30000, 1001).unwrap()));
        assert_eq!((args.latents_kind, args.vae.dtype), (Some(LatentKind::Normalized), Some(WeightType::Bf16)));
        assert_eq!(args.latents, Some(PathBuf::from("x")));
        let args = decode(&["x", "--decoder", "diffusion", "--seed", "7", "--rng", "torch-cpu"]).unwrap();
        assert_eq!(
            (args.decoder, args.seed, args.rng),
            (DecoderName::Diffusion, Some(7), Some(NoiseGenerator::TorchCpu))
        );
        for bad in [["--decoder", "vae"], ["--seed", "-1"], ["--rng", "mersenne"]] {
            assert!(decode(&bad).is_err(), "{bad:?}");
        }
        for bad in [["--fps", "0"], ["--fps", "-16"], ["--latents", "other"], ["--dtype", "f8"], ["--max-memory", "0"]]
        {
            assert!(decode(&bad).is_err(), "{bad:?}");
        }
    }
}
