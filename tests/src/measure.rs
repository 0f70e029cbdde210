//! How results are compared.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};

/// The elements of two tensors of the same shape in f64.
fn pair(got: &Tensor, want: &Tensor) -> Result<(Vec<f64>, Vec<f64>)> {
    ensure!(got.dims() == want.dims(), "shape {:?}, expected {:?}", got.dims(), want.dims());
    ensure!(got.elem_count() > 0, "nothing to compare");
    let host = |t: &Tensor| -> Result<Vec<f64>> { Ok(t.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?) };
    Ok((host(got)?, host(want)?))
}

/// `|got - want|₂ / |want|₂`.
///
/// # Errors
/// If the shapes differ or a value is not finite.
pub fn rel_l2(got: &Tensor, want: &Tensor) -> Result<f64> {
    let (got, want) = pair(got, want)?;
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(&want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied());
    ensure!(error.is_finite(), "the relative error is {error}");
    Ok(error)
}

/// Largest `|got - want|`.
///
/// # Errors
/// If the shapes differ or a value is not finite.
pub fn max_abs(got: &Tensor, want: &Tensor) -> Result<f64> {
    let (got, want) = pair(got, want)?;
    let mut worst = 0f64;
    for (index, (g, w)) in got.iter().zip(&want).enumerate() {
        let error = (g - w).abs();
        ensure!(error.is_finite(), "element {index} is {g}, expected {w}");
        worst = worst.max(error);
    }
    Ok(worst)
}

/// Peak signal-to-noise ratio in decibels of values whose full range is `peak`.
///
/// # Errors
/// If the shapes differ or a value is not finite.
pub fn psnr(got: &Tensor, want: &Tensor, peak: f64) -> Result<f64> {
    let (got, want) = pair(got, want)?;
    let error = got.iter().zip(&want).map(|(g, w)| (g - w) * (g - w)).sum::<f64>() / got.len() as f64;
    ensure!(error.is_finite(), "the mean squared error is {error}");
    Ok(10.0 * (peak * peak / error).log10())
}

/// Holds `rel_l2` to `tolerance`; on failure shows the worst element beside the measures. On success prints the error, for
/// `--nocapture`.
///
/// # Errors
/// If the error is larger, the shapes differ or a value is not finite.
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) -> Result<()> {
    let error = rel_l2(got, want).with_context(|| what.to_owned())?;
    if error <= tolerance {
        println!("{what}: relative L2 error {error:.1e}");
        return Ok(());
    }
    let (g, w) = pair(got, want)?;
    let difference = |i: &usize| (g[*i] - w[*i]).abs();
    let worst = (0..g.len()).max_by(|a, b| difference(a).total_cmp(&difference(b))).unwrap_or(0);
    anyhow::bail!(
        "{what}: relative L2 error {error:.3e}, allowed {tolerance:.0e}; shape {:?}, worst at {worst}: {} instead of {}",
        got.dims(),
        g[worst],
        w[worst]
    )
}

/// Holds two f32 tensors to the same bits.
///
/// # Errors
/// If they differ anywhere.
pub fn assert_same_bits(what: &str, a: &Tensor, b: &Tensor) -> Result<()> {
    ensure!(a.dims() == b.dims(), "{what}: shapes {:?} and {:?}", a.dims(), b.dims());
    let host = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.flatten_all()?.to_vec1()?) };
    let (a, b) = (host(a)?, host(b)?);
    let differing = a.iter().zip(&b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    ensure!(differing == 0, "{what}: {differing} of {} elements differ", a.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn tensor(values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::new(values, &Device::Cpu)?)
    }

    #[test]
    fn measures_are_what_they_say() -> Result<()> {
        let (a, b) = (tensor(&[3.0, 4.5])?, tensor(&[3.0, 4.0])?);
        assert!((rel_l2(&a, &b)? - 0.1).abs() < 1e-12);
        assert!((max_abs(&a, &b)? - 0.5).abs() < 1e-12);
        assert!((psnr(&a, &b, 2.0)? - 10.0 * (4.0f64 / 0.125).log10()).abs() < 1e-9);
        assert!(assert_close("same", &a, &b, 0.11).is_ok());
        assert!(assert_close("other", &a, &b, 0.09).is_err());
        Ok(())
    }

    #[test]
    fn nothing_hides_a_nan_or_a_shape() -> Result<()> {
        let (a, nan) = (tensor(&[1.0, 2.0])?, tensor(&[1.0, f32::NAN])?);
        assert!(rel_l2(&nan, &a).is_err() && max_abs(&nan, &a).is_err() && psnr(&nan, &a, 1.0).is_err());
        assert!(rel_l2(&a, &a.unsqueeze(0)?).is_err());
        assert!(rel_l2(&tensor(&[])?, &tensor(&[])?).is_err());
        assert!(assert_same_bits("zeros", &tensor(&[0.0])?, &tensor(&[-0.0])?).is_err());
        Ok(())
    }
}
