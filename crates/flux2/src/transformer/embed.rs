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

    /// Embeds numbers as `[n, h]` f32.
    fn forward(&self, values: &[f32], device: &Device) -> Result<Tensor> {
        let width = self.linear_1.in_features();
        let rows: Vec<f32> = values.iter().flat_map(|value| sinusoid(1000.0 * value, width)).collect();
        let x = Tensor::from_vec(rows, (values.len(), width), device).what("sinusoid")?;
        Ok(linear(&silu(&linear(&x, &self.linear_1, None)?)?, &self.linear_2, None)?)
    }
}

/// Modulations of one step, in f32: the ops that apply them compute in f32 whatever the dtype of the activations.
#[derive(Debug, Clone)]
pub struct StepModulations {
    pub(super) double: DoubleModulation,
    pub(super) single: Modulation,
    /// Of the output layer, `[B, h]`.
    pub(super) output_scale: Tensor,
    /// Of the output layer, `[B, h]`.
    pub(super) output_shift: Tensor,
}

impl StepModulations {
    /// Everything in a row, `[n]`: what [`Self::over`] takes apart again.
    pub(super) fn flat(&self) -> Result<Tensor> {
        let DoubleModulation { image, text } = &self.double;
        let branches = image.iter().chain(text).chain([&self.single]);
        let chunks = branches.flat_map(|Modulation { shift, scale, gate }| [shift, scale, gate]);
        let flat = chunks.chain([&self.output_scale, &self.output_shift]).map(|chunk| chunk.flatten_all());
        let flat = flat.collect::<candle_core::Result<Vec<_>>>().what("modulations in a row")?;
        Ok(Tensor::cat(&flat, 0).what("modulations in a row")?)
    }

    /// Views of `flat`, in chunks of `[batch, h]`.
    pub(super) fn over(flat: &Tensor, batch: usize) -> Result<Self> {
        /// Shift, scale and gate of five branches, scale and shift of the output.
        const CHUNKS: usize = 17;
        let len = flat.elem_count() / CHUNKS;
        let chunk = |index: usize| {
            flat.narrow(0, index * len, len).and_then(|chunk| chunk.reshape((batch, len / batch))).what("modulation")
        };
        let branch = |index: usize| -> Result<Modulation> {
            let first = 3 * index;
            Ok(Modulation { shift: chunk(first)?, scale: chunk(first + 1)?, gate: chunk(first + 2)? })
        };
        Ok(Self {
            double: DoubleModulation { image: [branch(0)?, branch(1)?], text: [branch(2)?, branch(3)?] },
            single: branch(4)?,
            output_scale: chunk(15)?,
            output_shift: chunk(16)?,
        })
    }
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

    /// The modulations at each of `sigmas`, the same for each of `batch` items.
    pub(super) fn forward(
        &self,
        sigmas: &[f32],
        guidance: Option<f32>,
        batch: usize,
        device: &Device,
    ) -> Result<Vec<StepModulations>> {
        // A device widens the matrices to f32 for the call, so it takes all steps at once. The CPU reads them where they
        // lie and sums few rows in another order than many: one at a time, a step does not depend on the others.
        let together = if device.is_cpu() { 1 } else { sigmas.len().max(1) };
        let mut all = Vec::with_capacity(sigmas.len());
        for sigmas in sigmas.chunks(together) {
            self.together(sigmas, guidance, batch, device, &mut all)?;
        }
        Ok(all)
    }

    fn together(
        &self,
        sigmas: &[f32],
        guidance: Option<f32>,
        batch: usize,
        device: &Device,
        all: &mut Vec<StepModulations>,
    ) -> Result<()> {
        let mut embedding = self.time.forward(sigmas, device)?;
        if let (Some(embedder), Some(guidance)) = (&self.guidance, guidance) {
            let guidance = embedder.forward(&[guidance], device)?;
            embedding = embedding.broadcast_add(&guidance).what("time and guidance")?;
        }
        let embedding = silu(&embedding)?;
        let modulate = |weight: &LinearWeight| linear(&embedding, weight, None);
        let (single, image) = (modulate(&self.single)?, modulate(&self.double_image)?);
        let (text, output) = (modulate(&self.double_text)?, modulate(&self.output)?);
        for step in 0..sigmas.len() {
            let of = |t: &Tensor| t.narrow(0, step, 1).and_then(|t| t.repeat((batch, 1))).what("modulation of a step");
            let [single] = Modulation::split::<1>(&of(&single)?)?;
            let double = DoubleModulation {
                image: Modulation::split::<2>(&of(&image)?)?,
                text: Modulation::split::<2>(&of(&text)?)?,
            };
            let output = of(&output)?;
            // The diffusers layout stores the rows of scale first, then those of shift.
            let h = self.output.out_features() / 2;
            let half = |start| output.narrow(1, start, h).and_then(|t| t.contiguous()).what("output modulation");
            all.push(StepModulations { double, single, output_scale: half(0)?, output_shift: half(h)? });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modulations_in_a_row_are_taken_apart_in_their_order() {
        let (batch, h) = (2, 3);
        let flat = Tensor::arange(0f32, (17 * batch * h) as f32, &Device::Cpu).unwrap();
        let modulations = StepModulations::over(&flat, batch).unwrap();
        let first = |t: &Tensor| {
            assert_eq!(t.dims(), [batch, h]);
            t.to_vec2::<f32>().unwrap()[0][0] as usize / (batch * h)
        };
        assert_eq!(first(&modulations.double.image[1].scale), 4);
        assert_eq!(first(&modulations.double.text[0].shift), 6);
        assert_eq!(first(&modulations.single.gate), 14);
        assert_eq!([first(&modulations.output_scale), first(&modulations.output_shift)], [15, 16]);
        let again = modulations.flat().unwrap();
        assert_eq!(again.to_vec1::<f32>().unwrap(), flat.to_vec1::<f32>().unwrap());
    }

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
