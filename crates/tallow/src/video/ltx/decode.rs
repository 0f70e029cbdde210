//! Latents of an LTX VAE.

use anyhow::Context;
use candle_core::Tensor;
use ltx::{
    ConvVae, DiffusionDecoder, HostFrames, LtxFiles,
    conv_vae::ConvDecodeOptions,
    diffusion_decoder::{BlendedTiles, DecodeOptions, LatentScale, Noise, Tiling},
};
use media::FrameRate;
use policy::Observer;
use sampling::NoiseGenerator;
use wan_vae::{Statistics, latent_files::LatentFile};

use super::{
    super::{
        decode::{Clip, Decoder, Frames, kind_of, write},
        picture::Pictures,
    },
    Place, Terms, caller, check_colours, failed, name,
    network::Network,
};
use crate::{
    cli::{DecodeArgs, LatentKind},
    execution::Watch,
    failure::Failure,
    progress::Progress,
    terminal,
};

/// Latents and their decoder.
pub(in crate::video) struct LtxClip<'a> {
    place: Place<'a>,
    network: Network,
    frames: Frames,
    /// An estimate of the memory that it takes, if there is one.
    bytes: Option<u64>,
    work: Work,
}

/// What is to be decoded, and how.
struct Work {
    latents: LatentFile,
    kind: LatentKind,
    seed: u64,
    generator: NoiseGenerator,
    tiles: Option<BlendedTiles>,
    terms: Terms,
}

impl<'a> LtxClip<'a> {
    /// Chooses the decoder, and checks that the latents fit it.
    ///
    /// # Errors
    /// If they do not, if there is no such decoder, or if it cannot work as it was asked to.
    pub(in crate::video) fn new(args: &'a DecodeArgs, latents: LatentFile, files: LtxFiles) -> Result<Self, Failure> {
        let place = Place::open(&args.vae)?;
        let network = Network::choose(files, args.decoder)?;
        network.check()?;
        let tiles = network.tiles(args.vae.tiling).map_err(Failure::Usage)?;
        network.check_tiles(tiles)?;
        let frames = frames(args, &latents, &network)?;
        let terms = place.terms(network.source())?;
        let bytes = match &network {
            Network::Conv(checkpoint) if tiles.is_none() => {
                let (_, count, rows, columns) = latents.extents();
                let memory = checkpoint.decode_memory(&place.options, [1, count, rows, columns], terms.limit.bytes);
                Some(memory.map_err(|error| terms.failed(error))?.total())
            }
            _ => None,
        };
        check_limit(&network, &place, &terms, &latents, tiles)?;
        let work = Work {
            kind: kind_of(args, &latents, LatentKind::Normalized),
            latents,
            seed: args.seed.unwrap_or(0),
            generator: args.rng.unwrap_or_default(),
            tiles,
            terms,
        };
        Ok(Self { place, network, frames, bytes, work })
    }
}

/// Holds the least that a diffusion decoder needs to the limit of memory.
///
/// # Errors
/// If it is more.
fn check_limit(
    network: &Network,
    place: &Place,
    terms: &Terms,
    latents: &LatentFile,
    tiles: Option<BlendedTiles>,
) -> anyhow::Result<()> {
    let (Network::Diffusion(config, component), Some(max_bytes)) = (network, terms.limit.bytes) else { return Ok(()) };
    let (channels, count, rows, columns) = latents.extents();
    let extents = [1, channels, count, rows, columns];
    let options = DecodeOptions::default().with_tiling(tiles.map_or(Tiling::Whole, Tiling::Blended));
    let needed = DiffusionDecoder::least_memory(config, &*component.source, &place.options, &extents, &options);
    match needed.map_err(|error| terms.failed(error))? {
        needed if needed > max_bytes => Err(terms.failed(ltx::Error::Memory { what: "decoding", needed, max_bytes })),
        _ => Ok(()),
    }
}

/// The frames of latents.
///
/// # Errors
/// If they are not the network's.
fn frames(args: &DecodeArgs, latents: &LatentFile, network: &Network) -> anyhow::Result<Frames> {
    let (channels, count, rows, columns) = latents.extents();
    let expected = network.latent_channels();
    if channels != expected {
        // With the name of the VAE that these latents are for.
        return Err(wan_vae::Error::Channels { got: channels, expected }.into());
    }
    check_colours(network.colours())?;
    let [time, vertical, horizontal] = network.pixels_per_latent();
    let frames =
        || Some((time.checked_mul(count - 1)? + 1, rows.checked_mul(vertical)?, columns.checked_mul(horizontal)?));
    let (count, height, width) = frames().context("the latents stand for more pixels than can be counted")?;
    let rate = match args.fps {
        Some(rate) => rate,
        None => FrameRate::new(24, 1)?,
    };
    Ok(Frames { count, width, height, rate })
}

