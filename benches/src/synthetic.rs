//! Checkpoints of published shapes with random bf16 weights, for timing only.

mod memory;

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::{Context, Result};
use half::bf16;
use weights::Expected;

pub use self::memory::RandomWeights;

/// Values from which the weights are drawn.
const TABLE: usize = 1 << 16;

/// Mean and standard deviation of a tensor's values: norm weights lie about 1, variances about 3.
fn distribution(tensor: &Expected, std: f32) -> (f32, f32) {
    match tensor.name.as_str() {
        name if name.ends_with("running_var") => (3.0, 0.1),
        name if name.contains("norm") && name.ends_with("weight") && tensor.shape.len() == 1 => (1.0, 0.05),
        name if name.ends_with("gamma") => (1.0, 0.05),
        _ => (0.0, std),
    }
}

/// Writes `tensors` as a bf16 safetensors file: normal values of `std`, norm weights about 1, variances about 3.
///
/// # Errors
/// If the file cannot be written.
pub fn write_checkpoint(path: &Path, tensors: &[Expected], std: f32) -> Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0u64;
    for t in tensors {
        let start = end;
        end += 2 * t.shape.iter().product::<usize>() as u64;
        header.insert(
            t.name.clone(),
            serde_json::json!({"dtype": "BF16", "shape": t.shape, "data_offsets": [start, end]}),
        );
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).with_context(|| path.display().to_string())?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;

    let normal = sampling::NoiseGenerator::Philox.normal(0, TABLE);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for t in tensors {
        let (mean, std) = distribution(t, std);
        let table: Vec<[u8; 2]> = normal.iter().map(|v| bf16::from_f32(mean + std * v).to_le_bytes()).collect();
        for _ in 0..t.shape.iter().product::<usize>() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            file.write_all(&table[(state >> 48) as usize])?;
        }
    }
    file.flush()?;
    Ok(())
}
