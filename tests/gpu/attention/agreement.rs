//! Every path against f64, in every kind of memory.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fork::{AttentionMask, attention, cudnn_policy::Attention};
use tests::gpu::{Counted, DTYPES, Failures, Placement, cuda, noise, poison, relative_error, seed, values};

use crate::{CASES, Case, Kernel, MASKS, Reference, bits, cudnn_serves, under};

#[test]
fn every_path_agrees_with_f64() -> Result<()> {
    let suite = "gpu_attention";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let policies =
        if cudnn_serves(suite, &device)? { &[Attention::Math, Attention::Auto][..] } else { &[Attention::Math] };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (i, case) in CASES.into_iter().enumerate() {
        let Case([batch, q_len, k_len, heads, _, width]) = case;
        for dtype in DTYPES {
            for mask in MASKS {
                if mask == AttentionMask::Causal && q_len > k_len {
                    continue;
                }
                let reference = Reference::new(case, dtype, mask, seed + 10 * i as u64)?;
                let small = q_len * k_len <= 50_000 && width <= 128;
                for &attention in policies {
                    // Every layout of every shape is a kernel that cuDNN compiles for half a second and longer.
                    let placements = match attention {
                        Attention::Math if small => &Placement::ALL[..],
                        Attention::Math => &[Placement::Contiguous, Placement::Frames],
                        _ if (i % 2 == 0) == (dtype == DType::BF16) => &[Placement::Contiguous, Placement::Frames],
                        _ => &[],
                    };
                    for &placement in placements {
                        let at = || format!("{case:?} {dtype:?} {mask:?} {attention:?} {placement:?}");
                        let operands = reference.on(&device, |t| placement.place(t))?;
                        poison(&device, batch * q_len * heads * width * dtype.size_in_bytes())?;
                        let Counted { result, counters } = under(attention, || reference.run(&operands));
                        let Some(got) = failures.take(result, at) else { continue };
                        failures.check(got.is_contiguous() && got.dtype() == dtype, || format!("{}: form", at()));
                        let error = relative_error(&values(&got)?, &reference.exact);
                        let bound = reference.bound();
                        failures.check(error <= bound, || {
                            format!("{}: error {error:.2e}, allowed {bound:.2e}, plain {:.2e}", at(), reference.plain)
                        });
                        let (path, fell_back) = match attention {
                            Attention::Math => (Kernel::own(dtype, width), false),
                            _ => Kernel::auto(dtype, width, mask),
                        };
                        let counted = path.counted(fell_back, &counters.attention);
                        failures.check(counted, || format!("{}: {path:?}, counted {:?}", at(), counters.attention));
                        if placement == Placement::Contiguous {
                            let again = failures.take(under(attention, || reference.run(&operands)).result, at);
                            let same = again.map_or(Ok(false), |again| anyhow::Ok(bits(&again)? == bits(&got)?))?;
                            failures.check(same, || format!("{}: another run gives other bytes", at()));
                        }
                    }
                }
            }
        }
    }
    failures.finish(suite)
}

