//! What of CUDA and cuDNN this process can use, and why not: for a command that helps people set up their machine.

use std::path::PathBuf;

use candle_core::Device;

use crate::error::Result;

/// What was found; see [`cuda`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaReport {
    /// The devices, or why the driver does not serve.
    pub devices: Result<Vec<CudaDeviceReport>, String>,
    /// cuDNN, or why it cannot be used.
    pub cudnn: Result<CudnnReport, CudnnFailure>,
}

/// A CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDeviceReport {
    /// Number of the device in the process.
    pub ordinal: usize,
    /// Name, as the driver gives it.
    pub name: String,
    /// Compute capability, such as `9.0`.
    pub compute_capability: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA version that the driver is for, such as `13.0`.
    pub driver: String,
    /// Why cuDNN does not serve this device, if there is a cuDNN.
    pub cudnn_refusal: Option<String>,
}

/// The cuDNN that convolutions use where the [policy](crate::cudnn_policy) wants one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudnnReport {
    /// Version, such as `9.19.0`.
    pub version: String,
    /// File, where the system tells.
    pub path: Option<PathBuf>,
    /// CUDA version that it is built for, such as `13.0`.
    pub cuda: String,
    /// File of cuBLASLt, where the system tells.
    pub cublas_lt: Option<PathBuf>,
    /// File of NVRTC where the system tells, or what was tried. Without it no kernels are compiled at run time.
    pub nvrtc: Result<Option<PathBuf>, Vec<String>>,
    /// What is not computed with this version, because it is known to be wrong.
    pub refused: Vec<String>,
    /// Places tried before this one was found, and what the loader said.
    pub attempts: Vec<String>,
}

/// Why there is no cuDNN.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudnnFailure {
    /// What went wrong.
    pub what: String,
    /// Places tried, and what the loader said.
    pub attempts: Vec<String>,
}

/// Version of the cuDNN that this process uses, or would use, such as `9.19.0`. Looks for it if nobody did yet.
pub fn cudnn_version() -> Option<String> {
    #[cfg(feature = "cuda")]
    return crate::cudnn::library().ok().map(|library| library.version().to_string());
    #[cfg(not(feature = "cuda"))]
    None
}

/// The kind of a device, as far as bytes depend on it: `cpu`, `cuda-9.0` (with its compute capability), `metal`.
pub fn device_class(device: &Device) -> String {
    match device {
        Device::Cpu => "cpu".to_owned(),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            let info = crate::cudnn::DeviceInfo::of(cuda.cuda_stream().context().ordinal());
            info.map_or_else(|_| "cuda".to_owned(), |info| format!("cuda-{}", info.compute_capability()))
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => "cuda".to_owned(),
        Device::Metal(_) => "metal".to_owned(),
    }
}

/// Looks at the driver, its devices and cuDNN. Allocates nothing on any device.
///
/// # Errors
/// [`Error::NotCompiled`](crate::Error::NotCompiled) in a build without feature `cuda`.
pub fn cuda() -> Result<CudaReport> {
    #[cfg(feature = "cuda")]
    return Ok(found::report());
    #[cfg(not(feature = "cuda"))]
    Err(crate::Error::NotCompiled { op: "diagnosis", feature: "cuda" })
}

/// Runs one small convolution on cuDNN, on the device of this number: the whole way from the library to the device.
///
/// # Errors
/// Whatever stands in the way: [`Error::FallbackRefused`](crate::Error::FallbackRefused) with cuDNN's words, or an error
/// of candle or the driver; [`Error::NotCompiled`](crate::Error::NotCompiled) without feature `cuda`.
pub fn cudnn_trial(ordinal: usize) -> Result<()> {
    #[cfg(feature = "cuda")]
    return found::trial(ordinal);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = ordinal;
        Err(crate::Error::NotCompiled { op: "diagnosis", feature: "cuda" })
    }
}

#[cfg(feature = "cuda")]
mod found {
    use std::path::Path;

    use candle_core::{DType, Tensor, cuda_backend::cudarc::driver::result};

    use super::*;
    use crate::{
        conv::{ConvParams, conv_nd},
        cudnn::{DeviceInfo, library, of_version},
        cudnn_policy::{self, Backend, Policy},
        error::What,
    };

    /// A version of CUDA: 13000 is 13.0.
    fn cuda_version(number: u32) -> String {
        format!("{}.{}", number / 1000, number % 1000 / 10)
    }

    pub(super) fn report() -> CudaReport {
        let cudnn = library().map(|library| CudnnReport {
            version: library.version().to_string(),
            path: library.path().map(Path::to_owned),
            cuda: cuda_version(library.cudart_version()),
            cublas_lt: library.cublas_lt().map(Path::to_owned),
            nvrtc: library.nvrtc().map(|path| path.map(Path::to_owned)).map_err(<[String]>::to_vec),
            refused: of_version(library.version()).collect(),
            attempts: library.attempts().to_vec(),
        });
        CudaReport {
            devices: devices().map_err(|error| error.to_string()),
            cudnn: cudnn.map_err(|unavailable| CudnnFailure {
                what: unavailable.what.clone(),
                attempts: unavailable.attempts.clone(),
            }),
        }
    }

    fn devices() -> Result<Vec<CudaDeviceReport>, result::DriverError> {
        result::init()?;
        let count = usize::try_from(result::device::get_count()?).unwrap_or(0);
        let report = |ordinal| {
            let info = DeviceInfo::of(ordinal)?;
            Ok(CudaDeviceReport {
                ordinal,
                name: info.name.clone(),
                compute_capability: info.compute_capability(),
                multiprocessors: info.multiprocessors,
                driver: cuda_version(info.driver),
                cudnn_refusal: library().ok().and_then(|library| info.admit(library).err()).map(|r| r.text),
            })
        };
        (0..count).map(report).collect()
    }

    pub(super) fn trial(ordinal: usize) -> Result<()> {
        let device = Device::new_cuda(ordinal).what("opening of the device")?;
        let ones =
            |dims: [usize; 4]| Tensor::ones(&dims[..], DType::BF16, &device).what("tensors for a trial of cudnn");
        let (x, weight) = (ones([1, 8, 8, 8])?, ones([8, 8, 3, 3])?);
        let params = ConvParams { padding: [(1, 1); 2], ..ConvParams::default() };
        let y = cudnn_policy::scope(Policy::new(Backend::Required), || conv_nd(&x, &weight, None, &params))?;
        let middle = y.narrow(2, 1, 6).and_then(|y| y.narrow(3, 1, 6)).and_then(|y| y.to_dtype(DType::F32));
        let values = middle.and_then(|y| y.flatten_all()).and_then(|y| y.to_vec1::<f32>()).what("trial of cudnn")?;
        // 8 channels by 9 taps of ones.
        match values.iter().find(|&&value| value != 72.0) {
            None => Ok(()),
            Some(value) => {
                let what = format!("the trial convolution gave {value} instead of 72");
                Err(crate::Error::Unsupported { op: "cudnn", what })
            }
        }
    }
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn a_build_without_cuda_says_so() {
        assert_eq!(cudnn_version(), None);
        for error in [cuda().unwrap_err(), cudnn_trial(0).unwrap_err()] {
            assert!(matches!(error, Error::NotCompiled { feature: "cuda", .. }), "{error}");
        }
    }
}
