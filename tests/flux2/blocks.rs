//! The transformer against diffusers: embedding of time and guidance, one block of each kind, the whole model.
//!
//! The goldens come from tiny random models whose widths are no multiples of each other and whose rotary axes differ, see
//! `reference/golden_transformer.py`.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use flux2::{
    LoadOptions, TransformerConfig,
    transformer::{
        DoubleBlock, DoubleModulation, Flux2Transformer, Modulation, RopeTable, SingleBlock, Widths, positions,
    },
};
use policy::Silent;
use tests::{Golden, assert_close, max_abs};
use weights::{Expected, Loader};

/// f32 against f32 over a few blocks.
const TOLERANCE: f64 = 1e-5;

const GOLDENS: [&str; 2] = ["flux2-transformer", "flux2-transformer-guidance"];

/// A golden with its configuration.
struct Case {
    golden: Golden,
    config: TransformerConfig,
    widths: Widths,
}

impl Case {
    fn open(name: &str) -> Result<Self> {
        let golden = Golden::open(name)?;
        let config: TransformerConfig = serde_json::from_value(golden.config()?)?;
        Ok(Self { widths: Widths::new(&config), golden, config })
    }

    fn all() -> Result<Vec<Self>> {
        GOLDENS.into_iter().map(Self::open).collect()
    }

    /// Rows and columns of the image.
    fn grid(&self) -> Result<(usize, usize)> {
        let grid = self.golden.integers("in.grid")?;
        Ok((grid[0] as usize, grid[1] as usize))
    }

    fn text_tokens(&self) -> Result<usize> {
        Ok(self.golden.tensor("in.encoder_hidden_states")?.dim(1)?)
    }

    fn rope(&self) -> Result<RopeTable> {
        let positions = positions(self.text_tokens()?, self.grid()?);
        Ok(RopeTable::new(&self.config.axes_dims_rope, self.config.rope_theta, &positions, &Device::Cpu)?)
    }

    /// A loader for the tensors of one block.
    fn loader(&self, expected: &[Expected]) -> Result<Loader> {
        let known: Vec<_> = expected.iter().map(|tensor| tensor.name.clone()).collect();
        let others = |name: &str| !known.iter().any(|known| known == name);
        Ok(Loader::new(self.golden.weights()?, expected, others, DType::F32, &Device::Cpu)?)
    }

    fn model(&self) -> Result<Flux2Transformer> {
        Ok(Flux2Transformer::load(&self.config, self.golden.weights()?, &LoadOptions::default())?)
    }

    /// Sigma, and guidance for a model that takes it.
    fn scalars(&self) -> Result<(f32, Option<f32>)> {
        let first = |name: &str| -> Result<f32> { Ok(self.golden.tensor(name)?.to_vec1::<f32>()?[0]) };
        let guidance = self.golden.contains("in.guidance").then(|| first("in.guidance")).transpose()?;
        Ok((first("in.timestep")?, guidance))
    }
}

#[test]
fn rope_tables_are_those_of_the_reference() -> Result<()> {
    for case in Case::all()? {
        let rope = case.rope()?;
        for (ours, name) in [(rope.cos(), "in.rope.cos"), (rope.sin(), "in.rope.sin")] {
            let error = max_abs(ours, &case.golden.tensor(name)?)?;
            assert!(error <= 1e-7, "{name} of {:?}: {error:e}", case.config.axes_dims_rope);
        }
    }
    Ok(())
}

