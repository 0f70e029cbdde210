//! Convolutions of the FLUX.2 VAE.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_fork::{ConvParams, conv_nd};

use super::{Options, gemm::relative_error};
use crate::{
    peer::Peer,
    record::{Row, Sink},
    timing::{gflops, medians},
};

/// 3x3 convolutions in f32: ours, candle's, torch's.
///
/// # Errors
/// If an op, the peer or `sink` fails.
pub fn rows(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let threads = rayon::current_num_threads().to_string();
    let peer = options.python.as_deref().map(|p| Peer::run(p, "torch_conv2d.py", &[&threads])).transpose()?;
    for (name, figure, channels, size) in
        [("cpu_conv2d_128_256", "128_256", 128, 256), ("cpu_conv2d_512_64", "512_64", 512, 64)]
    {
        let x = Tensor::randn(0f32, 1., (1, channels, size, size), &Device::Cpu)?;
        let w = Tensor::randn(0f32, 0.02, (channels, channels, 3, 3), &Device::Cpu)?;
        let params = ConvParams::<2> { padding: [(1, 1); 2], ..Default::default() };
        let times = medians(
            9,
            &mut [
                &mut || {
                    conv_nd(&x, &w, None, &params)?;
                    Ok(())
                },
                &mut || {
                    x.conv2d(&w, 1, 1, 1, 1)?;
                    Ok(())
                },
            ],
        )?;
        let flop = 2.0 * (channels * channels * 9 * size * size) as f64;
        let error = relative_error(&conv_nd(&x, &w, None, &params)?, &x.conv2d(&w, 1, 1, 1, 1)?)?;
        println!("{name}: candle's conv2d {:.1} GFLOP/s", gflops(flop, times[1]));
        sink(Row {
            name,
            value: gflops(flop, times[0]),
            unit: "GFLOP/s",
            peer: peer.as_ref().map(|p| p.name.clone()).unwrap_or_default(),
            peer_value: peer.as_ref().map(|p| p.get(figure)).transpose()?,
            error: format!("rel_l2 {error:.1e} against candle f32"),
            ..Row::default()
        })?;
    }
    Ok(())
}
