//! Kernels and their launches.

use std::sync::Arc;

use candle_core::{
    CudaDevice,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{
            CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys::CUfunction_attribute_enum,
        },
    },
};

use super::{beside, grid::Grid, module::Module};
use crate::error::{Result, What};

/// Dynamic shared memory of a block, in bytes, that a kernel may have without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

/// A kernel of a device, ready to be launched.
#[derive(Debug)]
pub struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
}

impl Kernel {
    /// Kernel `name` of `module`, which is loaded the first time that `device` needs it.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if the driver refuses the module or does not find the kernel.
    pub fn load(device: &CudaDevice, module: &Module, name: &str) -> Result<Self> {
        let function = device.get_or_load_custom_func(name, module.name, module.ptx);
        let function = function.what("loading of a CUDA kernel")?.into_cuda_function();
        Ok(Self { function, stream: beside::stream(device) })
    }

    /// Enqueues the kernel on the device's stream, or on the one beside it.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if the driver refuses the launch.
    ///
    /// # Safety
    /// - `params` is, field by field, the struct that the kernel takes as its only parameter.
    /// - Every address in it covers what the kernel reads or writes there under this grid, until the work is done: memory
    ///   that is freed in the order of the device's stream is.
    /// - What it writes is not what it reads or what other work uses, unless the kernel says that it may be.
    pub unsafe fn launch<P: DeviceRepr>(&self, grid: Grid, params: &P) -> Result<()> {
        if grid.shared_bytes > SHARED_BYTES {
            let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // Beyond any device's memory if it does not fit, which the driver says.
            let bytes = i32::try_from(grid.shared_bytes).unwrap_or(i32::MAX);
            self.function.set_attribute(attribute, bytes).w().what("shared memory of a CUDA kernel")?;
        }
        let [x, y, z] = grid.blocks;
        let config =
            LaunchConfig { grid_dim: (x, y, z), block_dim: (grid.threads, 1, 1), shared_mem_bytes: grid.shared_bytes };
        let mut builder = self.stream.launch_builder(&self.function);
        builder.arg(params);
        // SAFETY: the caller vouches for the parameter and all that it points to.
        let launched = unsafe { builder.launch(config) };
        launched.w().what("launch of a CUDA kernel").map(|_| ())
    }
}
