//! Attention of every position of a grid to the positions around it.

use candle_core::Tensor;

use self::reference::Extents;
use crate::{
    element::with_element,
    error::{Error, Result, What},
    operand::{check, check_dtype, check_shape, on_cpu, shape_error},
};

#[cfg(any(feature = "cuda", test))]
mod choose;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;
mod window;

pub use window::Axis;

/// Attention of every position of a grid to a window of positions around it.
///
/// **Shapes**: q, k and v `[B, T, H, W, heads, D]`, with any strides (no copy while the last axis is packed: cut q, k and v
/// from one projection); result the same, contiguous. A plane is a grid with T = 1, a line one with T = H = 1.
/// **Window**: positions along T, H and W, each odd. Along each axis a query at `i` sees `window` neighbours from
/// `clamp(i - window / 2, 0, extent - window)` on: windows at a border are shifted inward, never cut. A window wider than
/// the axis is the whole axis; one that is so along every axis gives full attention.
/// **Dtypes**: f32, f16 or bf16, the same for all; products and softmax in f32, rounded once to that dtype.
/// **Formula**: `softmax(softmax_scale * q k^T) v` over the window of each query ("Neighborhood Attention Transformer",
/// Hassani et al., equations 1 to 3; windows as in `SHI-Labs/NATTEN`, with stride and dilation 1).
/// **Numerics**: on the CPU and in f32 within 1e-5 of the exact value, relative to the largest value, for scores up to 10 in
/// magnitude; in half precision on CUDA the weights are rounded to the operands' type before they meet the values. The
/// same bits on every run, for every number of threads and for a batch item alone. NaN and infinite scores give NaN; a NaN
/// or an infinity in k of a key that a query does not see never reaches it, one in v may, from up to 7 positions beyond
/// its window along each axis.
/// **Memory**: on the CPU a few MiB per thread and one buffer as large as the result, on CUDA nothing but the result.
///
/// # Errors
/// - [`Error::Shape`] if q is not of rank 6, or k or v has another shape.
/// - [`Error::DType`] for other element types, or if they differ.
/// - [`Error::Argument`] if a window is even or zero, the scale is not finite, or an operand tracks gradients or is on
///   another device.
/// - [`Error::Unsupported`] on devices other than CPU and CUDA, and on CUDA for heads of more than 256 components.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::neighborhood_attention;
/// // A line of five positions whose keys all score alike: the result is the mean of the values of each window.
/// let q = Tensor::zeros((1, 1, 1, 5, 1, 1), DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[1f32, 2.0, 3.0, 4.0, 9.0], &Device::Cpu)?.reshape((1, 1, 1, 5, 1, 1))?;
/// let y = neighborhood_attention(&q, &q, &v, [1, 1, 3], 1.0)?.flatten_all()?.to_vec1::<f32>()?;
/// for (y, mean) in y.into_iter().zip([2.0, 2.0, 3.0, 16.0 / 3.0, 16.0 / 3.0]) {
///     assert!((y - mean).abs() < 1e-6);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn neighborhood_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    window: [usize; 3],
    softmax_scale: f32,
) -> Result<Tensor> {
    run(&Problem::new(q, k, v, None, window, softmax_scale)?, Kernel::Fastest)
}

/// [`neighborhood_attention`] of some planes along T only: the queries that begin at position `first` of the keys, as many as
/// there are. Windows are those of the keys' grid, and bits those of the whole.
///
/// **Shapes**: q `[B, T', H, W, heads, D]`, k and v `[B, T, H, W, heads, D]` with `first + T' <= T`; result as q.
///
/// # Errors
/// Those of [`neighborhood_attention`]; [`Error::Argument`] also if the queries reach beyond the keys.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::neighborhood_attention::{neighborhood_attention, neighborhood_attention_of_planes};
/// let x = Tensor::randn(0f32, 1.0, (1, 6, 3, 4, 2, 8), &Device::Cpu)?;
/// let whole = neighborhood_attention(&x, &x, &x, [3, 3, 3], 1.0)?;
/// let part = neighborhood_attention_of_planes(&x.narrow(1, 2, 3)?, &x, &x, 2, [3, 3, 3], 1.0)?;
/// let difference = (part - whole.narrow(1, 2, 3)?)?.abs()?.max_all()?;
/// assert_eq!(difference.to_scalar::<f32>()?, 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn neighborhood_attention_of_planes(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first: usize,
    window: [usize; 3],
    softmax_scale: f32,
) -> Result<Tensor> {
    run(&Problem::new(q, k, v, Some(first), window, softmax_scale)?, Kernel::Fastest)
}

