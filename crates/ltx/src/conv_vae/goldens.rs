//! Both networks against diffusers: `tests/reference/golden_ltx_conv.py`.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_fork::frames::{HostFrames, PatchOrder, frames_to_rgb8, unpatchify};
use policy::Silent;
use serde_json::Value;
use weights::{
    Safetensors, TensorSource,
    write::{TensorData, to_bytes},
};

use super::{run::Conditions, vae::ConvVae, *};
use crate::{diffusion_decoder::BlendedTiles, error::Error, options::LoadOptions};

/// f32 against f32.
const TOLERANCE: f64 = 1e-5;

struct Golden {
    file: Safetensors,
    vae: ConvVae,
}

const CASES: [&str; 3] = ["ltx-conv-20", "ltx-conv-23", "ltx-conv-options"];

impl Golden {
    fn open(case: &str) -> Self {
        let path = format!("{}/../../tests/goldens/{case}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let file = Safetensors::open(path).unwrap();
        let config: Value = serde_json::from_str(&file.metadata()["config"]).unwrap();
        let vae = ConvVae::load(weights_of(&file, |_| true), Some(&config), &LoadOptions::default()).unwrap();
        Self { file, vae }
    }

    fn tensor(&self, name: &str) -> Tensor {
        self.file.host(name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap()
    }

    /// The decoder with the noise and the timestep of the golden, not clamped.
    fn frames(&self, step: usize) -> Tensor {
        let conditioned = self.vae.architecture().decoder.as_ref().unwrap().timestep_conditioning;
        let noise: Vec<Tensor> =
            (0..).map_while(|i| self.file.info(&format!("in.noise.{i}"))).map(|t| self.tensor(&t.name)).collect();
        let raw = self.vae.statistics().denormalize(&self.tensor("in.latents")).unwrap();
        let mut parts = Vec::new();
        let timestep = conditioned.then_some(0.05);
        let (network, _) = self.vae.decoder().unwrap();
        self.vae
            .run(network, &raw, step, Conditions { timestep, noise: &noise }, &Silent, &mut |y| {
                let side = self.vae.architecture().patch_size;
                parts.push(unpatchify(&y, side, PatchOrder::ColumnMajor)?);
                Ok(())
            })
            .unwrap();
        Tensor::cat(&parts, 2).unwrap()
    }

    fn check(&self, what: &str, got: &Tensor, name: &str) {
        let error = relative_l2(got, &self.tensor(name));
        println!("{what}: relative L2 error {error:.1e}");
        assert!(error <= TOLERANCE, "{what}: relative L2 error {error:e}");
    }
}

/// The weights among the tensors of a golden.
fn weights_of(file: &Safetensors, wanted: impl Fn(&str) -> bool) -> Arc<dyn TensorSource> {
    Arc::new(Safetensors::from_bytes(Arc::new(weight_bytes(file, wanted)), "golden").unwrap())
}

/// A file with the weights among the tensors of a golden.
fn weight_bytes(file: &Safetensors, wanted: impl Fn(&str) -> bool) -> Vec<u8> {
    let is_weight = |name: &str| !name.starts_with("in.") && !name.starts_with("out.");
    let tensors = file.tensors().iter().filter(|t| is_weight(&t.name) && wanted(&t.name));
    let tensors: Vec<TensorData<'static>> = tensors
        .map(|t| {
            let values = file.host(&t.name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap();
            TensorData::f32(&t.name, &t.shape, &values.flatten_all().unwrap().to_vec1().unwrap())
        })
        .collect();
    to_bytes(&tensors, &Default::default()).unwrap()
}

fn relative_l2(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.dims(), want.dims());
    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, want) in values(got).into_iter().zip(values(want)) {
        error += (f64::from(got) - f64::from(want)).powi(2);
        norm += f64::from(want).powi(2);
    }
    (error / norm).sqrt()
}

#[test]
fn decoders() {
    for case in CASES {
        let golden = Golden::open(case);
        // All latent frames at once, and in pieces.
        for step in [usize::MAX, 1, 2] {
            golden.check(&format!("{case}, {step} at a time"), &golden.frames(step), "out.frames");
        }
    }
}

#[test]
fn encoders() {
    for case in CASES {
        let golden = Golden::open(case);
        for chunk in [None, Some(1), Some(4), Some(8)] {
            let options = ConvEncodeOptions::default().with_chunk(chunk);
            let latents = golden.vae.encode(&golden.tensor("in.frames"), &options, &Silent).unwrap();
            golden.check(&format!("{case}, {chunk:?} at a time"), &latents, "out.latents");
        }
    }
}

/// Whatever waits in the layers of a network, no layer is given more at a time than a chunk makes.
#[test]
fn chunks_stay_chunks_at_the_end_of_a_clip() {
    for case in CASES {
        let golden = Golden::open(case);
        let again = |t: Tensor, times: usize| Tensor::cat(&vec![t; times], 2).unwrap();
        let latents = again(golden.tensor("in.latents").narrow(0, 0, 1).unwrap(), 5);
        // Progress is counted in frames that layers give.
        let steps = std::cell::RefCell::new(Vec::new());
        let observer = |event: &policy::Event<'_>| {
            if let policy::Event::Progress { done, total } = *event {
                steps.borrow_mut().push((done, total));
            }
            std::ops::ControlFlow::Continue(())
        };
        let largest = || {
            let steps = steps.take();
            assert!(steps.last().is_some_and(|(done, total)| done == total), "{case}: {:?}", steps.last());
            let given = [0].into_iter().chain(steps.iter().map(|step| step.0));
            steps.iter().zip(given).map(|(step, before)| step.0 - before).max().unwrap()
        };
        let decode = |chunk| {
            let mut parts = Vec::new();
            let options = ConvDecodeOptions::default().with_chunk(chunk);
            let sink = &mut |frames| {
                parts.push(frames);
                Ok(())
            };
            golden.vae.decode_clip(&latents, &options, &observer, sink).unwrap();
            (Tensor::cat(&parts, 2).unwrap(), largest())
        };
        let count = latents.dim(2).unwrap();
        let (whole, all) = decode(None);
        let factor = (all - 1) / (count - 1);
        assert!(all == whole.dim(2).unwrap() && factor > 1, "{case}: {all} of {:?}", whole.dims());
        for chunk in [1, 2, 3] {
            let (frames, most) = decode(Some(chunk));
            let error = relative_l2(&frames, &whole);
            println!(
                "{case}, {chunk} of {count} latents at a time: at most {most} frames, relative L2 error {error:.1e}"
            );
            // A frame that waited comes with those of the chunk, on the way up.
            assert!(most <= factor * (chunk + 1) && error <= TOLERANCE, "{case}, {chunk}: {most} frames, {error:e}");
        }
    }
}

