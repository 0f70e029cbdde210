//! Linear maps whose weights may lie in mapped memory, in half precision, or in several pieces.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Tensor};

use crate::{
    error::{Error, Result, What},
    gemm::unsupported,
    host::HostTensor,
};

const OP: &str = "linear";

/// One piece of a stacked weight.
#[derive(Debug, Clone)]
enum Part {
    Tensor(Tensor),
    Host(HostTensor),
}

impl Part {
    fn dims(&self) -> &[usize] {
        match self {
            Self::Tensor(t) => t.dims(),
            Self::Host(t) => t.dims(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Self::Tensor(t) => t.dtype(),
            Self::Host(t) => t.dtype(),
        }
    }
}

/// The matrix `[out_features, in_features]` of a linear map: a tensor, or host memory read where it lies, or several
/// stacked by rows. Cloning is cheap: the elements are shared.
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
    fn new(part: Part) -> Result<Self> {
        let dtype = part.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(unsupported(OP, "weight", dtype));
        }
        let &[out_features, in_features] = part.dims() else {
            let expected = "[out_features, in_features]".into();
            return Err(Error::Shape { op: OP, operand: "weight", got: part.dims().to_vec(), expected });
        };
        Ok(Self { parts: vec![part], out_features, in_features, dtype })
    }

    /// From a candle tensor `[out_features, in_features]` of f32, f16 or bf16, any strides, any device.
    ///
    /// # Errors
    /// [`Error::DType`] for any other element type, [`Error::Shape`] for any other rank.
    pub fn from_tensor(weight: Tensor) -> Result<Self> {
        Self::new(Part::Tensor(weight))
    }

    /// From mapped memory `[out_features, in_features]` of f32, f16 or bf16; nothing is copied, now or later.
    ///
    /// # Errors
    /// [`Error::DType`] for any other element type, [`Error::Shape`] for any other rank.
    pub fn from_host(weight: HostTensor) -> Result<Self> {
        Self::new(Part::Host(weight))
    }

    /// Rows of all parts one after another (q, k, v as one map), without copying them. Parts may differ in kind.
    ///
    /// # Errors
    /// [`Error::Argument`] without parts; [`Error::Shape`] if `in_features` differ; [`Error::DType`] if element types
    /// differ.
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
            if part.dtype != all.dtype {
                let expected = "the dtype of the first weight of the stack";
                return Err(Error::DType { op: OP, operand: "stacked weight", got: part.dtype, expected });
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

    /// Element type as stored.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The matrix as one tensor of `dtype` on `device`: for devices that have no path of their own.
    fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let parts = self.parts.iter().map(|part| match part {
            Part::Tensor(t) => t.to_device(device).and_then(|t| t.to_dtype(dtype)).what("linear: weight"),
            Part::Host(t) => t.to_tensor(dtype, device),
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
/// **Dtypes**: x and weight f32, f16 or bf16, independently; bias any float type; sums in f32; result in x's dtype,
/// rounded once, after the bias.
///
/// **Formula**: `y[.., o] = sum_i x[.., i] W[o, i] + bias[o]`.
///
/// **Numerics** (CPU): products are summed in blocks of 192 consecutive `i`, the blocks' sums in order, so the result
/// does not depend on the number of threads. Half-precision weights are widened block by block while they are used;
/// no f32 copy of a matrix ever exists. Up to 4 rows of x take a path that reads the weights once at memory speed and
/// sums in another order. The tests hold 1e-5 relative to a sum in f64.
///
/// On CUDA: cuBLAS products with f32 sums (f32 is true f32); a weight of x's dtype that lies on the device in rows or columns
/// is not copied. Operands of different dtypes are widened to f32 for the call, without the speed of half precision; host
/// memory is uploaded for it. The same device and shapes give the same bits. On other devices: candle's matmul in x's
/// dtype, with the weight converted for the call.
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
    let tracked = weight.parts.iter().any(|part| matches!(part, Part::Tensor(t) if t.track_op()));
    if tracked || x.track_op() || bias.is_some_and(Tensor::track_op) {
        return Err(Error::Argument { op: OP, what: "operands that track gradients are not supported".into() });
    }
    if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(unsupported(OP, "x", x.dtype()));
    }
    match x.device() {
        Device::Cpu => cpu::linear(x, weight, bias),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => cuda::linear(x, weight, bias),
        device => {
            let weight = weight.to_tensor(x.dtype(), device)?;
            let y = x.broadcast_matmul(&weight.t().what(OP)?).what("linear: matmul")?;
            match bias {
                Some(bias) => bias.to_dtype(x.dtype()).and_then(|b| y.broadcast_add(&b)).what("linear: bias"),
                None => Ok(y),
            }
        }
    }
}
