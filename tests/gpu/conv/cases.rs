//! The convolutions that are compared: a table of the edges, and random ones.

use candle_fork::ConvParams;
use tests::gpu::Choices;

/// A convolution over `D` axes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case<const D: usize> {
    pub(crate) n: usize,
    pub(crate) c: usize,
    pub(crate) k: usize,
    pub(crate) input: [usize; D],
    pub(crate) filter: [usize; D],
    pub(crate) params: ConvParams<D>,
}

/// `(n, c -> k, input, filter)` with default parameters.
fn case<const D: usize>(n: usize, [c, k]: [usize; 2], input: [usize; D], filter: [usize; D]) -> Case<D> {
    Case { n, c, k, input, filter, params: ConvParams::default() }
}

impl<const D: usize> Case<D> {
    fn pad(mut self, padding: [(usize, usize); D]) -> Self {
        self.params.padding = padding;
        self
    }

    fn same(self) -> Self {
        let padding = self.filter.map(|f| ((f - 1) / 2, f / 2));
        self.pad(padding)
    }

    fn stride(mut self, stride: [usize; D]) -> Self {
        self.params.stride = stride;
        self
    }

    fn dilate(mut self, dilation: [usize; D]) -> Self {
        self.params.dilation = dilation;
        self
    }

    fn groups(mut self, groups: usize) -> Self {
        self.params.groups = groups;
        self
    }

    /// Extents of the output, 0 where the filter does not fit.
    fn output(&self) -> [usize; D] {
        std::array::from_fn(|axis| {
            let (before, after) = self.params.padding[axis];
            let span = (self.filter[axis] - 1) * self.params.dilation[axis] + 1;
            let room = (self.input[axis] + before + after).checked_sub(span);
            room.map_or(0, |room| room / self.params.stride[axis] + 1)
        })
    }

    /// Products in all.
    pub(crate) fn products(&self) -> usize {
        let depth = self.c / self.params.groups * self.filter.iter().product::<usize>();
        self.n * self.k * depth * self.output().iter().product::<usize>()
    }

    pub(crate) fn x_dims(&self) -> Vec<usize> {
        [&[self.n, self.c][..], &self.input].concat()
    }

    pub(crate) fn weight_dims(&self) -> Vec<usize> {
        [&[self.k, self.c / self.params.groups][..], &self.filter].concat()
    }

    pub(crate) fn output_dims(&self) -> Vec<usize> {
        [&[self.n, self.k][..], &self.output()].concat()
    }

    /// One tap, one step, no padding: a product of matrices, which takes no convolution backend.
    pub(crate) fn is_pointwise(&self) -> bool {
        let one = |values: &[usize; D]| values.iter().all(|&v| v == 1);
        one(&self.filter) && one(&self.params.stride) && self.params.padding == [(0, 0); D]
    }
}

pub(crate) fn one_axis() -> Vec<Case<1>> {
    vec![
        case(1, [1, 1], [1], [1]),
        case(1, [3, 8], [37], [3]).same(),
        case(2, [16, 16], [64], [3]).same(),
        case(1, [96, 96], [33], [3]).pad([(2, 0)]),
        case(1, [98, 98], [31], [3]).same(),
        case(1, [192, 96], [40], [1]),
        case(1, [384, 32], [17], [3]).same(),
        case(2, [8, 24], [50], [5]).stride([2]).same(),
        case(1, [8, 8], [50], [3]).dilate([4]).pad([(4, 4)]),
        case(1, [8, 8], [50], [3]).dilate([3]).stride([2]).pad([(0, 5)]),
        case(3, [6, 6], [20], [3]).groups(6).same(),
        case(2, [16, 32], [20], [4]).groups(4),
        case(1, [16, 16], [3], [7]).pad([(2, 2)]),
        case(1, [16, 16], [5], [3]).pad([(9, 9)]),
        case(1, [8, 8], [5000], [3]).same(),
        case(5, [1, 3], [11], [11]),
    ]
}

