//! The product in one kernel on compute capability 9.0; see `projection_sm90.cu`.

use candle_core::{CudaDevice, DType, Device, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{Heads, OP};
use crate::{
    cuda::{
        grid::{Divisor, Grid},
        launch::Kernel,
        module::{Module, module},
        paths::{self, Path},
        strides::pitch,
        tensor::{Address, Operand, Output, element_type},
        tensor_map::{Boxes, TensorMap},
    },
    cudnn::DeviceInfo,
    error::{Result, What},
    layout::contiguous,
    linear::LinearWeight,
    target::{check_target, with_address},
};

const MODULE: Module = module!(PROJECTION_SM90);

/// One group that has operands copied, two that compute.
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 231_488;

/// Rows of a cluster of two blocks, and columns of both.
const ROWS: usize = 256;
const COLUMNS: usize = 256;
/// Components of a head, and columns of the branch that a tile makes.
const HEAD: usize = 128;
/// Elements of a step along the depth.
const DEPTH: usize = 64;
/// Tiles of rows that are walked over together, so that what they read stays in the second-level cache.
const GROUP: u32 = 8;

/// `Params` of `projection_*`.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Params {
    x: [TensorMap; 2],
    weight: [TensorMap; 2],
    branch: [TensorMap; 2],
    heads: TensorMap,
    cos: Address,
    sin: Address,
    norms: [Address; 2],
    norm_types: [u32; 2],
    first_heads: u32,
    normed: u32,
    head_tiles: u32,
    branch_tiles: u32,
    row_tiles: [u32; 2],
    group: u32,
    steps: u32,
    gates: u32,
    values: u32,
    eps: f32,
    tokens: Divisor,
    unused: [u32; 7],
}

const _: () = assert!(size_of::<Params>() == 1024, "as in projection_sm90.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// What a product is made of, where the kernel takes it.
#[derive(Clone, Copy)]
struct Factors<'a> {
    x: &'a Tensor,
    matrix: &'a Tensor,
    batch: usize,
    tokens: usize,
}

impl<'a> Factors<'a> {
    fn of(x: &'a Tensor, weight: &'a LinearWeight) -> Option<Self> {
        let (&[batch, tokens, _], matrix) = (x.dims(), weight.tensor()?) else { return None };
        let half = matches!(x.dtype(), DType::BF16 | DType::F16) && matrix.dtype() == x.dtype();
        // What tracks gradients is refused on the other way.
        let packed = |t: &&Tensor| t.is_contiguous() && starts_whole(t) && !t.track_op();
        let placed = matrix.device().same_device(x.device()) && [x, matrix].iter().all(packed);
        (half && placed).then_some(Self { x, matrix, batch, tokens })
    }

    fn rows(self) -> usize {
        self.batch * self.tokens
    }
}

/// Whether a tensor of two-byte elements begins at a multiple of 16 bytes, as copies in boxes want it.
fn starts_whole(t: &Tensor) -> bool {
    t.layout().start_offset().is_multiple_of(8)
}

/// Extents that the products of a launch share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extents {
    depth: usize,
    heads: usize,
    mlp: usize,
}

impl Extents {
    /// Of the columns of heads.
    fn head_columns(self) -> usize {
        3 * self.heads * HEAD
    }

    fn column_tiles(self) -> usize {
        self.head_columns() / COLUMNS + self.mlp / HEAD
    }

    /// Whether tiles are whole in depth and columns, and those of *one* item of each product, which has so many tokens, keep so
    /// many multiprocessors busy nine tenths of the time: else a library's choice of tiles is worth more than what is saved
    /// behind the product. So an item's bits do not depend on how many there are.
    fn serve(self, tokens: &[usize], multiprocessors: usize) -> bool {
        let Self { depth, heads, mlp } = self;
        let whole = heads.is_multiple_of(2) && mlp > 0 && mlp.is_multiple_of(HEAD);
        let deep = depth > 0 && depth.is_multiple_of(DEPTH);
        let small = [depth, self.head_columns() + 2 * mlp].iter().chain(tokens).all(|&n| n < 1 << 30);
        let clusters = multiprocessors / 2;
        if !(whole && deep && small && clusters > 0) || tokens.contains(&0) {
            return false;
        }
        let rows: usize = tokens.iter().sum();
        let row_tiles: usize = tokens.iter().map(|tokens| tokens.div_ceil(ROWS)).sum();
        let tiles = row_tiles * self.column_tiles();
        10 * rows * tiles >= 9 * row_tiles * ROWS * tiles.div_ceil(clusters) * clusters
    }
}

/// One or two products in one launch, if the kernel serves them.
struct Plan<'a> {
    device: &'a CudaDevice,
    extents: Extents,
    first: Factors<'a>,
    second: Option<Factors<'a>>,
    multiprocessors: usize,
}

