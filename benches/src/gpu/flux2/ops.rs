//! The ops of one step of klein 4B at 1024x1024, each alone: where the time goes, and how much of it lies between the ops.

use std::sync::Arc;

use anyhow::Result;
use candle_core::DType;
use candle_fork::{
    AttentionInto, AttentionMask, HeadNorm, LinearWeight, attention, attention_and_swiglu_into, attention_into,
    cudnn_policy::{Attention, Policy, scope},
    gate_residual, gate_residual_modulate, heads_of, layer_norm_modulate, linear, linear_into,
    projection::{Heads, heads_and_swiglu_into, linear_swiglu},
    qk_norm_rope, swiglu_into,
};
use flux2::{Flux2Transformer, Launches, LoadOptions};
use policy::{AttentionPolicy, Silent};

use super::{
    super::{Gpu, floors::Floors},
    STD, decode_ops, step,
    table::{self, Op},
};
use crate::{
    flux2::{Klein, TEXT},
    synthetic::RandomWeights,
};

pub(super) const DTYPE: DType = DType::BF16;
/// Width of the model.
const H: usize = 3072;
const HEADS: usize = 24;
/// Width of a head.
const D: usize = 128;
/// Inner width of the MLP.
const MLP: usize = 9216;
pub(super) const EPS: f64 = 1e-6;
const IMAGE: usize = 4096;
const ALL: usize = TEXT + IMAGE;
/// Tokens of the streams of a double block.
const STREAMS: [(&str, usize); 2] = [("text", TEXT), ("image", IMAGE)];
/// Blocks of either kind.
const DOUBLE: usize = 5;
const SINGLE: usize = 20;

/// Prints the tables, that of a VAE decode as well.
///
/// # Errors
/// If memory is short or the transformer does not run.
pub fn print(gpu: &Gpu) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let mut policy = Policy::default();
    policy.choice = LoadOptions::default().plans;
    for fused in [Attention::Math, Attention::Auto] {
        policy.attention = fused;
        let sum = scope(policy.clone(), || {
            Ok::<_, anyhow::Error>(table::print(gpu, floors, &format!("step, attention {fused:?}"), &step_ops(gpu)?))
        })?;
        let whole = whole(gpu, fused)?;
        println!("the step itself {whole:.2} ms, {:.2} ms between the ops", whole - sum);
    }
    decode_ops::print(gpu, floors)
}

/// Milliseconds of the step that the ops are taken from.
fn whole(gpu: &Gpu, fused: Attention) -> Result<f64> {
    let config = Klein::FourB.transformer()?;
    let weights = Arc::new(RandomWeights::new("klein 4B", &Flux2Transformer::expected(&config), STD));
    let attention = if fused == Attention::Math { AttentionPolicy::Math } else { AttentionPolicy::FusedAuto };
    let transformer = step::load(gpu, &config, &weights, DTYPE, attention, Launches::Eager)?;
    let text = gpu.noise(1.0, &[1, TEXT, config.joint_attention_dim], DType::F32)?;
    let latents = gpu.noise(1.0, &[1, IMAGE, config.in_channels], DType::F32)?;
    let prepared = transformer.prepare(&text, (64, 64))?;
    let modulations = transformer.modulations(&[0.9], None, 1)?;
    gpu.time(3, 15, |_| Ok(transformer.step(&latents, &modulations[0], &prepared, &Silent).map(drop)?))
}

/// A weight of `[rows, columns]`.
pub(super) fn matrix(gpu: &Gpu, rows: usize, columns: usize) -> Result<LinearWeight> {
    Ok(LinearWeight::from_tensor(gpu.noise(STD, &[rows, columns], DTYPE)?)?)
}

