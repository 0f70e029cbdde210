//! Transformer blocks of 256 channels, in two passes over their tokens: what comes before the attention, and what comes behind
//! it. Neither normed tokens nor hidden values of the MLP reach the device's memory.
//!
//! Narrow blocks over many tokens are bound by memory where each op reads and writes them all: a block of 256 channels with 1024
//! hidden values moves some 60 times its tokens op by op, and 9 times in two passes.
//!
//! | file | what |
//! |---|---|
//! | `pack.rs` | the order of the weights |
//! | `stream.cuh`, `products.cuh` | what both kernels share |
//! | `token_project_sm90.cu` | context, norm, queries, keys and values, their norm and rotation |
//! | `token_mlp_sm90.cu` | the map behind the attention, norm, SwiGLU |
//!
//! Served: bf16 on CUDA devices of compute capability 9.0, 4 heads of 64. Everywhere else [`TokenBlock::new`] gives nothing, and
//! a block is [`crate::linear()`], [`crate::rms_norm()`], [`crate::norm_rope()`] and [`crate::swiglu()`] one after the other:
//! these are also the reference, from which the passes differ by leaving out roundings.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod pack;

use candle_core::{DType, Device, Tensor};

use crate::{
    error::{Error, Result, What},
    linear::LinearWeight,
    operand::{check, check_shape, shape_error},
};

#[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code, reason = "weights are packed for devices"))]
const OP: &str = "token_block";

/// Channels of a token.
pub const CHANNELS: usize = 256;
/// Components of a head.
pub const HEAD_DIM: usize = 64;
/// Pairs of components that turn with the position along T, H and W.
pub const PAIRS: [usize; 3] = [8, 12, 12];

/// What a block is made of.
#[derive(Debug, Clone, Copy)]
pub struct TokenBlockWeights<'a> {
    /// Map `[256, 256]` with bias of what is added to the tokens first, if something is.
    pub context: Option<(&'a LinearWeight, &'a Tensor)>,
    /// Queries, keys and values, `[768, 256]`, heads next to one another.
    pub qkv: &'a LinearWeight,
    /// Weights of the norms of query and key heads, `[64]` each.
    pub head_norms: [&'a Tensor; 2],
    /// The map behind the attention, `[256, 256]`, with bias.
    pub out: (&'a LinearWeight, &'a Tensor),
    /// Gate and up of the MLP, `[2 H, 256]`, the gate above.
    pub gate_up: &'a LinearWeight,
    /// Down, `[256, H]`.
    pub down: &'a LinearWeight,
    /// Of all norms.
    pub eps: f64,
}

/// A block whose weights lie on a device as its kernels take them.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "there is none"))]
pub struct TokenBlock {
    /// Stages of the first pass, those of the context first.
    project: Tensor,
    /// Stages of the second.
    mlp: Tensor,
    context_bias: Option<Tensor>,
    out_bias: Tensor,
    head_norms: Tensor,
    chunks: usize,
    eps: f32,
}

/// The norms before attention and MLP, and the biases behind them: what a modulation changes of a block.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "there is no block"))]
pub struct TokenEntries {
    norms: [Tensor; 2],
    qkv_bias: Tensor,
    hidden_bias: Tensor,
}

/// Cosines and sines along the axes of a grid of tokens.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "there is no block"))]
pub struct TokenAngles {
    along: [Tensor; 3],
    grid: [usize; 3],
}

impl TokenAngles {
    /// Tables `[extent, pairs, 2]` of cosine and sine along T, H and W, with [`PAIRS`]; f32.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::DType`] for other tables; [`Error::Candle`] if candle fails.
    pub fn new(tables: [&Tensor; 3]) -> Result<Self> {
        let mut grid = [0; 3];
        for (axis, table) in tables.iter().enumerate() {
            match *table.dims() {
                [extent, pairs, 2] if pairs == PAIRS[axis] => grid[axis] = extent,
                _ => return Err(shape_error(OP, "table", table, format!("[extent, {}, 2]", PAIRS[axis]))),
            }
            if table.dtype() != DType::F32 {
                return Err(Error::DType { op: OP, operand: "table", got: table.dtype(), expected: "f32" });
            }
        }
        let [t, h, w] = tables.map(|table| table.contiguous().what(OP));
        Ok(Self { along: [t?, h?, w?], grid })
    }
}

