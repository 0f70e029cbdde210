//! Heads and a feed-forward branch in one product: the kernel against the same ops in f32, and against those it replaces.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    HeadNorm, LinearWeight,
    cuda::paths::{Path, taken},
    linear, projection,
    projection::{heads_and_swiglu_into, linear_swiglu},
    qk_norm_rope, swiglu,
};
use tests::gpu::{Failures, cuda, noise, poison, seed};

/// Components of a head.
const WIDTH: usize = 128;

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    batch: usize,
    tokens: usize,
    depth: usize,
    heads: usize,
    mlp: usize,
    /// Whether the kernel takes it on a device of 132 multiprocessors.
    served: bool,
}

const fn case(dtype: DType, [batch, tokens, depth, heads, mlp]: [usize; 5], served: bool) -> Case {
    Case { dtype, batch, tokens, depth, heads, mlp, served }
}

const CASES: [Case; 11] = [
    case(DType::BF16, [1, 1536, 3072, 24, 9216], true),
    case(DType::F16, [1, 1536, 3072, 24, 9216], true),
    case(DType::BF16, [1, 4608, 3072, 24, 9216], true),
    // Two items in a tile, a ragged last tile, few steps, many rows.
    case(DType::BF16, [2, 750, 3072, 24, 9216], true),
    case(DType::BF16, [3, 767, 64, 24, 9216], true),
    case(DType::F16, [1, 8448, 1152, 4, 1024], true),
    // Tiles that would leave the device idle, heads or depths that are no whole tiles, f32.
    case(DType::BF16, [1, 1100, 3072, 24, 9216], false),
    case(DType::BF16, [2, 1100, 3072, 24, 9216], false),
    case(DType::BF16, [1, 1536, 3072, 23, 9216], false),
    case(DType::BF16, [1, 1536, 3080, 24, 9216], false),
    case(DType::F32, [1, 300, 256, 2, 256], false),
];

/// What an op is given.
struct Operands {
    x: Tensor,
    weight: Tensor,
    norms: [Tensor; 2],
    tables: [Tensor; 2],
}

impl Operands {
    fn new(case: &Case, seed: u64, device: &Device) -> Result<Self> {
        let Case { dtype, batch, tokens, depth, heads, mlp, .. } = *case;
        let rows = 3 * heads * WIDTH + 2 * mlp;
        // Parts of one supply of noise, whose length no row's is a divisor of.
        let supply = noise(seed, 1.0, &[(1 << 20) + 7], DType::F32)?.to_device(device)?;
        let of = |step: usize, scale: f64, dims: &[usize], dtype| -> Result<Tensor> {
            let count: usize = dims.iter().product();
            let first = step * 7919;
            let pieces = vec![supply.clone(); (first + count).div_ceil(supply.elem_count())];
            let values = Tensor::cat(&pieces, 0)?.narrow(0, first, count)?;
            Ok((values * scale)?.to_dtype(dtype)?.reshape(dims)?)
        };
        let angles = noise(seed + 4, 3.0, &[tokens, WIDTH / 2], DType::F32)?;
        Ok(Self {
            x: of(0, 1.0, &[batch, tokens, depth], dtype)?,
            weight: of(1, 1.0 / (depth as f64).sqrt(), &[rows, depth], dtype)?,
            norms: [of(2, 1.0, &[WIDTH], dtype)?, of(3, 1.0, &[WIDTH], DType::F32)?],
            tables: [angles.cos()?.to_device(device)?, angles.sin()?.to_device(device)?],
        })
    }

    fn widened(&self) -> Result<Self> {
        let wide = |t: &Tensor| t.to_dtype(DType::F32);
        let [query, key] = &self.norms;
        Ok(Self {
            x: wide(&self.x)?,
            weight: wide(&self.weight)?,
            norms: [wide(query)?, wide(key)?],
            tables: self.tables.clone(),
        })
    }

