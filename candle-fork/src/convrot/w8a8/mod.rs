//! Linear maps as products of integers: rows of the argument are rotated and quantised like those of the weight, the
//! products of bytes are summed exactly, and both scales are put on the sums.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::cell::Cell;

use candle_core::{Device, Tensor};

use super::Group;
use crate::{
    element::with_element,
    error::{Error, Result},
    quant::Int8,
};

const OP: &str = "linear (w8a8)";

/// Most columns: sums of products of bytes stay below 2^31.
const MAX_DEPTH: usize = (1 << 17) - 1;

/// Bytes of sums that wait for their scales: few enough to stay in the second-level cache of a large GPU.
#[cfg(any(feature = "cuda", test))]
const SUMS_BYTES: usize = 32 << 20;

/// Fewest rows of a tile, whatever their sums take: products of fewer fill a device badly.
#[cfg(any(feature = "cuda", test))]
const MIN_ROWS: usize = 512;

/// Rows whose products are enqueued at once. Tiles are as even as whole blocks of 128 allow, so that few shapes occur.
#[cfg(any(feature = "cuda", test))]
fn tile_rows(rows: usize, columns: usize) -> usize {
    let most = (SUMS_BYTES / (4 * columns)).max(MIN_ROWS);
    let tiles = rows.div_ceil(most).max(1);
    rows.div_ceil(tiles).next_multiple_of(128).min(rows)
}

/// What products of integers this thread has executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct W8a8Counters {
    /// Calls on the CPU.
    pub cpu: u64,
    /// Products by cuBLASLt.
    pub cublas_lt: u64,
    /// Products by our own kernel: of few rows, or of extents that cuBLASLt does not take.
    pub few: u64,
}

thread_local! {
    static COUNTERS: Cell<W8a8Counters> = const { Cell::new(W8a8Counters { cpu: 0, cublas_lt: 0, few: 0 }) };
}

/// The counters of this thread, which begin anew.
pub fn take_counters() -> W8a8Counters {
    COUNTERS.take()
}

fn count(f: impl FnOnce(&mut W8a8Counters)) {
    let mut counters = COUNTERS.get();
    f(&mut counters);
    COUNTERS.set(counters);
}

/// `y[.., o] = f32(sum_i qx[.., i] qw[o, i]) (sx[..] sw[o]) + bias[o]`, rounded once, with qx and sx as
/// [`super::quantize_int8_convrot`] makes them of the rows of x. Sums are exact and the rest has a fixed order, so the CPU
/// and CUDA give the same bits, whatever the tiling.
///
/// The caller has checked shapes, dtypes and devices; all parts have the same columns and group, and follow one another in
/// the result.
pub(crate) fn linear(x: &Tensor, parts: &[&Int8], group: Group, bias: Option<&Tensor>) -> Result<Tensor> {
    let depth = x.dims().last().copied().unwrap_or(0);
    if depth > MAX_DEPTH {
        return Err(Error::Unsupported { op: OP, what: format!("{depth} columns, more than {MAX_DEPTH}") });
    }
    match x.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => cuda::linear(x, parts, group, bias),
        Device::Cpu => {
            let y = with_element!(OP, "x", x.dtype(), T => cpu::linear::<T>(x, parts, group, bias))?;
            count(|counters| counters.cpu += 1);
            Ok(y)
        }
        _ => Err(Error::Unsupported { op: OP, what: "this kind of device".into() }),
    }
}

/// Dimensions of the result, and how many rows it has.
fn result_dims(x: &Tensor, parts: &[&Int8]) -> (Vec<usize>, usize, usize) {
    let columns = parts.iter().map(|part| part.codes.rows()).sum();
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = columns;
    }
    let rows = dims[..dims.len() - 1].iter().product();
    (dims, rows, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_even_and_stay_in_the_cache() {
        assert_eq!(tile_rows(4096, 9216), 896);
        assert_eq!(tile_rows(4096, 3072), 2048);
        assert_eq!(tile_rows(4096, 16384), 512);
        // No more rows than there are, no fewer than fill a device.
        assert_eq!(tile_rows(100, 16384), 100);
        assert_eq!(tile_rows(5000, 1 << 20), 512);
        for (rows, columns) in [(1, 1), (4097, 4096), (129, 12288), (100_000, 48)] {
            let step = tile_rows(rows, columns);
            assert!(step > 0 && step <= rows);
            assert!(step * columns * 4 <= SUMS_BYTES + 128 * columns * 4 || step <= MIN_ROWS + 128);
        }
    }
}
