//! `tallow decode`: a video of latents.

use std::{path::Path, sync::Arc, time::Instant};

use anyhow::anyhow;
use media::FrameRate;
use wan_vae::{
    ClipMemory, ClipPlan, DecodeOptions, Error, HostFrames, NormalizedLatents, RawLatents, Statistics, WanVae,
    latent_files::{Kind, LatentFile, likeness},
    memory,
};

use super::{
    VAE_KEY, caller, count, failed, frames,
    picture::{Format, Pictures, is_stdout},
    plan, summary,
    vae::Vae,
};
use crate::{
    cli::{DecodeArgs, LatentKind},
    demo,
    failure::Failure,
    interrupt, logging,
    metadata::Decoded,
    output,
    progress::Progress,
    terminal,
};

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
    let vae = Vae::open(&args.vae)?;
    let clip = Clip::new(args, latents, &vae)?;
    vae.check_values()?;
    // Standard output would hold the head of a video already.
    let begin = || clip.begin(&args.output, format);
    let begun = if to_stdout { None } else { Some(begin()?) };
    clip.latents.check_finite().map_err(failed)?;
    clip.warn_of_kind(args)?;

    let stop = interrupt::install(args.run.quiet)?;
    args.run.start_threads()?;
    args.run.say(&clip.summary(&vae));
    let name = vae.name();
    let (vae, watch) = vae.load()?;
    interrupt::check(&stop)?;
    let mut pictures = match begun {
        Some(pictures) => pictures,
        None => begin()?,
    };
    let progress = Progress::new(stop.clone(), 1, args.run.quiet);
    let decoded = clip.decode(&vae, &progress, &mut pictures);
    progress.clear();
    interrupt::check(&stop)?;
    let written = decoded.and_then(|()| {
        let identity = watch.identity(&args.run)?;
        let about = Decoded { version: env!("CARGO_PKG_VERSION"), vae: &name, execution: &identity };
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
    let opened = match path {
        Some(path) => LatentFile::open(path),
        None => LatentFile::from_bytes(Arc::new(demo::clip()), demo::CLIP_NAME),
    };
    opened.map_err(failed)
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

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kinds = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds.map(std::io::Error::kind).any(|kind| kind == std::io::ErrorKind::BrokenPipe)
}

/// Latents that fit a VAE, and what will become of them.
struct Clip {
    latents: LatentFile,
    statistics: Option<Statistics>,
    kind: LatentKind,
    options: DecodeOptions,
    plan: ClipPlan,
    bytes: u64,
    frames: usize,
    height: usize,
    width: usize,
    fps: FrameRate,
}

impl Clip {
    fn new(args: &DecodeArgs, latents: LatentFile, vae: &Vae<'_>) -> anyhow::Result<Self> {
        let architecture = vae.architecture();
        let (channels, count, height, width) = latents.extents();
        if architecture.decoder.is_none() {
            return Err(failed(Error::Missing { part: "decoder" }));
        }
        if channels != architecture.z_dim {
            return Err(failed(Error::Channels { got: channels, expected: architecture.z_dim }));
        }
        vae.check_colours(architecture.out_channels())?;
        let statistics = vae.checkpoint().statistics.clone();
        if args.latents_kind == LatentKind::Normalized && statistics.is_none() {
            return Err(anyhow!(
                "--latents normalized: mean and standard deviation of the latents are not known for this vae, expected \
                 a config.json beside its weights"
            ));
        }
        let options = DecodeOptions::default().with_max_bytes(vae.max_bytes()).with_tiling(args.vae.tiling.0);
        let extents = (count, height, width);
        let plan = memory::decode_plan(architecture, vae.precision(), extents, &options);
        let plan = plan.map_err(|error| vae.explain(error))?;
        let bytes = ClipMemory::decode(architecture, vae.precision(), extents, plan).total();
        let fps = match args.fps {
            Some(fps) => fps,
            None => FrameRate::new(if vae.is_wan22() { 24 } else { 16 }, 1)?,
        };
        let factor = architecture.spatial_factor();
        Ok(Self {
            statistics,
            kind: args.latents_kind,
            options,
            plan,
            bytes,
            frames: architecture.frames(count),
            height: height * factor,
            width: width * factor,
            fps,
            latents,
        })
    }

    fn begin(&self, path: &Path, format: Format) -> anyhow::Result<Pictures> {
        Pictures::create(path, format, (self.frames, self.width, self.height), self.fps)
    }

    /// Compares statistics of the latents with those of the kind that they are said to be.
    fn warn_of_kind(&self, args: &DecodeArgs) -> anyhow::Result<()> {
        let Some(statistics) = &self.statistics else { return Ok(()) };
        let looks = likeness(&self.latents.sample().map_err(failed)?, statistics).map_err(failed)?.kind();
        let (said, looks) = match (self.kind, looks) {
            (LatentKind::Raw, Some(Kind::Normalized)) => ("raw", "normalized"),
            (LatentKind::Normalized, Some(Kind::Raw)) => ("normalized", "raw"),
            _ => return Ok(()),
        };
        args.run.say(&format!(
            "warning: the latents are decoded as {said} ones but look like {looks} ones of this vae; if the colours are \
             wrong, try --latents {looks}"
        ));
        Ok(())
    }

    fn summary(&self, vae: &Vae<'_>) -> String {
        format!(
            "{}: {} of {}x{} at {} a second with the {}, {}, about {}",
            self.latents.name(),
            count(self.frames, "frame"),
            self.width,
            self.height,
            self.fps,
            vae.title(),
            plan(self.plan),
            terminal::bytes(self.bytes),
        )
    }

    fn decode(&self, vae: &WanVae, progress: &Progress, pictures: &mut Pictures) -> anyhow::Result<()> {
        let (_, count, height, width) = self.latents.extents();
        let mut fetch = |range: std::ops::Range<usize>| {
            let latents = self.latents.frames(range.start, range.len())?;
            match self.kind {
                LatentKind::Raw => RawLatents::new(latents),
                LatentKind::Normalized => vae.denormalize(&NormalizedLatents::new(latents)?),
            }
        };
        let mut write = |frames: HostFrames| {
            for picture in frames::pictures(&frames).map_err(|error| caller("cannot read the frames", error))? {
                pictures.write(picture).map_err(|error| caller("cannot write the video", error))?;
            }
            Ok(())
        };
        let extents = (count, height, width);
        vae.decode_stream_rgb8(extents, &mut fetch, &self.options, progress, &mut write).map_err(failed)
    }
}