    fn norm(&self, tokens: usize) -> HeadNorm<'_> {
        HeadNorm { tokens, query: &self.norms[0], key: &self.norms[1] }
    }

    /// Query, key, value and branch, op by op.
    fn composed(&self, case: &Case) -> Result<[Tensor; 4]> {
        let (h, [cos, sin]) = (case.heads * WIDTH, &self.tables);
        let z = linear(&self.x, &LinearWeight::from_tensor(self.weight.clone())?, None)?;
        let (q, k) = qk_norm_rope(&z, case.heads, &[self.norm(case.tokens)], cos, sin, 1e-6)?;
        Ok([q, k, z.narrow(2, 2 * h, h)?, swiglu(&z.narrow(2, 3 * h, 2 * case.mlp)?)?])
    }

    /// The same by the op, into columns of a poisoned buffer, and that buffer.
    fn fused(&self, case: &Case) -> Result<([Tensor; 4], Tensor)> {
        let Case { dtype, batch, tokens, heads, mlp, .. } = *case;
        let [cos, sin] = &self.tables;
        let joined = Tensor::full(f32::NAN, (batch, tokens, 64 + mlp + 8), self.x.device())?.to_dtype(dtype)?;
        let branch = joined.narrow(2, 64, mlp)?;
        let of = projection::Heads { count: heads, norm: self.norm(tokens), cos, sin, eps: 1e-6 };
        let weight = LinearWeight::from_tensor(self.weight.clone())?;
        let [q, k, v] = heads_and_swiglu_into(&self.x, &weight, &of, &branch)?;
        Ok(([q, k, v, branch], joined))
    }
}

#[test]
fn results_are_those_of_the_ops() -> Result<()> {
    let suite = "gpu_projection";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for case in CASES {
        let at = |what: &str| format!("{what}, {case:?}");
        let operands = Operands::new(&case, seed, &device)?;
        let exact = operands.widened()?.composed(&case)?.map(|t| t.contiguous());
        let exact = exact.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        let one_by_one = operands.composed(&case)?;
        let before = taken(Path::Projection);
        let Some((got, joined)) = failures.take(operands.fused(&case), || at("the op")) else { continue };
        let ran = taken(Path::Projection) - before;
        failures.check(ran == u64::from(case.served), || at(&format!("the kernel ran {ran} times")));
        for (name, ((got, exact), ops)) in
            ["query", "key", "value", "branch"].into_iter().zip(got.iter().zip(&exact).zip(&one_by_one))
        {
            let (error, reference) = (error(got, exact)?, error(ops, exact)?);
            println!("{}: {error:.2e}, op by op {reference:.2e}", at(name));
            let most = if case.served { bound(case.dtype) } else { reference * 1.0001 + 1e-12 };
            failures.check(error <= most && error <= reference * 1.01 + 1e-9, || {
                at(&format!("{name}: {error:.2e}, op by op {reference:.2e}"))
            });
        }
        let rest = [joined.narrow(2, 0, 64)?, joined.narrow(2, 64 + case.mlp, 8)?];
        for rest in rest {
            failures
                .check(differing(&rest, &rest)? == rest.elem_count(), || at("columns beside the branch are written"));
        }
        let again = operands.fused(&case)?.0;
        for (one, other) in got.iter().zip(&again) {
            failures.check(differing(one, other)? == 0, || at("another run has other bits"));
        }
    }
    failures.finish(suite)
}

/// A token's bits depend on nothing but the token.
#[test]
fn an_item_is_what_it_is_alone() -> Result<()> {
    let suite = "gpu_projection, items";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let both = case(DType::BF16, [2, 1536, 3072, 24, 9216], true);
    let alone = Case { batch: 1, ..both };
    let operands = Operands::new(&both, seed(suite), &device)?;
    let (together, _) = operands.fused(&both)?;
    for item in 0..2 {
        let part = Operands { x: operands.x.narrow(0, item, 1)?.contiguous()?, ..clone(&operands) };
        let before = taken(Path::Projection);
        let (own, _) = part.fused(&alone)?;
        failures.check(taken(Path::Projection) == before + 1, || "the kernel did not run".to_owned());
        for (own, all) in own.iter().zip(&together) {
            let alike = differing(own, &all.narrow(0, item, 1)?)? == 0;
            failures.check(alike, || format!("item {item} has other bits"));
        }
    }
    failures.finish(suite)
}

