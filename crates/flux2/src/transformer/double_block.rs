//! A block with separate weights for the image and the text stream, which meet in attention.

use candle_core::Tensor;
use candle_fork::{LinearWeight, What, activation::swiglu, linear};
use weights::{Expected, Loader};

use super::{
    attention::{Heads, QueryKeyNorm},
    modulation::{DoubleModulation, Modulation},
    names::Widths,
    rope::RopeTable,
};
use crate::{
    error::Result,
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
    fn load(loader: &mut Loader, widths: &Widths, prefix: &str, names: &StreamNames) -> Result<Self> {
        let [q, k, v] = names.qkv.map(|name| join(prefix, name));
        Ok(Self {
            qkv: loader.linear_stack(&[&q, &k, &v])?,
            norm: QueryKeyNorm::load(loader, widths, &join(prefix, names.norm_query), &join(prefix, names.norm_key))?,
            projection: loader.linear(&join(prefix, names.projection))?,
            mlp_in: loader.linear(&join(prefix, names.mlp_in))?,
            mlp_out: loader.linear(&join(prefix, names.mlp_out))?,
            widths: *widths,
        })
    }

    fn heads(&self, x: &Tensor, modulation: &Modulation) -> Result<Heads> {
        let qkv = linear(&modulation.apply(x, self.widths.eps)?, &self.qkv, None)?;
        self.norm.heads(&qkv, &self.widths)
    }

    /// The stream after both branches, from its part of the attention's output.
    fn finish(&self, x: &Tensor, attended: &Tensor, modulation: &[Modulation; 2]) -> Result<Tensor> {
        let [attention, mlp] = modulation;
        let x = attention.add(x, &linear(attended, &self.projection, None)?)?;
        let hidden = linear(&mlp.apply(&x, self.widths.eps)?, &self.mlp_in, None)?;
        let hidden = swiglu(&hidden)?;
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
        Ok(Self {
            image: Stream::load(loader, widths, prefix, &IMAGE)?,
            text: Stream::load(loader, widths, prefix, &TEXT)?,
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
        let (_, text_tokens, _) = text.dims3().what("text stream")?;
        let (_, image_tokens, _) = image.dims3().what("image stream")?;
        let heads = self.text.heads(text, &modulation.text[0])?.then(self.image.heads(image, &modulation.image[0])?)?;
        let attended = heads.attend(rope, rope, &self.image.widths)?;
        let part = |start, len| attended.narrow(1, start, len).what("attention output of a stream");
        let text = self.text.finish(text, &part(0, text_tokens)?, &modulation.text)?;
        let image = self.image.finish(image, &part(text_tokens, image_tokens)?, &modulation.image)?;
        Ok((image, text))
    }
}
