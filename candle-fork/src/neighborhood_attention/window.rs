//! Windows along an axis, and the panels of keys that boxes of queries see together. Pure.

use std::ops::Range;

/// The windows of one axis: as wide for every query, shifted inward at the ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    extent: usize,
    window: usize,
}

impl Axis {
    /// An axis of `extent` positions; a window wider than that becomes the whole axis.
    pub fn new(extent: usize, window: usize) -> Self {
        Self { extent, window: window.min(extent) }
    }

    /// Positions.
    pub fn extent(&self) -> usize {
        self.extent
    }

    /// Keys that each query sees.
    pub fn window(&self) -> usize {
        self.window
    }

    /// First key that query `i` sees: `clamp(i - K / 2, 0, L - K)`. Never falls, and rises by one at most, from a query to
    /// the next.
    pub fn start(&self, i: usize) -> usize {
        i.saturating_sub(self.window / 2).min(self.extent - self.window)
    }

    /// The keys that query `i` sees.
    pub fn keys(&self, i: usize) -> Range<usize> {
        let start = self.start(i);
        start..start + self.window
    }

    /// The keys that any of `queries` sees; there is a query.
    pub fn panel(&self, queries: &Range<usize>) -> Range<usize> {
        self.start(queries.start)..self.keys(queries.end - 1).end
    }

    /// Most keys of a [`Self::panel`] of so many queries.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn widest_panel(&self, queries: usize) -> usize {
        (self.window + queries.min(self.extent) - 1).min(self.extent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(extent: usize, window: usize) -> Vec<usize> {
        (0..extent).map(|i| Axis::new(extent, window).start(i)).collect()
    }

    /// The definition: of all runs of K keys inside the axis, the one whose middle is nearest to the query, where an even
    /// run has its middle right of the centre.
    fn nearest(extent: usize, window: usize, i: usize) -> usize {
        let window = window.min(extent);
        (0..=extent - window).min_by_key(|start| (start + window / 2).abs_diff(i)).unwrap()
    }

    #[test]
    fn windows_are_the_nearest_runs_inside() {
        for extent in 1..=40 {
            for window in 1..=40 {
                let axis = Axis::new(extent, window);
                assert_eq!(axis.window(), window.min(extent));
                for i in 0..extent {
                    let keys = axis.keys(i);
                    assert_eq!(keys.start, nearest(extent, window, i), "L {extent} K {window} i {i}");
                    assert!(keys.contains(&i) && keys.end <= extent, "L {extent} K {window} i {i}");
                }
            }
        }
    }

    #[test]
    fn published_examples() {
        assert_eq!(starts(10, 5), [0, 0, 0, 1, 2, 3, 4, 5, 5, 5]);
        assert_eq!(starts(10, 4), [0, 0, 0, 1, 2, 3, 4, 5, 6, 6]);
        assert_eq!(starts(4, 7), [0; 4]);
        assert_eq!(starts(12, 11), [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn panels_are_unions_of_windows() {
        for extent in 1..=24 {
            for window in 1..=24 {
                let axis = Axis::new(extent, window);
                for first in 0..extent {
                    for end in first + 1..=extent {
                        let panel = axis.panel(&(first..end));
                        let seen = |key: usize| (first..end).any(|i| axis.keys(i).contains(&key));
                        assert!((0..extent).all(|key| panel.contains(&key) == seen(key)), "{axis:?} {first}..{end}");
                        assert!(panel.len() <= axis.widest_panel(end - first), "{axis:?} {first}..{end}");
                    }
                }
            }
        }
        assert_eq!(Axis::new(192, 11).widest_panel(4), 14);
        assert_eq!(Axis::new(12, 11).widest_panel(4), 12);
    }
}