#[test]
fn tiles() {
    let golden = Golden::open("ltx-conv-tiles");
    let (latents, frames) = (golden.tensor("in.latents"), golden.tensor("in.frames"));
    let tiles = Some(BlendedTiles { tile: [16; 3], stride: [8; 3] });
    let done = std::cell::Cell::new((0, 0));
    let observer = |event: &policy::Event<'_>| {
        if let policy::Event::Progress { done: now, total } = *event {
            assert!(now >= done.get().0 && now <= total);
            done.set((now, total));
        }
        std::ops::ControlFlow::Continue(())
    };
    for chunk in [None, Some(1)] {
        let options = ConvDecodeOptions::default().with_tiles(tiles).with_chunk(chunk);
        let mut decoded = None;
        golden
            .vae
            .decode_clip(&latents, &options, &Silent, &mut |frames| {
                decoded = Some(frames);
                Ok(())
            })
            .unwrap();
        let want = golden.tensor("out.frames").clamp(-1f32, 1f32).unwrap();
        let error = relative_l2(&decoded.unwrap(), &want);
        println!("tiles decoded {chunk:?} at a time: relative L2 error {error:.1e}");
        assert!(error <= TOLERANCE, "{error:e}");
    }
    let options = ConvEncodeOptions::default().with_tiles(tiles);
    let encoded = golden.vae.encode(&frames, &options, &observer).unwrap();
    golden.check("tiles encoded", &encoded, "out.latents");
    // 25 frames of 24 x 40 pixels in tiles that begin every 8.
    let (last, total) = done.get();
    assert_eq!((last, total), (4 * 3 * 5 * 100, 4 * 3 * 5 * 100));
    // Seams are visible: it is not the clip's own decode.
    let whole = golden.vae.decode(&latents, &ConvDecodeOptions::default()).unwrap();
    assert!(relative_l2(&whole, &golden.tensor("out.frames").clamp(-1f32, 1f32).unwrap()) > 1e-2);
    let noisy = Golden::open("ltx-conv-options");
    let options =
        ConvDecodeOptions::default().with_tiles(Some(BlendedTiles { tile: [16, 64, 64], stride: [8, 32, 32] }));
    let refused = noisy.vae.decode(&noisy.tensor("in.latents"), &options);
    assert!(matches!(refused, Err(Error::Argument { .. })));
}

