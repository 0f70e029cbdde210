//! What the GPU suites share: the device or a loud skip, seeds, poisoned memory, tensors in memory of every kind.

use std::{
    io::Write,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    ConvParams,
    conv::conv_nd,
    cudnn_policy::{Backend, Counters, Policy, scope, take_counters},
};
use sampling::NoiseGenerator;

/// The element types of the GPU ops.
pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The first CUDA device as the command opens it, or `None` after a line on stderr that says why `suite` is skipped. With
/// `REQUIRE_CUDA=1` in the environment a skip is an error.
///
/// # Errors
/// If there is no device and one is required.
pub fn cuda(suite: &str) -> Result<Option<Device>> {
    let error = match candle_fork::stream::cuda_device(0) {
        Ok(device) => return Ok(Some(device)),
        Err(error) => error.to_string(),
    };
    skip(suite, &format!("no CUDA device ({})", error.lines().next().unwrap_or_default()))?;
    Ok(None)
}

/// Says on stderr that `what` is skipped and why; an error with `REQUIRE_CUDA=1` in the environment.
///
/// # Errors
/// If skipping is not allowed.
pub fn skip(what: &str, why: &str) -> Result<()> {
    ensure!(std::env::var("REQUIRE_CUDA").as_deref() != Ok("1"), "{what}: {why}, and REQUIRE_CUDA=1 is set");
    leave_out(what, why)
}

/// Says on stderr that `what` is left out and why, for what a machine with a GPU may lack.
///
/// # Errors
/// If stderr cannot be written to.
pub fn leave_out(what: &str, why: &str) -> Result<()> {
    // Not `eprintln!`, which the test harness captures; in one piece, since other threads write too.
    Ok(std::io::stderr().write_all(format!("SKIPPED {what}: {why}\n").as_bytes())?)
}

/// Whether cuDNN runs a plain convolution on `device`; if not, `suite` says that it leaves its cuDNN half out.
///
/// # Errors
/// If it does not and skipping is not allowed.
pub fn cudnn(suite: &str, device: &Device) -> Result<bool> {
    let x = Tensor::zeros((1, 16, 8, 8), DType::BF16, device)?;
    let weight = Tensor::zeros((16, 16, 3, 3), DType::BF16, device)?;
    let run = || conv_nd::<2>(&x, &weight, None, &ConvParams::default());
    let Err(error) = scope(Policy::new(Backend::Required), run) else { return Ok(true) };
    skip(&format!("the cuDNN half of {suite}"), &error.to_string())?;
    Ok(false)
}

/// Devices and libraries, for a person.
///
/// # Errors
/// In a build without feature `cuda`.
pub fn describe() -> Result<String> {
    Ok(format!("{:#?}", candle_fork::diagnosis::cuda()?))
}

/// What a call gave, and what this thread counted meanwhile.
#[derive(Debug)]
pub struct Counted<R> {
    /// The result.
    pub result: Result<R>,
    /// The counters.
    pub counters: Counters,
}

/// Runs `f` on one backend, everything else at its default.
pub fn on<R>(backend: Backend, f: impl FnOnce() -> Result<R>) -> Counted<R> {
    take_counters();
    let result = scope(Policy::new(backend), f);
    Counted { result, counters: take_counters() }
}

/// `GPU_SEED` from the environment, else one from the clock; printed, so that a failure can be repeated.
pub fn seed(suite: &str) -> u64 {
    let given = std::env::var("GPU_SEED").ok().and_then(|seed| seed.parse().ok());
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64 % 1_000_000_000);
    let seed = given.unwrap_or_else(clock);
    println!("{suite}: GPU_SEED={seed}");
    seed
}

/// A generator of choices: splitmix64.
#[derive(Debug, Clone)]
pub struct Choices(u64);

impl Choices {
    /// The same choices for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// One of `values`.
    pub fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// `scale` times standard normal values, rounded to `dtype`, on the CPU.
///
/// # Errors
/// If candle fails.
pub fn noise(seed: u64, scale: f32, dims: &[usize], dtype: DType) -> Result<Tensor> {
    let values = NoiseGenerator::Philox.normal(seed, dims.iter().product());
    let values: Vec<f32> = values.into_iter().map(|v| scale * v).collect();
    Ok(Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)?)
}

