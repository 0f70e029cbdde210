//! Which of several paths a thread's ops took: proof for tests that a fast one ran, and not its fallback.

use std::cell::Cell;

/// A path that has another behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// A matrix product through cuBLASLt.
    LtProduct,
    /// A convolution by the implicit product.
    ImplicitProduct,
    /// Neighborhood attention by tiles of matrix products, of whatever kernel.
    TiledNeighborhood,
    /// Those of them that groups of warps make.
    WarpGroupNeighborhood,
    /// What surrounds the input of a convolution, written by its norm.
    Surround,
    /// Channels into frames and pixels as whole vectors.
    DepthToSpace,
    /// A pass of a [`TokenBlock`](crate::token_block::TokenBlock).
    TokenBlock,
    /// A product of the [`projection`](crate::projection)s in one kernel with what follows it.
    Projection,
}

thread_local! {
    static TAKEN: [Cell<u64>; 8] = const { [const { Cell::new(0) }; 8] };
}

/// Counts a path, once its work has been enqueued.
pub(crate) fn count(path: Path) {
    TAKEN.with(|taken| taken[path as usize].set(taken[path as usize].get() + 1));
}

/// How often this thread took a path.
pub fn taken(path: Path) -> u64 {
    TAKEN.with(|taken| taken[path as usize].get())
}
