//! The definition, in loops: the oracle of the fast path.

use candle_core::{DType, Tensor};

use super::{ConvParams, ConvProblem};
use crate::error::{Result, What};

/// [`super::conv_nd`] by its formula, in f64: result in f64 on the CPU. Slow; any strides, dtypes and device.
///
/// # Errors
/// As [`super::conv_nd`] for shapes and parameters.
pub fn conv_nd<const D: usize>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    let problem = ConvProblem::new(x.dims(), weight.dims(), params)?;
    let load = |t: &Tensor| t.to_dtype(DType::F64).and_then(|t| t.flatten_all()?.to_vec1::<f64>()).what("reference");
    let (x, weight) = (load(x)?, load(weight)?);
    let bias = bias.map(load).transpose()?;
    let ConvProblem { n, c, k, groups, input: [d, h, w], filter, output: [z, p, q], .. } = problem;
    let (cg, kg) = (c / groups, k / groups);
    let mut y = Vec::with_capacity(n * k * z * p * q);
    for n in 0..n {
        for k in 0..k {
            for out in (0..z * p * q).map(|i| [i / (p * q), i / q % p, i % q]) {
                let mut sum = bias.as_ref().map_or(0.0, |bias| bias[k]);
                for c in 0..cg {
                    for tap in taps(filter) {
                        // Where the tap falls, in the input without its padding.
                        let at: [Option<usize>; 3] = std::array::from_fn(|axis| {
                            let padded = out[axis] * problem.stride[axis] + tap[axis] * problem.dilation[axis];
                            padded.checked_sub(problem.padding[axis]).filter(|&i| i < problem.input[axis])
                        });
                        if let [Some(iz), Some(iy), Some(ix)] = at {
                            let channel = k / kg * cg + c;
                            let xi = (((n * groups * cg + channel) * d + iz) * h + iy) * w + ix;
                            let [t, r, s] = tap;
                            let wi = (((k * cg + c) * filter[0] + t) * filter[1] + r) * filter[2] + s;
                            sum += x[xi] * weight[wi];
                        }
                    }
                }
                y.push(sum);
            }
        }
    }
    Tensor::from_vec(y, problem.output_dims::<D>(), &candle_core::Device::Cpu).what("reference")
}

/// All positions of a filter, the last axis fastest.
fn taps([t, r, s]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..t * r * s).map(move |i| [i / (r * s), i / s % r, i % s])
}
