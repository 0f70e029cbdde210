//! `tallow decode`: a video of latents.

use std::{path::Path, sync::Arc, time::Instant};

use anyhow::{Context, anyhow};
use media::FrameRate;
use sampling::NoiseGenerator;
use wan_vae::latent_files::{Kind, LatentFile, likeness};

use super::{
    KIND_KEY, VAE_KEY, count, ltx,
    picture::{Format, Pictures, is_stdout},
    summary, wan,
};
use crate::{
    cli::{DecodeArgs, DecoderName, LatentKind},
    demo,
    execution::Watch,
    failure::Failure,
    interrupt, logging,
    metadata::Decoded,
    output,
    progress::Progress,
    terminal,
};

/// Latents with a VAE that they fit, and what will become of them. Nothing is computed before it is loaded.
pub(super) trait Clip {
    /// The latents.
    fn latents(&self) -> &LatentFile;

    /// Their kind.
    fn kind(&self) -> LatentKind;

    /// Mean and standard deviation of raw latents, if they are known.
    fn statistics(&self) -> anyhow::Result<Option<wan_vae::Statistics>>;

    /// The VAE, for metadata.
    fn vae_name(&self) -> String;

    /// The frames that it will have.
    fn frames(&self) -> Frames;

    /// The VAE, the way it will work and the memory that it will take, in words.
    fn how(&self) -> String;

    /// Seed and generator of noise, if the decoder uses any.
    fn noise(&self) -> Option<(u64, NoiseGenerator)>;

    /// Looks at those values of the VAE that are known to be damaged in some copies.
    ///
    /// # Errors
    /// If they are.
    fn check_values(&self) -> anyhow::Result<()>;

    /// Reads the weights, and begins to watch what computes.
    ///
    /// # Errors
    /// If they are damaged.
    fn load(self: Box<Self>) -> anyhow::Result<(Box<dyn Decoder>, Watch)>;
}

/// A clip whose VAE is loaded.
pub(super) trait Decoder {
    /// Makes the frames.
    ///
    /// # Errors
    /// If the computation or the place of the pictures fails, or the observer ends the run.
    fn decode(&self, progress: &Progress, pictures: &mut Pictures) -> anyhow::Result<()>;
}

/// Frames of a clip.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frames {
    pub(super) count: usize,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) rate: FrameRate,
}

/// Makes the video.
///
/// # Errors
/// Usage, a failed run or an interruption; no file is left then.
pub(crate) fn run(args: &DecodeArgs) -> Result<(), Failure> {
    let start = Instant::now();
    logging::install(args.run.quiet, args.run.verbose);
    let format = Format::of(&args.output).map_err(Failure::Usage)?;
    if args.latents.is_none() && args.vae.vae.is_some() {
        let message = "--vae needs LATENTS: the built-in clip is decoded with the built-in vae";
        return Err(Failure::Usage(anyhow!(message)));
    }
    let to_stdout = is_stdout(&args.output);
    if !to_stdout {
        output::check_place(args.output.as_path())?;
    }
    let latents = open_latents(args.latents.as_deref())?;
    check_origin(args, &latents)?;
    let clip = open_clip(args, latents)?;
    clip.check_values()?;
    let frames = clip.frames();
    // Standard output would hold the head of a video already.
    let begin = || Pictures::create(&args.output, format, (frames.count, frames.width, frames.height), frames.rate);
    let begun = if to_stdout { None } else { Some(begin()?) };
    clip.latents().check_finite().map_err(anyhow::Error::from)?;
    warn(args, &*clip)?;

    let stop = interrupt::install(args.run.quiet)?;
    args.run.start_threads()?;
    let Frames { count: number, width, height, rate } = frames;
    let of = format!("{} of {width}x{height} at {rate} a second", count(number, "frame"));
    args.run.say(&format!("{}: {of} with the {}", clip.latents().name(), clip.how()));
    let (name, noise) = (clip.vae_name(), clip.noise());
    let (decoder, watch) = clip.load()?;
    interrupt::check(&stop)?;
    let mut pictures = match begun {
        Some(pictures) => pictures,
        None => begin()?,
    };
    let progress = Progress::new(stop.clone(), 1, args.run.quiet);
    let decoded = decoder.decode(&progress, &mut pictures);
    progress.clear();
    interrupt::check(&stop)?;
    let written = decoded.and_then(|()| {
        let identity = watch.identity(&args.run)?;
        let about = Decoded::new(&name, noise, &identity);
        if args.run.verbose > 0 && args.output.exists() {
            args.run.say(&format!("replacing {}", args.output.display()));
        }
        pictures.finish(&about)
    });
    match written {
        // The reader of the pipe has seen enough.
        Err(error) if to_stdout && is_closed_pipe(&error) => return Ok(()),
        other => other?,
    }
    if !args.run.quiet && !to_stdout {
        terminal::stdout(&format!("{}\n", args.output.display()))?;
    }
    args.run.say(&summary(start));
    Ok(())
}

