//! Checkpoints of published shapes with random bf16 weights, for timing only.

mod memory;

use std::{fs::File, io::Write, path::Path};

use anyhow::{Context, Result};
use weights::{Expected, TensorSource, write};

pub use self::memory::RandomWeights;

/// Values from which the weights are drawn.
const TABLE: usize = 1 << 16;

/// Mean and standard deviation of a tensor's values: norm weights and deviations lie about 1, variances about 3.
fn distribution(tensor: &Expected, std: f32) -> (f32, f32) {
    match tensor.name.as_str() {
        name if name.ends_with("running_var") => (3.0, 0.1),
        name if name.contains("norm") && name.ends_with("weight") && tensor.shape.len() == 1 => (1.0, 0.05),
        name if name.ends_with("gamma") || name.ends_with("latents_std") => (1.0, 0.05),
        _ => (0.0, std),
    }
}

/// Writes `tensors` as a bf16 safetensors file: values as those of [`RandomWeights`]. The file is as large as a real one,
/// and no part of it is like another.
///
/// # Errors
/// If the file cannot be written.
pub fn write_checkpoint(path: &Path, tensors: &[Expected], std: f32) -> Result<()> {
    let source = RandomWeights::new(path.display().to_string(), tensors, std);
    let described = source.tensors().iter().map(|t| (t.name.as_str(), t.dtype, &t.shape[..]));
    let header = write::header(described, &write::Metadata::new())?;
    let mut file = File::create(path).with_context(|| path.display().to_string())?;
    let mut append = |bytes: &[u8]| file.write_all(bytes).with_context(|| path.display().to_string());
    append(&header)?;
    // One element type throughout: the order of the names, which is that of the source.
    source.tensors().iter().try_for_each(|t| append(source.bytes(&t.name)?))
}
