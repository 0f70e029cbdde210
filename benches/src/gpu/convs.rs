//! All convolutions of one steady latent frame of the Wan 2.1 decoder at 832x480, one by one.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_fork::{
    ConvParams,
    conv::conv_nd,
    cudnn_policy::{Backend, Policy, scope, take_counters},
    layout::channels_last,
};
use wan_vae::LoadOptions;

use super::{Gpu, Options, floors::Floors, peer, relative_error};
use crate::record::{Row, Sink};

/// Bytes over which inputs rotate, so that none is found in a cache.
const ROTATED: usize = 256 << 20;

/// A kind of layer.
struct Layer {
    name: &'static str,
    input: usize,
    output: usize,
    filter: [usize; 3],
    /// Extents of the result.
    extents: [usize; 3],
    /// How many of them a latent frame passes.
    count: usize,
}

const fn layer(
    name: &'static str,
    [input, output]: [usize; 2],
    filter: [usize; 3],
    extents: [usize; 3],
    count: usize,
) -> Layer {
    Layer { name, input, output, filter, extents, count }
}

const LATENT: [usize; 3] = [1, 60, 104];
const TWICE: [usize; 3] = [2, 120, 208];
const FOUR_TIMES: [usize; 3] = [4, 240, 416];
const FULL: [usize; 3] = [4, 480, 832];

/// The decoder's layers. Of the resamplers, the 3 x 3 convolution of the enlarged picture.
const LAYERS: [Layer; 17] = [
    layer("conv2", [16, 16], [1, 1, 1], LATENT, 1),
    layer("decoder.conv1", [16, 384], [3, 3, 3], LATENT, 1),
    layer("middle, up 0-2", [384, 384], [3, 3, 3], LATENT, 10),
    layer("to_qkv", [384, 1152], [1, 1, 1], LATENT, 1),
    layer("proj", [384, 384], [1, 1, 1], LATENT, 1),
    layer("up 3 time_conv", [384, 768], [3, 1, 1], LATENT, 1),
    layer("up 3 resample", [384, 192], [1, 3, 3], TWICE, 1),
    layer("up 4 conv a", [192, 384], [3, 3, 3], TWICE, 1),
    layer("up 4 conv b, up 5-6", [384, 384], [3, 3, 3], TWICE, 5),
    layer("up 4 shortcut", [192, 384], [1, 1, 1], TWICE, 1),
    layer("up 7 time_conv", [384, 768], [3, 1, 1], TWICE, 1),
    layer("up 7 resample", [384, 192], [1, 3, 3], FOUR_TIMES, 1),
    layer("up 8-10", [192, 192], [3, 3, 3], FOUR_TIMES, 6),
    layer("up 11 resample", [192, 96], [1, 3, 3], FULL, 1),
    layer("up 12-14", [96, 96], [3, 3, 3], FULL, 6),
    layer("head", [96, 3], [3, 3, 3], FULL, 1),
    // Not a layer of the table, but what a resampler may be instead: one of four filters on the small picture.
    layer("(up 11 as 2x2, one of 4)", [192, 96], [1, 2, 2], FOUR_TIMES, 0),
];

impl Layer {
    /// Operations of one.
    fn flop(&self) -> f64 {
        let depth = self.input * self.filter.iter().product::<usize>();
        2.0 * (self.output * depth * self.extents.iter().product::<usize>()) as f64
    }

    /// The input as it stands in the decoder: the past in front, no padding in time.
    fn input_dims(&self) -> [usize; 5] {
        let [d, h, w] = self.extents;
        [1, self.input, d + self.filter[0] - 1, h, w]
    }

    fn params(&self) -> ConvParams<3> {
        let space = |f: usize| (f / 2, (f - 1) / 2);
        ConvParams { padding: [(0, 0), space(self.filter[1]), space(self.filter[2])], ..ConvParams::default() }
    }

    fn weight(&self, gpu: &Gpu, dtype: DType) -> Result<Tensor> {
        let [t, r, s] = self.filter;
        let scale = ((self.input * t * r * s) as f32).powf(-0.5);
        gpu.noise(scale, &[self.output, self.input, t, r, s], dtype)
    }
}

/// Milliseconds and error of one layer.
struct Timed {
    ms: f64,
    error: f64,
    dispatched: bool,
}

