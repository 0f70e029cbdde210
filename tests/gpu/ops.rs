//! Every op but convolution on the GPU against the same op on the CPU: dtypes, kinds of memory, odd sizes.
//!
//! The CPU ops are held to f64 by their own tests. In f32 the two differ by a few roundings. In half precision each is
//! compared with the f32 result of the same rounded inputs: an op that rounds once is no further from it than the CPU's.

#[cfg(feature = "cuda")]
mod ops_frames;
#[cfg(feature = "cuda")]
mod ops_fused;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    Activation, AttentionMask, LinearWeight, attention, channel_rms_norm, channel_rms_norm_after,
    frames::{
        PatchOrder, avg_down_add, cat_frames, dup_up_add, frames_to_rgb8, patchify, split_pairs, tail_frames,
        unpatchify,
    },
    gate_residual, group_norm, interleave2d, layer_norm, layer_norm_modulate, layout, linear,
    norm::channel_rms_norm_with_tail,
    residual, rms_norm, rope_half, rope_interleaved, silu, swiglu, upsample_nearest,
};
use tests::gpu::{
    DTYPES, Failures, Placement, WINDOW, cuda, huge, noise, poison, relative_error, seed, values, window,
};

/// Largest relative error in f32.
const F32: f64 = 2e-6;
/// In half precision, errors in units of the CPU op's, which is that of one rounding.
const ROUNDINGS: f64 = 1.1;

/// Where an operand's values lie and how they are typed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Role {
    /// Of the tested dtype and placement.
    Main,
    /// Of the tested dtype, contiguous.
    Plain,
    /// f32, contiguous, about 1.
    Scale,
    /// f32, contiguous, about 0.
    Table,
}

type Call = Box<dyn Fn(&[Tensor]) -> candle_fork::Result<Tensor>>;

/// One op with the shapes of its operands.
struct Op {
    name: String,
    operands: Vec<(Role, Vec<usize>)>,
    call: Call,
    /// Whether the result has the memory order of the first operand; else it is contiguous.
    keeps_order: bool,
    /// Largest error in f32.
    bound: f64,
    roundings: f64,
    /// Added to the main operands.
    mean: f32,
}

impl Op {
    fn new<const N: usize>(
        name: impl Into<String>,
        operands: [(Role, &[usize]); N],
        call: impl Fn(&[Tensor; N]) -> candle_fork::Result<Tensor> + 'static,
    ) -> Self {
        let shapes = operands.iter().map(|(_, dims)| format!("{dims:?}")).collect::<Vec<_>>().join(" ");
        Self {
            name: format!("{} {shapes}", name.into()),
            operands: operands.iter().map(|&(role, dims)| (role, dims.to_vec())).collect(),
            call: Box::new(move |tensors| match <&[Tensor; N]>::try_from(tensors) {
                Ok(tensors) => call(tensors),
                Err(_) => unreachable!("as many tensors as operands"),
            }),
            keeps_order: false,
            bound: F32,
            roundings: ROUNDINGS,
            mean: 0.0,
        }
    }

    fn keeps_order(self) -> Self {
        Self { keeps_order: true, ..self }
    }

    /// Elements are copied.
    fn exact(self) -> Self {
        Self { bound: 0.0, roundings: 0.0, ..self }
    }

    fn bound(self, bound: f64) -> Self {
        Self { bound, ..self }
    }

    fn mean(self, mean: f32) -> Self {
        Self { mean, ..self }
    }

    /// Operands on the CPU.
    fn tensors(&self, dtype: DType, seed: u64) -> Result<Vec<Tensor>> {
        let tensor = |(i, (role, dims)): (usize, &(Role, Vec<usize>))| {
            let seed = seed + i as u64;
            let shifted = |mean: f32, scale: f32, dtype: DType| -> Result<Tensor> {
                Ok((noise(seed, scale, dims, DType::F32)? + f64::from(mean))?.to_dtype(dtype)?)
            };
            match role {
                Role::Main => shifted(self.mean, 1.0, dtype),
                Role::Plain => shifted(0.0, 1.0, dtype),
                Role::Scale => shifted(1.0, 0.3, DType::F32),
                Role::Table => shifted(0.0, 0.5, DType::F32),
            }
        };
        self.operands.iter().enumerate().map(tensor).collect()
    }

