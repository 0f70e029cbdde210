//! Files of latents, written and read here by a few lines of their own.

use std::{fs, path::Path};

use serde_json::json;

use crate::support::data;

/// A `.latent` file with `[1, z, n, h, w]` and these values.
pub(crate) fn write(path: &Path, shape: &[usize], values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    write_bytes(path, shape, "F32", &bytes);
}

pub(crate) fn write_bytes(path: &Path, shape: &[usize], dtype: &str, bytes: &[u8]) {
    let header = json!({
        "latent_format_version_0": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        "latent_tensor": {"dtype": dtype, "shape": shape, "data_offsets": [0, bytes.len()]},
    });
    let mut header = header.to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    fs::write(path, file).expect("a writable folder");
}

/// Shape and values of a tensor.
pub(crate) fn read(path: &Path, tensor: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = fs::read(path).expect("a readable file");
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a header length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Value = serde_json::from_slice(header).expect("a JSON header");
    let info = &header[tensor];
    assert_eq!(info["dtype"], "F32", "{tensor}");
    let number = |value: &serde_json::Value| value.as_u64().expect("a number") as usize;
    let shape = info["shape"].as_array().expect("a shape").iter().map(number).collect();
    let range = number(&info["data_offsets"][0])..number(&info["data_offsets"][1]);
    let values = data[range].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")));
    (shape, values.collect())
}

/// The metadata of a file.
pub(crate) fn metadata(path: &Path) -> serde_json::Value {
    let bytes = fs::read(path).expect("a readable file");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("a header length")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a JSON header");
    header["__metadata__"].clone()
}

/// The built-in clip, longer: its last two latent frames again and again.
pub(crate) fn long_clip(path: &Path, frames: usize) {
    let (shape, values) = read(&data("models/wan-demo.latent"), "latent_tensor");
    let &[1, channels, count, height, width] = shape.as_slice() else { panic!("{shape:?}") };
    let plane = height * width;
    let source = |frame: usize| if frame == 0 { 0 } else { 1 + (frame - 1) % (count - 1) };
    let planes = (0..channels).flat_map(|channel| (0..frames).map(move |frame| channel * count + source(frame)));
    let values: Vec<f32> = planes.flat_map(|at| values[at * plane..(at + 1) * plane].to_vec()).collect();
    write(path, &[1, channels, frames, height, width], &values);
}