fn step_ops(gpu: &Gpu) -> Result<Vec<Op<'static>>> {
    let tokens = |rows: usize, width: usize| gpu.noise(1.0, &[1, rows, width], DTYPE);
    let vector = || gpu.noise(0.1, &[1, H], DType::F32);
    let angles = gpu.noise(1.0, &[ALL, D / 2], DType::F32)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let head_norm = gpu.noise(1.0, &[D], DType::F32)?;
    let mut ops = Vec::new();

    // Products: of each stream in the double blocks, of all tokens in the single ones, the last of which is cut short.
    let layers = [("qkv", H, 3 * H), ("attention out", H, H), ("mlp out", MLP, H)];
    for (stream, rows) in STREAMS {
        for (layer, depth, columns) in layers {
            let (x, weight) = (tokens(rows, depth)?, matrix(gpu, columns, depth)?);
            let name = format!("double, {layer} of {stream}");
            ops.push(Op::product(name, DOUBLE, [rows, columns, depth], move || {
                Ok(linear(&x, &weight, None).map(drop)?)
            }));
        }
    }
    for (name, count, rows, depth, columns) in [
        ("single, out", SINGLE - 1, ALL, H + MLP, H),
        ("last, key and value", 1, ALL, H, 2 * H),
        ("last, query", 1, IMAGE, H, H),
        ("last, mlp in", 1, IMAGE, H, 2 * MLP),
        ("last, out", 1, IMAGE, H + MLP, H),
        ("image in", 1, IMAGE, 128, H),
        ("image out", 1, IMAGE, H, 128),
    ] {
        let (x, weight) = (tokens(rows, depth)?, matrix(gpu, columns, depth)?);
        ops.push(Op::product(name, count, [rows, columns, depth], move || Ok(linear(&x, &weight, None).map(drop)?)));
    }
    // Products with what follows them, and apart.
    let [(x, weight), (y, other)] = [IMAGE, TEXT].map(|rows| (tokens(rows, H), matrix(gpu, 2 * MLP, H)));
    let (x, weight, y, other) = (x?, weight?, y?, other?);
    ops.push(Op::product("double, mlp in of both with swiglu", DOUBLE, [ALL, 2 * MLP, H], move || {
        Ok(linear_swiglu([(&x, &weight), (&y, &other)]).map(drop)?)
    }));
    let (x, weight, joined) = (tokens(ALL, H)?, matrix(gpu, 3 * H + 2 * MLP, H)?, tokens(ALL, H + MLP)?);
    let plain = (x.clone(), weight.clone());
    let extents = [ALL, 3 * H + 2 * MLP, H];
    ops.push(Op::product("(single, qkv and mlp in)", 0, extents, move || {
        Ok(linear(&plain.0, &plain.1, None).map(drop)?)
    }));
    let (norm, tables) = (head_norm.clone(), (cos.clone(), sin.clone()));
    ops.push(Op::product("single, qkv and mlp in with norm, rotation, swiglu", SINGLE - 1, extents, move || {
        let norm = HeadNorm { tokens: ALL, query: &norm, key: &norm };
        let heads = Heads { count: HEADS, norm, cos: &tables.0, sin: &tables.1, eps: EPS };
        Ok(heads_and_swiglu_into(&x, &weight, &heads, &joined.narrow(2, H, MLP)?).map(drop)?)
    }));
    // The same product into rows of a larger buffer must cost no more.
    let (x, weight, joint) = (tokens(IMAGE, H)?, matrix(gpu, 3 * H, H)?, tokens(ALL, 3 * H)?);
    ops.push(Op::product("(double, qkv of image into the joint rows)", 0, [IMAGE, 3 * H, H], move || {
        Ok(linear_into(&x, &weight, None, &joint.narrow(1, TEXT, IMAGE)?)?)
    }));

    // Attention, on heads cut from one projection.
    let projected = tokens(ALL, 3 * H)?;
    for (name, count, queries) in [("attention", DOUBLE + SINGLE - 1, ALL), ("last, attention", 1, IMAGE)] {
        let [q, k, v] = [0, H, 2 * H].map(|start| heads_of(&projected, start, HEADS, D));
        let (q, k, v) = (q?.narrow(1, ALL - queries, queries)?, k?, v?);
        ops.push(Op::product(name, count, [queries * 2, ALL, H], move || {
            Ok(attention(&q, &k, &v, (D as f32).powf(-0.5), AttentionMask::Full).map(drop)?)
        }));
    }

    // The two branches of a single block, one behind the other and beside one another.
    let (x, joined) = (tokens(ALL, 3 * H + 2 * MLP)?, tokens(ALL, H + MLP)?);
    for (name, beside) in [("(attention, then swiglu)", false), ("(attention and swiglu beside it)", true)] {
        let [q, k, v] = [0, H, 2 * H].map(|start| heads_of(&x, start, HEADS, D));
        let (q, k, v, out) = (q?, k?, v?, heads_of(&joined, 0, HEADS, D)?);
        let (x, mlp) = (x.narrow(2, 3 * H, 2 * MLP)?, joined.narrow(2, H, MLP)?);
        ops.push(Op::product(name, 0, [ALL * 2, ALL, H], move || {
            let (softmax_scale, mask) = ((D as f32).powf(-0.5), AttentionMask::Full);
            let attention = AttentionInto { q: &q, k: &k, v: &v, softmax_scale, mask, out: &out };
            if beside {
                return Ok(attention_and_swiglu_into(&attention, &x, &mlp)?);
            }
            attention_into(&q, &k, &v, softmax_scale, mask, &out)?;
            Ok(swiglu_into(&x, &mlp)?)
        }));
    }

    // What moves data.
    for (name, count, width, runs) in [
        ("double, norm of heads and rotation", DOUBLE, 3 * H, &STREAMS[..]),
        ("(single, norm of heads and rotation)", 0, 3 * H + 2 * MLP, &[("all", ALL)][..]),
    ] {
        let (x, norm, cos, sin) = (tokens(ALL, width)?, head_norm.clone(), cos.clone(), sin.clone());
        ops.push(Op::traffic(name, count, 4 * ALL * H, move || {
            let norm = |&(_, tokens): &(&str, usize)| HeadNorm { tokens, query: &norm, key: &norm };
            let norms: Vec<HeadNorm<'_>> = runs.iter().map(norm).collect();
            Ok(qk_norm_rope(&x, HEADS, &norms, &cos, &sin, EPS).map(drop)?)
        }));
    }
    for (name, count, rows, start, width) in [
        ("last, swiglu", 1, IMAGE, 0, 2 * MLP),
        ("(single, swiglu out of and into wider rows)", 0, ALL, 3 * H, 3 * H + 2 * MLP),
    ] {
        let (x, joined) = (tokens(rows, width)?, tokens(rows, H + MLP)?);
        ops.push(Op::traffic(name, count, 3 * rows * MLP, move || {
            Ok(swiglu_into(&x.narrow(2, start, 2 * MLP)?, &joined.narrow(2, H, MLP)?)?)
        }));
    }
    for (stream, rows, starts, middles, ends) in [
        ("text", TEXT, DOUBLE, DOUBLE, DOUBLE),
        ("image", IMAGE, DOUBLE + 1, DOUBLE, DOUBLE + 1),
        ("all", ALL, SINGLE, 0, SINGLE - 1),
    ] {
        let (x, y, gate, shift, scale) = (tokens(rows, H)?, tokens(rows, H)?, vector()?, vector()?, vector()?);
        let normed = (x.clone(), shift.clone(), scale.clone());
        ops.push(Op::traffic(format!("norm and modulation of {stream}"), starts, 2 * rows * H, move || {
            Ok(layer_norm_modulate(&normed.0, &normed.1, &normed.2, EPS).map(drop)?)
        }));
        let added = (x.clone(), gate.clone(), y.clone());
        ops.push(Op::traffic(format!("gate and residual of {stream}"), ends, 3 * rows * H, move || {
            Ok(gate_residual(&added.0, &added.1, &added.2).map(drop)?)
        }));
        let name = format!("gate, residual, norm, modulation of {stream}");
        ops.push(Op::traffic(name, middles, 4 * rows * H, move || {
            Ok(gate_residual_modulate(&x, &gate, &y, &shift, &scale, EPS).map(drop)?)
        }));
    }
    Ok(ops)
}
