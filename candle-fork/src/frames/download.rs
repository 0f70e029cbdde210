//! Bytes of frames on their way to the host, while the device makes the next ones.

use candle_core::Tensor;

use super::Rgb8Frames;
use crate::error::Result;

/// Frames on the host.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HostFrames {
    /// Interleaved bytes `[T, H, W, C]`.
    pub pixels: Vec<u8>,
    /// Extents T, H, W, C.
    pub dims: [usize; 4],
    /// Whether all values were finite; see [`Rgb8Frames::all_finite`].
    pub all_finite: bool,
}

/// A queue of one: frames that are pushed come out at the next push, when the device has long been given more to do.
///
/// Waiting for frames right after they were enqueued would leave the device idle until the host has enqueued the next
/// ones. On the CPU nothing is in flight; frames come out one push later all the same.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::frames::{Downloads, PatchOrder, frames_to_rgb8};
///
/// let mut downloads = Downloads::default();
/// let x = Tensor::zeros((1, 3, 1, 4, 4), DType::F32, &Device::Cpu)?;
/// assert!(downloads.push(frames_to_rgb8(&x, 1, PatchOrder::RowMajor)?)?.is_none());
/// let frames = downloads.finish()?.ok_or("nothing came out")?;
/// assert_eq!((frames.dims, frames.pixels[0]), ([1, 4, 4, 3], 128));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Downloads {
    pending: Option<Flight>,
    #[cfg(feature = "cuda")]
    spare: Option<super::cuda::Buffers>,
}

#[derive(Debug)]
enum Flight {
    Here(Rgb8Frames),
    #[cfg(feature = "cuda")]
    Coming {
        buffers: super::cuda::Buffers,
        dims: [usize; 4],
    },
}

impl Downloads {
    /// Starts to copy `frames` and gives those of the push before, once they have arrived.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the device fails.
    pub fn push(&mut self, frames: Rgb8Frames) -> Result<Option<HostFrames>> {
        let next = self.start(frames)?;
        let before = self.pending.replace(next);
        before.map(|flight| self.land(flight)).transpose()
    }

    /// The frames of the last push.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the device fails.
    pub fn finish(mut self) -> Result<Option<HostFrames>> {
        self.pending.take().map(|flight| self.land(flight)).transpose()
    }

    /// `frames` alone, at once: those of a push before stay where they are. Memory is kept for the next ones, which saves most
    /// of the time of a copy into new pages.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the device fails.
    pub fn fetch(&mut self, frames: Rgb8Frames) -> Result<HostFrames> {
        let flight = self.start(frames)?;
        self.land(flight)
    }

    fn start(&mut self, frames: Rgb8Frames) -> Result<Flight> {
        #[cfg(feature = "cuda")]
        if frames.pixels.device().is_cuda() {
            let dims = dims(&frames.pixels);
            let buffers = super::cuda::Buffers::fill(self.spare.take(), &frames.pixels, &frames.flags)?;
            return Ok(Flight::Coming { buffers, dims });
        }
        Ok(Flight::Here(frames))
    }

    fn land(&mut self, flight: Flight) -> Result<HostFrames> {
        match flight {
            Flight::Here(frames) => {
                use crate::error::What;
                let all_finite = frames.all_finite()?;
                let pixels = frames.pixels.flatten_all().and_then(|pixels| pixels.to_vec1()).what("bytes of frames")?;
                Ok(HostFrames { pixels, dims: dims(&frames.pixels), all_finite })
            }
            #[cfg(feature = "cuda")]
            Flight::Coming { buffers, dims } => {
                let (pixels, all_finite) = buffers.wait(dims.iter().product())?;
                self.spare = Some(buffers);
                Ok(HostFrames { pixels, dims, all_finite })
            }
        }
    }
}

/// Extents of pixels, which are of rank 4.
fn dims(pixels: &Tensor) -> [usize; 4] {
    let mut dims = [1; 4];
    dims.iter_mut().zip(pixels.dims()).for_each(|(to, &from)| *to = from);
    dims
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::frames::{PatchOrder, frames_to_rgb8};

    #[test]
    fn frames_come_out_one_push_later_and_none_is_lost() {
        let mut downloads = Downloads::default();
        let mut seen = Vec::new();
        for value in [-1f32, 0.0, f32::NAN, 1.0] {
            let x = Tensor::full(value, (1, 3, 2, 2, 2), &Device::Cpu).unwrap();
            let frames = frames_to_rgb8(&x, 1, PatchOrder::RowMajor).unwrap();
            seen.extend(downloads.push(frames).unwrap());
        }
        assert_eq!(seen.len(), 3);
        seen.extend(downloads.finish().unwrap());
        let first: Vec<_> = seen.iter().map(|frames| (frames.pixels[0], frames.all_finite)).collect();
        assert_eq!(first, [(0, true), (128, true), (0, false), (255, true)]);
        assert!(seen.iter().all(|frames| frames.dims == [2, 2, 2, 3] && frames.pixels.len() == 24));
        assert!(Downloads::default().finish().unwrap().is_none());
    }

    #[test]
    fn frames_that_are_fetched_do_not_disturb_those_that_were_pushed() {
        let frames = |value: f32| {
            let x = Tensor::full(value, (1, 3, 1, 2, 2), &Device::Cpu).unwrap();
            frames_to_rgb8(&x, 1, PatchOrder::RowMajor).unwrap()
        };
        let mut downloads = Downloads::default();
        assert!(downloads.push(frames(-1.0)).unwrap().is_none());
        let fetched = downloads.fetch(frames(1.0)).unwrap();
        assert_eq!((fetched.pixels[0], fetched.dims), (255, [1, 2, 2, 3]));
        assert_eq!(downloads.finish().unwrap().map(|frames| frames.pixels[0]), Some(0));
    }
}