/// Places that copies in boxes cannot reach: op by op, and right.
#[test]
fn a_branch_at_an_odd_place() -> Result<()> {
    let suite = "gpu_projection, odd places";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let case = CASES[0];
    let operands = Operands::new(&case, seed(suite), &device)?;
    let ([_, _, _, want], [cos, sin]) = (operands.composed(&case)?, &operands.tables);
    let weight = LinearWeight::from_tensor(operands.weight.clone())?;
    let heads = projection::Heads { count: case.heads, norm: operands.norm(case.tokens), cos, sin, eps: 1e-6 };
    for (start, rest) in [(3, 5), (8, 1)] {
        let wide = Tensor::full(f32::NAN, (1, case.tokens, start + case.mlp + rest), &device)?.to_dtype(case.dtype)?;
        let branch = wide.narrow(2, start, case.mlp)?;
        let before = taken(Path::Projection);
        let result = heads_and_swiglu_into(&operands.x, &weight, &heads, &branch);
        let at = || format!("column {start} of {}", start + case.mlp + rest);
        if failures.take(result, at).is_some() {
            failures.check(taken(Path::Projection) == before, || format!("{}: the kernel ran", at()));
            failures.check(differing(&branch, &want)? == 0, || format!("{}: other bits than op by op", at()));
        }
    }
    failures.finish(suite)
}

/// Streams of their own weights in one launch; an item's bits are those that it has alone.
#[test]
fn branches_of_two_streams() -> Result<()> {
    let suite = "gpu_projection, streams";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    // Batch, tokens of each stream, depth, width of the branch; whether the kernel takes them.
    for (dtype, batch, tokens, depth, mlp, served) in [
        (DType::BF16, 1, [1024, 512], 3072, 9216, true),
        (DType::F16, 2, [1020, 510], 1152, 9216, true),
        (DType::BF16, 1, [4096, 77], 192, 6144, true),
        (DType::BF16, 1, [256, 512], 3072, 9216, false),
        (DType::BF16, 1, [1024, 512], 3080, 9216, false),
        (DType::F32, 1, [300, 200], 256, 256, false),
    ] {
        let at = |what: &str| format!("{what}, {dtype:?}, {batch} of {tokens:?} tokens, {depth} to {mlp}");
        let tensor = |i: u64, scale: f32, dims: &[usize], dtype| -> Result<Tensor> {
            Ok(noise(seed + i, scale, dims, dtype)?.to_device(&device)?)
        };
        let xs =
            [tensor(0, 1.0, &[batch, tokens[0], depth], dtype)?, tensor(1, 1.0, &[batch, tokens[1], depth], dtype)?];
        let scale = (depth as f32).powf(-0.5);
        let matrices = [tensor(2, scale, &[2 * mlp, depth], dtype)?, tensor(3, scale, &[2 * mlp, depth], dtype)?];
        let run = |xs: &[Tensor; 2]| -> Result<[Tensor; 2]> {
            let [a, b] = [0, 1].map(|i| LinearWeight::from_tensor(matrices[i].clone()));
            Ok(linear_swiglu([(&xs[0], &a?), (&xs[1], &b?)])?)
        };
        poison(&device, batch * tokens[0] * mlp * 2)?;
        let before = taken(Path::Projection);
        let Some(got) = failures.take(run(&xs), || at("the op")) else { continue };
        let ran = taken(Path::Projection) - before;
        failures.check(ran == u64::from(served), || at(&format!("the kernel ran {ran} times")));
        for (i, got) in got.iter().enumerate() {
            let [x, matrix] = [&xs[i], &matrices[i]].map(|t| t.to_dtype(DType::F32));
            let exact = swiglu(&linear(&x?, &LinearWeight::from_tensor(matrix?)?, None)?)?;
            let ops = swiglu(&linear(&xs[i], &LinearWeight::from_tensor(matrices[i].clone())?, None)?)?;
            let (error, reference) = (error(got, &exact)?, error(&ops, &exact)?);
            println!("{}: {error:.2e}, op by op {reference:.2e}", at("error"));
            let most = if served { bound(dtype) } else { reference * 1.0001 + 1e-12 };
            failures.check(error <= most, || at(&format!("stream {i}: {error:.2e}, op by op {reference:.2e}")));
        }
        for item in 0..batch {
            let [a, b] = xs.each_ref().map(|x| x.narrow(0, item, 1).and_then(|x| x.contiguous()));
            for (alone, all) in run(&[a?, b?])?.iter().zip(&got) {
                let same = differing(alone, &all.narrow(0, item, 1)?)? == 0;
                failures.check(same, || at(&format!("item {item} has other bits alone")));
            }
        }
    }
    failures.finish(suite)
}

