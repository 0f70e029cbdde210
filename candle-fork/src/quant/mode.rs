//! How a quantised matrix is multiplied, and which way is best where: pure functions of shape, device and memory.

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::WrapErr;

use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::error::What;

/// How a quantised matrix takes part in [`crate::linear()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantMode {
    /// Decoded once, when the weight is made: 2 bytes for each element in half precision, the speed of plain weights.
    DequantizeOnce,
    /// Kept as it is stored. On a CUDA device each call decodes the matrix into memory that is free again after it; on the
    /// CPU a call decodes what it is multiplying, so a wide copy never exists.
    DequantizePerLayer,
    /// Kept as it is stored, multiplied as integers: each row of the argument is quantised to signed bytes as well, which
    /// costs about 1 % of noise. Signed bytes only; other formats are decoded per layer.
    W8A8,
}

/// A linear map as it will be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearShape {
    /// Rows of the argument (tokens), typically.
    pub rows: usize,
    /// Columns of the matrix.
    pub in_features: usize,
    /// Rows of the matrix.
    pub out_features: usize,
}

/// What a choice needs to know of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum DeviceFacts {
    /// Reads the matrix where it is mapped.
    Cpu,
    /// Sustained rates of a CUDA device.
    Cuda {
        /// Operations per second of a large half-precision product.
        half: f64,
        /// Operations per second of a large product of signed bytes; 0 if there is none.
        int8: f64,
        /// Bytes per second of a copy, reads and writes counted.
        bandwidth: f64,
    },
}

impl DeviceFacts {
    /// Those of a device. Kinds other than CUDA devices count as the CPU.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the driver does not tell its device's compute capability.
    pub fn of(device: &Device) -> Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let capability = device.cuda_stream().context().compute_capability().w();
                let (major, minor) = capability.what("compute capability of a device")?;
                Ok(Self::cuda(major.unsigned_abs(), minor.unsigned_abs()))
            }
            _ => Ok(Self::Cpu),
        }
    }

    /// Rates that cuBLAS sustains on a device of this compute capability, from its published peaks where they were not
    /// measured; only their ratios matter to [`choose`].
    pub fn cuda(major: u32, minor: u32) -> Self {
        let (half, int8, bandwidth) = match (major, minor) {
            (9, _) => (700e12, 1200e12, 4.0e12),
            // Integer units were cut on the second kind.
            (10, 3) => (1600e12, 150e12, 6.5e12),
            (10, _) => (1500e12, 2500e12, 6.5e12),
            (8, 0) => (250e12, 450e12, 1.6e12),
            // Consumer cards run half precision with f32 sums at half their rate, so bytes are four times as fast.
            (8, 6 | 9) | (12, _) => (140e12, 480e12, 0.9e12),
            (8, _) => (60e12, 110e12, 0.2e12),
            (7, 5) => (50e12, 90e12, 0.45e12),
            _ => (20e12, 0.0, 0.4e12),
        };
        Self::Cuda { half, int8, bandwidth }
    }
}

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that weights may take.
    pub available: u64,
    /// Bytes of all weights of the model if every quantised one is decoded.
    pub widened: u64,
}

/// What to prefer where several modes are possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Preference {
    /// The weight as the file has it: no noise of quantised arguments.
    #[default]
    Accuracy,
    /// The fastest.
    Speed,
}

/// Operations per second of a product that is too small to fill a device, relative to a large one: half at this many rows.
const HALF_RATE_ROWS: f64 = 192.0;

/// Rows up to which bytes are multiplied by the kernel for few rows, whose epilogue is its own: the weight's bytes are the
/// time. Measured at one row on an H200 (4096 x 4096): 16.7 us against 21.4 us of the decoded weight.
const FEW_ROWS: usize = 8;

/// Seconds between two kernels.
const LAUNCH: f64 = 4e-6;

/// Seconds that one call takes in a mode: products at a device's rate or its bandwidth, and one pass over memory for what
/// stands before and after.
fn seconds(mode: QuantMode, shape: LinearShape, half: f64, int8: f64, bandwidth: f64) -> f64 {
    let [m, k, n] = [shape.rows, shape.in_features, shape.out_features].map(|extent| extent as f64);
    let product = |rate: f64, bytes: f64| {
        let filled = m / (m + HALF_RATE_ROWS);
        (2.0 * m * n * k / (rate * filled)).max(bytes / bandwidth) + LAUNCH
    };
    let plain = product(half, 2.0 * (n * k + m * k + m * n));
    match mode {
        QuantMode::DequantizeOnce => plain,
        // Codes in, half precision out.
        QuantMode::DequantizePerLayer => plain + 3.0 * n * k / bandwidth + LAUNCH,
        QuantMode::W8A8 if shape.rows <= FEW_ROWS => n * k / bandwidth + 2.0 * LAUNCH,
        // The argument in, its codes out; 32-bit sums out, in again, and the result out.
        QuantMode::W8A8 => product(int8, n * k + m * k) + (3.0 * m * k + 10.0 * m * n) / bandwidth + 2.0 * LAUNCH,
    }
}

