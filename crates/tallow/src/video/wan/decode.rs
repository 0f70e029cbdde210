//! Latents of a VAE of the Wan family.

use anyhow::anyhow;
use media::FrameRate;
use sampling::NoiseGenerator;
use wan_vae::{
    ClipMemory, ClipPlan, DecodeOptions, Error, HostFrames, NormalizedLatents, RawLatents, Statistics, WanVae,
    latent_files::LatentFile, memory,
};

use super::{
    super::{
        decode::{Clip, Decoder, Frames, kind_of, write},
        picture::Pictures,
    },
    Vae, caller, failed, plan,
};
use crate::{
    cli::{DecodeArgs, LatentKind},
    execution::Watch,
    progress::Progress,
    terminal,
};

/// Latents and their VAE.
pub(in crate::video) struct WanClip<'a> {
    vae: Vae<'a>,
    work: Work,
    plan: ClipPlan,
    bytes: u64,
    frames: Frames,
}

/// What is to be decoded, and how.
struct Work {
    latents: LatentFile,
    kind: LatentKind,
    options: DecodeOptions,
}

impl<'a> WanClip<'a> {
    /// Checks that the latents fit the VAE, and its work the memory.
    ///
    /// # Errors
    /// If they do not.
    pub(in crate::video) fn new(args: &DecodeArgs, latents: LatentFile, vae: Vae<'a>) -> anyhow::Result<Self> {
        let architecture = vae.architecture();
        let (channels, count, height, width) = latents.extents();
        if architecture.decoder.is_none() {
            return Err(failed(Error::Missing { part: "decoder" }));
        }
        if channels != architecture.z_dim {
            return Err(failed(Error::Channels { got: channels, expected: architecture.z_dim }));
        }
        vae.check_colours(architecture.out_channels())?;
        let kind = kind_of(args, &latents, LatentKind::Raw);
        if kind == LatentKind::Normalized && vae.checkpoint().statistics.is_none() {
            return Err(anyhow!(
                "--latents normalized: mean and standard deviation of the latents are not known for this vae, expected \
                 a config.json beside its weights"
            ));
        }
        let options = DecodeOptions::default().with_max_bytes(vae.max_bytes()).with_tiling(args.vae.tiling.wan());
        let extents = (count, height, width);
        let plan = memory::decode_plan(architecture, vae.precision(), extents, &options);
        let plan = plan.map_err(|error| vae.explain(error))?;
        let bytes = ClipMemory::decode(architecture, vae.precision(), extents, plan).total();
        let rate = match args.fps {
            Some(rate) => rate,
            None => FrameRate::new(if vae.is_wan22() { 24 } else { 16 }, 1)?,
        };
        let factor = architecture.spatial_factor();
        let frames = Frames { count: architecture.frames(count), height: height * factor, width: width * factor, rate };
        Ok(Self { vae, work: Work { latents, kind, options }, plan, bytes, frames })
    }
}

impl Clip for WanClip<'_> {
    fn latents(&self) -> &LatentFile {
        &self.work.latents
    }

    fn kind(&self) -> LatentKind {
        self.work.kind
    }

    fn statistics(&self) -> anyhow::Result<Option<Statistics>> {
        Ok(self.vae.checkpoint().statistics.clone())
    }

    fn vae_name(&self) -> String {
        self.vae.name()
    }

    fn frames(&self) -> Frames {
        self.frames
    }

    fn how(&self) -> String {
        format!("{}, {}, about {}", self.vae.title(), plan(self.plan), terminal::bytes(self.bytes))
    }

    fn noise(&self) -> Option<(u64, NoiseGenerator)> {
        None
    }

    fn check_values(&self) -> anyhow::Result<()> {
        self.vae.check_values()
    }

    fn load(self: Box<Self>) -> anyhow::Result<(Box<dyn Decoder>, Watch)> {
        let (vae, watch) = self.vae.load()?;
        Ok((Box::new(Decoding { vae, work: self.work }), watch))
    }
}

/// The work with the network that does it.
struct Decoding {
    vae: WanVae,
    work: Work,
}

impl Decoder for Decoding {
    fn decode(&self, progress: &Progress, pictures: &mut Pictures) -> anyhow::Result<()> {
        let Work { latents, kind, options } = &self.work;
        let (_, count, height, width) = latents.extents();
        let mut fetch = |range: std::ops::Range<usize>| {
            let latents = latents.frames(range.start, range.len())?;
            match kind {
                LatentKind::Raw => RawLatents::new(latents),
                LatentKind::Normalized => self.vae.denormalize(&NormalizedLatents::new(latents)?),
            }
        };
        let mut sink =
            |frames: HostFrames| write(pictures, &frames).map_err(|error| caller("cannot write the video", error));
        let extents = (count, height, width);
        self.vae.decode_stream_rgb8(extents, &mut fetch, options, progress, &mut sink).map_err(failed)
    }
}