#[test]
fn bad_operands_are_refused() -> Result<()> {
    let suite = "gpu_projection, bad operands";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let case = CASES[0];
    let good = Operands::new(&case, 1, &device)?;
    let short = |t: &Tensor| t.narrow(0, 0, case.tokens - 1);
    let bad = [
        (
            "a table of fewer tokens",
            Operands { tables: [short(&good.tables[0])?, good.tables[1].clone()], ..clone(&good) },
        ),
        (
            "a table of f64",
            Operands { tables: [good.tables[0].to_dtype(DType::F64)?, good.tables[1].clone()], ..clone(&good) },
        ),
        (
            "a norm of other width",
            Operands { norms: [good.norms[0].clone(), good.norms[1].narrow(0, 0, 64)?], ..clone(&good) },
        ),
    ];
    for (what, operands) in bad {
        failures.check(operands.fused(&case).is_err(), || format!("{what} is taken"));
    }
    let weight = LinearWeight::from_tensor(good.weight.narrow(0, 0, 2 * case.mlp)?)?;
    let narrow = good.x.narrow(2, 0, 1536)?.contiguous()?;
    let mixed = linear_swiglu([(&good.x, &weight), (&narrow, &weight)]);
    failures.check(mixed.is_err(), || "a second x of another width is taken".to_owned());
    let whole = Tensor::zeros((1, case.tokens, case.mlp), case.dtype, &device)?;
    let [cos, sin] = &good.tables;
    let of = projection::Heads { count: case.heads, norm: good.norm(case.tokens), cos, sin, eps: f64::NAN };
    let weight = LinearWeight::from_tensor(good.weight.clone())?;
    failures.check(heads_and_swiglu_into(&good.x, &weight, &of, &whole).is_err(), || "eps NaN is taken".to_owned());
    let inside = good.x.narrow(2, 0, 128).context("columns of x")?;
    let small = LinearWeight::from_tensor(good.weight.narrow(0, 0, 3 * case.heads * WIDTH + 256)?)?;
    let of = projection::Heads { eps: 1e-6, ..of };
    failures.check(heads_and_swiglu_into(&good.x, &small, &of, &inside).is_err(), || "x is overwritten".to_owned());
    failures.finish(suite)
}

fn clone(operands: &Operands) -> Operands {
    let Operands { x, weight, norms, tables } = operands;
    Operands { x: x.clone(), weight: weight.clone(), norms: norms.clone(), tables: tables.clone() }
}

/// Error of a result that is rounded once: a rounding of a bf16 is 1.7e-3 of a normal value, of an f16 2.1e-4.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.8e-3,
        DType::F16 => 2.3e-4,
        _ => 1e-5,
    }
}

/// Relative in the Euclidean norm.
fn error(got: &Tensor, want: &Tensor) -> Result<f64> {
    let square = |t: &Tensor| -> Result<f64> { Ok(f64::from(t.sqr()?.flatten_all()?.sum(0)?.to_scalar::<f32>()?)) };
    let got = got.contiguous()?.to_dtype(DType::F32)?.reshape(want.shape())?;
    Ok((square(&(got - want)?)? / square(want)?).sqrt())
}

/// Elements that are not equal; NaN is equal to nothing.
fn differing(a: &Tensor, b: &Tensor) -> Result<usize> {
    let [a, b] = [a, b].map(|t| t.contiguous().and_then(|t| t.to_dtype(DType::F32)));
    let count = a?.ne(&b?)?.to_dtype(DType::F32)?.flatten_all()?;
    // In parts, whose counts f32 holds.
    let parts = count.elem_count().div_ceil(1 << 20);
    let sums = (0..parts).map(|part| {
        let first = part << 20;
        count.narrow(0, first, (count.elem_count() - first).min(1 << 20))?.sum(0)?.to_scalar::<f32>()
    });
    Ok(sums.collect::<candle_core::Result<Vec<_>>>()?.into_iter().map(|sum| sum as usize).sum())
}