fn open_latents(path: Option<&Path>) -> anyhow::Result<LatentFile> {
    Ok(match path {
        Some(path) => LatentFile::open(path)?,
        None => LatentFile::from_bytes(Arc::new(demo::clip()), demo::CLIP_NAME)?,
    })
}

/// The built-in VAE makes nothing but noise of other latents than its own, whatever their shape.
fn check_origin(args: &DecodeArgs, latents: &LatentFile) -> Result<(), Failure> {
    let own = args.latents.is_none() || latents.metadata().get(VAE_KEY).is_some_and(|name| name == demo::VAE_NAME);
    if args.vae.vae.is_some() || own {
        return Ok(());
    }
    Err(Failure::Usage(anyhow!(
        "{}: --vae is missing, expected the VAE that these latents are for (the built-in one decodes what it has encoded)",
        latents.name()
    )))
}

/// The latents with the VAE of the family that `--vae` leads to.
fn open_clip<'a>(args: &'a DecodeArgs, latents: LatentFile) -> Result<Box<dyn Clip + 'a>, Failure> {
    if let Some(files) = ltx::find(args.vae.vae.as_deref())? {
        return Ok(Box::new(ltx::decode::LtxClip::new(args, latents, files)?));
    }
    let vae = wan::Vae::open(&args.vae)?;
    if args.decoder == DecoderName::Diffusion {
        return Err(Failure::Usage(anyhow!("--decoder diffusion: only LTX VAEs have one, this is a {}", vae.name())));
    }
    Ok(Box::new(wan::decode::WanClip::new(args, latents, vae)?))
}

/// The kind that was asked for, that the file names, or that files of this family have.
pub(super) fn kind_of(args: &DecodeArgs, latents: &LatentFile, family: LatentKind) -> LatentKind {
    let named = match latents.metadata().get(KIND_KEY).map(String::as_str) {
        Some("raw") => Some(LatentKind::Raw),
        Some("normalized") => Some(LatentKind::Normalized),
        _ => None,
    };
    args.latents_kind.or(named).unwrap_or(family)
}

/// Says what may be a mistake.
fn warn(args: &DecodeArgs, clip: &dyn Clip) -> anyhow::Result<()> {
    if clip.noise().is_none() && (args.seed.is_some() || args.rng.is_some()) {
        args.run.say("warning: --seed and --rng have no effect: this decoder uses no noise");
    }
    let Some(statistics) = clip.statistics()? else { return Ok(()) };
    let looks = likeness(&clip.latents().sample()?, &statistics)?.kind();
    let (said, looks) = match (clip.kind(), looks) {
        (LatentKind::Raw, Some(Kind::Normalized)) => ("raw", "normalized"),
        (LatentKind::Normalized, Some(Kind::Raw)) => ("normalized", "raw"),
        _ => return Ok(()),
    };
    args.run.say(&format!(
        "warning: the latents are decoded as {said} ones but look like {looks} ones of this vae; if the colours are wrong, \
         try --latents {looks}"
    ));
    Ok(())
}

/// Writes frames that a decoder has made.
///
/// # Errors
/// If they are broken or cannot be written.
pub(super) fn write(pictures: &mut Pictures, frames: &wan_vae::HostFrames) -> anyhow::Result<()> {
    for picture in super::frames::pictures(frames).context("cannot read the frames")? {
        pictures.write(picture)?;
    }
    Ok(())
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kinds = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds.map(std::io::Error::kind).any(|kind| kind == std::io::ErrorKind::BrokenPipe)
}
