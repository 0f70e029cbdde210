//! Gradients of convolutions against torch's.

use anyhow::{Context, Result};
use candle_core::{Tensor, Var};
use candle_fork::{ConvParams, conv_nd};
use serde_json::Value;
use tests::{Golden, rel_l2};

#[test]
fn gradients_are_those_of_torch() -> Result<()> {
    let golden = Golden::open("conv-gradients")?;
    let config = golden.config()?;
    let cases = config.as_object().context("no cases")?;
    for (name, params) in cases {
        let of = |part: &str, what: &str| golden.tensor(&format!("{part}.{name}.{what}"));
        let operands = ["x", "weight", "bias"].map(|what| -> Result<Var> { Ok(Var::from_tensor(&of("in", what)?)?) });
        let [x, weight, bias] = operands;
        let (x, weight, bias) = (x?, weight?, bias?);
        let y = match x.rank() {
            3 => conv::<1>(&x, &weight, &bias, params)?,
            _ => conv::<2>(&x, &weight, &bias, params)?,
        };
        let grads = (&y * of("in", "grad")?)?.sum_all()?.backward()?;
        let grad = |var: &Var| grads.get(var).cloned().context("no gradient");
        for (what, got) in [("y", y.detach()), ("x", grad(&x)?), ("weight", grad(&weight)?), ("bias", grad(&bias)?)] {
            let want = of("out", what)?;
            assert_eq!(got.dims(), want.dims(), "{name}: {what}");
            let error = rel_l2(&got, &want)?;
            assert!(error <= 2e-6, "{name}: {what} differs by {error:.1e}");
        }
    }
    assert_eq!(cases.len(), 12);
    Ok(())
}

fn conv<const D: usize>(x: &Tensor, weight: &Tensor, bias: &Tensor, params: &Value) -> Result<Tensor> {
    let axes = |key: &str| -> Result<[usize; D]> {
        let values: Vec<usize> = serde_json::from_value(params[key].clone())?;
        values.try_into().ok().context("one value for each axis")
    };
    let padding: Vec<(usize, usize)> = serde_json::from_value(params["padding"].clone())?;
    let params = ConvParams {
        stride: axes("stride")?,
        dilation: axes("dilation")?,
        padding: padding.try_into().ok().context("one pair for each axis")?,
        groups: serde_json::from_value(params["groups"].clone())?,
    };
    Ok(conv_nd(x, weight, Some(bias), &params)?)
}
