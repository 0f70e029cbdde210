//! What the timing programs share: medians, records, the machine, the peer, synthetic models.

#![forbid(unsafe_code)]

pub mod cpu;
pub mod flux2;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod machine;
pub mod memory;
pub mod peer;
pub mod record;
pub mod synthetic;
pub mod timing;
pub mod wan;
