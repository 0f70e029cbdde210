//! Memory, interruption and full disks, while videos are decoded and encoded.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStderr, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use weights::{StoredDType, write::header_only};

use crate::{
    encode::y4m,
    latents,
    support::{Place, data, text},
};

/// Far longer than a layer of the demonstration VAE takes, far shorter than the run.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the last line says that the run has held, in MiB.
fn peak(stderr: &str) -> f64 {
    let line = stderr.lines().last().expect("a line");
    let figure = line.split(", at most ").nth(1).and_then(|text| text.strip_suffix(" MiB of memory"));
    figure.and_then(|figure| figure.parse().ok()).unwrap_or_else(|| panic!("no figure in {line:?}"))
}

/// Frames are 12 KiB each as pixels and 48 KiB as floats: 300 latents have 1197 of them, 58 MiB.
#[test]
fn memory_does_not_grow_with_the_clip() {
    let place = Place::new();
    let vae = data("models/wan-vae-demo");
    let mut peaks = Vec::new();
    for count in [30, 300] {
        let clip = format!("{count}.latent");
        latents::long_clip(&place.path(&clip), count);
        let line = ["decode", &clip, "--vae", text(&vae), "-o", "a.y4m", "--threads", "2"];
        let ended = place.succeeds(&line);
        assert!(ended.stderr.contains(&format!("{} frames", 4 * count - 3)), "{}", ended.stderr);
        peaks.push(peak(&ended.stderr));
        assert!(place.read("a.y4m").len() > (4 * count - 3) * 3 * 64 * 64);
    }
    println!("decode: {peaks:?} MiB");
    // The latents themselves are mapped, 1.2 MiB of them.
    assert!(peaks[1] - peaks[0] < 6.0, "30 and 300 latents take {peaks:?} MiB");

    let mut peaks = Vec::new();
    for count in [30, 300] {
        // As floats, 1197 frames of this size are 14 MiB.
        fs::write(place.path("a.y4m"), y4m(4 * count - 3, 32)).expect("a file");
        let ended = place.succeeds(&["encode", "a.y4m", "-o", "a.latent", "--threads", "2"]);
        peaks.push(peak(&ended.stderr));
        assert_eq!(latents::read(&place.path("a.latent"), "latent_tensor").0, [1, 16, count, 4, 4]);
    }
    println!("encode: {peaks:?} MiB");
    assert!(peaks[1] - peaks[0] < 4.0, "117 and 1197 frames take {peaks:?} MiB");
}

/// Three hours at 16 frames a second, as holes in a file: the run is only watched for a while.
#[test]
fn three_hours_of_latents_lie_where_they_are() {
    const LATENTS: usize = 3 * 3600 * 16 / 4;
    let place = Place::new();
    let shape = [1, 16, LATENTS, 8, 8];
    header_only(place.path("long.latent"), [("latent_tensor", StoredDType::F32, &shape[..])], &BTreeMap::new())
        .expect("a writable folder");
    let vae = data("models/wan-vae-demo");
    let line = ["decode", "long.latent", "--vae", text(&vae), "-o", "a.y4m"];
    let mut run = Run::start(&place, &line);
    thread::sleep(Duration::from_secs(2));
    // Not the mapped file, whose pages the system takes back as it likes.
    let status = fs::read_to_string(format!("/proc/{}/status", run.child.id())).expect("a running child");
    let held =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")).expect("a line");
    let held: u64 = held.parse().expect("a number");
    assert!(held < 100 << 10, "{held} KiB");
    run.interrupt();
    assert!(!place.path("a.y4m").exists());
}

/// A long run that has said what it is about to do.
pub(crate) struct Run {
    child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Run {
    fn start(place: &Place, args: &[&str]) -> Self {
        let mut command = place.command(args);
        Self::of(command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the command starts"))
    }

    /// A command that has been started, with a pipe from its standard error.
    pub(crate) fn of(mut child: Child) -> Self {
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        while !line.contains("frames of ") {
            line.clear();
            assert_ne!(stderr.read_line(&mut line).expect("a readable pipe"), 0, "ended before it began");
        }
        Self { child, stderr }
    }

    /// Sends what Ctrl-C sends.
    pub(crate) fn interrupt(&mut self) {
        let killed = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().expect("kill starts");
        assert!(killed.success());
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            if start.elapsed() > PATIENCE {
                self.child.kill().expect("a child that can be ended");
                panic!("still running {PATIENCE:?} after Ctrl-C");
            }
            thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(130));
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).expect("a readable pipe");
        assert_eq!(rest, "error: interrupted\n");
    }
}

pub(crate) fn interrupted(place: &Place, args: &[&str]) {
    let before = place.files();
    let mut run = Run::start(place, args);
    thread::sleep(Duration::from_millis(500));
    assert!(place.files() != before, "nothing is being written");
    run.interrupt();
    assert_eq!(place.files(), before);
}

#[test]
fn ctrl_c_stops_a_decode_and_an_encode_and_leaves_no_file() {
    let place = Place::new();
    let vae = data("models/wan-vae-demo");
    latents::long_clip(&place.path("long.latent"), 4000);
    let mut formats = vec!["a.y4m", "%05d.png"];
    if cfg!(feature = "mp4") {
        formats.push("a.mp4");
    }
    for output in formats {
        interrupted(&place, &["decode", "long.latent", "--vae", text(&vae), "-o", output]);
    }
    // One frame of this size takes longer than all the waiting.
    fs::write(place.path("large.y4m"), y4m(41, 512)).expect("a file");
    interrupted(&place, &["encode", "large.y4m", "-o", "a.latent"]);
}

#[test]
fn a_full_disk_ends_a_decode_without_a_file() {
    let place = Place::new();
    let mut formats = vec!["full.y4m", "full.gif"];
    if cfg!(feature = "mp4") {
        formats.push("full.mp4");
    }
    for output in formats {
        std::os::unix::fs::symlink("/dev/full", place.path(output)).expect("a link");
        let before = place.files();
        let ended = place.run(&["decode", "-o", output]);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
        let errors: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(errors.len() == 1 && errors[0].contains(output) && errors[0].contains("space"), "{}", ended.stderr);
        assert_eq!(place.files(), before);
        assert_eq!(fs::read_link(place.path(output)).expect("still a link").to_str(), Some("/dev/full"));
    }
    let full = File::options().write(true).open("/dev/full").expect("the device");
    let output = place.command(&["decode", "-o", "-", "-q"]).stdout(full).output().expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: cannot write -") && stderr.contains("space"), "{stderr}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let place = Place::new();
    let vae = data("models/wan-vae-demo");
    latents::long_clip(&place.path("long.latent"), 400);
    let mut child = place
        .command(&["decode", "long.latent", "--vae", text(&vae), "-o", "-", "-q"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut head = [0; 9];
    stdout.read_exact(&mut head).expect("a head");
    assert_eq!(&head, b"YUV4MPEG2");
    drop(stdout);
    let start = Instant::now();
    let output = child.wait_with_output().expect("the command ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert!(start.elapsed() < PATIENCE);
}
