//! The blocks: neighborhood attention and a gated MLP, each behind a norm and ending in a residual sum.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_fork::{
    LinearWeight, Pairing, What, heads_of,
    layout::copy_into,
    linear, neighborhood_attention, norm_rope, residual, rms_norm, swiglu,
    token_block::{TokenBlock, TokenBlockWeights, TokenEntries},
};

use super::{
    config::DiffusionDecoderConfig,
    names::GATES,
    parts::{Linear, Parts},
    passes::in_two_passes,
    rope::{Angles, RopeTable},
    slabs::slabs,
};
use crate::error::Result;

/// Of every norm.
pub(super) const EPS: f64 = 1e-6;

/// Where a block works.
pub(super) struct Place<'a> {
    /// Tokens along T, H and W.
    pub(super) grid: [usize; 3],
    pub(super) rope: &'a RopeTable,
    /// Most bytes of intermediate tensors.
    pub(super) scratch_bytes: u64,
}

impl Place<'_> {
    /// Tokens of a frame.
    pub(super) fn plane(&self) -> usize {
        self.grid[1] * self.grid[2]
    }

    /// How many rows of `row_bytes` fit into the scratch; at least one.
    pub(super) fn rows(&self, row_bytes: usize) -> usize {
        usize::try_from(self.scratch_bytes / row_bytes.max(1) as u64).unwrap_or(usize::MAX).max(1)
    }
}

/// A norm and the linear map behind it. A modulation is part of both: its scale multiplies the weight of the norm, and what
/// the map makes of its shift is added to the bias, so that neither costs a pass over the tokens.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Weight of the norm, `[C]`.
    pub(super) norm: Tensor,
    /// Bias of the map.
    pub(super) bias: Option<Tensor>,
}

impl Entry {
    /// The same after `norm(x) (1 + scale) + shift`; scale and shift `[C]` f32.
    fn modulated(&self, weight: &LinearWeight, scale: &Tensor, shift: &Tensor) -> Result<Self> {
        let norm = self.norm.to_dtype(DType::F32).and_then(|norm| norm.mul(&scale.affine(1.0, 1.0)?));
        let shift = shift.unsqueeze(0).what("shift of a modulation")?;
        let bias = linear(&shift, weight, self.bias.as_ref())?.squeeze(0).what("shift behind a map")?;
        Ok(Self { norm: norm.what("scale of a modulation")?, bias: Some(bias) })
    }
}

#[derive(Debug)]
struct Attention {
    qkv: LinearWeight,
    norm_q: Tensor,
    norm_k: Tensor,
    out: Linear,
    heads: usize,
    head_dim: usize,
    window: [usize; 3],
}

impl Attention {
    /// `x + attention(norm(x))`, x `[B, S, C]`.
    fn forward(&self, x: &Tensor, entry: &Entry, place: &Place<'_>) -> Result<Tensor> {
        let (batch, tokens, channels) = x.dims3().what("tokens")?;
        let plane = place.plane();
        // The projection, queries and keys, the result.
        let most = place.rows(batch * plane * channels * 6 * x.dtype().size_in_bytes());
        let slabs = slabs(place.grid[0], self.window[0], most);
        if let [_] = slabs.as_slice() {
            let attended = self.attend(x, entry, place.grid, place.rope.spread()?)?;
            return Ok(residual(x, &self.out.forward(&attended)?)?);
        }
        let out = Tensor::zeros((batch, tokens, channels), x.dtype(), x.device()).what("attention of all slabs")?;
        for slab in slabs {
            let (first, len) = (slab.keys.start * plane, slab.keys.len() * plane);
            let keys = x.narrow(1, first, len).what("tokens of a slab")?;
            let grid = [slab.keys.len(), place.grid[1], place.grid[2]];
            let attended = self.attend(&keys, entry, grid, &place.rope.spread()?.tokens(first, len)?)?;
            let (start, len) = (slab.rows.start * plane, slab.rows.len() * plane);
            let own = attended.narrow(1, start - first, len).what("attention of a slab")?;
            let part = |t: &Tensor| t.narrow(1, start, len).what("tokens of a slab");
            copy_into(&residual(&part(x)?, &self.out.forward(&own)?)?, &part(&out)?)?;
        }
        Ok(out)
    }

