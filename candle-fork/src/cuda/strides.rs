//! Index spaces that several strided operands share, made as simple as they are: axes without effect dropped, axes that
//! lie as one merged, the order of the axes that of the memory written to.

use crate::error::{Error, Result};

/// Most axes that a kernel walks over, after merging.
pub const MAX_RANK: usize = 8;

/// Axes, outermost first, with the distance of neighbours in each of `N` operands, in elements. Kernels read the arrays
/// as they are; entries beyond the rank are extent 1 and distance 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space<const N: usize> {
    /// Axes, at least one.
    pub rank: usize,
    /// Extents.
    pub dims: [u64; MAX_RANK],
    /// Distances, by operand.
    pub strides: [[u64; MAX_RANK]; N],
}

impl<const N: usize> Space<N> {
    /// The space `dims` with the strides of each operand. Axes are sorted by the strides of the *last* operand: pass the
    /// one that is written. Their order in `dims` is lost, so this is for ops that treat every element alike.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if more than [`MAX_RANK`] axes remain.
    pub fn new(op: &'static str, dims: &[usize], strides: [&[usize]; N]) -> Result<Self> {
        let mut axes: Vec<(u64, [u64; N])> = (0..dims.len())
            .filter(|&axis| dims[axis] != 1)
            .map(|axis| (dims[axis] as u64, strides.map(|s| s.get(axis).copied().unwrap_or(0) as u64)))
            .collect();
        // Stable: axes that the last operand does not tell apart stay in order.
        axes.sort_by_key(|(_, strides)| std::cmp::Reverse(*strides.last().unwrap_or(&0)));
        let mut merged: Vec<(u64, [u64; N])> = Vec::with_capacity(axes.len());
        for (n, inner) in axes {
            match merged.last_mut() {
                Some((outer_n, outer)) if (0..N).all(|i| outer[i] == inner[i] * n) => {
                    *outer_n *= n;
                    *outer = inner;
                }
                _ => merged.push((n, inner)),
            }
        }
        if merged.len() > MAX_RANK {
            return Err(Error::Unsupported { op, what: format!("{dims:?} with strides {strides:?}") });
        }
        let mut space = Self { rank: merged.len().max(1), dims: [1; MAX_RANK], strides: [[0; MAX_RANK]; N] };
        for (axis, (n, distances)) in merged.into_iter().enumerate() {
            space.dims[axis] = n;
            for (operand, distance) in distances.into_iter().enumerate() {
                space.strides[operand][axis] = distance;
            }
        }
        Ok(space)
    }

    /// Elements of the space.
    pub fn len(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    /// The widest access in bytes, a power of two up to 16, at which every operand can be walked from its byte address,
    /// given elements of `size` bytes: all of them packed along the innermost axis, everything else a multiple.
    pub fn access(&self, size: usize, addresses: [u64; N]) -> usize {
        let inner = self.rank - 1;
        // One element has any stride.
        let packed = self.dims[inner] == 1 || self.strides.iter().all(|s| s[inner] == 1);
        let whole = |bytes: u64| {
            let outer = self.strides.iter().flat_map(|s| &s[..inner]);
            (self.dims[inner] * size as u64).is_multiple_of(bytes)
                && outer.map(|s| s * size as u64).chain(addresses).all(|n| n.is_multiple_of(bytes))
        };
        let wider = [16, 8, 4, 2].into_iter().filter(|&bytes| bytes > size && bytes.is_multiple_of(size));
        wider.into_iter().find(|&bytes| packed && whole(bytes as u64)).unwrap_or(size)
    }

    /// The same space in vectors of `count` elements along the innermost axis, for a `count` that [`Self::access`]
    /// allows.
    pub fn in_vectors(mut self, count: usize) -> Self {
        let (inner, count) = (self.rank - 1, count as u64);
        if count > 1 {
            self.dims[inner] /= count;
            for strides in &mut self.strides {
                strides[..inner].iter_mut().for_each(|s| *s /= count);
                strides[inner] = 1;
            }
        }
        self
    }
}

/// Strides of a row-major tensor.
pub fn row_major(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis].max(1);
    }
    strides
}

/// The distance of neighbours if the axes are one axis in row-major order, cut or not out of something wider: what a matrix
/// product calls the leading dimension of rows. `None` if they are not; 0 if there are no two neighbours.
pub fn pitch(dims: &[usize], strides: &[usize]) -> Option<usize> {
    let mut inwards = dims.iter().zip(strides).rev().filter(|&(&n, _)| n != 1);
    let Some((&n, &pitch)) = inwards.next() else { return Some(0) };
    let mut span = pitch * n;
    inwards
        .all(|(&n, &stride)| {
            let follows = stride == span;
            span *= n;
            follows
        })
        .then_some(pitch)
}

