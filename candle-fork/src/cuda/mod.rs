//! Building blocks of the CUDA kernels of this crate; an op outside it may use them alike.
//!
//! | file | what |
//! |---|---|
//! | `grid.rs` | sizes of launches: pure, tested without a device |
//! | `strides.rs` | strided index spaces: merged, sorted, cut into vectors; pure |
//! | `module.rs`, `launch.rs` | kernels from PTX, and their launches |
//! | `beside.rs` | kernels beside others |
//! | `tensor.rs` | addresses of operands, outputs |
//! | `tensor_map.rs`, `tensor_map/` | tensors for copies of boxes to shared memory |
//! | `arena.rs` | scratch memory |
//! | `copy.rs`, `strided_copy.cu` | copies between any two layouts |
//! | `blas.rs`, `lt/`, `blas_lt.rs` | matrix products: of floats; of floats and of bytes by cuBLASLt |
//! | `epilogue.rs`, `epilogue.cu` | bias and residual onto a product, rounded once |
//! | `paths.rs` | which paths ran |
//! | `common.cuh` | what kernels share |
//!
//! A kernel takes one `#[repr(C)]` struct by value, so nothing is uploaded per launch. All work goes to the stream of
//! the tensors' device, and memory is freed in that order; see [`tensor::Operand`] for tensors that another stream uses.
//! Nothing happens before the first call that has a tensor on a device: a program built with feature `cuda` runs its CPU
//! ops without a driver.

#[cfg(feature = "cuda")]
pub mod arena;
#[cfg(feature = "cuda")]
pub mod beside;
#[cfg(feature = "cuda")]
pub mod blas;
#[cfg(feature = "cuda")]
pub mod blas_lt;
#[cfg(feature = "cuda")]
pub mod copy;
#[cfg(feature = "cuda")]
pub mod epilogue;
pub mod grid;
#[cfg(feature = "cuda")]
pub mod launch;
#[cfg(feature = "cuda")]
pub mod lt;
#[cfg(feature = "cuda")]
pub mod module;
#[cfg(feature = "cuda")]
pub mod paths;
pub mod strides;
#[cfg(feature = "cuda")]
pub mod tensor;
pub mod tensor_map;
