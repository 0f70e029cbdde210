//! Linear maps whose weights may lie in mapped memory, in half precision, quantised, or in several pieces.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod quantized;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Tensor};

use crate::{
    convrot::w8a8,
    error::{Error, Result, What},
    gemm::unsupported,
    host::HostTensor,
    quant::{QuantMode, QuantWeight},
    target::{check_target, store},
};

use self::quantized::Recipe;

const OP: &str = "linear";

/// One piece of a stacked weight.
#[derive(Debug, Clone)]
enum Part {
    Tensor(Tensor),
    Host(HostTensor),
    Quant { weight: QuantWeight, mode: QuantMode },
}

impl Part {
    fn dims(&self) -> Vec<usize> {
        match self {
            Self::Tensor(t) => t.dims().to_vec(),
            Self::Host(t) => t.dims().to_vec(),
            Self::Quant { weight, .. } => vec![weight.out_features(), weight.in_features()],
        }
    }

    /// Element type, unless it is quantised.
    fn dtype(&self) -> Option<DType> {
        match self {
            Self::Tensor(t) => Some(t.dtype()),
            Self::Host(t) => Some(t.dtype()),
            Self::Quant { .. } => None,
        }
    }
}

/// The matrix `[out_features, in_features]` of a linear map: a tensor, or host memory read where it lies, or a quantised
/// matrix, or several of them stacked by rows. Cloning is cheap: the elements are shared.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::LinearWeight;
///
/// let rows = |n| Tensor::zeros((n, 6), DType::BF16, &Device::Cpu);
/// let (q, k) = (LinearWeight::from_tensor(rows(4)?)?, LinearWeight::from_tensor(rows(2)?)?);
/// let qkv = LinearWeight::stack(vec![q, k.clone(), k])?;
/// assert_eq!((qkv.out_features(), qkv.in_features()), (8, 6));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct LinearWeight {
    parts: Vec<Part>,
    out_features: usize,
    in_features: usize,
    dtype: DType,
}

