//! Kernel files as PTX.

/// A compiled kernel file, made by the macro `module!`.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    /// Key under which a device keeps the loaded module. Devices compare names and not texts, so it holds the version of
    /// this crate: two versions in one program must not get each other's kernels.
    pub name: &'static str,
    /// The text.
    pub ptx: &'static str,
}

/// One constant per kernel file, named as the file in capitals.
#[allow(missing_docs, dead_code, unreachable_pub, reason = "written by the build script")]
pub(crate) mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

/// The [`Module`] of a kernel file: `module!(STRIDED_COPY)` is `strided_copy.cu`. File names are unique in this crate.
macro_rules! module {
    ($file:ident) => {
        $crate::cuda::module::Module {
            name: concat!("candle-fork ", env!("CARGO_PKG_VERSION"), " ", stringify!($file)),
            ptx: $crate::cuda::module::ptx::$file,
        }
    };
}
pub(crate) use module;
