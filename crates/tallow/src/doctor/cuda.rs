//! What `doctor` says of CUDA.

use candle_fork::diagnosis::{self, CudaDeviceReport, CudnnReport};
use serde::Serialize;

/// The driver, its devices and cuDNN.
#[derive(Debug, Default, Serialize)]
pub(super) struct Cuda {
    devices: Vec<Device>,
    /// Why there are no devices.
    driver_failure: Option<String>,
    cudnn: Option<Cudnn>,
    /// Why there is no cuDNN.
    cudnn_failure: Option<String>,
    /// Places where cuDNN was sought in vain, and what the loader said.
    cudnn_attempts: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Device {
    ordinal: usize,
    name: String,
    compute_capability: String,
    multiprocessors: u32,
    driver: String,
    /// Whether a convolution ran on cuDNN there; else why not.
    cudnn_failure: Option<String>,
}

#[derive(Debug, Serialize)]
struct Cudnn {
    version: String,
    path: Option<String>,
    cuda: String,
    cublas_lt: Option<String>,
    nvrtc: Option<String>,
    /// Why there is no NVRTC.
    nvrtc_attempts: Vec<String>,
    /// What this version computes wrongly, so that other code is used.
    refused: Vec<String>,
}

impl Cuda {
    /// `None` in a build without CUDA.
    pub(super) fn new() -> Option<Self> {
        let report = diagnosis::cuda().ok()?;
        let (devices, driver_failure) = match report.devices {
            Ok(devices) => (devices, None),
            Err(failure) => (Vec::new(), Some(failure)),
        };
        let has_cudnn = report.cudnn.is_ok();
        let devices = devices.into_iter().map(|device| Device::new(device, has_cudnn)).collect();
        Some(match report.cudnn {
            Ok(cudnn) => Self {
                devices,
                driver_failure,
                cudnn_attempts: cudnn.attempts.clone(),
                cudnn: Some(Cudnn::new(cudnn)),
                cudnn_failure: None,
            },
            Err(failure) => Self {
                devices,
                driver_failure,
                cudnn: None,
                cudnn_failure: Some(failure.what),
                cudnn_attempts: failure.attempts,
            },
        })
    }

    /// Rows of the table.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = Vec::new();
        rows.extend(self.driver_failure.iter().map(|failure| ("cuda driver", format!("does not serve: {failure}"))));
        for device in &self.devices {
            let Device { ordinal, name, compute_capability, multiprocessors, driver, .. } = device;
            let kind = format!("compute capability {compute_capability}, {multiprocessors} multiprocessors");
            rows.push(("cuda device", format!("{ordinal}: {name}, {kind}, driver for CUDA {driver}")));
            if self.cudnn.is_some() {
                let trial = match &device.cudnn_failure {
                    None => "a trial convolution ran".to_owned(),
                    Some(failure) => format!("a trial convolution did not run: {failure}"),
                };
                rows.push(("cudnn", format!("device {ordinal}: {trial}")));
            }
        }
        if let Some(cudnn) = &self.cudnn {
            let known = |path: &Option<String>| path.clone().unwrap_or_else(|| "path unknown".to_owned());
            rows.push(("cudnn", format!("{} for CUDA {}, {}", cudnn.version, cudnn.cuda, known(&cudnn.path))));
            rows.extend(cudnn.refused.iter().map(|refused| ("cudnn", format!("not used for: {refused}"))));
            rows.push(("cublasLt", known(&cudnn.cublas_lt)));
            let nvrtc = if cudnn.nvrtc_attempts.is_empty() {
                known(&cudnn.nvrtc)
            } else {
                format!("not found, so no kernels are compiled at run time: {}", cudnn.nvrtc_attempts.join("; "))
            };
            rows.push(("nvrtc", nvrtc));
        }
        rows.extend(self.cudnn_failure.iter().map(|failure| ("cudnn", format!("not available: {failure}"))));
        if self.cudnn.is_none() {
            rows.extend(self.cudnn_attempts.iter().map(|attempt| ("cudnn", format!("tried {attempt}"))));
        }
        rows
    }
}

impl Device {
    fn new(report: CudaDeviceReport, has_cudnn: bool) -> Self {
        let CudaDeviceReport { ordinal, name, compute_capability, multiprocessors, driver, cudnn_refusal, .. } = report;
        let failure = match cudnn_refusal {
            Some(refusal) => Some(refusal),
            None if has_cudnn => diagnosis::cudnn_trial(ordinal).err().map(|error| causes(&error)),
            None => None,
        };
        Self { ordinal, name, compute_capability, multiprocessors, driver, cudnn_failure: failure }
    }
}

impl Cudnn {
    fn new(report: CudnnReport) -> Self {
        let text = |path: std::path::PathBuf| path.display().to_string();
        let (nvrtc, nvrtc_attempts) = match report.nvrtc {
            Ok(path) => (path.map(text), Vec::new()),
            Err(attempts) => (None, attempts),
        };
        Self {
            version: report.version,
            path: report.path.map(text),
            cuda: report.cuda,
            cublas_lt: report.cublas_lt.map(text),
            nvrtc,
            nvrtc_attempts,
            refused: report.refused,
        }
    }
}

/// An error and what lies behind it, on one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {}", error.to_string().lines().next().unwrap_or_default());
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(cuda: &Cuda) -> String {
        cuda.rows().into_iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
    }

    #[test]
    fn failures_are_told_in_full() {
        let cuda = Cuda {
            driver_failure: Some("no device".into()),
            cudnn_failure: Some("no cudnn library could be loaded".into()),
            cudnn_attempts: vec!["libcudnn.so.9: not there".into(), "/opt/libcudnn.so.9: damaged".into()],
            ..Cuda::default()
        };
        let expected = "cuda driver: does not serve: no device\n\
                        cudnn: not available: no cudnn library could be loaded\n\
                        cudnn: tried libcudnn.so.9: not there\n\
                        cudnn: tried /opt/libcudnn.so.9: damaged\n";
        assert_eq!(rows(&cuda), expected);
    }

    #[test]
    fn a_working_machine_is_described() {
        let device = Device {
            ordinal: 0,
            name: "Some GPU".into(),
            compute_capability: "9.0".into(),
            multiprocessors: 132,
            driver: "13.0".into(),
            cudnn_failure: None,
        };
        let cudnn = Cudnn {
            version: "9.10.2".into(),
            path: Some("/lib/libcudnn.so.9".into()),
            cuda: "12.9".into(),
            cublas_lt: None,
            nvrtc: None,
            nvrtc_attempts: vec!["libnvrtc.so.12: missing".into()],
            refused: vec!["half precision 3-d convolutions".into()],
        };
        let cuda = Cuda {
            devices: vec![device],
            cudnn: Some(cudnn),
            cudnn_attempts: vec!["not worth telling".into()],
            ..Cuda::default()
        };
        let expected = "cuda device: 0: Some GPU, compute capability 9.0, 132 multiprocessors, driver for CUDA 13.0\n\
                        cudnn: device 0: a trial convolution ran\n\
                        cudnn: 9.10.2 for CUDA 12.9, /lib/libcudnn.so.9\n\
                        cudnn: not used for: half precision 3-d convolutions\n\
                        cublasLt: path unknown\n\
                        nvrtc: not found, so no kernels are compiled at run time: libnvrtc.so.12: missing\n";
        assert_eq!(rows(&cuda), expected);
    }

    #[test]
    fn a_build_without_cuda_has_no_section() {
        assert_eq!(Cuda::new().is_some(), cfg!(feature = "cuda"));
    }
}
