//! Ops that fuse others, and ops that write into a part of a tensor.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_fork::{
    ConvParams, Error, LinearWeight, Pairing,
    conv::{ParityFilters, conv_nd, conv_nd_add, upsample_conv2d},
    cuda::paths::{Path, taken},
    cudnn_policy::{PlanChoice, Policy, scope},
    gate_residual, gate_residual_modulate, heads_of, latents_from_tokens, layer_norm_modulate, layout, linear,
    linear_into, norm_rope, qk_norm_rope, residual, residual_rms_norm, rms_norm,
    rope::{HeadNorm, grouped_qk_norm_rope},
    swiglu_into,
};
use tests::gpu::{Choices, DTYPES, Failures, cuda, noise, relative_error, seed, values};

use crate::{Op, ROWS, Role, run};

/// An error of candle in a call.
fn step<R>(result: candle_core::Result<R>) -> candle_fork::Result<R> {
    result.map_err(|source| Error::Candle { what: "test", source: Box::new(source) })
}

/// Both results behind one another, in rows.
fn both((a, b): (Tensor, Tensor)) -> candle_fork::Result<Tensor> {
    step(Tensor::cat(&[a, b], 0))
}

#[test]
fn norms_and_rotations() -> Result<()> {
    let mut ops = Vec::new();
    // Widths for vectors, for few and many threads of a head, and odd ones.
    for [b, s, h, d] in [
        [1, 1, 1, 2],
        [2, 3, 5, 6],
        [1, 33, 24, 128],
        [2, 7, 3, 66],
        [1, 9, 2, 64],
        [3, 2, 1, 512],
        [1, 5, 3, 48],
        [1, 2, 2, 1030],
    ] {
        let (table, weight) = (&[s, d / 2][..], &[d][..]);
        for pairing in [Pairing::Interleaved, Pairing::Half] {
            let operands =
                [(Role::Main, &[b, s, h, d][..]), (Role::Scale, weight), (Role::Table, table), (Role::Table, table)];
            ops.push(Op::new(format!("norm_rope {pairing:?}"), operands, move |[x, weight, cos, sin]| {
                norm_rope(x, weight, cos, sin, 1e-6, pairing)
            }));
        }
        // Two runs of tokens, or one and an empty one, in rows with other columns behind.
        for (more, text) in [(0, s / 2), (3, 0), (8 * d, s)] {
            let projected = &[b, s, 2 * h * d + more][..];
            let operands = [
                (Role::Main, projected),
                (Role::Scale, weight),
                (Role::Plain, weight),
                (Role::Scale, weight),
                (Role::Table, weight),
                (Role::Table, table),
                (Role::Table, table),
            ];
            let op = Op::new(format!("qk_norm_rope {text}"), operands, move |[x, w0, w1, w2, w3, cos, sin]| {
                let norms =
                    [HeadNorm { tokens: text, query: w0, key: w1 }, HeadNorm { tokens: s - text, query: w2, key: w3 }];
                both(qk_norm_rope(x, h, &norms, cos, sin, 1e-6)?)
            });
            ops.push(op);
        }
        // Key heads that several query heads share.
        let (kv, weights) = (h.div_ceil(4), [(Role::Scale, weight), (Role::Plain, weight)]);
        let operands = [
            (Role::Main, &[b, s, (h + 2 * kv) * d][..]),
            weights[0],
            weights[1],
            (Role::Table, table),
            (Role::Table, table),
        ];
        ops.push(Op::new("grouped_qk_norm_rope", operands, move |[x, query, key, cos, sin]| {
            let norms = [HeadNorm { tokens: s, query, key }];
            let (q, k) = grouped_qk_norm_rope(x, [h, kv], &norms, cos, sin, 1e-6, Pairing::Half)?;
            step(Tensor::cat(&[q, k], 2))
        }));
    }
    run("norms and rotations", ops)
}

#[test]
fn gated_sums_and_their_norm() -> Result<()> {
    let mut ops = Vec::new();
    for dims in ROWS {
        let batch = &[dims[0], dims[2]][..];
        let operands =
            [(Role::Main, dims), (Role::Table, batch), (Role::Main, dims), (Role::Plain, batch), (Role::Table, batch)];
        ops.push(Op::new("gate_residual_modulate", operands, |[x, gate, y, shift, scale]| {
            both(gate_residual_modulate(x, gate, y, shift, scale, 1e-6)?)
        }));
    }
    for dims in ROWS {
        let operands = [(Role::Main, dims), (Role::Main, dims), (Role::Scale, &dims[2..])];
        ops.push(Op::new("residual_rms_norm", operands, |[x, y, weight]| both(residual_rms_norm(x, y, weight, 1e-6)?)));
    }
    run("gated sums and their norm", ops)
}

