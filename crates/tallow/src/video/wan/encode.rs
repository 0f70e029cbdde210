//! A video for a VAE of the Wan family.

use candle_core::Tensor;
use media::VideoReader;
use policy::CancelToken;
use wan_vae::{ClipMemory, ClipPlan, EncodeOptions, Error, RawLatents, WanVae, memory};

use super::{
    super::{
        encode::{Clip, Encoded, Encoder, Video, next_frame},
        latents::LatentWriter,
    },
    Vae, caller, failed, plan,
};
use crate::{cli::EncodeArgs, execution::Watch, failure::Failure, progress::Progress, terminal};

/// A video and its VAE.
pub(in crate::video) struct WanClip<'a> {
    vae: Vae<'a>,
    video: Video,
    options: EncodeOptions,
    /// Unknown for standard input.
    plan: Option<(ClipPlan, u64)>,
}

impl<'a> WanClip<'a> {
    /// Checks that the video fits the VAE, and its work the memory.
    ///
    /// # Errors
    /// If they do not; an interruption.
    pub(in crate::video) fn open(args: &EncodeArgs, vae: Vae<'a>, stop: &CancelToken) -> Result<Self, Failure> {
        let architecture = vae.architecture();
        if architecture.encoder.is_none() {
            return Err(failed(Error::Missing { part: "encoder" }).into());
        }
        vae.check_colours(architecture.in_channels())?;
        let video = Video::open(args, architecture.encoder_spatial_factor(), architecture.temporal_factor(), stop)?;
        let options = EncodeOptions::default()
            .with_remainder(args.frames.remainder())
            .with_max_bytes(vae.max_bytes())
            .with_tiling(args.vae.tiling.wan());
        let mut plan = None;
        if let Some(frames) = video.frames {
            let extents = (frames, video.reader.height(), video.reader.width());
            let found = memory::encode_plan(architecture, vae.precision(), extents, &options);
            let found = found.map_err(|error| vae.explain(error))?;
            plan = Some((found, ClipMemory::encode(architecture, vae.precision(), extents, found).total()));
        }
        Ok(Self { vae, video, options, plan })
    }
}

impl Clip for WanClip<'_> {
    fn vae_name(&self) -> String {
        self.vae.name()
    }

    fn kind(&self) -> &'static str {
        "raw"
    }

    fn latent_extents(&self) -> (usize, usize, usize) {
        let architecture = self.vae.architecture();
        let factor = architecture.encoder_spatial_factor();
        (architecture.z_dim, self.video.reader.height() / factor, self.video.reader.width() / factor)
    }

    fn video(&self) -> &Video {
        &self.video
    }

    fn how(&self) -> String {
        match self.plan {
            Some((found, bytes)) => format!("{}, {}, about {}", self.vae.title(), plan(found), terminal::bytes(bytes)),
            None => self.vae.title(),
        }
    }

    fn check_values(&self) -> anyhow::Result<()> {
        self.vae.check_values()
    }

    fn load(self: Box<Self>) -> anyhow::Result<(Box<dyn Encoder>, Watch)> {
        let Self { vae, video, options, .. } = *self;
        let (vae, watch) = vae.load()?;
        Ok((Box::new(Encoding { vae, video, options }), watch))
    }
}

/// The video with the network that encodes it.
struct Encoding {
    vae: WanVae,
    video: Video,
    options: EncodeOptions,
}

impl Encoder for Encoding {
    fn encode(self: Box<Self>, progress: &Progress, latents: &mut LatentWriter) -> anyhow::Result<Encoded> {
        let Self { vae, video, options } = *self;
        let Video { name, reader, frames } = video;
        let mut frames = Frames { reader, left: frames };
        let mut write =
            |made: RawLatents| latents.write(made.tensor()).map_err(|error| caller("cannot write the latents", error));
        let encoded = vae.encode_clip(&mut frames, &options, progress, &mut write);
        let encoded = encoded.map_err(|error| match error {
            Error::Frames { .. } => failed(error).context(name),
            other => failed(other),
        })?;
        let wan_vae::EncodedClip { frames, latents, trimmed, repeated, .. } = encoded;
        Ok(Encoded { frames, latents, trimmed, repeated })
    }
}

/// The frames of a video as the encoder takes them.
struct Frames {
    reader: VideoReader,
    left: Option<usize>,
}

impl Iterator for Frames {
    type Item = wan_vae::Result<Tensor>;

    fn next(&mut self) -> Option<Self::Item> {
        let frame = next_frame(&mut self.reader)?;
        self.left = self.left.map(|left| left.saturating_sub(1));
        Some(frame.map_err(|error| caller("cannot read the video", error)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.unwrap_or(0), self.left)
    }
}
