//! A block over text and image tokens together, attention and feed-forward side by side.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::{LinearWeight, What, heads_of, linear, projection};
use weights::{Expected, Loader};

use super::{
    attention::{Heads, Joined, QueryKeyNorm},
    modulation::{Modulation, Ready},
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
        let normed = modulation.apply(x, self.widths.eps)?;
        modulation.add(x, &self.branches(&Joined::new(x, None, &self.widths)?, normed, rope)?)
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
        let ready = modulation.ready(x.clone(), self.widths.eps)?;
        self.forward_part(ready, &(tokens - rows..tokens), modulation, rope)
    }

    /// [`Self::forward`] with a buffer that may be used again behind the call, for another block with the same modulation.
    pub(super) fn forward_ready(
        &self,
        joined: &Joined,
        Ready { x, normed }: Ready,
        modulation: &Modulation,
        rope: &RopeTable,
    ) -> Result<Ready> {
        let branches = self.branches(joined, normed, rope)?;
        modulation.add_ready(&x, &branches, modulation, self.widths.eps)
    }

    /// What both branches give together.
    fn branches(&self, joined: &Joined, normed: Tensor, rope: &RopeTable) -> Result<Tensor> {
        let Widths { hidden: h, mlp, heads: count, eps, .. } = self.widths;
        let (_, tokens, _) = normed.dims3().what("single stream")?;
        let norm = self.norm.of(tokens);
        let fused = projection::Heads { count, norm, cos: rope.cos(), sin: rope.sin(), eps };
        let branch = joined.mlp()?;
        if projection::in_one_kernel(&normed, &self.qkv_mlp, &fused, &branch) {
            let [query, key, value] = projection::heads_and_swiglu_into(&normed, &self.qkv_mlp, &fused, &branch)?;
            drop(normed);
            joined.attend(&Heads { query, key, value })?;
        } else {
            let projected = linear(&normed, &self.qkv_mlp, None)?;
            drop(normed);
            let heads = Heads::new(&projected, &[norm], rope, &self.widths)?;
            joined.fill(&heads, &projected.narrow(2, 3 * h, 2 * mlp).what("mlp projection")?)?;
        }
        Ok(linear(&joined.both()?, &self.out, None)?)
    }

    /// The tokens `part` of [`Self::forward`]; the others only serve as keys and values.
    pub(super) fn forward_part(
        &self,
        Ready { x, normed }: Ready,
        part: &Range<usize>,
        modulation: &Modulation,
        rope: &RopeTable,
    ) -> Result<Tensor> {
        let Widths { hidden: h, mlp, heads, head_dim, .. } = self.widths;
        let own = |t: &Tensor| t.narrow(1, part.start, part.len()).what("tokens of the image");
        let key_value = linear(&normed, &self.qkv_mlp.rows(h, 2 * h)?, None)?;
        let normed = own(&normed)?;
        let joined = Joined::new(&x, Some(part.len()), &self.widths)?;
        let mlp_in = linear(&normed, &self.qkv_mlp.rows(3 * h, 2 * mlp)?, None)?;
        let query = linear(&normed, &self.qkv_mlp.rows(0, h)?, None)?;
        drop(normed);
        let heads = Heads {
            query: self.norm.query(&heads_of(&query, 0, heads, head_dim)?, &rope.part(part)?)?,
            key: self.norm.key(&heads_of(&key_value, 0, heads, head_dim)?, rope)?,
            value: heads_of(&key_value, h, heads, head_dim)?,
        };
        drop((query, key_value));
        joined.fill(&heads, &mlp_in)?;
        drop((heads, mlp_in));
        modulation.add(&own(&x)?, &linear(&joined.both()?, &self.out, None)?)
    }
}