    fn check(&self, dtype: DType, seed: u64, device: &Device, failures: &mut Failures) -> Result<()> {
        let host = self.tensors(dtype, seed)?;
        let wide = host.iter().map(|t| t.to_dtype(DType::F32)).collect::<candle_core::Result<Vec<_>>>()?;
        let want = values(&(self.call)(&wide)?)?;
        let bound = match dtype {
            DType::F32 => self.bound,
            _ => self.roundings * relative_error(&values(&(self.call)(&host)?)?, &want) + self.bound,
        };
        for placement in Placement::ALL {
            let at = || format!("{} {dtype:?} {placement:?}", self.name);
            let place = |(t, (role, _)): (&Tensor, &(Role, Vec<usize>))| -> Result<Tensor> {
                let place = *role == Role::Main && t.rank() >= 3;
                Ok(if place { placement.place(t)? } else { t.clone() }.to_device(device)?)
            };
            let placed = host.iter().zip(&self.operands).map(place).collect::<Result<Vec<_>>>()?;
            poison(device, want.len() * dtype.size_in_bytes())?;
            let Some(got) = failures.take((self.call)(&placed), at) else { continue };
            failures.check(got.dtype() == dtype, || format!("{}: {:?}", at(), got.dtype()));
            let error = relative_error(&values(&got)?, &want);
            failures.check(error <= bound, || format!("{}: error {error:.2e}, allowed {bound:.2e}", at()));
            let last = self.keeps_order && layout::memory_order(&placed[0]) == layout::MemoryOrder::ChannelsLast;
            let ordered = if last { layout::is_channels_last(&got) } else { got.is_contiguous() };
            failures.check(ordered, || format!("{}: strides {:?}", at(), got.stride()));
        }
        Ok(())
    }
}

fn run(suite: &str, ops: Vec<Op>) -> Result<()> {
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (i, op) in ops.iter().enumerate() {
        for dtype in DTYPES {
            op.check(dtype, seed + 10 * i as u64, &device, &mut failures)?;
        }
    }
    failures.finish(suite)
}

/// Tensors `[N, C, ..]`: channels of the models and odd ones, extents around the sizes of blocks.
const FIELDS: [&[usize]; 12] = [
    &[1, 1, 1],
    &[2, 3, 7],
    &[1, 96, 33],
    &[1, 3, 5, 9],
    &[2, 16, 8, 8],
    &[1, 98, 7, 11],
    &[1, 512, 3, 5],
    &[1, 3, 2, 5, 6],
    &[1, 96, 3, 7, 10],
    &[2, 192, 2, 3, 5],
    &[1, 384, 1, 6, 9],
    &[1, 1030, 2, 2, 3],
];

/// Tensors `[B, S, H]`.
const ROWS: [&[usize]; 8] =
    [&[1, 1, 1], &[1, 1, 2], &[2, 3, 7], &[1, 5, 96], &[2, 7, 130], &[1, 3, 1024], &[1, 33, 3072], &[2, 2, 4098]];

#[test]
fn norms_over_channels() -> Result<()> {
    let mut ops = Vec::new();
    for dims in FIELDS {
        let (c, channel) = (dims[1], &dims[1..2]);
        for activation in [Activation::None, Activation::Silu] {
            let name = format!("channel_rms_norm {activation:?}");
            ops.push(
                Op::new(name, [(Role::Main, dims), (Role::Scale, channel)], move |[x, gamma]| {
                    channel_rms_norm(x, gamma, activation)
                })
                .keeps_order(),
            );
            for groups in [1, 2, 3, 4, 32].into_iter().filter(|groups| c.is_multiple_of(*groups)) {
                let name = format!("group_norm {groups} {activation:?}");
                let operands = [(Role::Main, dims), (Role::Scale, channel), (Role::Table, channel)];
                ops.push(
                    Op::new(name, operands, move |[x, weight, bias]| {
                        group_norm(x, weight, bias, groups, 1e-6, activation)
                    })
                    .keeps_order(),
                );
            }
        }
        let mut past = dims.to_vec();
        past[2] = 2;
        let operands = [(Role::Main, dims), (Role::Main, &past[..]), (Role::Scale, channel)];
        ops.push(
            Op::new("channel_rms_norm_after", operands, |[x, past, gamma]| {
                channel_rms_norm_after(Some(past), x, gamma, Activation::Silu)
            })
            .keeps_order(),
        );
        if dims.len() == 5 {
            for keep in [1, 2] {
                let op = Op::new("channel_rms_norm_with_tail", operands, move |[x, past, gamma]| {
                    channel_rms_norm_with_tail(Some(past), x, gamma, Activation::Silu, keep).map(|(_, tail)| tail)
                });
                ops.push(op.keeps_order());
            }
        }
    }
    run("norms over channels", ops)
}