pub(crate) fn two_axes() -> Vec<Case<2>> {
    vec![
        case(1, [1, 1], [1, 1], [1, 1]),
        case(1, [3, 5], [1, 1], [1, 1]),
        case(1, [3, 96], [17, 23], [3, 3]).same(),
        case(2, [16, 16], [16, 16], [3, 3]).same(),
        case(1, [96, 96], [12, 13], [3, 3]).same(),
        case(1, [96, 3], [15, 16], [3, 3]).same(),
        case(2, [128, 3], [19, 70], [3, 3]).pad([(1, 0), (0, 2)]),
        case(1, [96, 1], [9, 33], [3, 3]),
        case(1, [98, 98], [7, 9], [3, 3]).same(),
        case(1, [192, 192], [6, 7], [3, 3]).same(),
        case(1, [384, 384], [3, 4], [3, 3]).same(),
        case(1, [384, 192], [4, 5], [3, 3]).same(),
        case(1, [192, 96], [9, 10], [2, 2]).pad([(1, 0), (1, 0)]),
        case(1, [192, 96], [9, 10], [2, 2]).pad([(0, 1), (0, 1)]),
        case(1, [96, 96], [9, 10], [2, 2]).pad([(1, 0), (0, 1)]),
        case(1, [96, 96], [9, 10], [3, 3]).stride([2, 2]).pad([(0, 1), (0, 1)]),
        case(2, [32, 64], [13, 11], [3, 3]).stride([2, 2]).same(),
        case(1, [384, 1152], [5, 6], [1, 1]),
        case(3, [96, 96], [9, 11], [1, 1]),
        case(1, [96, 96], [9, 11], [1, 1]).stride([2, 2]),
        case(1, [96, 96], [9, 11], [1, 1]).pad([(1, 1), (0, 2)]),
        case(1, [12, 20], [9, 9], [3, 3]).same(),
        case(1, [13, 17], [9, 9], [3, 3]).same(),
        case(1, [8, 8], [1, 100], [1, 3]).same(),
        case(1, [8, 8], [100, 1], [3, 1]).same(),
        case(2, [8, 16], [9, 10], [3, 2]).stride([1, 2]).dilate([2, 3]),
        case(1, [16, 16], [12, 40], [3, 3]).dilate([1, 5]).pad([(1, 1), (5, 5)]),
        case(1, [16, 16], [15, 15], [3, 3]).dilate([2, 2]).pad([(2, 2), (2, 2)]),
        case(1, [8, 8], [2, 2], [5, 5]).pad([(2, 2), (2, 2)]),
        case(1, [8, 8], [1, 3], [4, 2]).pad([(3, 0), (0, 7)]),
        case(1, [8, 8], [10, 10], [5, 5]).groups(8).stride([2, 2]).same(),
        case(2, [96, 96], [10, 10], [3, 3]).groups(96).same(),
        case(1, [32, 64], [8, 8], [3, 3]).groups(32).same(),
        case(1, [32, 32], [8, 9], [3, 3]).groups(4).same(),
        case(2, [6, 9], [7, 5], [3, 3]).groups(3),
        case(1, [64, 64], [10, 10], [3, 3]).groups(2).dilate([2, 2]).same(),
        case(1, [8, 8], [31, 33], [7, 7]).same(),
        case(4, [8, 24], [6, 6], [6, 6]),
        case(1, [8, 16], [20, 20], [4, 4]).stride([4, 4]),
        case(1, [8, 16], [65, 63], [3, 3]).same(),
        case(1, [2, 130], [8, 8], [3, 3]).same(),
        case(6, [24, 24], [4, 4], [3, 3]).same(),
    ]
}