/// The fused op has the bits of its parts.
#[test]
fn fused_is_the_same_as_apart() -> Result<()> {
    let suite = "fused is the same as apart";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for dims in ROWS {
        for dtype in DTYPES {
            let of = |i, dims: &[usize], dtype| -> Result<Tensor> {
                Ok(noise(seed + i, 1.0, dims, dtype)?.to_device(&device)?)
            };
            let (x, y) = (of(0, dims, dtype)?, of(1, dims, dtype)?);
            let batch = [dims[0], dims[2]];
            let (gate, shift, scale) = (of(2, &batch, DType::F32)?, of(3, &batch, dtype)?, of(4, &batch, DType::F32)?);
            let at = || format!("{dims:?} {dtype:?}");
            let fused = gate_residual_modulate(&x, &gate, &y, &shift, &scale, 1e-6);
            let Some((sum, normed)) = failures.take(fused, at) else { continue };
            let apart = gate_residual(&x, &gate, &y)?;
            failures.check(values(&sum)? == values(&apart)?, || format!("{}: sums differ", at()));
            let apart = layer_norm_modulate(&apart, &shift, &scale, 1e-6)?;
            failures.check(values(&normed)? == values(&apart)?, || format!("{}: norms differ", at()));

            let weight = of(5, &dims[2..], dtype)?;
            let Some((sum, normed)) = failures.take(residual_rms_norm(&x, &y, &weight, 1e-6), at) else { continue };
            let apart = residual(&x, &y)?;
            failures.check(values(&sum)? == values(&apart)?, || format!("{}: plain sums differ", at()));
            let apart = rms_norm(&apart, &weight, 1e-6)?;
            failures.check(values(&normed)? == values(&apart)?, || format!("{}: rms norms differ", at()));
        }
    }
    failures.finish(suite)
}

#[test]
fn results_inside_of_a_buffer() -> Result<()> {
    let mut ops = Vec::new();
    // Columns before and behind: aligned ones and not.
    for (before, after) in [(0, 0), (3, 2), (16, 8)] {
        let buffer = move |x: &Tensor, n: usize| -> candle_fork::Result<(Tensor, Tensor)> {
            let mut dims = x.dims().to_vec();
            dims[x.rank() - 1] = before + n + after;
            let buffer = step(Tensor::ones(dims, x.dtype(), x.device()))?;
            let part = step(buffer.narrow(D::Minus1, before, n))?;
            Ok((buffer, part))
        };
        for dims in ROWS.into_iter().filter(|dims| dims[2].is_multiple_of(2)) {
            ops.push(Op::new(format!("swiglu_into {before}"), [(Role::Main, dims)], move |[x]| {
                let (buffer, part) = buffer(x, x.dims()[2] / 2)?;
                swiglu_into(x, &part)?;
                Ok(buffer)
            }));
        }
        for (dims, features) in [([1, 1, 1], 1), ([2, 7, 193], 65), ([1, 33, 512], 1536), ([3, 40, 96], 104)] {
            let weight = &[features, dims[2]][..];
            let into = move |x: &Tensor, w: &Tensor, bias: Option<&Tensor>| {
                let (buffer, part) = buffer(x, features)?;
                linear_into(x, &LinearWeight::from_tensor(w.clone())?, bias, &part)?;
                Ok(buffer)
            };
            let operands = [(Role::Main, &dims[..]), (Role::Plain, weight)];
            ops.push(Op::new(format!("linear_into {before}"), operands, move |[x, w]| into(x, w, None)).bound(1e-5));
            for role in [Role::Plain, Role::Table] {
                let operands = [(Role::Main, &dims[..]), (Role::Plain, weight), (role, &weight[..1])];
                let op = Op::new(format!("linear_into {before} bias {role:?}"), operands, move |[x, w, bias]| {
                    into(x, w, Some(bias))
                });
                ops.push(op.bound(1e-5));
            }
        }
    }
    // Rows of a buffer that two maps fill.
    let operands = [(Role::Main, &[2, 5, 64][..]), (Role::Main, &[2, 7, 64][..]), (Role::Plain, &[48, 64][..])];
    let op = Op::new("linear_into rows", operands, |[text, image, w]| {
        let weight = LinearWeight::from_tensor(w.clone())?;
        let joint = step(Tensor::zeros((2, 12, 48), text.dtype(), text.device()))?;
        linear_into(text, &weight, None, &step(joint.narrow(1, 0, 5))?)?;
        linear_into(image, &weight, None, &step(joint.narrow(1, 5, 7))?)?;
        // Heads of it are views, which other ops read where they lie.
        step(heads_of(&joint, 16, 2, 16)?.contiguous())
    });
    ops.push(op.bound(1e-5));
    run("results inside of a buffer", ops)
}