    /// What attention gives for the tokens of a grid, before its last map.
    fn attend(&self, x: &Tensor, entry: &Entry, [t, h, w]: [usize; 3], rope: &Angles) -> Result<Tensor> {
        let (batch, tokens, channels) = x.dims3().what("tokens")?;
        let (heads, head_dim) = (self.heads, self.head_dim);
        let qkv = linear(&rms_norm(x, &entry.norm, EPS)?, &self.qkv, entry.bias.as_ref())?;
        let turned = |start: usize, norm: &Tensor| -> Result<Tensor> {
            let part = heads_of(&qkv, start, heads, head_dim)?;
            let turned = norm_rope(&part, norm, &rope.cos, &rope.sin, EPS, Pairing::Interleaved)?;
            Ok(turned.reshape((batch, t, h, w, heads, head_dim)).what("heads of a grid")?)
        };
        let (q, k) = (turned(0, &self.norm_q)?, turned(channels, &self.norm_k)?);
        let v = qkv.reshape((batch, t, h, w, 3 * heads, head_dim)).and_then(|all| all.narrow(4, 2 * heads, heads));
        // The reference scales queries before it rotates them, which commutes.
        let scale = (head_dim as f32).powf(-0.5);
        let attended = neighborhood_attention(&q, &k, &v.what("values of a grid")?, self.window, scale)?;
        Ok(attended.reshape((batch, tokens, channels)).what("attention of a grid")?)
    }
}

#[derive(Debug)]
struct Mlp {
    /// Gate above, value below.
    gate_up: LinearWeight,
    down: LinearWeight,
}

impl Mlp {
    /// `x + down(silu(gate(norm(x))) up(norm(x)))`, x `[B, S, C]`, in runs of tokens that fit the scratch.
    fn forward(&self, x: &Tensor, entry: &Entry, place: &Place<'_>) -> Result<Tensor> {
        let flat = x.flatten(0, 1).what("tokens")?;
        let (tokens, channels) = flat.dims2().what("tokens")?;
        // The normed tokens, both projections and their product.
        let width = channels + self.gate_up.out_features() + self.down.in_features();
        let most = place.rows(width * x.dtype().size_in_bytes());
        let run = |first: usize, len: usize| -> Result<Tensor> {
            let x = flat.narrow(0, first, len).what("tokens of a run")?;
            let hidden = swiglu(&linear(&rms_norm(&x, &entry.norm, EPS)?, &self.gate_up, entry.bias.as_ref())?)?;
            Ok(residual(&x, &linear(&hidden, &self.down, None)?)?)
        };
        if most >= tokens {
            return Ok(run(0, tokens)?.reshape(x.shape()).what("mlp of all tokens")?);
        }
        let out = Tensor::zeros((tokens, channels), x.dtype(), x.device()).what("mlp of all tokens")?;
        for first in (0..tokens).step_by(most) {
            let len = most.min(tokens - first);
            copy_into(&run(first, len)?, &out.narrow(0, first, len).what("tokens of a run")?)?;
        }
        Ok(out.reshape(x.shape()).what("mlp of all tokens")?)
    }
}

/// A block of a deterministic stage.
#[derive(Debug)]
pub(super) struct NaBlock {
    attention: Attention,
    mlp: Mlp,
    entries: [Entry; 2],
}

impl NaBlock {
    pub(super) fn load(
        parts: &mut Parts<'_>,
        prefix: &str,
        config: &DiffusionDecoderConfig,
        channels: usize,
        window: [usize; 3],
    ) -> Result<Self> {
        Self::load_gated(parts, prefix, config, channels, window, [None, None])
    }

    /// With gates of attention and of the MLP.
    fn load_gated(
        parts: &mut Parts<'_>,
        prefix: &str,
        config: &DiffusionDecoderConfig,
        channels: usize,
        window: [usize; 3],
        [gate_attention, gate_mlp]: [Option<&Tensor>; 2],
    ) -> Result<Self> {
        let Linear { weight: qkv, bias } = parts.qkv(&format!("{prefix}.attn"))?;
        let attention = Attention {
            qkv,
            norm_q: parts.tensor(&format!("{prefix}.attn.norm_q.weight"))?,
            norm_k: parts.tensor(&format!("{prefix}.attn.norm_k.weight"))?,
            out: parts.gated(&format!("{prefix}.attn.to_out.0"), gate_attention)?,
            heads: channels / config.head_dim,
            head_dim: config.head_dim,
            window,
        };
        let gate_up = ["w_gate", "w_up"].map(|part| format!("{prefix}.mlp.{part}.weight"));
        let mlp = Mlp {
            gate_up: parts.stack(&gate_up)?,
            down: parts.gated_weight(&format!("{prefix}.mlp.w_down.weight"), gate_mlp)?,
        };
        let entries = [
            Entry { norm: parts.tensor(&format!("{prefix}.norm1.weight"))?, bias: Some(bias) },
            Entry { norm: parts.tensor(&format!("{prefix}.norm2.weight"))?, bias: None },
        ];
        Ok(Self { attention, mlp, entries })
    }

