//! One decoder layer of Qwen3 and its rotary table.

use candle_core::{Device, Tensor};
use candle_fork::{
    AttentionMask, LinearWeight, Pairing, What, attention, heads_of, linear, norm_rope, residual, rms_norm, swiglu,
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

    /// Heads x `[1, S, H, D]`, normed and rotated at the positions 0..S.
    fn apply(&self, x: &Tensor, norm: &Tensor, eps: f64) -> Result<Tensor> {
        let len = x.dim(1).what("rotary embedding")?;
        let cos = self.cos.narrow(0, 0, len).what("rotary embedding")?;
        let sin = self.sin.narrow(0, 0, len).what("rotary embedding")?;
        Ok(norm_rope(x, norm, &cos, &sin, eps, Pairing::Half)?)
    }
}

/// Norm, grouped-query attention, residual; norm, gated MLP, residual.
#[derive(Debug)]
pub struct DecoderLayer {
    head_dim: usize,
    eps: f64,
    input_layernorm: Tensor,
    q_proj: LinearWeight,
    /// k and v rows stacked.
    kv_proj: LinearWeight,
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
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            input_layernorm: parts.tensor(&name("input_layernorm"))?,
            q_norm: parts.tensor(&name("self_attn.q_norm"))?,
            k_norm: parts.tensor(&name("self_attn.k_norm"))?,
            post_attention_layernorm: parts.tensor(&name("post_attention_layernorm"))?,
            q_proj: parts.linear(&name("self_attn.q_proj"))?,
            kv_proj: parts.linear_stack(&[&name("self_attn.k_proj"), &name("self_attn.v_proj")])?,
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
        let x = residual(x, &linear(&attended, &self.o_proj, None)?)?;
        let normed = rms_norm(&x, &self.post_attention_layernorm, self.eps)?;
        let gated = swiglu(&linear(&normed, &self.gate_up_proj, None)?)?;
        Ok(residual(&x, &linear(&gated, &self.down_proj, None)?)?)
    }

    /// Causal among the real rows; padding rows see every real key and no padding.
    fn attention(&self, x: &Tensor, n_real: usize, rope: &RotaryTable) -> Result<Tensor> {
        let len = x.dim(1).what("attention")?;
        let real = x.narrow(1, 0, n_real).what("real rows")?;
        let kv = linear(&real, &self.kv_proj, None)?;
        let width = self.kv_proj.out_features() / 2;
        let k = rope.apply(&self.heads(&kv, 0, width)?, &self.k_norm, self.eps)?;
        let v = self.heads(&kv, width, width)?;
        let q = linear(x, &self.q_proj, None)?;
        let q = rope.apply(&self.heads(&q, 0, self.q_proj.out_features())?, &self.q_norm, self.eps)?;

        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let real_q = q.narrow(1, 0, n_real).what("real rows")?;
        let mut attended = attention(&real_q, &k, &v, scale, AttentionMask::Causal)?;
        if n_real < len {
            let pad_q = q.narrow(1, n_real, len - n_real).what("padding rows")?;
            let pads = attention(&pad_q, &k, &v, scale, AttentionMask::Full)?;
            attended = Tensor::cat(&[attended, pads], 1).what("real and padding rows")?;
        }
        Ok(attended.flatten_from(2).what("heads to channels")?)
    }

    /// Columns `start..start + width` of `[1, S, W]` as heads `[1, S, H, D]`.
    fn heads(&self, x: &Tensor, start: usize, width: usize) -> Result<Tensor> {
        Ok(heads_of(x, start, width / self.head_dim, self.head_dim)?)
    }
}