/// A large mean must not cost digits: E[x^2] - E[x]^2 in f32 would lose them all.
#[test]
fn norms_of_a_large_mean() -> Result<()> {
    const MEAN: f32 = 1000.0;
    // The inputs themselves have 1e-4 of the deviation as their last digit, and the CPU's statistics are in f64.
    const BOUND: f64 = 2e-5;
    let field: &[usize] = &[1, 32, 40, 41];
    let rows: &[usize] = &[2, 5, 3072];
    let ops = vec![
        Op::new("group_norm", [(Role::Main, field), (Role::Scale, &[32]), (Role::Table, &[32])], |[x, w, b]| {
            group_norm(x, w, b, 4, 1e-6, Activation::None)
        })
        .keeps_order()
        .mean(MEAN)
        .bound(BOUND),
        Op::new("layer_norm", [(Role::Main, rows), (Role::Scale, &[3072]), (Role::Table, &[3072])], |[x, w, b]| {
            layer_norm(x, Some(w), Some(b), 1e-6)
        })
        .mean(MEAN)
        .bound(BOUND),
    ];
    run("norms of a large mean", ops)
}

#[test]
fn norms_over_rows() -> Result<()> {
    let mut ops = Vec::new();
    for dims in ROWS {
        let (row, batch) = (&dims[2..], &[dims[0], dims[2]][..]);
        ops.push(Op::new("rms_norm", [(Role::Main, dims), (Role::Scale, row)], |[x, w]| rms_norm(x, w, 1e-6)));
        ops.push(Op::new("layer_norm", [(Role::Main, dims), (Role::Scale, row), (Role::Table, row)], |[x, w, b]| {
            layer_norm(x, Some(w), Some(b), 1e-5)
        }));
        ops.push(Op::new("layer_norm without weights", [(Role::Main, dims)], |[x]| layer_norm(x, None, None, 1e-5)));
        let operands = [(Role::Main, dims), (Role::Table, batch), (Role::Plain, batch)];
        ops.push(Op::new("layer_norm_modulate", operands, |[x, shift, scale]| {
            layer_norm_modulate(x, shift, scale, 1e-6)
        }));
    }
    run("norms over rows", ops)
}

#[test]
fn activations_and_sums() -> Result<()> {
    let mut ops = Vec::new();
    for dims in FIELDS {
        ops.push(Op::new("silu", [(Role::Main, dims)], |[x]| silu(x)).keeps_order());
        ops.push(Op::new("residual", [(Role::Main, dims), (Role::Main, dims)], |[x, y]| residual(x, y)).keeps_order());
        ops.push(
            Op::new("residual, y plain", [(Role::Main, dims), (Role::Plain, dims)], |[x, y]| residual(x, y))
                .keeps_order(),
        );
    }
    for dims in ROWS {
        if dims[2].is_multiple_of(2) {
            ops.push(Op::new("swiglu", [(Role::Main, dims)], |[x]| swiglu(x)));
        }
        let operands = [(Role::Main, dims), (Role::Table, &[dims[0], dims[2]][..]), (Role::Main, dims)];
        ops.push(Op::new("gate_residual", operands, |[x, gate, y]| gate_residual(x, gate, y)));
    }
    run("activations and sums", ops)
}

#[test]
fn resampling() -> Result<()> {
    let mut ops = Vec::new();
    for dims in FIELDS {
        let op = match dims.len() {
            3 => Op::new("upsample 3", [(Role::Main, dims)], |[x]| upsample_nearest(x, [3])),
            4 => Op::new("upsample 2, 3", [(Role::Main, dims)], |[x]| upsample_nearest(x, [2, 3])),
            _ => Op::new("upsample 1, 2, 2", [(Role::Main, dims)], |[x]| upsample_nearest(x, [1, 2, 2])),
        };
        ops.push(op.keeps_order().exact());
        if dims.len() > 3 {
            let operands = [(Role::Main, dims); 4];
            ops.push(Op::new("interleave2d", operands, interleave2d).keeps_order().exact());
        }
    }
    run("resampling", ops)
}

