//! Where cuDNN and its companions may lie. Pure but for looking which directories exist; nothing is loaded here.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// Variable that names the library file or its directory, before all other places.
pub(super) const OVERRIDE: &str = "TALLOW_CUDNN";

/// Names of the library, best first.
pub(super) const NAMES: [&str; 2] =
    if cfg!(windows) { ["cudnn64_9.dll", "cudnn.dll"] } else { ["libcudnn.so.9", "libcudnn.so"] };

/// One thing to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Candidate {
    /// A copy that the process has loaded already, for example inside a Python interpreter.
    Loaded(String),
    /// A file.
    File(PathBuf),
    /// A name, left to the system's loader (`LD_LIBRARY_PATH`, its cache).
    Name(String),
}

/// What the search looks at, apart from the file system.
pub(super) struct Surroundings<'a> {
    /// Values of environment variables.
    pub(super) variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// The running program.
    pub(super) executable: Option<PathBuf>,
}

/// Candidates for cuDNN itself, in order. With [`OVERRIDE`] set, only what it names.
pub(super) fn cudnn(surroundings: &Surroundings<'_>) -> Vec<Candidate> {
    let path = |name: &str| (surroundings.variable)(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(given) = path(OVERRIDE) {
        return if given.is_dir() { files_in(&given).collect() } else { vec![Candidate::File(given)] };
    }
    let mut candidates = vec![Candidate::Loaded(NAMES[0].to_owned())];
    for variable in ["CUDNN_PATH", "CUDNN_HOME", "CUDNN_ROOT", "CUDNN_LIB"] {
        if let Some(root) = path(variable) {
            candidates.extend([root.clone(), root.join("lib"), root.join("lib64")].iter().flat_map(|d| files_in(d)));
        }
    }
    candidates.extend(NAMES.map(|name| Candidate::Name(name.to_owned())));
    let mut directories = Vec::new();
    if let Some(beside) = surroundings.executable.as_deref().and_then(Path::parent) {
        directories.extend([beside.to_owned(), beside.join("../lib"), beside.join("lib")]);
    }
    for prefix in ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|variable| path(variable)) {
        directories.extend(site_packages(&prefix).into_iter().map(|site| site.join("nvidia/cudnn/lib")));
    }
    if let Some(conda) = path("CONDA_PREFIX") {
        directories.extend([conda.join("lib"), conda.join("targets/x86_64-linux/lib")]);
    }
    let toolkits = [path("CUDA_HOME"), path("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))];
    for toolkit in toolkits.into_iter().flatten() {
        directories.extend([toolkit.join("lib64"), toolkit.join("targets/x86_64-linux/lib")]);
    }
    let system = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    directories.extend(system.map(PathBuf::from));
    candidates.extend(directories.iter().flat_map(|directory| files_in(directory)));
    candidates
}

/// Candidates for a library that cuDNN loads by its name later (`libcublasLt`, `libnvrtc`), given the directory of cuDNN
/// if known. Once one is loaded, the loader finds it by that name.
pub(super) fn companion(soname: &str, package: &str, cuda_major: u32, cudnn: Option<&Path>) -> Vec<Candidate> {
    let mut candidates = vec![Candidate::Loaded(soname.to_owned())];
    if let Some(directory) = cudnn {
        let places = [
            directory.join(format!("../../{package}/lib")),
            directory.join(format!("../../cu{cuda_major}/lib")),
            directory.to_owned(),
        ];
        candidates.extend(places.iter().map(|place| place.join(soname)).filter(|f| f.exists()).map(Candidate::File));
    }
    candidates.push(Candidate::Name(soname.to_owned()));
    candidates
}

/// The library's names in a directory, as far as they exist.
fn files_in(directory: &Path) -> impl Iterator<Item = Candidate> + use<> {
    NAMES.map(|name| directory.join(name)).into_iter().filter(|file| file.exists()).map(Candidate::File)
}

/// The `site-packages` of a Python installation, newest Python first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(prefix.join("lib")) else { return Vec::new() };
    let mut pythons: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let minor = entry.file_name().to_str()?.strip_prefix("python3.")?.parse().ok()?;
            Some((minor, entry.path().join("site-packages")))
        })
        .collect();
    pythons.sort_by(|a, b| b.cmp(a));
    pythons.into_iter().map(|(_, site)| site).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) -> PathBuf {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"").unwrap();
        path.to_owned()
    }

    fn search(variables: &[(&str, &Path)], executable: Option<PathBuf>) -> Vec<Candidate> {
        let variable =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, path)| path.as_os_str().to_owned());
        cudnn(&Surroundings { variable: &variable, executable })
    }

    #[cfg(unix)]
    #[test]
    fn the_order_is_loaded_variables_loader_executable_python_toolkit() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let mut expected = vec![Candidate::Loaded("libcudnn.so.9".into())];
        expected.push(Candidate::File(touch(&at("cudnn/lib64/libcudnn.so.9"))));
        expected.push(Candidate::Name("libcudnn.so.9".into()));
        expected.push(Candidate::Name("libcudnn.so".into()));
        expected.push(Candidate::File(touch(&at("app/libcudnn.so.9"))));
        for python in ["python3.12", "python3.9"] {
            let file = format!("venv/lib/{python}/site-packages/nvidia/cudnn/lib/libcudnn.so.9");
            expected.push(Candidate::File(touch(&at(&file))));
        }
        expected.push(Candidate::File(touch(&at("toolkit/lib64/libcudnn.so"))));
        let (cudnn, venv, toolkit) = (at("cudnn"), at("venv"), at("toolkit"));
        let variables =
            [("CUDNN_HOME", cudnn.as_path()), ("VIRTUAL_ENV", venv.as_path()), ("CUDA_HOME", toolkit.as_path())];
        let found = search(&variables, Some(at("app/program")));
        assert_eq!(found[..expected.len()], expected);
    }

    #[test]
    fn the_override_excludes_everything_else() {
        let root = tempfile::tempdir().unwrap();
        let file = touch(&root.path().join(NAMES[0]));
        let other = touch(&root.path().join("other/lib").join(NAMES[0]));
        let home = other.parent().unwrap();
        for given in [root.path(), file.as_path()] {
            assert_eq!(search(&[(OVERRIDE, given), ("CUDNN_HOME", home)], None), [Candidate::File(file.clone())]);
        }
        // A file that does not exist is still tried, so that the failure is on record.
        let missing = root.path().join("missing.so");
        assert_eq!(search(&[(OVERRIDE, &missing)], None), [Candidate::File(missing)]);
        // An empty value is no value.
        assert!(search(&[(OVERRIDE, Path::new(""))], None).len() > 1);
    }

    #[test]
    fn companions_are_sought_beside_cudnn_and_then_by_name() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("nvidia/cudnn/lib");
        fs::create_dir_all(&directory).unwrap();
        touch(&root.path().join("nvidia/cu13/lib/libcublasLt.so.13"));
        let found = companion("libcublasLt.so.13", "cublas", 13, Some(&directory));
        let expected = [
            Candidate::Loaded("libcublasLt.so.13".into()),
            Candidate::File(directory.join("../../cu13/lib/libcublasLt.so.13")),
            Candidate::Name("libcublasLt.so.13".into()),
        ];
        assert_eq!(found, expected);
        assert_eq!(companion("libcublasLt.so.12", "cublas", 12, None).len(), 2);
    }
}