impl<'a> Plan<'a> {
    fn of(products: &[(&'a Tensor, &'a LinearWeight)], heads: usize, mlp: usize) -> Option<Self> {
        let &[(x, _), ..] = products else { return None };
        let (Device::Cuda(device), &[_, _, depth]) = (x.device(), x.dims()) else { return None };
        let info = DeviceInfo::of(device.cuda_stream().context().ordinal()).ok();
        let info = info.filter(|info| info.capability == 900 && products.len() <= 2)?;
        let multiprocessors = info.multiprocessors as usize;
        let factors: Vec<_> = products.iter().map(|&(x, weight)| Factors::of(x, weight)).collect::<Option<_>>()?;
        let extents = Extents { depth, heads, mlp };
        let columns = extents.head_columns() + 2 * mlp;
        let alike = |f: &Factors<'_>| {
            let same = f.x.dtype() == x.dtype() && f.x.device().same_device(x.device());
            let fits = f.x.dims().last() == Some(&depth) && f.matrix.dims() == [columns, depth];
            same && fits && f.batch > 0 && f.rows() < 1 << 30
        };
        let tokens: Vec<_> = factors.iter().map(|f| f.tokens).collect();
        let serves = factors.iter().all(alike) && extents.serve(&tokens, multiprocessors);
        let (&first, second) = (factors.first()?, factors.get(1).copied());
        serves.then_some(Self { device, extents, first, second, multiprocessors })
    }

    fn dtype(&self) -> DType {
        self.first.x.dtype()
    }

    /// A matrix of `count` rows of `width` elements, `distance` apart, in boxes of `box_rows` rows.
    fn map(&self, address: Address, width: usize, count: usize, distance: usize, box_rows: u32) -> Result<TensorMap> {
        let (extents, strides) = ([width, count], [1, distance]);
        TensorMap::new(&Boxes { address, dtype: self.dtype(), extents, strides, shape: [64, box_rows] })
    }

    /// Enqueues the products, with their branches at these addresses, rows so far apart. `f` adds what heads need to the
    /// parameters.
    ///
    /// # Safety
    /// The branches, and what `f` names, are memory of the plan's extents, and none of it is an operand's.
    unsafe fn launch(&self, branches: [(Address, usize); 2], f: impl FnOnce(&mut Params)) -> Result<()> {
        let Extents { depth, mlp, .. } = self.extents;
        let columns = self.extents.head_columns() + 2 * mlp;
        // x, weight and branch of a product.
        let maps = |f: Factors<'_>, (branch, distance): (Address, usize)| -> Result<[TensorMap; 3]> {
            let [x, matrix] = [Operand::new(OP, f.x)?, Operand::new(OP, f.matrix)?];
            Ok([
                self.map(x.address(), depth, f.rows(), depth, 128)?,
                self.map(matrix.address(), depth, columns, depth, 128)?,
                self.map(branch, mlp, f.rows(), distance, 64)?,
            ])
        };
        let [x, weight, branch] = maps(self.first, branches[0])?;
        // A launch of one product has its maps twice, and no rows the second time.
        let [other_x, other_weight, other_branch] =
            self.second.map_or(Ok([x, weight, branch]), |second| maps(second, branches[1]))?;
        let tiles = [self.first.rows(), self.second.map_or(0, Factors::rows)].map(|rows| rows.div_ceil(ROWS));
        let mut params = Params {
            x: [x, other_x],
            weight: [weight, other_weight],
            branch: [branch, other_branch],
            heads: branch,
            cos: 0,
            sin: 0,
            norms: [0; 2],
            norm_types: [0; 2],
            first_heads: 0,
            normed: 0,
            head_tiles: (self.extents.head_columns() / COLUMNS) as u32,
            branch_tiles: (mlp / HEAD) as u32,
            // All below 2^30.
            row_tiles: tiles.map(|n| n as u32),
            group: GROUP,
            steps: (depth / DEPTH) as u32,
            gates: self.extents.head_columns() as u32,
            values: (self.extents.head_columns() + mlp) as u32,
            eps: 0.0,
            tokens: Divisor::new(OP, self.first.tokens)?,
            unused: [0; 7],
        };
        f(&mut params);
        let clusters = (self.multiprocessors / 2).min((tiles[0] + tiles[1]) * self.extents.column_tiles());
        let grid = Grid::blocks(OP, [2 * clusters as u64, 1, 1], THREADS)?;
        let kernel = Kernel::load(self.device, &MODULE, &format!("projection_{}", self.dtype().as_str()))?;
        // SAFETY: `Params` mirrors that of projection_sm90.cu. The maps are those of the operands and of the caller's places;
        // threads, shared memory and an even number of blocks are those that the kernel is written for.
        unsafe { kernel.launch(Grid { shared_bytes: SHARED_BYTES, ..grid }, &params) }?;
        paths::count(Path::Projection);
        Ok(())
    }
}

/// The plan of a projection with heads, and the distance of the branch's rows.
fn plan<'a>(x: &'a Tensor, weight: &'a LinearWeight, heads: &Heads<'_>, branch: &Tensor) -> Option<(Plan<'a>, usize)> {
    let (&[batch, tokens, mlp], &[HEAD]) = (branch.dims(), heads.norm.query.dims()) else { return None };
    let distance = pitch(&[batch, tokens], &branch.stride()[..2]);
    let distance = distance.filter(|distance| distance.is_multiple_of(8) && starts_whole(branch))?;
    // More heads than rows of a weight fit none.
    if heads.count == 0 || heads.count > weight.out_features() {
        return None;
    }
    Some((Plan::of(&[(x, weight)], heads.count, mlp)?, distance))
}

