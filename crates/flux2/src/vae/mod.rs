//! The VAE: between pictures and normalised packed latents.
//!
//! A picture of H x W pixels becomes latent cells at 1/8 of the resolution (with four levels), which are packed 2 x 2 into
//! tokens and normalised with the statistics in the checkpoint. The transformer sees only the last form. The reference is
//! huggingface/diffusers, `autoencoder_kl_flux2.py` and `pipeline_flux2_klein.py`.
//!
//! Blocks can be loaded and run alone: names below a block's prefix are those of the diffusers `state_dict`.

mod attention;
mod bands;
mod decoder;
mod encoder;
mod latents;
mod layers;
mod names;
mod resample;
mod resnet;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_fork::{
    What,
    frames::{PatchOrder, Rgb8Frames, frames_to_rgb8},
    nn::Conv2d,
};
use policy::{Backends, Event, Observer};
use weights::{Expected, TensorSource};

pub use self::{
    attention::MidAttention,
    bands::Bands,
    latents::{from_tokens, patchify, to_tokens, unpatchify},
    names::ignored,
    resample::{Downsample, Upsample},
    resnet::{Channels, Resnet},
};
use self::{bands::Height, decoder::Decoder, encoder::Encoder, latents::Statistics, layers::load_conv};
use crate::{
    config::VaeConfig,
    error::{Error, Result},
    layouts,
    options::LoadOptions,
};

/// Encoder and decoder of FLUX.2.
#[derive(Debug)]
pub struct Flux2Vae {
    config: VaeConfig,
    encoder: Encoder,
    quant_conv: Option<Conv2d>,
    post_quant_conv: Option<Conv2d>,
    decoder: Decoder,
    statistics: Statistics,
    dtype: DType,
    device: Device,
    backends: Backends,
}

impl Flux2Vae {
    /// Name and shape of every tensor that a checkpoint of `config` must hold, in the diffusers layout.
    ///
    /// `bn.num_batches_tracked`, which published files hold as well, is not needed.
    pub fn expected(config: &VaeConfig) -> Vec<Expected> {
        names::expected(config)
    }

    /// Checks the configuration and the plan, then takes the weights. Names of other layouts are understood
    /// ([`crate::layouts::vae`]).
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration describes no such model; [`Error::Weights`] if a tensor (the statistics of
    /// the latents included) is missing, has another shape, is unknown or holds non-finite values;
    /// [`Error::LatentVariance`] if a variance is negative.
    pub fn load(config: &VaeConfig, source: Arc<dyn TensorSource>, options: &LoadOptions) -> Result<Self> {
        config.validate()?;
        let source = layouts::vae(source)?;
        let plan = Self::expected(config);
        let mut loader = options.loader(source.clone(), &plan, names::ignored)?;
        // In f32 whatever the dtype of the activations is: they scale the latents, which are f32 as well.
        let statistics: Vec<_> = plan.into_iter().filter(|tensor| Statistics::NAMES.contains(&&*tensor.name)).collect();
        let exact = LoadOptions { dtype: DType::F32, ..options.clone() };
        let mut exact = exact.loader(source, &statistics, |_| true)?;
        for name in Statistics::NAMES {
            loader.tensor(name)?;
        }
        let quant_conv = if config.use_quant_conv { Some(load_conv(&mut loader, "quant_conv", 0)?) } else { None };
        let post_quant_conv =
            if config.use_post_quant_conv { Some(load_conv(&mut loader, "post_quant_conv", 0)?) } else { None };
        let vae = Self {
            encoder: Encoder::load(&mut loader, config, "encoder")?,
            quant_conv,
            post_quant_conv,
            decoder: Decoder::load(&mut loader, config, "decoder")?,
            statistics: Statistics::load(&mut exact, config.batch_norm_eps)?,
            config: config.clone(),
            dtype: options.dtype,
            device: options.device.clone(),
            backends: options.backends(),
        };
        loader.finish()?;
        Ok(vae)
    }

    /// The configuration that the model was loaded with.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// The picture `[B, 3, f h, f w]` f32, nominally in -1..=1 and not clamped, of normalised packed latents
    /// `[B, 4 c, h, w]`; f is [`VaeConfig::packed_factor`], 16 in the published models.
    ///
    /// Items of a batch are decoded one after another, which bounds the memory and gives each the bytes of a single run.
    /// The observer receives [`Event::Progress`] in units of residual blocks and can stop the decoding between them.
    ///
    /// # Errors
    /// [`Error::Shape`] if the latents have another rank or number of channels or are empty; [`Error::Cancelled`] if the
    /// observer stops the run.
    pub fn decode(&self, latents: &Tensor, observer: &dyn Observer) -> Result<Tensor> {
        self.decode_in(Bands::Whole, latents, observer)
    }

    /// [`Self::decode`] in bands, which takes less memory for large pictures. On this library's own convolutions the result
    /// has the same bits in half precision; cuDNN may choose other plans for bands.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_in(&self, bands: Bands, latents: &Tensor, observer: &dyn Observer) -> Result<Tensor> {
        self.decode_with(bands, latents, observer, |decoded| Ok(decoded.to_dtype(DType::F32).what("picture")?))
    }

