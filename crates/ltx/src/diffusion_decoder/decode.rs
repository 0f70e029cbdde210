//! From latents to pixels.

use std::{cell::Cell, ops::Range};

use candle_core::{D, DType, Tensor};
use candle_fork::{
    What,
    layout::{contiguous, copy_into},
    rms_norm,
};
use policy::{Event, Observer};
use weights::TensorSource;

use super::{
    DecodeMemory, DecodeOptions, DiffusionDecoder, DiffusionDecoderConfig, LatentScale, OutputType, Stage, Tiling,
    block::{BlockModulation, DiffusionBlock, EPS, Place},
    memory,
    rope::RopeTable,
    short_clips::Growth,
    shuffle::{FirstFrame, patchify, tokens, unpatchify},
    tiles::{Cells, Tiles},
    timestep::timesteps,
    weight_bytes,
};
use crate::{
    error::{Error, Result, shape},
    options::LoadOptions,
};

/// Tokens `[B, T H W, C]` with their grid.
#[derive(Debug, Clone)]
struct Volume {
    x: Tensor,
    grid: [usize; 3],
}

impl Volume {
    /// The tokens of a box.
    fn crop(&self, cells: &Cells) -> Result<Self> {
        let [t, h, w] = self.grid;
        let crop = || {
            let (batch, _, channels) = self.x.dims3()?;
            let all = self.x.reshape((batch, t, h, w, channels))?;
            (0..3).try_fold(all, |x, axis| x.narrow(axis + 1, cells[axis].start, cells[axis].len()))
        };
        let part = contiguous(&crop().what("tokens of a tile")?)?;
        let x = part.flatten(1, 3).what("tokens of a tile")?;
        Ok(Self { x, grid: cells.each_ref().map(ExactSizeIterator::len) })
    }
}

/// Which part of a clip a run of frames is.
struct Part {
    first: FirstFrame,
    /// Whether the ghost frames follow.
    ends: bool,
}

/// A decode under way: what to tell the observer.
struct Run<'a> {
    decoder: &'a DiffusionDecoder,
    observer: &'a dyn Observer,
    scratch_bytes: u64,
    /// The timesteps, and the modulation of every block at each.
    steps: Vec<(f32, Vec<BlockModulation>)>,
    done: Cell<usize>,
    total: usize,
}

impl DiffusionDecoder {
    /// The clip `(B, 3, F, H, W)` in about -1..=1 of `latents` `(B, C, T, H', W')`, in the dtype of the activations:
    /// F = 8 (T - 1) + 1 frames of 32 H' rows and 32 W' columns with the published configuration.
    ///
    /// The observer receives [`Event::Progress`] in units of blocks, and can stop the run between two.
    ///
    /// **Memory**: [`DiffusionDecoder::decode_memory`], and [`DecodeOptions::scratch_bytes`] for what a block computes of some
    /// frames: with [`DecodeOptions::max_bytes`] what these leave. In bf16 on a Hopper device tokens change where they lie, in
    /// two passes a block; elsewhere ops follow one another, with twice the memory.
    ///
    /// # Errors
    /// [`Error::Shape`] if the latents or the given noise do not fit; [`Error::Argument`] for tiles or steps that are not
    /// possible; [`Error::Memory`] if `max_bytes` are not enough; [`Error::NonFiniteInput`] if the latents hold NaN or
    /// infinity; [`Error::NonFinite`] if the pixels do; [`Error::Cancelled`]; [`Error::Op`].
    pub fn decode(&self, latents: &Tensor, options: &DecodeOptions, observer: &dyn Observer) -> Result<Tensor> {
        let _backends = self.backends.enter();
        let config = &self.config;
        let (batch, extents) = match *latents.dims() {
            [batch, channels, t, h, w] if channels == config.in_channels && batch * t * h * w > 0 => (batch, [t, h, w]),
            _ => return Err(shape("latents", latents, format!("[B, {}, T, H, W]", config.in_channels))),
        };
        let growth = Growth::new(options.short_clips, config, extents);
        let grown = growth.grown();
        let tiles = match options.tiling {
            Tiling::Whole => None,
            Tiling::Blended(tiles) => Tiles::new(config, tiles, grown)?,
        };
        let steps = options.steps(config.num_inference_steps)?;
        let canvas = canvas(config, batch, grown);
        options.noise.check(canvas)?;
        let scratch_bytes = match options.max_bytes {
            None => options.scratch_bytes,
            Some(max_bytes) => self.decode_memory(latents.dims(), options)?.scratch(max_bytes)?,
        };
        let latents = latents.to_device(&self.device).and_then(|x| x.to_dtype(DType::F32)).what("latents")?;
        check_finite(&latents, || Error::NonFiniteInput { what: "latents" })?;

        let latents = match options.latents {
            LatentScale::Normalised => {
                let [mean, std] = &self.statistics;
                latents.broadcast_mul(std).and_then(|x| x.broadcast_add(mean)).what("statistics of the latents")?
            }
            LatentScale::Raw => latents,
        };
        let latents = growth.grow(&latents)?.to_dtype(self.dtype).what("latents")?;
        let run = Run::new(self, scratch_bytes, steps, tiles.as_ref().map_or(1, Tiles::len), observer)?;
        let features = run.features(&latents)?;
        // Where the host draws it, it does so while a device makes the context.
        let noise = || options.noise.canvas(canvas, self.dtype, &self.device);
        let pixels = match &tiles {
            None => {
                let context = run.context(features, &Part { first: FirstFrame::Drop, ends: true })?;
                run.denoise(context, noise()?)?
            }
            Some(tiles) => {
                let noise = noise()?;
                tiles.blend(&mut |cells| run.tile(tiles, cells, &features, &noise))?
            }
        };
        let pixels = growth.cut(&pixels, config.compression())?;
        check_finite(&pixels, || Error::NonFinite { what: "pixels" })?;
        Ok(pixels)
    }

