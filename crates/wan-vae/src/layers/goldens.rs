//! Every kind of layer against diffusers: `tests/reference/wan_goldens.py`.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use weights::{Expected, Loader, Safetensors, TensorSource};

use super::*;
use crate::{
    architecture::Unpack,
    error::Result,
    testing::{bits, elements, path, relative_l2},
};

/// f32 against f32.
const TOLERANCE: f64 = 1e-5;

struct Golden(Arc<Safetensors>);

impl Golden {
    fn open() -> Self {
        Self(Arc::new(Safetensors::open(path("goldens/wan-blocks.safetensors")).unwrap()))
    }

    fn tensor(&self, name: &str) -> Tensor {
        self.0.host(name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap()
    }

    fn input(&self, case: &str) -> Tensor {
        self.tensor(&format!("in.{case}"))
    }

    /// Loads the layer `prefix`, all of its tensors; gives the number of its slots as well.
    fn load<L>(&self, prefix: &str, load: impl FnOnce(&mut Builder<'_>, &str) -> Result<L>) -> (L, usize) {
        let below = format!("{prefix}.");
        let tensors = self.0.tensors().iter().filter(|t| t.name.starts_with(&below));
        let plan: Vec<_> = tensors.map(|t| Expected::new(&t.name, t.shape.clone())).collect();
        let others = |name: &str| !name.starts_with(&below);
        let mut loader = Loader::new(self.0.clone(), &plan, others, DType::F32, &Device::Cpu).unwrap();
        let mut builder = Builder::new(&mut loader);
        let layer = load(&mut builder, prefix).unwrap();
        let slots = builder.slots();
        loader.finish().unwrap();
        (layer, slots)
    }

    fn check(&self, case: &str, got: &Tensor) {
        let error = relative_l2(got, &self.tensor(&format!("out.{case}")));
        println!("{case}: relative L2 error {error:.1e}");
        assert!(error <= TOLERANCE, "{case}: relative L2 error {error:e}");
    }

    /// Runs a layer over the golden's frames, the first alone and the rest at once, and compares.
    fn check_stream(&self, case: &str, slots: usize, forward: impl Fn(Tensor, &mut Slots) -> Result<Tensor>) {
        self.check(case, &streamed(&self.input(case), slots, forward));
    }
}

fn streamed(x: &Tensor, slots: usize, forward: impl Fn(Tensor, &mut Slots) -> Result<Tensor>) -> Tensor {
    let mut slots = Slots::new(slots);
    let mut parts = vec![forward(x.narrow(2, 0, 1).unwrap(), &mut slots).unwrap()];
    let later = x.dims()[2] - 1;
    if later > 0 {
        slots.set_start(false);
        parts.push(forward(x.narrow(2, 1, later).unwrap(), &mut slots).unwrap());
    }
    Tensor::cat(&parts, 2).unwrap()
}

#[test]
fn causal_convolution() {
    let golden = Golden::open();
    let (conv, slots) = golden.load("conv", CausalConv3d::load);
    golden.check_stream("conv", slots, |x, slots| conv.forward(x, slots));
}

#[test]
fn norm_of_videos_and_of_pictures() {
    let golden = Golden::open();
    for case in ["norm", "norm_image"] {
        let (norm, _) = golden.load(case, Norm::load);
        let y = norm.forward(&golden.input(case)).unwrap();
        golden.check(case, &y);
        // All channels of one position are zero, and stay so.
        let at = |x: &Tensor| elements(&x.narrow(2, 1, 1).unwrap().narrow(3, 0, 1).unwrap().narrow(4, 3, 1).unwrap());
        assert_eq!(at(&golden.input(case)), [0.0; 6]);
        assert_eq!(at(&y), [0.0; 6]);
    }
}

#[test]
fn residual_blocks() {
    let golden = Golden::open();
    for (case, shortcut) in [("residual", false), ("residual_shortcut", true)] {
        let (block, slots) = golden.load(case, |builder, prefix| ResidualBlock::load(builder, prefix, shortcut));
        golden.check_stream(case, slots, |x, slots| block.forward(x, slots));
    }
}

#[test]
fn attention_over_one_position_and_over_many() {
    let golden = Golden::open();
    let (attention, _) = golden.load("attention", Attention::load);
    for case in ["attention.1", "attention.63"] {
        golden.check(case, &attention.forward(golden.input(case)).unwrap());
    }
}

#[test]
fn doubling_of_size_and_of_time() {
    let golden = Golden::open();
    for (mode, temporal) in [("upsample2d", false), ("upsample3d", true)] {
        let (upsample, slots) = golden.load(mode, |builder, prefix| Upsample::load(builder, prefix, temporal));
        for frames in [1, 2, 5] {
            let case = format!("{mode}.{frames}");
            let doubled = if temporal { 2 * frames - 1 } else { frames };
            assert_eq!(golden.tensor(&format!("out.{case}")).dims(), [1, 5, doubled, 4, 6]);
            golden.check_stream(&case, slots, |x, slots| upsample.forward(x, slots));
        }
    }
    let (upsample, slots) = golden.load("upsample3d_wide", |builder, prefix| Upsample::load(builder, prefix, true));
    golden.check_stream("upsample3d_wide", slots, |x, slots| upsample.forward(x, slots));
}

#[test]
fn halving_of_size_and_of_time() {
    let golden = Golden::open();
    for (mode, temporal, lengths) in [("downsample2d", false, [1usize, 2, 5]), ("downsample3d", true, [1, 3, 5])] {
        let (downsample, slots) = golden.load(mode, |builder, prefix| Downsample::load(builder, prefix, temporal));
        for frames in lengths {
            let case = format!("{mode}.{frames}");
            let halved = if temporal { frames.div_ceil(2) } else { frames };
            assert_eq!(golden.tensor(&format!("out.{case}")).dims(), [1, 5, halved, 3, 2]);
            golden.check_stream(&case, slots, |x, slots| downsample.forward(x, slots));
        }
    }
}

#[test]
fn means_of_every_encoder_stage() {
    let golden = Golden::open();
    for (case, output, ft, fs) in [("enc0", 3, 1, 2), ("enc1", 6, 2, 2), ("enc2", 10, 2, 2), ("enc3", 5, 1, 1)] {
        let down = AvgDown { ft, fs };
        golden.check_stream(&format!("avg_down.{case}"), 0, |x, _| {
            let (_, _, frames, height, width) = x.dims5().unwrap();
            down.add(&zeros([output, frames.div_ceil(ft), height / fs, width / fs]), &x)
        });
    }
}

#[test]
fn repetitions_of_every_decoder_stage() {
    let golden = Golden::open();
    for (case, output, ft, fs) in [("dec0", 5, 2, 2), ("dec1", 3, 2, 2), ("dec2", 3, 1, 2)] {
        let up = DupUp { ft, fs };
        golden.check_stream(&format!("dup_up.{case}"), 0, |x, slots| {
            let (_, _, frames, height, width) = x.dims5().unwrap();
            let doubled = if slots.start() { frames } else { frames * ft };
            up.add(&zeros([output, doubled, height * fs, width * fs]), &x)
        });
    }
}

fn zeros([c, t, h, w]: [usize; 4]) -> Tensor {
    Tensor::zeros((1, c, t, h, w), DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn patches() {
    let golden = Golden::open();
    let (packed, pixels) = (golden.tensor("out.patchify"), golden.tensor("out.unpatchify").squeeze(0).unwrap());
    assert_eq!(bits(&patchify(&golden.input("patchify").squeeze(0).unwrap(), 2).unwrap()), bits(&packed));
    assert_eq!(bits(&unpack(&golden.input("unpatchify"), Unpack::Patches(2)).unwrap()), bits(&pixels));
}
