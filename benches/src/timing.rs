//! Medians of repeated runs.

use std::time::{Duration, Instant};

use anyhow::Result;

/// Median time of `runs` calls after one warm-up call.
///
/// # Errors
/// The first error of `f`.
pub fn median<T>(runs: usize, mut f: impl FnMut() -> Result<T>) -> Result<Duration> {
    Ok(medians(runs, &mut [&mut || f().map(drop)])?[0])
}

/// Medians of several arms that take turns, so that a slow phase of the machine hits all of them.
///
/// # Errors
/// The first error of an arm.
pub fn medians(runs: usize, arms: &mut [&mut dyn FnMut() -> Result<()>]) -> Result<Vec<Duration>> {
    let mut times = vec![Vec::with_capacity(runs); arms.len()];
    for arm in arms.iter_mut() {
        arm()?;
    }
    for _ in 0..runs {
        for (arm, times) in arms.iter_mut().zip(&mut times) {
            let start = Instant::now();
            arm()?;
            times.push(start.elapsed());
        }
    }
    for times in &mut times {
        times.sort_unstable();
    }
    Ok(times.iter().map(|times| times[times.len() / 2]).collect())
}

/// Billions of floating-point operations per second.
pub fn gflops(flop: f64, time: Duration) -> f64 {
    flop / time.as_secs_f64() / 1e9
}
