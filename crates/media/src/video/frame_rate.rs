//! Frames a second, as an exact ratio.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// A frame rate: a ratio in lowest terms, from 0.01 to 1000 frames a second.
///
/// A text is one of: a whole number (`16`), a ratio (`30000/1001`, `30000:1001`), or a decimal number with up to six
/// places. The decimal names of television rates (23.976, 23.98, 29.97, 47.952, 59.94, 119.88) stand for the ratios that
/// they abbreviate, such as 24000/1001; other decimals are taken as they are.
///
/// ```
/// use media::FrameRate;
///
/// let fps: FrameRate = "23.976".parse()?;
/// assert_eq!((fps.numerator(), fps.denominator()), (24000, 1001));
/// assert_eq!(fps, FrameRate::new(24000, 1001)?);
/// # Ok::<(), media::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameRate {
    numerator: u32,
    denominator: u32,
}

impl FrameRate {
    /// `numerator / denominator` frames a second.
    ///
    /// # Errors
    /// [`Error::FrameRate`] if that is not within 0.01 to 1000, or if the ratio needs numbers above 1,000,000.
    pub fn new(numerator: u32, denominator: u32) -> Result<Self> {
        Self::reduced(numerator.into(), denominator.into())
            .ok_or_else(|| Error::FrameRate { text: format!("{numerator}/{denominator}") })
    }

    /// The upper number of the ratio in lowest terms, at most 1,000,000.
    #[must_use]
    pub fn numerator(self) -> u32 {
        self.numerator
    }

    /// The lower number of the ratio in lowest terms, at most 1,000,000.
    #[must_use]
    pub fn denominator(self) -> u32 {
        self.denominator
    }

    /// Frames a second, rounded.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        f64::from(self.numerator) / f64::from(self.denominator)
    }

    /// How long `frames` last, in seconds, rounded.
    #[must_use]
    pub fn seconds(self, frames: u64) -> f64 {
        frames as f64 * f64::from(self.denominator) / f64::from(self.numerator)
    }

    fn reduced(numerator: u64, denominator: u64) -> Option<Self> {
        const MAX_TERM: u64 = 1_000_000;
        if denominator == 0 || numerator > 1000 * denominator || denominator > 100 * numerator {
            return None;
        }
        let divisor = greatest_common_divisor(numerator, denominator);
        let (numerator, denominator) = (numerator / divisor, denominator / divisor);
        if numerator > MAX_TERM || denominator > MAX_TERM {
            return None;
        }
        Some(Self { numerator: u32::try_from(numerator).ok()?, denominator: u32::try_from(denominator).ok()? })
    }

    fn parse(text: &str) -> Option<Self> {
        if let Some((numerator, denominator)) = text.split_once(['/', ':']) {
            return Self::reduced(digits(numerator)?, digits(denominator)?);
        }
        let Some((whole, places)) = text.split_once('.') else {
            return Self::reduced(digits(text)?, 1);
        };
        let television = |nominal: u64| Self::reduced(nominal * 1000, 1001);
        match text {
            "23.976" | "23.98" => return television(24),
            "29.97" => return television(30),
            "47.952" | "47.95" => return television(48),
            "59.94" => return television(60),
            "119.88" => return television(120),
            _ => {}
        }
        let scale = 10_u64.checked_pow(u32::try_from(places.len()).ok().filter(|&places| places <= 6)?)?;
        Self::reduced(digits(whole)? * scale + digits(places)?, scale)
    }
}

/// The number that a text of one to seven digits stands for.
fn digits(text: &str) -> Option<u64> {
    let plain = (1..=7).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// `a` and `b` are above 0.
fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl FromStr for FrameRate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text.trim()).ok_or_else(|| Error::FrameRate { text: text.to_owned() })
    }
}

impl fmt::Display for FrameRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            denominator => write!(f, "{}/{denominator}", self.numerator),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ratio(text: &str) -> (u32, u32) {
        let fps: FrameRate = text.parse().unwrap();
        (fps.numerator(), fps.denominator())
    }

    #[test]
    fn texts_become_exact_ratios() {
        for (text, expected) in [
            ("16", (16, 1)),
            (" 24 ", (24, 1)),
            ("30000/1001", (30000, 1001)),
            ("32:2", (16, 1)),
            ("12.5", (25, 2)),
            ("23.976", (24000, 1001)),
            ("29.97", (30000, 1001)),
            ("59.94", (60000, 1001)),
            ("16.000000", (16, 1)),
            ("15.123456", (236_304, 15_625)),
            ("0.01", (1, 100)),
            ("1000", (1000, 1)),
        ] {
            assert_eq!(ratio(text), expected, "{text}");
        }
    }

    #[test]
    fn other_texts_are_one_line_errors() {
        for text in [
            "",
            "0",
            "0/1",
            "1/0",
            "-16",
            "+16",
            "1001",
            "0.001",
            "1/101",
            "16fps",
            "1e3",
            "16.",
            ".5",
            "nan",
            "16,5",
            "1.0000000",
            "12345678",
            "24/1/1",
            "999999/999998.5",
            "1\n6",
            "1000001/1000",
        ] {
            let error = text.parse::<FrameRate>().unwrap_err();
            assert!(matches!(error, Error::FrameRate { .. }), "{text:?}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        assert!(FrameRate::new(0, 0).is_err() && FrameRate::new(u32::MAX, u32::MAX).is_ok());
        assert!(FrameRate::new(4_294_967_291, 4_294_967).is_err());
    }

    proptest! {
        #[test]
        fn what_is_displayed_is_read_back(numerator in 1..100_000_u32, denominator in 1..1000_u32) {
            if let Ok(fps) = FrameRate::new(numerator, denominator) {
                prop_assert_eq!(fps.to_string().parse::<FrameRate>().unwrap(), fps);
                prop_assert_eq!(
                    u64::from(fps.numerator()) * u64::from(denominator),
                    u64::from(fps.denominator()) * u64::from(numerator)
                );
            }
        }
    }
}
