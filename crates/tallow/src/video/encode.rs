//! `tallow encode`: latents of a video or a picture.

use std::{path::Path, time::Instant};

use anyhow::{anyhow, bail};
use candle_core::Tensor;
use media::{VideoReader, open_video};
use policy::{CancelToken, ExecutionIdentity};
use weights::write::Metadata;

use super::{
    KIND_KEY, VAE_KEY, count, frames,
    latents::{LatentWriter, check_name},
    ltx, summary, wan,
};
use crate::{
    cli::{EncodeArgs, FramePolicy},
    execution::{self, Watch},
    failure::Failure,
    interrupt, logging, output,
    progress::Progress,
    terminal,
};

/// A video with a VAE that it fits. Nothing is computed before it is loaded.
pub(super) trait Clip {
    /// The VAE, for metadata.
    fn vae_name(&self) -> String;

    /// `raw` or `normalized`.
    fn kind(&self) -> &'static str;

    /// Channels, height and width of the latents.
    fn latent_extents(&self) -> (usize, usize, usize);

    /// The video.
    fn video(&self) -> &Video;

    /// The VAE, the way it will work and the memory that it will take, in words.
    fn how(&self) -> String;

    /// Looks at those values of the VAE that are known to be damaged in some copies.
    ///
    /// # Errors
    /// If they are.
    fn check_values(&self) -> anyhow::Result<()>;

    /// Reads the weights, and begins to watch what computes.
    ///
    /// # Errors
    /// If they are damaged.
    fn load(self: Box<Self>) -> anyhow::Result<(Box<dyn Encoder>, Watch)>;
}

/// A clip whose VAE is loaded.
pub(super) trait Encoder {
    /// Makes the latents.
    ///
    /// # Errors
    /// If the video cannot be read, the computation or the place of the latents fails, or the observer ends the run.
    fn encode(self: Box<Self>, progress: &Progress, latents: &mut LatentWriter) -> anyhow::Result<Encoded>;
}

/// What was made of a clip.
#[derive(Debug, Clone, Copy)]
pub(super) struct Encoded {
    /// Frames that the clip had.
    pub(super) frames: usize,
    /// Latent frames made.
    pub(super) latents: usize,
    /// Frames at the end that were left out.
    pub(super) trimmed: usize,
    /// Copies of the last frame that were added.
    pub(super) repeated: usize,
}

