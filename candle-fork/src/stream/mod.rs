//! Order between the host and the streams of a device: waiting for work, weights that arrive while others are used.
//!
//! On the CPU everything is done when a call returns, so that code written against this module runs there as well.
//!
//! | file | what |
//! |---|---|
//! | `device.rs` | a CUDA device with one stream |
//! | `fence.rs` | a point in a device's work that the host can wait for |
//! | `upload.rs` | host memory that is copied beside the work |
//! | `staging.rs` | large host tensors on their way to a device |
//! | `replay.rs` | work that is recorded once and replayed |
//! | `cuda/` | the driver's side of all that |

#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod fence;
mod replay;
mod staging;
mod upload;

pub use self::{
    device::cuda_device,
    fence::Fence,
    replay::{Replay, replays},
    staging::Staging,
    upload::{HostBlock, Upload, Uploads},
};
