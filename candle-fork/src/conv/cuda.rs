//! The device path of our own: patches of a tile of pixels into a buffer, one matrix product per tile, bias and residual
//! onto its f32 sums.
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
    tiles::{PlaneTile, PlaneTiles, RowTile, RowTiles, Window},
};
use crate::{
    cuda::{
        arena,
        blas::{Matrix, Product, multiply},
        epilogue,
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        strides::pitch,
        tensor::{Address, Operand, Output, device_of, small_operand},
    },
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
    if dtype != DType::F32 && dtype != weight.dtype() {
        let wide = forward(&widened(x)?, weight, bias, residual, problem, output_dims)?;
        return layout::channels_last(&wide.to_dtype(dtype).what("conv: rounding")?);
    }
    let weight = if dtype == DType::F32 { widened(weight)? } else { weight.clone() };
    let residual = residual.map(|r| r.to_dtype(dtype).what("conv: residual")).transpose()?;
    let call = Call {
        device: device_of(OP, x)?,
        dtype,
        bias: bias.map(small_operand).transpose()?,
        problem,
        window: Window::new(problem)?,
        output_dims,
    };
    match dtype {
        DType::F32 => call.planes(x, &weight, residual.as_ref()),
        _ => call.rows(x, &weight, residual.as_ref()),
    }
}

fn widened(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32).what("conv: widening")
}

/// What both paths need.
struct Call<'a> {
    device: &'a CudaDevice,
    dtype: DType,
    bias: Option<Operand>,
    problem: &'a ConvProblem,
    window: Window,
    output_dims: Vec<usize>,
}

/// Distances along N, C, D, H, W. Absent axes are of extent 1, and so is their index.
fn strides(x: &Tensor) -> [usize; 5] {
    let mut strides = [0; 5];
    let (lead, axes) = x.stride().split_at(2);
    strides[..2].copy_from_slice(lead);
    strides[5 - axes.len()..].copy_from_slice(axes);
    strides
}

/// Extents N, D, H, W and their strides: what counts pixels.
fn pixel_axes(problem: &ConvProblem, strides: [usize; 5]) -> ([usize; 4], [usize; 4]) {
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
                    unsafe {
                        epilogue::columns(self.device, self.dtype, shape, sums, self.bias.as_ref(), residual, result)
                    }?;
                }
            }
            Ok(())
        })?;
        output.into_channels_last(OP, &self.output_dims)
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
            unsafe { epilogue::planes(self.device, [n * k, pixels], k, self.bias.as_ref(), residual, result) }?;
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
        // Tiles of several images come without groups, and with groups of one image.
        let (batch, left, out) = match groups {
            1 => (tile.images, left, out.every(k * pixels)),
            _ => (groups, left.every(kg * depth), out.every(kg * pixels)),
        };
        let product = Product {
            rows: kg,
            cols: tile.pixels,
            depth,
            batch,
            alpha: 1.0,
            left,
            right,
            out,
            input: DType::F32,
            output: DType::F32,
        };
        // SAFETY: the weight holds K filters of this depth, right the tile's pixels, out lies within the result at the
        // tile's images and pixels; images and groups write different planes.
        unsafe { multiply(self.device, &product) }
    }
}

/// Whether eight channels are 16 bytes wherever a pixel lies.
fn wide_strides(x: &Tensor) -> bool {
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
