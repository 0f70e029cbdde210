//! Convolutions on the GPU against the definition in f64: every backend, dtype and kind of memory.
//!
//! The reference takes the inputs as rounded to the dtype, so that an error is the backend's own. Errors are relative in
//! the Euclidean norm. True f32 stays below 1e-6 here; a path through TF32 would show 3e-4.

mod cases;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    ConvParams,
    conv::{conv_nd, conv_nd_add, reference},
    cudnn_policy::{Backend, Policy, scope},
    layout::is_channels_last,
};
use rayon::prelude::*;
use tests::gpu::{
    Counted, DTYPES, Failures, Placement, WINDOW, cuda, cudnn, huge, noise, on, poison, relative_error, seed, values,
    window,
};

use cases::Case;

/// Largest error in f32.
const F32: f64 = 1e-5;
/// Largest error in half precision.
const HALF: f64 = 1e-2;
/// Largest error of cuDNN in half precision, in units of im2col's.
const TIMES_IM2COL: f64 = 2.0;
/// Results of fewer elements may all happen to be exact; there, an error of one rounding is allowed as well.
const FEW: usize = 64;

/// A case with its numbers, on the CPU.
struct Problem<const D: usize> {
    case: Case<D>,
    index: usize,
    dtype: DType,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    /// The convolution alone.
    want: Vec<f64>,
}

impl<const D: usize> Problem<D> {
    fn new(case: Case<D>, index: usize, dtype: DType, seed: u64) -> Result<Self> {
        let seed = seed + 10 * index as u64;
        let depth = case.weight_dims()[1..].iter().product::<usize>() as f32;
        let x = noise(seed, 1.0, &case.x_dims(), dtype)?;
        let weight = noise(seed + 1, depth.powf(-0.5), &case.weight_dims(), dtype)?;
        let want = values(&reference::conv_nd(&x, &weight, None, &case.params)?)?;
        let bias = noise(seed + 2, 0.5, &[case.k], dtype)?;
        let residual = noise(seed + 3, 1.0, &case.output_dims(), dtype)?;
        Ok(Self { case, index, dtype, x, weight, bias, residual, want })
    }

    /// The result with bias and residual added, or not.
    fn want(&self, with: With) -> Result<Vec<f64>> {
        let mut want = self.want.clone();
        if with.bias() {
            let bias = values(&self.bias)?;
            let pixels = want.len() / (self.case.n * self.case.k);
            want.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i / pixels % self.case.k]);
        }
        if with.residual() {
            want.iter_mut().zip(values(&self.residual)?).for_each(|(y, r)| *y += r);
        }
        Ok(want)
    }
}

/// What is added to the convolution.
#[derive(Debug, Clone, Copy)]
enum With {
    Nothing,
    Bias,
    Residual,
    Both,
}

impl With {
    const ALL: [Self; 4] = [Self::Both, Self::Bias, Self::Nothing, Self::Residual];

    fn bias(self) -> bool {
        matches!(self, Self::Bias | Self::Both)
    }

    fn residual(self) -> bool {
        matches!(self, Self::Residual | Self::Both)
    }
}

/// The placements of a case's input: packed both ways, and two of the others.
fn placements(index: usize) -> [Placement; 4] {
    const STRIDED: [Placement; 5] = [
        Placement::Transposed,
        Placement::Cut,
        Placement::Frames,
        Placement::ChannelsLastFrames,
        Placement::ChannelsLastCut,
    ];
    let strided = |i: usize| STRIDED[i % STRIDED.len()];
    [Placement::Contiguous, Placement::ChannelsLast, strided(index), strided(index + 2 + index / 5 % 2)]
}

/// Operands on the device and the call.
struct Call<'a, const D: usize> {
    problem: &'a Problem<D>,
    with: With,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    device: &'a Device,
}

impl<'a, const D: usize> Call<'a, D> {
    fn new(problem: &'a Problem<D>, placement: Placement, with: With, device: &'a Device) -> Result<Self> {
        const OTHERS: [Placement; 3] = [Placement::ChannelsLast, Placement::Contiguous, Placement::Transposed];
        let placed =
            |t: &Tensor, placement: Placement| -> Result<Tensor> { Ok(placement.place(t)?.to_device(device)?) };
        Ok(Self {
            problem,
            with,
            x: placed(&problem.x, placement)?,
            weight: placed(&problem.weight, OTHERS[problem.index % 3])?,
            bias: problem.bias.to_device(device)?,
            residual: placed(&problem.residual, OTHERS[problem.index / 3 % 3])?,
            device,
        })
    }

