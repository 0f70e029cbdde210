//! `tallow encode`: latents of a video or a picture.

use std::{path::Path, time::Instant};

use anyhow::bail;
use candle_core::Tensor;
use media::{VideoReader, open_video};
use policy::{CancelToken, ExecutionIdentity};
use wan_vae::{ClipMemory, ClipPlan, EncodeOptions, EncodedClip, Error, Remainder, WanVae, memory};
use weights::write::Metadata;

use super::{
    VAE_KEY, caller, count, failed, frames,
    latents::{LatentWriter, check_name},
    summary,
    vae::Vae,
};
use crate::{cli::EncodeArgs, execution, failure::Failure, interrupt, logging, output, progress::Progress, terminal};

/// Makes the latents.
///
/// # Errors
/// Usage, a failed run or an interruption; no file is left then.
pub(crate) fn run(args: &EncodeArgs) -> Result<(), Failure> {
    let start = Instant::now();
    logging::install(args.run.quiet, args.run.verbose);
    check_name(&args.output).map_err(Failure::Usage)?;
    output::check_place(&args.output)?;
    let vae = Vae::open(&args.vae)?;
    let stop = interrupt::install(args.run.quiet)?;
    let clip = Clip::open(args, &vae, &stop)?;
    vae.check_values()?;
    let name = vae.name();
    let mut latents = LatentWriter::create(&args.output, clip.latent_extents(&vae))?;

    args.run.start_threads()?;
    args.run.say(&clip.summary(&vae));
    let (vae, watch) = vae.load()?;
    interrupt::check(&stop)?;
    let progress = Progress::new(stop.clone(), 1, args.run.quiet);
    let encoded = clip.encode(&vae, &progress, &mut latents);
    progress.clear();
    interrupt::check(&stop)?;
    let encoded = encoded?;
    if let Some(notice) = notice(&encoded) {
        args.run.say(&notice);
    }
    if args.run.verbose > 0 && args.output.exists() {
        args.run.say(&format!("replacing {}", args.output.display()));
    }
    latents.finish(&metadata(name, &watch.identity(&args.run)?)?)?;
    if !args.run.quiet {
        terminal::stdout(&format!("{}\n", args.output.display()))?;
    }
    args.run.say(&format!("{} of {}", count(encoded.latents, "latent frame"), count(encoded.frames, "frame")));
    args.run.say(&summary(start));
    Ok(())
}

/// What the file says about its making.
///
/// # Errors
/// Those of [`execution::json`].
fn metadata(vae: String, identity: &ExecutionIdentity) -> anyhow::Result<Metadata> {
    let entries = [
        (VAE_KEY, vae),
        (execution::KEY, execution::json(identity)?),
        ("latents", "raw".to_owned()),
        ("software", concat!("tallow ", env!("CARGO_PKG_VERSION")).to_owned()),
    ];
    Ok(entries.map(|(key, value)| (key.to_owned(), value)).into())
}

/// What was done with frames that filled no group.
fn notice(clip: &EncodedClip) -> Option<String> {
    match (clip.trimmed, clip.repeated) {
        (0, 0) => None,
        (0, repeated) => Some(format!("the last frame is repeated {repeated} times")),
        (trimmed, _) => Some(format!("{} at the end left out", count(trimmed, "frame"))),
    }
}

/// A video that fits a VAE.
struct Clip {
    name: String,
    reader: VideoReader,
    /// Unknown for standard input.
    frames: Option<usize>,
    options: EncodeOptions,
    plan: Option<(ClipPlan, u64)>,
}

