//! The visible part of a coded picture.

/// The sequence parameters (ITU-T H.264, 7.3.2.1.1; a unit without its start code) with the right `columns` and lower
/// `rows` of the picture cut off. Both are even.
///
/// The encoder codes whole macroblocks of 16 x 16 and cuts off what is too much itself, but fills that part with black,
/// which shows along the edge. So it gets whole macroblocks from here, and its parameters are completed.
///
/// None if the parameters are not those of a progressive baseline stream, or cut off something already.
pub(super) fn with_crop(unit: &[u8], columns: usize, rows: usize) -> Option<Vec<u8>> {
    const BASELINE: u32 = 66;
    let raw = without_emulation_prevention(unit);
    let mut from = BitReader { bytes: &raw, at: 0 };
    let mut to = BitWriter::default();
    // The kind of unit, profile and level.
    let _kind = from.copy(8, &mut to)?;
    if from.copy(8, &mut to)? != BASELINE {
        return None;
    }
    from.copy(16, &mut to)?;
    // Number of the set, length of the frame numbers, order of the pictures.
    let (_, _, order) = (from.copy_ue(&mut to)?, from.copy_ue(&mut to)?, from.copy_ue(&mut to)?);
    match order {
        0 => drop(from.copy_ue(&mut to)?),
        2 => {}
        _ => return None,
    }
    // Number of references, gaps, width and height in macroblocks.
    from.copy_ue(&mut to)?;
    from.copy(1, &mut to)?;
    from.copy_ue(&mut to)?;
    from.copy_ue(&mut to)?;
    // Frames only.
    if from.copy(1, &mut to)? != 1 {
        return None;
    }
    from.copy(1, &mut to)?;
    // Whether something is cut off.
    if from.bits(1)? != 0 {
        return None;
    }
    if columns == 0 && rows == 0 {
        to.put(1, 0);
    } else {
        to.put(1, 1);
        // In samples of colour: left, right, upper, lower.
        for offset in [0, columns / 2, 0, rows / 2] {
            to.put_ue(u32::try_from(offset).ok()?);
        }
    }
    // The rest, up to the bit that ends the unit.
    let end = 8 * raw.len() - 1 - raw.last()?.trailing_zeros() as usize;
    while from.at < end {
        from.copy(1, &mut to)?;
    }
    Some(with_emulation_prevention(&to.finish()))
}

struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl BitReader<'_> {
    /// At most 32.
    fn bits(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for _ in 0..count {
            let byte = self.bytes.get(self.at / 8)?;
            value = value << 1 | u32::from(byte >> (7 - self.at % 8) & 1);
            self.at += 1;
        }
        Some(value)
    }

    fn copy(&mut self, count: u32, to: &mut BitWriter) -> Option<u32> {
        let value = self.bits(count)?;
        to.put(count, value);
        Some(value)
    }

    /// An Exp-Golomb code: as many zeros as bits follow the first one.
    fn copy_ue(&mut self, to: &mut BitWriter) -> Option<u32> {
        let mut zeros = 0;
        while self.bits(1)? == 0 {
            zeros += 1;
            if zeros > 31 {
                return None;
            }
        }
        let value = (1 << zeros) - 1 + self.bits(zeros)?;
        to.put_ue(value);
        Some(value)
    }
}

#[derive(Debug, Default)]
struct BitWriter {
    bytes: Vec<u8>,
    used: usize,
}

impl BitWriter {
    fn put(&mut self, count: u32, value: u32) {
        for shift in (0..count).rev() {
            if self.used.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if let Some(last) = self.bytes.last_mut() {
                *last |= ((value >> shift & 1) as u8) << (7 - self.used % 8);
            }
            self.used += 1;
        }
    }

    /// `value` is below 2^32 - 1.
    fn put_ue(&mut self, value: u32) {
        let len = (value + 1).ilog2();
        self.put(len, 0);
        self.put(len + 1, value + 1);
    }

    /// A one and zeros up to a whole byte.
    fn finish(mut self) -> Vec<u8> {
        self.put(1, 1);
        self.bytes
    }
}

/// Within a unit, a 3 is put after two zeros that small bytes follow, so that it holds no start code.
fn without_emulation_prevention(unit: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(unit.len());
    let mut zeros = 0;
    for &byte in unit {
        if zeros == 2 && byte == 3 {
            zeros = 0;
            continue;
        }
        zeros = if byte == 0 { (zeros + 1).min(2) } else { 0 };
        out.push(byte);
    }
    out
}

fn with_emulation_prevention(raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(raw.len() + 4);
    let mut zeros = 0;
    for &byte in raw {
        if zeros == 2 && byte <= 3 {
            out.push(3);
            zeros = 0;
        }
        zeros = if byte == 0 { zeros + 1 } else { 0 };
        out.push(byte);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of 3 x 2 macroblocks, written down from the syntax table.
    fn parameters(cropping: &[u32]) -> Vec<u8> {
        let mut to = BitWriter::default();
        for byte in [0x67, 66, 0xc0, 10] {
            to.put(8, byte);
        }
        // Set 0, frame numbers of 15 bits, order 2, one reference.
        [0, 11, 2, 1].into_iter().for_each(|value| to.put_ue(value));
        to.put(1, 0);
        [2, 1].into_iter().for_each(|value| to.put_ue(value));
        to.put(2, 0b10);
        to.put(1, u32::from(!cropping.is_empty()));
        cropping.iter().for_each(|&value| to.put_ue(value));
        // Something behind, with zeros that need a 3 between them.
        to.put(3, 0b101);
        to.put(32, 0);
        to.put(16, 0x0001);
        with_emulation_prevention(&to.finish())
    }

    #[test]
    fn the_cut_is_put_in_and_the_rest_stays() {
        assert_eq!(with_crop(&parameters(&[]), 14, 6).unwrap(), parameters(&[0, 7, 0, 3]));
        assert_eq!(with_crop(&parameters(&[]), 0, 8).unwrap(), parameters(&[0, 0, 0, 4]));
        assert_eq!(with_crop(&parameters(&[]), 0, 0).unwrap(), parameters(&[]));
    }

    #[test]
    fn other_parameters_are_not_touched() {
        assert_eq!(with_crop(&parameters(&[0, 1, 0, 1]), 2, 2), None);
        let mut main = parameters(&[]);
        main[1] = 77;
        assert_eq!(with_crop(&main, 2, 2), None);
        for len in 0..6 {
            assert_eq!(with_crop(&parameters(&[])[..len], 2, 2), None, "{len}");
        }
    }

    #[test]
    fn no_unit_holds_a_start_code() {
        let raw = [0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0, 4, 0, 0];
        let unit = with_emulation_prevention(&raw);
        assert!(unit.windows(3).all(|window| !matches!(window, [0, 0, 0..=2])), "{unit:?}");
        assert_eq!(without_emulation_prevention(&unit), raw);
    }
}
