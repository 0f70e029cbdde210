//! The middle blocks: attention over all pixels of the coarsest level, between two residual blocks.

use candle_core::Tensor;
use candle_fork::{Activation, AttentionMask, What, attention, nn::Linear, residual};
use weights::{Expected, Loader};

use super::{
    layers::GroupNorm,
    resnet::{Channels, Resnet},
};
use crate::{
    error::Result,
    plan::{Below, join},
};

/// Attention with one head of all channels, residual.
#[derive(Debug)]
pub struct MidAttention {
    norm: GroupNorm,
    qkv: Linear,
    out: Linear,
}

const QKV: [&str; 3] = ["to_q", "to_k", "to_v"];

impl MidAttention {
    /// Adds the block's tensors below `prefix` to `list` (`PREFIX.group_norm.weight`, `PREFIX.to_q.weight` ...).
    pub fn expected(channels: usize, prefix: &str, list: &mut Vec<Expected>) {
        let mut block = Below::new(list, prefix);
        block.with_bias("group_norm", &[channels]);
        for name in QKV {
            block.with_bias(name, &[channels, channels]);
        }
        block.with_bias("to_out.0", &[channels, channels]);
    }

    /// Takes the block's tensors from `loader`.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) if a tensor cannot be read.
    pub fn load(loader: &mut Loader, groups: usize, prefix: &str) -> Result<Self> {
        let [q, k, v] = QKV.map(|name| join(prefix, &join(name, "weight")));
        let mut biases = Vec::new();
        for name in QKV {
            biases.push(loader.tensor(&join(prefix, &join(name, "bias")))?);
        }
        let bias = Tensor::cat(&biases, 0).what("biases of query, key and value")?;
        let out = join(prefix, "to_out.0");
        Ok(Self {
            norm: GroupNorm::load(loader, &join(prefix, "group_norm"), groups)?,
            qkv: Linear::new(loader.linear_stack(&[&q, &k, &v])?, Some(bias)),
            out: Linear::new(loader.linear(&join(&out, "weight"))?, Some(loader.tensor(&join(&out, "bias"))?)),
        })
    }

    /// x `[B, C, H, W]` plus what its pixels attend to.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if the shape does not fit the weights.
    pub fn forward(&self, x: Tensor) -> Result<Tensor> {
        let (batch, channels, height, width) = x.dims4().what("input of the middle attention")?;
        let pixels = height * width;
        let normed = self.norm.forward(&x, Activation::None)?;
        // Pixels as rows, which is how channels-last memory has them.
        let tokens = normed.permute((0, 2, 3, 1)).and_then(|t| t.contiguous()?.reshape((batch, pixels, channels)));
        drop(normed);
        let qkv = self.qkv.forward(&tokens.what("pixels")?)?;
        let heads = qkv.reshape((batch, pixels, 3, channels)).what("query, key and value")?;
        drop(qkv);
        let part = |index: usize| heads.narrow(2, index, 1).what("query, key or value");
        let scale = (channels as f32).powf(-0.5);
        let attended = attention(&part(0)?, &part(1)?, &part(2)?, scale, AttentionMask::Full)?;
        drop(heads);
        let attended = attended.reshape((batch, pixels, channels)).what("attention output")?;
        let branch = self.out.forward(&attended)?;
        drop(attended);
        let branch = branch.reshape((batch, height, width, channels)).and_then(|t| t.permute((0, 3, 1, 2)));
        Ok(residual(&x, &branch.what("pixels")?)?)
    }
}

/// Residual block, attention (where the configuration has it), residual block.
#[derive(Debug)]
pub(super) struct MidBlock {
    first: Resnet,
    attention: Option<MidAttention>,
    second: Resnet,
}

impl MidBlock {
    pub(super) fn expected(channels: usize, add_attention: bool, prefix: &str, list: &mut Vec<Expected>) {
        if add_attention {
            MidAttention::expected(channels, &join(prefix, "attentions.0"), list);
        }
        for index in 0..2 {
            Resnet::expected(Channels::same(channels), &format!("{prefix}.resnets.{index}"), list);
        }
    }

    pub(super) fn load(
        loader: &mut Loader,
        channels: usize,
        groups: usize,
        add_attention: bool,
        prefix: &str,
    ) -> Result<Self> {
        let attention =
            if add_attention { Some(MidAttention::load(loader, groups, &join(prefix, "attentions.0"))?) } else { None };
        let channels = Channels::same(channels);
        Ok(Self {
            first: Resnet::load(loader, channels, groups, &join(prefix, "resnets.0"))?,
            attention,
            second: Resnet::load(loader, channels, groups, &join(prefix, "resnets.1"))?,
        })
    }

    pub(super) fn forward(&self, mut x: Tensor) -> Result<Tensor> {
        x = self.first.forward(x)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(x)?;
        }
        self.second.forward(x)
    }
}
