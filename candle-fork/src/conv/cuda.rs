//! The device path of our own.
//!
//! Half precision without groups and with channels in eights: one kernel that gathers patches into shared memory and
//! multiplies them there (`implicit_gemm.cu`). Everything else: patches of a tile of pixels into a buffer, one matrix product
//! per tile, bias and residual onto its f32 sums.
//!
//! ```text
//! half precision, channels-last:   out [pixels, K]  =  columns [pixels, taps x C] * weight [K, taps x C]^T
//! f32, channels-first, per image:  out [K, pixels]  =  weight [K, C x taps] * columns [C x taps, pixels]
//! ```
//!
//! Groups and images are batches of the product. A pointwise convolution needs no columns: the input is one operand.
//! The buffer is bounded (`tiles.rs`), offsets are 64-bit, sums are in f32 and rounded once; with the same device, shapes
//! and layouts the same bits come out, whatever ran before.

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    ConvProblem, OP,
    choose::{Path, choose},
    few_filters, implicit_gemm,
    tiles::{PlaneTile, PlaneTiles, RowTile, RowTiles, Window},
    upsample::{self, ParityFilters},
};
use crate::{
    cuda::{
        arena,
        blas::{Matrix, Product, multiply},
        epilogue,
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        paths,
        strides::pitch,
        tensor::{Address, Operand, Output, device_of, small_operand},
    },
    cudnn_policy,
    error::{Result, What},
    layout,
};

const MODULE: Module = module!(IM2COL);

/// Rows of columns that a thread of `im2col_planes_4` writes before the grid repeats.
const ROWS_PER_THREAD: u64 = 8;

/// Channels that one thread of `im2col_rows_16` moves.
const CHANNELS_PER_ACCESS: usize = 8;

/// See [`super::conv_nd_add`], which has checked everything but whether the device can.
///
/// Half precision gives a channels-last result, f32 a contiguous one. A weight of x's dtype that is channels-last (half
/// precision) or contiguous (f32) is read where it lies, another order is repacked for the call. Where dtypes differ,
/// everything is widened to f32 for the call, which is slow but exact.
pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    problem: &ConvProblem,
    output_dims: Vec<usize>,
) -> Result<Tensor> {
    let dtype = x.dtype();
    if residual.is_none() && dtype == weight.dtype() && few_filters::serves(problem, dtype) {
        return few_filters::forward(x, weight, bias, problem, &output_dims);
    }
    if dtype != DType::F32 && dtype != weight.dtype() {
        let wide = forward(&widened(x)?, weight, bias, residual, problem, output_dims)?;
        return layout::channels_last(&wide.to_dtype(dtype).what("conv: rounding")?);
    }
    let weight = if dtype == DType::F32 { widened(weight)? } else { weight.clone() };
    let residual = residual.map(|r| r.to_dtype(dtype).what("conv: residual")).transpose()?;
    let bias = bias.map(small_operand).transpose()?;
    let call = Call {
        device: device_of(OP, x)?,
        dtype,
        bias: bias.as_ref(),
        problem,
        window: Window::new(problem)?,
        output_dims,
    };
    match dtype {
        DType::F32 => call.planes(x, &weight, residual.as_ref()),
        _ => call.rows(x, &weight, residual.as_ref()),
    }
}

