//! ConvRot formats of 4 bits, as the signed bytes that they stand for.
//!
//! Both are matrices of [`crate::QuantWeight::int8`] in a smaller shape: decoding them once while loading costs twice the
//! bytes and makes every path of that format theirs.

use crate::error::{Error, Result};

/// The codes of `convrot_w4a4`: signed nibbles, the even column in the low one. Row scales and group are those of
/// [`crate::quant::QuantWeight::int8`].
///
/// `packed` has `columns / 2` bytes a row.
///
/// # Errors
/// [`Error::Argument`] if `columns` is odd or `packed` is not whole rows.
pub fn unpack_w4a4(packed: &[u8], columns: usize) -> Result<Vec<u8>> {
    const OP: &str = "unpack_w4a4";
    if columns == 0 || !columns.is_multiple_of(2) || !packed.len().is_multiple_of(columns / 2) {
        let what = format!("{} bytes are not whole rows of {columns} columns", packed.len());
        return Err(Error::Argument { op: OP, what });
    }
    // The arithmetic shift extends the sign.
    let nibbles = |&byte: &u8| [((byte << 4) as i8 >> 4) as u8, (byte as i8 >> 4) as u8];
    Ok(packed.iter().flat_map(nibbles).collect())
}

/// What the codes of [`decode_w4a8`] stand for before the scale of their row.
#[derive(Debug, Clone, Copy)]
pub struct W4a8Scales<'a> {
    /// `weight_s_rel` `[rows, columns / group_size]`.
    pub relative: &'a [f32],
    /// Columns that share a relative scale: `group_size`.
    pub group_size: usize,
    /// `weight_codebook`, of 16 values; without it a code stands for itself less its middle.
    pub codebook: Option<&'a [f32; 16]>,
}

/// The signed bytes of `asym_w4a8_int8`: `clamp(round(value(code) * relative), -127, 127)`, ties to even. Their row scales
/// are `weight_s_channel`, their group `convrot_groupsize`.
///
/// `packed` has `columns / 2` bytes a row: unsigned nibbles, the even column in the low one; or `3 columns / 4`: behind the
/// nibbles of the row, two bits more for each column, column c in bits `2 (c % 4)` of byte `c / 4`.
///
/// # Errors
/// [`Error::Argument`] if `columns` is not a multiple of 4 and of the group size, `packed` is not whole rows of either kind,
/// the number of relative scales does not fit, codes of 6 bits come with a codebook, or a scale or a value of the codebook is
/// not finite.
pub fn decode_w4a8(packed: &[u8], rows: usize, columns: usize, scales: W4a8Scales<'_>) -> Result<Vec<u8>> {
    const OP: &str = "decode_w4a8";
    let error = |what: String| Err(Error::Argument { op: OP, what });
    let W4a8Scales { relative, group_size, codebook } = scales;
    if rows == 0 || columns == 0 || group_size == 0 || !columns.is_multiple_of(4) || !columns.is_multiple_of(group_size)
    {
        return error(format!("{rows} rows of {columns} columns in groups of {group_size}"));
    }
    let six_bits = Some(packed.len()) == rows.checked_mul(columns / 4 * 3);
    let width = if six_bits { columns / 4 * 3 } else { columns / 2 };
    let groups = columns / group_size;
    if Some(packed.len()) != rows.checked_mul(width) || Some(relative.len()) != rows.checked_mul(groups) {
        let (bytes, got) = (packed.len(), relative.len());
        return error(format!("{bytes} bytes and {got} scales for {rows} rows of {columns} columns"));
    }
    if six_bits && codebook.is_some() {
        return error("codes of 6 bits have no codebook".into());
    }
    // A NaN would become the code 0.
    if let Some((i, scale)) = relative.iter().enumerate().find(|(_, scale)| !scale.is_finite()) {
        return error(format!("relative scale {i} is {scale}"));
    }
    if let Some(value) = codebook.and_then(|values| values.iter().find(|value| !value.is_finite())) {
        return error(format!("the codebook holds {value}"));
    }
    let mut bytes = Vec::with_capacity(rows * columns);
    for (row, relative) in packed.chunks_exact(width).zip(relative.chunks_exact(groups)) {
        let (low, high) = row.split_at(columns / 2);
        for c in 0..columns {
            let nibble = low[c / 2] >> (4 * (c % 2)) & 15;
            let value = match codebook {
                Some(codebook) => codebook[usize::from(nibble)],
                None if six_bits => f32::from(nibble | (high[c / 4] >> (2 * (c % 4)) & 3) << 4) - 32.0,
                None => f32::from(nibble) - 8.0,
            };
            bytes.push((value * relative[c / group_size]).round_ties_even().clamp(-127.0, 127.0) as i8 as u8);
        }
    }
    Ok(bytes)
}
