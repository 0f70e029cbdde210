//! Taking tensors from a loader, by their diffusers names.

use candle_core::{DType, Device, Tensor};
use candle_fork::{LinearWeight, What, linear};
use weights::Loader;

use super::names::Spelling;
use crate::error::Result;

/// A linear map with a bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: LinearWeight,
    pub(super) bias: Tensor,
}

impl Linear {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(linear(x, &self.weight, Some(&self.bias))?)
    }
}

/// A loader that knows how its file spells names.
pub(super) struct Parts<'a> {
    pub(super) loader: &'a mut Loader,
    pub(super) spelling: Spelling,
    /// Type of the activations.
    pub(super) dtype: DType,
    pub(super) device: Device,
}

impl Parts<'_> {
    pub(super) fn tensor(&mut self, name: &str) -> Result<Tensor> {
        Ok(self.loader.tensor(&self.spelling.spell(name))?)
    }

    /// A tensor that enters sums in f32 whatever the dtype of the activations.
    pub(super) fn wide(&mut self, name: &str) -> Result<Tensor> {
        Ok(self.tensor(name)?.to_dtype(DType::F32).what("parameters in f32")?)
    }

    pub(super) fn weight(&mut self, name: &str) -> Result<LinearWeight> {
        Ok(self.loader.linear(&self.spelling.spell(name))?)
    }

    pub(super) fn linear(&mut self, name: &str) -> Result<Linear> {
        Ok(Linear { weight: self.weight(&format!("{name}.weight"))?, bias: self.wide(&format!("{name}.bias"))? })
    }

    /// A matrix whose rows are multiplied by `gate` `[out]`.
    pub(super) fn gated_weight(&mut self, name: &str, gate: Option<&Tensor>) -> Result<LinearWeight> {
        let Some(gate) = gate else { return self.weight(name) };
        let weight = self.tensor(name)?;
        let product = || weight.to_dtype(DType::F32)?.broadcast_mul(&gate.unsqueeze(1)?)?.to_dtype(weight.dtype());
        Ok(LinearWeight::from_tensor(product().what("gated map")?)?)
    }

    /// A linear map whose result is multiplied by `gate` `[out]`.
    pub(super) fn gated(&mut self, name: &str, gate: Option<&Tensor>) -> Result<Linear> {
        let weight = self.gated_weight(&format!("{name}.weight"), gate)?;
        let bias = self.wide(&format!("{name}.bias"))?;
        let bias = gate.map_or(Ok(bias.clone()), |gate| bias.mul(gate)).what("bias of a gated map")?;
        Ok(Linear { weight, bias })
    }

    /// A linear map whose rows, or columns, are exchanged by `order`.
    fn ordered(&mut self, name: &str, order: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<LinearWeight> {
        let weight = self.weight(&format!("{name}.weight"))?.to_tensor(self.dtype, &self.device)?;
        Ok(LinearWeight::from_tensor(order(&weight).what("order of a map")?)?)
    }

    /// A map to channels (c, position), c slowest, as one to (position, c): neighbours stay neighbours when the channels become
    /// positions.
    pub(super) fn upsample(&mut self, name: &str, positions: usize) -> Result<Linear> {
        let order = |t: &Tensor| {
            let rows = t.dim(0)?;
            t.reshape((rows / positions, positions, ()))?.transpose(0, 1)?.contiguous()
        };
        let weight = self.ordered(name, |t| order(t)?.reshape(t.shape()))?;
        let bias = self.wide(&format!("{name}.bias"))?;
        let bias = order(&bias).and_then(|b| b.flatten_all()).what("order of a bias")?;
        Ok(Linear { weight, bias })
    }

    /// A map from channels (c, column, row) of a patch of pixels as one from (c, row, column), as pixels lie.
    pub(super) fn pixels_in(&mut self, name: &str, patch: usize) -> Result<Linear> {
        let weight = self.ordered(name, |t| {
            t.reshape((t.dim(0)?, (), patch, patch))?.transpose(2, 3)?.contiguous()?.reshape(t.shape())
        })?;
        Ok(Linear { weight, bias: self.wide(&format!("{name}.bias"))? })
    }

    /// The same of a map to such channels.
    pub(super) fn pixels_out(&mut self, name: &str, patch: usize) -> Result<Linear> {
        let order = |t: &Tensor| {
            let rows = t.dim(0)?;
            t.reshape((rows / (patch * patch), patch, patch, ()))?.transpose(1, 2)?.contiguous()
        };
        let weight = self.ordered(name, |t| order(t)?.reshape(t.shape()))?;
        let bias = self.wide(&format!("{name}.bias"))?;
        let bias = order(&bias).and_then(|b| b.flatten_all()).what("order of a bias")?;
        Ok(Linear { weight, bias })
    }

    /// Several matrices as one, rows below rows.
    pub(super) fn stack(&mut self, names: &[String]) -> Result<LinearWeight> {
        let names: Vec<String> = names.iter().map(|name| self.spelling.spell(name)).collect();
        Ok(self.loader.linear_stack(&names.iter().map(String::as_str).collect::<Vec<_>>())?)
    }

    /// Query, key and value as one map.
    pub(super) fn qkv(&mut self, attention: &str) -> Result<Linear> {
        if self.spelling.is_fused() {
            return self.linear(&format!("{attention}.qkv"));
        }
        let parts = ["to_q", "to_k", "to_v"].map(|part| format!("{attention}.{part}"));
        let weight = self.stack(&parts.each_ref().map(|part| format!("{part}.weight")))?;
        let biases = parts.iter().map(|part| self.wide(&format!("{part}.bias"))).collect::<Result<Vec<_>>>()?;
        Ok(Linear { weight, bias: Tensor::cat(&biases, 0).what("bias of query, key and value")? })
    }
}
