//! Running the command and looking at what it left behind.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;

/// An empty folder that the command runs in.
pub(crate) struct Place {
    folder: TempDir,
}

/// What a finished command said.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command, to be run in this place, undisturbed by the environment.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env_remove("RUST_LOG").env_remove("RAYON_NUM_THREADS");
        for variable in ["HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
            command.env_remove(variable);
        }
        command.env("HF_HOME", self.path("hf")).env("HF_HUB_OFFLINE", "1");
        command
    }

    /// Runs the command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        self.command(args).output().expect("the command starts").into()
    }

    /// Runs the command and expects success.
    pub(crate) fn succeeds(&self, args: &[&str]) -> Ended {
        let ended = self.run(args);
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
        ended
    }

    /// Runs the command and expects: this exit code, one line of standard error that holds `words`, nothing on standard
    /// output, and no file created or removed.
    pub(crate) fn fails(&self, args: &[&str], code: i32, words: &[&str]) {
        let before = self.files();
        let ended = self.run(args);
        assert_eq!(ended.code, Some(code), "{args:?}: {ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.starts_with("error: "), "{args:?}: {}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "{args:?}: no {word:?} in {}", ended.stderr);
        }
        assert_eq!(ended.stdout, "", "{args:?}");
        assert_eq!(self.files(), before, "{args:?}");
    }

    /// All files and folders below this place.
    pub(crate) fn files(&self) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a readable folder") {
                let path = entry.expect("a readable folder").path();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path.clone());
                }
                found.insert(path);
            }
        }
        found
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).expect(name)
    }

    /// The pixels of a picture.
    pub(crate) fn picture(&self, name: &str) -> image::RgbImage {
        image::open(self.path(name)).expect(name).to_rgb8()
    }

    /// The iTXt chunks of a PNG file.
    pub(crate) fn texts(&self, name: &str) -> Vec<(String, String)> {
        let file = std::io::BufReader::new(fs::File::open(self.path(name)).expect(name));
        let reader = png::Decoder::new(file).read_info().expect("a PNG file");
        let chunks = &reader.info().utf8_text;
        chunks.iter().map(|chunk| (chunk.keyword.clone(), chunk.get_text().expect("text"))).collect()
    }

    /// The pixels of a numbered series of pictures.
    pub(crate) fn series(&self, count: usize) -> Vec<image::RgbImage> {
        (1..=count).map(|number| self.picture(&format!("{number:05}.png"))).collect()
    }

    /// A copy of the demonstration model that a test may damage.
    pub(crate) fn copy_demo(&self, name: &str) -> PathBuf {
        let to = self.path(name);
        copy_folder(&demo_folder(), &to);
        to
    }

    /// A copy of the demonstration VAE that a test may damage.
    pub(crate) fn copy_vae(&self, name: &str) -> PathBuf {
        let to = self.path(name);
        copy_folder(&data("models/wan-vae-demo"), &to);
        to
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8 on standard output"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8 on standard error"),
        }
    }
}

/// A file or folder of the tests in the source tree.
pub(crate) fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(path)
}

/// The demonstration model in the source tree.
pub(crate) fn demo_folder() -> PathBuf {
    data("models/flux2-demo")
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    for entry in fs::read_dir(from).expect("a readable folder") {
        let entry = entry.expect("a readable folder");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            // Not `fs::copy`, which would also copy that a file is read-only.
            fs::write(target, fs::read(entry.path()).expect("a readable file")).expect("a writable folder");
        }
    }
}
