//! A network run over a clip, and what is checked before and after.

use candle_core::{D, DType, Tensor};
use candle_fork::{What, layout::native};
use policy::{Event, Observer};

use super::{
    architecture::SpatialPadding,
    network::{ConvNetwork, Outlet},
    slots::Pass,
    vae::ConvVae,
};
use crate::error::{Error, Result, shape};

/// What a run is given besides frames.
#[derive(Clone, Copy)]
pub(super) struct Conditions<'a> {
    /// Of a network that is conditioned on it.
    pub(super) timestep: Option<f64>,
    /// Maps for layers that add noise.
    pub(super) noise: &'a [Tensor],
}

impl ConvVae {
    /// Runs a network over a clip, `chunk` frames at a time. Callers have entered the backends.
    pub(super) fn run(
        &self,
        network: &ConvNetwork,
        x: &Tensor,
        chunk: usize,
        conditions: Conditions<'_>,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let Conditions { timestep, noise } = conditions;
        let modulations = network.modulations(timestep)?;
        let mut slots = network.slots();
        let frames = x.dim(2).what("frames of a clip")?;
        let chunk = chunk.min(frames);
        let (mut done, total) = (0, network.work(frames));
        let mut tick = |frames: usize| {
            done += frames;
            Ok(observer.notify(Event::Progress { done, total })?)
        };
        for start in (0..frames).step_by(chunk.max(1)) {
            let count = chunk.min(frames - start);
            let piece =
                x.narrow(2, start, count).and_then(|piece| piece.to_dtype(self.dtype())).what("frames of a clip")?;
            let mut pass = Pass { slots: &mut slots, last: start + count == frames, noise };
            let mut outlet = Outlet { tick: &mut tick, emit: sink };
            network.forward(native(&piece)?, chunk, &modulations, &mut pass, &mut outlet)?;
        }
        Ok(())
    }
}

/// Extents of a clip `[B, channels, T, H, W]` whose sides are multiples of these, and large enough for their border.
pub(super) fn clip(
    what: &'static str,
    x: &Tensor,
    channels: usize,
    multiples: [usize; 2],
    padding: SpatialPadding,
) -> Result<[usize; 5]> {
    let extents = match *x.dims() {
        [b, c, t, h, w] if c == channels && ![b, t, h, w].contains(&0) => [b, c, t, h, w],
        _ => return Err(shape(what, x, format!("[B, {channels}, T, H, W], no extent 0"))),
    };
    let sides = [("height", extents[3], multiples[0]), ("width", extents[4], multiples[1])];
    for (axis, got, multiple) in sides {
        if !got.is_multiple_of(multiple) {
            return Err(Error::Size { axis, got, multiple });
        }
        if padding == SpatialPadding::Reflect && got / multiple < 2 {
            let expected = format!("height and width of at least {} and {}", 2 * multiples[0], 2 * multiples[1]);
            return Err(shape(what, x, format!("{expected}: this vae reflects pictures at their borders")));
        }
    }
    Ok(extents)
}

pub(super) fn check_input(what: &'static str, x: &Tensor) -> Result<()> {
    if all_finite(x)? { Ok(()) } else { Err(Error::NonFiniteInput { what }) }
}

/// Whether zero times x is zero throughout.
pub(super) fn all_finite(x: &Tensor) -> Result<bool> {
    // In two steps: candle gives each sum to one block of a device.
    let zeros = x.to_dtype(DType::F32).and_then(|x| x.affine(0.0, 0.0)?.sum(D::Minus1)?.sum_all()?.to_scalar::<f32>());
    Ok(zeros.what("check for non-finite values")? == 0.0)
}