/// An item of a batch has the bits that it has alone.
#[test]
fn items_of_a_batch_are_independent() -> Result<()> {
    let suite = "items of a batch";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for dtype in DTYPES {
        let weight = LinearWeight::from_tensor(noise(seed, 0.1, &[640, 512], dtype)?.to_device(&device)?)?;
        let filters = noise(seed + 1, 0.1, &[48, 24, 3, 3], dtype)?.to_device(&device)?;
        let bias = noise(seed + 2, 1.0, &[48], dtype)?.to_device(&device)?;
        let tokens = noise(seed + 3, 1.0, &[3, 257, 512], dtype)?.to_device(&device)?;
        let pictures = noise(seed + 4, 1.0, &[3, 24, 19, 23], dtype)?.to_device(&device)?;
        let params = ConvParams { padding: [(1, 1); 2], ..ConvParams::<2>::default() };
        type Run<'a> = Box<dyn Fn(&Tensor) -> candle_fork::Result<Tensor> + 'a>;
        let cases: [(&str, &Tensor, Run<'_>); 2] = [
            ("linear", &tokens, Box::new(|x| linear(x, &weight, None))),
            ("conv", &pictures, Box::new(|x| conv_nd(x, &filters, Some(&bias), &params))),
        ];
        for (name, x, run) in cases {
            let all = run(x)?;
            for item in 0..3 {
                let at = || format!("{name} {dtype:?} item {item}");
                let Some(alone) = failures.take(run(&x.narrow(0, item, 1)?), at) else { continue };
                let same = values(&alone)? == values(&all.narrow(0, item, 1)?)?;
                failures.check(same, || format!("{}: other bits than alone", at()));
            }
        }
    }
    failures.finish(suite)
}

/// Convolutions of our own in half precision against the CPU's in f32 of the same rounded operands: random shapes that the
/// implicit product serves, with every rest of its tiles.
#[test]
fn implicit_products() -> Result<()> {
    let suite = "implicit products";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let (mut choices, mut failures) = (Choices::new(seed), Failures::default());
    for case in 0..40 {
        let c = choices.of(&[8, 16, 40, 64, 96, 128, 192, 256]);
        let k = choices.of(&[3, 8, 20, 64, 128, 130, 136, 264]);
        let (n, h, w) = (1 + choices.below(3), 3 + choices.below(20), 3 + choices.below(20));
        let taps = choices.of(&[1, 2, 3]);
        let params = ConvParams {
            stride: [choices.of(&[1, 1, 2]); 2],
            dilation: [choices.of(&[1, 1, 2]), 1],
            padding: [(choices.below(3), 1 + choices.below(2)), (1, choices.below(2))],
            groups: 1,
        };
        let dtype = choices.of(&[DType::BF16, DType::F16]);
        let at = || format!("case {case}: {dtype:?} {n} x {c} x {h} x {w}, {k} filters of {taps}, {params:?}");
        let x = noise(seed + case, 1.0, &[n, c, h, w], dtype)?;
        let weight = noise(seed + 1000 + case, 0.1, &[k, c, taps, taps], dtype)?;
        let bias = noise(seed + 2000 + case, 1.0, &[k], dtype)?;
        let wide = |t: &Tensor| t.to_dtype(DType::F32);
        let plain = conv_nd(&wide(&x)?, &wide(&weight)?, Some(&wide(&bias)?), &params)?;
        let residual = noise(seed + 3000 + case, 1.0, plain.dims(), dtype)?;
        let want = (plain + wide(&residual)?)?;
        let on_device = |t: &Tensor| t.to_device(&device);
        let [x, weight, bias, residual] =
            [on_device(&x)?, on_device(&weight)?, on_device(&bias)?, on_device(&residual)?];
        let before = taken(Path::ImplicitProduct);
        let got = conv_nd_add(&x, &weight, Some(&bias), &residual, &params);
        let Some(got) = failures.take(got, at) else { continue };
        failures.check(taken(Path::ImplicitProduct) == before + 1, || format!("{}: by another path", at()));
        let error = relative_error(&values(&got)?, &values(&want)?);
        // One rounding of values whose largest error is half a unit in the last place.
        let bound = if dtype == DType::BF16 { 2.4e-3 } else { 3e-4 };
        failures.check(error <= bound, || format!("{}: error {error:.2e}, allowed {bound:.2e}", at()));
    }
    failures.finish(suite)
}

#[test]
fn doubling_convolutions() -> Result<()> {
    let suite = "doubling convolutions";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for [n, c, k, h, w] in [[1, 1, 1, 1, 1], [2, 16, 24, 9, 7], [1, 64, 136, 12, 20], [1, 40, 3, 5, 33]] {
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 5e-3), (DType::F16, 6e-4)] {
            let at = || format!("{dtype:?} {n} x {c} x {h} x {w}, {k} filters");
            let operands = [
                noise(seed, 1.0, &[n, c, h, w], dtype)?,
                noise(seed + 1, 0.1, &[k, c, 3, 3], dtype)?,
                noise(seed + 2, 1.0, &[k], dtype)?,
            ];
            let run = |[x, weight, bias]: &[Tensor; 3]| -> Result<Tensor> {
                Ok(upsample_conv2d(x, &ParityFilters::new(weight)?, Some(bias))?)
            };
            let wide = |i: usize| operands[i].to_dtype(DType::F32);
            let want = run(&[wide(0)?, wide(1)?, wide(2)?])?;
            let placed = |i: usize| operands[i].to_device(&device);
            let Some(got) = failures.take(run(&[placed(0)?, placed(1)?, placed(2)?]), at) else { continue };
            let error = relative_error(&values(&got)?, &values(&want)?);
            // In half precision the added taps are rounded, too.
            failures.check(error <= bound, || format!("{}: error {error:.2e}, allowed {bound:.2e}", at()));
        }
    }
    failures.finish(suite)
}

