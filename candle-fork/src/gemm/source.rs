//! Where operands come from: whatever can fill a packed block can be multiplied.

use std::ops::Range;

/// A left operand `[m, k]`, delivered in blocks of rows.
pub(crate) trait RowSource: Sync {
    /// Writes columns `k` (at most [`super::KC`]) of `rows`, each row at a multiple of [`super::KC`] in `dst`. What lies
    /// behind the last column of a row may keep any value.
    fn pack(&self, rows: Range<usize>, k: Range<usize>, dst: &mut [f32]);
}

/// A right operand `[k, n]`, delivered in panels of columns.
pub(crate) trait ColSource: Sync {
    /// Writes rows `k` of columns `cols` as panels `[panel][k][nr]`; columns missing in the last panel become zero.
    fn pack(&self, k: Range<usize>, cols: Range<usize>, nr: usize, panels: &mut [f32]);
}
