//! Animations in GIF and WebP in.

use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use ::gif::{ColorOutput, DecodeOptions, Decoder, DecodingError, DisposalMethod, MemoryLimit};
use image_webp::WebPDecoder;

use super::{FrameSource, Input, about, unreadable};
use crate::video::FrameRate;
use crate::{Error, MAX_PIXELS, Result, Rgb8};

const WHITE: [u8; 3] = [255; 3];

/// The canvas on which the frames of a GIF are laid.
struct GifReader<R: Read> {
    path: PathBuf,
    decoder: Decoder<R>,
    /// Colours, with white where nothing has been drawn.
    canvas: Vec<[u8; 3]>,
    width: usize,
    height: usize,
    fps: Option<FrameRate>,
    /// What is to be done before the next frame.
    pending: Option<Pending>,
}

struct Pending {
    left: usize,
    top: usize,
    width: usize,
    /// What comes there: rows of the rectangle.
    pixels: Vec<[u8; 3]>,
}

pub(super) fn open_gif<R: Read + Send + 'static>(path: &Path, input: R) -> Result<Box<dyn FrameSource>> {
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::RGBA);
    options.check_frame_consistency(true);
    options.set_memory_limit(MemoryLimit::Bytes((4 * MAX_PIXELS).try_into().unwrap_or(std::num::NonZeroU64::MAX)));
    let decoder = options.read_info(input).map_err(|source| gif_failed(path, 1, source))?;
    let (width, height) = (decoder.width(), decoder.height());
    if width == 0 || height == 0 {
        return Err(about(path, Error::EmptyPicture { width: width.into(), height: height.into() }));
    }
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        let (width, height) = (width.into(), height.into());
        return Err(about(path, Error::TooManyPixels { width, height, max_pixels: MAX_PIXELS }));
    }
    let (width, height) = (usize::from(width), usize::from(height));
    let canvas = Vec::new();
    Ok(Box::new(GifReader { path: path.to_owned(), decoder, canvas, width, height, fps: None, pending: None }))
}

impl<R: Read + Send> FrameSource for GifReader<R> {
    fn next(&mut self, number: u64) -> Result<Option<Rgb8>> {
        let frame = self.decoder.read_next_frame().map_err(|source| gif_failed(&self.path, number, source))?;
        let Some(frame) = frame else { return Ok(None) };
        if self.canvas.is_empty() {
            self.canvas.resize(self.width * self.height, WHITE);
            self.fps = FrameRate::new(100, frame.delay.into()).ok();
        }
        if let Some(Pending { left, top, width, pixels }) = self.pending.take() {
            for (row, pixels) in pixels.chunks_exact(width).enumerate() {
                let start = (top + row) * self.width + left;
                self.canvas[start..start + width].copy_from_slice(pixels);
            }
        }
        let (left, top) = (usize::from(frame.left), usize::from(frame.top));
        let (width, height) = (usize::from(frame.width), usize::from(frame.height));
        let fits = left + width <= self.width && top + height <= self.height;
        if width == 0 || height == 0 || !fits || frame.buffer.len() != 4 * width * height {
            let source = io::Error::new(io::ErrorKind::InvalidData, "the frame does not lie within the animation");
            return Err(gif_failed(&self.path, number, DecodingError::from(source)));
        }
        let rows = || (top..top + height).map(|y| y * self.width + left..y * self.width + left + width);
        let pixels = match frame.dispose {
            DisposalMethod::Any | DisposalMethod::Keep => None,
            DisposalMethod::Background => Some(vec![WHITE; width * height]),
            DisposalMethod::Previous => Some(rows().flat_map(|row| self.canvas[row].iter().copied()).collect()),
        };
        self.pending = pixels.map(|pixels| Pending { left, top, width, pixels });
        for (row, drawn) in rows().zip(frame.buffer.chunks_exact(4 * width)) {
            for (under, &[red, green, blue, alpha]) in self.canvas[row].iter_mut().zip(drawn.as_chunks().0) {
                if alpha != 0 {
                    *under = [red, green, blue];
                }
            }
        }
        Rgb8::new(self.canvas.as_flattened().to_vec(), self.width, self.height).map(Some)
    }

    fn fps(&self) -> Option<FrameRate> {
        self.fps
    }
}

fn gif_failed(path: &Path, frame: u64, source: DecodingError) -> Error {
    match source {
        DecodingError::Io(source)
            if source.kind() != io::ErrorKind::UnexpectedEof && source.kind() != io::ErrorKind::InvalidData =>
        {
            unreadable(path, source)
        }
        source => about(path, Error::DecodeGif { frame, source: Box::new(source) }),
    }
}

/// Whether a file that begins like this is a WebP of several frames: an extended header with the flag for animation.
pub(super) fn is_animated_webp(start: &[u8]) -> bool {
    start.starts_with(b"RIFF")
        && start.get(8..16) == Some(b"WEBPVP8X")
        && start.get(20).is_some_and(|&flags| flags & 2 != 0)
}

struct WebPReader<R> {
    path: PathBuf,
    decoder: WebPDecoder<R>,
    frames: u64,
    delay_ms: u32,
}

pub(super) fn open_webp<R: Input + 'static>(path: &Path, input: R) -> Result<Box<dyn FrameSource>> {
    let broken = |source| about(path, Error::DecodeWebP { frame: 1, source: Box::new(source) });
    let mut decoder = WebPDecoder::new(input).map_err(broken)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(about(path, Error::TooManyPixels { width, height, max_pixels: MAX_PIXELS }));
    }
    decoder.set_memory_limit(8 * MAX_PIXELS as usize);
    // As a still picture with transparency is read, and not on the colour that the file suggests.
    if decoder.is_animated() {
        decoder.set_background_color([0; 4]).map_err(broken)?;
    }
    let frames = u64::from(decoder.num_frames());
    Ok(Box::new(WebPReader { path: path.to_owned(), decoder, frames, delay_ms: 0 }))
}

impl<R: Input> FrameSource for WebPReader<R> {
    fn next(&mut self, number: u64) -> Result<Option<Rgb8>> {
        if number > self.frames {
            return Ok(None);
        }
        let (width, height) = self.decoder.dimensions();
        let (width, height) = (width as usize, height as usize);
        let mut pixels = vec![0; self.decoder.output_buffer_size().unwrap_or(0)];
        let delay = self.decoder.read_frame(&mut pixels);
        let delay =
            delay.map_err(|source| about(&self.path, Error::DecodeWebP { frame: number, source: Box::new(source) }))?;
        if number == 1 {
            self.delay_ms = delay;
        }
        if self.decoder.has_alpha() {
            pixels =
                pixels.as_chunks::<4>().0.iter().flat_map(|&pixel| crate::decode::over_white_pixel(pixel)).collect();
        }
        Rgb8::new(pixels, width, height).map(Some)
    }

    fn fps(&self) -> Option<FrameRate> {
        FrameRate::new(1000, self.delay_ms).ok()
    }

    fn len(&self) -> Option<u64> {
        Some(self.frames)
    }
}

/// Whether a PNG holds an animation. Damage is found when it is decoded.
pub(super) fn is_animated_png<R: Read + Seek>(input: &mut BufReader<R>) -> io::Result<bool> {
    let animated = match png::Decoder::new(&mut *input).read_info() {
        Ok(reader) => reader.info().animation_control().is_some_and(|control| control.num_frames > 1),
        Err(_) => false,
    };
    input.rewind()?;
    Ok(animated)
}