#[test]
fn frames_of_a_video() -> Result<()> {
    let mut ops = Vec::new();
    for [n, c, t, h, w] in [[1, 1, 1, 2, 2], [2, 3, 3, 4, 6], [1, 16, 2, 6, 10], [1, 96, 4, 8, 6], [1, 98, 1, 4, 14]] {
        let x = &[n, c, t, h, w][..];
        let exact = |op: Op| op.keeps_order().exact();
        for past in [1, 2] {
            let operands = [(Role::Main, x), (Role::Main, &[n, c, past, h, w][..])];
            ops.push(exact(Op::new("cat_frames", operands, |[x, past]| cat_frames(past, x))));
            ops.push(exact(Op::new(format!("tail_frames {past}"), [(Role::Main, x)], move |[x]| tail_frames(x, past))));
        }
        let pairs = &[n, 2 * c, t, h, w][..];
        ops.push(exact(Op::new("split_pairs", [(Role::Main, pairs)], |[x]| split_pairs(x))));
        for order in [PatchOrder::ColumnMajor, PatchOrder::RowMajor] {
            let packed = &[n, 4 * c, t, h, w][..];
            ops.push(exact(Op::new(format!("patchify {order:?}"), [(Role::Main, x)], move |[x]| {
                patchify(x, 2, order)
            })));
            ops.push(exact(Op::new(format!("unpatchify {order:?}"), [(Role::Main, packed)], move |[x]| {
                unpatchify(x, 2, order)
            })));
        }
        // Channels in and out, and the frames of the main branch: all, or all but those before the start.
        for (b, ft, frames) in [(c, 1, t), (2 * c, 1, t), (c, 2, 2 * t), (c, 2, 2 * t - 1)] {
            let operands = [(Role::Main, &[n, b, frames, 2 * h, 2 * w][..]), (Role::Main, x)];
            let op = Op::new(format!("dup_up_add {ft}"), operands, move |[main, x]| dup_up_add(main, x, ft, 2));
            ops.push(op.keeps_order());
        }
        for (b, ft) in [(c, 1), (2 * c, 2), (2 * c, 1)] {
            let operands = [(Role::Main, &[n, b, t.div_ceil(ft), h / 2, w / 2][..]), (Role::Main, x)];
            let op = Op::new(format!("avg_down_add {ft}"), operands, move |[main, x]| avg_down_add(main, x, ft, 2));
            ops.push(op.keeps_order());
        }
    }
    run("frames of a video", ops)
}

#[test]
fn pixels_as_bytes() -> Result<()> {
    let suite = "pixels as bytes";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (channels, side) in [(1, 1), (3, 1), (4, 1), (3, 2), (4, 2), (3, 3)] {
        for order in [PatchOrder::ColumnMajor, PatchOrder::RowMajor] {
            for dtype in DTYPES {
                let x = noise(seed, 0.6, &[1, channels * side * side, 3, 5, 7], dtype)?;
                let bytes = |x: &Tensor| -> Result<(Vec<u8>, bool)> {
                    let frames = frames_to_rgb8(x, side, order)?;
                    Ok((frames.pixels().flatten_all()?.to_vec1()?, frames.all_finite()?))
                };
                let want = bytes(&x)?;
                let broken = Tensor::cat(&[&x, &Tensor::full(f32::NAN, x.dims(), x.device())?.to_dtype(dtype)?], 2)?;
                for placement in Placement::ALL {
                    let at = || format!("{channels} channels, side {side}, {order:?} {dtype:?} {placement:?}");
                    let on_device = |x: &Tensor| bytes(&placement.place(x)?.to_device(&device)?);
                    let got = failures.take(on_device(&x), at);
                    failures.check(got.is_none_or(|got| got == want), || format!("{}: other bytes", at()));
                    let got = failures.take(on_device(&broken), at);
                    failures.check(got.is_none_or(|(_, finite)| !finite), || format!("{}: NaN not noticed", at()));
                }
            }
        }
    }
    failures.finish(suite)
}

#[test]
fn rotary_embeddings() -> Result<()> {
    let mut ops = Vec::new();
    for [b, s, h, d] in [[1, 1, 1, 2], [2, 3, 5, 6], [1, 33, 24, 128], [2, 7, 3, 66], [1, 9, 2, 64]] {
        let (x, table) = (&[b, s, h, d][..], &[s, d / 2][..]);
        let operands = [(Role::Main, x), (Role::Table, table), (Role::Table, table)];
        ops.push(Op::new("rope_interleaved", operands, |[x, cos, sin]| rope_interleaved(x, cos, sin)));
        ops.push(Op::new("rope_half", operands, |[x, cos, sin]| rope_half(x, cos, sin)));
    }
    run("rotary embeddings", ops)
}

#[test]
fn attention_of_all_widths() -> Result<()> {
    let mut ops = Vec::new();
    for (batch, q_len, k_len, heads, kv_heads, width) in [
        (1, 1, 1, 1, 1, 8),
        (2, 7, 9, 4, 2, 16),
        (1, 33, 65, 3, 1, 40),
        (1, 130, 130, 2, 2, 64),
        (1, 257, 300, 4, 4, 128),
        (1, 90, 90, 1, 1, 384),
        (2, 35, 35, 1, 1, 1024),
        (1, 513, 1029, 2, 1, 64),
    ] {
        let scale = (width as f32).powf(-0.5);
        let (q, k) = (&[batch, q_len, heads, width][..], &[batch, k_len, kv_heads, width][..]);
        for mask in [AttentionMask::Full, AttentionMask::Causal] {
            let operands = [(Role::Main, q), (Role::Main, k), (Role::Main, k)];
            let op = Op::new(format!("attention {mask:?}"), operands, move |[q, k, v]| attention(q, k, v, scale, mask));
            // Weights may be rounded before they meet the values.
            ops.push(Op { roundings: 2.0, ..op.bound(1e-5) });
        }
    }
    run("attention", ops)
}

