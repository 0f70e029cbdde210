//! Query, key and value of a block: normed per head, rotated, attended.

use candle_core::Tensor;
use candle_fork::{
    AttentionInto, AttentionMask, HeadNorm, Pairing, What, attention, attention_and_swiglu_into, attention_into,
    heads_of, norm_rope, qk_norm_rope,
};

use super::{names::Widths, rope::RopeTable};
use crate::{error::Result, parts::Parts};

/// RMS norms of the heads of query and key.
#[derive(Debug)]
pub(super) struct QueryKeyNorm {
    query: Tensor,
    key: Tensor,
    eps: f64,
}

/// Query, key and value of some tokens, each `[B, S, H, D]`, ready for attention.
#[derive(Debug)]
pub(super) struct Heads {
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
}

impl QueryKeyNorm {
    pub(super) fn load(parts: &mut impl Parts, widths: &Widths, query: &str, key: &str) -> Result<Self> {
        Ok(Self { query: parts.tensor(query)?, key: parts.tensor(key)?, eps: widths.eps })
    }

    /// For the next `tokens` of a sequence.
    pub(super) fn of(&self, tokens: usize) -> HeadNorm<'_> {
        HeadNorm { tokens, query: &self.query, key: &self.key }
    }

    /// Queries x `[B, S, H, D]`, normed and rotated.
    pub(super) fn query(&self, x: &Tensor, rope: &RopeTable) -> Result<Tensor> {
        Ok(norm_rope(x, &self.query, rope.cos(), rope.sin(), self.eps, Pairing::Interleaved)?)
    }

    /// Keys x `[B, S, H, D]`, normed and rotated.
    pub(super) fn key(&self, x: &Tensor, rope: &RopeTable) -> Result<Tensor> {
        Ok(norm_rope(x, &self.key, rope.cos(), rope.sin(), self.eps, Pairing::Interleaved)?)
    }
}

impl Heads {
    /// Takes the leading 3h channels of `[B, S, 3h ..]` apart as (query, key, value), each head-major; norms and rotates
    /// query and key. The value stays where it lies.
    pub(super) fn new(qkv: &Tensor, norms: &[HeadNorm<'_>], rope: &RopeTable, widths: &Widths) -> Result<Self> {
        let &Widths { hidden, heads, head_dim, eps, .. } = widths;
        let (query, key) = qk_norm_rope(qkv, heads, norms, rope.cos(), rope.sin(), eps)?;
        Ok(Self { query, key, value: heads_of(qkv, 2 * hidden, heads, head_dim)? })
    }

    /// `[B, Sq, h]`.
    pub(super) fn attend(self, widths: &Widths) -> Result<Tensor> {
        let output = attention(&self.query, &self.key, &self.value, widths.scale(), AttentionMask::Full)?;
        Ok(output.flatten(2, 3).what("joined heads")?)
    }
}

/// What the output map of a single block reads: attention and feed-forward side by side, `[B, S, h + mlp]`.
#[derive(Debug, Clone)]
pub(super) struct Joined {
    /// The columns of the last head's width are whole: there may be some behind.
    buffer: Tensor,
    widths: Widths,
}

impl Joined {
    /// For so many tokens, or all, of x `[B, S, h]`.
    pub(super) fn new(x: &Tensor, tokens: Option<usize>, widths: &Widths) -> Result<Self> {
        let (batch, all, _) = x.dims3().what("single stream")?;
        // Only in whole heads the part of attention is a view of the buffer.
        let columns = widths.hidden + widths.mlp.next_multiple_of(widths.head_dim);
        let dims = (batch, tokens.unwrap_or(all), columns);
        let buffer = Tensor::zeros(dims, x.dtype(), x.device()).what("joined branches")?;
        Ok(Self { buffer, widths: *widths })
    }

    /// Both parts: attention, and SwiGLU of x `[B, S, 2 mlp]`.
    pub(super) fn fill(&self, heads: &Heads, x: &Tensor) -> Result<()> {
        let Heads { query, key, value } = heads;
        let attention = AttentionInto {
            q: query,
            k: key,
            v: value,
            softmax_scale: self.widths.scale(),
            mask: AttentionMask::Full,
            out: &self.attended()?,
        };
        Ok(attention_and_swiglu_into(&attention, x, &self.mlp()?)?)
    }

    /// Attention into its part.
    pub(super) fn attend(&self, heads: &Heads) -> Result<()> {
        let Heads { query, key, value } = heads;
        Ok(attention_into(query, key, value, self.widths.scale(), AttentionMask::Full, &self.attended()?)?)
    }

    /// The part of attention, `[B, S, H, D]`.
    fn attended(&self) -> Result<Tensor> {
        Ok(heads_of(&self.buffer, 0, self.widths.heads, self.widths.head_dim)?)
    }

    /// The part of the feed-forward branch, `[B, S, mlp]`.
    pub(super) fn mlp(&self) -> Result<Tensor> {
        Ok(self.buffer.narrow(2, self.widths.hidden, self.widths.mlp).what("feed-forward part")?)
    }

    /// Both, `[B, S, h + mlp]`.
    pub(super) fn both(&self) -> Result<Tensor> {
        Ok(self.buffer.narrow(2, 0, self.widths.hidden + self.widths.mlp).what("joined branches")?)
    }
}
