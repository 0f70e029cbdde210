//! Neighborhood attention in the shapes of the LTX-2.5 diffusion decoder.

use anyhow::{Result, ensure};
use candle_core::DType;
use candle_fork::{
    Error,
    cuda::paths::{Path, taken},
    neighborhood_attention::{Kernel, neighborhood_attention_by},
};

use super::{Gpu, Options, floors::Floors, peer, relative_error};
use crate::record::{Row, Sink};

/// A grid and what attends to what.
#[derive(Debug, Clone, Copy)]
struct Shape {
    grid: [usize; 3],
    window: [usize; 3],
    heads: usize,
    width: usize,
}

/// The last stage of a clip of 121 frames of 768 x 512.
const STAGE5: Shape = Shape { grid: [121, 128, 192], window: [11, 11, 11], heads: 4, width: 64 };
/// A short clip, stages with smaller windows, full attention of as much work as the short clip's.
const PRINTED: [Shape; 4] = [
    Shape { grid: [9, 64, 64], window: [11, 11, 11], heads: 4, width: 64 },
    Shape { grid: [61, 64, 96], window: [3, 5, 5], heads: 8, width: 64 },
    Shape { grid: [16, 32, 48], window: [3, 7, 7], heads: 16, width: 64 },
    Shape { grid: [16, 16, 24], window: [3, 7, 7], heads: 32, width: 64 },
];

/// How much slower than the fastest kernel the chosen one may be before a line says so.
const SLACK: f64 = 1.05;

/// Keys that tiles of sixteen queries of a plane pay for: of 14 x 14 x 11, each query sees 11 x 11 x 11.
const PAID: f64 = 14.0 * 14.0 / (11.0 * 11.0);

impl Shape {
    /// Floating-point operations that reach a result.
    fn work(&self) -> f64 {
        let product = |extents: &[usize]| extents.iter().map(|&n| n as f64).product::<f64>();
        let keys: Vec<usize> = self.grid.iter().zip(self.window).map(|(&extent, window)| window.min(extent)).collect();
        4.0 * product(&self.grid) * product(&keys) * (self.heads * self.width) as f64
    }

    /// Milliseconds, and the error against the plain kernel. Prints a line for each kernel that serves the shape.
    fn measure(&self, gpu: &Gpu, runs: usize) -> Result<(f64, f64)> {
        let [t, h, w] = self.grid;
        let operand = |scale| gpu.noise(scale, &[1, t, h, w, self.heads, self.width], DType::BF16);
        // Scores as those of normed keys and queries scaled before.
        let (q, k, v) = (operand((self.width as f32).powf(-0.5))?, operand(1.0)?, operand(1.0)?);
        let run = |kernel| neighborhood_attention_by(kernel, &q, &k, &v, self.window, 1.0);
        let want = run(Kernel::Plain)?;
        let mut fastest = f64::INFINITY;
        for kernel in [Kernel::WarpGroups, Kernel::Tiled] {
            let got = match run(kernel) {
                Err(Error::Unsupported { .. }) => continue,
                got => got?,
            };
            let error = relative_error(&got, &want)?;
            let ms = gpu.time(2, runs, |_| Ok(run(kernel).map(drop)?))?;
            let rate = self.work() / ms / 1e9;
            println!("{:?} {:?} {kernel:?}: {ms:.3} ms, {rate:.0} TFLOP/s, error {error:.1e}", self.grid, self.window);
            fastest = fastest.min(ms);
        }
        let before = taken(Path::TiledNeighborhood);
        let error = relative_error(&run(Kernel::Fastest)?, &want)?;
        ensure!(taken(Path::TiledNeighborhood) == before + 1, "{self:?} took the plain kernel");
        let ms = gpu.time(2, runs, |_| Ok(run(Kernel::Fastest).map(drop)?))?;
        if ms > SLACK * fastest {
            println!("{:?} {:?}: chosen {ms:.3} ms, NOT THE FASTEST", self.grid, self.window);
        }
        Ok((ms, error))
    }
}

/// One row, of the last stage; the other shapes are printed.
///
/// # Errors
/// If an op fails, or the tiled kernel does not run.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    for shape in PRINTED {
        shape.measure(gpu, 21)?;
    }
    let (ms, error) = STAGE5.measure(gpu, 11)?;
    let peer = peer::na3d(options, STAGE5.grid, STAGE5.window, STAGE5.heads, STAGE5.width);
    sink(Row {
        name: "na3d_stage5_121x128x192",
        value: ms,
        unit: "ms",
        peer_value: peer.as_ref().and_then(|p| p.get("ms").ok()),
        peer: peer.map(|p| p.name).unwrap_or_default(),
        floor: Some(PAID * STAGE5.work() / floors.bf16 / 1e9),
        error: format!("rel_l2 {error:.1e} against the plain kernel"),
        versions: gpu.versions.clone(),
    })
}
