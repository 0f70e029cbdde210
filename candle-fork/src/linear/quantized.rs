//! Which product a part of a weight needs, and stacks whose parts need different ones.

use candle_core::{D, Tensor};

use super::{LinearWeight, OP, Part};
use crate::{
    convrot::Group,
    error::{Error, Result, What},
    quant::{Int8, QuantMode},
};

/// How a part is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recipe {
    /// As a matrix of floats, decoded if need be.
    Plain,
    /// As the matrix that is stored, with rotated arguments.
    Rotated(Group),
    /// As integers, with rotated and quantised arguments.
    W8A8(Group),
}

impl Part {
    fn recipe(&self, on_cpu: bool) -> Recipe {
        let Self::Quant { weight, mode } = self else { return Recipe::Plain };
        match weight.as_int8() {
            Some(int8) if *mode == QuantMode::W8A8 => Recipe::W8A8(int8.group),
            Some(int8) if on_cpu && int8.group.rotates() => Recipe::Rotated(int8.group),
            _ => Recipe::Plain,
        }
    }
}

/// Runs `product` on every run of neighbouring parts with one recipe and puts the results side by side.
pub(super) fn in_pieces(
    x: &Tensor,
    weight: &LinearWeight,
    bias: Option<&Tensor>,
    product: impl Fn(&LinearWeight, Recipe, Option<&Tensor>) -> Result<Tensor>,
) -> Result<Tensor> {
    let on_cpu = x.device().is_cpu();
    let runs: Vec<&[Part]> = weight.parts.chunk_by(|a, b| a.recipe(on_cpu) == b.recipe(on_cpu)).collect();
    let recipe = |run: &[Part]| run.first().map_or(Recipe::Plain, |part| part.recipe(on_cpu));
    if let [run] = runs[..] {
        return product(weight, recipe(run), bias);
    }
    let mut first = 0;
    let mut results = Vec::with_capacity(runs.len());
    for run in runs {
        let out_features = run.iter().map(|part| part.dims()[0]).sum();
        let piece = LinearWeight { parts: run.to_vec(), out_features, ..weight.clone() };
        let bias = bias.map(|bias| bias.narrow(0, first, out_features).what("linear: bias")).transpose()?;
        results.push(product(&piece, recipe(run), bias.as_ref())?);
        first += out_features;
    }
    Tensor::cat(&results, D::Minus1).what("linear: pieces of a stack")
}

/// The parts of a weight that is signed bytes throughout.
pub(super) fn int8(weight: &LinearWeight) -> Result<Vec<&Int8>> {
    let parts = weight.parts.iter().map(|part| match part {
        Part::Quant { weight, .. } => weight.as_int8(),
        Part::Tensor(_) | Part::Host(_) => None,
    });
    parts.collect::<Option<Vec<_>>>().ok_or_else(|| Error::Argument { op: OP, what: "a part has no bytes".into() })
}
