//! A block with separate weights for the image and the text stream, which meet in attention.

use candle_core::Tensor;
use candle_fork::{LinearWeight, What, linear, linear_into, swiglu};
use weights::{Expected, Loader};

use super::{
    attention::{Heads, QueryKeyNorm},
    modulation::{DoubleModulation, Modulation},
    names::Widths,
    rope::RopeTable,
};
use crate::{
    error::Result,
    parts::Parts,
    plan::{Below, join},
};

/// Names of the tensors of one stream, below the prefix of the block.
struct StreamNames {
    qkv: [&'static str; 3],
    norm_query: &'static str,
    norm_key: &'static str,
    projection: &'static str,
    mlp_in: &'static str,
    mlp_out: &'static str,
}

const IMAGE: StreamNames = StreamNames {
    qkv: ["attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight"],
    norm_query: "attn.norm_q.weight",
    norm_key: "attn.norm_k.weight",
    projection: "attn.to_out.0.weight",
    mlp_in: "ff.linear_in.weight",
    mlp_out: "ff.linear_out.weight",
};

const TEXT: StreamNames = StreamNames {
    qkv: ["attn.add_q_proj.weight", "attn.add_k_proj.weight", "attn.add_v_proj.weight"],
    norm_query: "attn.norm_added_q.weight",
    norm_key: "attn.norm_added_k.weight",
    projection: "attn.to_add_out.weight",
    mlp_in: "ff_context.linear_in.weight",
    mlp_out: "ff_context.linear_out.weight",
};

/// Weights of one stream.
#[derive(Debug)]
struct Stream {
    qkv: LinearWeight,
    norm: QueryKeyNorm,
    projection: LinearWeight,
    mlp_in: LinearWeight,
    mlp_out: LinearWeight,
    widths: Widths,
}

impl Stream {
    fn load(parts: &mut impl Parts, widths: &Widths, prefix: &str, names: &StreamNames) -> Result<Self> {
        let [q, k, v] = names.qkv.map(|name| join(prefix, name));
        Ok(Self {
            qkv: parts.linear_stack(&[&q, &k, &v])?,
            norm: QueryKeyNorm::load(parts, widths, &join(prefix, names.norm_query), &join(prefix, names.norm_key))?,
            projection: parts.linear(&join(prefix, names.projection))?,
            mlp_in: parts.linear(&join(prefix, names.mlp_in))?,
            mlp_out: parts.linear(&join(prefix, names.mlp_out))?,
            widths: *widths,
        })
    }

    /// Query, key and value of the stream into its tokens of `qkv`, from `first` on. Gives the first behind them.
    fn project(&self, x: &Tensor, modulation: &Modulation, qkv: &Tensor, first: usize) -> Result<usize> {
        let (_, tokens, _) = x.dims3().what("stream")?;
        let out = qkv.narrow(1, first, tokens).what("tokens of a stream")?;
        linear_into(&modulation.apply(x, self.widths.eps)?, &self.qkv, None, &out)?;
        Ok(first + tokens)
    }

    /// The stream after both branches, from its part of the attention's output.
    fn finish(&self, x: &Tensor, attended: &Tensor, modulation: &[Modulation; 2]) -> Result<Tensor> {
        let [attention, mlp] = modulation;
        let branch = linear(attended, &self.projection, None)?;
        let (x, normed) = attention.add_apply(x, &branch, mlp, self.widths.eps)?;
        drop(branch);
        let hidden = swiglu(&linear(&normed, &self.mlp_in, None)?)?;
        drop(normed);
        mlp.add(&x, &linear(&hidden, &self.mlp_out, None)?)
    }
}

/// One double-stream block.
#[derive(Debug)]
pub struct DoubleBlock {
    image: Stream,
    text: Stream,
}

impl DoubleBlock {
    /// Adds the block's tensors below `prefix` to `list`, in the diffusers layout
    /// (`PREFIX.attn.to_q.weight`, `PREFIX.ff.linear_in.weight` and so on).
    pub fn expected(widths: &Widths, prefix: &str, list: &mut Vec<Expected>) {
        let h = widths.hidden;
        let mut block = Below::new(list, prefix);
        for names in [&IMAGE, &TEXT] {
            for name in names.qkv {
                block.tensor(name, &[h, h]);
            }
            block.tensor(names.norm_query, &[widths.head_dim]);
            block.tensor(names.norm_key, &[widths.head_dim]);
            block.tensor(names.projection, &[h, h]);
            block.tensor(names.mlp_in, &[widths.mlp.saturating_mul(2), h]);
            block.tensor(names.mlp_out, &[h, widths.mlp]);
        }
    }

    /// Takes the block's tensors from `loader`.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) if a tensor cannot be read.
    pub fn load(loader: &mut Loader, widths: &Widths, prefix: &str) -> Result<Self> {
        Self::from_parts(loader, widths, prefix)
    }

    pub(crate) fn from_parts(parts: &mut impl Parts, widths: &Widths, prefix: &str) -> Result<Self> {
        Ok(Self {
            image: Stream::load(parts, widths, prefix, &IMAGE)?,
            text: Stream::load(parts, widths, prefix, &TEXT)?,
        })
    }

    /// Image `[B, N, h]` and text `[B, L, h]` after the block; `rope` covers the L text tokens, then the N image tokens.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if a shape does not fit the weights or the table.
    pub fn forward(
        &self,
        image: &Tensor,
        text: &Tensor,
        modulation: &DoubleModulation,
        rope: &RopeTable,
    ) -> Result<(Tensor, Tensor)> {
        self.forward_in(&self.buffer(image, text)?, image, text, modulation, rope)
    }

    /// The buffer `[B, L + N, 3h]` for query, key and value of both streams.
    pub(super) fn buffer(&self, image: &Tensor, text: &Tensor) -> Result<Tensor> {
        let ((batch, image_tokens, h), text_tokens) = (image.dims3().what("image stream")?, text.dims()[1]);
        let dims = (batch, text_tokens + image_tokens, 3 * h);
        Ok(Tensor::zeros(dims, image.dtype(), image.device()).what("query, key and value")?)
    }

    /// [`Self::forward`] with a buffer that may be used again behind the call.
    pub(super) fn forward_in(
        &self,
        qkv: &Tensor,
        image: &Tensor,
        text: &Tensor,
        modulation: &DoubleModulation,
        rope: &RopeTable,
    ) -> Result<(Tensor, Tensor)> {
        let text_tokens = self.text.project(text, &modulation.text[0], qkv, 0)?;
        let tokens = self.image.project(image, &modulation.image[0], qkv, text_tokens)?;
        let norms = [self.text.norm.of(text_tokens), self.image.norm.of(tokens - text_tokens)];
        let attended = Heads::new(qkv, &norms, rope, &self.image.widths)?.attend(&self.image.widths)?;
        let part = |start, len| attended.narrow(1, start, len).what("attention output of a stream");
        let text = self.text.finish(text, &part(0, text_tokens)?, &modulation.text)?;
        let image = self.image.finish(image, &part(text_tokens, tokens - text_tokens)?, &modulation.image)?;
        Ok((image, text))
    }
}