/// [`super::upsample_conv2d`] in one buffer; `None` where the policy wants cuDNN or the kernel does not serve, and for operands
/// that are for [`super::conv_nd`] to judge.
pub(super) fn upsample(x: &Tensor, filters: &ParityFilters, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    let (dtype, filters) = (x.dtype(), filters.filters());
    let fits = |t: &Tensor| t.device().same_device(x.device()) && !t.track_op();
    let half = matches!(dtype, DType::F16 | DType::BF16) && filters.iter().all(|t| t.dtype() == dtype && fits(t));
    if !x.device().is_cuda() || !half || x.track_op() || !bias.is_none_or(fits) {
        return Ok(None);
    }
    let problem = |parity: usize| ConvProblem::new(x.dims(), filters[parity].dims(), &upsample::params(parity));
    let first = problem(0)?;
    let own = choose(&first, 2, dtype, false, cudnn_policy::backend()) == Path::Own;
    if !own || !implicit_gemm::serves(&first) || bias.is_some_and(|bias| bias.dims() != [first.k]) {
        return Ok(None);
    }
    let device = device_of(OP, x)?;
    let (n, k, [_, h, w]) = (first.n, first.k, first.output);
    let output = Output::new(OP, device, dtype, 4 * n * k * h * w)?;
    let bias = bias.map(small_operand).transpose()?;
    let dims = [n, k, 2 * h, 2 * w];
    for (parity, weight) in filters.iter().enumerate() {
        let problem = problem(parity)?;
        let call = Call {
            device,
            dtype,
            bias: bias.as_ref(),
            problem: &problem,
            window: Window::new(&problem)?,
            output_dims: dims.to_vec(),
        };
        let weight = Operand::new(OP, &layout::channels_last(weight)?)?;
        let first = (parity / 2 * 2 * w + parity % 2) * k;
        let out = implicit_gemm::Place {
            address: output.address() + (first * dtype.size_in_bytes()) as u64,
            strides: [4 * h * w * k, 4 * h * w * k, 4 * w * k, 2 * k],
        };
        if !call.implicit(x, &weight, None, out)? {
            return Ok(None);
        }
    }
    output.into_channels_last(OP, &dims).map(Some)
}

fn widened(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32).what("conv: widening")
}

/// What both paths need.
struct Call<'a> {
    device: &'a CudaDevice,
    dtype: DType,
    bias: Option<&'a Operand>,
    problem: &'a ConvProblem,
    window: Window,
    output_dims: Vec<usize>,
}

/// Distances along N, C, D, H, W. Absent axes are of extent 1, and so is their index.
pub(super) fn strides(x: &Tensor) -> [usize; 5] {
    let mut strides = [0; 5];
    let (lead, axes) = x.stride().split_at(2);
    strides[..2].copy_from_slice(lead);
    strides[5 - axes.len()..].copy_from_slice(axes);
    strides
}

/// Extents N, D, H, W and their strides: what counts pixels.
pub(super) fn pixel_axes(problem: &ConvProblem, strides: [usize; 5]) -> ([usize; 4], [usize; 4]) {
    let [d, h, w] = problem.input;
    let [sn, _, sd, sh, sw] = strides;
    ([problem.n, d, h, w], [sn, sd, sh, sw])
}