#[test]
fn bytes_are_those_of_the_frames() {
    let golden = Golden::open("ltx-conv-20");
    let latents = golden.tensor("in.latents");
    let frames = golden.vae.decode(&latents, &ConvDecodeOptions::default()).unwrap();
    let want = frames_to_rgb8(&frames, 1, PatchOrder::RowMajor).unwrap();
    let want: Vec<u8> = want.pixels().flatten_all().unwrap().to_vec1().unwrap();
    let bytes = |options: &ConvDecodeOptions| {
        let (mut all, mut count) = (Vec::new(), 0);
        let collect = &mut |frames: HostFrames| {
            count += frames.dims[0];
            all.extend(frames.pixels);
            Ok(())
        };
        golden.vae.decode_rgb8(&latents, options, &Silent, collect).unwrap();
        (all, count)
    };
    let want = (want, frames.dim(2).unwrap());
    assert!(bytes(&ConvDecodeOptions::default()) == want);
    // A tile that is as large as the clip is the clip.
    let tiles = Some(BlendedTiles { tile: [64; 3], stride: [32; 3] });
    assert!(bytes(&ConvDecodeOptions::default().with_tiles(tiles)) == want);
    let batch = Tensor::cat(&[&latents, &latents], 0).unwrap();
    let refused = golden.vae.decode_rgb8(&batch, &ConvDecodeOptions::default(), &Silent, &mut |_| Ok(()));
    assert!(matches!(refused, Err(Error::Shape { what: "latents", .. })));
}

#[test]
fn what_does_not_fit_the_limit_is_refused() {
    let golden = Golden::open("ltx-conv-20");
    let (latents, frames) = (golden.tensor("in.latents"), golden.tensor("in.frames"));
    let limit = Some(1000);
    let decode = golden.vae.decode(&latents, &ConvDecodeOptions::default().with_max_bytes(limit));
    let encode = golden.vae.encode(&frames, &ConvEncodeOptions::default().with_max_bytes(limit), &Silent);
    for (refused, name) in [(decode, "decoding"), (encode, "encoding")] {
        assert!(matches!(refused, Err(Error::Memory { what, max_bytes: 1000, .. }) if what == name));
    }
    let needed = golden.vae.decode_memory([1, 3, 2, 3], Some(1)).total();
    let fitting = ConvDecodeOptions::default().with_max_bytes(Some(needed));
    let frames = golden.vae.decode(&latents, &fitting).unwrap();
    let whole = golden.vae.decode(&latents, &ConvDecodeOptions::default()).unwrap();
    assert!(relative_l2(&frames, &whole) <= TOLERANCE);
    assert!(golden.vae.decode(&latents, &fitting.with_max_bytes(Some(needed - 1))).is_err());
}