fn time(gpu: &Gpu, layer: &Layer, dtype: DType, backend: Backend, runs: usize) -> Result<Timed> {
    let dims = layer.input_dims();
    let half = dtype != DType::F32;
    let place = |t: Tensor| -> Result<Tensor> { if half { Ok(channels_last(&t)?) } else { Ok(t) } };
    let bytes = dims.iter().product::<usize>() * dtype.size_in_bytes();
    let inputs: Vec<Tensor> = (0..ROTATED.div_ceil(bytes).clamp(1, 8))
        .map(|_| place(gpu.noise(1.0, &dims, dtype)?))
        .collect::<Result<_>>()?;
    let weight = place(layer.weight(gpu, dtype)?)?;
    let bias = gpu.noise(0.1, &[layer.output], dtype)?;
    let params = layer.params();
    let call = |x: &Tensor| conv_nd(x, &weight, Some(&bias), &params);

    let mut policy = Policy::new(backend);
    policy.choice = LoadOptions::default().plans;
    let (ms, dispatched) = scope(policy.clone(), || -> Result<(f64, bool)> {
        take_counters();
        let ms = gpu.time(3, runs, |i| Ok(call(&inputs[i % inputs.len()]).map(drop)?))?;
        Ok((ms, take_counters().dispatched > 0))
    })?;
    // The same values through im2col in f32.
    let got = scope(policy, || call(&inputs[0]))?;
    let wide = |t: &Tensor| t.to_dtype(DType::F32)?.contiguous();
    let want = conv_nd(&wide(&inputs[0])?, &wide(&weight)?, Some(&wide(&bias)?), &params)?;
    Ok(Timed { ms, error: relative_error(&got, &want)?, dispatched })
}

/// Sum over all layers, with a line for each.
fn table(gpu: &Gpu, dtype: DType, backend: Backend, runs: usize) -> Result<(f64, f64)> {
    println!("\n{dtype:?} {backend:?}");
    println!(
        "{:<26} {:>12} {:>8} {:>15} {:>3} {:>9} {:>9} {:>8}",
        "layer", "channels", "filter", "result", "n", "ms each", "TFLOP/s", "error"
    );
    let (mut sum, mut worst) = (0.0, 0f64);
    for layer in &LAYERS {
        let timed = time(gpu, layer, dtype, backend, runs)?;
        let rate = layer.flop() / timed.ms / 1e9;
        println!(
            "{:<26} {:>12} {:>8} {:>15} {:>3} {:>9.4} {:>9.1} {:>8.1e}{}",
            layer.name,
            format!("{}>{}", layer.input, layer.output),
            layer.filter.map(|f| f.to_string()).join("x"),
            layer.extents.map(|f| f.to_string()).join("x"),
            layer.count,
            timed.ms,
            rate,
            timed.error,
            if timed.dispatched { "  cudnn" } else { "" }
        );
        sum += layer.count as f64 * timed.ms;
        worst = worst.max(timed.error);
    }
    println!("sum {sum:.2} ms");
    Ok((sum, worst))
}

fn flop() -> f64 {
    LAYERS.iter().map(|layer| layer.count as f64 * layer.flop()).sum()
}

/// Sums over all layers in bf16 and in f32, at once, and once more beside torch's.
///
/// # Errors
/// If an op, the peer or `sink` fails.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let row = |name: &'static str, value: f64, rate: f64, error: f64| -> Result<Row> {
        ensure!(value.is_finite(), "{name} is not finite");
        Ok(Row {
            name,
            value,
            unit: "ms",
            floor: Some(flop() / rate / 1e9),
            error: format!("rel_l2 {error:.1e} at worst against f32 im2col"),
            versions: gpu.versions.clone(),
            ..Row::default()
        })
    };
    let (half, error) = table(gpu, DType::BF16, Backend::Auto, 21)?;
    let half = row("wan21_convs_latent_480p_bf16", half, floors.bf16, error)?;
    sink(half.clone())?;
    let (single, error) = table(gpu, DType::F32, Backend::Auto, 5)?;
    let single = row("conv_f32_latent_480p", single, floors.f32, error)?;
    sink(single.clone())?;
    let (im2col, _) = table(gpu, DType::BF16, Backend::Im2col, 5)?;
    println!("bf16: {:.2} times as fast as im2col", im2col / half.value);
    let layers = LAYERS.map(|l| (l.input, l.output, l.filter, l.input_dims(), l.count));
    let Some(torch) = peer::convs(options, &layers)? else { return Ok(()) };
    for (row, figure) in [(half, "bf16"), (single, "f32")] {
        sink(Row { peer: torch.name.clone(), peer_value: torch.get(figure).ok(), ..row })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 13,550 GFLOP less the attention's 59.8.
    #[test]
    fn the_table_is_the_whole_decoder() {
        assert!((flop() / 1e9 - 13_490.0).abs() < 10.0, "{}", flop());
        assert_eq!(LAYERS.iter().map(|layer| layer.count).sum::<usize>(), 39);
    }
}
