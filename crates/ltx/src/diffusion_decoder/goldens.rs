//! The decoder against diffusers, from tiny random networks made by `tests/reference/golden_ltx_diffusion.py`.

use std::{path::PathBuf, sync::Arc};

use candle_core::{DType, Device, Tensor};
use policy::Silent;
use weights::{
    Safetensors, TensorSource,
    write::{TensorData, to_bytes},
};

use super::{
    BlendedTiles, DecodeOptions, DiffusionDecoder, DiffusionDecoderConfig, LatentScale, Noise, Tiling,
    block::Place,
    rope::RopeTable,
    shuffle::{FirstFrame, patchify, tokens},
    testing::{elements, relative_l2},
};
use crate::options::LoadOptions;

/// f32 against f32 over whole networks.
const TOLERANCE: f64 = 1e-5;

struct Golden {
    name: &'static str,
    source: Safetensors,
}

impl Golden {
    fn open(name: &'static str) -> Self {
        let path: PathBuf =
            [env!("CARGO_MANIFEST_DIR"), "../../tests/goldens", &format!("{name}.safetensors")].iter().collect();
        Self { name, source: Safetensors::open(&path).unwrap() }
    }

    fn tensor(&self, name: &str) -> Tensor {
        self.source.host(name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap()
    }

    fn number(&self, key: &str) -> usize {
        self.source.metadata()[key].parse().unwrap()
    }

    fn decoder(&self) -> DiffusionDecoder {
        let weights =
            self.source.tensors().iter().filter(|t| !t.name.starts_with("in.") && !t.name.starts_with("out."));
        let weights: Vec<_> =
            weights.map(|t| TensorData::f32(t.name.clone(), &t.shape, &elements(&self.tensor(&t.name)))).collect();
        let bytes = to_bytes(&weights, &Default::default()).unwrap();
        let source = Safetensors::from_bytes(Arc::new(bytes), self.name).unwrap();
        let config = DiffusionDecoderConfig::from_source(&self.source).unwrap();
        DiffusionDecoder::load(&config, Arc::new(source), &LoadOptions::default()).unwrap()
    }

    fn options(&self) -> DecodeOptions {
        DecodeOptions::default()
            .with_noise(Noise::Given(self.tensor("in.noise")))
            .with_latents(LatentScale::Raw)
            .with_steps(Some(self.number("steps")))
    }

    /// Holds a result to one of the golden's; channels-last volumes as tokens.
    fn check(&self, name: &str, got: &Tensor) {
        let want = self.tensor(&format!("out.{name}")).reshape(got.shape()).unwrap();
        let error = relative_l2(got, &want);
        println!("{} {name}: relative L2 error {error:.1e}", self.name);
        assert!(error <= TOLERANCE, "{} {name}: relative L2 error {error:.1e}", self.name);
    }
}

#[test]
fn every_part_is_that_of_the_reference() {
    let golden = Golden::open("ltx-diffusion");
    let decoder = golden.decoder();
    let config = decoder.config();
    let scratch_bytes = u64::MAX;

    // Stage by stage, each from the reference's result of the one before.
    let latents = golden.tensor("in.latent").pad_with_same(2, 0, config.ghost_frames()).unwrap();
    let (_, _, t, h, w) = latents.dims5().unwrap();
    let rope = RopeTable::new(config.head_dim, [t, h, w], &Device::Cpu);
    let place = Place { grid: [t, h, w], rope: &rope, scratch_bytes };
    let x = decoder.latents_in.forward(&tokens(&latents).unwrap()).unwrap();
    golden.check("stage_1", &decoder.stages[0].blocks[0].forward(x, &place).unwrap());

    let features = golden.tensor("out.features");
    let (batch, t, h, w, _) = features.dims5().unwrap();
    let rope = RopeTable::new(config.head_dim, [t, h, w], &Device::Cpu);
    let place = Place { grid: [t, h, w], rope: &rope, scratch_bytes };
    let x = decoder.stages[3].blocks[0].forward(features.flatten(1, 3).unwrap(), &place).unwrap();
    let (context, [t, h, w]) =
        decoder.stages[3].upsample.forward(&x, [t, h, w], FirstFrame::Drop, scratch_bytes).unwrap();
    golden.check("context", &context);

    let chunks = decoder.timestep.chunks(1.0, &Device::Cpu).unwrap();
    golden.check("modulation", &chunks.flatten_all().unwrap().unsqueeze(0).unwrap());

    let t = t - 8 * config.ghost_frames();
    let context = golden.tensor("out.context").narrow(1, 0, t).unwrap().contiguous().unwrap().flatten(1, 3).unwrap();
    let rope = RopeTable::new(config.head_dim, [t, h, w], &Device::Cpu);
    let place = Place { grid: [t, h, w], rope: &rope, scratch_bytes };
    let x = decoder.pixels_in.forward(&patchify(&golden.tensor("in.noise"), config.patch_size).unwrap()).unwrap();
    let block = &decoder.blocks[0];
    let modulation = block.modulation(&chunks).unwrap();
    assert_eq!(batch, 1);
    golden.check("diff_block", &block.forward(x, &context, &modulation, &place).unwrap());
}

#[test]
fn whole_decodes_are_those_of_the_reference() {
    for name in ["ltx-diffusion", "ltx-diffusion-v"] {
        let golden = Golden::open(name);
        let video = golden.decoder().decode(&golden.tensor("in.latent"), &golden.options(), &Silent).unwrap();
        golden.check("video", &video);
        // The same in slabs of the fewest frames and runs of one token.
        let options = golden.options().with_scratch_bytes(0);
        golden.check("video", &golden.decoder().decode(&golden.tensor("in.latent"), &options, &Silent).unwrap());
    }
}

#[test]
fn tiles_and_their_seams_are_those_of_the_reference() {
    let golden = Golden::open("ltx-diffusion-tiles");
    let [tile, stride] = ["min", "stride"]
        .map(|kind| ["num_frames", "height", "width"].map(|axis| golden.number(&format!("{kind}_{axis}"))));
    let decoder = golden.decoder();
    let run = |tiling| decoder.decode(&golden.tensor("in.latent"), &golden.options().with_tiling(tiling), &Silent);
    let video = run(Tiling::Blended(BlendedTiles { tile, stride })).unwrap();
    golden.check("video", &video);
    assert!(relative_l2(&run(Tiling::Whole).unwrap(), &video) > 1e-3, "tiles leave seams");
}
