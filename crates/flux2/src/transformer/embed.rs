//! Embedding of the time (and guidance), and the modulations that follow from it.

use candle_core::{Device, Tensor};
use candle_fork::{LinearWeight, What, activation::silu, linear};
use weights::Loader;

use super::modulation::{DoubleModulation, Modulation};
use crate::error::Result;

/// Sinusoid of `value`: cosines of the `width / 2` frequencies, then sines; frequency i is `10000^(-i / (width / 2))`.
///
/// In f32 like the reference, whose rounding of the frequencies is part of its results.
pub fn sinusoid(value: f32, width: usize) -> Vec<f32> {
    let half = width / 2;
    let angle = |i: usize| value * (-(10000f32.ln()) * i as f32 / half as f32).exp();
    (0..half).map(|i| angle(i).cos()).chain((0..half).map(|i| angle(i).sin())).collect()
}

/// `linear_2(silu(linear_1(sinusoid(1000 x))))`.
#[derive(Debug)]
struct ScalarEmbedder {
    linear_1: LinearWeight,
    linear_2: LinearWeight,
}

impl ScalarEmbedder {
    fn load(loader: &mut Loader, prefix: &str) -> Result<Self> {
        Ok(Self {
            linear_1: loader.linear(&format!("{prefix}.linear_1.weight"))?,
            linear_2: loader.linear(&format!("{prefix}.linear_2.weight"))?,
        })
    }

    /// Embeds one number as `[1, h]` f32.
    fn forward(&self, value: f32, device: &Device) -> Result<Tensor> {
        let width = self.linear_1.in_features();
        let x = Tensor::from_vec(sinusoid(1000.0 * value, width), (1, width), device).what("sinusoid")?;
        Ok(linear(&silu(&linear(&x, &self.linear_1, None)?)?, &self.linear_2, None)?)
    }
}

/// Modulations of one step, in f32: the ops that apply them compute in f32 whatever the dtype of the activations.
#[derive(Debug)]
pub(super) struct StepModulations {
    pub(super) double: DoubleModulation,
    pub(super) single: Modulation,
    /// Of the output layer, `[B, h]`.
    pub(super) output_scale: Tensor,
    /// Of the output layer, `[B, h]`.
    pub(super) output_shift: Tensor,
}

/// From sigma (and guidance) to the modulations of every block.
#[derive(Debug)]
pub(super) struct TimeEmbedding {
    time: ScalarEmbedder,
    guidance: Option<ScalarEmbedder>,
    double_image: LinearWeight,
    double_text: LinearWeight,
    single: LinearWeight,
    output: LinearWeight,
}

impl TimeEmbedding {
    pub(super) fn load(loader: &mut Loader, guidance_embeds: bool) -> Result<Self> {
        let guidance = if guidance_embeds {
            Some(ScalarEmbedder::load(loader, "time_guidance_embed.guidance_embedder")?)
        } else {
            None
        };
        Ok(Self {
            time: ScalarEmbedder::load(loader, "time_guidance_embed.timestep_embedder")?,
            guidance,
            double_image: loader.linear("double_stream_modulation_img.linear.weight")?,
            double_text: loader.linear("double_stream_modulation_txt.linear.weight")?,
            single: loader.linear("single_stream_modulation.linear.weight")?,
            output: loader.linear("norm_out.linear.weight")?,
        })
    }

    /// The modulations at `sigma`, the same for each of `batch` items.
    pub(super) fn forward(
        &self,
        sigma: f32,
        guidance: Option<f32>,
        batch: usize,
        device: &Device,
    ) -> Result<StepModulations> {
        let mut embedding = self.time.forward(sigma, device)?;
        if let (Some(embedder), Some(guidance)) = (&self.guidance, guidance) {
            embedding = (embedding + embedder.forward(guidance, device)?).what("time and guidance")?;
        }
        let embedding = silu(&embedding)?;
        let modulate = |weight: &LinearWeight| -> Result<Tensor> {
            Ok(linear(&embedding, weight, None)?.repeat((batch, 1)).what("modulation of a batch")?)
        };
        let [single] = Modulation::split::<1>(&modulate(&self.single)?)?;
        let double = DoubleModulation {
            image: Modulation::split::<2>(&modulate(&self.double_image)?)?,
            text: Modulation::split::<2>(&modulate(&self.double_text)?)?,
        };
        let output = modulate(&self.output)?;
        // The diffusers layout stores the rows of scale first, then those of shift.
        let h = self.output.out_features() / 2;
        let half = |start| output.narrow(1, start, h).and_then(|t| t.contiguous()).what("output modulation");
        Ok(StepModulations { double, single, output_scale: half(0)?, output_shift: half(h)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinusoid_is_cosines_then_sines() {
        let value = 767.2f32;
        let row = sinusoid(value, 10);
        assert_eq!(row.len(), 10);
        for i in 0..5 {
            let angle = f64::from(value) * 10000f64.powf(-(i as f64) / 5.0);
            // One rounding of an angle below 768 is 3e-5.
            assert!((f64::from(row[i]) - angle.cos()).abs() < 1e-4, "cos {i}");
            assert!((f64::from(row[5 + i]) - angle.sin()).abs() < 1e-4, "sin {i}");
        }
        assert_eq!(sinusoid(0.0, 4), [1.0, 1.0, 0.0, 0.0]);
    }
}