#[test]
fn decoding_clamps_and_takes_noise_from_the_seed() {
    let golden = Golden::open("ltx-conv-23");
    let frames = golden.vae.decode(&golden.tensor("in.latents"), &ConvDecodeOptions::default()).unwrap();
    let want = golden.tensor("out.frames").clamp(-1f32, 1f32).unwrap();
    assert!(relative_l2(&frames, &want) <= TOLERANCE);
    let golden = Golden::open("ltx-conv-options");
    let latents = golden.tensor("in.latents");
    let decode = |seed| golden.vae.decode(&latents, &ConvDecodeOptions::default().with_seed(seed)).unwrap();
    assert!(relative_l2(&decode(1), &decode(1)) == 0.0);
    assert!(relative_l2(&decode(1), &decode(2)) > 1e-3);
}

#[test]
fn bad_input_is_refused_before_the_network_runs() {
    let golden = Golden::open("ltx-conv-20");
    let zeros = |dims: [usize; 5]| Tensor::zeros(&dims, DType::F32, &Device::Cpu).unwrap();
    let decode = |x: &Tensor| golden.vae.decode(x, &ConvDecodeOptions::default()).unwrap_err();
    let encode = |x: &Tensor| golden.vae.encode(x, &ConvEncodeOptions::default(), &Silent).unwrap_err();
    assert!(matches!(decode(&zeros([1, 7, 1, 2, 2])), Error::Shape { .. }), "channels");
    assert!(matches!(decode(&zeros([1, 8, 0, 2, 2])), Error::Shape { .. }), "no frames");
    let message = decode(&zeros([1, 8, 1, 1, 2])).to_string();
    assert!(message.contains("reflects"), "{message}");
    let nan = (zeros([1, 8, 1, 2, 2]) * f64::NAN).unwrap();
    assert!(matches!(decode(&nan), Error::NonFiniteInput { what: "latents" }));
    let options = ConvDecodeOptions::default().with_chunk(Some(0));
    assert!(matches!(golden.vae.decode(&zeros([1, 8, 1, 2, 2]), &options), Err(Error::Argument { .. })));
    assert!(matches!(encode(&zeros([1, 3, 9, 32, 33])), Error::Size { axis: "width", got: 33, multiple: 32 }));
    assert!(matches!(encode(&zeros([1, 4, 9, 32, 32])), Error::Shape { .. }));
    assert_eq!(
        encode(&zeros([1, 3, 8, 32, 32])).to_string(),
        "8 frames are not possible: a clip has 1 frame more than a multiple of 8, nearest: 1 or 9"
    );
}

#[test]
fn a_part_of_a_vae_loads_alone() {
    let golden = Golden::open("ltx-conv-23");
    let config: Value = serde_json::from_str(&golden.file.metadata()["config"]).unwrap();
    let load = |wanted: &dyn Fn(&str) -> bool| {
        ConvVae::load(weights_of(&golden.file, wanted), Some(&config), &LoadOptions::default())
    };
    let vae = load(&|name| !name.starts_with("encoder.")).unwrap();
    assert!(vae.architecture().encoder.is_none());
    let frames = golden.tensor("in.frames");
    let error = vae.encode(&frames, &ConvEncodeOptions::default(), &Silent).unwrap_err();
    assert_eq!(error.to_string(), "the weights hold no encoder");
    let error = load(&|name| name.starts_with("latents")).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }));
    let error = load(&|name| name != "decoder.conv_out.conv.bias").unwrap_err();
    assert!(error.to_string().contains("decoder.conv_out.conv.bias"), "{error}");
    let source = weights_of(&golden.file, |_| true);
    assert!(matches!(ConvVae::load(source, None, &LoadOptions::default()), Err(Error::NoConfig { .. })));
}

/// What the file of the golden `ltx-conv-23` would say of itself, had it been published.
const PUBLISHED: &str = r#"{"transformer": {}, "vae": {
    "_class_name": "CausalVideoAutoencoder", "latent_channels": 8, "patch_size": 2, "norm_layer": "pixel_norm",
    "encoder_base_channels": 8, "decoder_base_channels": 2, "causal_decoder": false, "timestep_conditioning": false,
    "spatial_padding_mode": "zeros",
    "encoder_blocks": [["res_x", 1], ["compress_space_res", {"multiplier": 1}], ["res_x", 1],
        ["compress_time_res", {"multiplier": 2}], ["res_x", 1], ["compress_all_res", {"multiplier": 1}], ["res_x", 1],
        ["compress_all_res", {"multiplier": 1}], ["res_x", 2]],
    "decoder_blocks": [["res_x", 1], ["compress_space", {"multiplier": 2}], ["res_x", 1],
        ["compress_time", {"multiplier": 2}], ["res_x", 1], ["compress_all", {"multiplier": 1}], ["res_x", 2],
        ["compress_all", {"multiplier": 2}], ["res_x", 1]]}}"#;