impl Call<'_> {
    /// Half precision: pixels are rows.
    fn rows(&self, x: &Tensor, weight: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let &ConvProblem { n, c, k, groups, .. } = self.problem;
        let size = self.dtype.size_in_bytes();
        let weight = Operand::new(OP, &layout::channels_last(weight)?)?;
        let residual = residual.map(|r| Operand::new(OP, &layout::channels_last(r)?)).transpose()?;
        let output = Output::new(OP, self.device, self.dtype, n * k * self.problem.pixels())?;
        let out = implicit_gemm::Place::packed(output.address(), self.problem);
        if self.implicit(x, &weight, residual.as_ref(), out)? {
            return output.into_channels_last(OP, &self.output_dims);
        }
        let x = Operand::new(OP, &self.rows_input(x)?)?;

        let plain = self.bias.is_none() && residual.is_none();
        let direct = if self.problem.is_pointwise() { self.row_pitch(x.tensor()) } else { None };
        // Scratch of a pixel: its patches, then its sums.
        let columns_bytes = if direct.is_some() { 0 } else { groups * self.problem.depth() * size };
        let sums_bytes = if plain { 0 } else { k * 4 };
        let tiles = RowTiles::new(self.problem, columns_bytes + sums_bytes);
        let columns_bytes = (tiles.largest() * columns_bytes).next_multiple_of(256);
        arena::with(self.device, columns_bytes + tiles.largest() * sums_bytes, |scratch| {
            let sums = scratch + columns_bytes as u64;
            for tile in tiles.iter() {
                let at = |width: usize| (tile.first * width * size) as u64;
                let left = match direct {
                    Some(pitch) => Matrix::rows(x.address() + at(pitch), pitch).every(c / groups),
                    None => {
                        self.patch_rows(&x, tile, scratch)?;
                        let depth = self.problem.depth();
                        Matrix::rows(scratch, groups * depth).every(depth)
                    }
                };
                let result = output.address() + at(k);
                let (out, dtype) = if plain { (result, self.dtype) } else { (sums, DType::F32) };
                self.row_product(tile, left, weight.address(), out, dtype)?;
                if !plain {
                    let residual = residual.as_ref().map_or(0, |r| r.address() + at(k));
                    let shape = [tile.count, k];
                    // SAFETY: sums, residual and result cover the tile's rows of k elements; the result is new memory.
                    unsafe { epilogue::columns(self.device, self.dtype, shape, sums, self.bias, residual, result) }?;
                }
            }
            Ok(())
        })?;
        output.into_channels_last(OP, &self.output_dims)
    }

    /// Enqueues the implicit product if it serves the problem and the operands lie as it wants them; a copy of x may be made
    /// for that. Says whether it did.
    fn implicit(
        &self,
        x: &Tensor,
        weight: &Operand,
        residual: Option<&Operand>,
        out: implicit_gemm::Place,
    ) -> Result<bool> {
        if !implicit_gemm::serves(self.problem) {
            return Ok(false);
        }
        let x = if wide_strides(x) { x.clone() } else { layout::channels_last(x)? };
        let x = Operand::new(OP, &x)?;
        if ![x.address(), weight.address()].iter().all(|address| address.is_multiple_of(16)) {
            return Ok(false);
        }
        let [n, _, d, h, w] = strides(x.tensor());
        let convolution = implicit_gemm::Convolution {
            device: self.device,
            dtype: self.dtype,
            problem: self.problem,
            window: self.window,
            x: &x,
            strides: [n, d, h, w],
            weight,
            bias: self.bias,
            residual: residual.map_or(0, Operand::address),
            out,
        };
        // SAFETY: x has packed channels at multiples of 16 bytes, or is a copy that has; the weight is packed, both at aligned
        // addresses; bias and residual have been checked to be of the filters and of the result, which `out` has room for.
        unsafe { implicit_gemm::enqueue(&convolution) }?;
        paths::count(paths::Path::ImplicitProduct);
        Ok(true)
    }

    /// x itself, or its copy in an order that the wide kernel or the product reads.
    fn rows_input(&self, x: &Tensor) -> Result<Tensor> {
        let readable = if self.problem.is_pointwise() {
            self.row_pitch(x).is_some()
        } else {
            // Few channels are gathered one by one from any order; a copy would cost more.
            !self.problem.channels_per_group().is_multiple_of(CHANNELS_PER_ACCESS) || wide_strides(x)
        };
        if readable { Ok(x.clone()) } else { layout::channels_last(x) }
    }

    /// The distance of pixels, if channels are packed and pixels one axis.
    fn row_pitch(&self, x: &Tensor) -> Option<usize> {
        let strides = strides(x);
        let (dims, axes) = pixel_axes(self.problem, strides);
        let packed = strides[1] == 1 || self.problem.c == 1;
        pitch(&dims, &axes).filter(|&pitch| packed && (pitch >= self.problem.c || dims == [1; 4]))
    }

    fn patch_rows(&self, x: &Operand, tile: RowTile, columns: Address) -> Result<()> {
        let (cg, groups) = (self.problem.channels_per_group(), self.problem.groups);
        let wide = cg.is_multiple_of(CHANNELS_PER_ACCESS) && wide_strides(x.tensor()) && x.address().is_multiple_of(16);
        let (vector, name) = if wide { (CHANNELS_PER_ACCESS, "im2col_rows_16") } else { (1, "im2col_rows_2") };
        let lanes = cg * groups / vector;
        let params = RowsParams {
            input: x.address(),
            columns,
            strides: strides(x.tensor()).map(|s| s as u64),
            image: tile.image as u64,
            // Below 2^30 and 2^28.
            pixel: tile.pixel as u32,
            pixels: tile.count as u32,
            window: self.window,
            lanes: Divisor::new(OP, lanes)?,
            lanes_per_group: Divisor::new(OP, cg / vector)?,
        };
        let kernel = Kernel::load(self.device, &MODULE, name)?;
        // SAFETY: `RowsParams` mirrors `Rows`; the kernel reads x only at indices within its extents, by its own strides;
        // the columns hold the tile's pixels by all taps and channels; wide accesses are aligned.
        unsafe { kernel.launch(Grid::over((tile.count * lanes) as u64), &params) }
    }

    fn row_product(&self, tile: RowTile, left: Matrix, weight: Address, out: Address, output: DType) -> Result<()> {
        let (depth, kg) = (self.problem.depth(), self.problem.filters_per_group());
        let product = Product {
            rows: tile.count,
            cols: kg,
            depth,
            batch: self.problem.groups,
            alpha: 1.0,
            left,
            right: Matrix::columns(weight, depth).every(kg * depth),
            out: Matrix::rows(out, self.problem.k).every(kg),
            input: self.dtype,
            output,
        };
        // SAFETY: left holds the tile's pixels, the weight K filters of this depth, out the tile's pixels by K; groups
        // write different columns of out, which is the result or scratch and no operand.
        unsafe { multiply(self.device, &product) }
    }

    /// f32: pixels are columns.
    fn planes(&self, x: &Tensor, weight: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let &ConvProblem { n, k, groups, .. } = self.problem;
        let (pixels, depth) = (self.problem.pixels(), self.problem.depth());
        let weight = Operand::new(OP, &layout::contiguous(weight)?)?;
        let residual = residual.map(|r| Operand::new(OP, &layout::contiguous(r)?)).transpose()?;
        let output = Output::new(OP, self.device, self.dtype, n * k * pixels)?;
        let x = Operand::new(OP, x)?;

        let [sn, sc, ..] = strides(x.tensor());
        let direct = self.problem.is_pointwise() && self.planes_are_packed(x.tensor());
        let bytes = if direct { 0 } else { groups * depth * 4 };
        let tiles = PlaneTiles::new(self.problem, bytes);
        arena::with(self.device, tiles.largest() * bytes, |columns| {
            for tile in tiles.iter() {
                let right = if direct {
                    let start = x.address() + ((tile.first_image * sn + tile.pixel) * 4) as u64;
                    Matrix::rows(start, sc).every(if groups == 1 { sn } else { sc * self.problem.channels_per_group() })
                } else {
                    self.patch_planes(&x, tile, columns)?;
                    Matrix::rows(columns, tile.pixels).every(depth * tile.pixels)
                };
                self.plane_product(tile, weight.address(), right, output.address())?;
            }
            Ok(())
        })?;
        if self.bias.is_some() || residual.is_some() {
            let (residual, result) = (residual.as_ref().map_or(0, Operand::address), output.address());
            // SAFETY: residual and result are n x k packed planes; the result is new memory.
            unsafe { epilogue::planes(self.device, [n * k, pixels], k, self.bias, residual, result) }?;
        }
        output.into_tensor(OP, self.output_dims.as_slice())
    }

    /// Whether every channel of every image is a run of pixels.
    fn planes_are_packed(&self, x: &Tensor) -> bool {
        let strides = strides(x);
        let (dims, axes) = pixel_axes(self.problem, strides);
        let run = pitch(&dims[1..], &axes[1..]).is_some_and(|pitch| pitch <= 1);
        run && (strides[1] >= self.problem.pixels() || self.problem.c == 1)
    }

    fn patch_planes(&self, x: &Operand, tile: PlaneTile, columns: Address) -> Result<()> {
        let [_, r, s] = self.problem.filter;
        let taps = self.problem.filter.iter().product();
        let params = PlanesParams {
            input: x.address(),
            columns,
            strides: strides(x.tensor()).map(|s| s as u64),
            image: tile.first_image as u64,
            // Below 2^30 and 2^28.
            pixel: tile.pixel as u32,
            images: tile.images as u32,
            window: self.window,
            pixels: Divisor::new(OP, tile.pixels)?,
            taps: Divisor::new(OP, taps)?,
            slice_taps: Divisor::new(OP, r * s)?,
            line_taps: Divisor::new(OP, s)?,
        };
        let across = ((tile.images * tile.pixels) as u64).div_ceil(u64::from(THREADS));
        let down = ((self.problem.c * taps) as u64).div_ceil(ROWS_PER_THREAD).min(65535);
        let grid = Grid::blocks(OP, [across, down, 1], THREADS)?;
        // SAFETY: `PlanesParams` mirrors `Planes`; the kernel reads x only at indices within its extents, by its own
        // strides; the columns hold all channels and taps by the tile's pixels.
        unsafe { Kernel::load(self.device, &MODULE, "im2col_planes_4")?.launch(grid, &params) }
    }

    fn plane_product(&self, tile: PlaneTile, weight: Address, right: Matrix, output: Address) -> Result<()> {
        let &ConvProblem { k, groups, .. } = self.problem;
        let (depth, kg, pixels) = (self.problem.depth(), self.problem.filters_per_group(), self.problem.pixels());
        let left = Matrix::rows(weight, depth);
        let out = Matrix::rows(output + ((tile.first_image * k * pixels + tile.pixel) * 4) as u64, pixels);
        // Tiles of several images come without groups, and with groups of one image. An image is a product of its own, so
        // that it has the bits that it has alone.
        (0..tile.images).try_for_each(|image| {
            let product = Product {
                rows: kg,
                cols: tile.pixels,
                depth,
                batch: groups,
                alpha: 1.0,
                left: left.every(kg * depth),
                right: Matrix { address: right.address + (image * right.batch_stride * 4) as u64, ..right },
                out: Matrix { address: out.address + (image * k * pixels * 4) as u64, ..out }.every(kg * pixels),
                input: DType::F32,
                output: DType::F32,
            };
            // SAFETY: the weight holds K filters of this depth, right the tile's pixels, out lies within the result at the
            // tile's images and pixels; images and groups write different planes.
            unsafe { multiply(self.device, &product) }
        })
    }
}

