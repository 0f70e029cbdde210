//! Which kernel runs, what it writes, and what it refuses.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{
    AttentionMask, attention, attention_into,
    cudnn_policy::{Attention, AttentionCounters, scope, take_counters},
};
use tests::gpu::{Counted, Failures, Placement, cuda, leave_out, noise, poison, relative_error, seed, values};

use crate::{CASES, Case, Kernel, MASKS, Reference, bits, cudnn_serves, policy, under};

/// The kernels for wide heads, by warps and, on compute capability 9.0, by groups of them: right, and how fast each is.
#[test]
fn both_kernels_for_wide_heads_agree_with_f64() -> Result<()> {
    let suite = "gpu_attention by warps and groups of warps";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if candle_fork::diagnosis::device_class(&device) != "cuda-9.0" {
        return leave_out(suite, "another architecture");
    }
    let seed = seed(suite);
    let kernels = [false, true].map(|warp_groups| {
        let mut policy = policy(Attention::Math);
        policy.warp_groups = warp_groups;
        policy
    });
    let mut failures = Failures::default();
    for (i, case) in CASES.into_iter().enumerate() {
        let Case([batch, q_len, k_len, heads, _, width]) = case;
        if !width.is_multiple_of(8) || !(72..=128).contains(&width) {
            continue;
        }
        for dtype in [DType::BF16, DType::F16] {
            for mask in MASKS {
                if mask == AttentionMask::Causal && q_len > k_len {
                    continue;
                }
                let reference = Reference::new(case, dtype, mask, seed + 10 * i as u64)?;
                for placement in [Placement::Contiguous, Placement::Frames, Placement::Cut] {
                    let operands = reference.on(&device, |t| placement.place(t))?;
                    for kernel in &kernels {
                        let groups = kernel.warp_groups;
                        let at = || format!("{case:?} {dtype:?} {mask:?} {placement:?}, groups of warps: {groups}");
                        poison(&device, batch * q_len * heads * width * 2)?;
                        take_counters();
                        let result = scope(kernel.clone(), || reference.run(&operands));
                        let counters = take_counters().attention;
                        let Some(got) = failures.take(result, at) else { continue };
                        let (error, bound) = (relative_error(&values(&got)?, &reference.exact), reference.bound());
                        failures.check(error <= bound, || format!("{}: error {error:.2e}, allowed {bound:.2e}", at()));
                        let counted = (counters.fused, counters.warp_groups) == (1, u64::from(groups));
                        failures.check(counted, || format!("{}: {counters:?}", at()));
                        let again = bits(&scope(kernel.clone(), || reference.run(&operands))?)?;
                        failures.check(again == bits(&got)?, || format!("{}: another run gives other bytes", at()));
                    }
                }
            }
        }
    }
    let x = Tensor::randn(0f32, 1.0, (1, 4608, 24, 128), &device)?.to_dtype(DType::BF16)?;
    let [by_warps, by_groups] = kernels;
    for (name, policy) in [("warps", by_warps), ("groups", by_groups), ("cudnn", policy(Attention::Auto))] {
        let run = || attention(&x, &x, &x, 0.0883, AttentionMask::Full);
        let milliseconds = scope(policy, || -> Result<f64> {
            run()?;
            device.synchronize()?;
            let start = Instant::now();
            for _ in 0..20 {
                run()?;
            }
            device.synchronize()?;
            Ok(start.elapsed().as_secs_f64() * 50.0)
        })?;
        let teraflops = 4.0 * 4608f64.powi(2) * 24.0 * 128.0 / milliseconds * 1e-9;
        println!("4608 tokens, 24 heads of 128, {name}: {milliseconds:.3} ms, {teraflops:.0} TFLOP/s");
    }
    failures.finish(suite)
}