/// Half precision goes through cuBLASLt, with its bias and into columns of a buffer; the first plan and the fastest give the
/// same bits.
#[test]
fn products_by_cublaslt() -> Result<()> {
    let suite = "products by cuBLASLt";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for dtype in [DType::BF16, DType::F16] {
        for (rows, features, width) in [(4608, 3072, 1024), (512, 1536, 3072), (1, 768, 256)] {
            let at = || format!("{dtype:?} {rows} x {width} by {features}");
            let x = noise(seed, 1.0, &[rows, width], dtype)?.to_device(&device)?;
            let weight =
                LinearWeight::from_tensor(noise(seed + 2, 0.1, &[features, width], dtype)?.to_device(&device)?)?;
            let buffer = Tensor::zeros((rows, features + 64), dtype, &device)?;
            let part = buffer.narrow(1, 64, features)?;
            let before = taken(Path::LtProduct);
            let Some(plain) = failures.take(linear(&x, &weight, None), at) else { continue };
            failures.take(linear_into(&x, &weight, None, &part), at);
            let counted = taken(Path::LtProduct) - before;
            failures.check(counted == 2, || format!("{}: {counted} of 2 products", at()));
            // Other distances of rows may have another plan, hence another last bit.
            let error = relative_error(&values(&part)?, &values(&plain)?);
            failures.check(error <= 1e-3, || format!("{}: error {error:.2e} in a buffer", at()));
            let choice = PlanChoice::Timed { max_plans: 8, runs: 2 };
            let timed = scope(policy(choice), || linear(&x, &weight, None));
            let Some(timed) = failures.take(timed, at) else { continue };
            failures.check(values(&timed)? == values(&plain)?, || format!("{}: other bits of a timed plan", at()));
        }
    }
    failures.finish(suite)
}

/// The default policy with another choice of plans.
fn policy(choice: PlanChoice) -> Policy {
    let mut policy = Policy::default();
    policy.choice = choice;
    policy
}

#[test]
fn latents_of_tokens() -> Result<()> {
    let mut ops = Vec::new();
    for (batch, grid, patch, channels) in [(1, (4, 5), [2, 2], 32), (2, (3, 1), [1, 3], 5), (1, (1, 1), [1, 1], 1)] {
        let width = channels * patch[0] * patch[1];
        let tokens = &[batch, grid.0 * grid.1, width][..];
        let operands = [(Role::Main, tokens), (Role::Scale, &tokens[2..]), (Role::Table, &tokens[2..])];
        ops.push(Op::new(format!("latents_from_tokens {patch:?}"), operands, move |[x, std, mean]| {
            layout::contiguous(&latents_from_tokens(x, grid, patch, std, mean, x.dtype())?)
        }));
    }
    run("latents of tokens", ops)
}

/// A buffer on another device, or of another dtype, is refused before anything is enqueued.
#[test]
fn buffers_that_do_not_fit() -> Result<()> {
    let suite = "buffers that do not fit";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let x = Tensor::ones((2, 8), DType::BF16, &device)?;
    let outs = [
        Tensor::zeros((2, 4), DType::BF16, &Device::Cpu)?,
        Tensor::zeros((2, 4), DType::F32, &device)?,
        Tensor::zeros((2, 5), DType::BF16, &device)?,
        x.narrow(1, 0, 4)?,
    ];
    for out in outs {
        failures.check(swiglu_into(&x, &out).is_err(), || format!("{out:?} was accepted"));
    }
    failures.finish(suite)
}
