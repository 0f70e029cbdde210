//! cuDNN through its graph API, found at run time.
//!
//! | file | what |
//! |---|---|
//! | `search.rs` | where the library may lie |
//! | `library.rs` | loading, and the checks before first use |
//! | `sys.rs` | the C interface |
//! | `descriptor.rs` | its descriptors, owned and typed |
//! | `graph.rs` | problems as graphs, and what their descriptions share |
//! | `convolution.rs`, `attention.rs` | the graphs of either: pure data |
//! | `rules.rs` | which engines a policy lets run: pure |
//! | `errata.rs` | versions that are wrong |
//! | `device.rs` | what plans depend on in a device |
//! | `handle.rs` | one handle per thread, device and stream |
//! | `plan.rs` | engines chosen and built, and their execution |
//! | `memory.rs`, `disk.rs` | plans kept |
//! | `refusal.rs` | why cuDNN did not serve |
//! | `session.rs` | all of it together |
//! | `on_device.rs` | the same on candle's devices |
//!
//! Nothing here knows of tensors; `conv/cudnn.rs` and `attention/cudnn.rs` bring the two together.

mod attention;
mod convolution;
mod descriptor;
mod device;
mod disk;
mod errata;
mod graph;
mod handle;
mod library;
mod memory;
#[cfg(feature = "cuda")]
mod on_device;
mod plan;
#[cfg(test)]
mod planning_tests;
mod refusal;
mod rules;
mod search;
mod session;
mod sys;

#[cfg(feature = "cuda")]
pub(crate) use self::{
    attention::AttentionSpec,
    convolution::{ConvolutionSpec, Pattern, packed_strides},
    device::DeviceInfo,
    errata::of_version,
    graph::{ALIGNMENT, Element, TensorSpec},
    library::library,
    on_device::{OnDevice, may_build, time},
    plan::Plan,
    refusal::Refusal,
    session::Session,
};
