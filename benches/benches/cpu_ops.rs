//! Steady tracking of the CPU ops at shapes of FLUX.2.

use candle_core::{DType, Device, Tensor};
use candle_fork::{Activation, AttentionMask, ConvParams, LinearWeight};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn normal(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &Device::Cpu).expect("random values on the CPU")
}

fn ops(c: &mut Criterion) {
    let mut group = c.benchmark_group("cpu");
    group.sample_size(10);

    let x = normal(&[768, 3072]);
    let w = LinearWeight::from_tensor(normal(&[3072, 3072]).to_dtype(DType::BF16).expect("narrowing")).expect("rank 2");
    group.throughput(Throughput::Elements(2 * 768 * 3072 * 3072));
    group.bench_function("linear bf16 768x3072x3072", |b| b.iter(|| candle_fork::linear(&x, &w, None)));

    let x = normal(&[1, 128, 128, 128]);
    let w = normal(&[128, 128, 3, 3]);
    let params = ConvParams::<2> { padding: [(1, 1); 2], ..Default::default() };
    group.throughput(Throughput::Elements(2 * 128 * 128 * 9 * 128 * 128));
    group.bench_function("conv2d 128 -> 128 at 128x128", |b| b.iter(|| candle_fork::conv_nd(&x, &w, None, &params)));

    let q = normal(&[1, 768, 24, 128]);
    group.throughput(Throughput::Elements(4 * 24 * 768 * 768 * 128));
    group.bench_function("attention 768 x 24 x 128", |b| {
        b.iter(|| candle_fork::attention(&q, &q, &q, 0.088, AttentionMask::Full))
    });

    let gamma = normal(&[128]);
    group.throughput(Throughput::Elements(128 * 128 * 128));
    group.bench_function("group_norm + silu 128x128x128", |b| {
        b.iter(|| candle_fork::group_norm(&x, &gamma, &gamma, 32, 1e-6, Activation::Silu))
    });
    group.finish();
}

criterion_group!(benches, ops);
criterion_main!(benches);
