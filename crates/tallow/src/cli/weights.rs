//! Arguments of `tallow quantize` and `tallow verify`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Arguments of `tallow quantize`.
#[derive(Debug, Args)]
pub(crate) struct QuantizeArgs {
    /// Checkpoint with plain weights: a file, an index of shards, or the folder of one component
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,

    /// Safetensors file to write
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,

    /// How matrices are stored
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = QuantFormat::Int8Convrot)]
    pub(crate) format: QuantFormat,

    /// Columns that int8-convrot rotates together: 4, 16, 64, 256 or 1024; published files have 256
    #[arg(long, value_name = "N", value_parser = group_size, default_value = "256")]
    pub(crate) group_size: usize,

    /// Say nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// A format that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantFormat {
    /// Signed bytes with a scale for each row, rotated in groups
    Int8Convrot,
    /// 8-bit floats (E4M3) with a scale for each matrix
    Fp8Scaled,
}

/// Arguments of `tallow verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// File or folder, or a model of the hub's cache as owner/name
    #[arg(value_name = "FILE|DIR|OWNER/NAME")]
    pub(crate) path: PathBuf,

    /// List of checksums, as sha256sum writes it [default: SHA256SUMS beside the files]
    ///
    /// Without one, files of the hub's cache are compared with the checksums that their blobs are named by.
    #[arg(long, value_name = "FILE")]
    pub(crate) manifest: Option<PathBuf>,

    /// Say nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

fn group_size(text: &str) -> Result<usize, String> {
    let legal = [4, 16, 64, 256, 1024];
    text.parse().ok().filter(|n| legal.contains(n)).ok_or_else(|| "expected 4, 16, 64, 256 or 1024".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_powers_of_four() {
        assert_eq!(group_size("64"), Ok(64));
        for bad in ["0", "8", "4096", "-4", "x", ""] {
            assert!(group_size(bad).is_err(), "{bad}");
        }
    }
}