#[test]
fn published_layouts_give_the_same_frames() {
    let golden = Golden::open("ltx-conv-23");
    let theirs = names::Layout::Diffusers { encoder_end: 8 };
    let plan = names::expected(golden.vae.architecture()).unwrap();
    for (prefix, other) in [("vae.", "model.diffusion_model.proj.weight"), ("", "per_channel_statistics.channel")] {
        let ours = names::Layout::Original { prefix };
        let mut tensors: Vec<TensorData<'static>> = plan
            .iter()
            .map(|e| {
                let values = golden.tensor(&theirs.name_in_file(&e.name)).flatten_all().unwrap().to_vec1().unwrap();
                TensorData::f32(ours.name_in_file(&e.name), &e.shape, &values)
            })
            .collect();
        tensors.push(TensorData::f32(other, &[1], &[0.0]));
        let metadata = [("config".to_owned(), PUBLISHED.to_owned())].into_iter().collect();
        let load = |metadata| {
            let bytes = to_bytes(&tensors, metadata).unwrap();
            let source = Safetensors::from_bytes(Arc::new(bytes), "published").unwrap();
            ConvVae::load(Arc::new(source), None, &LoadOptions::default())
        };
        let vae = load(&metadata).unwrap();
        assert_eq!(vae.architecture(), golden.vae.architecture());
        let decode = |vae: &ConvVae| vae.decode(&golden.tensor("in.latents"), &ConvDecodeOptions::default()).unwrap();
        assert_eq!(relative_l2(&decode(&vae), &decode(&golden.vae)), 0.0);
        let error = load(&Default::default()).unwrap_err().to_string();
        assert!(error.starts_with("published carries no `config` in its metadata"), "{error}");
    }
}

#[test]
fn a_run_stops_between_blocks() {
    let golden = Golden::open("ltx-conv-23");
    let stop = |event: &policy::Event<'_>| match event {
        policy::Event::Progress { done: 3.., .. } => std::ops::ControlFlow::Break(()),
        _ => std::ops::ControlFlow::Continue(()),
    };
    let encode = golden.vae.encode(&golden.tensor("in.frames"), &ConvEncodeOptions::default(), &stop);
    assert!(matches!(encode, Err(Error::Cancelled(_))));
    let options = ConvDecodeOptions::default().with_chunk(Some(1));
    let decode = golden.vae.decode_clip(&golden.tensor("in.latents"), &options, &stop, &mut |_| Ok(()));
    assert!(matches!(decode, Err(Error::Cancelled(_))));
}

#[test]
fn folders_and_files_of_diffusers_open() {
    let golden = Golden::open("ltx-conv-23");
    let write = |folder: &std::path::Path| {
        std::fs::create_dir_all(folder).unwrap();
        let file = folder.join("diffusion_pytorch_model.safetensors");
        std::fs::write(&file, weight_bytes(&golden.file, |_| true)).unwrap();
        std::fs::write(folder.join("config.json"), &golden.file.metadata()["config"]).unwrap();
        file
    };
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path());
    let model = tempfile::tempdir().unwrap();
    std::fs::write(model.path().join("model_index.json"), r#"{"_class_name": "LTX2Pipeline"}"#).unwrap();
    write(&model.path().join("vae"));
    for path in [folder.path(), &file, model.path()] {
        let vae = ConvVae::open(path, &LoadOptions::default()).unwrap();
        assert_eq!(vae.architecture(), golden.vae.architecture(), "{}", path.display());
    }
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    std::fs::remove_file(model.path().join("vae/config.json")).unwrap();
    for path in [file.as_path(), model.path()] {
        let opened = ConvVae::open(path, &LoadOptions::default());
        assert!(matches!(opened, Err(Error::NoConfig { .. })), "{}", path.display());
    }
}