impl TokenBlock {
    /// The block, if `device` has kernels for it.
    ///
    /// # Errors
    /// [`Error::Candle`] if its weights cannot be brought into their order.
    pub fn new(weights: &TokenBlockWeights<'_>, device: &Device) -> Result<Option<Self>> {
        #[cfg(feature = "cuda")]
        if cuda::serves(device)? && weights.are_served() {
            return Self::packed(weights, device).map(Some);
        }
        let _ = (weights, device);
        Ok(None)
    }

    #[cfg(feature = "cuda")]
    fn packed(weights: &TokenBlockWeights<'_>, device: &Device) -> Result<Self> {
        let matrix = |weight: &LinearWeight| weight.to_tensor(DType::BF16, device);
        let qkv = matrix(weights.qkv)?;
        let mut stages = Vec::new();
        if let Some((weight, _)) = weights.context {
            stages.push(pack::columns(&matrix(weight)?)?);
        }
        for part in 0..3 {
            stages.push(pack::columns(&qkv.narrow(0, part * CHANNELS, CHANNELS).what(OP)?)?);
        }
        let (gate_up, down) = (matrix(weights.gate_up)?, matrix(weights.down)?);
        let mlp = [pack::columns(&matrix(weights.out.0)?)?, pack::hidden(&gate_up, &down)?];
        let head_norms = weights.head_norms.map(wide);
        let [query, key] = head_norms;
        Ok(Self {
            project: Tensor::cat(&stages, 0).what(OP)?,
            mlp: Tensor::cat(&mlp, 0).what(OP)?,
            context_bias: weights.context.map(|(_, bias)| wide(bias)).transpose()?,
            out_bias: wide(weights.out.1)?,
            head_norms: Tensor::cat(&[query?, key?], 0).what(OP)?,
            chunks: weights.down.in_features() / pack::PANEL,
            eps: weights.eps as f32,
        })
    }

    /// Norms `[256]` before attention and MLP, bias `[768]` of queries, keys and values, bias `[2 H]` of gate and up, if there
    /// is one.
    ///
    /// # Errors
    /// [`Error::Shape`] for other extents; [`Error::Candle`] if candle fails.
    pub fn entries(
        &self,
        norms: [&Tensor; 2],
        qkv_bias: &Tensor,
        hidden_bias: Option<&Tensor>,
    ) -> Result<TokenEntries> {
        let hidden = 64 * self.chunks;
        for norm in norms {
            check_shape(OP, "norm", norm, &[CHANNELS])?;
        }
        check_shape(OP, "qkv_bias", qkv_bias, &[3 * CHANNELS])?;
        let hidden_bias = match hidden_bias {
            Some(bias) => {
                check_shape(OP, "hidden_bias", bias, &[2 * hidden])?;
                // For each 64 hidden values those of the gate, then those of up.
                let parts = wide(bias)?.reshape((2, self.chunks, 64)).and_then(|parts| parts.transpose(0, 1));
                parts.and_then(|parts| parts.contiguous()?.flatten_all()).what(OP)?
            }
            None => Tensor::zeros(2 * hidden, DType::F32, self.mlp.device()).what(OP)?,
        };
        let [first, second] = norms.map(wide);
        Ok(TokenEntries { norms: [first?, second?], qkv_bias: wide(qkv_bias)?, hidden_bias })
    }

    /// Adds the context to x, in place, and gives queries, keys and values of the sum.
    ///
    /// **Shapes**: x and context `[S, 256]`, contiguous, tokens `position..position + S` of the grid of `angles`; carried
    /// `[P, 768]`, contiguous: what a call for the tokens before gave. Result `[P + S, 768]`: carried, then queries, keys and
    /// values of x, 4 heads of 64 each.
    /// **Dtypes**: bf16; sums in f32.
    /// **Formula**: `x += context W^T + b` if the block has one; `qkv = rms_norm(x) W^T + b`; then the norm of each head of q
    /// and k and its rotation, as [`crate::qk_norm_rope()`].
    /// **Numerics**: x, the normed tokens and the result are rounded, and nothing else. A token's bits depend on nothing but
    /// the token and its position.
    /// **Policy**: none.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Argument`] for other operands, or a context that the block does not have or
    /// lacks; [`Error::Candle`] if the driver refuses; [`Error::NotCompiled`] without feature `cuda`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "there is no block"))]
    pub fn project(
        &self,
        x: &Tensor,
        context: Option<&Tensor>,
        entries: &TokenEntries,
        angles: &TokenAngles,
        position: usize,
        carried: Option<&Tensor>,
    ) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return cuda::project(self, x, context, entries, angles, position, carried);
        #[cfg(not(feature = "cuda"))]
        Err(Error::NotCompiled { op: OP, feature: "cuda" })
    }

    /// Adds what follows the attention to x, in place.
    ///
    /// **Shapes**: x and attended `[S, 256]`, contiguous.
    /// **Dtypes**: bf16; sums in f32.
    /// **Formula**: `x += attended W^T + b; x += down(silu(gate(rms_norm(x))) up(rms_norm(x)))`.
    /// **Numerics**: x, the normed tokens and the gated hidden values are rounded, and nothing else. A token's bits depend on
    /// nothing but the token.
    /// **Policy**: none.
    ///
    /// # Errors
    /// As [`TokenBlock::project`].
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "there is no block"))]
    pub fn finish(&self, x: &Tensor, attended: &Tensor, entries: &TokenEntries) -> Result<()> {
        #[cfg(feature = "cuda")]
        return cuda::finish(self, x, attended, entries);
        #[cfg(not(feature = "cuda"))]
        Err(Error::NotCompiled { op: OP, feature: "cuda" })
    }
}

