//! Convolutions as graphs: pure data that says everything on which a plan depends, and its description to the library.
//!
//! | pattern | operations | result |
//! |---|---|---|
//! | [`Pattern::Plain`] | convolution | y |
//! | [`Pattern::Bias`] | convolution, + bias | y |
//! | [`Pattern::ResidualBias`] | convolution, + residual, + bias | y |
//!
//! Between the operations values are f32, so y is rounded once. These very orders are what the library has compiled
//! kernels for; bias first and then the residual would have to be compiled at run time.

use std::fmt::Write;

use super::{
    descriptor::{ConvolutionMode, DataType, Descriptor, Finalised},
    graph::{ALIGNMENT, AXES, Describer, Element, TensorSpec},
    library::Library,
    refusal::Failure,
    sys::{CROSS_CORRELATION, RawHandle, attribute, data_type, descriptor, pointwise},
};

/// Strides of a packed tensor `[N, C, ..]` in the order that kernels for its element type read: channels innermost in half
/// precision, outermost in f32.
pub(crate) fn packed_strides(dims: &[usize], element: Element) -> Vec<usize> {
    let inwards: Vec<usize> = if element.is_half() && dims.len() > 1 {
        [0].into_iter().chain(2..dims.len()).chain([1]).collect()
    } else {
        (0..dims.len()).collect()
    };
    let mut strides = vec![1; dims.len()];
    let mut next = 1;
    for &axis in inwards.iter().rev() {
        strides[axis] = next;
        next *= dims[axis];
    }
    strides
}

/// The operations of a graph; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Pattern {
    Plain,
    Bias,
    ResidualBias,
}

/// A convolution with its epilogue, over two or three axes. One axis is described as two, of which the first has extent 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ConvolutionSpec {
    /// Element type of every operand.
    pub(crate) element: Element,
    /// Input `[N, C, space..]`.
    pub(crate) x: TensorSpec,
    /// Filters `[K, C / groups, taps..]`; the groups follow from the channels.
    pub(crate) w: TensorSpec,
    /// Output `[N, K, space..]`; the residual lies in memory alike.
    pub(crate) y: TensorSpec,
    /// Zeros before each axis.
    pub(crate) before: [i64; 3],
    /// Zeros behind each axis.
    pub(crate) after: [i64; 3],
    /// Step of the output along each axis.
    pub(crate) stride: [i64; 3],
    /// Distance of taps along each axis.
    pub(crate) dilation: [i64; 3],
    /// Operations behind the convolution.
    pub(crate) pattern: Pattern,
}

/// Names of the real tensors of a graph, in the order in which [`ConvolutionSpec::operands`] lists them.
pub(super) mod id {
    pub(in crate::cudnn) const X: i64 = 1;
    pub(in crate::cudnn) const W: i64 = 2;
    pub(in crate::cudnn) const Y: i64 = 3;
    pub(in crate::cudnn) const BIAS: i64 = 4;
    pub(in crate::cudnn) const RESIDUAL: i64 = 5;
    pub(super) const CONVOLVED: i64 = 10;
    pub(super) const ADDED: i64 = 11;
}

impl ConvolutionSpec {
    /// Axes of space.
    pub(super) fn spatial(&self) -> usize {
        self.x.rank - 2
    }

    /// Taps along the axes of space.
    pub(super) fn taps(&self) -> &[i64] {
        &self.w.dims()[2..]
    }

