//! Launchers of `fp8.cu` and `iq4.cu`. All arguments have been checked.

use candle_core::{DType, Device, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    OP,
    fp8::{Fp8, Fp8Format},
    iq4::{Iq4, Iq4Format},
};
use crate::{
    cuda::{
        grid::{Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::{Result, What},
};

const FP8_MODULE: Module = module!(FP8);
const IQ4_MODULE: Module = module!(IQ4);

/// Codes of a wide access.
const WIDE: usize = 16;

/// Most blocks along y; the kernels loop over the rows that are left.
const MAX_BLOCKS_Y: u64 = 65535;

/// `Params` of fp8.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    codes: Address,
    scales: Address,
    out: Address,
    rows: u64,
    columns: u64,
    block_rows: u64,
    block_columns: u64,
    across: u64,
    first_row: u64,
}

const _: () = assert!(size_of::<Params>() == 72, "as in fp8.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

/// The matrix as a tensor of `dtype` on `device`, where it lies.
pub(super) fn dequantize_fp8(weight: &Fp8, dtype: DType, device: &Device) -> Result<Tensor> {
    let (rows, columns) = (weight.codes.rows(), weight.codes.width());
    let codes = weight.codes.tensor(device)?.contiguous().what(OP)?;
    let device = device_of(OP, &codes)?;
    let codes = Operand::new(OP, &codes)?;
    let scales = Operand::new(OP, &weight.scales.contiguous().what(OP)?)?;
    let out = Output::new(OP, device, dtype, rows * columns)?;
    let grid = weight.grid;
    let params = Params {
        codes: codes.address(),
        scales: scales.address(),
        out: out.address(),
        rows: rows as u64,
        columns: columns as u64,
        block_rows: grid.block[0] as u64,
        block_columns: grid.block[1] as u64,
        across: grid.across as u64,
        first_row: grid.first_row as u64,
    };
    let wide = columns.is_multiple_of(WIDE)
        && (grid.across == 1 || grid.block[1].is_multiple_of(WIDE))
        && [params.codes, params.out].iter().all(|address| address.is_multiple_of(WIDE as u64));
    let (format, width) = match (weight.format, wide) {
        (Fp8Format::E4M3, true) => ("e4m3", "wide"),
        (Fp8Format::E4M3, false) => ("e4m3", "1"),
        (Fp8Format::E5M2, true) => ("e5m2", "wide"),
        (Fp8Format::E5M2, false) => ("e5m2", "1"),
    };
    let kernel = Kernel::load(device, &FP8_MODULE, &format!("{format}_{width}_{}", kernel_suffix(dtype)))?;
    let per_block = if wide { WIDE } else { 1 } * THREADS as usize;
    let blocks = [columns.div_ceil(per_block).min(i32::MAX as usize) as u64, (rows as u64).min(MAX_BLOCKS_Y), 1];
    // SAFETY: `Params` mirrors that of fp8.cu. Codes and out are packed, `rows` by `columns`; the scales cover the blocks of
    // these rows, which was checked for the whole matrix. Wide only for whole vectors at aligned places, each within one
    // block. out is new memory, all of which the loops over the grid write.
    unsafe { kernel.launch(Grid::blocks(OP, blocks, THREADS)?, &params)? };
    out.into_tensor(OP, (rows, columns))
}

/// `Params` of iq4.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Iq4Params {
    codes: Address,
    out: Address,
    runs: u64,
}

const _: () = assert!(size_of::<Iq4Params>() == 24, "as in iq4.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Iq4Params {}

/// Elements of a thread of iq4.cu.
const RUN: usize = 32;

/// The matrix as a tensor of `dtype` on `device`, where it lies.
pub(super) fn dequantize_iq4(weight: &Iq4, dtype: DType, device: &Device) -> Result<Tensor> {
    let [rows, columns] = weight.dims();
    let codes = weight.codes.tensor(device)?.contiguous().what(OP)?;
    let device = device_of(OP, &codes)?;
    let codes = Operand::new(OP, &codes)?;
    let out = Output::new(OP, device, dtype, rows * columns)?;
    let runs = (rows * columns / RUN) as u64;
    let params = Iq4Params { codes: codes.address(), out: out.address(), runs };
    let format = match weight.format {
        Iq4Format::NonLinear => "nl",
        Iq4Format::Super => "xs",
    };
    let kernel = Kernel::load(device, &IQ4_MODULE, &format!("iq4_{format}_{}", kernel_suffix(dtype)))?;
    // SAFETY: `Iq4Params` mirrors `Params` of iq4.cu. Codes are packed, whole blocks of `runs` runs in all, at an even
    // address: that of a tensor, or of a row of it, and rows have an even number of bytes. out is new memory of as many
    // elements, aligned for whole vectors, all of which the loop over the grid writes.
    unsafe { kernel.launch(Grid::over(runs), &params)? };
    out.into_tensor(OP, (rows, columns))
}
