//! Whole clips: progress, cancellation, lengths.

use std::{ops::ControlFlow, sync::Mutex};

use candle_core::Tensor;

use super::{clip, encode, side};
use crate::{
    DecodeOptions, EncodeOptions, Error, Event, Observer, RawLatents, Remainder, Result, Silent, Tiling,
    testing::{bits, latents, noise, tiny},
};

/// Records events, stops at one of them.
struct Recorder {
    stop_at: usize,
    events: Mutex<Vec<String>>,
}

impl Observer for Recorder {
    fn on_event(&self, event: &Event<'_>) -> ControlFlow<()> {
        let mut events = self.events.lock().unwrap();
        events.push(format!("{event:?}"));
        if events.len() == self.stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn progress_ends_at_its_total_and_stops_where_it_is_told() {
    for vae in tiny() {
        for tiling in [Tiling::Whole, Tiling::Bands(2)] {
            let z = latents(1, [4, 3, 2, 2]);
            let options = DecodeOptions::default().with_tiling(tiling);
            let run = |stop_at| {
                let observer = Recorder { stop_at, events: Mutex::default() };
                let mut frames = 0;
                let result = vae.decode_clip(&z, &options, &observer, &mut |part| {
                    frames += part.dims()[1];
                    Ok(())
                });
                (result, frames, observer.events.into_inner().unwrap())
            };
            let (result, frames, events) = run(usize::MAX);
            assert!(result.is_ok());
            assert_eq!(frames, 9);
            assert_eq!(events[0], "Stage { name: \"vae decode\" }");
            let total = events.len() - 1;
            assert_eq!(events[total], format!("Progress {{ done: {total}, total: {total} }}"));
            for stop_at in [1, 5, total / 2, total] {
                let (result, frames, events) = run(stop_at);
                assert!(matches!(result, Err(Error::Cancelled(_))));
                assert_eq!(events.len(), stop_at);
                assert!(frames < 9);
            }
        }
    }
}

#[test]
fn a_failing_sink_ends_the_run() {
    let [vae, _] = tiny();
    let disk_full = || Error::Caller { what: "clip.mp4", source: "no space left".into() };
    let mut calls = 0;
    let result = vae.decode_clip(&latents(1, [4, 3, 1, 1]), &DecodeOptions::default(), &Silent, &mut |_| {
        calls += 1;
        if calls == 2 { Err(disk_full()) } else { Ok(()) }
    });
    assert!(matches!(result, Err(Error::Caller { .. })));
    assert_eq!(calls, 2);
}

#[test]
fn clips_of_every_length_are_encoded_as_asked() {
    for vae in tiny() {
        let s = side(&vae);
        let run = |count: usize, remainder| {
            let x = noise(1, 0.5, &[3, count.max(1), s, s]);
            let mut frames = (0..count).map(|i| Ok(x.narrow(1, i, 1).unwrap()));
            let mut parts = Vec::new();
            let options = EncodeOptions::default().with_remainder(remainder);
            let result = vae.encode_clip(&mut frames, &options, &Silent, &mut |z| {
                parts.push(z.into_tensor());
                Ok(())
            });
            (result, parts, x)
        };
        for count in [1, 5, 9] {
            let (result, parts, x) = run(count, Remainder::Refuse);
            let done = result.unwrap();
            assert_eq!((done.frames, done.latents, done.trimmed, done.repeated), (count, count.div_ceil(4), 0, 0));
            assert_eq!(bits(&Tensor::cat(&parts, 1).unwrap()), bits(&encode(&vae, &x, &[count])));
        }
        for count in [0, 2, 4, 6] {
            let (result, ..) = run(count, Remainder::Refuse);
            assert!(matches!(result, Err(Error::Frames { got, group: 4, .. }) if got == count));
        }
        assert!(run(6, Remainder::Refuse).0.unwrap_err().to_string().ends_with("nearest: 5 or 9"));
        let (result, parts, x) = run(7, Remainder::Trim);
        assert_eq!((result.as_ref().unwrap().trimmed, result.unwrap().latents), (2, 2));
        let five = x.narrow(1, 0, 5).unwrap();
        assert_eq!(bits(&Tensor::cat(&parts, 1).unwrap()), bits(&encode(&vae, &five, &[5])));
        let (result, parts, x) = run(7, Remainder::Repeat);
        assert_eq!((result.as_ref().unwrap().repeated, result.unwrap().latents), (2, 3));
        let last = x.narrow(1, 6, 1).unwrap();
        let nine = Tensor::cat(&[&x, &last, &last], 1).unwrap();
        assert_eq!(bits(&Tensor::cat(&parts, 1).unwrap()), bits(&encode(&vae, &nine, &[9])));
    }
}

#[test]
fn latents_may_be_fetched_as_they_are_needed() {
    for vae in tiny() {
        let z = latents(1, [4, 40, 2, 2]);
        for tiling in [Tiling::Whole, Tiling::Bands(2)] {
            let options = DecodeOptions::default().with_tiling(tiling);
            let run = |extents, fetch: &mut dyn FnMut(std::ops::Range<usize>) -> Result<RawLatents>| {
                let mut parts = Vec::new();
                let result = vae.decode_stream(extents, fetch, &options, &Silent, &mut |frames| {
                    parts.push(frames);
                    Ok(())
                });
                result.map(|()| Tensor::cat(&parts, 1).unwrap())
            };
            let mut asked = Vec::new();
            let frames = run((40, 2, 2), &mut |range| {
                asked.push(range.clone());
                z.frames(range.start, range.len())
            });
            assert_eq!(bits(&frames.unwrap()), bits(&clip(&vae, &z, &options).unwrap()));
            // In order, each once, and a few at a time where pictures are whole.
            assert_eq!(asked.iter().flat_map(Clone::clone).collect::<Vec<_>>(), (0..40).collect::<Vec<_>>());
            let most = asked.iter().map(ExactSizeIterator::len).max();
            assert!(tiling != Tiling::Whole || most < Some(40), "{asked:?}");

            let refused = |result: Result<Tensor>| result.unwrap_err().to_string();
            let other = refused(run((40, 2, 4), &mut |range| z.frames(range.start, range.len())));
            assert!(other.contains("latents has shape"), "{other}");
            let fewer = refused(run((40, 2, 2), &mut |_| z.frames(0, 2)));
            assert!(fewer.contains("latents has shape"), "{fewer}");
            let gone = || Error::Caller { what: "clip.latent", source: "gone".into() };
            assert_eq!(refused(run((40, 2, 2), &mut |_| Err(gone()))), "clip.latent");
        }
    }
}