/// Leaves NaN in the memory that the next results of about `bytes` bytes will be given.
///
/// # Errors
/// If the allocation fails.
pub fn poison(device: &Device, bytes: usize) -> Result<()> {
    // Several blocks alive at once: results, buffers and workspaces all come from what they leave behind.
    let blocks: candle_core::Result<Vec<Tensor>> =
        [1, 1, 2, 8].iter().map(|parts| Tensor::full(f32::NAN, bytes.div_ceil(4) * parts, device)).collect();
    drop(blocks?);
    Ok(())
}

/// How a tensor lies in memory. All but the first and [`Placement::ChannelsLast`] are surrounded by NaN, which must not
/// get into a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Row-major.
    Contiguous,
    /// Axis 1 and the last exchanged, cut from a larger tensor.
    Transposed,
    /// Cut along the last axis, three elements behind its start: no aligned vector access.
    Cut,
    /// Cut along the third axis.
    Frames,
    /// Axis 1 innermost, packed.
    ChannelsLast,
    /// The same, cut along the third axis.
    ChannelsLastFrames,
    /// Axis 1 innermost, a run of channels of more, five behind its start.
    ChannelsLastCut,
}

impl Placement {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Contiguous,
        Self::Transposed,
        Self::Cut,
        Self::Frames,
        Self::ChannelsLast,
        Self::ChannelsLastFrames,
        Self::ChannelsLastCut,
    ];

    /// The values of `tensor` (rank 3 or more) in this kind of memory.
    ///
    /// # Errors
    /// If candle fails.
    pub fn place(self, tensor: &Tensor) -> Result<Tensor> {
        let last = tensor.rank() - 1;
        let placed = match self {
            Self::Contiguous => tensor.contiguous()?,
            Self::Transposed => cut(&tensor.transpose(1, last)?.contiguous()?, last, 2, 1)?.transpose(1, last)?,
            Self::Cut => cut(tensor, last, 3, 2)?,
            Self::Frames => cut(tensor, 2, 1, 2)?,
            Self::ChannelsLast => channels_first(&channels_last(tensor)?)?,
            Self::ChannelsLastFrames => channels_first(&cut(&channels_last(tensor)?, 1, 1, 2)?)?,
            Self::ChannelsLastCut => channels_first(&cut(&channels_last(tensor)?, last, 5, 6)?)?,
        };
        ensure!(placed.dims() == tensor.dims(), "{self:?} changed {:?} to {:?}", tensor.dims(), placed.dims());
        Ok(placed)
    }
}

/// `[N, C, ..]` to `[N, .., C]` in memory.
fn channels_last(tensor: &Tensor) -> Result<Tensor> {
    let axes: Vec<usize> = [0].into_iter().chain(2..tensor.rank()).chain([1]).collect();
    Ok(tensor.permute(axes)?.force_contiguous()?)
}

/// The axes of `[N, .., C]` in the order of `[N, C, ..]`.
fn channels_first(tensor: &Tensor) -> Result<Tensor> {
    let last = tensor.rank() - 1;
    let axes: Vec<usize> = [0, last].into_iter().chain(1..last).collect();
    Ok(tensor.permute(axes)?)
}

/// `tensor` as the middle of a larger one that is NaN elsewhere.
fn cut(tensor: &Tensor, axis: usize, before: usize, after: usize) -> Result<Tensor> {
    let nan = |extent: usize| {
        let mut dims = tensor.dims().to_vec();
        dims[axis] = extent;
        Tensor::full(f32::NAN, dims, tensor.device())?.to_dtype(tensor.dtype())
    };
    let larger = Tensor::cat(&[&nan(before)?, tensor, &nan(after)?], axis)?;
    Ok(larger.narrow(axis, before, tensor.dim(axis)?)?)
}

