//! The Qwen3 text encoder: hidden states of a few layers as prompt embeddings.

mod layer;
mod names;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use policy::{Backends, Event, Observer, Silent};
use weights::{Embedding, TensorSource};

pub(crate) use self::names::layer as layer_expected;
pub use self::{
    layer::{DecoderLayer, RotaryTable},
    names::{expected, ignored, prefix},
};
use crate::{
    config::Qwen3Config,
    error::{Error, Result},
    layouts,
    options::LoadOptions,
    streaming::{BlockLayout, Blocks, HostBlocks, Streamer, begin, is_streamed},
};

/// Qwen3 up to the highest layer that is asked for; later layers, the final norm and the head are never read.
///
/// The embedding matrix and, on the CPU, all projections stay where the source holds them, in their stored type.
pub struct Qwen3Encoder {
    config: Qwen3Config,
    out_layers: Vec<usize>,
    embed_tokens: Embedding,
    layers: Blocks<DecoderLayer>,
    /// The longest that was needed so far.
    rope: Mutex<Option<RotaryTable>>,
    streamer: Option<Arc<Streamer>>,
    streamed: usize,
    device: Device,
    dtype: DType,
    backends: Backends,
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
    /// are understood, and those of other layouts ([`crate::layouts::text_encoder`]).
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
        Self::load_streamed(config, out_layers, source, options, 0)
    }

    /// [`Self::load`] with `streamed` of the layers left on the host, from where each is copied to the device while others
    /// work. Results are the same.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_streamed(
        config: &Qwen3Config,
        out_layers: &[usize],
        source: Arc<dyn TensorSource>,
        options: &LoadOptions,
        streamed: usize,
    ) -> Result<Self> {
        Self::load_again(config, out_layers, source, options, streamed, &HostBlocks::default())
    }

    /// [`Self::load_streamed`] with host blocks of an earlier loading.
    pub(crate) fn load_again(
        config: &Qwen3Config,
        out_layers: &[usize],
        source: Arc<dyn TensorSource>,
        options: &LoadOptions,
        streamed: usize,
        kept: &HostBlocks,
    ) -> Result<Self> {
        config.validate()?;
        check_out_layers(config, out_layers)?;
        let source = layouts::text_encoder(source)?;
        let prefix = prefix(&*source);
        let plan = expected(config, out_layers, prefix);
        options.loader(source.clone(), &plan, ignored(config, out_layers, prefix))?;
        // The embedding is the largest tensor and a prompt needs a few of its rows, so it stays on the host everywhere.
        let embedding = names::embedding(config, prefix);
        let mut loader = options.loader(source.clone(), std::slice::from_ref(&embedding), |_| true)?;
        let embed_tokens = loader.embedding(&embedding.name)?;
        let plan = names::layers(config, out_layers, prefix);
        let mut loader = options.loader(source.clone(), &plan, |_| true)?;
        let count = highest(out_layers);
        let streamed = streamed.min(count);
        let at = |i: usize| format!("{prefix}layers.{i}");
        let mut layers = Blocks::empty();
        let mut streamer = None;
        if streamed > 0 {
            let layout = BlockLayout::new(&names::layer(config));
            let on_host = LoadOptions { device: Device::Cpu, ..options.clone() };
            let mut host_loader = on_host.loader(source, &plan, |_| true)?;
            let mut hosts = Streamer::new(layout.elements(), options.dtype, &options.device)?;
            layers = Blocks::streamed(hosts.blocks(&layout, |parts| DecoderLayer::from_parts(config, "", parts))?);
            for i in (0..count).filter(|&i| is_streamed(i, count, streamed)) {
                hosts.push(kept, &mut host_loader, &at(i), &layout)?;
            }
            streamer = Some(Arc::new(hosts));
        }
        for i in 0..count {
            let stays = streamed == 0 || !is_streamed(i, count, streamed);
            let layer = stays.then(|| DecoderLayer::load(config, &format!("{}.", at(i)), &mut loader));
            layers.push(layer.transpose()?);
        }
        if streamed == 0 {
            loader.finish()?;
        }
        Ok(Self {
            config: config.clone(),
            out_layers: out_layers.to_vec(),
            embed_tokens,
            layers,
            rope: Mutex::default(),
            streamer,
            streamed,
            device: options.device.clone(),
            dtype: options.dtype,
            backends: options.backends(),
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

    /// How many layers were left on the host.
    pub fn streamed(&self) -> usize {
        self.streamed
    }

    /// Prompt embeddings of one padded text.
    ///
    /// **Shapes**: `ids` has L entries of which the first `n_real` are real; the result is
    /// `[1, L, out_layers * hidden_size]`, for each token its hidden states one after another.
    ///
    /// **Formula**: Qwen3 (huggingface/transformers: `models/qwen3/modeling_qwen3.py`) with the mask
    /// causal and "the key is not padding". So a real row i sees keys `0..=i`, and a padding row sees exactly the
    /// `n_real` real keys ([`candle_fork::AttentionMask::Prefix`]): no mask is ever built.
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
        let _policy = self.backends.enter();
        let rope = self.rotary_table(ids.len())?;
        let mut hidden_states = self.embed(ids)?;
        let mut taps: Vec<Option<Tensor>> = vec![None; self.out_layers.len()];
        let mut pass = begin(&self.streamer)?;
        for i in 0..self.layers.len() {
            self.keep(i, &hidden_states, &mut taps);
            hidden_states = self.layers.with(i, &mut pass, |layer| layer.forward(&hidden_states, n_real, &rope))?;
            observer.notify(Event::Progress { done: i + 1, total: self.layers.len() })?;
        }
        self.keep(self.layers.len(), &hidden_states, &mut taps);
        let taps: Vec<Tensor> = taps.into_iter().flatten().collect();
        Ok(Tensor::cat(&taps, 2).what("concatenation of hidden states")?)
    }

    /// A table of `len` positions or more.
    fn rotary_table(&self, len: usize) -> Result<RotaryTable> {
        // A panic while the lock is held cannot leave a table half-made, so a poisoned lock is still good.
        let mut kept = self.rope.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.as_ref().filter(|table| table.len() >= len) {
            Some(table) => Ok(table.clone()),
            None => Ok(kept.insert(RotaryTable::new(&self.config, len, &self.device)?).clone()),
        }
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
        let vocab_size = self.config.vocab_size;
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(Error::TokenOutOfRange { id, vocab_size });
        }
        let rows = self.embed_tokens.gather(ids, self.dtype, &self.device)?;
        Ok(rows.unsqueeze(0).what("token embedding")?)
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