impl Clip {
    fn open(args: &EncodeArgs, vae: &Vae<'_>, stop: &CancelToken) -> Result<Self, Failure> {
        let architecture = vae.architecture();
        if architecture.encoder.is_none() {
            return Err(failed(Error::Missing { part: "encoder" }).into());
        }
        vae.check_colours(architecture.in_channels())?;
        let reader = open_video(&args.input).map_err(anyhow::Error::from)?;
        let (name, size) = (args.input.display().to_string(), (reader.height(), reader.width()));
        for (axis, side) in [("width", size.1), ("height", size.0)] {
            check_side(&name, axis, side, architecture.encoder_spatial_factor())?;
        }
        let frames = if args.input == Path::new("-") { None } else { Some(survey(&args.input, stop)?) };
        let remainder = args.frames.remainder();
        let options = EncodeOptions::default()
            .with_remainder(remainder)
            .with_max_bytes(vae.max_bytes())
            .with_tiling(args.vae.tiling.0);
        let mut plan = None;
        if let Some(frames) = frames {
            let group = architecture.temporal_factor();
            if remainder == Remainder::Refuse && !(frames - 1).is_multiple_of(group) {
                let below = (frames - 1) / group * group + 1;
                let nearest = format!("{below} or {}", below + group);
                let error = failed(Error::Frames { got: frames, group, nearest });
                return Err(error.context(format!("{name}: --frames error")).into());
            }
            let extents = (frames, size.0, size.1);
            let found = memory::encode_plan(architecture, vae.precision(), extents, &options);
            let found = found.map_err(|error| vae.explain(error))?;
            plan = Some((found, ClipMemory::encode(architecture, vae.precision(), extents, found).total()));
        }
        Ok(Self { name, reader, frames, options, plan })
    }

    /// Channels, height and width.
    fn latent_extents(&self, vae: &Vae<'_>) -> (usize, usize, usize) {
        let architecture = vae.architecture();
        let factor = architecture.encoder_spatial_factor();
        (architecture.z_dim, self.reader.height() / factor, self.reader.width() / factor)
    }

    fn summary(&self, vae: &Vae<'_>) -> String {
        let frames = self.frames.map_or_else(|| "frames".to_owned(), |frames| count(frames, "frame"));
        let size = format!("{}x{}", self.reader.width(), self.reader.height());
        let mut text = format!("{}: {frames} of {size} with the {}", self.name, vae.title());
        if let Some((plan, bytes)) = self.plan {
            text.push_str(&format!(", {}, about {}", super::plan(plan), terminal::bytes(bytes)));
        }
        text
    }

    fn encode(self, vae: &WanVae, progress: &Progress, latents: &mut LatentWriter) -> anyhow::Result<EncodedClip> {
        let mut frames = Frames { reader: self.reader, left: self.frames };
        let mut write =
            |made: wan_vae::RawLatents| latents.write(&made).map_err(|error| caller("cannot write the latents", error));
        let encoded = vae.encode_clip(&mut frames, &self.options, progress, &mut write);
        encoded.map_err(|error| match error {
            Error::Frames { .. } => failed(error).context(self.name),
            other => failed(other),
        })
    }
}

/// The side must be one that can be halved as often as the encoder does.
fn check_side(name: &str, axis: &str, side: usize, multiple: usize) -> anyhow::Result<()> {
    if side.is_multiple_of(multiple) {
        return Ok(());
    }
    let below = side / multiple * multiple;
    let above = below + multiple;
    let nearest = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
    bail!("{name}: {axis} {side} is not possible: it must be a multiple of {multiple}, nearest: {nearest}")
}

/// Reads the whole video once, so that nothing in it ends the run when most of the work is done; says how many frames it
/// has.
fn survey(path: &Path, stop: &CancelToken) -> Result<usize, Failure> {
    let mut frames = 0;
    for frame in open_video(path).map_err(anyhow::Error::from)? {
        frame.map_err(anyhow::Error::from)?;
        interrupt::check(stop)?;
        frames += 1;
    }
    Ok(frames)
}

/// The frames of a video as the encoder takes them.
struct Frames {
    reader: VideoReader,
    left: Option<usize>,
}

impl Iterator for Frames {
    type Item = wan_vae::Result<Tensor>;

    fn next(&mut self) -> Option<Self::Item> {
        let picture = self.reader.next()?;
        self.left = self.left.map(|left| left.saturating_sub(1));
        let picture = picture.map_err(|error| caller("cannot read the video", error));
        Some(
            picture.and_then(|picture| frames::frame(&picture).map_err(|error| caller("cannot read the video", error))),
        )
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.unwrap_or(0), self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_have_nearest_legal_ones() {
        assert!(check_side("a", "width", 832, 16).is_ok());
        let message = |side| check_side("a.png", "width", side, 16).unwrap_err().to_string();
        assert!(message(1000).ends_with("nearest: 992 or 1008"), "{}", message(1000));
        assert!(message(7).ends_with("nearest: 16"), "{}", message(7));
    }
}