impl LinearWeight {
    fn new(part: Part, dtype: DType) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(unsupported(OP, "weight", dtype));
        }
        let dims = part.dims();
        let &[out_features, in_features] = &dims[..] else {
            let expected = "[out_features, in_features]".into();
            return Err(Error::Shape { op: OP, operand: "weight", got: dims, expected });
        };
        Ok(Self { parts: vec![part], out_features, in_features, dtype })
    }

    /// From a candle tensor `[out_features, in_features]` of f32, f16 or bf16, any strides, any device.
    ///
    /// # Errors
    /// [`Error::DType`] for any other element type, [`Error::Shape`] for any other rank.
    pub fn from_tensor(weight: Tensor) -> Result<Self> {
        let dtype = weight.dtype();
        Self::new(Part::Tensor(weight), dtype)
    }

    /// From mapped memory `[out_features, in_features]` of f32, f16 or bf16; nothing is copied, now or later.
    ///
    /// # Errors
    /// [`Error::DType`] for any other element type, [`Error::Shape`] for any other rank.
    pub fn from_host(weight: HostTensor) -> Result<Self> {
        let dtype = weight.dtype();
        Self::new(Part::Host(weight), dtype)
    }

    /// From a quantised matrix that calls will use on `device`, to which its codes go now: as they are, or decoded into
    /// `dtype` in mode [`QuantMode::DequantizeOnce`]. On the CPU codes stay where they are mapped.
    ///
    /// # Errors
    /// Those of [`QuantWeight::dequantize`] and [`QuantWeight::to_device`].
    pub fn from_quant(weight: QuantWeight, mode: QuantMode, dtype: DType, device: &Device) -> Result<Self> {
        if mode == QuantMode::DequantizeOnce {
            return Self::from_tensor(weight.dequantize(dtype, device)?);
        }
        Self::new(Part::Quant { weight: weight.to_device(device)?, mode }, dtype)
    }

    /// Rows of all parts one after another (q, k, v as one map), without copying them. Parts may differ in kind.
    ///
    /// # Errors
    /// [`Error::Argument`] without parts; [`Error::Shape`] if `in_features` differ; [`Error::DType`] if the element types
    /// of parts that are not quantised differ.
    pub fn stack(parts: Vec<LinearWeight>) -> Result<Self> {
        let mut parts = parts.into_iter();
        let Some(mut all) = parts.next() else {
            return Err(Error::Argument { op: OP, what: "a stack needs at least one weight".into() });
        };
        for part in parts {
            if part.in_features != all.in_features {
                return Err(Error::Shape {
                    op: OP,
                    operand: "stacked weight",
                    got: vec![part.out_features, part.in_features],
                    expected: format!("[_, {}]", all.in_features),
                });
            }
            // What is quantised takes the type of the call.
            match (all.float(), part.float()) {
                (Some(first), Some(got)) if first != got => {
                    let expected = "the dtype of the first weight of the stack";
                    return Err(Error::DType { op: OP, operand: "stacked weight", got, expected });
                }
                (None, Some(dtype)) => all.dtype = dtype,
                _ => {}
            }
            all.out_features = all.out_features.checked_add(part.out_features).ok_or_else(|| Error::Argument {
                op: OP,
                what: "the rows of a stack exceed the address space".into(),
            })?;
            all.parts.extend(part.parts);
        }
        Ok(all)
    }

    /// Rows `start..start + len` (one map of a fused one); nothing is copied.
    ///
    /// # Errors
    /// [`Error::Argument`] if the matrix has no such rows, or `len` is 0.
    pub fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let end = start.checked_add(len).filter(|&end| len > 0 && end <= self.out_features).ok_or_else(|| {
            let what = format!("rows {start} to {start} + {len} of a matrix of {} rows", self.out_features);
            Error::Argument { op: OP, what }
        })?;
        let mut parts = Vec::new();
        let mut first = 0;
        for part in &self.parts {
            let rows = part.dims()[0];
            let (from, to) = (start.max(first), end.min(first + rows));
            if from < to {
                parts.push(match part {
                    Part::Tensor(t) => Part::Tensor(t.narrow(0, from - first, to - from).what("linear: rows")?),
                    Part::Host(t) => Part::Host(t.rows(from - first, to - from)?),
                    Part::Quant { weight, mode } => {
                        Part::Quant { weight: weight.rows(from - first, to - from)?, mode: *mode }
                    }
                });
            }
            first += rows;
        }
        Ok(Self { parts, out_features: len, in_features: self.in_features, dtype: self.dtype })
    }

    /// Rows of the matrix: features of the result.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns of the matrix: features of the argument.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Element type as stored; of a quantised matrix, the one that [`LinearWeight::from_quant`] was given.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Element type of the parts that are not quantised.
    fn float(&self) -> Option<DType> {
        self.parts.iter().find_map(Part::dtype)
    }

    /// Whether a part is quantised.
    #[cfg(feature = "cuda")]
    fn is_quantised(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Quant { .. }))
    }

    /// The matrix, if it is one tensor as it is.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match &self.parts[..] {
            [Part::Tensor(t)] => Some(t),
            _ => None,
        }
    }

    /// The parts that are tensors.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parts.iter().filter_map(|part| match part {
            Part::Tensor(t) => Some(t),
            _ => None,
        })
    }

    /// The same matrix with parts that are tensors copied into one, so that a product on a device is one product. Parts in
    /// host memory stay where they lie.
    ///
    /// # Errors
    /// [`Error::Candle`] if candle cannot copy them.
    pub fn merged(self) -> Result<Self> {
        let tensors: Vec<Tensor> = self.tensors().cloned().collect();
        if tensors.len() < 2 || tensors.len() < self.parts.len() {
            return Ok(self);
        }
        Self::from_tensor(Tensor::cat(&tensors, 0).what("linear: merged weights")?)
    }

    /// The matrix as one tensor of `dtype` on `device`, decoded if it is quantised: for what has no path of its own.
    ///
    /// # Errors
    /// [`Error::Candle`] if candle cannot copy it; those of [`QuantWeight::dequantize`].
    pub fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let parts = self.parts.iter().map(|part| match part {
            Part::Tensor(t) => t.to_device(device).and_then(|t| t.to_dtype(dtype)).what("linear: weight"),
            Part::Host(t) => t.to_tensor(dtype, device),
            Part::Quant { weight, .. } => weight.dequantize(dtype, device),
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 0).what("linear: stacked weights")
    }
}

