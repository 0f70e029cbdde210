//! Configurations for the tests of this module.

/// The section `vae` of LTX-2.3, as published.
pub(super) const LTX23: &str = include_str!("../../../../tests/models/configs/ltx23-conv-vae.json");

/// LTX-2.0 in the same form.
pub(super) const LTX20: &str = include_str!("../../../../tests/models/configs/ltx20-conv-vae.json");

/// LTX-2.0 as diffusers has it.
pub(super) const LTX20_DIFFUSERS: &str = include_str!("../../../../tests/models/configs/ltx20-conv-vae.diffusers.json");

/// LTX-2.3 as diffusers has it.
pub(super) const LTX23_DIFFUSERS: &str = include_str!("../../../../tests/models/configs/ltx23-conv-vae.diffusers.json");
