//! Launcher of `noise.cu`.

use candle_core::{CudaDevice, DType, Shape, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::OP;
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Output},
    },
    element::kernel_suffix,
    error::Result,
};

const MODULE: Module = module!(NOISE);

/// `NoiseParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    out: Address,
    count: u64,
    seed: u64,
}

const _: () = assert!(size_of::<Params>() == 24, "as in noise.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

pub(super) fn philox_normal(seed: u64, shape: &Shape, dtype: DType, device: &CudaDevice) -> Result<Tensor> {
    let out = Output::new(OP, device, dtype, shape.elem_count())?;
    if !out.is_empty() {
        let params = Params { out: out.address(), count: out.len() as u64, seed };
        let kernel = Kernel::load(device, &MODULE, &format!("normal_noise_{}", kernel_suffix(dtype)))?;
        // SAFETY: `Params` mirrors `NoiseParams`; out is new memory of `count` elements, all of which the loop over the grid
        // writes.
        unsafe { kernel.launch(Grid::over(params.count), &params)? };
    }
    out.into_tensor(OP, shape.clone())
}
