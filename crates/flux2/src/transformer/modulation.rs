//! Shift, scale and gate that the time embedding gives to the branches of the blocks.

use candle_core::{D, Tensor};
use candle_fork::What;

use crate::error::{Error, Result};

/// What modulates one branch of a block: `x += gate * branch((1 + scale) * norm(x) + shift)`; each `[B, h]`.
#[derive(Debug, Clone)]
pub struct Modulation {
    /// Added to the normalised input.
    pub shift: Tensor,
    /// The normalised input is multiplied by `1 + scale`.
    pub scale: Tensor,
    /// Multiplies the output of the branch.
    pub gate: Tensor,
}

impl Modulation {
    /// Takes `[B, 3 h N]` apart: (shift, scale, gate) of the first branch, then of the second, and so on.
    ///
    /// # Errors
    /// [`Error::Shape`] if the last dimension of a rank-2 tensor is not a multiple of 3 N.
    pub fn split<const N: usize>(raw: &Tensor) -> Result<[Self; N]> {
        let dims = raw.dims();
        if dims.len() != 2 || N == 0 || !dims[1].is_multiple_of(3 * N) {
            return Err(Error::Shape { what: "modulation", got: dims.to_vec(), expected: format!("[B, {} h]", 3 * N) });
        }
        let h = dims[1] / (3 * N);
        let part =
            |index: usize| raw.narrow(D::Minus1, index * h, h).and_then(|t| t.contiguous()).what("modulation chunk");
        let mut branches = Vec::with_capacity(N);
        for branch in 0..N {
            branches.push(Self { shift: part(3 * branch)?, scale: part(3 * branch + 1)?, gate: part(3 * branch + 2)? });
        }
        Ok(branches.try_into().unwrap_or_else(|_| unreachable!("N branches were pushed")))
    }

    /// `(1 + scale) * layer_norm(x) + shift` for x `[B, S, h]`.
    pub(super) fn apply(&self, x: &Tensor, eps: f64) -> Result<Tensor> {
        Ok(candle_fork::layer_norm_modulate(x, &self.shift, &self.scale, eps)?)
    }

    /// x with [`Self::apply`] of it.
    pub(super) fn ready(&self, x: Tensor, eps: f64) -> Result<Ready> {
        let normed = self.apply(&x, eps)?;
        Ok(Ready { x, normed })
    }

    /// `x + gate * branch` for x and branch `[B, S, h]`.
    pub(super) fn add(&self, x: &Tensor, branch: &Tensor) -> Result<Tensor> {
        Ok(candle_fork::gate_residual(x, &self.gate, branch)?)
    }

    /// [`Self::add`], then `next`'s [`Self::ready`], in one pass.
    pub(super) fn add_ready(&self, x: &Tensor, branch: &Tensor, next: &Self, eps: f64) -> Result<Ready> {
        let (x, normed) = candle_fork::gate_residual_modulate(x, &self.gate, branch, &next.shift, &next.scale, eps)?;
        Ok(Ready { x, normed })
    }
}

/// Tokens `[B, S, h]`, and what the next branch reads of them: normed and modulated for it.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) x: Tensor,
    pub(super) normed: Tensor,
}

/// Modulation of a double block: the attention branch, then the feed-forward branch, for both streams.
#[derive(Debug, Clone)]
pub struct DoubleModulation {
    /// Of the image stream.
    pub image: [Modulation; 2],
    /// Of the text stream.
    pub text: [Modulation; 2],
}

impl DoubleModulation {
    /// Image and text as a double block takes them.
    pub(super) fn ready(&self, image: Tensor, text: Tensor, eps: f64) -> Result<[Ready; 2]> {
        Ok([self.image[0].ready(image, eps)?, self.text[0].ready(text, eps)?])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn chunks_are_shift_scale_gate_of_attention_then_feed_forward() {
        // Two batch items, h = 2: value = 100 * item + chunk * 10 + channel.
        let values: Vec<f32> = (0..2)
            .flat_map(|b| (0..6).flat_map(move |chunk| (0..2).map(move |c| (100 * b + 10 * chunk + c) as f32)))
            .collect();
        let raw = Tensor::from_vec(values, (2, 12), &Device::Cpu).unwrap();
        let [attention, mlp] = Modulation::split::<2>(&raw).unwrap();
        let rows = |t: &Tensor| t.to_vec2::<f32>().unwrap();
        for (chunk, tensor) in [&attention.shift, &attention.scale, &attention.gate, &mlp.shift, &mlp.scale, &mlp.gate]
            .into_iter()
            .enumerate()
        {
            let first = 10.0 * chunk as f32;
            assert_eq!(rows(tensor), [[first, first + 1.0], [100.0 + first, 101.0 + first]], "chunk {chunk}");
        }
    }

    #[test]
    fn wrong_widths_are_refused() {
        for dims in [vec![1, 10], vec![12], vec![1, 1, 12]] {
            let raw = Tensor::zeros(dims.clone(), candle_core::DType::F32, &Device::Cpu).unwrap();
            assert!(matches!(Modulation::split::<2>(&raw), Err(Error::Shape { got, .. }) if got == dims));
        }
    }

    #[test]
    fn residual_takes_the_gated_branch() {
        let tensor = |v: &[f32], dims: &[usize]| Tensor::from_slice(v, dims, &Device::Cpu).unwrap();
        let modulation = Modulation {
            shift: tensor(&[0.0; 4], &[2, 2]),
            scale: tensor(&[0.0; 4], &[2, 2]),
            gate: tensor(&[2.0, 0.0, -1.0, 3.0], &[2, 2]),
        };
        let x = tensor(&[1.0, 2.0, 3.0, 4.0], &[2, 1, 2]);
        let branch = tensor(&[10.0, 20.0, 30.0, 40.0], &[2, 1, 2]);
        let sum = modulation.add(&x, &branch).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(sum, [21.0, 2.0, -27.0, 124.0]);
    }
}
