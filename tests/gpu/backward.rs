//! Gradients of convolutions on the GPU against those on the CPU, which their own tests hold to f64 and to torch.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_fork::{
    ConvParams,
    conv::conv_nd,
    cudnn_policy::Backend,
    layout::{self, MemoryOrder},
};
use tests::gpu::{Counted, DTYPES, Failures, cuda, cudnn, noise, on, poison, relative_error, seed, values};

/// Extents and parameters.
#[derive(Debug, Clone, Copy)]
struct Case<const D: usize> {
    /// Batch, channels, filters.
    lead: [usize; 3],
    input: [usize; D],
    filter: [usize; D],
    params: ConvParams<D>,
}

const fn case<const D: usize>(
    lead: [usize; 3],
    input: [usize; D],
    filter: [usize; D],
    [stride, dilation]: [[usize; D]; 2],
    padding: [(usize, usize); D],
    groups: usize,
) -> Case<D> {
    Case { lead, input, filter, params: ConvParams { stride, dilation, padding, groups } }
}

const LINES: [Case<1>; 4] = [
    case([2, 64, 48], [130], [3], [[1], [1]], [(1, 1)], 1),
    case([1, 24, 40], [97], [4], [[3], [2]], [(5, 0)], 8),
    case([2, 33, 66], [50], [3], [[2], [1]], [(0, 2)], 33),
    case([1, 3, 5], [7], [2], [[1], [1]], [(4, 3)], 1),
];

const PICTURES: [Case<2>; 6] = [
    case([2, 64, 96], [33, 31], [3, 3], [[1, 1], [1, 1]], [(1, 1), (1, 1)], 1),
    case([1, 32, 64], [32, 40], [3, 3], [[2, 2], [1, 1]], [(0, 1), (0, 1)], 1),
    case([1, 24, 16], [21, 19], [3, 2], [[2, 3], [1, 2]], [(2, 0), (1, 3)], 4),
    case([2, 40, 40], [17, 18], [3, 3], [[1, 2], [3, 2]], [(3, 1), (0, 2)], 40),
    case([3, 72, 40], [15, 9], [1, 1], [[1, 1], [1, 1]], [(0, 0), (0, 0)], 1),
    case([1, 5, 7], [11, 13], [5, 3], [[1, 1], [1, 1]], [(2, 2), (1, 1)], 1),
];

/// What a tracked call gave: the result without and with gradients, the gradients of x, weight and bias.
struct Tracked {
    plain: Tensor,
    y: Tensor,
    gradients: [Tensor; 3],
}

/// Gradients of `sum(y * factors)`, with x in this memory order.
fn tracked<const D: usize>(
    [x, weight, bias]: &[Tensor; 3],
    order: MemoryOrder,
    factors: &Tensor,
    params: &ConvParams<D>,
) -> Result<Tracked> {
    // A variable is row-major; a view of it is in any order.
    let mut axes: Vec<usize> = (0..x.rank()).collect();
    axes[1..].rotate_left(1);
    let stored = if order == MemoryOrder::ChannelsLast { x.permute(axes)? } else { x.clone() };
    let viewed = |t: &Tensor| match order {
        MemoryOrder::ChannelsLast => layout::from_stored(t),
        _ => Ok(t.clone()),
    };
    let [variable, weight, bias] = [&stored, weight, bias].map(Var::from_tensor);
    let (variable, weight, bias) = (variable?, weight?, bias?);
    let x = viewed(&variable)?;
    let y = conv_nd(&x, &weight, Some(&bias), params)?;
    let grads = (&y * factors)?.sum_all()?.backward()?;
    let grad = |var: &Var| grads.get(var).cloned().context("no gradient");
    Ok(Tracked {
        plain: conv_nd(&x.detach(), &weight.detach(), Some(&bias.detach()), params)?,
        y: y.detach(),
        gradients: [viewed(&grad(&variable)?)?, grad(&weight)?, grad(&bias)?],
    })
}

