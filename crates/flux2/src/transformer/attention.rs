//! Query, key and value of a block: normed per head, rotated, attended.

use candle_core::{D, Tensor};
use candle_fork::{AttentionMask, What, attention, rms_norm};
use weights::Loader;

use super::{names::Widths, rope::RopeTable};
use crate::error::Result;

/// RMS norms of the heads of query and key.
#[derive(Debug)]
pub(super) struct QueryKeyNorm {
    query: Tensor,
    key: Tensor,
    eps: f64,
}

/// Query, key and value of some tokens, each `[B, S, H, D]`.
#[derive(Debug)]
pub(super) struct Heads {
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
}

impl QueryKeyNorm {
    pub(super) fn load(loader: &mut Loader, widths: &Widths, query: &str, key: &str) -> Result<Self> {
        Ok(Self { query: loader.tensor(query)?, key: loader.tensor(key)?, eps: widths.eps })
    }

    pub(super) fn query(&self, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(x, &self.query, self.eps)?)
    }

    pub(super) fn key(&self, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(x, &self.key, self.eps)?)
    }

    /// Takes the leading 3h channels of `[B, S, 3h ..]` apart as (query, key, value), each head-major, and norms query
    /// and key.
    pub(super) fn heads(&self, qkv: &Tensor, widths: &Widths) -> Result<Heads> {
        Ok(Heads {
            query: self.query(&split_heads(qkv, 0, widths)?)?,
            key: self.key(&split_heads(qkv, widths.hidden, widths)?)?,
            value: split_heads(qkv, 2 * widths.hidden, widths)?,
        })
    }
}

/// Channels `start..start + h` of x `[B, S, ..]` as heads, `[B, S, H, D]`: a view.
pub(super) fn split_heads(x: &Tensor, start: usize, widths: &Widths) -> Result<Tensor> {
    let (batch, tokens, _) = x.dims3().what("projection")?;
    let part = x.narrow(D::Minus1, start, widths.hidden).what("query, key or value")?;
    Ok(part.reshape((batch, tokens, widths.heads, widths.head_dim)).what("heads")?)
}

impl Heads {
    /// Tokens of `self`, then those of `after`.
    pub(super) fn then(self, after: Self) -> Result<Self> {
        let cat = |a: Tensor, b: Tensor| Tensor::cat(&[a, b], 1).what("text and image heads");
        Ok(Self {
            query: cat(self.query, after.query)?,
            key: cat(self.key, after.key)?,
            value: cat(self.value, after.value)?,
        })
    }

    /// Rotates query and key and attends; `query_rope` covers the tokens of the query, `key_rope` those of the key.
    /// Result `[B, Sq, h]`.
    pub(super) fn attend(self, query_rope: &RopeTable, key_rope: &RopeTable, widths: &Widths) -> Result<Tensor> {
        let query = query_rope.rotate(&self.query)?;
        drop(self.query);
        let key = key_rope.rotate(&self.key)?;
        drop(self.key);
        let scale = (widths.head_dim as f32).powf(-0.5);
        let output = attention(&query, &key, &self.value, scale, AttentionMask::Full)?;
        Ok(output.flatten(2, 3).what("joined heads")?)
    }
}
