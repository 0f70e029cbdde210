//! A block over text and image tokens together, attention and feed-forward side by side.

use candle_core::{D, Tensor};
use candle_fork::{LinearWeight, What, activation::swiglu, linear};
use weights::{Expected, Loader};

use super::{
    attention::{Heads, QueryKeyNorm, split_heads},
    modulation::Modulation,
    names::Widths,
    rope::RopeTable,
};
use crate::{
    error::{Error, Result},
    plan::{Below, join},
};

const QKV_MLP: &str = "attn.to_qkv_mlp_proj.weight";
const NORM_QUERY: &str = "attn.norm_q.weight";
const NORM_KEY: &str = "attn.norm_k.weight";
const OUT: &str = "attn.to_out.weight";

/// One single-stream block.
#[derive(Debug)]
pub struct SingleBlock {
    qkv_mlp: LinearWeight,
    norm: QueryKeyNorm,
    out: LinearWeight,
    widths: Widths,
}

impl SingleBlock {
    /// Adds the block's tensors below `prefix` to `list`, in the diffusers layout
    /// (`PREFIX.attn.to_qkv_mlp_proj.weight` and so on).
    pub fn expected(widths: &Widths, prefix: &str, list: &mut Vec<Expected>) {
        let h = widths.hidden;
        let wide = h.saturating_mul(3).saturating_add(widths.mlp.saturating_mul(2));
        let mut block = Below::new(list, prefix);
        block.tensor(QKV_MLP, &[wide, h]);
        block.tensor(NORM_QUERY, &[widths.head_dim]);
        block.tensor(NORM_KEY, &[widths.head_dim]);
        block.tensor(OUT, &[h, h.saturating_add(widths.mlp)]);
    }

    /// Takes the block's tensors from `loader`.
    ///
    /// # Errors
    /// [`Error::Weights`] if a tensor cannot be read.
    pub fn load(loader: &mut Loader, widths: &Widths, prefix: &str) -> Result<Self> {
        Ok(Self {
            qkv_mlp: loader.linear(&join(prefix, QKV_MLP))?,
            norm: QueryKeyNorm::load(loader, widths, &join(prefix, NORM_QUERY), &join(prefix, NORM_KEY))?,
            out: loader.linear(&join(prefix, OUT))?,
            widths: *widths,
        })
    }

    /// x `[B, S, h]` (text tokens, then image tokens) after the block.
    ///
    /// # Errors
    /// [`Error::Op`] if a shape does not fit the weights or the table.
    pub fn forward(&self, x: &Tensor, modulation: &Modulation, rope: &RopeTable) -> Result<Tensor> {
        let projected = linear(&modulation.apply(x, self.widths.eps)?, &self.qkv_mlp, None)?;
        let heads = self.norm.heads(&projected, &self.widths)?;
        let width = 2 * self.widths.mlp;
        let hidden = swiglu(&projected.narrow(D::Minus1, 3 * self.widths.hidden, width).what("mlp projection")?)?;
        drop(projected);
        let attended = heads.attend(rope, rope, &self.widths)?;
        self.finish(x, attended, hidden, modulation)
    }

    /// The last `rows` tokens of [`Self::forward`]; the tokens before them only serve as keys and values.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`Error::Shape`] if x has fewer than `rows` tokens.
    pub fn forward_last(&self, x: &Tensor, rows: usize, modulation: &Modulation, rope: &RopeTable) -> Result<Tensor> {
        let Widths { hidden: h, mlp, eps, .. } = self.widths;
        let (_, tokens, _) = x.dims3().what("single stream")?;
        if rows > tokens {
            let expected = format!("[B, S, h] with at least {rows} tokens");
            return Err(Error::Shape { what: "single stream", got: x.dims().to_vec(), expected });
        }
        let tail = |t: &Tensor| t.narrow(1, tokens - rows, rows).what("image tokens");
        let normed = modulation.apply(x, eps)?;
        let key_value = linear(&normed, &self.qkv_mlp.rows(h, 2 * h)?, None)?;
        let normed = tail(&normed)?;
        let query = linear(&normed, &self.qkv_mlp.rows(0, h)?, None)?;
        let heads = Heads {
            query: self.norm.query(&split_heads(&query, 0, &self.widths)?)?,
            key: self.norm.key(&split_heads(&key_value, 0, &self.widths)?)?,
            value: split_heads(&key_value, h, &self.widths)?,
        };
        drop((query, key_value));
        let attended = heads.attend(&rope.last(rows)?, rope, &self.widths)?;
        let hidden = swiglu(&linear(&normed, &self.qkv_mlp.rows(3 * h, 2 * mlp)?, None)?)?;
        drop(normed);
        self.finish(&tail(x)?, attended, hidden, modulation)
    }

    /// Joins both branches and adds them to x.
    fn finish(&self, x: &Tensor, attended: Tensor, hidden: Tensor, modulation: &Modulation) -> Result<Tensor> {
        let joined = Tensor::cat(&[attended, hidden], D::Minus1).what("attention and mlp")?;
        let branch = linear(&joined, &self.out, None)?;
        drop(joined);
        modulation.add(x, &branch)
    }
}