/// `x W^T + bias`.
///
/// **Shapes**: x `[.., in_features]`, any strides; weight `[out_features, in_features]`; bias `[out_features]`; result
/// `[.., out_features]`, contiguous.
///
/// **Dtypes**: x and weight f32, f16 or bf16, independently, or a quantised weight; bias any float type; sums in f32;
/// result in x's dtype, rounded once, after the bias.
///
/// **Formula**: `y[.., o] = sum_i x[.., i] W[o, i] + bias[o]`.
///
/// **Numerics** (CPU): products are summed in blocks of 192 consecutive `i`, the blocks' sums in order, so the result
/// does not depend on the number of threads. Half-precision weights are widened block by block while they are used;
/// no f32 copy of a matrix ever exists. Up to 4 rows of x take a path that reads the weights once at memory speed and
/// sums in another order. The tests hold 1e-5 relative to a sum in f64.
///
/// Of a quantised weight, rows are decoded block by block like those in half precision; for a rotated one x is rotated, in
/// f32, instead of the weight. [`QuantMode::W8A8`] is another product: of integers, exact up to its scales, with the same
/// bits on the CPU and CUDA. A stack of parts that need different products is computed in pieces.
///
/// On CUDA: cuBLASLt products (half precision) or cuBLAS products (f32, true f32) with f32 sums; a weight of x's dtype that
/// lies on the device in rows or columns is not copied. Operands of different dtypes are widened to f32 for the call, without
/// the speed of half precision; host memory is uploaded for it, a quantised weight is decoded into x's dtype for it. The same
/// device, library, shapes and alignment give the same bits. An x of three axes or more is a batch: an item has the bits that it has alone. On other devices: candle's matmul in
/// x's dtype, with the weight converted for the call.
///
/// **Policy**: [`choice`](crate::cudnn_policy::Policy::choice), on CUDA in half precision: plans are compared only among those
/// that give the same bits.
///
/// **Errors**: [`Error::Shape`] for a last axis other than `in_features` or a bias of another length;
/// [`Error::DType`] for an x that is not f32, f16 or bf16; [`Error::Argument`] if an operand tracks gradients;
/// [`Error::Candle`] if candle fails.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::{LinearWeight, linear};
///
/// let weight = LinearWeight::from_tensor(Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?)?;
/// let x = Tensor::new(&[[1f32, -1.]], &Device::Cpu)?;
/// let y = linear(&x, &weight, None)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1., -1., -1.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    check(x, weight, bias)?;
    quantized::in_pieces(x, weight, bias, |weight, recipe, bias| match (x.device(), recipe) {
        (_, Recipe::W8A8(group)) => w8a8::linear(x, &quantized::int8(weight)?, group, bias),
        (Device::Cpu, recipe) => cpu::linear(x, weight, recipe, bias),
        #[cfg(feature = "cuda")]
        (Device::Cuda(_), _) => cuda::linear(x, weight, bias),
        (device, _) => {
            let weight = weight.to_tensor(x.dtype(), device)?;
            let y = x.broadcast_matmul(&weight.t().what(OP)?).what("linear: matmul")?;
            match bias {
                Some(bias) => bias.to_dtype(x.dtype()).and_then(|b| y.broadcast_add(&b)).what("linear: bias"),
                None => Ok(y),
            }
        }
    })
}

/// [`linear`] into a part of a tensor that exists: rows or columns of a buffer that several maps fill side by side.
///
/// **Shapes**: out `[.., out_features]` with a packed last axis; whoever shares out's memory sees the result. Everything else
/// as [`linear`].
///
/// # Errors
/// As [`linear`], and for an out of another shape or dtype, whose last axis is not packed, which overlaps itself or shares
/// its memory with x or bias; [`Error::Unsupported`] on other devices than CPU and CUDA.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{LinearWeight, linear_into};
///
/// let weight = LinearWeight::from_tensor(Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?)?;
/// let buffer = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// linear_into(&Tensor::new(&[[1f32, 1.]], &Device::Cpu)?, &weight, None, &buffer.narrow(0, 1, 1)?.narrow(1, 1, 2)?)?;
/// assert_eq!(buffer.to_vec2::<f32>()?, [[0., 0., 0.], [0., 3., 7.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_into(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
    check(x, weight, bias)?;
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = weight.out_features;
    }
    let operands: Vec<&Tensor> = [Some(x), bias].into_iter().flatten().chain(weight.tensors()).collect();
    check_target(OP, out, &dims, x, &operands)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::linear_into(x, weight, bias, out);
    }
    store(OP, out, &linear(x, weight, bias)?)
}

/// Checks what both ops ask of their operands.
fn check(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>) -> Result<()> {
    let (out_features, in_features) = (weight.out_features, weight.in_features);
    if x.dims().last() != Some(&in_features) {
        let expected = format!("[.., {in_features}]");
        return Err(Error::Shape { op: OP, operand: "x", got: x.dims().to_vec(), expected });
    }
    if let Some(bias) = bias
        && bias.dims() != [out_features]
    {
        let expected = format!("[{out_features}]");
        return Err(Error::Shape { op: OP, operand: "bias", got: bias.dims().to_vec(), expected });
    }
    let tracked = weight.tensors().any(Tensor::track_op);
    if tracked || x.track_op() || bias.is_some_and(Tensor::track_op) {
        return Err(Error::Argument { op: OP, what: "operands that track gradients are not supported".into() });
    }
    if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(unsupported(OP, "x", x.dtype()));
    }
    Ok(())
}