#[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code, reason = "only devices have kernels"))]
impl TokenBlockWeights<'_> {
    /// Whether the kernels are made for these extents and types.
    fn are_served(&self) -> bool {
        let hidden = self.down.in_features();
        let is = |weight: &LinearWeight, rows: usize, columns: usize| {
            weight.out_features() == rows && weight.in_features() == columns && weight.dtype() == DType::BF16
        };
        let square = |weight: &LinearWeight| is(weight, CHANNELS, CHANNELS);
        self.context.is_none_or(|(weight, _)| square(weight))
            && square(self.out.0)
            && is(self.qkv, 3 * CHANNELS, CHANNELS)
            && is(self.gate_up, 2 * hidden, CHANNELS)
            && is(self.down, CHANNELS, hidden)
            && hidden > 0
            && hidden.is_multiple_of(64)
            && self.head_norms.iter().all(|norm| norm.dims() == [HEAD_DIM])
            && self.context.iter().chain([&self.out]).all(|(_, bias)| bias.dims() == [CHANNELS])
    }
}

/// A small operand as the kernels read it.
fn wide(t: &Tensor) -> Result<Tensor> {
    check(OP, &[("parameter", t)])?;
    t.to_dtype(DType::F32).and_then(|t| t.contiguous()).what(OP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(rows: usize, columns: usize) -> LinearWeight {
        LinearWeight::from_tensor(Tensor::zeros((rows, columns), DType::BF16, &Device::Cpu).unwrap()).unwrap()
    }

    fn zeros(n: usize) -> Tensor {
        Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap()
    }

    #[test]
    fn only_blocks_of_256_channels_and_heads_of_64_are_served() {
        let (square, qkv, gate_up, down) = (weight(256, 256), weight(768, 256), weight(2048, 256), weight(256, 1024));
        let (bias, norm) = (zeros(256), zeros(64));
        let block = TokenBlockWeights {
            context: Some((&square, &bias)),
            qkv: &qkv,
            head_norms: [&norm, &norm],
            out: (&square, &bias),
            gate_up: &gate_up,
            down: &down,
            eps: 1e-6,
        };
        assert!(block.are_served() && TokenBlockWeights { context: None, ..block }.are_served());
        let (wide, narrow, other) = (weight(256, 512), weight(256, 1000), zeros(32));
        assert!(!TokenBlockWeights { context: Some((&wide, &bias)), ..block }.are_served());
        assert!(!TokenBlockWeights { down: &narrow, ..block }.are_served());
        assert!(!TokenBlockWeights { head_norms: [&norm, &other], ..block }.are_served());
        let exact = LinearWeight::from_tensor(Tensor::zeros((768, 256), DType::F32, &Device::Cpu).unwrap()).unwrap();
        assert!(!TokenBlockWeights { qkv: &exact, ..block }.are_served());
        // There are no kernels on the CPU.
        assert!(TokenBlock::new(&block, &Device::Cpu).unwrap().is_none());
    }

    #[test]
    fn angles_have_the_pairs_of_their_axis() {
        let table = |extent: usize, pairs: usize| Tensor::zeros((extent, pairs, 2), DType::F32, &Device::Cpu).unwrap();
        let angles = TokenAngles::new([&table(3, 8), &table(4, 12), &table(5, 12)]).unwrap();
        assert_eq!(angles.grid, [3, 4, 5]);
        assert!(matches!(TokenAngles::new([&table(3, 8), &table(4, 8), &table(5, 12)]), Err(Error::Shape { .. })));
    }
}