    /// Ids of the tensors that an execution is given, in its order: x, w, y, then bias and residual as far as there are.
    pub(super) fn operands(&self) -> &'static [i64] {
        match self.pattern {
            Pattern::Plain => &[id::X, id::W, id::Y],
            Pattern::Bias => &[id::X, id::W, id::Y, id::BIAS],
            Pattern::ResidualBias => &[id::X, id::W, id::Y, id::BIAS, id::RESIDUAL],
        }
    }

    /// Everything on which a plan depends, as one line: the key of plans on disk.
    pub(super) fn key(&self) -> String {
        let mut key = format!("conv {:?} {:?} x{:?} w{:?} y{:?}", self.pattern, self.element, self.x, self.w, self.y);
        let n = self.spatial();
        // Writing to a string does not fail.
        let _ = write!(
            key,
            " pad{:?}{:?} stride{:?} dilation{:?} align{ALIGNMENT}",
            &self.before[..n],
            &self.after[..n],
            &self.stride[..n],
            &self.dilation[..n]
        );
        key
    }

    /// Bias `[1, K, 1..]`, packed.
    fn bias(&self) -> TensorSpec {
        let k = self.y.dims[1];
        let mut bias = TensorSpec { rank: self.y.rank, dims: [0; AXES], strides: [0; AXES] };
        bias.dims[..bias.rank].fill(1);
        bias.strides[..bias.rank].fill(k);
        bias.dims[1] = k;
        bias.strides[1] = 1;
        bias
    }

    /// Describes the graph to the library. `handle` may be left out from version 9.8 on.
    ///
    /// The second value is what the graph refers to; it has to live as long.
    pub(super) fn describe(
        &self,
        library: &'static Library,
        handle: Option<RawHandle>,
    ) -> Result<(Finalised, Vec<Finalised>), Failure> {
        let describer = Describer { library, element: self.element };
        let n = self.spatial();
        let x = describer.tensor(id::X, &self.x)?;
        let w = describer.tensor(id::W, &self.w)?;
        let y = describer.tensor(id::Y, &self.y)?;
        let convolution = Descriptor::new(library, descriptor::CONVOLUTION)?
            .one(attribute::CONVOLUTION_COMPUTE_TYPE, DataType(data_type::FLOAT))?
            .one(attribute::CONVOLUTION_MODE, ConvolutionMode(CROSS_CORRELATION))?
            .one(attribute::CONVOLUTION_SPATIAL_DIMENSIONS, n as i64)?
            .all(attribute::CONVOLUTION_PRE_PADDINGS, &self.before[..n])?
            .all(attribute::CONVOLUTION_POST_PADDINGS, &self.after[..n])?
            .all(attribute::CONVOLUTION_FILTER_STRIDES, &self.stride[..n])?
            .all(attribute::CONVOLUTION_DILATIONS, &self.dilation[..n])?
            .finalise()?;
        let convolve = |into: &Finalised| {
            Descriptor::new(library, descriptor::OPERATION_CONVOLUTION_FORWARD)?
                .descriptors(attribute::FORWARD_CONVOLUTION, &[&convolution])?
                .descriptors(attribute::FORWARD_X, &[&x])?
                .descriptors(attribute::FORWARD_W, &[&w])?
                .descriptors(attribute::FORWARD_Y, &[into])?
                .one(attribute::FORWARD_ALPHA, 1f32)?
                .one(attribute::FORWARD_BETA, 0f32)?
                .finalise()
        };
        let mut keep = Vec::new();
        let operations = match self.pattern {
            Pattern::Plain => vec![convolve(&y)?],
            Pattern::Bias => {
                let bias = describer.tensor(id::BIAS, &self.bias())?;
                let convolved = describer.intermediate(id::CONVOLVED, &self.y)?;
                let operations = vec![
                    convolve(&convolved)?,
                    describer.pointwise(pointwise::ADD, &convolved, Some(&bias), &y, &mut keep)?,
                ];
                keep.extend([bias, convolved]);
                operations
            }
            Pattern::ResidualBias => {
                let bias = describer.tensor(id::BIAS, &self.bias())?;
                let residual = describer.tensor(id::RESIDUAL, &self.y)?;
                let convolved = describer.intermediate(id::CONVOLVED, &self.y)?;
                let added = describer.intermediate(id::ADDED, &self.y)?;
                let operations = vec![
                    convolve(&convolved)?,
                    describer.pointwise(pointwise::ADD, &convolved, Some(&residual), &added, &mut keep)?,
                    describer.pointwise(pointwise::ADD, &added, Some(&bias), &y, &mut keep)?,
                ];
                keep.extend([bias, residual, convolved, added]);
                operations
            }
        };
        let graph = describer.graph(&operations, handle)?;
        keep.extend([x, w, y, convolution]);
        keep.extend(operations);
        Ok((graph, keep))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A convolution with "same" padding and filters of extent `taps`, channels last for half and first for f32.
    pub(in crate::cudnn) fn same(
        element: Element,
        pattern: Pattern,
        x: &[usize],
        k: usize,
        taps: &[usize],
    ) -> ConvolutionSpec {
        let lay = |dims: &[usize]| TensorSpec::new(dims, &packed_strides(dims, element));
        let w: Vec<usize> = [k, x[1]].iter().chain(taps).copied().collect();
        let y: Vec<usize> = [x[0], k].iter().chain(&x[2..]).copied().collect();
        let mut pad = [0; 3];
        for (pad, &taps) in pad.iter_mut().zip(taps) {
            *pad = (taps as i64 - 1) / 2;
        }
        ConvolutionSpec {
            element,
            x: lay(x).unwrap(),
            w: lay(&w).unwrap(),
            y: lay(&y).unwrap(),
            before: pad,
            after: pad,
            stride: [1; 3],
            dilation: [1; 3],
            pattern,
        }
    }

    /// In the order that is not the one of the element type.
    pub(in crate::cudnn) fn channels_first(dims: &[usize]) -> TensorSpec {
        TensorSpec::new(dims, &packed_strides(dims, Element::F32)).unwrap()
    }

    pub(in crate::cudnn) fn channels_last(dims: &[usize]) -> TensorSpec {
        TensorSpec::new(dims, &packed_strides(dims, Element::Bf16)).unwrap()
    }

    #[test]
    fn the_order_in_memory_follows_the_element_type() {
        for half in [Element::F16, Element::Bf16] {
            assert_eq!(packed_strides(&[2, 3, 4, 5, 6], half), [360, 1, 90, 18, 3]);
            assert_eq!(packed_strides(&[7, 3, 1, 5], half), [15, 1, 15, 3]);
        }
        assert_eq!(packed_strides(&[2, 3, 4, 5], Element::F32), [60, 20, 5, 1]);
        assert_eq!(packed_strides(&[5], Element::F16), [1]);
    }

    #[test]
    fn tensors_beyond_five_axes_or_64_bits_are_refused() {
        assert!(TensorSpec::new(&[1; 6], &[1; 6]).is_none());
        assert!(TensorSpec::new(&[1; 4], &[1; 5]).is_none());
        assert!(TensorSpec::new(&[usize::MAX; 4], &[1; 4]).is_none());
    }

    #[test]
    fn the_bias_is_packed_along_the_channels() {
        let spec = same(Element::Bf16, Pattern::Bias, &[1, 16, 4, 8, 8], 96, &[3, 3, 3]);
        assert_eq!(spec.bias().dims(), [1, 96, 1, 1, 1]);
        assert_eq!(spec.bias().strides(), [96, 1, 96, 96, 96]);
    }

    #[test]
    fn everything_that_changes_a_plan_changes_the_key() {
        let base = same(Element::Bf16, Pattern::Bias, &[1, 16, 4, 8, 8], 32, &[3, 3, 3]);
        let mut wider = vec![base];
        wider.push(ConvolutionSpec { element: Element::F16, ..base });
        wider.push(ConvolutionSpec { pattern: Pattern::ResidualBias, ..base });
        wider.push(ConvolutionSpec { before: [2, 1, 1], ..base });
        wider.push(ConvolutionSpec { after: [0, 1, 1], ..base });
        wider.push(ConvolutionSpec { stride: [1, 2, 2], ..base });
        wider.push(ConvolutionSpec { dilation: [1, 1, 2], ..base });
        wider.push(ConvolutionSpec { x: channels_first(&[1, 16, 4, 8, 8]), ..base });
        wider.push(ConvolutionSpec { w: channels_first(&[32, 16, 3, 3, 3]), ..base });
        wider.push(ConvolutionSpec { y: channels_first(&[1, 32, 4, 8, 8]), ..base });
        let keys: HashSet<String> = wider.iter().map(ConvolutionSpec::key).collect();
        assert_eq!(keys.len(), wider.len());
        let specs: HashSet<ConvolutionSpec> = wider.iter().copied().collect();
        assert_eq!(specs.len(), wider.len());
    }

    #[test]
    fn the_key_is_one_readable_line() {
        let spec = same(Element::F16, Pattern::Plain, &[1, 2, 1, 4], 3, &[1, 3]);
        let key = "conv Plain F16 x[1, 2, 1, 4]/[8, 1, 8, 2] w[3, 2, 1, 3]/[6, 1, 6, 2] y[1, 3, 1, 4]/[12, 1, 12, 3] \
                   pad[0, 1][0, 1] stride[1, 1] dilation[1, 1] align16";
        assert_eq!(spec.key(), key);
    }
}
