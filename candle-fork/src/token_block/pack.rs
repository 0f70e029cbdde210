//! Weights in the order in which the kernels of `stream.cuh` take them, as shared memory wants them.

use candle_core::Tensor;

use super::OP;
use crate::error::{Result, What};

/// Columns of a panel: 128 bytes.
pub(super) const PANEL: usize = 64;

/// Elements of a stage: 32 KiB of two bytes each.
pub(super) const STAGE: usize = 16_384;

/// A matrix `[256, 64 n]` as n stages `[n, STAGE]` of 256 rows by 64 columns.
pub(super) fn columns(weight: &Tensor) -> Result<Tensor> {
    let panels = || {
        let (rows, columns) = weight.dims2()?;
        let panels = weight.reshape((rows, columns / PANEL, PANEL))?.transpose(0, 1)?.contiguous()?;
        panels.reshape((columns / PANEL, rows, PANEL))
    };
    exchanged(&panels().what(OP)?)?.reshape(((), STAGE)).what(OP)
}

/// Gate and up, `[2 H, 256]` with the gate above, and down `[256, H]`: for each 64 hidden values two stages of 64 rows of the
/// gate and 64 rows of up by 128 columns, and one of 256 rows of down by 64 columns.
pub(super) fn hidden(gate_up: &Tensor, down: &Tensor) -> Result<Tensor> {
    let both = || {
        let (rows, columns) = gate_up.dims2()?;
        let chunks = rows / (2 * PANEL);
        // [gate or up, chunk, row, panel, column] to [chunk, panel, gate or up, row, column].
        let parts = gate_up.reshape((2, chunks, PANEL, columns / PANEL, PANEL))?;
        parts.permute((1, 3, 0, 2, 4))?.contiguous()?.reshape((chunks * columns / PANEL, 2 * PANEL, PANEL))
    };
    let both = exchanged(&both().what(OP)?)?;
    let join = || {
        let down = columns(down)?.unsqueeze(1).what(OP)?;
        let chunks = down.dims()[0];
        let both = both.reshape((chunks, 2, STAGE)).what(OP)?;
        Tensor::cat(&[both, down], 1).and_then(|all| all.reshape(((), STAGE))).what(OP)
    };
    join()
}

/// Panels `[n, rows, 64]` whose run c of 8 elements of row r has changed places with run c ^ (r % 8).
fn exchanged(panels: &Tensor) -> Result<Tensor> {
    let exchange = || {
        let (n, rows, columns) = panels.dims3()?;
        let element = |at: usize| {
            let (row, run, rest) = (at / columns, at % columns / 8, at % 8);
            (row * columns + (run ^ (row % 8)) * 8 + rest) as u32
        };
        let order = Tensor::from_iter((0..rows * columns).map(element), panels.device())?;
        panels.reshape((n, rows * columns))?.index_select(&order, 1)?.reshape((n, rows, columns))
    };
    exchange().what(OP)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Numbers of the elements of a matrix.
    fn counted(rows: usize, columns: usize) -> Tensor {
        Tensor::arange(0u32, (rows * columns) as u32, &Device::Cpu).unwrap().reshape((rows, columns)).unwrap()
    }

    fn elements(t: &Tensor) -> Vec<u32> {
        t.to_dtype(DType::U32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn columns_become_stages_with_exchanged_runs() {
        let got = columns(&counted(256, 192)).unwrap();
        assert_eq!(got.dims(), [3, STAGE]);
        let got = elements(&got);
        for (stage, row, run) in [(0, 0, 0), (1, 3, 5), (2, 255, 7), (2, 8, 1)] {
            let at = stage * STAGE + row * 64 + (run ^ (row % 8)) * 8;
            let want: Vec<u32> = (0..8).map(|e| (row * 192 + stage * 64 + run * 8 + e) as u32).collect();
            assert_eq!(got[at..at + 8], want, "{stage} {row} {run}");
        }
    }

    #[test]
    fn hidden_values_come_in_groups_of_64() {
        let (gate_up, down) = (counted(2 * 128, 256), counted(256, 128));
        let got = hidden(&gate_up, &down).unwrap();
        assert_eq!(got.dims(), [6, STAGE]);
        let got = elements(&got);
        // Hidden value 64 + 5 of up: chunk 1, its second stage (columns 128 to 255), second panel there, row 64 + 5.
        let (row, run) = (64 + 5, 2);
        let at = 4 * STAGE + STAGE / 2 + row * 64 + (run ^ (row % 8)) * 8;
        let column = 128 + 64 + run * 8;
        assert_eq!(got[at], ((128 + 64 + 5) * 256 + column) as u32);
        // The same of the gate, first column: row 5 of the chunk's first stage.
        assert_eq!(got[3 * STAGE + 5 * 64 + 5 * 8], ((64 + 5) * 256) as u32);
        // Down of chunk 1: row 9, its columns 64 to 127.
        assert_eq!(got[5 * STAGE + 9 * 64 + 8], (9 * 128 + 64) as u32);
    }
}