impl Clip for LtxClip<'_> {
    fn latents(&self) -> &LatentFile {
        &self.work.latents
    }

    fn kind(&self) -> LatentKind {
        self.work.kind
    }

    fn statistics(&self) -> anyhow::Result<Option<Statistics>> {
        let [mean, std] =
            self.network.statistics()?.map(|values| values.into_iter().map(f64::from).collect::<Vec<_>>());
        Ok(Some(Statistics::new(&mean, &std)?))
    }

    fn vae_name(&self) -> String {
        name(self.network.source(), self.network.name())
    }

    fn frames(&self) -> Frames {
        self.frames
    }

    fn how(&self) -> String {
        let dtype = self.work.terms.dtype.as_str();
        let about = self.bytes.map_or_else(String::new, |bytes| format!(", about {}", terminal::bytes(bytes)));
        format!("{}, {dtype}{about}", self.vae_name())
    }

    fn noise(&self) -> Option<(u64, NoiseGenerator)> {
        self.network.uses_noise().then_some((self.work.seed, self.work.generator))
    }

    fn check_values(&self) -> anyhow::Result<()> {
        // No copies with damaged values are known.
        Ok(())
    }

    fn load(self: Box<Self>) -> anyhow::Result<(Box<dyn Decoder>, Watch)> {
        let Self { place, network, work, .. } = *self;
        let watch = place.watch(network.source(), work.terms.dtype)?;
        let model = match network {
            Network::Conv(checkpoint) => {
                Model::Conv(ConvVae::from_checkpoint(checkpoint, &place.options).map_err(failed)?)
            }
            Network::Diffusion(config, component) => {
                let decoder = DiffusionDecoder::load(&config, component.source, &place.options);
                Model::Diffusion(Box::new(decoder.map_err(failed)?))
            }
        };
        Ok((Box::new(Decoding { device: place.options.device, model, work }), watch))
    }
}

/// A network with its weights.
enum Model {
    Conv(ConvVae),
    Diffusion(Box<DiffusionDecoder>),
}

/// The work with the network that does it.
struct Decoding {
    device: candle_core::Device,
    model: Model,
    work: Work,
}

impl Decoding {
    fn latents(&self) -> anyhow::Result<Tensor> {
        let latents = self.work.latents.all()?;
        latents.unsqueeze(0).and_then(|x| x.to_device(&self.device)).context("cannot take the latents to their device")
    }

    fn run(
        &self,
        latents: &Tensor,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(HostFrames) -> ltx::Result<()>,
    ) -> ltx::Result<()> {
        let Work { kind, seed, generator, tiles, terms, .. } = &self.work;
        match &self.model {
            Model::Conv(vae) => {
                let normalized = match kind {
                    LatentKind::Raw => vae.statistics().normalize(latents)?,
                    LatentKind::Normalized => latents.clone(),
                };
                let options = ConvDecodeOptions::default().with_seed(*seed).with_rng(*generator).with_tiles(*tiles);
                vae.decode_rgb8(&normalized, &options.with_max_bytes(terms.limit.bytes), observer, sink)
            }
            Model::Diffusion(decoder) => {
                let scale = match kind {
                    LatentKind::Raw => LatentScale::Raw,
                    LatentKind::Normalized => LatentScale::Normalised,
                };
                let options = DecodeOptions::default()
                    .with_noise(Noise::Seed { seed: *seed, generator: *generator })
                    .with_latents(scale)
                    .with_tiling(tiles.map_or(Tiling::Whole, Tiling::Blended))
                    .with_max_bytes(terms.limit.bytes);
                decoder.decode_rgb8(latents, &options, observer, sink)
            }
        }
    }
}

impl Decoder for Decoding {
    fn decode(&self, progress: &Progress, pictures: &mut Pictures) -> anyhow::Result<()> {
        let mut sink =
            |frames: HostFrames| write(pictures, &frames).map_err(|error| caller("cannot write the video", error));
        self.run(&self.latents()?, progress, &mut sink).map_err(|error| self.work.terms.failed(error))
    }
}