/// The mode for a matrix of signed bytes of this shape; other formats have no [`QuantMode::W8A8`], for which
/// [`QuantMode::DequantizePerLayer`] then stands.
///
/// - On the CPU the stored form is always kept.
/// - Decoding once needs [`Memory::widened`] bytes. Where they are there, it is the accurate choice, and the fastest one
///   unless bytes are multiplied so much faster that it pays for quantising the argument.
/// - Where they are not, decoding per layer is the accurate choice as long as it costs at most a fifth of the call, because
///   the argument has many rows; else bytes are multiplied.
/// - Without products of bytes, or with extents that they do not take (multiples of 4), decoding remains.
pub fn choose(shape: LinearShape, device: DeviceFacts, memory: Memory, preference: Preference) -> QuantMode {
    let DeviceFacts::Cuda { half, int8, bandwidth } = device else { return QuantMode::DequantizePerLayer };
    let time = |mode| seconds(mode, shape, half, int8, bandwidth);
    let bytes = int8 > 0.0 && shape.in_features.is_multiple_of(4) && shape.out_features.is_multiple_of(4);
    let decoded =
        if memory.widened <= memory.available { QuantMode::DequantizeOnce } else { QuantMode::DequantizePerLayer };
    let faster = bytes && time(QuantMode::W8A8) < time(decoded);
    let pays = match (preference, decoded) {
        (Preference::Speed, _) => faster,
        (Preference::Accuracy, QuantMode::DequantizeOnce) => false,
        (Preference::Accuracy, _) => faster && time(decoded) > 1.2 * time(QuantMode::DequantizeOnce),
    };
    if pays { QuantMode::W8A8 } else { decoded }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENOUGH: Memory = Memory { available: 80 << 30, widened: 42 << 30 };
    const SHORT: Memory = Memory { available: 24 << 30, widened: 42 << 30 };

    fn shape(rows: usize, in_features: usize, out_features: usize) -> LinearShape {
        LinearShape { rows, in_features, out_features }
    }

    #[test]
    fn the_cpu_keeps_what_is_stored() {
        assert_eq!(DeviceFacts::of(&Device::Cpu).unwrap(), DeviceFacts::Cpu);
        for memory in [ENOUGH, SHORT] {
            for preference in [Preference::Accuracy, Preference::Speed] {
                let mode = choose(shape(4096, 4096, 4096), DeviceFacts::Cpu, memory, preference);
                assert_eq!(mode, QuantMode::DequantizePerLayer);
            }
        }
    }

    #[test]
    fn accuracy_decodes_where_memory_allows() {
        let hopper = DeviceFacts::cuda(9, 0);
        let ada = DeviceFacts::cuda(8, 9);
        for rows in [1, 128, 4096, 32768] {
            for device in [hopper, ada] {
                let mode = choose(shape(rows, 4096, 4096), device, ENOUGH, Preference::Accuracy);
                assert_eq!(mode, QuantMode::DequantizeOnce);
            }
        }
        // Many rows pay for decoding; few do not.
        let short = |rows| choose(shape(rows, 4096, 4096), hopper, SHORT, Preference::Accuracy);
        assert_eq!(short(16384), QuantMode::DequantizePerLayer);
        assert_eq!(short(256), QuantMode::W8A8);
    }

    #[test]
    fn speed_multiplies_bytes_where_that_is_faster() {
        let speed = |device, memory, rows| choose(shape(rows, 4096, 4096), device, memory, Preference::Speed);
        // Twice the rate of half precision, less what quantising costs.
        assert_eq!(speed(DeviceFacts::cuda(9, 0), ENOUGH, 4096), QuantMode::W8A8);
        assert_eq!(speed(DeviceFacts::cuda(8, 9), ENOUGH, 4096), QuantMode::W8A8);
        // One row reads half of the bytes.
        assert_eq!(speed(DeviceFacts::cuda(9, 0), ENOUGH, 1), QuantMode::W8A8);
        assert_eq!(speed(DeviceFacts::cuda(9, 0), ENOUGH, 64), QuantMode::DequantizeOnce);
        // Integer units that were cut, and none at all.
        assert_eq!(speed(DeviceFacts::cuda(10, 3), ENOUGH, 4096), QuantMode::DequantizeOnce);
        assert_eq!(speed(DeviceFacts::cuda(7, 0), SHORT, 4096), QuantMode::DequantizePerLayer);
    }

    #[test]
    fn extents_that_no_product_takes_are_decoded() {
        for [k, n] in [[4098, 4096], [4096, 4098]] {
            let mode = choose(shape(4096, k, n), DeviceFacts::cuda(8, 9), SHORT, Preference::Speed);
            assert_eq!(mode, QuantMode::DequantizePerLayer);
        }
    }
}
