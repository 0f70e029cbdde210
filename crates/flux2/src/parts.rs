//! What blocks take their weights from.

use candle_core::Tensor;
use candle_fork::LinearWeight;
use weights::Loader;

use crate::error::Result;

/// Weights by name, each taken once.
pub(crate) trait Parts {
    /// A tensor in the dtype of the activations.
    fn tensor(&mut self, name: &str) -> Result<Tensor>;

    /// The rows of several matrices one after another, as one map.
    fn linear_stack(&mut self, names: &[&str]) -> Result<LinearWeight>;

    /// A matrix.
    fn linear(&mut self, name: &str) -> Result<LinearWeight> {
        self.linear_stack(&[name])
    }
}

impl Parts for Loader {
    fn tensor(&mut self, name: &str) -> Result<Tensor> {
        Ok(Loader::tensor(self, name)?)
    }

    fn linear_stack(&mut self, names: &[&str]) -> Result<LinearWeight> {
        Ok(Loader::linear_stack(self, names)?)
    }
}