pub(crate) fn three_axes() -> Vec<Case<3>> {
    /// Two frames of the past in front, as a causal convolution has them.
    const CAUSAL: [(usize, usize); 3] = [(2, 0), (1, 1), (1, 1)];
    /// A past that is part of the input.
    const SPATIAL: [(usize, usize); 3] = [(0, 0), (1, 1), (1, 1)];
    vec![
        case(1, [1, 1], [1, 1, 1], [1, 1, 1]),
        case(1, [3, 96], [3, 9, 10], [3, 3, 3]).pad(SPATIAL),
        case(1, [16, 32], [3, 6, 10], [3, 3, 3]).pad(SPATIAL),
        case(1, [96, 96], [4, 7, 9], [3, 3, 3]).pad(SPATIAL),
        case(1, [96, 96], [2, 6, 5], [3, 3, 3]).pad(CAUSAL),
        case(1, [96, 3], [6, 8, 9], [3, 3, 3]).pad(SPATIAL),
        case(2, [96, 2], [4, 9, 34], [3, 3, 3]).pad(CAUSAL),
        case(1, [128, 3], [1, 7, 10], [3, 3, 3]).pad([(1, 3), (3, 0), (1, 2)]),
        case(1, [96, 3], [2, 17, 5], [1, 3, 3]).pad(SPATIAL),
        case(1, [98, 98], [3, 5, 5], [3, 3, 3]).pad(SPATIAL),
        case(1, [192, 192], [3, 4, 5], [3, 3, 3]).pad(SPATIAL),
        case(1, [384, 384], [3, 2, 2], [3, 3, 3]).pad(SPATIAL),
        case(1, [192, 384], [3, 2, 3], [3, 3, 3]).pad(SPATIAL),
        case(1, [384, 768], [4, 3, 4], [3, 1, 1]),
        case(1, [96, 192], [5, 6, 7], [3, 1, 1]).pad([(2, 0), (0, 0), (0, 0)]),
        case(1, [96, 96], [5, 6, 7], [3, 1, 1]).stride([2, 1, 1]),
        case(1, [96, 96], [3, 8, 9], [1, 3, 3]).pad(SPATIAL),
        case(1, [384, 192], [1, 4, 5], [1, 3, 3]).pad(SPATIAL),
        case(1, [96, 96], [2, 9, 9], [1, 3, 3]).stride([1, 2, 2]).pad([(0, 0), (0, 1), (0, 1)]),
        case(1, [96, 96], [2, 7, 9], [1, 2, 2]).pad([(0, 0), (1, 0), (0, 1)]),
        case(1, [192, 384], [2, 6, 7], [1, 1, 1]),
        case(2, [16, 16], [3, 5, 6], [1, 1, 1]),
        case(1, [16, 16], [5, 6, 7], [2, 2, 2]).stride([2, 2, 2]),
        case(2, [8, 16], [3, 4, 5], [3, 3, 3]),
        case(2, [24, 24], [4, 5, 6], [3, 3, 3]).same(),
        case(1, [8, 16], [7, 6, 7], [3, 2, 3]).dilate([3, 2, 1]),
        case(1, [16, 16], [7, 9, 9], [3, 3, 3]).dilate([2, 2, 2]).pad([(4, 0), (2, 2), (2, 2)]),
        case(1, [32, 32], [4, 5, 6], [3, 3, 3]).groups(32).same(),
        case(1, [32, 64], [4, 5, 6], [3, 3, 3]).groups(4).same(),
        case(2, [6, 12], [4, 5, 6], [2, 3, 2]).groups(2),
        case(1, [8, 8], [1, 2, 1], [4, 3, 2]).pad([(3, 0), (0, 2), (1, 1)]),
        case(1, [8, 8], [1, 1, 40], [1, 1, 3]).same(),
        case(1, [8, 8], [40, 1, 1], [3, 1, 1]).same(),
        case(1, [12, 160], [3, 6, 6], [3, 3, 3]).pad(SPATIAL),
        case(1, [256, 12], [3, 5, 6], [3, 3, 3]).pad(SPATIAL),
        case(1, [48, 64], [3, 5, 4], [3, 3, 3]).pad(SPATIAL),
        case(1, [13, 7], [3, 11, 5], [2, 3, 2]).same(),
    ]
}

/// Most products of a random case: the reference takes a fraction of a second.
const MAX_PRODUCTS: usize = 12_000_000;

/// `count` random cases.
pub(crate) fn random<const D: usize>(seed: u64, count: usize) -> Vec<Case<D>> {
    let mut choices = Choices::new(seed ^ D as u64);
    let mut cases = Vec::new();
    while cases.len() < count {
        let groups = choices.of(&[1, 1, 1, 1, 2, 3, 8]);
        let per_group = [&[1, 3, 4, 8, 12, 16, 17, 24][..], &[32, 48, 64, 96, 98, 192, 384]].concat();
        let [c, k] = [choices.of(&per_group), choices.of(&per_group)].map(|channels| channels * groups);
        let filter = std::array::from_fn(|_| choices.of(&[1, 1, 2, 3, 3, 3, 4, 5]));
        let params = ConvParams {
            stride: std::array::from_fn(|_| choices.of(&[1, 1, 1, 2, 3])),
            dilation: std::array::from_fn(|_| choices.of(&[1, 1, 1, 2])),
            padding: std::array::from_fn(|_| (choices.below(3), choices.below(3))),
            groups,
        };
        let input = std::array::from_fn(|_| 1 + choices.below(if D == 1 { 90 } else { 18 }));
        let case = Case { n: choices.of(&[1, 1, 2, 3]), c, k, input, filter, params };
        let fits = case.output().iter().all(|&extent| extent > 0);
        if fits && case.products() <= MAX_PRODUCTS {
            cases.push(case);
        }
    }
    cases
}
