use std::{cell::RefCell, ops::ControlFlow};

use policy::Silent;
use weights::{Loader, ValueCheck, write::TensorData};

use super::*;
use crate::{
    plan::random,
    testing::{relative_l2, values},
};

const GRID: (usize, usize) = (3, 4);
const TEXT: usize = 5;

/// Odd widths: heads 3 x 20, uneven axes, MLP 150.
fn tiny(num_layers: usize, num_single_layers: usize) -> TransformerConfig {
    let mut config = test_support::config(num_layers, num_single_layers, 3, 20, 14);
    config.axes_dims_rope = vec![2, 4, 6, 8];
    config.in_channels = 12;
    config.timestep_guidance_channels = 10;
    config.mlp_ratio = 2.5;
    config
}

fn load(config: &TransformerConfig, tensors: &[TensorData<'_>]) -> Result<Flux2Transformer> {
    Flux2Transformer::load(config, random::file(tensors), &LoadOptions::default())
}

fn model(config: &TransformerConfig) -> Flux2Transformer {
    load(config, &random::tensors(&Flux2Transformer::expected(config))).unwrap()
}

fn latents(batch: usize) -> Tensor {
    random::tensor(1000, 1.0, &[batch, GRID.0 * GRID.1, 12])
}

fn prompt_embeds(batch: usize) -> Tensor {
    random::tensor(1001, 1.0, &[batch, TEXT, 14])
}

#[test]
fn items_of_a_batch_do_not_meet() {
    let model = model(&tiny(1, 2));
    let (x, text) = (latents(2), prompt_embeds(2));
    let both = model.forward(&x, 0.7, None, &model.prepare(&text, GRID).unwrap(), &Silent).unwrap();
    assert_eq!(both.dims(), [2, 12, 12]);
    for item in 0..2 {
        let one = |t: &Tensor| t.narrow(0, item, 1).unwrap();
        let prepared = model.prepare(&one(&text), GRID).unwrap();
        let alone = model.forward(&one(&x), 0.7, None, &prepared, &Silent).unwrap();
        assert_eq!(values(&alone), values(&one(&both)), "item {item}");
    }
}

#[test]
fn every_input_matters() {
    let mut config = tiny(1, 2);
    config.guidance_embeds = true;
    let model = model(&config);
    let velocity = |seed, sigma, guidance, grid| {
        let prepared = model.prepare(&random::tensor(seed, 1.0, &[1, TEXT, 14]), grid).unwrap();
        model.forward(&latents(1), sigma, Some(guidance), &prepared, &Silent).unwrap()
    };
    let base = velocity(7, 0.7, 4.0, (3, 4));
    assert_eq!(values(&base), values(&velocity(7, 0.7, 4.0, (3, 4))));
    for (input, other) in [
        ("prompt", velocity(8, 0.7, 4.0, (3, 4))),
        ("sigma", velocity(7, 0.6, 4.0, (3, 4))),
        ("guidance", velocity(7, 0.7, 3.5, (3, 4))),
        ("grid", velocity(7, 0.7, 4.0, (4, 3))),
    ] {
        assert!(relative_l2(&other, &base) > 1e-3, "{input}");
    }
}

#[test]
fn the_last_block_gives_the_image_rows_of_the_whole_block() {
    let widths = Widths::new(&tiny(0, 1));
    let mut plan = Vec::new();
    SingleBlock::expected(&widths, "block", &mut plan);
    let source = random::file(&random::tensors(&plan));
    let mut loader = Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    let block = SingleBlock::load(&mut loader, &widths, "block").unwrap();
    loader.finish().unwrap();

    let tokens = TEXT + 12;
    let x = random::tensor(2000, 1.0, &[2, tokens, widths.hidden]);
    let [modulation] = Modulation::split(&random::tensor(2001, 0.5, &[2, 3 * widths.hidden])).unwrap();
    let rope = RopeTable::new(&[2, 4, 6, 8], 2000.0, &positions(TEXT, GRID), &Device::Cpu).unwrap();
    let whole = block.forward(&x, &modulation, &rope).unwrap();
    for rows in [tokens, 12, 1] {
        let last = block.forward_last(&x, rows, &modulation, &rope).unwrap();
        let error = relative_l2(&last, &whole.narrow(1, tokens - rows, rows).unwrap());
        assert!(error < 1e-6, "{rows} rows: {error:e}");
    }
    assert!(matches!(block.forward_last(&x, tokens + 1, &modulation, &rope), Err(Error::Shape { .. })));
}

#[test]
fn streamed_blocks_give_the_same_bits() {
    let config = tiny(2, 5);
    let source = random::file(&random::tensors(&Flux2Transformer::expected(&config)));
    let load = |double, single| {
        let (options, streamed) = (LoadOptions::default(), StreamedBlocks { double, single });
        let model = Flux2Transformer::load_streamed(&config, source.clone(), &options, streamed).unwrap();
        assert_eq!(model.streamed(), StreamedBlocks { double: double.min(2), single: single.min(5) });
        model
    };
    let (x, text) = (latents(1), prompt_embeds(1));
    let velocity = |model: &Flux2Transformer| {
        let prepared = model.prepare(&text, GRID).unwrap();
        values(&model.forward(&x, 0.7, None, &prepared, &Silent).unwrap())
    };
    let want = velocity(&load(0, 0));
    for (double, single) in [(0, 1), (0, 2), (1, 0), (1, 3), (2, 4), (9, 9)] {
        let model = load(double, single);
        // Also of the second pass, whose blocks may start in the other slot, and behind a pass that was stopped.
        for pass in 0..3 {
            assert_eq!(velocity(&model), want, "{double} {single}, pass {pass}");
            if pass == 1 {
                let stop = |event: &Event<'_>| match event {
                    Event::Progress { done, .. } if *done >= 4 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                };
                let prepared = model.prepare(&text, GRID).unwrap();
                let stopped = model.forward(&x, 0.7, None, &prepared, &stop);
                assert!(matches!(stopped, Err(Error::Cancelled(_))), "{stopped:?}");
            }
        }
    }
}

