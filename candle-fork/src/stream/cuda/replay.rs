//! Graphs of the driver.

use candle_core::{
    CudaDevice,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{
            CudaGraph,
            sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
        },
    },
};

use crate::{
    cuda::arena,
    error::{Error, Result, What},
};

const OP: &str = "recording of work";

/// Enqueued work as a graph, with memory of its own for what the work allocates and frees again.
pub(in crate::stream) struct Graph(CudaGraph);

// SAFETY: the driver's handles may be used from any thread, one at a time; every use of them is through `&mut self`.
unsafe impl Send for Graph {}

// SAFETY: a shared graph offers nothing that uses its handles.
unsafe impl Sync for Graph {}

impl Graph {
    /// What `work` enqueues. Nothing of it is done.
    ///
    /// # Errors
    /// If the work cannot be recorded, for whatever reason.
    pub(in crate::stream) fn record(cuda: &CudaDevice, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let stream = cuda.cuda_stream();
        if stream.context().is_managing_stream_synchronization() {
            let what = "a device whose tensors are tracked by events".to_owned();
            return Err(Error::Unsupported { op: OP, what });
        }
        // Uploads of host memory would be repeated from where that memory was: with the cache they fail.
        let _no_uploads = cuda.enable_cuda_graph_htod_cache();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w().what(OP)?;
        let worked = arena::fresh(work);
        // Ends the recording also behind a failure.
        let ended = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        let graph = worked.and_then(|()| ended.w().what(OP));
        if graph.is_err() {
            // What the failed recording left behind is not an error of what comes next.
            let _ = stream.context().check_err();
        }
        let empty = || Error::Unsupported { op: OP, what: "no work at all".to_owned() };
        Ok(Self(graph?.ok_or_else(empty)?))
    }

    /// Enqueues the work.
    pub(in crate::stream) fn run(&mut self) -> Result<()> {
        self.0.launch().w().what("recorded work")
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}