fn check<const D: usize>(
    case: &Case<D>,
    backend: Backend,
    seed: u64,
    device: &Device,
    failures: &mut Failures,
) -> Result<()> {
    let [n, c, k] = case.lead;
    let x = [&[n, c], &case.input[..]].concat();
    let weight = [&[k, c / case.params.groups], &case.filter[..]].concat();
    let scale = (weight[1..].iter().product::<usize>() as f32).powf(-0.5);
    for dtype in DTYPES {
        let host =
            [noise(seed, 1.0, &x, dtype)?, noise(seed + 1, scale, &weight, dtype)?, noise(seed + 2, 0.5, &[k], dtype)?];
        let dims = conv_nd(&host[0], &host[1], None, &case.params)?.dims().to_vec();
        let factors = noise(seed + 3, 1.0, &dims, dtype)?;
        let [x, weight, bias] = [0, 1, 2].map(|i| host[i].to_dtype(DType::F32));
        let wide = [x?, weight?, bias?];
        let want = tracked(&wide, MemoryOrder::ChannelsFirst, &factors.to_dtype(DType::F32)?, &case.params)?;
        let rounded = tracked(&host, MemoryOrder::ChannelsFirst, &factors, &case.params)?;
        let [x, weight, bias] = [0, 1, 2].map(|i| host[i].to_device(device));
        let (operands, factors) = ([x?, weight?, bias?], factors.to_device(device)?);
        for order in [MemoryOrder::ChannelsFirst, MemoryOrder::ChannelsLast] {
            let at = |what: &str| format!("{case:?} {dtype:?} {order:?} {backend:?}: {what}");
            poison(device, factors.elem_count() * dtype.size_in_bytes())?;
            let Counted { result, counters } = on(backend, || tracked(&operands, order, &factors, &case.params));
            let Some(got) = failures.take(result, || at("failed")) else { continue };
            // The result twice, and the gradient of x.
            let dispatched = if backend == Backend::Required { 3 } else { 0 };
            failures.check(counters.dispatched == dispatched, || at(&format!("{} dispatches", counters.dispatched)));
            failures.check(values(&got.y)? == values(&got.plain)?, || at("the graph changes the result"));
            let orders = [&got.y, &got.plain].map(layout::memory_order);
            failures.check(orders[0] == orders[1], || at(&format!("orders {orders:?}")));
            let all = |t: &Tracked| [std::slice::from_ref(&t.y), &t.gradients[..]].concat();
            let wants = all(&want).into_iter().zip(all(&rounded));
            for ((what, got), (want, rounded)) in ["y", "x", "weight", "bias"].iter().zip(all(&got)).zip(wants) {
                failures.check(got.dtype() == dtype, || at(&format!("{what} is {:?}", got.dtype())));
                let want = values(&want)?;
                let error = relative_error(&values(&got)?, &want);
                // In half precision as near to f32 as the CPU's, which are rounded once.
                let once = relative_error(&values(&rounded)?, &want);
                let bound = if dtype == DType::F32 { 1e-5 } else { 2.0 * once + 1e-5 };
                failures.check(error <= bound, || at(&format!("{what}: error {error:.2e}, allowed {bound:.2e}")));
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_agree_with_the_cpu() -> Result<()> {
    let suite = "gpu_backward";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut seed = seed(suite);
    let mut failures = Failures::default();
    for case in &LINES {
        seed += 10;
        check(case, Backend::Im2col, seed, &device, &mut failures)?;
    }
    for case in &PICTURES {
        seed += 10;
        check(case, Backend::Im2col, seed, &device, &mut failures)?;
    }
    if cudnn(suite, &device)? {
        // A plain layer, which cuDNN serves in both directions.
        check(&PICTURES[0], Backend::Required, seed, &device, &mut failures)?;
    }
    failures.finish(suite)
}

/// Two layers learn the filters of two others, all on the device.
#[test]
fn a_net_learns() -> Result<()> {
    let Some(device) = cuda("gpu_backward")? else { return Ok(()) };
    let params = ConvParams { padding: [(1, 1), (1, 1)], ..Default::default() };
    let net = |x: &Tensor, w: &[Tensor]| -> Result<Tensor> {
        let hidden = conv_nd(x, &w[0], Some(&w[1]), &params)?.tanh()?;
        Ok(conv_nd(&hidden, &w[2], Some(&w[3]), &params)?)
    };
    let shapes: [&[usize]; 4] = [&[6, 2, 3, 3], &[6], &[1, 6, 3, 3], &[1]];
    let random = |seed: u64| -> Result<Vec<Tensor>> {
        shapes
            .iter()
            .zip(seed..)
            .map(|(dims, seed)| Ok(noise(seed, 0.25, dims, DType::F32)?.to_device(&device)?))
            .collect()
    };
    let x = noise(1, 0.6, &[4, 2, 8, 8], DType::F32)?.to_device(&device)?;
    let target = net(&x, &random(10)?)?;
    let vars = random(20)?.iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<_>>>()?;
    let weights: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let (mut first, mut last) = (0.0, 0.0);
    for step in 0..200 {
        let loss = (net(&x, &weights)? - &target)?.sqr()?.mean_all()?;
        last = loss.to_scalar::<f32>()?;
        if step == 0 {
            first = last;
        }
        let grads = loss.backward()?;
        for var in &vars {
            let grad = grads.get(var).context("no gradient")?;
            var.set(&(var.as_tensor() - (grad * 0.2)?)?)?;
        }
    }
    println!("loss from {first} to {last}");
    anyhow::ensure!(last < 0.05 * first, "loss from {first} to {last}");
    Ok(())
}
