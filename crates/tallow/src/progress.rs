//! One line on a terminal that says how far the run is.

use std::{
    cell::RefCell,
    fmt::Write as _,
    io::{self, Write},
    ops::ControlFlow,
    time::{Duration, Instant},
};

use policy::{CancelToken, Event, Observer};

use crate::terminal;

/// Cells of the bar.
const BAR_WIDTH: usize = 24;
/// Redrawing more often than this only costs time.
const REDRAW_INTERVAL: Duration = Duration::from_millis(40);

/// Watches a run: draws the bar where there is a terminal and stops the run when the token is cancelled.
pub(crate) struct Progress {
    stop: CancelToken,
    bar: Option<RefCell<Bar>>,
}

impl Progress {
    /// A watcher of a run of `items` pictures; `quiet` draws nothing.
    pub(crate) fn new(stop: CancelToken, items: usize, quiet: bool) -> Self {
        let bar = (!quiet && terminal::stderr_is_drawable())
            .then(|| RefCell::new(Bar { items, colour: terminal::colour_is_welcome(), ..Bar::default() }));
        Self { stop, bar }
    }

    /// The following events belong to picture `item`, counted from 1.
    pub(crate) fn begin_item(&self, item: usize) {
        if let Some(bar) = &self.bar {
            bar.borrow_mut().item = item;
        }
    }

    /// Removes the bar, so that a plain line can be written.
    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.bar
            && bar.borrow_mut().drawn.take().is_some()
        {
            draw("");
        }
    }
}

impl Observer for Progress {
    fn on_event(&self, event: &Event<'_>) -> ControlFlow<()> {
        if self.stop.is_cancelled() {
            self.clear();
            return ControlFlow::Break(());
        }
        if let Some(bar) = &self.bar {
            let mut bar = bar.borrow_mut();
            if bar.update(event, Instant::now()) {
                draw(&bar.line());
            }
        }
        ControlFlow::Continue(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// What the bar shows.
#[derive(Default)]
struct Bar {
    item: usize,
    items: usize,
    stage: String,
    done: usize,
    total: usize,
    colour: bool,
    /// When the line was last drawn; none while it is not to be seen.
    drawn: Option<Instant>,
}

impl Bar {
    /// Takes an event in; says whether it is time to draw.
    fn update(&mut self, event: &Event<'_>, now: Instant) -> bool {
        let must_draw = match event {
            Event::Stage { name } => {
                (*name).clone_into(&mut self.stage);
                (self.done, self.total) = (0, 0);
                true
            }
            Event::Progress { done, total } => {
                (self.done, self.total) = (*done, *total);
                done >= total
            }
            _ => false,
        };
        let due = self.drawn.is_none_or(|drawn| now.duration_since(drawn) >= REDRAW_INTERVAL);
        if must_draw || due {
            self.drawn = Some(now);
        }
        must_draw || due
    }

    fn line(&self) -> String {
        let filled = (self.done.min(self.total) * BAR_WIDTH).checked_div(self.total).unwrap_or(0);
        let (on, off) = if self.colour { ("\x1b[36m", "\x1b[0m") } else { ("", "") };
        let mut line = String::new();
        if self.items > 1 {
            let _ = write!(line, "{}/{} ", self.item, self.items);
        }
        let bar = format!("{on}{}{off}{}", "#".repeat(filled), ".".repeat(BAR_WIDTH - filled));
        let _ = write!(line, "{:<12} [{bar}]", self.stage);
        if self.total > 0 {
            let _ = write!(line, " {}/{}", self.done, self.total);
        }
        line
    }
}

/// Replaces the current line of the terminal.
fn draw(line: &str) {
    let mut to = io::stderr().lock();
    let _ = write!(to, "\r\x1b[K{line}");
    let _ = to.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills() {
        let mut bar = Bar { items: 2, item: 1, ..Bar::default() };
        let start = Instant::now();
        assert!(bar.update(&Event::Stage { name: "denoise" }, start));
        assert_eq!(bar.line(), format!("1/2 denoise      [{}]", ".".repeat(24)));
        assert!(bar.update(&Event::Progress { done: 4, total: 4 }, start));
        assert_eq!(bar.line(), format!("1/2 denoise      [{}] 4/4", "#".repeat(24)));
    }

    #[test]
    fn redrawing_is_limited() {
        let mut bar = Bar::default();
        let start = Instant::now();
        assert!(bar.update(&Event::Stage { name: "a" }, start));
        assert!(!bar.update(&Event::Progress { done: 1, total: 9 }, start));
        assert!(bar.update(&Event::Progress { done: 2, total: 9 }, start + REDRAW_INTERVAL));
    }

    #[test]
    fn a_cancelled_token_stops_the_run() {
        let token = CancelToken::new();
        let progress = Progress::new(token.clone(), 1, true);
        assert!(progress.on_event(&Event::Stage { name: "a" }).is_continue());
        token.cancel();
        assert!(progress.on_event(&Event::Stage { name: "b" }).is_break());
    }
}
