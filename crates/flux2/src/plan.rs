//! Listing the tensors that a model expects, prefix by prefix.

use weights::Expected;

/// Adds tensors below one prefix to a list.
pub(crate) struct Below<'a> {
    list: &'a mut Vec<Expected>,
    prefix: &'a str,
}

impl<'a> Below<'a> {
    pub(crate) fn new(list: &'a mut Vec<Expected>, prefix: &'a str) -> Self {
        Self { list, prefix }
    }

    /// Expects `PREFIX.NAME` with `shape`.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize]) {
        self.list.push(Expected { name: join(self.prefix, name), shape: shape.to_vec() });
    }

    /// Expects `PREFIX.NAME.weight` with `shape` and `PREFIX.NAME.bias` of its first extent.
    pub(crate) fn with_bias(&mut self, name: &str, shape: &[usize]) {
        self.tensor(&join(name, "weight"), shape);
        self.tensor(&join(name, "bias"), &shape[..1]);
    }
}

/// `PREFIX.NAME`; either may be empty.
pub(crate) fn join(prefix: &str, name: &str) -> String {
    match (prefix, name) {
        ("", name) => name.to_owned(),
        (prefix, "") => prefix.to_owned(),
        (prefix, name) => format!("{prefix}.{name}"),
    }
}

/// Checkpoints of random weights for the tests of the models.
#[cfg(test)]
pub(crate) mod random {
    use std::sync::Arc;

    use candle_core::{Device, Tensor};
    use sampling::NoiseGenerator;
    use weights::{
        Expected, Safetensors, StoredDType,
        write::{TensorData, to_bytes},
    };

    /// `scale` times standard normal values.
    pub(crate) fn tensor(seed: u64, scale: f32, dims: &[usize]) -> Tensor {
        let values = values(seed, scale, dims.iter().product());
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    }

    fn values(seed: u64, scale: f32, len: usize) -> Vec<f32> {
        NoiseGenerator::Philox.normal(seed, len).into_iter().map(|v| scale * v).collect()
    }

    /// The tensors of a plan as f32: matrices and kernels of unit gain, positive norms and variances, small biases.
    pub(crate) fn tensors(plan: &[Expected]) -> Vec<TensorData<'static>> {
        let tensor = |(seed, expected): (usize, &Expected)| {
            let len = expected.shape.iter().product();
            let fan_in: usize = expected.shape[1..].iter().product();
            let mut data = values(seed as u64, (fan_in as f32).powf(-0.5), len);
            if expected.shape.len() == 1 {
                let positive = expected.name.ends_with(".weight") || expected.name.ends_with("running_var");
                data.iter_mut().for_each(|v| *v = if positive { 1.0 + 0.5 * v.tanh() } else { 0.3 * *v });
            }
            TensorData::f32(expected.name.clone(), &expected.shape, &data)
        };
        plan.iter().enumerate().map(tensor).collect()
    }

    /// A file in memory.
    pub(crate) fn file(tensors: &[TensorData<'_>]) -> Arc<Safetensors> {
        Arc::new(Safetensors::from_bytes(Arc::new(to_bytes(tensors, &Default::default()).unwrap()), "random").unwrap())
    }

    /// A counter as `torch.nn.BatchNorm2d` keeps one.
    pub(crate) fn counter(name: &str) -> TensorData<'static> {
        TensorData::new(name, StoredDType::I64, &[], 7i64.to_le_bytes().to_vec())
    }
}