    /// Runs into poisoned memory.
    fn run(&self) -> Result<Tensor> {
        let bias = self.with.bias().then_some(&self.bias);
        let params = &self.problem.case.params;
        poison(self.device, self.problem.want.len() * self.problem.dtype.size_in_bytes())?;
        Ok(if self.with.residual() {
            conv_nd_add(&self.x, &self.weight, bias, &self.residual, params)?
        } else {
            conv_nd(&self.x, &self.weight, bias, params)?
        })
    }
}

/// Worst errors of a suite.
#[derive(Debug, Default)]
struct Worst([[f64; 2]; DTYPES.len()]);

impl Worst {
    fn note(&mut self, dtype: DType, backend: usize, error: f64) {
        let row = DTYPES.iter().position(|&d| d == dtype).unwrap_or(0);
        self.0[row][backend] = self.0[row][backend].max(error);
    }
}

fn suite<const D: usize>(name: &str, table: Vec<Case<D>>, random: usize) -> Result<()> {
    let Some(device) = cuda(name)? else { return Ok(()) };
    let has_cudnn = cudnn(name, &device)?;
    let seed = seed(name);
    let cases = [table, cases::random(seed, random)].concat();
    let count = cases.len();
    let mut all: Vec<(usize, Case<D>, DType)> =
        cases.into_iter().enumerate().flat_map(|(i, case)| DTYPES.map(|dtype| (i, case, dtype))).collect();
    all.sort_by_key(|(_, case, _)| std::cmp::Reverse(case.products()));
    let make = |&(index, case, dtype): &(usize, Case<D>, DType)| Problem::new(case, index, dtype, seed);
    let problems: Vec<Problem<D>> = all.par_iter().map(make).collect::<Result<_>>()?;

    let (mut failures, mut worst) = (Failures::default(), Worst::default());
    for problem in &problems {
        for (i, placement) in placements(problem.index).into_iter().enumerate() {
            let with = With::ALL[(problem.index + i) % 4];
            check(problem, placement, with, has_cudnn, &device, &mut failures, &mut worst)?;
        }
    }
    println!("{name}: {count} shapes; worst errors (im2col, cudnn)");
    for (dtype, [im2col, cudnn]) in DTYPES.iter().zip(worst.0) {
        println!("  {dtype:?}: {im2col:.2e} {cudnn:.2e}");
    }
    failures.finish(name)
}

/// One call on both backends.
fn check<const D: usize>(
    problem: &Problem<D>,
    placement: Placement,
    with: With,
    has_cudnn: bool,
    device: &Device,
    failures: &mut Failures,
    worst: &mut Worst,
) -> Result<()> {
    let Problem { case, dtype, .. } = problem;
    let at = |backend: &str| format!("{backend} {dtype:?} {placement:?} {with:?} {case:?}");
    let call = Call::new(problem, placement, with, device)?;
    let want = problem.want(with)?;
    let bound = if *dtype == DType::F32 { F32 } else { HALF };

    let Counted { result, counters } = on(Backend::Im2col, || call.run());
    let Some(y) = failures.take(result, || at("im2col")) else { return Ok(()) };
    let im2col = relative_error(&values(&y)?, &want);
    worst.note(*dtype, 0, im2col);
    failures.check(im2col <= bound, || format!("{}: error {im2col:.2e}", at("im2col")));
    failures.check(counters.dispatched == 0, || format!("{}: ran on cuDNN", at("im2col")));
    failures.check(y.dtype() == *dtype && y.dims() == case.output_dims(), || format!("{}: {y:?}", at("im2col")));
    let packed = |y: &Tensor| if *dtype == DType::F32 { y.is_contiguous() } else { is_channels_last(y) };
    failures.check(packed(&y), || format!("{}: strides {:?}", at("im2col"), y.stride()));

    if !has_cudnn {
        return Ok(());
    }
    let Counted { result, counters } = on(Backend::Required, || call.run());
    let Some(y) = failures.take(result, || at("cudnn")) else { return Ok(()) };
    let error = relative_error(&values(&y)?, &want);
    worst.note(*dtype, 1, error);
    let rounding = match dtype {
        DType::F16 if want.len() < FEW => 2f64.powi(-11),
        DType::BF16 if want.len() < FEW => 2f64.powi(-8),
        _ => 0.0,
    };
    let bound = if *dtype == DType::F32 { F32 } else { HALF.min(rounding.max(TIMES_IM2COL * im2col)) };
    failures.check(error <= bound, || format!("{}: error {error:.2e}, im2col {im2col:.2e}", at("cudnn")));
    let dispatched = u64::from(!case.is_pointwise());
    failures.check(counters.dispatched == dispatched, || format!("{}: {counters:?}", at("cudnn")));
    failures.check(y.dims() == case.output_dims() && packed(&y), || format!("{}: {y:?}", at("cudnn")));
    Ok(())
}