#[test]
fn references_are_seen_and_are_no_part_of_the_velocity() {
    for config in [tiny(1, 2), tiny(2, 0)] {
        let model = model(&config);
        let step = |x: &Tensor, references: &[(usize, usize)]| {
            let prepared = model.prepare_with_references(&prompt_embeds(1), GRID, references).unwrap();
            model.forward(x, 0.7, None, &prepared, &Silent).unwrap()
        };
        let alone = step(&latents(1), &[]);
        let with = |seed, grids: &[(usize, usize)]| {
            let tokens = grids.iter().map(|(rows, columns)| rows * columns).sum();
            let reference = random::tensor(seed, 1.0, &[1, tokens, 12]);
            step(&Tensor::cat(&[latents(1), reference], 1).unwrap(), grids)
        };
        let one = with(7, &[(2, 3)]);
        assert_eq!(one.dims(), [1, 12, 12]);
        assert!(relative_l2(&one, &alone) > 1e-3);
        assert!(relative_l2(&with(8, &[(2, 3)]), &one) > 1e-4);
        assert!(relative_l2(&with(7, &[(3, 2)]), &one) > 1e-4, "positions of a reference");
        // The same cells as two references lie elsewhere on the axis of pictures.
        assert!(relative_l2(&with(7, &[(1, 3), (1, 3)]), &one) > 1e-4);
    }
    let model = model(&tiny(1, 1));
    let prepared = model.prepare_with_references(&prompt_embeds(1), GRID, &[(2, 3)]).unwrap();
    let refused = model.forward(&latents(1), 0.7, None, &prepared, &Silent);
    assert!(matches!(refused, Err(Error::Shape { what: "latents", .. })), "{refused:?}");
    assert!(model.prepare_with_references(&prompt_embeds(1), GRID, &[(0, 3)]).is_err());
}

#[test]
fn modulations_of_all_steps_are_those_of_each() {
    let model = model(&tiny(1, 2));
    let prepared = model.prepare(&prompt_embeds(2), GRID).unwrap();
    let sigmas = [1.0, 0.9, 0.7, 0.5, 0.3, 0.1];
    let modulations = model.modulations(&sigmas, None, 2).unwrap();
    assert_eq!(modulations.len(), sigmas.len());
    for (sigma, modulations) in sigmas.into_iter().zip(&modulations) {
        let step = model.step(&latents(2), modulations, &prepared, &Silent).unwrap();
        let alone = model.forward(&latents(2), sigma, None, &prepared, &Silent).unwrap();
        assert_eq!(values(&step), values(&alone), "sigma {sigma}");
    }
}

