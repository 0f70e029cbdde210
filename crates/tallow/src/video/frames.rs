//! Between tensors of frames and pictures.

use anyhow::ensure;
use candle_core::{Device, Tensor};
use media::Rgb8;
use wan_vae::HostFrames;

/// The pictures of frames from a decoder.
///
/// # Errors
/// If they have other channels than red, green and blue, or were made of values that are not finite.
pub(crate) fn pictures(frames: &HostFrames) -> anyhow::Result<Vec<Rgb8>> {
    let [_, height, width, channels] = frames.dims;
    ensure!(channels == 3, "frames of {channels} channels, expected 3");
    ensure!(frames.all_finite, "frames of values that are not finite");
    let bytes = (height * width * channels).max(1);
    frames.pixels.chunks_exact(bytes).map(|pixels| Ok(Rgb8::new(pixels.to_vec(), width, height)?)).collect()
}

/// A picture as a frame `[3, 1, H, W]` in -1..=1.
///
/// # Errors
/// If there is no memory for it.
pub(crate) fn frame(picture: &Rgb8) -> candle_core::Result<Tensor> {
    let mut planes = picture.to_planar_f32();
    planes.iter_mut().for_each(|value| *value = 2.0 * *value - 1.0);
    Tensor::from_vec(planes, (3, 1, picture.height(), picture.width()), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use candle_fork::frames::{Downloads, PatchOrder, frames_to_rgb8};

    use super::*;

    /// The pictures of frames `[3, m, H, W]` in -1..=1.
    fn pictures(frames: &Tensor) -> anyhow::Result<Vec<Rgb8>> {
        let bytes = frames_to_rgb8(&frames.unsqueeze(0).unwrap(), 1, PatchOrder::RowMajor).unwrap();
        let mut downloads = Downloads::default();
        assert!(downloads.push(bytes).unwrap().is_none());
        super::pictures(&downloads.finish().unwrap().unwrap())
    }

    #[test]
    fn every_level_comes_back() {
        let levels: Vec<u8> = (0..=255).flat_map(|level| [level, 255 - level, level ^ 0x5a]).collect();
        let picture = Rgb8::new(levels, 32, 8).unwrap();
        let frame = frame(&picture).unwrap();
        let values: Vec<f32> = frame.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!((values[0], values[255]), (-1.0, 1.0));
        assert_eq!(pictures(&frame).unwrap(), [picture]);
    }

    #[test]
    fn frames_come_in_order_and_are_clamped() {
        let frames = Tensor::from_vec(vec![-2f32, 0.0, 1.0, 3.0, -1.0, 1.0], (3, 2, 1, 1), &Device::Cpu).unwrap();
        let pictures = pictures(&frames).unwrap();
        let pixels: Vec<_> = pictures.iter().map(Rgb8::pixels).collect();
        assert_eq!(pixels, [[0, 255, 0], [128, 255, 255]]);
        let nan = Tensor::full(f32::NAN, (3, 1, 1, 1), &Device::Cpu).unwrap();
        assert!(self::pictures(&nan).is_err());
    }
}