    /// x `[B, S, C]` behind the block.
    pub(super) fn forward(&self, x: Tensor, place: &Place<'_>) -> Result<Tensor> {
        self.forward_with(x, &self.entries, place)
    }

    /// Owns x, so that it is gone before the MLP begins: tokens are most of the memory of a decode.
    fn forward_with(&self, x: Tensor, [attention, mlp]: &[Entry; 2], place: &Place<'_>) -> Result<Tensor> {
        let attended = self.attention.forward(&x, attention, place)?;
        drop(x);
        self.mlp.forward(&attended, mlp, place)
    }
}

/// A block of the denoising stage: takes in the context, and modulates both norms.
#[derive(Debug)]
pub(super) struct DiffusionBlock {
    context: Linear,
    /// Added to the shared modulation, `[7, C]` f32.
    table: Tensor,
    block: NaBlock,
    /// The same as kernels of a device take it, where it has some.
    passes: Option<TokenBlock>,
}

/// The modulation of a block at one timestep.
#[derive(Debug, Clone)]
pub(super) struct BlockModulation(Arc<Modulated>);

#[derive(Debug)]
struct Modulated {
    entries: [Entry; 2],
    /// The same for the passes.
    passes: Option<TokenEntries>,
}

impl DiffusionBlock {
    pub(super) fn load(
        parts: &mut Parts<'_>,
        prefix: &str,
        config: &DiffusionDecoderConfig,
        channels: usize,
    ) -> Result<Self> {
        let gates = if parts.spelling.is_gated() {
            GATES.map(|gate| parts.wide(&format!("{prefix}.{gate}")).map(Some))
        } else {
            [Ok(None), Ok(None), Ok(None)]
        };
        let [attention, mlp, context] = gates;
        let (attention, mlp, context) = (attention?, mlp?, context?);
        let window = config.stage5_kernel;
        let context = parts.gated(&format!("{prefix}.context_proj"), context.as_ref())?;
        let table = parts.wide(&format!("{prefix}.scale_shift_table"))?;
        let block = NaBlock::load_gated(parts, prefix, config, channels, window, [attention.as_ref(), mlp.as_ref()])?;
        let NaBlock { attention, mlp, .. } = &block;
        let weights = TokenBlockWeights {
            context: Some((&context.weight, &context.bias)),
            qkv: &attention.qkv,
            head_norms: [&attention.norm_q, &attention.norm_k],
            out: (&attention.out.weight, &attention.out.bias),
            gate_up: &mlp.gate_up,
            down: &mlp.down,
            eps: EPS,
        };
        let passes = if parts.dtype == DType::BF16 { TokenBlock::new(&weights, table.device())? } else { None };
        Ok(Self { context, table, block, passes })
    }

    /// Whether tokens change where they lie.
    pub(super) fn is_in_place(&self) -> bool {
        self.passes.is_some()
    }

    /// From what the timestep gives to all blocks, `[7, C]` f32: scale and shift of attention, an unused gate, scale and
    /// shift of the MLP, and two more unused gates.
    pub(super) fn modulation(&self, shared: &Tensor) -> Result<BlockModulation> {
        let chunks = shared.add(&self.table).what("modulation")?;
        let chunk = |index: usize| chunks.get(index).what("chunk of a modulation");
        let NaBlock { attention, mlp, entries: [first, second] } = &self.block;
        let first = first.modulated(&attention.qkv, &chunk(0)?, &chunk(1)?)?;
        let second = second.modulated(&mlp.gate_up, &chunk(3)?, &chunk(4)?)?;
        let passes = match (&self.passes, &first.bias) {
            (Some(passes), Some(bias)) => {
                Some(passes.entries([&first.norm, &second.norm], bias, second.bias.as_ref())?)
            }
            _ => None,
        };
        Ok(BlockModulation(Arc::new(Modulated { entries: [first, second], passes })))
    }

    /// x and context `[B, S, C]`. Owns x, which is changed where it lies if it can be.
    pub(super) fn forward(
        &self,
        x: Tensor,
        context: &Tensor,
        modulation: &BlockModulation,
        place: &Place<'_>,
    ) -> Result<Tensor> {
        let Modulated { entries, passes } = &*modulation.0;
        if let (Some(block), Some(passes)) = (&self.passes, passes) {
            in_two_passes(block, passes, &x, context, self.block.attention.window, place)?;
            return Ok(x);
        }
        let told = residual(&x, &self.context.forward(context)?)?;
        drop(x);
        self.block.forward_with(told, entries, place)
    }
}