/// Makes the latents.
///
/// # Errors
/// Usage, a failed run or an interruption; no file is left then.
pub(crate) fn run(args: &EncodeArgs) -> Result<(), Failure> {
    let start = Instant::now();
    logging::install(args.run.quiet, args.run.verbose);
    check_name(&args.output).map_err(Failure::Usage)?;
    output::check_place(&args.output)?;
    let files = ltx::find(args.vae.vae.as_deref())?;
    let (stop, clip): (_, Box<dyn Clip + '_>) = match files {
        Some(files) => {
            let vae = ltx::encode::LtxEncoder::new(args, files)?;
            let stop = interrupt::install(args.run.quiet)?;
            let clip = vae.open(args, &stop)?;
            (stop, Box::new(clip))
        }
        None => {
            let vae = wan::Vae::open(&args.vae)?;
            let stop = interrupt::install(args.run.quiet)?;
            let clip = wan::encode::WanClip::open(args, vae, &stop)?;
            (stop, Box::new(clip))
        }
    };
    clip.check_values()?;
    let (name, kind) = (clip.vae_name(), clip.kind());
    let mut latents = LatentWriter::create(&args.output, clip.latent_extents())?;

    args.run.start_threads()?;
    args.run.say(&format!("{} with the {}", clip.video().summary(), clip.how()));
    let (encoder, watch) = clip.load()?;
    interrupt::check(&stop)?;
    let progress = Progress::new(stop.clone(), 1, args.run.quiet);
    let encoded = encoder.encode(&progress, &mut latents);
    progress.clear();
    interrupt::check(&stop)?;
    let encoded = encoded?;
    if let Some(notice) = notice(&encoded) {
        args.run.say(&notice);
    }
    if args.run.verbose > 0 && args.output.exists() {
        args.run.say(&format!("replacing {}", args.output.display()));
    }
    latents.finish(&metadata(name, kind, &watch.identity(&args.run)?)?)?;
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
fn metadata(vae: String, kind: &str, identity: &ExecutionIdentity) -> anyhow::Result<Metadata> {
    let entries = [
        (VAE_KEY, vae),
        (execution::KEY, execution::json(identity)?),
        (KIND_KEY, kind.to_owned()),
        ("software", concat!("tallow ", env!("CARGO_PKG_VERSION")).to_owned()),
    ];
    Ok(entries.map(|(key, value)| (key.to_owned(), value)).into())
}

/// What was done with frames that filled no group.
fn notice(clip: &Encoded) -> Option<String> {
    match (clip.trimmed, clip.repeated) {
        (0, 0) => None,
        (0, repeated) => Some(format!("the last frame is repeated {repeated} times")),
        (trimmed, _) => Some(format!("{} at the end left out", count(trimmed, "frame"))),
    }
}

/// A video whose frames fit a VAE.
pub(super) struct Video {
    pub(super) name: String,
    pub(super) reader: VideoReader,
    /// Unknown for standard input.
    pub(super) frames: Option<usize>,
}

impl Video {
    /// Opens a video whose sides are multiples of `side`, and reads it once, so that nothing in it ends the run when most of
    /// the work is done. Latents stand for 1 frame and then `group` each.
    ///
    /// # Errors
    /// If it cannot be read or does not fit; an interruption.
    pub(super) fn open(args: &EncodeArgs, side: usize, group: usize, stop: &CancelToken) -> Result<Self, Failure> {
        let reader = open_video(&args.input).map_err(anyhow::Error::from)?;
        let name = args.input.display().to_string();
        for (axis, got) in [("width", reader.width()), ("height", reader.height())] {
            check_side(&name, axis, got, side)?;
        }
        let frames = if args.input == Path::new("-") { None } else { Some(survey(&args.input, stop)?) };
        if args.frames == FramePolicy::Error
            && let Some(frames) = frames
        {
            check_frames(frames, group).map_err(|error| error.context(format!("{name}: --frames error")))?;
        }
        Ok(Self { name, reader, frames })
    }

    fn summary(&self) -> String {
        let frames = self.frames.map_or_else(|| "frames".to_owned(), |frames| count(frames, "frame"));
        format!("{}: {frames} of {}x{}", self.name, self.reader.width(), self.reader.height())
    }
}

/// Holds a number of frames to one that latents stand for.
///
/// # Errors
/// If it is another.
pub(super) fn check_frames(frames: usize, group: usize) -> anyhow::Result<()> {
    let over = frames.saturating_sub(1) % group;
    if over == 0 {
        return Ok(());
    }
    let below = frames - over;
    Err(anyhow!(
        "{frames} frames are not possible: a clip has 1 frame more than a multiple of {group}, nearest: {below} or {}",
        below + group
    ))
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

/// How many frames a video has.
fn survey(path: &Path, stop: &CancelToken) -> Result<usize, Failure> {
    let mut frames = 0;
    for frame in open_video(path).map_err(anyhow::Error::from)? {
        frame.map_err(anyhow::Error::from)?;
        interrupt::check(stop)?;
        frames += 1;
    }
    Ok(frames)
}

/// The next frame of a video as an encoder takes it, `[3, 1, H, W]`.
pub(super) fn next_frame(reader: &mut VideoReader) -> Option<anyhow::Result<Tensor>> {
    let picture = reader.next()?;
    Some(picture.map_err(anyhow::Error::from).and_then(|picture| Ok(frames::frame(&picture)?)))
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

    #[test]
    fn lengths_have_nearest_legal_ones() {
        for (frames, group) in [(1, 4), (5, 4), (1, 8), (121, 8)] {
            assert!(check_frames(frames, group).is_ok(), "{frames}");
        }
        let message = |frames, group| check_frames(frames, group).unwrap_err().to_string();
        assert!(message(10, 4).ends_with("a multiple of 4, nearest: 9 or 13"), "{}", message(10, 4));
        assert!(message(120, 8).ends_with("a multiple of 8, nearest: 113 or 121"), "{}", message(120, 8));
    }
}
