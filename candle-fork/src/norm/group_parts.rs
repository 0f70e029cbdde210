//! Group norm of a tensor that is normed part by part: its statistics first, then any runs of its positions.

use candle_core::{DType, Device, Tensor};

use super::{check_eps, groups};
use crate::{
    activation::Activation,
    element::with_element,
    error::{Error, Result, What},
    operand::{check, check_shape, on_cpu, shape_error, to_f32_vec},
};

/// Mean and deviation of each group of channels of each batch item: what [`group_statistics`] found.
#[derive(Debug, Clone)]
pub struct GroupStatistics {
    /// `[N, G, ..]`: mean and inverse deviation in f64 on the CPU; as the kernels keep them on CUDA; in f32 elsewhere.
    values: Tensor,
    batch: usize,
    groups: usize,
}

/// The statistics of [`group_norm`](super::group_norm), for [`group_norm_part`].
///
/// **Shapes**: x `[N, C, ..]` with any strides, not empty.
/// **Dtypes**, **Numerics**, **Policy**: as [`group_norm`](super::group_norm).
///
/// # Errors
/// Those of [`group_norm`](super::group_norm); [`Error::Shape`] if x is empty.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{Activation, group_norm, norm::{group_norm_part, group_statistics}};
/// let x = Tensor::new(&[[[1f32, 3.0], [10.0, 20.0]]], &Device::Cpu)?;
/// let (one, zero) = (Tensor::ones(2, DType::F32, &Device::Cpu)?, Tensor::zeros(2, DType::F32, &Device::Cpu)?);
/// let statistics = group_statistics(&x, 2, 0.0)?;
/// let last = group_norm_part(&x.narrow(2, 1, 1)?, &statistics, &one, &zero, Activation::None)?;
/// assert_eq!(last.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn group_statistics(x: &Tensor, num_groups: usize, eps: f64) -> Result<GroupStatistics> {
    const OP: &str = "group_statistics";
    check(OP, &[("x", x)])?;
    let &[batch, channels, ..] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[N, C, ..]"));
    };
    if x.elem_count() == 0 {
        return Err(shape_error(OP, "x", x, "at least one element"));
    }
    check_groups(OP, channels, num_groups)?;
    check_eps(OP, eps)?;
    let values = values(x, [batch, num_groups], eps)?;
    Ok(GroupStatistics { values, batch, groups: num_groups })
}

fn values(x: &Tensor, [batch, num_groups]: [usize; 2], eps: f64) -> Result<Tensor> {
    const OP: &str = "group_statistics";
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return super::cuda::group_statistics(x, num_groups, eps);
    }
    if !on_cpu(x) {
        return super::device::group_statistics(x, num_groups, eps).what(OP);
    }
    let group_len = x.elem_count() / (batch * num_groups);
    let groups = with_element!(OP, "x", x.dtype(), T => groups::statistics::<T>(x, group_len, eps))?;
    let values: Vec<f64> = groups.iter().flat_map(|group| [group.mean, group.inverse]).collect();
    Tensor::from_vec(values, (batch, num_groups, 2), &Device::Cpu).what(OP)
}

/// [`group_norm`](super::group_norm) of a part of a tensor, by the statistics of the whole.
///
/// **Shapes**: x `[N, C, ..]`, any of the positions of the tensor that `statistics` were taken of; weight and bias `[C]`;
/// result of x's shape and order, see [`group_norm`](super::group_norm).
/// **Numerics**: the bits that these positions have in [`group_norm`](super::group_norm) of the whole.
/// **Dtypes**, **Policy**: as there.
///
/// # Errors
/// Those of [`group_norm`](super::group_norm); [`Error::Shape`] for another number of items than that of `statistics`,
/// [`Error::Argument`] for statistics on another device.
pub fn group_norm_part(
    x: &Tensor,
    statistics: &GroupStatistics,
    weight: &Tensor,
    bias: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    const OP: &str = "group_norm_part";
    check(OP, &[("x", x), ("weight", weight), ("bias", bias)])?;
    let &[batch, channels, ref spatial @ ..] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[N, C, ..]"));
    };
    if batch != statistics.batch {
        return Err(shape_error(OP, "x", x, format!("[{}, C, ..]", statistics.batch)));
    }
    check_shape(OP, "weight", weight, &[channels])?;
    check_shape(OP, "bias", bias, &[channels])?;
    check_groups(OP, channels, statistics.groups)?;
    if !statistics.values.device().same_device(x.device()) {
        return Err(Error::Argument { op: OP, what: "the statistics are on another device than x".into() });
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return super::cuda::group_norm_part(x, &statistics.values, weight, bias, activation);
    }
    if !on_cpu(x) {
        return super::device::group_norm_part(x, &statistics.values, weight, bias, activation).what(OP);
    }
    let values = statistics.values.to_dtype(DType::F64).and_then(|t| t.flatten_all()?.to_vec1::<f64>()).what(OP)?;
    let groups: Vec<_> = values.as_chunks().0.iter().map(|&[mean, inverse]| groups::Group { mean, inverse }).collect();
    let problem = groups::Problem {
        channels,
        extent: spatial.iter().product(),
        num_groups: statistics.groups,
        // Part of the deviations.
        eps: 0.0,
        weight: to_f32_vec(weight)?,
        bias: to_f32_vec(bias)?,
        activation,
    };
    with_element!(OP, "x", x.dtype(), T => groups::group_norm::<T>(x, Some(&groups), &problem))
}

