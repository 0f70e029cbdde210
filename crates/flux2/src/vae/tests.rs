use std::{cell::RefCell, ops::ControlFlow};

use policy::Silent;
use weights::{Loader, write::TensorData};

use super::*;
use crate::{
    plan::random,
    testing::{relative_l2, values},
};

/// Three levels of unequal widths, so a factor of 8; groups of 3.
fn tiny() -> VaeConfig {
    let mut config = test_support::config(&[6, 9, 12], 1, 5, 3);
    config.decoder_block_out_channels = Some(vec![9, 3, 15]);
    config
}

fn tensors(config: &VaeConfig) -> Vec<TensorData<'static>> {
    let mut tensors = random::tensors(&Flux2Vae::expected(config));
    tensors.push(random::counter("bn.num_batches_tracked"));
    tensors
}

fn load(config: &VaeConfig, tensors: &[TensorData<'_>]) -> Result<Flux2Vae> {
    Flux2Vae::load(config, random::file(tensors), &LoadOptions::default())
}

fn with_loader<T>(tensors: &[TensorData<'_>], f: impl FnOnce(&mut Loader) -> Result<T>) -> T {
    let plan: Vec<_> = tensors.iter().map(|t| Expected::new(t.name.clone(), t.shape.clone())).collect();
    let mut loader = Loader::new(random::file(tensors), &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    let block = f(&mut loader).unwrap();
    loader.finish().unwrap();
    block
}

#[test]
fn items_of_a_batch_are_single_runs() {
    let vae = load(&tiny(), &tensors(&tiny())).unwrap();
    let latents = random::tensor(1000, 1.0, &[2, 20, 2, 3]);
    let images = vae.decode(&latents, &Silent).unwrap();
    assert_eq!(images.dims(), [2, 3, 16, 24]);
    let again = vae.encode(&images).unwrap();
    assert_eq!(again.dims(), [2, 20, 2, 3]);
    for item in 0..2 {
        let one = |t: &Tensor| t.narrow(0, item, 1).unwrap();
        assert_eq!(values(&vae.decode(&one(&latents), &Silent).unwrap()), values(&one(&images)));
        assert_eq!(values(&vae.encode(&one(&images)).unwrap()), values(&one(&again)));
    }
    assert!(relative_l2(&images.narrow(0, 0, 1).unwrap(), &images.narrow(0, 1, 1).unwrap()) > 0.1);
}

/// Bands of the fewest rows, and of all.
#[test]
fn a_picture_of_bands_is_the_picture() {
    let vae = load(&tiny(), &tensors(&tiny())).unwrap();
    for (batch, h, w) in [(2, 2, 3), (1, 5, 1)] {
        let latents = random::tensor(1000, 1.0, &[batch, 20, h, w]);
        let whole = vae.decode(&latents, &Silent).unwrap();
        for bytes in [0, 9 * 5 * 8 * w * 4, 1 << 20] {
            let banded = vae.decode_in(Bands::OfBytes(bytes), &latents, &Silent).unwrap();
            assert_eq!(banded.dims(), whole.dims());
            let error = relative_l2(&banded, &whole);
            assert!(error <= 1e-6, "{h} x {w}, bands of {bytes} bytes: {error}");
        }
    }
    let events = std::cell::Cell::new(0);
    let count = |_: &Event<'_>| {
        events.set(events.get() + 1);
        ControlFlow::Continue(())
    };
    let latents = random::tensor(1000, 1.0, &[1, 20, 2, 3]);
    vae.decode(&latents, &count).unwrap();
    let whole = events.replace(0);
    vae.decode_in(Bands::OfBytes(0), &latents, &count).unwrap();
    assert_eq!(events.get(), whole);
}

#[test]
fn options_load_and_run() {
    let mut config = tiny();
    config.use_quant_conv = false;
    config.use_post_quant_conv = false;
    config.mid_block_add_attention = false;
    let vae = load(&config, &tensors(&config)).unwrap();
    let image = vae.decode(&random::tensor(1000, 1.0, &[1, 20, 1, 1]), &Silent).unwrap();
    assert_eq!(vae.encode(&image).unwrap().dims(), [1, 20, 1, 1]);
}

#[test]
fn downsampling_pads_below_and_to_the_right() {
    // One channel; the kernel gives 1 to its first tap and 10 to its last.
    let mut kernel = [0f32; 9];
    (kernel[0], kernel[8]) = (1.0, 10.0);
    let tensors = [TensorData::f32("conv.weight", &[1, 1, 3, 3], &kernel), TensorData::f32("conv.bias", &[1], &[0.5])];
    let block = with_loader(&tensors, |loader| Downsample::load(loader, ""));
    let x = Tensor::arange(0f32, 16.0, &Device::Cpu).unwrap().reshape((1, 1, 4, 4)).unwrap();
    // x(2y, 2x) + 10 x(2y + 2, 2x + 2) + 0.5, zero outside.
    assert_eq!(values(&block.forward(&x).unwrap()), [100.5, 2.5, 8.5, 10.5]);
}

#[test]
fn upsampling_repeats_then_convolves() {
    let mut kernel = [0f32; 9];
    kernel[4] = 2.0;
    let tensors =
        [TensorData::f32("u.conv.weight", &[1, 1, 3, 3], &kernel), TensorData::f32("u.conv.bias", &[1], &[1.0])];
    let block = with_loader(&tensors, |loader| Upsample::load(loader, "u"));
    let x = Tensor::new(&[[[[1f32, 2.0]]]], &Device::Cpu).unwrap();
    assert_eq!(values(&block.forward(x).unwrap()), [3.0, 3.0, 5.0, 5.0, 3.0, 3.0, 5.0, 5.0]);
}

#[test]
fn attention_adds_the_weighted_mean_of_values() {
    // Query and key are zero, so every pixel receives the mean of the values; two channels, one group.
    let zeros = |name: &str| TensorData::f32(format!("{name}.weight"), &[2, 2], &[0.0; 4]);
    let bias = |name: &str, v: [f32; 2]| TensorData::f32(format!("{name}.bias"), &[2], &v);
    let tensors = [
        TensorData::f32("group_norm.weight", &[2], &[1.0, 1.0]),
        bias("group_norm", [0.0, 0.0]),
        zeros("to_q"),
        bias("to_q", [0.0, 0.0]),
        zeros("to_k"),
        bias("to_k", [3.0, -1.0]),
        // Values are the first channel in both, plus a bias.
        TensorData::f32("to_v.weight", &[2, 2], &[1.0, 0.0, 1.0, 0.0]),
        bias("to_v", [10.0, 20.0]),
        TensorData::f32("to_out.0.weight", &[2, 2], &[0.0, 1.0, 1.0, 0.0]),
        bias("to_out.0", [0.0, 0.25]),
    ];
    let block = with_loader(&tensors, |loader| MidAttention::load(loader, 1, ""));
    // Channel 0 holds 2 twice and channel 1 holds -2 twice: normed to 1 and -1.
    let x = Tensor::new(&[[[[2f32, 2.0]], [[-2.0, -2.0]]]], &Device::Cpu).unwrap();
    let y = values(&block.forward(x).unwrap());
    for (got, want) in y.iter().zip([2.0 + 21.0, 2.0 + 21.0, -2.0 + 11.25, -2.0 + 11.25]) {
        assert!((got - want).abs() < 1e-4, "{y:?}");
    }
}

#[test]
fn a_residual_block_keeps_its_input() {
    let mut plan = Vec::new();
    Resnet::expected(Channels { input: 3, output: 6 }, "r", &mut plan);
    let mut tensors = random::tensors(&plan);
    for tensor in &mut tensors {
        if tensor.name.starts_with("r.conv2") {
            *tensor = TensorData::f32(tensor.name.clone(), &tensor.shape, &vec![0.0; tensor.shape.iter().product()]);
        }
    }
    let block = with_loader(&tensors, |loader| Resnet::load(loader, Channels { input: 3, output: 6 }, 3, "r"));
    let x = random::tensor(9, 1.0, &[1, 3, 4, 5]);
    let mut shortcut = Vec::new();
    let weight = tensors.iter().find(|t| t.name == "r.conv_shortcut.weight").unwrap();
    let bias = tensors.iter().find(|t| t.name == "r.conv_shortcut.bias").unwrap();
    let floats = |t: &TensorData<'_>| -> Vec<f32> {
        t.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let (weight, bias, input) = (floats(weight), floats(bias), values(&x));
    for output in 0..6 {
        for pixel in 0..20 {
            shortcut.push(bias[output] + (0..3).map(|c| weight[3 * output + c] * input[20 * c + pixel]).sum::<f32>());
        }
    }
    let got = values(&block.forward(x).unwrap());
    for (got, want) in got.iter().zip(&shortcut) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}

#[test]
fn the_observer_sees_every_block_and_can_stop() {
    let vae = load(&tiny(), &tensors(&tiny())).unwrap();
    let latents = random::tensor(1000, 1.0, &[2, 20, 1, 1]);
    let seen = RefCell::new(Vec::new());
    let watch = |stop_at: usize| {
        seen.borrow_mut().clear();
        let observer = |event: &Event<'_>| {
            let Event::Progress { done, total } = *event else { panic!("{event:?}") };
            assert_eq!(total, 2 * (1 + 3 * 2));
            seen.borrow_mut().push(done);
            if done == stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        vae.decode(&latents, &observer)
    };
    watch(usize::MAX).unwrap();
    assert_eq!(*seen.borrow(), (1..=14).collect::<Vec<_>>());
    assert!(matches!(watch(9), Err(Error::Cancelled(_))));
    assert_eq!(seen.borrow().len(), 9);
}

#[test]
fn misfitting_inputs_are_refused() {
    let vae = load(&tiny(), &tensors(&tiny())).unwrap();
    for dims in [&[1, 19, 2, 2][..], &[20, 2, 2], &[1, 20, 0, 2], &[0, 20, 2, 2]] {
        let latents = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        assert!(matches!(vae.decode(&latents, &Silent), Err(Error::Shape { what: "latents", .. })), "{dims:?}");
    }
    for dims in [&[1, 3, 12, 8][..], &[1, 3, 8, 20], &[1, 4, 8, 8], &[3, 8, 8], &[1, 3, 0, 8], &[0, 3, 8, 8]] {
        let image = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        assert!(matches!(vae.encode(&image), Err(Error::Shape { what: "picture", .. })), "{dims:?}");
    }
}

#[test]
fn damaged_checkpoints_are_refused() {
    let config = tiny();
    let whole = tensors(&config);
    let refused = |tensors: &[TensorData<'_>], word: &str| {
        let error = load(&config, tensors).unwrap_err();
        assert!(matches!(error, Error::Weights(_)), "{error:?}");
        assert!(error.to_string().contains(word), "{error}");
    };
    let without = |name: &str| whole.iter().filter(|t| t.name != name).cloned().collect::<Vec<_>>();
    load(&config, &without("bn.num_batches_tracked")).unwrap();
    for name in ["bn.running_mean", "bn.running_var", "decoder.up_blocks.2.resnets.1.conv2.bias"] {
        refused(&without(name), name);
    }
    let mut negative = without("bn.running_var");
    let mut variance = [1f32; 20];
    variance[13] = -1.0;
    negative.push(TensorData::f32("bn.running_var", &[20], &variance));
    assert!(matches!(load(&config, &negative), Err(Error::LatentVariance { channel: 13, .. })));

    let mut impossible = config.clone();
    impossible.norm_num_groups = 4;
    assert!(matches!(load(&impossible, &whole), Err(Error::Config { field: "block_out_channels", .. })));
}
