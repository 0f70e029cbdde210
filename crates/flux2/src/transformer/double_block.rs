//! A block with separate weights for the image and the text stream, which meet in attention.

use candle_core::Tensor;
use candle_fork::{LinearWeight, What, linear, linear_into, projection::linear_swiglu};
use weights::{Expected, Loader};

use super::{
    attention::{Heads, QueryKeyNorm},
    modulation::{DoubleModulation, Modulation, Ready},
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
    fn project(&self, normed: &Tensor, qkv: &Tensor, first: usize) -> Result<usize> {
        let (_, tokens, _) = normed.dims3().what("stream")?;
        let out = qkv.narrow(1, first, tokens).what("tokens of a stream")?;
        linear_into(normed, &self.qkv, None, &out)?;
        Ok(first + tokens)
    }

    /// The stream after its attention, ready for its feed-forward branch, from its part of the attention's output.
    fn attended(&self, x: &Tensor, attended: &Tensor, [attention, mlp]: &[Modulation; 2]) -> Result<Ready> {
        let branch = linear(attended, &self.projection, None)?;
        attention.add_ready(x, &branch, mlp, self.widths.eps)
    }
}

/// A stream whose feed-forward branch is not yet added.
struct Branches {
    x: Tensor,
    mlp: Tensor,
}

impl Branches {
    fn add(&self, [_, mlp]: &[Modulation; 2]) -> Result<Tensor> {
        mlp.add(&self.x, &self.mlp)
    }

    /// For a block with the same modulation.
    fn add_ready(&self, [attention, mlp]: &[Modulation; 2], eps: f64) -> Result<Ready> {
        mlp.add_ready(&self.x, &self.mlp, attention, eps)
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
        let ready = modulation.ready(image.clone(), text.clone(), self.image.widths.eps)?;
        self.forward_in(&Self::buffer(image, text)?, ready, modulation, rope)
    }

    /// The buffer `[B, L + N, 3h]` for query, key and value of both streams.
    pub(super) fn buffer(image: &Tensor, text: &Tensor) -> Result<Tensor> {
        let ((batch, image_tokens, h), text_tokens) = (image.dims3().what("image stream")?, text.dims()[1]);
        let dims = (batch, text_tokens + image_tokens, 3 * h);
        Ok(Tensor::zeros(dims, image.dtype(), image.device()).what("query, key and value")?)
    }

    /// [`Self::forward`] of image and text, with a buffer that may be used again behind the call, for another block with
    /// the same modulation.
    pub(super) fn forward_ready(
        &self,
        qkv: &Tensor,
        ready: [Ready; 2],
        modulation: &DoubleModulation,
        rope: &RopeTable,
    ) -> Result<[Ready; 2]> {
        let [image, text] = self.branches(qkv, ready, modulation, rope)?;
        let eps = self.image.widths.eps;
        Ok([image.add_ready(&modulation.image, eps)?, text.add_ready(&modulation.text, eps)?])
    }

    /// [`Self::forward`] of image and text, with a buffer that may be used again behind the call.
    pub(super) fn forward_in(
        &self,
        qkv: &Tensor,
        ready: [Ready; 2],
        modulation: &DoubleModulation,
        rope: &RopeTable,
    ) -> Result<(Tensor, Tensor)> {
        let [image, text] = self.branches(qkv, ready, modulation, rope)?;
        Ok((image.add(&modulation.image)?, text.add(&modulation.text)?))
    }

    /// Image and text without the last addition.
    fn branches(
        &self,
        qkv: &Tensor,
        [image, text]: [Ready; 2],
        modulation: &DoubleModulation,
        rope: &RopeTable,
    ) -> Result<[Branches; 2]> {
        let text_tokens = self.text.project(&text.normed, qkv, 0)?;
        let tokens = self.image.project(&image.normed, qkv, text_tokens)?;
        let (image, text) = (image.x, text.x);
        let norms = [self.text.norm.of(text_tokens), self.image.norm.of(tokens - text_tokens)];
        let attended = Heads::new(qkv, &norms, rope, &self.image.widths)?.attend(&self.image.widths)?;
        let part = |start, len| attended.narrow(1, start, len).what("attention output of a stream");
        let text = self.text.attended(&text, &part(0, text_tokens)?, &modulation.text)?;
        let image = self.image.attended(&image, &part(text_tokens, tokens - text_tokens)?, &modulation.image)?;
        drop(attended);
        let [of_image, of_text] =
            linear_swiglu([(&image.normed, &self.image.mlp_in), (&text.normed, &self.text.mlp_in)])?;
        let (image, text) = (image.x, text.x);
        let image = Branches { x: image, mlp: linear(&of_image, &self.image.mlp_out, None)? };
        Ok([image, Branches { x: text, mlp: linear(&of_text, &self.text.mlp_out, None)? }])
    }
}
