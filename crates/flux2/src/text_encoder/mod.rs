//! The Qwen3 text encoder: hidden states of a few layers as prompt embeddings.

mod layer;
mod names;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_fork::{HostTensor, What};
use policy::{Event, Observer, Silent};
use weights::TensorSource;

pub use self::{
    layer::{DecoderLayer, RotaryTable},
    names::{expected, ignored, prefix},
};
use crate::{
    config::Qwen3Config,
    error::{Error, Result},
    options::LoadOptions,
};

/// Qwen3 up to the highest layer that is asked for; later layers, the final norm and the head are never read.
///
/// The embedding matrix and, on the CPU, all projections stay where the source holds them, in their stored type.
pub struct Qwen3Encoder {
    config: Qwen3Config,
    out_layers: Vec<usize>,
    embed_tokens: HostTensor,
    layers: Vec<DecoderLayer>,
    device: Device,
    dtype: DType,
}

impl std::fmt::Debug for Qwen3Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qwen3Encoder")
            .field("config", &self.config)
            .field("out_layers", &self.out_layers)
            .finish_non_exhaustive()
    }
}

impl Qwen3Encoder {
    /// Loads the embedding and the layers below the highest of `out_layers`. Names with and without the prefix `model.`
    /// are understood.
    ///
    /// # Errors
    /// [`Error::Config`] if the config or `out_layers` is not usable, [`Error::Weights`] if tensors are missing,
    /// misshapen or unexpected (one message lists them all).
    pub fn load(
        config: &Qwen3Config,
        out_layers: &[usize],
        source: Arc<dyn TensorSource>,
        options: &LoadOptions,
    ) -> Result<Self> {
        config.validate()?;
        check_out_layers(config, out_layers)?;
        let prefix = prefix(&*source);
        let plan = expected(config, out_layers, prefix);
        options.loader(source.clone(), &plan, ignored(config, out_layers, prefix))?;
        // The embedding is the largest tensor and a prompt needs a few of its rows, so it stays on the host everywhere.
        let embedding = [names::embedding(config, prefix)];
        let on_host = LoadOptions { device: Device::Cpu, ..options.clone() };
        on_host.loader(source.clone(), &embedding, |_| true)?.linear(&embedding[0].name)?;
        let embed_tokens = source.host(&embedding[0].name)?;
        let plan = names::layers(config, out_layers, prefix);
        let mut loader = options.loader(source, &plan, |_| true)?;
        let layers = (0..highest(out_layers))
            .map(|i| DecoderLayer::load(config, &format!("{prefix}layers.{i}."), &mut loader))
            .collect::<Result<_>>()?;
        loader.finish()?;
        Ok(Self {
            config: config.clone(),
            out_layers: out_layers.to_vec(),
            embed_tokens,
            layers,
            device: options.device.clone(),
            dtype: options.dtype,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Qwen3Config {
        &self.config
    }

    /// The hidden states that are concatenated: k is the residual stream after k layers.
    pub fn out_layers(&self) -> &[usize] {
        &self.out_layers
    }

    /// Prompt embeddings of one padded text.
    ///
    /// **Shapes**: `ids` has L entries of which the first `n_real` are real; the result is
    /// `[1, L, out_layers * hidden_size]`, for each token its hidden states one after another.
    ///
    /// **Formula**: Qwen3 (huggingface/transformers: `models/qwen3/modeling_qwen3.py`) with the mask
    /// causal and "the key is not padding". So a real row i sees keys `0..=i`, and a padding row sees exactly the
    /// `n_real` real keys: keys and values are computed for real rows only, and no mask is ever built.
    ///
    /// # Errors
    /// [`Error::Shape`] if `n_real` is not from 1 to L, [`Error::TokenOutOfRange`], [`Error::NonFinite`].
    pub fn forward(&self, ids: &[u32], n_real: usize) -> Result<Tensor> {
        self.forward_observed(ids, n_real, &Silent)
    }

    /// [`Self::forward`] with an event after each layer.
    ///
    /// # Errors
    /// As [`Self::forward`], and [`Error::Cancelled`].
    pub fn forward_observed(&self, ids: &[u32], n_real: usize, observer: &dyn Observer) -> Result<Tensor> {
        if n_real == 0 || n_real > ids.len() {
            let expected = format!("at least n_real ({n_real}) ids, n_real at least 1");
            return Err(Error::Shape { what: "ids", got: vec![ids.len()], expected });
        }
        let _span = tracing::debug_span!("text_encoder", tokens = ids.len(), n_real).entered();
        let rope = RotaryTable::new(&self.config, ids.len(), &self.device)?;
        let mut hidden_states = self.embed(ids)?;
        let mut taps: Vec<Option<Tensor>> = vec![None; self.out_layers.len()];
        for (i, layer) in self.layers.iter().enumerate() {
            self.keep(i, &hidden_states, &mut taps);
            hidden_states = layer.forward(&hidden_states, n_real, &rope)?;
            observer.notify(Event::Progress { done: i + 1, total: self.layers.len() })?;
        }
        self.keep(self.layers.len(), &hidden_states, &mut taps);
        let taps: Vec<Tensor> = taps.into_iter().flatten().collect();
        Ok(Tensor::cat(&taps, 2).what("concatenation of hidden states")?)
    }

    /// Stores the state after `layers` layers where it is asked for.
    fn keep(&self, layers: usize, state: &Tensor, taps: &mut [Option<Tensor>]) {
        for (tap, &wanted) in taps.iter_mut().zip(&self.out_layers) {
            if wanted == layers {
                *tap = Some(state.clone());
            }
        }
    }

    /// Rows of the embedding: `[1, L, hidden_size]`.
    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let (vocab_size, hidden_size) = (self.config.vocab_size, self.config.hidden_size);
        let bytes = self.embed_tokens.bytes();
        let row = hidden_size * self.embed_tokens.dtype().size_in_bytes();
        let mut rows = Vec::with_capacity(ids.len() * row);
        for &id in ids {
            let start = (id as usize).checked_mul(row);
            let found = start.and_then(|start| bytes.get(start..start.checked_add(row)?));
            rows.extend_from_slice(found.ok_or(Error::TokenOutOfRange { id, vocab_size })?);
        }
        let shape = [1, ids.len(), hidden_size];
        Ok(Tensor::from_raw_buffer(&rows, self.embed_tokens.dtype(), &shape, &Device::Cpu)
            .and_then(|rows| rows.to_dtype(self.dtype)?.to_device(&self.device))
            .what("token embedding")?)
    }
}

/// Number of layers that have to run.
pub(crate) fn highest(out_layers: &[usize]) -> usize {
    out_layers.iter().copied().max().unwrap_or(0)
}

/// Checks that every tap is a raw residual stream of the model; the last state of a checkpoint is not (it is normed).
pub(crate) fn check_out_layers(config: &Qwen3Config, out_layers: &[usize]) -> Result<()> {
    if out_layers.is_empty() || highest(out_layers) >= config.num_hidden_layers {
        return Err(Error::Config {
            component: "text encoder",
            field: "text_encoder_out_layers",
            value: format!("{out_layers:?}"),
            expected: format!("layers below num_hidden_layers ({})", config.num_hidden_layers),
        });
    }
    Ok(())
}
