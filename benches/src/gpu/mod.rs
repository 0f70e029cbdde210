//! GPU figures. Times are taken by events on the device's stream where work stays on the device, by the clock where a
//! result reaches the host.

pub mod chain;
pub mod convrot;
pub mod convs;
pub mod floors;
pub mod flux2;
pub mod load;
pub mod ltx_conv;
pub mod ltx_diffusion;
pub mod na3d;
mod peer;
pub mod wan;

use std::{path::PathBuf, time::Instant};

use anyhow::{Result, bail};
use candle_core::{
    CudaDevice, D, DType, Device, Tensor,
    cuda_backend::cudarc::driver::{CudaEvent, sys::CUevent_flags},
};

/// What the figures need from outside.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A Python with torch and diffusers; without it peers are left out.
    pub python: Option<PathBuf>,
    /// Also time diffusers compiled, which takes minutes.
    pub compiled_peer: bool,
}

/// A device and what it is called in the record.
#[derive(Debug)]
pub struct Gpu {
    /// The device, on a stream of its own.
    pub device: Device,
    cuda: CudaDevice,
    /// GPU, driver and cuDNN.
    pub versions: String,
}

impl Gpu {
    /// The first CUDA device.
    ///
    /// # Errors
    /// If there is none.
    pub fn open() -> Result<Self> {
        let device = candle_fork::stream::cuda_device(0)?;
        let Device::Cuda(cuda) = &device else { bail!("{device:?} is no CUDA device") };
        let cuda = cuda.clone();
        candle_fork::memory::keep_freed(&device, u64::MAX)?;
        let name = cuda.cuda_stream().context().name()?;
        let cudnn = candle_fork::diagnosis::cudnn_version().map_or("no cudnn".to_owned(), |v| format!("cudnn {v}"));
        let versions = format!("{name}; {}; {cudnn}", crate::machine::driver());
        Ok(Self { device, cuda, versions })
    }

    /// Milliseconds that the device takes for each of `runs` calls: the median, after `warm` calls. `f` gets the number of
    /// the call, for rotating inputs.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn time(&self, warm: usize, runs: usize, mut f: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        for i in 0..warm {
            f(i)?;
        }
        self.device.synchronize()?;
        let mut events = Vec::with_capacity(runs);
        for i in 0..runs {
            let start = self.event()?;
            f(warm + i)?;
            events.push((start, self.event()?));
        }
        self.device.synchronize()?;
        let times = events.iter().map(|(start, end)| Ok(f64::from(start.elapsed_ms(end)?)));
        Ok(middle(times.collect::<Result<_>>()?))
    }

    /// Milliseconds from the call until the device is idle: the median of `runs`, after one call.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn clock(&self, runs: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
        f()?;
        let mut times = Vec::with_capacity(runs);
        for _ in 0..runs {
            self.device.synchronize()?;
            let start = Instant::now();
            f()?;
            self.device.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        Ok(middle(times))
    }

    fn event(&self) -> Result<CudaEvent> {
        Ok(self.cuda.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?)
    }

    /// `scale` times normal values.
    ///
    /// # Errors
    /// If candle fails.
    pub fn noise(&self, scale: f32, dims: &[usize], dtype: DType) -> Result<Tensor> {
        Ok(Tensor::randn(0f32, scale, dims, &self.device)?.to_dtype(dtype)?)
    }
}

/// `|a - b| / |b|` in the Euclidean norm, computed on the device.
///
/// # Errors
/// If candle fails.
pub fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    // In two steps: candle gives each sum to one block.
    let norm = |t: &Tensor| -> Result<f64> {
        let rows = t.sqr()?.sum(D::Minus1)?;
        Ok(f64::from(rows.sum_all()?.to_scalar::<f32>()?).sqrt())
    };
    let (a, b) = (a.to_dtype(DType::F32)?.contiguous()?, b.to_dtype(DType::F32)?.contiguous()?);
    Ok(norm(&(a - &b)?)? / norm(&b)?)
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