    /// What a decode of `latents` `[B, C, T, H', W']` takes with these options, which decide what is decoded at a time.
    ///
    /// # Errors
    /// [`Error::Shape`] if these are no latents; [`Error::Argument`] for tiles that are not possible.
    pub fn decode_memory(&self, latents: &[usize], options: &DecodeOptions) -> Result<DecodeMemory> {
        let in_place = self.blocks.iter().all(DiffusionBlock::is_in_place);
        memory_of(&self.config, (self.dtype, self.weight_bytes, in_place), latents, options)
    }

    /// The least that [`DiffusionDecoder::decode_memory`] will say of a decoder of `source`, without loading it.
    ///
    /// # Errors
    /// Those of [`DiffusionDecoder::decode_memory`] and [`LoadOptions::activations`].
    pub fn least_memory(
        config: &DiffusionDecoderConfig,
        source: &dyn TensorSource,
        load: &LoadOptions,
        latents: &[usize],
        options: &DecodeOptions,
    ) -> Result<u64> {
        let dtype = load.activations(source)?;
        let weights = weight_bytes(&Self::expected(config, source), dtype);
        // Whether blocks work in place shows when they are loaded.
        let least = |in_place| Ok::<_, Error>(memory_of(config, (dtype, weights, in_place), latents, options)?.least());
        Ok(least(true)?.min(least(false)?))
    }
}

/// Shape of the pixels of latents of so many (T, H, W).
fn canvas(config: &DiffusionDecoderConfig, batch: usize, latents: [usize; 3]) -> [usize; 5] {
    let [t, h, w] = config.grid(config.deterministic(), latents);
    [batch, config.out_channels, t, h * config.patch_size, w * config.patch_size]
}

/// Memory of a decoder in a dtype, with so many bytes of weights, whose blocks work in place or op by op.
fn memory_of(
    config: &DiffusionDecoderConfig,
    (dtype, weights, in_place): (DType, u64, bool),
    latents: &[usize],
    options: &DecodeOptions,
) -> Result<DecodeMemory> {
    let &[batch, _, t, h, w] = latents else {
        let expected = format!("[B, {}, T, H, W]", config.in_channels);
        return Err(Error::Shape { what: "latents", got: latents.to_vec(), expected });
    };
    let grown = Growth::new(options.short_clips, config, [t, h, w]).grown();
    let tiles = match options.tiling {
        Tiling::Whole => None,
        Tiling::Blended(tiles) => Tiles::new(config, tiles, grown)?,
    };
    let pixels: usize = canvas(config, batch, grown).iter().product();
    let (grid, canvases) = match &tiles {
        None => (config.grid(config.deterministic(), grown), 1),
        // The noise, and pixels that are ready or fade into one another.
        Some(tiles) => (tiles.largest(config), 3),
    };
    Ok(memory::of(config, dtype, weights, batch, grid, canvases * pixels, in_place))
}

