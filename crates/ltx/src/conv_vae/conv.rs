//! The convolution of these networks.

use candle_core::Tensor;
use candle_fork::{
    ConvParams, What, conv_nd, conv_nd_add,
    frames::{Surround, surround, tail_frames},
    layout::{contiguous, native},
};

use super::{
    architecture::{Causality, SpatialPadding},
    builder::Builder,
    norm::Input,
    slots::{Pass, Slot},
};
use crate::error::Result;

/// A 3 x 3 x 3 convolution. In time it sees copies of the first and last frame beyond the ends of a clip.
#[derive(Debug)]
pub(super) struct Conv3d {
    weight: Tensor,
    bias: Tensor,
    causality: Causality,
    padding: SpatialPadding,
    /// The last frames seen, with what surrounds their pictures.
    slot: Slot,
}

/// Frames that a kernel sees besides its own.
const REACH: usize = 2;

const WHAT: &str = "filters of a convolution";

impl Conv3d {
    /// The convolution at `PREFIX.conv`.
    pub(super) fn load(
        builder: &mut Builder<'_>,
        prefix: &str,
        causality: Causality,
        padding: SpatialPadding,
    ) -> Result<Self> {
        let prefix = format!("{prefix}.conv");
        let (weight, bias) = (builder.kernel(&prefix)?, builder.tensor(&prefix, "bias")?);
        Ok(Self { weight, bias, causality, padding, slot: builder.slot() })
    }

    /// Only the first `filters`.
    pub(super) fn first(self, filters: usize) -> Result<Self> {
        let cut = |t: &Tensor| t.narrow(0, 0, filters).what(WHAT);
        Ok(Self { weight: cut(&self.weight)?, bias: cut(&self.bias)?, ..self })
    }

    /// With filters in another order: cells, which varied fastest among them, become what varies slowest.
    pub(super) fn cells_first(self, cells: usize) -> Result<Self> {
        let reorder = |t: &Tensor| -> Result<Tensor> {
            let rows = contiguous(t)?.reshape(((), cells, t.elem_count() / t.dim(0).what(WHAT)?));
            let rows = contiguous(&rows.and_then(|t| t.transpose(0, 1)).what(WHAT)?)?;
            Ok(rows.reshape(t.shape()).what(WHAT)?)
        };
        Ok(Self { weight: native(&reorder(&self.weight)?)?, bias: reorder(&self.bias)?, ..self })
    }

    /// The frames that the kernel sees, those beyond the ends included; none if there are not enough yet. They become two
    /// frames less.
    pub(super) fn gather(&self, input: Option<Input>, pass: &mut Pass<'_>) -> Result<Option<Tensor>> {
        let (before, after) = self.causality.copies();
        let after = if pass.last { after } else { 0 };
        let past = pass.slots.take(&self.slot);
        let seen = match (past, input) {
            (past, Some(Input { x, norm })) => {
                let around = Surround {
                    before: if past.is_some() { 0 } else { before },
                    after,
                    mirrored: match self.padding {
                        SpatialPadding::Zeros => 0,
                        SpatialPadding::Reflect => 1,
                    },
                };
                surround(past.as_ref(), &x, norm, around)?
            }
            (Some(past), None) => surround(None, &past, None, Surround { after, ..Surround::default() })?,
            (None, None) => return Ok(None),
        };
        if !pass.last {
            pass.slots.keep(&self.slot, Some(tail_frames(&seen, REACH)?));
        }
        Ok((output_frames(&seen)? > 0).then_some(seen))
    }

    /// What [`Self::gather`] gave, convolved, plus a residual.
    pub(super) fn apply(&self, seen: Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let border = match self.padding {
            SpatialPadding::Zeros => (1, 1),
            SpatialPadding::Reflect => (0, 0),
        };
        let params = ConvParams { padding: [(0, 0), border, border], ..ConvParams::default() };
        Ok(match residual {
            Some(residual) => conv_nd_add(&seen, &self.weight, Some(&self.bias), residual, &params)?,
            None => conv_nd(&seen, &self.weight, Some(&self.bias), &params)?,
        })
    }

    /// The next frames `[B, C, n, H, W]`, as far as there are any, to those `[B, K, m, H, W]` that follow from them.
    pub(super) fn forward(&self, input: Option<Input>, pass: &mut Pass<'_>) -> Result<Option<Tensor>> {
        self.gather(input, pass)?.map(|seen| self.apply(seen, None)).transpose()
    }
}

/// Frames that a convolution makes of what [`Conv3d::gather`] gave.
pub(super) fn output_frames(seen: &Tensor) -> Result<usize> {
    Ok(seen.dim(2).what("frames of a convolution")?.saturating_sub(REACH))
}