    /// [`Self::decode`] of one item to bytes `[1, f h, f w, 3]` on the device of the VAE, rounded there; see
    /// [`frames_to_rgb8`].
    ///
    /// # Errors
    /// As [`Self::decode`]; [`Error::Shape`] if there are several items.
    pub fn decode_rgb8(&self, latents: &Tensor, observer: &dyn Observer) -> Result<Rgb8Frames> {
        self.decode_rgb8_in(Bands::Whole, latents, observer)
    }

    /// [`Self::decode_rgb8`] in bands, see [`Self::decode_in`].
    ///
    /// # Errors
    /// As [`Self::decode_rgb8`].
    pub fn decode_rgb8_in(&self, bands: Bands, latents: &Tensor, observer: &dyn Observer) -> Result<Rgb8Frames> {
        if latents.dims().first() != Some(&1) {
            let expected = format!("[1, {}, h, w]", self.config.packed_channels());
            return Err(shape("latents", latents, expected));
        }
        let mut frames = None;
        self.decode_with(bands, latents, observer, |decoded| {
            let frame = decoded.unsqueeze(2).what("picture as a frame")?;
            frames = Some(frames_to_rgb8(&frame, 1, PatchOrder::RowMajor)?);
            Ok(decoded)
        })?;
        frames.ok_or_else(|| shape("latents", latents, "one item".to_owned()))
    }

    /// Decodes items one after another; `finish` gets what the decoder leaves of each.
    fn decode_with(
        &self,
        bands: Bands,
        latents: &Tensor,
        observer: &dyn Observer,
        mut finish: impl FnMut(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let channels = self.config.packed_channels();
        let batch = match *latents.dims() {
            [b, c, h, w] if b * h * w > 0 && c == channels => b,
            _ => return Err(shape("latents", latents, format!("[B, {channels}, h, w]"))),
        };
        let _policy = self.backends.enter();
        let _span = tracing::debug_span!("vae.decode", shape = ?latents.dims(), dtype = ?self.dtype).entered();
        let total = batch * self.decoder.units();
        let mut done = 0;
        let mut unit_done = || {
            done += 1;
            Ok(observer.notify(Event::Progress { done, total })?)
        };
        self.each_item(latents, |item| {
            let mut x = self.statistics.denormalise(&item)?;
            x = unpatchify(&x, self.config.patch_size)?.to_dtype(self.dtype).what("latents")?;
            if let Some(conv) = &self.post_quant_conv {
                x = conv.forward(&x)?;
            }
            finish(self.decoder.forward(x, Height::of(bands), &mut unit_done)?)
        })
    }

    /// Normalised packed latents `[B, 4 c, H / f, W / f]` f32 of a picture `[B, 3, H, W]` in -1..=1: the mean of the
    /// encoder's distribution. f is [`VaeConfig::packed_factor`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the picture has another rank or number of channels, is empty, or f does not divide its sides.
    pub fn encode(&self, image: &Tensor) -> Result<Tensor> {
        let (channels, factor) = (self.config.in_channels, self.config.packed_factor());
        match *image.dims() {
            [b, c, h, w] if b * h * w > 0 && c == channels && h.is_multiple_of(factor) && w.is_multiple_of(factor) => {}
            _ => return Err(shape("picture", image, format!("[B, {channels}, {factor} h, {factor} w]"))),
        }
        let _policy = self.backends.enter();
        let _span = tracing::debug_span!("vae.encode", shape = ?image.dims(), dtype = ?self.dtype).entered();
        self.each_item(image, |item| {
            let mut x = self.encoder.forward(&item.to_dtype(self.dtype).what("picture")?)?;
            if let Some(conv) = &self.quant_conv {
                x = conv.forward(&x)?;
            }
            let mean = x.narrow(1, 0, self.config.latent_channels).what("mean of the latents")?;
            self.statistics.normalise(&patchify(&mean, self.config.patch_size)?)
        })
    }

    /// Applies `f` to each item of a batch, on the model's device.
    fn each_item(&self, x: &Tensor, mut f: impl FnMut(Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x = x.to_device(&self.device).what("input of the vae")?;
        let batch = x.dims()[0];
        if batch == 1 {
            return f(x);
        }
        let items: Vec<_> = (0..batch).map(|i| f(x.narrow(0, i, 1).what("item of a batch")?)).collect::<Result<_>>()?;
        Ok(Tensor::cat(&items, 0).what("batch")?)
    }
}

fn shape(what: &'static str, x: &Tensor, expected: String) -> Error {
    Error::Shape { what, got: x.dims().to_vec(), expected }
}
