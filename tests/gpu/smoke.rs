//! Whether a machine can run the GPU code at all, in a few seconds: what is installed, then one call of each kind beside
//! its f64 reference. Prints as it goes; fails if anything is off. Run with `--nocapture`.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    Activation, ConvParams, channel_rms_norm,
    conv::{conv_nd, reference},
    cudnn_policy::Backend,
    upsample_nearest,
};
use tests::gpu::{Counted, DTYPES, Placement, cuda, cudnn, describe, noise, on, relative_error, values};

/// One convolution of each rank with sizes of the Wan decoder's kinds.
const VIDEO: ([usize; 5], [usize; 5]) = ([1, 96, 4, 9, 11], [96, 96, 3, 3, 3]);

#[test]
fn smoke() -> Result<()> {
    let Some(device) = cuda("gpu_smoke")? else { return Ok(()) };
    println!("{}", describe()?);
    let has_cudnn = cudnn("gpu_smoke", &device)?;
    let mut failed = 0;
    let mut report = |what: &str, result: Result<f64>, bound: f64| {
        let good = result.as_ref().is_ok_and(|&error| error <= bound);
        failed += usize::from(!good);
        match result {
            Ok(error) => {
                println!("{} {what}: error {error:.2e}, allowed {bound:.0e}", if good { "ok  " } else { "FAIL" })
            }
            Err(error) => println!("FAIL {what}: {error:#}"),
        }
    };
    for dtype in DTYPES {
        let bound = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        for placement in [Placement::Contiguous, Placement::ChannelsLast, Placement::Cut] {
            report(&format!("norm {dtype:?} {placement:?}"), norm(dtype, placement, &device), bound);
            report(&format!("upsample {dtype:?} {placement:?}"), upsample(dtype, placement, &device), 0.0);
            for which in [Backend::Im2col, Backend::Required] {
                if which == Backend::Im2col || has_cudnn {
                    report(
                        &format!("conv {which:?} {dtype:?} {placement:?}"),
                        conv(which, dtype, placement, &device),
                        bound,
                    );
                }
            }
        }
    }
    ensure!(failed == 0, "{failed} of the calls failed");
    println!("all good");
    Ok(())
}

fn conv(which: Backend, dtype: DType, placement: Placement, device: &Device) -> Result<f64> {
    let x = noise(1, 1.0, &VIDEO.0, dtype)?;
    let weight = noise(2, 0.02, &VIDEO.1, dtype)?;
    let bias = noise(3, 0.5, &VIDEO.1[..1], dtype)?;
    let params = ConvParams { padding: [(0, 0), (1, 1), (1, 1)], ..ConvParams::default() };
    let want = reference::conv_nd(&x, &weight, Some(&bias), &params)?;
    let (x, weight, bias) =
        (placement.place(&x)?.to_device(device)?, weight.to_device(device)?, bias.to_device(device)?);
    let Counted { result, counters } = on(which, || Ok(conv_nd(&x, &weight, Some(&bias), &params)?));
    let y = result?;
    ensure!(counters.dispatched == u64::from(which == Backend::Required), "{counters:?}");
    Ok(relative_error(&values(&y)?, &values(&want)?))
}

fn norm(dtype: DType, placement: Placement, device: &Device) -> Result<f64> {
    let x = noise(4, 1.0, &VIDEO.0, dtype)?;
    let gamma = noise(5, 1.0, &[VIDEO.0[1]], DType::F32)?;
    let want = channel_rms_norm(&x.to_dtype(DType::F32)?, &gamma, Activation::Silu)?;
    let x = placement.place(&x)?.to_device(device)?;
    let y = channel_rms_norm(&x, &gamma.to_device(device)?, Activation::Silu)?;
    Ok(relative_error(&values(&y)?, &values(&want)?))
}

fn upsample(dtype: DType, placement: Placement, device: &Device) -> Result<f64> {
    let x = noise(6, 1.0, &VIDEO.0, dtype)?;
    let want: Tensor = upsample_nearest(&x, [1, 2, 2])?;
    let y = upsample_nearest(&placement.place(&x)?.to_device(device)?, [1, 2, 2])?;
    Ok(relative_error(&values(&y)?, &values(&want)?))
}
