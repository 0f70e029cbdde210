//! The geometry of a convolution, checked once.

use super::{ConvParams, OP};
use crate::error::{Error, Result};

/// A convolution of 1 to 3 spatial axes, written as one of three: missing axes have extent 1, the given ones are the
/// innermost. Letters as in CUTLASS: input `[N, C, D, H, W]`, filters `[K, C / groups, T, R, S]`, output
/// `[N, K, Z, P, Q]`. All extents are at least 1 and all element counts fit `isize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvProblem {
    /// Batch.
    pub n: usize,
    /// Input channels.
    pub c: usize,
    /// Filters, which are the output channels.
    pub k: usize,
    /// Channel groups: divides [`Self::c`] and [`Self::k`].
    pub groups: usize,
    /// Input extents D, H, W.
    pub input: [usize; 3],
    /// Filter extents T, R, S.
    pub filter: [usize; 3],
    /// Output extents Z, P, Q.
    pub output: [usize; 3],
    /// Step of the output along each axis.
    pub stride: [usize; 3],
    /// Distance of filter taps along each axis.
    pub dilation: [usize; 3],
    /// Zeros before each axis. Those behind it only matter for [`Self::output`].
    pub padding: [usize; 3],
}

impl ConvProblem {
    /// Checks a convolution of x `[N, C, spatial..]` with weight `[K, C / groups, filter..]`.
    ///
    /// The output extent of an axis is `(padded - effective) / stride + 1` (rounded down), where `padded` is the input
    /// with its zeros and `effective` is `(filter - 1) * dilation + 1`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a rank other than D + 2, an extent of zero, or channels that do not match;
    /// [`Error::Argument`] for a stride, dilation or group count of zero, groups that do not divide the channels, a
    /// filter larger than the padded input, or sizes beyond the address space.
    pub fn new<const D: usize>(x: &[usize], weight: &[usize], params: &ConvParams<D>) -> Result<Self> {
        const { assert!(D >= 1 && D <= 3, "one to three spatial axes") };
        for (operand, dims, letters) in [("x", x, "[N, C, ..]"), ("weight", weight, "[K, C / groups, ..]")] {
            if dims.len() != D + 2 || dims.contains(&0) {
                let expected = format!("{letters} with {D} spatial axes, no extent zero");
                return Err(Error::Shape { op: OP, operand, got: dims.to_vec(), expected });
            }
        }
        let (n, c, k, groups) = (x[0], x[1], weight[0], params.groups);
        if groups == 0 || !c.is_multiple_of(groups) || !k.is_multiple_of(groups) {
            return Err(argument(format!("{groups} groups do not divide {c} input and {k} output channels")));
        }
        if weight[1] != c / groups {
            let expected = format!("[K, {}, ..] ({c} channels in {groups} groups)", c / groups);
            return Err(Error::Shape { op: OP, operand: "weight", got: weight.to_vec(), expected });
        }
        let mut problem = Self {
            n,
            c,
            k,
            groups,
            input: [1; 3],
            filter: [1; 3],
            output: [1; 3],
            stride: [1; 3],
            dilation: [1; 3],
            padding: [0; 3],
        };
        for axis in 0..D {
            let (input, filter) = (x[2 + axis], weight[2 + axis]);
            let (stride, dilation, (before, after)) =
                (params.stride[axis], params.dilation[axis], params.padding[axis]);
            if stride == 0 || dilation == 0 {
                return Err(argument(format!("stride {stride} and dilation {dilation} must be at least 1")));
            }
            let padded = input.checked_add(before).and_then(|i| i.checked_add(after)).filter(|&i| fits(i));
            let effective = (filter - 1).checked_mul(dilation).and_then(|i| i.checked_add(1)).filter(|&i| fits(i));
            let (Some(padded), Some(effective)) = (padded, effective) else {
                return Err(argument(format!(
                    "axis {axis}: input {input} with padding ({before}, {after}) or filter {filter} with dilation \
                     {dilation} exceeds the address space"
                )));
            };
            if effective > padded {
                return Err(argument(format!(
                    "axis {axis}: filter {filter} with dilation {dilation} spans {effective}, the padded input {padded}"
                )));
            }
            let at = 3 - D + axis;
            problem.input[at] = input;
            problem.filter[at] = filter;
            problem.output[at] = (padded - effective) / stride + 1;
            problem.stride[at] = stride;
            problem.dilation[at] = dilation;
            problem.padding[at] = before;
        }
        let elements = |lead: &[usize], axes: &[usize; 3]| {
            lead.iter().chain(axes).try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| fits(n)).is_some()
        };
        if !(elements(&[n, c], &problem.input)
            && elements(&[k, c / groups], &problem.filter)
            && elements(&[n, k], &problem.output))
        {
            return Err(argument(format!("x {x:?} with weight {weight:?} exceeds the address space")));
        }
        Ok(problem)
    }

    /// Input channels of a group.
    pub fn channels_per_group(&self) -> usize {
        self.c / self.groups
    }

    /// Filters of a group.
    pub fn filters_per_group(&self) -> usize {
        self.k / self.groups
    }

    /// Products per output element: C / groups x T x R x S.
    pub fn depth(&self) -> usize {
        self.channels_per_group() * self.filter.iter().product::<usize>()
    }

    /// Output elements of one channel of one image: Z x P x Q.
    pub fn pixels(&self) -> usize {
        self.output.iter().product()
    }

    /// Whether every patch is the one pixel at its output's place, so that the convolution is a matrix product.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the CPU path does not ask"))]
    pub(super) fn is_pointwise(&self) -> bool {
        self.filter == [1; 3] && self.stride == [1; 3] && self.padding == [0; 3] && self.output == self.input
    }

    /// The zeros behind each axis that the output needs. Fewer than were given, if some of those are in no patch.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the CPU path does not ask"))]
    pub(super) fn padding_after(&self) -> [usize; 3] {
        std::array::from_fn(|axis| {
            let last = (self.output[axis] - 1) * self.stride[axis] + (self.filter[axis] - 1) * self.dilation[axis];
            (last + 1).saturating_sub(self.padding[axis] + self.input[axis])
        })
    }

    /// Shape of the output, `[N, K]` and the D innermost extents.
    pub(super) fn output_dims<const D: usize>(&self) -> Vec<usize> {
        [self.n, self.k].iter().chain(&self.output[3 - D..]).copied().collect()
    }
}

/// Whether that many elements of the widest type stay within `isize::MAX` bytes.
fn fits(elements: usize) -> bool {
    elements <= isize::MAX as usize / 8
}

fn argument(what: String) -> Error {
    Error::Argument { op: OP, what }
}