/// Whether [`run`] serves these operands.
pub(super) fn serves(x: &Tensor, weight: &LinearWeight, heads: &Heads<'_>, branch: &Tensor) -> bool {
    plan(x, weight, heads, branch).is_some()
}

/// Query, key and value, and the branch in its place; `None`, and nothing, if the kernel does not serve them.
pub(super) fn run(
    x: &Tensor,
    weight: &LinearWeight,
    heads: &Heads<'_>,
    branch: &Tensor,
) -> Result<Option<[Tensor; 3]>> {
    let Some((plan, distance)) = plan(x, weight, heads, branch) else { return Ok(None) };
    let Factors { matrix, batch, tokens, .. } = plan.first;
    check_target(OP, branch, &[batch, tokens, plan.extents.mlp], x, &[matrix])?;
    heads.check(x, tokens, HEAD)?;
    let small = [heads.cos, heads.sin, heads.norm.query, heads.norm.key].map(|t| Operand::new(OP, &contiguous(t)?));
    let [cos, sin, query, key] = small;
    let (cos, sin, query, key) = (cos?, sin?, query?, key?);
    let norm_type = |norm: &Operand| element_type(OP, "norm", norm.tensor().dtype());
    let norm_types = [norm_type(&query)?, norm_type(&key)?];
    let (rows, columns) = (batch * tokens, plan.extents.head_columns());
    let out = Output::new(OP, plan.device, plan.dtype(), rows * columns)?;
    let map = plan.map(out.address(), columns, rows, columns, 64)?;
    with_address(OP, branch, |address| {
        let with_heads = |params: &mut Params| {
            params.heads = map;
            (params.cos, params.sin) = (cos.address(), sin.address());
            (params.norms, params.norm_types) = ([query.address(), key.address()], norm_types);
            // Below 2^30.
            (params.first_heads, params.normed) = (heads.count as u32, 2 * heads.count as u32);
            params.eps = heads.eps as f32;
        };
        // SAFETY: out is new memory of `columns` a row, the branch has the plan's extents and shares no memory with what is
        // read; the tables have 64 elements for each token, the norms 128.
        unsafe { plan.launch([(address, distance); 2], with_heads) }
    })?;
    let all = out.into_tensor(OP, (batch, tokens, 3, heads.count, HEAD))?;
    let part = |index: usize| all.narrow(2, index, 1).and_then(|part| part.squeeze(2)).what(OP);
    Ok(Some([part(0)?, part(1)?, part(2)?]))
}

/// SwiGLU of one or two products; `None`, and nothing, if the kernel does not serve them.
pub(super) fn swiglu(products: &[(&Tensor, &LinearWeight)]) -> Result<Option<Vec<Tensor>>> {
    let mlp = products.first().map_or(0, |(_, weight)| weight.out_features() / 2);
    let Some(plan) = Plan::of(products, 0, mlp) else { return Ok(None) };
    let factors: Vec<_> = [plan.first].into_iter().chain(plan.second).collect();
    let new = |f: &Factors<'_>| Output::new(OP, plan.device, plan.dtype(), f.rows() * mlp);
    let outs = factors.iter().map(new).collect::<Result<Vec<_>>>()?;
    let Some((first, last)) = outs.first().zip(outs.last()) else { return Ok(None) };
    // SAFETY: new memory of the plan's extents.
    unsafe { plan.launch([(first.address(), mlp), (last.address(), mlp)], |_| ()) }?;
    let tensors = factors.iter().zip(outs).map(|(f, out)| out.into_tensor(OP, (f.batch, f.tokens, mlp)));
    Ok(Some(tensors.collect::<Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fill_the_device_or_a_library_does_it() {
        let klein = Extents { depth: 3072, heads: 24, mlp: 9216 };
        let serves = |tokens| klein.serve(&[tokens], 132);
        assert!(serves(1536) && serves(4608) && serves(2200));
        // A last tile of 76 rows, and 8.2 rounds.
        assert!(!serves(1100) && !serves(256) && !serves(0));
        let other = |heads, mlp, depth| Extents { heads, mlp, depth }.serve(&[4608], 132);
        assert!(other(24, 9216, 3072) && !other(23, 9216, 3072) && !other(24, 9200, 3072) && !other(24, 9216, 3080));
        assert!(!klein.serve(&[4608], 1));
        // The streams of a double block: 6.5 rounds together; alone, 4.4 and 2.2.
        let branch = Extents { heads: 0, ..klein };
        assert!(branch.serve(&[1024, 512], 132) && branch.serve(&[4096, 512], 132));
        assert!(!branch.serve(&[1024], 132) && !branch.serve(&[512], 132) && !branch.serve(&[256, 512], 132));
    }
}
