//! Ctrl-C, sent as a signal.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::support::Place;

/// Far longer than a unit of work of the demonstration model takes, far shorter than the run.
const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn ctrl_c_stops_the_run_and_leaves_no_file() {
    let place = Place::new();
    let args = ["generate", "x", "-o", "a.png", "-s", "1", "--steps", "1000", "-W", "512", "-H", "512"];
    let mut child =
        place.command(&args).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the command starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    // The line with the seed is written when the model is loaded.
    let mut line = String::new();
    while !line.starts_with("seed ") {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).expect("a readable pipe"), 0, "ended before the seed was printed");
    }
    thread::sleep(Duration::from_millis(300));
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill starts");
    assert!(killed.success());

    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().expect("a child that can be ended");
            panic!("still running {PATIENCE:?} after Ctrl-C");
        }
        thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(130));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("a readable pipe");
    assert_eq!(rest, "error: interrupted\n");
    assert!(place.files().is_empty(), "{:?}", place.files());
}