#[test]
fn linear_maps() -> Result<()> {
    let mut ops = Vec::new();
    for (dims, features) in [
        ([1, 1, 1], 1),
        ([1, 1, 256], 48),
        ([2, 7, 193], 65),
        ([1, 33, 512], 1536),
        ([1, 130, 3072], 96),
        ([3, 5, 130], 100),
    ] {
        // A bias of x's type is added by the product, any other one behind it.
        for (role, bias_role) in [(Role::Plain, Role::Plain), (Role::Plain, Role::Table), (Role::Table, Role::Table)] {
            let (weight, bias) = (&[features, dims[2]][..], &[features][..]);
            ops.push(
                Op::new(
                    format!("linear {role:?} {bias_role:?}"),
                    [(Role::Main, &dims[..]), (role, weight), (bias_role, bias)],
                    |[x, w, b]| linear(x, &LinearWeight::from_tensor(w.clone())?, Some(b)),
                )
                .bound(1e-5),
            );
        }
    }
    run("linear maps", ops)
}

#[test]
fn copies_between_memory_orders() -> Result<()> {
    let suite = "copies between memory orders";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for dims in FIELDS {
        for dtype in DTYPES {
            let x = noise(seed, 1.0, dims, dtype)?;
            for placement in Placement::ALL {
                let placed = placement.place(&x)?.to_device(&device)?;
                let at = || format!("{dims:?} {dtype:?} {placement:?}");
                poison(&device, x.elem_count() * dtype.size_in_bytes())?;
                let Some(last) = failures.take(layout::channels_last(&placed), at) else { continue };
                let Some(first) = failures.take(layout::contiguous(&placed), at) else { continue };
                failures
                    .check(layout::is_channels_last(&last) && first.is_contiguous(), || format!("{}: strides", at()));
                failures.check(values(&last)? == values(&x)?, || format!("{}: channels-last values", at()));
                failures.check(values(&first)? == values(&x)?, || format!("{}: row-major values", at()));
            }
        }
    }
    failures.finish(suite)
}

/// Elements beyond the reach of 32-bit indices, compared in windows at both ends and in the middle.
#[test]
fn more_elements_than_32_bits_count() -> Result<()> {
    type Local = fn(&Tensor) -> candle_fork::Result<Tensor>;
    let suite = "ops on more than 2^31 elements";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    // Each pixel of the result depends on the same pixel alone.
    let ops: [(&str, Local); 4] = [
        ("silu", silu),
        ("residual", |x| residual(x, x)),
        ("channel_rms_norm", |x| {
            let gamma = Tensor::ones(16, DType::F32, x.device())
                .map_err(|source| candle_fork::Error::Candle { what: "gamma", source: Box::new(source) })?;
            channel_rms_norm(x, &gamma, Activation::Silu)
        }),
        ("cat_frames", |x| cat_frames(x, x)),
    ];
    for dtype in [DType::F32, DType::BF16] {
        let (x, corners) = huge(dtype, &device)?;
        for (name, op) in ops {
            let Some(y) = failures.take(op(&x), || format!("{name} {dtype:?}")) else { continue };
            for corner in corners {
                let want = values(&op(&window(&x, corner, WINDOW)?)?)?;
                let error = relative_error(&values(&window(&y, corner, WINDOW)?)?, &want);
                let bound = if dtype == DType::F32 { F32 } else { 1e-3 };
                failures.check(error <= bound, || format!("{name} {dtype:?} at {corner:?}: error {error:.2e}"));
            }
        }
        let Some(y) = failures.take(upsample_nearest(&x, [1, 2, 2]), || format!("upsample {dtype:?}")) else {
            continue;
        };
        for corner in corners {
            let want = values(&upsample_nearest(&window(&x, corner, WINDOW)?, [1, 2, 2])?)?;
            let got = values(&window(&y, corner.map(|i| 2 * i), 2 * WINDOW)?)?;
            failures.check(got == want, || format!("upsample {dtype:?} at {corner:?}: other values"));
        }
    }
    failures.finish(suite)
}
