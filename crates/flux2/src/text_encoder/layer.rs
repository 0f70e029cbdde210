//! One decoder layer of Qwen3 and its rotary table.

use candle_core::{Device, Tensor};
use candle_fork::{AttentionMask, LinearWeight, What, activation::swiglu, attention, linear, rms_norm, rope_half};
use weights::Loader;

use crate::{config::Qwen3Config, error::Result};

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

    /// Rotates x `[1, S, H, D]` at the positions 0..S.
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let len = x.dim(1).what("rotary embedding")?;
        let cos = self.cos.narrow(0, 0, len).what("rotary embedding")?;
        let sin = self.sin.narrow(0, 0, len).what("rotary embedding")?;
        Ok(rope_half(x, &cos, &sin)?)
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
        let mut tensor = |name: &str| loader.tensor(&format!("{prefix}{name}.weight"));
        let input_layernorm = tensor("input_layernorm")?;
        let q_norm = tensor("self_attn.q_norm")?;
        let k_norm = tensor("self_attn.k_norm")?;
        let post_attention_layernorm = tensor("post_attention_layernorm")?;
        let mut matrix = |name: &str| loader.linear(&format!("{prefix}{name}.weight"));
        Ok(Self {
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            input_layernorm,
            q_proj: matrix("self_attn.q_proj")?,
            kv_proj: LinearWeight::stack(vec![matrix("self_attn.k_proj")?, matrix("self_attn.v_proj")?])?,
            q_norm,
            k_norm,
            o_proj: matrix("self_attn.o_proj")?,
            post_attention_layernorm,
            gate_up_proj: LinearWeight::stack(vec![matrix("mlp.gate_proj")?, matrix("mlp.up_proj")?])?,
            down_proj: matrix("mlp.down_proj")?,
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
        let x = (x + linear(&attended, &self.o_proj, None)?).what("residual")?;
        let normed = rms_norm(&x, &self.post_attention_layernorm, self.eps)?;
        let gated = swiglu(&linear(&normed, &self.gate_up_proj, None)?)?;
        Ok((x + linear(&gated, &self.down_proj, None)?).what("residual")?)
    }

    /// Causal among the real rows; padding rows see every real key and no padding.
    fn attention(&self, x: &Tensor, n_real: usize, rope: &RotaryTable) -> Result<Tensor> {
        let len = x.dim(1).what("attention")?;
        let real = x.narrow(1, 0, n_real).what("real rows")?;
        let kv = linear(&real, &self.kv_proj, None)?;
        let width = self.kv_proj.out_features() / 2;
        let k = self.heads(&kv.narrow(2, 0, width).what("keys")?)?;
        let v = self.heads(&kv.narrow(2, width, width).what("values")?)?;
        let k = rope.apply(&rms_norm(&k, &self.k_norm, self.eps)?)?;
        let q = self.heads(&linear(x, &self.q_proj, None)?)?;
        let q = rope.apply(&rms_norm(&q, &self.q_norm, self.eps)?)?;

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

    /// `[1, S, H * D]` to `[1, S, H, D]`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, len, width) = x.dims3().what("channels to heads")?;
        Ok(x.reshape((batch, len, width / self.head_dim, self.head_dim)).what("channels to heads")?)
    }
}
