//! One decoder layer of Qwen3 and its rotary table.

use candle_core::{Device, Tensor};
use candle_fork::{
    AttentionMask, HeadNorm, LinearWeight, Pairing, What, attention, grouped_qk_norm_rope, heads_of, linear, residual,
    residual_rms_norm, rms_norm, swiglu,
};
use weights::Loader;

use crate::{config::Qwen3Config, error::Result, parts::Parts};

/// cos and sin `[L, head_dim / 2]` of the positions 0..L.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
}

impl RotaryTable {
    /// Angles in f64, rounded once to f32 whatever the dtype of the activations is: half-precision angles are wrong by more
    /// than a radian at late positions.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the config has no `rope_theta`, [`crate::Error::Op`] if the device refuses.
    pub fn new(config: &Qwen3Config, len: usize, device: &Device) -> Result<Self> {
        let half = config.head_dim / 2;
        let theta = config.rope_theta()?;
        let angles = (0..len)
            .flat_map(|position| (0..half).map(move |i| position as f64 * theta.powf(-(i as f64) / half as f64)));
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        let table = |values| Tensor::from_vec(values, (len, half), device);
        Ok(Self { cos: table(cos).what("rotary table")?, sin: table(sin).what("rotary table")? })
    }

    /// Positions that it covers.
    pub fn len(&self) -> usize {
        self.cos.dims().first().copied().unwrap_or(0)
    }

    /// Whether it covers none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// cos and sin of the first `len` positions.
    fn first(&self, len: usize) -> Result<[Tensor; 2]> {
        let first = |table: &Tensor| table.narrow(0, 0, len).what("rotary embedding");
        Ok([first(&self.cos)?, first(&self.sin)?])
    }
}

/// Norm, grouped-query attention, residual; norm, gated MLP, residual.
#[derive(Debug)]
pub struct DecoderLayer {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    input_layernorm: Tensor,
    /// q, k and v rows stacked.
    qkv_proj: LinearWeight,
    q_norm: Tensor,
    k_norm: Tensor,
    o_proj: LinearWeight,
    post_attention_layernorm: Tensor,
    /// gate and up rows stacked.
    gate_up_proj: LinearWeight,
    down_proj: LinearWeight,
}

impl DecoderLayer {
    /// Takes the tensors under `prefix` (`model.layers.3.`, for example).
    ///
    /// # Errors
    /// [`crate::Error::Weights`] if a tensor is not in the loader's plan or not usable.
    pub fn load(config: &Qwen3Config, prefix: &str, loader: &mut Loader) -> Result<Self> {
        Self::from_parts(config, prefix, loader)
    }

    pub(crate) fn from_parts(config: &Qwen3Config, prefix: &str, parts: &mut impl Parts) -> Result<Self> {
        let name = |name: &str| format!("{prefix}{name}.weight");
        Ok(Self {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            input_layernorm: parts.tensor(&name("input_layernorm"))?,
            q_norm: parts.tensor(&name("self_attn.q_norm"))?,
            k_norm: parts.tensor(&name("self_attn.k_norm"))?,
            post_attention_layernorm: parts.tensor(&name("post_attention_layernorm"))?,
            qkv_proj: parts.linear_stack(&[
                &name("self_attn.q_proj"),
                &name("self_attn.k_proj"),
                &name("self_attn.v_proj"),
            ])?,
            o_proj: parts.linear(&name("self_attn.o_proj"))?,
            gate_up_proj: parts.linear_stack(&[&name("mlp.gate_proj"), &name("mlp.up_proj")])?,
            down_proj: parts.linear(&name("mlp.down_proj"))?,
        })
    }

    /// The residual stream `[1, L, hidden_size]` after this layer; the first `n_real` rows (at least one) are real, the
    /// others are padding. `rope` covers at least L positions.
    ///
    /// # Errors
    /// [`crate::Error::Op`] if a shape or dtype does not fit.
    pub fn forward(&self, x: &Tensor, n_real: usize, rope: &RotaryTable) -> Result<Tensor> {
        let normed = rms_norm(x, &self.input_layernorm, self.eps)?;
        let attended = self.attention(&normed, n_real, rope)?;
        let branch = linear(&attended, &self.o_proj, None)?;
        let (x, normed) = residual_rms_norm(x, &branch, &self.post_attention_layernorm, self.eps)?;
        let gated = swiglu(&linear(&normed, &self.gate_up_proj, None)?)?;
        Ok(residual(&x, &linear(&gated, &self.down_proj, None)?)?)
    }

    /// Causal among the real rows; padding rows see every real key and no padding.
    fn attention(&self, x: &Tensor, n_real: usize, rope: &RotaryTable) -> Result<Tensor> {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        let len = x.dim(1).what("attention")?;
        // Of all rows, though keys and values of padding are not read: so no shape depends on the length of the text.
        let projected = linear(x, &self.qkv_proj, None)?;
        let [cos, sin] = rope.first(len)?;
        let norms = [HeadNorm { tokens: len, query: &self.q_norm, key: &self.k_norm }];
        let (q, k) = grouped_qk_norm_rope(&projected, [heads, kv_heads], &norms, &cos, &sin, self.eps, Pairing::Half)?;
        let v = heads_of(&projected, (heads + kv_heads) * head_dim, kv_heads, head_dim)?;
        let real = |rows: &Tensor| rows.narrow(1, 0, n_real).what("real rows");
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attended = attention(&q, &real(&k)?, &real(&v)?, scale, AttentionMask::Prefix)?;
        Ok(attended.flatten_from(2).what("heads to channels")?)
    }
}
