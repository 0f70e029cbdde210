//! A video for an LTX VAE.

use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use ltx::{
    ConvVae, Error, LtxFiles,
    conv_vae::{Checkpoint, ConvEncodeOptions},
    diffusion_decoder::BlendedTiles,
};
use policy::{CancelToken, Event, Observer as _};

use super::{
    super::{
        encode::{Clip, Encoded, Encoder, Video, check_frames, next_frame},
        latents::LatentWriter,
    },
    Place, Terms, check_colours, failed, name,
    network::{CONV_TILES, check_tiles, tiles},
};
use crate::{
    cli::{EncodeArgs, FramePolicy},
    execution::Watch,
    failure::Failure,
    progress::Progress,
    terminal,
};

/// An encoder whose tensors are all there.
pub(in crate::video) struct LtxEncoder<'a> {
    place: Place<'a>,
    checkpoint: Checkpoint,
    tiles: Option<BlendedTiles>,
    /// Frames, rows and columns of pixels for a latent.
    factors: [usize; 3],
}

impl<'a> LtxEncoder<'a> {
    /// Opens the device and the encoder of the networks at hand.
    ///
    /// # Errors
    /// If there is none; a device that this build or machine does not have.
    pub(in crate::video) fn new(args: &'a EncodeArgs, files: LtxFiles) -> Result<Self, Failure> {
        let tiles = tiles(args.vae.tiling, CONV_TILES).map_err(Failure::Usage)?;
        let place = Place::open(&args.vae)?;
        let checkpoint = files.vae.map(Checkpoint::new).transpose().map_err(failed)?;
        let found = checkpoint.and_then(|checkpoint| {
            let side = checkpoint.architecture.patch_size;
            let [t, h, w] = checkpoint.architecture.encoder.as_ref()?.factors();
            Some((checkpoint, [t, h * side, w * side]))
        });
        let (mut checkpoint, factors) = found.context("the vae has no encoder")?;
        check_tiles(tiles, factors)?;
        // What is not needed is not read.
        checkpoint.architecture.decoder = None;
        checkpoint.check().map_err(failed)?;
        check_colours(checkpoint.architecture.channels)?;
        Ok(Self { place, checkpoint, tiles, factors })
    }

    /// Opens the video, and checks that it fits.
    ///
    /// # Errors
    /// If it does not; an interruption.
    pub(in crate::video) fn open(self, args: &EncodeArgs, stop: &CancelToken) -> Result<LtxClip<'a>, Failure> {
        let [group, side, _] = self.factors;
        let video = Video::open(args, side, group, stop)?;
        let (height, width) = (video.reader.height(), video.reader.width());
        let terms = self.place.terms(&*self.checkpoint.source)?;
        let memory = video.frames.filter(|_| self.tiles.is_none()).map(|frames| {
            let extents = [1, frames, height, width];
            let memory = self.checkpoint.encode_memory(&self.place.options, extents, terms.limit.bytes);
            memory.map_err(|error| terms.failed(error))
        });
        let bytes = memory.transpose()?.map(|memory| memory.total());
        Ok(LtxClip { video, terms, bytes, policy: args.frames, encoder: self })
    }
}

/// A video and its VAE.
pub(in crate::video) struct LtxClip<'a> {
    encoder: LtxEncoder<'a>,
    video: Video,
    terms: Terms,
    /// An estimate of the memory that it takes; unknown for standard input and for tiles.
    bytes: Option<u64>,
    policy: FramePolicy,
}

impl Clip for LtxClip<'_> {
    fn vae_name(&self) -> String {
        name(&*self.encoder.checkpoint.source, "conv VAE")
    }

    fn kind(&self) -> &'static str {
        "normalized"
    }

    fn latent_extents(&self) -> (usize, usize, usize) {
        let [_, vertical, horizontal] = self.encoder.factors;
        let channels = self.encoder.checkpoint.architecture.latent_channels;
        (channels, self.video.reader.height() / vertical, self.video.reader.width() / horizontal)
    }

    fn video(&self) -> &Video {
        &self.video
    }

    fn how(&self) -> String {
        let dtype = self.terms.dtype.as_str();
        let about = self.bytes.map_or_else(String::new, |bytes| format!(", about {}", terminal::bytes(bytes)));
        format!("{}, {dtype}{about}", self.vae_name())
    }

    fn check_values(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn load(self: Box<Self>) -> anyhow::Result<(Box<dyn Encoder>, Watch)> {
        let Self {
            encoder: LtxEncoder { place, checkpoint, tiles, factors: [group, ..] }, video, terms, policy, ..
        } = *self;
        let watch = place.watch(&*checkpoint.source, terms.dtype)?;
        let vae = ConvVae::from_checkpoint(checkpoint, &place.options).map_err(failed)?;
        let options = ConvEncodeOptions::default().with_max_bytes(terms.limit.bytes).with_tiles(tiles);
        Ok((Box::new(Encoding { vae, options, device: place.options.device, terms, group, video, policy }), watch))
    }
}