#[test]
fn double_block_matches_the_reference() -> Result<()> {
    for case in Case::all()? {
        let prefix = format!("transformer_blocks.{}", case.config.num_layers - 1);
        let mut expected = Vec::new();
        DoubleBlock::expected(&case.widths, &prefix, &mut expected);
        let mut loader = case.loader(&expected)?;
        let block = DoubleBlock::load(&mut loader, &case.widths, &prefix)?;
        loader.finish()?;

        let input = |name: &str| case.golden.tensor(&format!("in.double_block.{name}"));
        let modulation = DoubleModulation {
            image: Modulation::split(&input("temb_mod_img")?)?,
            text: Modulation::split(&input("temb_mod_txt")?)?,
        };
        let (image, text) =
            block.forward(&input("hidden_states")?, &input("encoder_hidden_states")?, &modulation, &case.rope()?)?;
        let output = |name: &str| case.golden.tensor(&format!("out.double_block.{name}"));
        assert_close("double block, image", &image, &output("hidden_states")?, TOLERANCE)?;
        assert_close("double block, text", &text, &output("encoder_hidden_states")?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn single_block_matches_the_reference() -> Result<()> {
    for case in Case::all()? {
        let prefix = format!("single_transformer_blocks.{}", case.config.num_single_layers - 1);
        let mut expected = Vec::new();
        SingleBlock::expected(&case.widths, &prefix, &mut expected);
        let mut loader = case.loader(&expected)?;
        let block = SingleBlock::load(&mut loader, &case.widths, &prefix)?;
        loader.finish()?;

        let x = case.golden.tensor("in.single_block.hidden_states")?;
        let [modulation] = Modulation::split(&case.golden.tensor("in.single_block.temb_mod")?)?;
        let want = case.golden.tensor("out.single_block")?;
        let rope = case.rope()?;
        assert_close("single block", &block.forward(&x, &modulation, &rope)?, &want, TOLERANCE)?;
        // The last block makes the image's rows only.
        let (rows, columns) = case.grid()?;
        let image = rows * columns;
        let tail = block.forward_last(&x, image, &modulation, &rope)?;
        assert_close("single block, image rows", &tail, &want.narrow(1, case.text_tokens()?, image)?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn whole_transformer_matches_the_reference() -> Result<()> {
    for case in Case::all()? {
        let (sigma, guidance) = case.scalars()?;
        let model = case.model()?;
        let prepared = model.prepare(&case.golden.tensor("in.encoder_hidden_states")?, case.grid()?)?;
        let velocity = model.forward(&case.golden.tensor("in.hidden_states")?, sigma, guidance, &prepared, &Silent)?;
        let what = if guidance.is_some() { "velocity, with guidance" } else { "velocity" };
        assert_close(what, &velocity, &case.golden.tensor("out.velocity")?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn an_item_of_a_batch_is_the_item_alone() -> Result<()> {
    let case = Case::open(GOLDENS[0])?;
    let (sigma, guidance) = case.scalars()?;
    let model = case.model()?;
    let (text, latents) = (case.golden.tensor("in.encoder_hidden_states")?, case.golden.tensor("in.hidden_states")?);
    let run = |text: &Tensor, latents: &Tensor| -> Result<Tensor> {
        let prepared = model.prepare(text, case.grid()?)?;
        Ok(model.forward(latents, sigma, guidance, &prepared, &Silent)?)
    };
    let together = run(&text, &latents)?;
    for item in 0..latents.dim(0)? {
        let alone = run(&text.narrow(0, item, 1)?.contiguous()?, &latents.narrow(0, item, 1)?.contiguous()?)?;
        assert_close(&format!("item {item}"), &alone, &together.narrow(0, item, 1)?, 1e-6)?;
    }
    Ok(())
}

#[test]
fn guidance_goes_to_models_that_take_it_only() -> Result<()> {
    for case in Case::all()? {
        let (sigma, guidance) = case.scalars()?;
        let model = case.model()?;
        let prepared = model.prepare(&case.golden.tensor("in.encoder_hidden_states")?, case.grid()?)?;
        let wrong = if guidance.is_some() { None } else { Some(4.0) };
        let error = model
            .forward(&case.golden.tensor("in.hidden_states")?, sigma, wrong, &prepared, &Silent)
            .err()
            .context("the call should fail")?;
        assert!(matches!(error, flux2::Error::GuidanceInput { .. }), "{error}");
    }
    Ok(())
}

#[test]
fn models_can_be_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Flux2Transformer>();
    check::<Arc<flux2::Flux2Pipeline>>();
}