impl<'a> Run<'a> {
    fn new(
        decoder: &'a DiffusionDecoder,
        scratch_bytes: u64,
        steps: usize,
        tiles: usize,
        observer: &'a dyn Observer,
    ) -> Result<Self> {
        let blocks = decoder.blocks.as_slice();
        let modulations = |t: f32| Ok((t, decoder.timestep.modulations(t, blocks, &decoder.device)?));
        let once: usize = decoder.stages.split_last().map_or(0, |(_, rest)| rest.iter().map(|s| s.blocks.len()).sum());
        let per_tile = decoder.stages.last().map_or(0, |stage| stage.blocks.len()) + steps * blocks.len();
        Ok(Self {
            decoder,
            observer,
            scratch_bytes,
            steps: timesteps(steps).into_iter().map(modulations).collect::<Result<_>>()?,
            done: Cell::new(0),
            total: once + tiles * per_tile,
        })
    }

    fn tick(&self) -> Result<()> {
        self.done.set(self.done.get() + 1);
        Ok(self.observer.notify(Event::Progress { done: self.done.get(), total: self.total })?)
    }

    /// The blocks of a stage.
    fn blocks_of(&self, stage: &Stage, Volume { mut x, grid }: Volume) -> Result<Volume> {
        let rope = RopeTable::new(self.decoder.config.head_dim, grid, x.device());
        let place = Place { grid, rope: &rope, scratch_bytes: self.scratch_bytes };
        for block in &stage.blocks {
            x = block.forward(x, &place)?;
            self.tick()?;
        }
        Ok(Volume { x, grid })
    }

    /// The upsample behind them.
    fn upsample(&self, stage: &Stage, volume: &Volume, first: FirstFrame) -> Result<Volume> {
        let (x, grid) = stage.upsample.forward(&volume.x, volume.grid, first, self.scratch_bytes)?;
        Ok(Volume { x, grid })
    }

    /// What enters the last deterministic stage, the ghost frames behind the others.
    fn features(&self, latents: &Tensor) -> Result<Volume> {
        let latents = latents.pad_with_same(2, 0, self.decoder.config.ghost_frames()).what("ghost frames")?;
        let (_, _, t, h, w) = latents.dims5().what("latents")?;
        let mut volume = Volume { x: self.decoder.latents_in.forward(&tokens(&latents)?)?, grid: [t, h, w] };
        for stage in self.decoder.stages.iter().rev().skip(1).rev() {
            volume = self.upsample(stage, &self.blocks_of(stage, volume)?, FirstFrame::Drop)?;
        }
        Ok(volume)
    }

    /// The context of some frames: the last deterministic stage, without the ghost frames.
    fn context(&self, features: Volume, part: &Part) -> Result<Volume> {
        let config = &self.decoder.config;
        let Some(last) = self.decoder.stages.last() else {
            return Ok(features);
        };
        let features = self.blocks_of(last, features)?;
        let ghosts =
            if part.ends { config.ghost_frames() * config.compression()[0] / last.upsample.stride[0] } else { 0 };
        let [t, h, w] = features.grid;
        self.upsample(last, &features.crop(&[0..t.saturating_sub(ghosts), 0..h, 0..w])?, part.first)
    }

    /// The pixels of a tile.
    fn tile(&self, tiles: &Tiles, cells: &Cells, features: &Volume, noise: &Tensor) -> Result<Tensor> {
        let [t, h, w] = cells;
        let ends = tiles.along[0].last().is_some_and(|last| last.end == t.end);
        // Every tile that reaches the end takes the ghost frames along.
        let frames: Range<usize> = t.start..if ends { features.grid[0] } else { t.end };
        let first = if t.start == 0 { FirstFrame::Drop } else { FirstFrame::Keep };
        let features = features.crop(&[frames, h.clone(), w.clone()])?;
        let context = self.context(features, &Part { first, ends })?;
        let noise = (0..3).try_fold(noise.clone(), |x, axis| {
            let pixels = tiles.pixels(axis, &cells[axis]);
            x.narrow(axis + 2, pixels.start, pixels.len())
        });
        self.denoise(context, contiguous(&noise.what("noise of a tile")?)?)
    }

