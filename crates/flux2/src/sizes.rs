//! Which picture sizes and step counts a run accepts.

pub use sampling::MAX_STEPS;

use crate::error::{Error, Result};

/// Smallest height and width, in pixels.
pub const MIN_SIDE: usize = 64;
/// Largest height and width, in pixels.
pub const MAX_SIDE: usize = 4096;

/// Checks one side of a picture: a multiple of `multiple` pixels from [`MIN_SIDE`] to [`MAX_SIDE`].
///
/// # Errors
/// [`Error::Size`] names the nearest legal values; a size is never changed silently.
pub fn check_side(axis: &'static str, got: usize, multiple: usize) -> Result<()> {
    if (MIN_SIDE..=MAX_SIDE).contains(&got) && got.is_multiple_of(multiple) {
        return Ok(());
    }
    let (least, most) = (MIN_SIDE.next_multiple_of(multiple), MAX_SIDE / multiple * multiple);
    let below = (got / multiple * multiple).clamp(least, most);
    let above = got.min(MAX_SIDE).next_multiple_of(multiple).clamp(least, most);
    let nearest = if below == above { below.to_string() } else { format!("{below} and {above}") };
    Err(Error::Size { axis, got, multiple, nearest })
}

/// Checks a number of steps: 1 to [`MAX_STEPS`].
///
/// # Errors
/// [`Error::Steps`].
pub fn check_steps(got: usize) -> Result<()> {
    if (1..=MAX_STEPS).contains(&got) { Ok(()) } else { Err(Error::Steps { got }) }
}

/// Checks a guidance scale: finite and not negative.
///
/// # Errors
/// [`Error::Guidance`].
pub fn check_guidance(got: f64) -> Result<()> {
    if got.is_finite() && got >= 0.0 { Ok(()) } else { Err(Error::Guidance { got }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legal_sizes_pass_and_others_name_their_neighbours() {
        for side in [64, 80, 128, 1024, 1360, 1792, 4096] {
            check_side("height", side, 16).expect("legal");
        }
        for (got, nearest) in [
            (0, "64"),
            (16, "64"),
            (63, "64"),
            (65, "64 and 80"),
            (250, "240 and 256"),
            (1000, "992 and 1008"),
            (4090, "4080 and 4096"),
            (4097, "4096"),
            (100_000, "4096"),
            (usize::MAX, "4096"),
        ] {
            let message = check_side("width", got, 16).expect_err("illegal").to_string();
            assert!(message.starts_with(&format!("width {got} ")), "{message}");
            assert!(message.ends_with(&format!("nearest: {nearest}")), "{got}: {message}");
        }
    }

    #[test]
    fn steps_and_guidance() {
        check_steps(1).expect("legal");
        check_steps(1000).expect("legal");
        assert!(matches!(check_steps(0), Err(Error::Steps { got: 0 })));
        assert!(matches!(check_steps(1001), Err(Error::Steps { got: 1001 })));
        check_guidance(0.0).expect("legal");
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(matches!(check_guidance(bad), Err(Error::Guidance { .. })), "{bad}");
        }
    }
}
