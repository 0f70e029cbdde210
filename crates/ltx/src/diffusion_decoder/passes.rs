//! A block whose tokens change where they lie, in two passes around its attention, slab by slab.
//!
//! A slab computes queries, keys and values of the frames that no slab before it has needed, and takes over the others: the
//! frames that it changes are those whose keys no later slab computes. So nothing is computed twice, and a slab costs nothing
//! but the memory that it saves.

use candle_core::Tensor;
use candle_fork::{
    What,
    neighborhood_attention::neighborhood_attention_of_planes,
    token_block::{CHANNELS, HEAD_DIM, TokenBlock, TokenEntries},
};

use super::{
    block::Place,
    slabs::{Slab, slabs},
};
use crate::error::Result;

/// Heads of a token.
const HEADS: usize = CHANNELS / HEAD_DIM;

/// Bytes of a token in a slab, in bf16: queries, keys and values.
const QKV_BYTES: usize = 3 * CHANNELS * 2;
/// What attention gives.
const ATTENDED_BYTES: usize = CHANNELS * 2;

/// Bytes of the frames that a slab takes over from the one before.
fn carried_bytes(window: usize, plane: usize) -> u64 {
    (window.saturating_sub(1) as u64).saturating_mul((plane * QKV_BYTES) as u64)
}

/// Bytes for slabs of one frame, with the frames that it sees.
pub(super) fn least_bytes(window: usize, plane: usize) -> u64 {
    let own =
        (window as u64).saturating_mul((plane * QKV_BYTES) as u64).saturating_add((plane * ATTENDED_BYTES) as u64);
    carried_bytes(window, plane).saturating_add(own)
}

/// Most frames of keys for slabs of so many bytes.
fn most_keys(bytes: u64, window: usize, plane: usize) -> usize {
    let room = bytes.saturating_sub(carried_bytes(window, plane)) / plane.max(1) as u64;
    // Rows are fewer than keys by those that only the first sees.
    let saved = (window.saturating_sub(1) * ATTENDED_BYTES) as u64;
    usize::try_from(room.saturating_add(saved) / (QKV_BYTES + ATTENDED_BYTES) as u64).unwrap_or(usize::MAX)
}

/// Changes x `[B, S, C]` to what the block makes of it.
pub(super) fn in_two_passes(
    block: &TokenBlock,
    entries: &TokenEntries,
    x: &Tensor,
    context: &Tensor,
    window: [usize; 3],
    place: &Place<'_>,
) -> Result<()> {
    let plane = place.plane();
    let [frames, _, _] = place.grid;
    let most = most_keys(place.scratch_bytes, window[0].min(frames), plane);
    let slabs = slabs(frames, window[0], most);
    for item in 0..x.dims()[0] {
        let part = |t: &Tensor| t.get(item).what("tokens of a clip");
        let (x, context) = (part(x)?, part(context)?);
        // What is computed of a frame, and the frames whose is.
        let mut kept: Option<(Tensor, usize)> = None;
        for Slab { rows, keys } in &slabs {
            let frames = |t: &Tensor, first: usize, end: usize| {
                t.narrow(0, first * plane, (end - first) * plane).what("tokens of a slab")
            };
            let (carried, first) = match kept.take() {
                Some((all, end)) => {
                    let count = end - keys.start;
                    let last = all.dims()[0] - count * plane;
                    let tail = all.narrow(0, last, count * plane).and_then(|tail| tail.force_contiguous());
                    (Some(tail.what("tokens that two slabs share")?), end)
                }
                None => (None, keys.start),
            };
            let new = frames(&x, first, keys.end)?;
            let told = frames(&context, first, keys.end)?;
            let angles = place.rope.along()?;
            let all = block.project(&new, Some(&told), entries, angles, first * plane, carried.as_ref())?;
            drop(carried);
            let attended = attend(&all, keys.len(), rows.start - keys.start, rows.len(), window, place)?;
            block.finish(&frames(&x, rows.start, rows.end)?, &attended, entries)?;
            kept = Some((all, keys.end));
        }
    }
    Ok(())
}

/// What attention gives, `[S, C]`, for `rows` of `frames` frames from `first` on, of queries, keys and values `[S, 3 C]`.
fn attend(
    all: &Tensor,
    frames: usize,
    first: usize,
    rows: usize,
    window: [usize; 3],
    place: &Place<'_>,
) -> Result<Tensor> {
    let [_, h, w] = place.grid;
    let all = all.reshape((1, frames, h, w, 3 * HEADS, HEAD_DIM)).what("heads of a grid")?;
    let part = |index: usize| all.narrow(4, index * HEADS, HEADS).what("heads of a grid");
    let queries = part(0)?.narrow(1, first, rows).what("queries of a slab")?;
    let scale = (HEAD_DIM as f32).powf(-0.5);
    let attended = neighborhood_attention_of_planes(&queries, &part(1)?, &part(2)?, first, window, scale)?;
    Ok(attended.reshape((rows * h * w, CHANNELS)).what("attention of a slab")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_stay_within_their_bytes() {
        for (window, plane) in [(11, 24_576), (3, 100), (1, 7)] {
            for frames in [1, 11, 16, 40, 121] {
                let bytes = least_bytes(window, plane) + (frames * plane * (QKV_BYTES + ATTENDED_BYTES)) as u64;
                let keys = most_keys(bytes, window, plane);
                assert!(keys >= window + frames, "{window} {plane} {frames}: {keys}");
                let rows = keys + 1 - window;
                let used = carried_bytes(window, plane) + (plane * (keys * QKV_BYTES + rows * ATTENDED_BYTES)) as u64;
                assert!(used <= bytes, "{window} {plane} {frames}");
            }
            assert_eq!(most_keys(least_bytes(window, plane), window, plane), window);
        }
    }
}