/// Whether eight channels are 16 bytes wherever a pixel lies.
pub(super) fn wide_strides(x: &Tensor) -> bool {
    let mut axes = x.dims().iter().zip(x.stride()).enumerate().filter(|&(_, (&n, _))| n != 1);
    axes.all(|(axis, (_, &stride))| if axis == 1 { stride == 1 } else { stride.is_multiple_of(CHANNELS_PER_ACCESS) })
}

/// Parameters of `im2col_rows_*`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowsParams {
    input: Address,
    columns: Address,
    strides: [u64; 5],
    image: u64,
    pixel: u32,
    pixels: u32,
    window: Window,
    lanes: Divisor,
    lanes_per_group: Divisor,
}

const _: () = assert!(size_of::<RowsParams>() == 216, "as in im2col.cu");

// SAFETY: `repr(C)`, integers only, no padding: the 32-bit fields come in pairs.
unsafe impl DeviceRepr for RowsParams {}

/// Parameters of `im2col_planes_4`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PlanesParams {
    input: Address,
    columns: Address,
    strides: [u64; 5],
    image: u64,
    pixel: u32,
    images: u32,
    window: Window,
    pixels: Divisor,
    taps: Divisor,
    slice_taps: Divisor,
    line_taps: Divisor,
}

const _: () = assert!(size_of::<PlanesParams>() == 248, "as in im2col.cu");

// SAFETY: `repr(C)`, integers only, no padding: the 32-bit fields come in pairs.
unsafe impl DeviceRepr for PlanesParams {}