/// The video with the network that encodes it, all frames at once.
struct Encoding {
    vae: ConvVae,
    options: ConvEncodeOptions,
    device: Device,
    terms: Terms,
    group: usize,
    video: Video,
    policy: FramePolicy,
}

impl Encoding {
    /// The frames of the video, `[3, 1, H, W]` each.
    ///
    /// # Errors
    /// If they cannot be read, or are more than the limit of memory holds; if the observer ends the run.
    fn frames(&mut self, progress: &Progress) -> anyhow::Result<Vec<Tensor>> {
        let (height, width) = (self.video.reader.height(), self.video.reader.width());
        let one = self.vae.encode_memory([1, 1, height, width], Some(1));
        let mut frames = Vec::new();
        progress.notify(Event::Stage { name: "read frames" })?;
        while let Some(frame) = next_frame(&mut self.video.reader) {
            frames.push(frame?);
            let done = frames.len();
            progress.notify(Event::Progress { done, total: self.video.frames.unwrap_or(done) })?;
            // Standard input may have no end.
            let needed = one.weights.saturating_add(one.frames.saturating_mul(done as u64));
            if let Some(max_bytes) = self.terms.limit.bytes.filter(|&limit| needed > limit) {
                return Err(self.terms.failed(Error::Memory { what: "encoding", needed, max_bytes }));
            }
        }
        Ok(frames)
    }
}

impl Encoder for Encoding {
    fn encode(mut self: Box<Self>, progress: &Progress, latents: &mut LatentWriter) -> anyhow::Result<Encoded> {
        let mut frames = self.frames(progress)?;
        let count = frames.len();
        let (trimmed, repeated) =
            fill(&mut frames, self.group, self.policy).with_context(|| self.video.name.clone())?;
        let clip = Tensor::cat(&frames, 1).and_then(|clip| clip.unsqueeze(0)?.to_device(&self.device));
        drop(frames);
        let clip = clip.context("cannot take the frames to their device")?;
        let made = self.vae.encode(&clip, &self.options, progress).map_err(|error| self.terms.failed(error))?;
        let made = made.squeeze(0).and_then(|made| made.to_dtype(DType::F32)).context("cannot read the latents")?;
        latents.write(&made)?;
        Ok(Encoded { frames: count, latents: made.dim(1)?, trimmed, repeated })
    }
}

/// Makes the number of frames one that latents stand for; gives how many were left out, and how many added.
///
/// # Errors
/// If there are none, or the policy is to refuse.
fn fill<T: Clone>(frames: &mut Vec<T>, group: usize, policy: FramePolicy) -> anyhow::Result<(usize, usize)> {
    let last = frames.last().cloned().context("the video has no frames")?;
    let over = (frames.len() - 1) % group;
    match policy {
        FramePolicy::Error => check_frames(frames.len(), group).map(|()| (0, 0)),
        _ if over == 0 => Ok((0, 0)),
        FramePolicy::Trim => {
            frames.truncate(frames.len() - over);
            Ok((over, 0))
        }
        FramePolicy::Pad => {
            frames.extend(std::iter::repeat_n(last, group - over));
            Ok((0, group - over))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clips_are_filled_or_cut_to_whole_groups() {
        let run = |count, policy| {
            let mut frames: Vec<usize> = (0..count).collect();
            fill(&mut frames, 8, policy).ok().map(|done| (done, frames.len(), frames.last().copied()))
        };
        for policy in [FramePolicy::Error, FramePolicy::Trim, FramePolicy::Pad] {
            assert_eq!(run(17, policy), Some(((0, 0), 17, Some(16))));
            assert_eq!(run(0, policy), None);
        }
        assert_eq!(run(20, FramePolicy::Error), None);
        assert_eq!(run(20, FramePolicy::Trim), Some(((3, 0), 17, Some(16))));
        assert_eq!(run(20, FramePolicy::Pad), Some(((0, 5), 25, Some(19))));
    }
}