#[test]
fn half_precision_runs_throughout() {
    for case in CASES {
        let golden = Golden::open(case);
        let config: Value = serde_json::from_str(&golden.file.metadata()["config"]).unwrap();
        let options = LoadOptions::default().with_dtype(Some(DType::BF16));
        let vae = ConvVae::load(weights_of(&golden.file, |_| true), Some(&config), &options).unwrap();
        let decode = |vae: &ConvVae| vae.decode(&golden.tensor("in.latents"), &ConvDecodeOptions::default()).unwrap();
        let (got, want) = (decode(&vae), decode(&golden.vae));
        assert_eq!(got.dtype(), DType::F32);
        let error = relative_l2(&got, &want);
        println!("{case}: bf16 against f32 {error:.1e}");
        // Rounding to 8 bits about fifty times, and no more than that.
        assert!(error > 1e-4 && error < 5e-2, "{case}: {error:e}");
    }
    let options = LoadOptions::default().with_dtype(Some(DType::U8));
    let golden = Golden::open("ltx-conv-23");
    let config: Value = serde_json::from_str(&golden.file.metadata()["config"]).unwrap();
    let error = ConvVae::load(weights_of(&golden.file, |_| true), Some(&config), &options).unwrap_err();
    assert!(matches!(error, Error::Argument { .. }));
}

#[test]
fn a_file_with_the_diffusion_decoder_encodes() {
    let golden = Golden::open("ltx-conv-23");
    let theirs = names::Layout::Diffusers { encoder_end: 8 };
    let plan = names::expected(golden.vae.architecture()).unwrap();
    let mut tensors: Vec<TensorData<'static>> = plan
        .iter()
        .filter(|e| !e.name.starts_with("decoder."))
        .map(|e| {
            let values = golden.tensor(&theirs.name_in_file(&e.name)).flatten_all().unwrap().to_vec1().unwrap();
            TensorData::f32(e.name.clone(), &e.shape, &values)
        })
        .collect();
    tensors.push(TensorData::f32("decoder.conv_in_x_t.weight", &[1], &[0.0]));
    let published: Value = serde_json::from_str(PUBLISHED).unwrap();
    let encoder = serde_json::json!({
        "blocks": published["vae"]["encoder_blocks"], "base_channels": 8, "out_channels": 8, "patch_size": 2,
    });
    let config = serde_json::json!({"vae": {"_class_name": "CausalDiffusionVAE", "encoder": encoder}});
    let metadata = [("config".to_owned(), config.to_string())].into_iter().collect();
    let bytes = to_bytes(&tensors, &metadata).unwrap();
    let source = Arc::new(Safetensors::from_bytes(Arc::new(bytes), "published").unwrap());
    let vae = ConvVae::load(source, None, &LoadOptions::default()).unwrap();
    let latents = vae.encode(&golden.tensor("in.frames"), &ConvEncodeOptions::default(), &Silent).unwrap();
    golden.check("encoder beside a diffusion decoder", &latents, "out.latents");
    let error = vae.decode(&golden.tensor("in.latents"), &ConvDecodeOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "the weights hold no convolutional decoder");
}

#[test]
fn long_clips_in_chunks_are_the_clip() {
    for case in CASES {
        let golden = Golden::open(case);
        let values = sampling::NoiseGenerator::Philox.normal(4, 8 * 9 * 2 * 2);
        let latents = Tensor::from_vec(values, (1, 8, 9, 2, 2), &Device::Cpu).unwrap();
        let decode = |chunk| golden.vae.decode(&latents, &ConvDecodeOptions::default().with_chunk(chunk)).unwrap();
        let whole = decode(None);
        for chunk in [1, 2, 4, 8] {
            let error = relative_l2(&decode(Some(chunk)), &whole);
            println!("{case}, chunks of {chunk}: relative L2 error {error:.1e}");
            assert!(error <= 1e-6, "{case}, chunks of {chunk}: {error:e}");
        }
    }
}