#[test]
fn one_axis() -> Result<()> {
    suite("conv over one axis", cases::one_axis(), 14)
}

#[test]
fn two_axes() -> Result<()> {
    suite("conv over two axes", cases::two_axes(), 22)
}

#[test]
fn three_axes() -> Result<()> {
    suite("conv over three axes", cases::three_axes(), 26)
}

/// The bounds can fail: TF32 breaks that of f32, and a filter one row off every bound.
#[test]
fn wrong_paths_would_show() -> Result<()> {
    let suite = "conv, sensitivity of the bounds";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let has_cudnn = cudnn(suite, &device)?;
    let params = ConvParams { padding: [(1, 1), (1, 1)], ..ConvParams::default() };
    let x = noise(1, 1.0, &[1, 64, 40, 40], DType::F32)?;
    let weight = noise(2, 0.04, &[64, 64, 3, 3], DType::F32)?;
    let want = values(&reference::conv_nd(&x, &weight, None, &params)?)?;
    let (x, weight) = (x.to_device(&device)?, weight.to_device(&device)?);
    let error = |params: &ConvParams<2>| -> Result<f64> {
        Ok(relative_error(&values(&conv_nd(&x, &weight, None, params)?)?, &want))
    };
    let shifted = error(&ConvParams { padding: [(2, 0), (1, 1)], ..params })?;
    ensure!(shifted > 10.0 * HALF, "a row off shows only {shifted:.2e}");
    if has_cudnn {
        let mut policy = Policy::new(Backend::Required);
        policy.allow_tf32 = true;
        let tf32 = scope(policy, || error(&params))?;
        println!("{suite}: TF32 gives {tf32:.2e}");
        ensure!(tf32 > 5.0 * F32, "TF32 shows only {tf32:.2e}");
    }
    Ok(())
}

/// Elements beyond the reach of 32-bit indices, compared in windows at both ends and in the middle.
#[test]
fn more_elements_than_32_bits_count() -> Result<()> {
    let suite = "conv of more than 2^31 elements";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let params = ConvParams { padding: [(0, 0), (1, 1), (1, 1)], ..ConvParams::default() };
    for dtype in [DType::F32, DType::BF16] {
        let (x, corners) = huge(dtype, &device)?;
        let weight = noise(3, 0.1, &[8, 16, 1, 3, 3], dtype)?;
        let placed = weight.to_device(&device)?;
        for backend in [Backend::Im2col, Backend::Auto] {
            let at = || format!("{dtype:?} {backend:?}");
            let Counted { result, .. } = on(backend, || Ok(conv_nd(&x, &placed, None, &params)?));
            let Some(y) = failures.take(result, at) else { continue };
            for corner in corners {
                // Without the border of the window, which has neighbours that it does not show.
                let want =
                    reference::conv_nd::<3>(&window(&x, corner, WINDOW)?, &weight, None, &ConvParams::default())?;
                let got = window(&y, corner.map(|i| i + 1), WINDOW - 2)?;
                let error = relative_error(&values(&got)?, &values(&want)?);
                let bound = if dtype == DType::F32 { F32 } else { HALF };
                failures.check(error <= bound, || format!("{} at {corner:?}: error {error:.2e}", at()));
            }
        }
    }
    failures.finish(suite)
}
