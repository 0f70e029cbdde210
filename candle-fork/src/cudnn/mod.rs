//! cuDNN through its graph API, found at run time.
//!
//! | file | what |
//! |---|---|
//! | `search.rs` | where the library may lie |
//! | `library.rs` | loading, and the checks before first use |
//! | `sys.rs` | the C interface |
//! | `descriptor.rs` | its descriptors, owned and typed |
//! | `graph.rs` | convolutions as graphs: pure data |
//! | `rules.rs` | which engines a policy lets run: pure |
//! | `errata.rs` | versions that are wrong |
//! | `device.rs` | what plans depend on in a device |
//! | `handle.rs` | one handle per thread, device and stream |
//! | `plan.rs` | engines chosen and built, and their execution |
//! | `memory.rs`, `disk.rs` | plans kept |
//! | `refusal.rs` | why cuDNN did not serve |
//! | `session.rs` | all of it together |
//!
//! Nothing here knows of tensors; `conv/cudnn.rs` brings the two together.

mod descriptor;
mod device;
mod disk;
mod errata;
mod graph;
mod handle;
mod library;
mod memory;
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
    device::DeviceInfo,
    errata::of_version,
    graph::{ALIGNMENT, Element, GraphSpec, Pattern, TensorSpec, packed_strides},
    library::library,
    plan::Plan,
    refusal::Refusal,
    session::Session,
};