/// The bytes of a batch item are those that it has alone, and parts of a buffer are written without the rest.
#[test]
fn batches_and_targets() -> Result<()> {
    let suite = "gpu_attention of batches and into buffers";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let policies =
        if cudnn_serves(suite, &device)? { &[Attention::Math, Attention::Auto][..] } else { &[Attention::Math] };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (dtype, width) in [(DType::BF16, 128), (DType::F16, 72), (DType::F32, 64), (DType::BF16, 200)] {
        for mask in MASKS {
            let case = Case([3, 300, 321, 4, 2, width]);
            let reference = Reference::new(case, dtype, mask, seed)?;
            let operands = reference.on(&device, |t| Ok(t.clone()))?;
            for &attention in policies {
                let at = || format!("{case:?} {dtype:?} {mask:?} {attention:?}");
                let Some(all) = failures.take(under(attention, || reference.run(&operands)).result, at) else {
                    continue;
                };
                let whole = bits(&all)?;
                // cuDNN may choose another kernel for another problem.
                for item in 0..if attention == Attention::Math { 3 } else { 0 } {
                    let [q, k, v] = operands.each_ref().map(|t| t.narrow(0, item, 1));
                    let one = [q?, k?, v?];
                    let alone = bits(&under(attention, || reference.run(&one)).result?)?;
                    let same = whole[item * alone.len()..][..alone.len()] == alone;
                    failures.check(same, || format!("{}: item {item} has other bytes alone", at()));
                }
                // Columns 16 and 3 of wider rows: aligned to vectors, and not.
                for (start, rest) in [(16, 40), (3, 10)] {
                    let nan = Tensor::full(f32::NAN, (3, 300, 4, start + width + rest), &device)?.to_dtype(dtype)?;
                    let out = nan.narrow(3, start, width)?;
                    let [q, k, v] = &operands;
                    let run = || Ok(attention_into(q, k, v, reference.scale, mask, &out)?);
                    let Counted { result, counters } = under(attention, run);
                    if failures.take(result, || format!("{} into column {start}", at())).is_none() {
                        continue;
                    }
                    // cuDNN writes whole vectors.
                    let (kernel, _) = if attention == Attention::Auto {
                        Kernel::auto(dtype, width, mask)
                    } else {
                        (Kernel::own(dtype, width), false)
                    };
                    let fell_back = kernel == Kernel::Cudnn && start == 3;
                    let kernel = if fell_back { Kernel::own(dtype, width) } else { kernel };
                    let counted = kernel.counted(fell_back, &counters.attention);
                    failures.check(counted, || format!("{} into column {start}: {:?}", at(), counters.attention));
                    let written = values(&out)?;
                    let error = relative_error(&written, &reference.exact);
                    failures.check(error <= reference.bound(), || format!("{} into column {start}: {error:.2e}", at()));
                    if attention == Attention::Math {
                        let same = written.iter().map(|x| x.to_bits()).eq(whole.iter().copied());
                        failures.check(same, || format!("{} into column {start}: other bytes", at()));
                    }
                    let guarded = values(&nan)?.chunks(start + width + rest).all(|row| {
                        row.iter().enumerate().all(|(i, x)| x.is_nan() != (start..start + width).contains(&i))
                    });
                    failures.check(guarded, || format!("{} into column {start}: the rest was written", at()));
                }
            }
        }
    }
    failures.finish(suite)
}

/// Heads wider than cuDNN documents: right where the policy trusts them. Otherwise they fall back, as errata.
#[test]
fn undocumented_widths() -> Result<()> {
    let suite = "gpu_attention of undocumented widths";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if !cudnn_serves(suite, &device)? {
        return Ok(());
    }
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (case, dtype) in [
        (Case([1, 300, 300, 1, 1, 384]), DType::BF16),
        (Case([2, 1000, 1000, 1, 1, 512]), DType::BF16),
        (Case([1, 200, 333, 1, 1, 512]), DType::F16),
    ] {
        let reference = Reference::new(case, dtype, AttentionMask::Full, seed)?;
        let operands = reference.on(&device, |t| Ok(t.clone()))?;
        let mut trusting = policy(Attention::Required);
        trusting.trust_version = true;
        take_counters();
        let Some(got) = failures.take(scope(trusting, || reference.run(&operands)), || format!("{case:?}")) else {
            continue;
        };
        let counters = take_counters().attention;
        let (error, bound) = (relative_error(&values(&got)?, &reference.exact), reference.bound());
        println!("{case:?} {dtype:?}: error {error:.2e}, allowed {bound:.2e}");
        failures.check(error <= bound, || format!("{case:?} {dtype:?}: error {error:.2e}, allowed {bound:.2e}"));
        failures.check(counters.dispatched == 1, || format!("{case:?}: {counters:?}"));
    }
    failures.finish(suite)
}

/// Widths, types and masks without a fused kernel under [`Attention::Required`]: typed errors, no other path.
#[test]
fn required_is_required() -> Result<()> {
    let suite = "gpu_attention that is required";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if !cudnn_serves(suite, &device)? {
        return Ok(());
    }
    let mut failures = Failures::default();
    for (dtype, width, mask, path) in [
        (DType::BF16, 128, AttentionMask::Full, Some(Kernel::Cudnn)),
        (DType::F16, 256, AttentionMask::Full, Some(Kernel::Cudnn)),
        // This crate's kernel is a fused one.
        (DType::BF16, 128, AttentionMask::Causal, Some(Kernel::Fused)),
        (DType::F32, 64, AttentionMask::Full, None),
        (DType::BF16, 60, AttentionMask::Full, None),
        (DType::BF16, 512, AttentionMask::Full, None),
        (DType::F32, 64, AttentionMask::Causal, None),
        (DType::F16, 256, AttentionMask::Causal, None),
    ] {
        let at = || format!("{dtype:?} {width} {mask:?}");
        let x = noise(1, 1.0, &[1, 70, 2, width], dtype)?.to_device(&device)?;
        let run = || Ok(attention(&x, &x, &x, 0.1, mask)?);
        let Counted { result, counters } = under(Attention::Required, run);
        match path {
            Some(path) => {
                failures.take(result, at);
                let counted = path.counted(false, &counters.attention);
                failures.check(counted, || format!("{}: counted {:?}", at(), counters.attention));
            }
            None => {
                let said = result.err().map(|error| error.to_string()).unwrap_or_default();
                failures.check(said.contains("allows no fallback"), || format!("{}: `{said}`", at()));
                let AttentionCounters { dispatched, fused, products, .. } = counters.attention;
                let (ran, fell_back) = (dispatched + fused + products, counters.attention.fallback_total());
                failures.check((ran, fell_back) == (0, 1), || format!("{}: {:?}", at(), counters.attention));
            }
        }
    }
    failures.finish(suite)
}