    /// Pixels from `noise` of their shape. Owns both, so that neither is kept longer than it is needed.
    fn denoise(&self, context: Volume, noise: Tensor) -> Result<Tensor> {
        let config = &self.decoder.config;
        let rope = RopeTable::new(config.head_dim, context.grid, noise.device());
        let place = Place { grid: context.grid, rope: &rope, scratch_bytes: self.scratch_bytes };
        if let ([(_, modulations)], OutputType::X0) = (self.steps.as_slice(), config.model_output_type) {
            let x = self.tokens(&context, noise, modulations, &place)?;
            drop(context);
            return self.pixels(x, &place);
        }
        let mut x = noise;
        for (i, (t, modulations)) in self.steps.iter().enumerate() {
            let next = self.steps.get(i + 1).map_or(0.0, |(next, _)| *next);
            let prediction = self.pixels(self.tokens(&context, x.clone(), modulations, &place)?, &place)?;
            x = euler(&x, &prediction, *t, next, config.model_output_type).what("step")?;
        }
        Ok(x)
    }

    /// Noised pixels as tokens, behind all blocks.
    fn tokens(
        &self,
        context: &Volume,
        pixels: Tensor,
        modulations: &[BlockModulation],
        place: &Place<'_>,
    ) -> Result<Tensor> {
        let decoder = self.decoder;
        let patches = patchify(&pixels, decoder.config.patch_size)?;
        drop(pixels);
        let mut x = decoder.pixels_in.forward(&patches)?;
        drop(patches);
        for (block, modulation) in decoder.blocks.iter().zip(modulations) {
            x = block.forward(x, &context.x, modulation, place)?;
            self.tick()?;
        }
        Ok(x)
    }

    /// What the network predicts, from the tokens behind its blocks, in runs of tokens.
    fn pixels(&self, x: Tensor, place: &Place<'_>) -> Result<Tensor> {
        let decoder = self.decoder;
        let (batch, tokens, channels) = x.dims3().what("tokens")?;
        let flat = x.flatten(0, 1).what("tokens")?;
        let width = decoder.pixels_out.weight.out_features();
        let most = place.rows((channels + width) * x.dtype().size_in_bytes());
        let patches = Tensor::zeros((batch * tokens, width), x.dtype(), x.device()).what("patches of pixels")?;
        for first in (0..batch * tokens).step_by(most) {
            let run = |t: &Tensor| t.narrow(0, first, most.min(batch * tokens - first)).what("tokens of a run");
            let normed = rms_norm(&run(&flat)?, &decoder.norm_out, EPS)?;
            copy_into(&decoder.pixels_out.forward(&normed)?, &run(&patches)?)?;
        }
        drop((x, flat));
        let patches = patches.reshape((batch, tokens, width)).what("patches of pixels")?;
        unpatchify(&patches, place.grid, decoder.config.patch_size)
    }
}

/// A step of the flow from `t` to `next`, in f32.
fn euler(x: &Tensor, prediction: &Tensor, t: f32, next: f32, kind: OutputType) -> candle_core::Result<Tensor> {
    let (wide, prediction) = (x.to_dtype(DType::F32)?, prediction.to_dtype(DType::F32)?);
    let velocity = match kind {
        OutputType::V => prediction,
        OutputType::X0 => ((&wide - prediction)? / f64::from(t))?,
    };
    (wide - (velocity * f64::from(t - next))?)?.to_dtype(x.dtype())
}

/// Fails if an element is NaN or infinite: such a one makes the sum so. Rows first, since a device gives each sum to one block.
fn check_finite(x: &Tensor, error: impl Fn() -> Error) -> Result<()> {
    let sum = || x.affine(0.0, 0.0)?.sum(D::Minus1)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>();
    if sum().what("finite values")? == 0.0 { Ok(()) } else { Err(error()) }
}
