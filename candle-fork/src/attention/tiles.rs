//! How attention on a device is cut into matrix products whose scores fit a bounded buffer. Pure arithmetic.

use super::reference::Extents;

/// Most bytes of scores and weights that exist at a time: about two second-level caches of a large device.
const MAX_BYTES: usize = 128 << 20;

/// Queries of a tile below which products fill a device badly: fewer heads go into a tile rather than fewer queries.
const QUERIES: usize = 512;

/// The heads that follow one another in a batch of products. Never items of the problem's batch: an item has the bits that it
/// has alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Axis {
    /// Query heads of one batch item that have key heads of their own.
    Heads,
    /// Query heads of one batch item that share a key head.
    SharedHeads,
}

/// Which matrices make one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) axis: Axis,
    /// Matrices, from `head` on.
    pub(super) matrices: usize,
    /// First query.
    pub(super) query: usize,
    /// Queries.
    pub(super) queries: usize,
}

/// All tiles of a problem, given the bytes of a score and its weight and the places of a row of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles {
    extents: Extents,
    axis: Axis,
    matrices: usize,
    queries: usize,
}

impl Tiles {
    pub(super) fn new(extents: Extents, row_bytes: usize) -> Self {
        let Extents { q_len, heads, kv_heads, .. } = extents;
        let (run, axis) = if heads == kv_heads { (heads, Axis::Heads) } else { (heads / kv_heads, Axis::SharedHeads) };
        let rows = (MAX_BYTES / row_bytes.max(1)).max(1);
        let matrices = (rows / QUERIES.min(q_len)).clamp(1, run);
        Self { extents, axis, matrices, queries: (rows / matrices).clamp(1, q_len) }
    }

    /// Rows of scores of the largest tile.
    pub(super) fn largest(&self) -> usize {
        self.matrices * self.queries
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Tile> {
        let Extents { batch, q_len, heads, kv_heads, .. } = self.extents;
        // Starts and length of every run of matrices along the axis.
        let run = match self.axis {
            Axis::Heads => heads,
            Axis::SharedHeads => heads / kv_heads,
        };
        let starts = (0..batch).flat_map(move |b| (0..heads).step_by(run).map(move |h| (b, h)));
        starts.flat_map(move |(b, h)| {
            (0..run).step_by(self.matrices).flat_map(move |first| {
                let matrices = self.matrices.min(run - first);
                (0..q_len).step_by(self.queries).map(move |query| {
                    let queries = self.queries.min(q_len - query);
                    Tile { batch: b, head: h + first, axis: self.axis, matrices, query, queries }
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_query_of_every_head_once_within_the_bound() {
        for (batch, q_len, heads, kv_heads, row_bytes) in [
            (21, 6240, 1, 1, 6240 * 6),
            (1, 4608, 24, 24, 4608 * 6),
            (2, 100, 8, 2, 600),
            (2, 100, 8, 1, 600),
            (9, 100, 8, 2, 600),
            (1, 3, 2, 2, MAX_BYTES * 2),
            (3, 1, 5, 5, 1),
            (1, 700, 4, 4, 200_000),
        ] {
            let extents = Extents { batch, q_len, k_len: 7, heads, kv_heads, width: 8 };
            let tiles = Tiles::new(extents, row_bytes);
            let mut seen = vec![0; batch * heads * q_len];
            for tile in tiles.iter() {
                assert!(tile.matrices * tile.queries <= tiles.largest());
                let kv_head = tile.head / (heads / kv_heads);
                for i in 0..tile.matrices {
                    let (b, h) = (tile.batch, tile.head + i);
                    let same = h / (heads / kv_heads) == kv_head;
                    assert!(tile.axis != Axis::SharedHeads || same, "{extents:?} {tile:?}");
                    seen[(b * heads + h) * q_len + tile.query..][..tile.queries].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{extents:?}");
            assert!(tiles.largest() == 1 || tiles.largest() * row_bytes <= MAX_BYTES, "{extents:?}");
        }
        // Frames of a video decoder, one after another: rows enough for a product.
        let wan = Extents { batch: 21, q_len: 6240, k_len: 6240, heads: 1, kv_heads: 1, width: 384 };
        let tiles = Tiles::new(wan, 6240 * 6);
        assert_eq!((tiles.axis, tiles.matrices), (Axis::Heads, 1));
        assert!(tiles.queries >= QUERIES, "{tiles:?}");
    }
}
