//! Y4M out.

use std::path::Path;

use super::target::Target;
use super::ycbcr::{Matrix, to_444};
use super::{FrameSink, VideoOptions};
use crate::{Result, Rgb8};

/// YUV4MPEG2 with one sample of each colour difference for each pixel, so that only the rounding to whole steps is lost.
#[derive(Debug)]
pub(super) struct Y4mWriter {
    target: Target,
    matrix: Matrix,
}

impl Y4mWriter {
    pub(super) fn create(path: &Path, options: &VideoOptions) -> Result<Self> {
        let mut target = Target::create(path)?;
        let VideoOptions { width, height, fps, .. } = *options;
        let (numerator, denominator) = (fps.numerator(), fps.denominator());
        let matrix = Matrix::of_untagged(width, height);
        // The format has no field of its own for the matrix; fields with X are for what others may pass over.
        let tag = match matrix {
            Matrix::Bt601 => "BT601",
            Matrix::Bt709 => "BT709",
        };
        let header = format!(
            "YUV4MPEG2 W{width} H{height} F{numerator}:{denominator} Ip A1:1 C444 XCOLORRANGE=LIMITED XCOLORMATRIX={tag}\n"
        );
        target.put(header.as_bytes())?;
        Ok(Self { target, matrix })
    }
}

impl FrameSink for Y4mWriter {
    fn write(&mut self, frame: &Rgb8) -> Result<()> {
        let planes = to_444(frame, self.matrix);
        self.target.put(b"FRAME\n")?;
        self.target.put(&planes.y)?;
        self.target.put(&planes.cb)?;
        self.target.put(&planes.cr)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.target.commit()
    }
}
