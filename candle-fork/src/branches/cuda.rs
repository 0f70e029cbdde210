//! Both branches on a device at once.

use candle_core::{CudaDevice, Tensor};

use super::AttentionInto;
use crate::{activation::swiglu_into, cuda::beside::beside, error::Result, row_layout::RowLayout};

/// Enqueues both; `false`, and nothing, if x has to be copied first. Neither branch uses what the other writes.
pub(super) fn run(device: &CudaDevice, attention: &AttentionInto<'_>, x: &Tensor, out: &Tensor) -> Result<bool> {
    if [x, out].iter().any(|t| RowLayout::of(t.layout()).is_none()) {
        return Ok(false);
    }
    // SAFETY: of an x and an out whose rows can be walked where they lie, the op launches one kernel and allocates nothing;
    // the caller vouches for the rest.
    unsafe { beside(device, || attention.run(), || swiglu_into(x, out)) }?;
    Ok(true)
}
