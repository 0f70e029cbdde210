//! A table of ops, each timed alone: how near it comes to what the card can do, and its share of the whole.

use anyhow::Result;

use super::super::{Gpu, floors::Floors};

/// What an op has to do at least.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    /// Operations of matrix products.
    Flop(f64),
    /// Bytes read and written.
    Bytes(f64),
}

/// An op and how often it runs.
pub(super) struct Op<'a> {
    pub(super) name: String,
    pub(super) count: usize,
    pub(super) work: Work,
    pub(super) run: Box<dyn Fn() -> Result<()> + 'a>,
}

impl<'a> Op<'a> {
    /// A product of `rows` with a matrix of `columns` by `depth`, or whatever has as many operations.
    pub(super) fn product(
        name: impl Into<String>,
        count: usize,
        [rows, columns, depth]: [usize; 3],
        run: impl Fn() -> Result<()> + 'a,
    ) -> Self {
        let work = Work::Flop(2.0 * rows as f64 * columns as f64 * depth as f64);
        Self { name: name.into(), count, work, run: Box::new(run) }
    }

    /// An op that moves `elements` of two bytes in and out.
    pub(super) fn traffic(
        name: impl Into<String>,
        count: usize,
        elements: usize,
        run: impl Fn() -> Result<()> + 'a,
    ) -> Self {
        Self { name: name.into(), count, work: Work::Bytes(2.0 * elements as f64), run: Box::new(run) }
    }
}

/// Runs and prints `ops`, those that take longest first; returns the sum in ms. An op that fails is said and left out.
pub(super) fn print(gpu: &Gpu, floors: Floors, title: &str, ops: &[Op<'_>]) -> f64 {
    let mut lines = Vec::new();
    for op in ops {
        match gpu.time(3, 15, |_| (op.run)()) {
            Ok(ms) => lines.push((op, ms)),
            Err(error) => println!("{}: {error:#}", op.name),
        }
    }
    let total = |(op, ms): &(&Op<'_>, f64)| op.count as f64 * ms;
    lines.sort_by(|a, b| total(b).total_cmp(&total(a)));
    let sum: f64 = lines.iter().map(total).sum();
    let mut least = 0.0;
    println!("\n{title}");
    println!("{:<46} {:>3} {:>9} {:>13} {:>8} {:>9} {:>7}", "op", "n", "ms each", "rate", "of limit", "ms", "share");
    for line in &lines {
        let (op, ms) = line;
        let (rate, unit, limit) = match op.work {
            Work::Flop(flop) => (flop / ms / 1e9, "TFLOP/s", floors.bf16),
            Work::Bytes(bytes) => (bytes / ms / 1e6, "GB/s", floors.copy),
        };
        least += total(line) * rate / limit;
        println!(
            "{:<46} {:>3} {ms:>9.4} {rate:>5.0} {unit:<7} {:>7.0}% {:>9.3} {:>6.1}%",
            op.name,
            op.count,
            100.0 * rate / limit,
            total(line),
            100.0 * total(line) / sum
        );
    }
    println!("sum {sum:.2} ms, limit of the same ops {least:.2} ms");
    sum
}