fn check_groups(op: &'static str, channels: usize, groups: usize) -> Result<()> {
    if groups > 0 && channels.is_multiple_of(groups) {
        return Ok(());
    }
    Err(Error::Argument { op, what: format!("{channels} channels do not split into {groups} groups") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        layout::channels_last,
        norm::group_norm,
        testing::{DTYPES, Data, tensor, to_f64},
    };

    /// Bands of rows have the bits that they have in the whole, also where the whole is cut into blocks.
    #[test]
    fn parts_have_the_bits_of_the_whole() {
        for (dims, groups) in [([2, 6, 5, 4], 3), ([1, 4, 150, 130], 2), ([1, 8, 3, 1], 8), ([3, 2, 1, 7], 1)] {
            let [_, channels, rows, _] = dims;
            for dtype in DTYPES {
                let x = tensor(&dims, dtype, Data::LargeMean, 1);
                let weight = tensor(&[channels], DType::F32, Data::Normal, 2);
                let bias = tensor(&[channels], DType::BF16, Data::Normal, 3);
                for x in [x.clone(), channels_last(&x).unwrap()] {
                    for activation in [Activation::None, Activation::Silu] {
                        let whole = group_norm(&x, &weight, &bias, groups, 1e-6, activation).unwrap();
                        let statistics = group_statistics(&x, groups, 1e-6).unwrap();
                        for (start, len) in [(0, rows), (rows / 2, rows - rows / 2), (rows - 1, 1)] {
                            let part = x.narrow(2, start, len).unwrap();
                            let got = group_norm_part(&part, &statistics, &weight, &bias, activation).unwrap();
                            let want = whole.narrow(2, start, len).unwrap();
                            assert_eq!(to_f64(&got), to_f64(&want), "{dims:?} {dtype:?} {start} {len}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_composition_agrees() {
        let x = tensor(&[2, 6, 5, 4], DType::F32, Data::Normal, 1);
        let weight = tensor(&[6], DType::F32, Data::Normal, 2);
        let statistics = super::super::device::group_statistics(&x, 3, 1e-6).unwrap();
        let part = x.narrow(2, 1, 3).unwrap();
        let got =
            super::super::device::group_norm_part(&part, &statistics, &weight, &weight, Activation::Silu).unwrap();
        let whole = group_norm(&x, &weight, &weight, 3, 1e-6, Activation::Silu).unwrap();
        for (got, want) in to_f64(&got).iter().zip(to_f64(&whole.narrow(2, 1, 3).unwrap())) {
            assert!((got - want).abs() < 1e-5, "{got} {want}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let x = tensor(&[2, 6, 4], DType::F32, Data::Normal, 1);
        let weight = tensor(&[6], DType::F32, Data::Normal, 2);
        assert!(matches!(group_statistics(&x, 4, 1e-6), Err(Error::Argument { .. })));
        assert!(matches!(group_statistics(&x, 0, 1e-6), Err(Error::Argument { .. })));
        assert!(matches!(group_statistics(&x, 3, -1.0), Err(Error::Argument { .. })));
        assert!(matches!(group_statistics(&x.narrow(2, 0, 0).unwrap(), 3, 0.0), Err(Error::Shape { .. })));
        let statistics = group_statistics(&x, 3, 1e-6).unwrap();
        let part = |x: &Tensor, weight: &Tensor| group_norm_part(x, &statistics, weight, weight, Activation::None);
        assert!(part(&x, &weight).is_ok());
        assert!(matches!(part(&x.narrow(0, 0, 1).unwrap(), &weight), Err(Error::Shape { operand: "x", .. })));
        assert!(matches!(part(&x, &weight.narrow(0, 0, 3).unwrap()), Err(Error::Shape { operand: "weight", .. })));
        let four = x.narrow(1, 0, 4).unwrap();
        assert!(matches!(part(&four, &weight.narrow(0, 0, 4).unwrap()), Err(Error::Argument { .. })));
    }
}
