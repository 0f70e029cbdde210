//! A block over text and image tokens together, attention and feed-forward side by side.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::{LinearWeight, What, heads_of, linear, swiglu_into};
use weights::{Expected, Loader};

use super::{
    attention::{Heads, Joined, QueryKeyNorm},
    modulation::Modulation,
    names::Widths,
    rope::RopeTable,
};
use crate::{
    error::{Error, Result},
    parts::Parts,
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
        Self::from_parts(loader, widths, prefix)
    }

    pub(crate) fn from_parts(parts: &mut impl Parts, widths: &Widths, prefix: &str) -> Result<Self> {
        Ok(Self {
            qkv_mlp: parts.linear(&join(prefix, QKV_MLP))?,
            norm: QueryKeyNorm::load(parts, widths, &join(prefix, NORM_QUERY), &join(prefix, NORM_KEY))?,
            out: parts.linear(&join(prefix, OUT))?,
            widths: *widths,
        })
    }

    /// x `[B, S, h]` (text tokens, then image tokens) after the block.
    ///
    /// # Errors
    /// [`Error::Op`] if a shape does not fit the weights or the table.
    pub fn forward(&self, x: &Tensor, modulation: &Modulation, rope: &RopeTable) -> Result<Tensor> {
        self.forward_in(&self.joined(x, None)?, x, modulation, rope)
    }

    /// The last `rows` tokens of [`Self::forward`]; the tokens before them only serve as keys and values.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`Error::Shape`] if x has fewer than `rows` tokens.
    pub fn forward_last(&self, x: &Tensor, rows: usize, modulation: &Modulation, rope: &RopeTable) -> Result<Tensor> {
        let (_, tokens, _) = x.dims3().what("single stream")?;
        if rows > tokens {
            let expected = format!("[B, S, h] with at least {rows} tokens");
            return Err(Error::Shape { what: "single stream", got: x.dims().to_vec(), expected });
        }
        self.forward_part(x, &(tokens - rows..tokens), modulation, rope)
    }

    /// The buffer that the block joins its branches in, for so many tokens or all of x.
    pub(super) fn joined(&self, x: &Tensor, tokens: Option<usize>) -> Result<Joined> {
        let (batch, all, _) = x.dims3().what("single stream")?;
        Joined::new(batch, tokens.unwrap_or(all), &self.widths, x.dtype(), x.device())
    }

    /// [`Self::forward`] with a buffer that may be used again behind the call.
    pub(super) fn forward_in(
        &self,
        joined: &Joined,
        x: &Tensor,
        modulation: &Modulation,
        rope: &RopeTable,
    ) -> Result<Tensor> {
        let Widths { hidden: h, mlp, eps, .. } = self.widths;
        let projected = linear(&modulation.apply(x, eps)?, &self.qkv_mlp, None)?;
        let (_, tokens, _) = projected.dims3().what("single stream")?;
        swiglu_into(&projected.narrow(2, 3 * h, 2 * mlp).what("mlp projection")?, &joined.mlp()?)?;
        joined.attend(Heads::new(&projected, &[self.norm.of(tokens)], rope, &self.widths)?)?;
        drop(projected);
        self.finish(x, joined, modulation)
    }

    /// The tokens `part` of [`Self::forward`]; the others only serve as keys and values.
    pub(super) fn forward_part(
        &self,
        x: &Tensor,
        part: &Range<usize>,
        modulation: &Modulation,
        rope: &RopeTable,
    ) -> Result<Tensor> {
        let Widths { hidden: h, mlp, eps, heads, head_dim, .. } = self.widths;
        let own = |t: &Tensor| t.narrow(1, part.start, part.len()).what("tokens of the image");
        let normed = modulation.apply(x, eps)?;
        let key_value = linear(&normed, &self.qkv_mlp.rows(h, 2 * h)?, None)?;
        let normed = own(&normed)?;
        let joined = self.joined(x, Some(part.len()))?;
        swiglu_into(&linear(&normed, &self.qkv_mlp.rows(3 * h, 2 * mlp)?, None)?, &joined.mlp()?)?;
        let query = linear(&normed, &self.qkv_mlp.rows(0, h)?, None)?;
        drop(normed);
        let heads = Heads {
            query: self.norm.query(&heads_of(&query, 0, heads, head_dim)?, &rope.part(part)?)?,
            key: self.norm.key(&heads_of(&key_value, 0, heads, head_dim)?, rope)?,
            value: heads_of(&key_value, h, heads, head_dim)?,
        };
        drop((query, key_value));
        joined.attend(heads)?;
        self.finish(&own(x)?, &joined, modulation)
    }

    /// Adds both branches to x.
    fn finish(&self, x: &Tensor, joined: &Joined, modulation: &Modulation) -> Result<Tensor> {
        modulation.add(x, &linear(&joined.both()?, &self.out, None)?)
    }
}