/// The step of a picture of 1024 x 1024, and one with a picture to refer to: some queries of some heads are compared.
#[test]
fn large_pictures_agree_with_f64() -> Result<()> {
    let suite = "gpu_attention of large pictures";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let policies =
        if cudnn_serves(suite, &device)? { &[Attention::Math, Attention::Required][..] } else { &[Attention::Math] };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (tokens, heads, width, dtype) in
        [(4608, 24, 128, DType::BF16), (8704, 32, 128, DType::F16), (16_384, 1, 512, DType::BF16)]
    {
        // One projection of all three, as a block of a transformer has it.
        device.set_seed(seed)?;
        let on_device = Tensor::randn(0f32, 1.0, (1, tokens, 3, heads, width), &device)?.to_dtype(dtype)?;
        let projected = on_device.to_device(&Device::Cpu)?;
        let part = |t: &Tensor, i: usize| -> Result<Tensor> { Ok(t.narrow(2, i, 1)?.squeeze(2)?) };
        let parts = |t: &Tensor| -> Result<[Tensor; 3]> { Ok([part(t, 0)?, part(t, 1)?, part(t, 2)?]) };
        let (operands, host) = (parts(&on_device)?, parts(&projected)?);
        let scale = (width as f32).powf(-0.5);
        for &attention_policy in policies {
            if attention_policy == Attention::Required && width > 256 {
                continue;
            }
            let at = || format!("{tokens} tokens, {heads} heads of {width} {dtype:?} {attention_policy:?}");
            poison(&device, tokens * heads * width * 2)?;
            let [q, k, v] = &operands;
            let run = || Ok(attention(q, k, v, scale, AttentionMask::Full)?);
            let Counted { result, counters } = under(attention_policy, run);
            let Some(got) = failures.take(result, at) else { continue };
            let got = got.to_device(&Device::Cpu)?;
            let path = if attention_policy == Attention::Math { Kernel::own(dtype, width) } else { Kernel::Cudnn };
            let counted = path.counted(false, &counters.attention);
            failures.check(counted, || format!("{}: counted {:?}", at(), counters.attention));
            for (head, query) in [(0, 0), (heads / 2, tokens / 2 - 7), (heads - 1, tokens - 16)] {
                let of = |t: &Tensor| t.narrow(2, head, 1).and_then(|t| t.contiguous());
                let [q, k, v] = [of(&host[0].narrow(1, query, 16)?)?, of(&host[1])?, of(&host[2])?];
                let reference = Reference::of([q, k, v], scale, AttentionMask::Full)?;
                let error = relative_error(&values(&of(&got.narrow(1, query, 16)?)?)?, &reference.exact);
                let bound = reference.bound();
                failures.check(error <= bound, || {
                    format!("{}: head {head}, from query {query} on: error {error:.2e}, allowed {bound:.2e}", at())
                });
            }
        }
    }
    failures.finish(suite)
}

/// Scores of hundreds, tiny ones, equal ones, a NaN: the running maximum at work.
#[test]
fn hard_values() -> Result<()> {
    let suite = "gpu_attention of hard values";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for dtype in [DType::BF16, DType::F16] {
        for (name, q_scale, k_scale) in [("sharp", 6.0, 6.0), ("flat", 1e-3, 1e-3), ("equal", 0.0, 1.0)] {
            let of = |i: u64, scale, len| noise(seed + i, scale, &[1, len, 2, 128], dtype);
            let operands = [of(0, q_scale, 150)?, of(1, k_scale, 400)?, of(2, 1.0, 400)?];
            let reference = Reference::of(operands, 0.0883, AttentionMask::Full)?;
            let got = reference.run(&reference.on(&device, |t| Ok(t.clone()))?)?;
            // A score near 500 is off by a few ulps of f32, which become the weight's relative error.
            let (error, bound) = (relative_error(&values(&got)?, &reference.exact), reference.bound() + 2e-4);
            failures.check(error <= bound, || format!("{name} {dtype:?}: error {error:.2e}, allowed {bound:.2e}"));
        }
        // One NaN in a query makes that query's result NaN and no other.
        let of = |i: u64, len| noise(seed + i, 1.0, &[1, len, 1, 64], dtype);
        let (q, k) = (of(0, 150)?.to_device(&device)?, of(1, 200)?.to_device(&device)?);
        let nan = Tensor::full(f32::NAN, (1, 1, 1, 64), &device)?.to_dtype(dtype)?;
        let poisoned = Tensor::cat(&[&q.narrow(1, 0, 70)?, &nan, &q.narrow(1, 71, 79)?], 1)?;
        let got = values(&attention(&poisoned, &k, &k, 0.125, AttentionMask::Full)?)?;
        let right = got.chunks(64).enumerate().all(|(i, row)| row.iter().all(|x| x.is_nan() == (i == 70)));
        failures.check(right, || format!("{dtype:?}: NaN of query 70 alone is not where it should be"));
        // Negative and zero scales have another kernel, and the same formula.
        for scale in [-0.2, 0.0] {
            let reference = Reference::of([of(0, 30)?, of(1, 50)?, of(2, 50)?], scale, AttentionMask::Causal)?;
            let run = || reference.run(&reference.on(&device, |t| Ok(t.clone()))?);
            let Counted { result, counters } = under(Attention::Math, run);
            let (error, bound) = (relative_error(&values(&result?)?, &reference.exact), reference.bound());
            failures.check(error <= bound, || format!("scale {scale} {dtype:?}: {error:.2e}, allowed {bound:.2e}"));
            failures.check(counters.attention.products == 1, || format!("scale {scale}: {:?}", counters.attention));
        }
    }
    failures.finish(suite)
}