#[test]
fn a_closed_gate_leaves_the_streams_alone() {
    let widths = Widths::new(&tiny(1, 0));
    let mut plan = Vec::new();
    DoubleBlock::expected(&widths, "", &mut plan);
    let mut loader =
        Loader::new(random::file(&random::tensors(&plan)), &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    let block = DoubleBlock::load(&mut loader, &widths, "").unwrap();
    let h = widths.hidden;
    let (image, text) = (random::tensor(1, 1.0, &[1, 12, h]), random::tensor(2, 1.0, &[1, TEXT, h]));
    let rope = RopeTable::new(&[2, 4, 6, 8], 2000.0, &positions(TEXT, GRID), &Device::Cpu).unwrap();

    // Shifts and scales are open; of the four gates, one at a time is opened.
    let closed = |seed| {
        let [mut a, mut b] = Modulation::split::<2>(&random::tensor(seed, 0.5, &[1, 6 * h])).unwrap();
        (a.gate, b.gate) = (a.gate.zeros_like().unwrap(), b.gate.zeros_like().unwrap());
        [a, b]
    };
    let forward = |modulation: &DoubleModulation| block.forward(&image, &text, modulation, &rope).unwrap();
    let modulation = DoubleModulation { image: closed(3), text: closed(4) };
    let (same_image, same_text) = forward(&modulation);
    assert_eq!((values(&same_image), values(&same_text)), (values(&image), values(&text)));
    for branch in 0..2 {
        let mut open = modulation.clone();
        open.image[branch].gate = open.image[branch].gate.ones_like().unwrap();
        let (changed, unchanged) = forward(&open);
        assert!(relative_l2(&changed, &image) > 0.1 && values(&unchanged) == values(&text), "image {branch}");
        let mut open = modulation.clone();
        open.text[branch].gate = open.text[branch].gate.ones_like().unwrap();
        let (unchanged, changed) = forward(&open);
        assert!(relative_l2(&changed, &text) > 0.1 && values(&unchanged) == values(&image), "text {branch}");
    }
}

#[test]
fn the_output_layer_stores_scale_before_shift() {
    // The modulation of the only block is zero, so its gate is closed: what is left is
    // proj((1 + scale) * norm(x_embedder(latents)) + shift).
    let config = tiny(0, 1);
    let mut tensors = random::tensors(&Flux2Transformer::expected(&config));
    let h = 60;
    for tensor in &mut tensors {
        let zero = |t: &mut TensorData<'_>| {
            *t = TensorData::f32(t.name.clone(), &t.shape, &vec![0.0; t.shape.iter().product()])
        };
        match tensor.name.as_str() {
            "single_stream_modulation.linear.weight" => zero(tensor),
            "norm_out.linear.weight" => {
                // Rows of scale are zero; every row of shift is the same.
                let row = values(&random::tensor(5, 1.0, &[h]));
                let rows: Vec<f32> =
                    (0..2 * h).flat_map(|r| row.iter().map(move |v| if r < h { 0.0 } else { *v })).collect();
                *tensor = TensorData::f32(tensor.name.clone(), &[2 * h, h], &rows);
            }
            // Sums the channels, which the norm alone makes zero.
            "proj_out.weight" => *tensor = TensorData::f32(tensor.name.clone(), &[12, h], &vec![1.0; 12 * h]),
            _ => {}
        }
    }
    let model = load(&config, &tensors).unwrap();
    let prepared = model.prepare(&prompt_embeds(1), GRID).unwrap();
    let velocity = model.forward(&latents(1), 0.7, None, &prepared, &Silent).unwrap();
    let all = values(&velocity);
    // A shift adds the same to every token; a scale would leave sums of zero.
    assert!(all[0].abs() > 1.0, "{}", all[0]);
    assert!(all.iter().all(|v| (v - all[0]).abs() < 1e-3 * all[0].abs()), "{all:?}");
}

#[test]
fn the_observer_sees_every_block_and_can_stop() {
    let model = model(&tiny(2, 3));
    let prepared = model.prepare(&prompt_embeds(1), GRID).unwrap();
    let seen = RefCell::new(Vec::new());
    let watch = |stop_at: usize| {
        seen.borrow_mut().clear();
        let observer = |event: &Event<'_>| {
            let Event::Progress { done, total } = *event else { panic!("{event:?}") };
            seen.borrow_mut().push((done, total));
            if done == stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        model.forward(&latents(1), 0.7, None, &prepared, &observer)
    };
    watch(usize::MAX).unwrap();
    assert_eq!(*seen.borrow(), [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]);
    for stop_at in [1, 4] {
        assert!(matches!(watch(stop_at), Err(Error::Cancelled(_))));
        assert_eq!(seen.borrow().len(), stop_at);
    }
}