/// [`neighborhood_attention`] by one kernel of CUDA, to check and to time them. Elsewhere there is one only, and it does not
/// matter which is asked for.
///
/// # Errors
/// Those of [`neighborhood_attention`]; [`Error::Unsupported`] also where the kernel does not serve the problem.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::neighborhood_attention::{Kernel, neighborhood_attention_by};
/// let x = Tensor::ones((1, 2, 3, 4, 2, 8), DType::F32, &Device::Cpu)?;
/// let y = neighborhood_attention_by(Kernel::Plain, &x, &x, &x, [3, 3, 3], 1.0)?;
/// assert_eq!(y.dims(), x.dims());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn neighborhood_attention_by(
    kernel: Kernel,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    window: [usize; 3],
    softmax_scale: f32,
) -> Result<Tensor> {
    run(&Problem::new(q, k, v, None, window, softmax_scale)?, kernel)
}

const OP: &str = "neighborhood_attention";

/// A kernel of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kernel {
    /// The one that shapes, type and device choose.
    Fastest,
    /// For every shape and type, and slow: one query at a time.
    Plain,
    /// Tiles of matrix products, for half precision from compute capability 8.0 on.
    Tiled,
    /// Tiles by groups of warps, for half precision, compute capability 9.0 and heads of up to 64 components.
    WarpGroups,
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "the cpu has one kernel"))]
fn run(problem: &Problem<'_>, kernel: Kernel) -> Result<Tensor> {
    let q = problem.q;
    if q.elem_count() == 0 {
        return q.zeros_like().what("result of neighborhood attention");
    }
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return cuda::neighborhood_attention(problem, kernel);
    }
    if !on_cpu(q) {
        return Err(Error::Unsupported { op: OP, what: "this device".into() });
    }
    with_element!(OP, "q", q.dtype(), T => cpu::neighborhood_attention::<T>(problem))
}

/// Operands that fit each other.
struct Problem<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    /// Of the keys.
    extents: Extents,
    /// Position along T of the first query among the keys.
    first: usize,
    /// Queries along T.
    frames: usize,
    window: [usize; 3],
    softmax_scale: f32,
}

impl<'a> Problem<'a> {
    /// `first` for queries of some planes only.
    ///
    /// # Errors
    /// See [`neighborhood_attention`].
    fn new(
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        first: Option<usize>,
        window: [usize; 3],
        softmax_scale: f32,
    ) -> Result<Self> {
        check(OP, &[("q", q), ("k", k), ("v", v)])?;
        check_dtype(OP, "k", k, q)?;
        check_dtype(OP, "v", v, q)?;
        let &[batch, frames, h, w, heads, width] = q.dims() else {
            return Err(shape_error(OP, "q", q, "[B, T, H, W, heads, D]"));
        };
        let t = first.and_then(|_| k.dims().get(1).copied()).unwrap_or(frames);
        let first = first.unwrap_or(0);
        check_shape(OP, "k", k, &[batch, t, h, w, heads, width])?;
        check_shape(OP, "v", v, &[batch, t, h, w, heads, width])?;
        if first.checked_add(frames).is_none_or(|end| end > t) {
            let what = format!("queries of {frames} planes from plane {first} on, but keys of {t}");
            return Err(Error::Argument { op: OP, what });
        }
        if window.iter().any(|extent| extent % 2 == 0) {
            return Err(Error::Argument { op: OP, what: format!("window is {window:?}, expected odd extents") });
        }
        if !softmax_scale.is_finite() {
            let what = format!("softmax_scale is {softmax_scale}, expected a finite number");
            return Err(Error::Argument { op: OP, what });
        }
        let extents = Extents { batch, grid: [t, h, w], heads, width };
        Ok(Self { q, k, v, extents, first, frames, window, softmax_scale })
    }

    #[cfg(feature = "cuda")]
    fn shape(&self) -> choose::Shape {
        let &Self { extents, frames, window, softmax_scale, .. } = self;
        choose::Shape { dtype: self.q.dtype(), extents, frames, window, softmax_scale }
    }
}