/// The values of a tensor of any strides on any device.
///
/// # Errors
/// If candle fails.
pub fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    // Narrow types cross the bus; f64 is made on this side.
    let host = tensor.to_device(&Device::Cpu)?;
    Ok(host.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// A field `[1, C, D, H, W]` of more than 2^31 elements of noise, where 32-bit indices wrap: channels-last in half
/// precision, contiguous in f32. With it, corners and middle of the picture as [`window`] takes them.
///
/// # Errors
/// If candle fails.
pub fn huge(dtype: DType, device: &Device) -> Result<(Tensor, [[usize; 2]; 3])> {
    const CHANNELS: usize = 16;
    const EXTENTS: [usize; 2] = [16_400, 8_200];
    let [h, w] = EXTENTS;
    let stored = if dtype == DType::F32 { vec![1, CHANNELS, 1, h, w] } else { vec![1, 1, h, w, CHANNELS] };
    let x = Tensor::randn(0f32, 1.0, stored, device)?.to_dtype(dtype)?;
    ensure!(x.elem_count() > 1 << 31, "not huge");
    let x = if dtype == DType::F32 { x } else { channels_first(&x)? };
    Ok((x, [[0, 0], [h / 2, w / 2], [h - WINDOW, w - WINDOW]]))
}

/// Side of a [`window`].
pub const WINDOW: usize = 24;

/// The square of side [`WINDOW`] at `[row, column]` of a field, or of a larger `side`, on the CPU.
///
/// # Errors
/// If candle fails.
pub fn window(x: &Tensor, [row, column]: [usize; 2], side: usize) -> Result<Tensor> {
    let cut = x.narrow(3, row, side)?.narrow(4, column, side)?;
    // Not candle's own copy, whose indices wrap at 2^32 elements.
    Ok(candle_fork::layout::contiguous(&cut)?.to_device(&Device::Cpu)?)
}

/// `|got - want|₂ / |want|₂`; infinite if a value is not finite, so that no bound holds.
pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    if got.len() != want.len() || got.is_empty() {
        return f64::INFINITY;
    }
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let norm = square(&mut want.iter().copied()).sqrt().max(f64::MIN_POSITIVE);
    let error = square(&mut got.iter().zip(want).map(|(g, w)| g - w)).sqrt() / norm;
    if error.is_finite() { error } else { f64::INFINITY }
}

/// Bounds that failed, so that one run shows them all.
#[derive(Debug, Default)]
pub struct Failures {
    checks: usize,
    found: Vec<String>,
}

impl Failures {
    /// Notes whether `holds`; `what` says what did not.
    pub fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        self.checks += 1;
        if !holds {
            self.found.push(what());
        }
    }

    /// Takes the value of a step, or notes its error.
    pub fn take<T, E: std::fmt::Display>(&mut self, step: Result<T, E>, what: impl FnOnce() -> String) -> Option<T> {
        self.checks += 1;
        step.map_err(|error| self.found.push(format!("{}: {error:#}", what()))).ok()
    }

    /// An error that lists the first 40, if there are any.
    ///
    /// # Errors
    /// If a check failed, or none was made.
    pub fn finish(self, suite: &str) -> Result<()> {
        println!("{suite}: {} checks, {} failed", self.checks, self.found.len());
        ensure!(self.checks > 0, "{suite}: nothing was checked");
        let shown: Vec<String> = self.found.iter().take(40).map(|line| format!("\n  {line}")).collect();
        ensure!(
            self.found.is_empty(),
            "{suite}: {} of {} checks failed:{}",
            self.found.len(),
            self.checks,
            shown.concat()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_keep_values_and_are_what_they_say() -> Result<()> {
        let x = noise(1, 1.0, &[2, 5, 3, 4], DType::BF16)?;
        for placement in Placement::ALL {
            let placed = placement.place(&x)?;
            assert_eq!(values(&placed)?, values(&x)?, "{placement:?}");
            assert_eq!(placed.is_contiguous(), placement == Placement::Contiguous, "{placement:?}");
        }
        assert_eq!(Placement::ChannelsLast.place(&x)?.stride(), [60, 1, 20, 5]);
        assert_eq!(Placement::Cut.place(&x)?.layout().start_offset(), 3);
        assert_eq!(Placement::ChannelsLastCut.place(&x)?.stride()[1], 1);
        Ok(())
    }

    #[test]
    fn no_bound_holds_for_what_is_not_finite() {
        assert_eq!(relative_error(&[1.0, 3.0], &[1.0, 2.0]), 1.0 / 5f64.sqrt());
        assert_eq!(relative_error(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[1.0, 2.0]), f64::INFINITY);
        assert_eq!(relative_error(&[], &[]), f64::INFINITY);
    }

    #[test]
    fn failures_are_listed_and_nothing_checked_is_one() {
        assert!(Failures::default().finish("empty").is_err());
        let mut failures = Failures::default();
        failures.check(true, || unreachable!());
        assert!(failures.take(Ok::<_, String>(3), || unreachable!()).is_some());
        failures.check(false, || "this one".to_owned());
        assert!(failures.finish("some").unwrap_err().to_string().contains("1 of 3 checks failed:\n  this one"));
    }
}