/// Whether every index of `dims` reaches another element, by a test that all layouts pass which come from cutting and
/// permuting a packed one: each stride steps over all that the smaller ones span.
pub fn writes_once(dims: &[usize], strides: &[usize]) -> bool {
    let mut axes: Vec<_> = dims.iter().zip(strides).filter(|&(&n, _)| n > 1).collect();
    axes.sort_by_key(|&(_, stride)| *stride);
    let mut span = 0;
    axes.into_iter().all(|(n, &stride)| {
        let free = stride > span;
        span += (n - 1) * stride;
        free
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of every element in every operand, sorted.
    fn offsets<const N: usize>(dims: &[u64], strides: [&[u64]; N]) -> Vec<[u64; N]> {
        let mut all = vec![[0; N]];
        for (axis, &n) in dims.iter().enumerate() {
            all = all
                .iter()
                .flat_map(|o| {
                    let strides = &strides;
                    (0..n).map(move |i| std::array::from_fn(|k| o[k] + i * strides[k][axis]))
                })
                .collect();
        }
        all.sort_unstable();
        all
    }

    fn check(dims: &[usize], a: &[usize], b: &[usize], rank: usize) {
        let space = Space::new("test", dims, [a, b]).unwrap();
        assert_eq!(space.rank, rank, "{dims:?} {a:?} {b:?}: {space:?}");
        assert_eq!(space.len(), dims.iter().product::<usize>() as u64);
        let wide = |s: &[usize]| s.iter().map(|&n| n as u64).collect::<Vec<_>>();
        let want = offsets(&wide(dims), [&wide(a), &wide(b)]);
        let got = offsets(&space.dims[..rank], [&space.strides[0][..rank], &space.strides[1][..rank]]);
        assert_eq!(got, want);
        assert!(space.strides[1][..rank].is_sorted_by(|x, y| x >= y), "written in order: {space:?}");
    }

    #[test]
    fn spaces_hold_the_same_elements_in_fewer_axes() {
        let dims = [2, 3, 4, 5];
        let packed = row_major(&dims);
        assert_eq!(packed, [60, 20, 5, 1]);
        check(&dims, &packed, &packed, 1);
        // Channels-last on both sides is one run too.
        check(&dims, &[60, 1, 15, 3], &[60, 1, 15, 3], 1);
        // Channels-first to channels-last: pixels stay one axis.
        check(&dims, &packed, &[60, 1, 15, 3], 3);
        // A part of a longer axis on one side.
        check(&dims, &[600, 20, 5, 1], &packed, 2);
        check(&dims, &[120, 40, 10, 2], &packed, 1);
        // Broadcast, extents of 1 with any stride, no axis.
        check(&dims, &[0, 0, 0, 0], &packed, 1);
        check(&[1, 7, 1], &[99, 1, 3], &[5, 1, 0], 1);
        check(&[], &[], &[], 1);
        let nothing = Space::new("test", &[3, 0, 2], [&[0, 2, 1]]).unwrap();
        assert!(nothing.is_empty());
        let dims = [2; 9];
        let far = [1000, 900, 800, 700, 600, 500, 400, 300, 200];
        assert!(matches!(Space::new("test", &dims, [&far]), Err(Error::Unsupported { .. })));
        assert!(Space::new("test", &dims[..8], [&far[..8]]).is_ok());
    }

    #[test]
    fn accesses_are_as_wide_as_everything_allows() {
        // 24 channels of 2 bytes, rows cut from rows of 40.
        let space = Space::new("test", &[10, 24], [&[40, 1], &[24, 1]]).unwrap();
        assert_eq!(space.access(2, [0, 256]), 16);
        assert_eq!(space.access(2, [8, 256]), 8);
        assert_eq!(space.access(2, [0, 4]), 4);
        assert_eq!(space.access(2, [2, 0]), 2);
        assert_eq!(space.access(1, [0, 0]), 8);
        let vectors = space.in_vectors(8);
        assert_eq!((vectors.dims[..2].to_vec(), vectors.strides[0][..2].to_vec()), (vec![10, 3], vec![5, 1]));
        // Rows of 25, or steps of 36, stop it.
        assert_eq!(Space::new("test", &[10, 25], [&[40, 1], &[32, 1]]).unwrap().access(2, [0, 0]), 2);
        assert_eq!(Space::new("test", &[10, 24], [&[36, 1], &[24, 1]]).unwrap().access(2, [0, 0]), 8);
        // Not packed on one side.
        assert_eq!(Space::new("test", &[16, 16], [&[64, 4], &[16, 1]]).unwrap().access(4, [0, 0]), 4);
        assert_eq!(Space::new("test", &[16, 16], [&[4, 64], &[16, 1]]).unwrap().access(4, [0, 0]), 4);
    }

    #[test]
    fn only_layouts_without_overlap_are_written() {
        assert!(writes_once(&[2, 3, 4], &[12, 4, 1]) && writes_once(&[2, 3, 4], &[1, 2, 6]));
        assert!(writes_once(&[2, 3, 4], &[100, 10, 2]) && writes_once(&[1, 5], &[0, 1]) && writes_once(&[], &[]));
        assert!(!writes_once(&[2, 3], &[0, 1]) && !writes_once(&[2, 3], &[2, 1]) && !writes_once(&[2, 2], &[1, 1]));
    }

    #[test]
    fn pitched_rows_are_one_axis() {
        assert_eq!(pitch(&[2, 3, 4], &[12, 4, 1]), Some(1));
        assert_eq!(pitch(&[2, 3, 4], &[120, 40, 10]), Some(10));
        assert_eq!(pitch(&[2, 1, 4], &[40, 7, 10]), Some(10));
        assert_eq!(pitch(&[1, 1], &[3, 4]), Some(0));
        assert_eq!(pitch(&[2, 3], &[1, 2]), None);
        assert_eq!(pitch(&[2, 3], &[4, 1]), None);
    }
}