#[test]
fn misfitting_inputs_are_refused() {
    let model = model(&tiny(1, 1));
    let is_shape = |result: Result<()>, what: &str| match result {
        Err(Error::Shape { what: got, .. }) => assert_eq!(got, what),
        other => panic!("{what}: {other:?}"),
    };
    for dims in [&[1, TEXT, 13][..], &[TEXT, 14], &[0, TEXT, 14], &[1, 1, TEXT, 14]] {
        let embeds = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        is_shape(model.prepare(&embeds, GRID).map(|_| ()), "prompt_embeds");
    }
    for grid in [(0, 4), (3, 0), (usize::MAX, 2), (1 << 20, 2)] {
        is_shape(model.prepare(&prompt_embeds(1), grid).map(|_| ()), "latents grid");
    }
    let prepared = model.prepare(&prompt_embeds(1), GRID).unwrap();
    for dims in [&[1, 11, 12][..], &[2, 12, 12], &[1, 12, 11], &[12, 12], &[1, 12, 3, 4]] {
        let latents = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        is_shape(model.forward(&latents, 0.7, None, &prepared, &Silent).map(|_| ()), "latents");
    }
    let given = model.forward(&latents(1), 0.7, Some(4.0), &prepared, &Silent);
    assert!(matches!(given, Err(Error::GuidanceInput { given: true })), "{given:?}");
}

#[test]
fn a_guided_model_needs_its_guidance() {
    let mut config = tiny(1, 1);
    config.guidance_embeds = true;
    let model = model(&config);
    let prepared = model.prepare(&prompt_embeds(1), GRID).unwrap();
    let missing = model.forward(&latents(1), 0.7, None, &prepared, &Silent);
    assert!(matches!(missing, Err(Error::GuidanceInput { given: false })), "{missing:?}");
}

#[test]
fn damaged_checkpoints_are_refused() {
    let config = tiny(1, 1);
    let tensors = random::tensors(&Flux2Transformer::expected(&config));
    let refused = |tensors: &[TensorData<'_>], word: &str| {
        let error = load(&config, tensors).unwrap_err();
        assert!(matches!(error, Error::Weights(_)), "{error:?}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(&tensors[1..], "x_embedder.weight");
    let mut more = tensors.clone();
    more.push(TensorData::f32("stray.weight", &[1, 1], &[1.0]));
    refused(&more, "stray.weight");
    let mut misshapen = tensors.clone();
    misshapen[0] = TensorData::f32("x_embedder.weight", &[60, 11], &[0.5; 660]);
    refused(&misshapen, "x_embedder.weight");
    let mut nan = tensors;
    nan[0] = TensorData::f32("x_embedder.weight", &[60, 12], &[f32::NAN; 720]);
    refused(&nan, "x_embedder.weight");
    let unlooked = LoadOptions::default().with_values(ValueCheck::Off);
    Flux2Transformer::load(&config, random::file(&nan), &unlooked).unwrap();

    let mut impossible = config;
    impossible.axes_dims_rope = vec![2, 4, 6, 10];
    assert!(matches!(load(&impossible, &[]), Err(Error::Config { field: "axes_dims_rope", .. })));
}

#[test]
fn half_precision_activations_stay_close() {
    let config = tiny(1, 2);
    let source = random::file(&random::tensors(&Flux2Transformer::expected(&config)));
    let velocity = |dtype| {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        let model = Flux2Transformer::load(&config, source.clone(), &options).unwrap();
        let prepared = model.prepare(&prompt_embeds(1), GRID).unwrap();
        model.forward(&latents(1), 0.7, None, &prepared, &Silent).unwrap()
    };
    let (exact, rounded) = (velocity(DType::F32), velocity(DType::BF16));
    assert_eq!(rounded.dtype(), DType::F32);
    let error = relative_l2(&rounded, &exact);
    // Eight bits of mantissa through three blocks.
    assert!(error > 0.0 && error < 3e-2, "{error:e}");
}
