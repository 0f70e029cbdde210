//! The library at run time: found, checked before it can do harm, never unloaded.

use std::{
    env,
    ffi::{CStr, OsStr},
    fmt, fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use libloading::Library as Dynamic;

use super::{
    refusal::Failure,
    search::{self, Candidate, Surroundings},
    sys::{Api, Status, status},
};

/// Oldest version that this crate speaks to: the first release of the graph API's present form with fixes.
const OLDEST: Version = Version(90_100);

/// A version of cuDNN, as `cudnnGetVersion` gives it: 90100 is 9.1.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Version(pub(crate) u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.0;
        // Until version 8, a thousand per major.
        let major = if v < 10_000 { v / 1000 } else { v / 10_000 };
        let minor = if v < 10_000 { v % 1000 / 100 } else { v % 10_000 / 100 };
        write!(f, "{major}.{minor}.{}", v % 100)
    }
}

/// cuDNN, loaded and of a version that this crate can use.
#[derive(Debug)]
pub(crate) struct Library {
    pub(super) api: Api,
    version: Version,
    cudart: u32,
    max_device: u32,
    path: Option<PathBuf>,
    cublas_lt: Option<PathBuf>,
    nvrtc: Result<Option<PathBuf>, Vec<String>>,
    attempts: Vec<String>,
    /// Set by the first failure that says the installation is broken; nothing is tried again after it.
    broken: OnceLock<Failure>,
}

/// Why there is no usable library.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}{}", attempts.last().map(|last| format!(" ({last})")).unwrap_or_default())]
pub(crate) struct Unavailable {
    /// The step that failed.
    pub(crate) what: String,
    /// Every place tried, and what the loader said.
    pub(crate) attempts: Vec<String>,
}

/// The library, loaded by the first call.
///
/// # Errors
/// [`Unavailable`], the same at every call.
pub(crate) fn library() -> Result<&'static Library, &'static Unavailable> {
    static LIBRARY: OnceLock<Result<Library, Unavailable>> = OnceLock::new();
    LIBRARY.get_or_init(Library::find).as_ref()
}

impl Library {
    fn find() -> Result<Self, Unavailable> {
        let surroundings = Surroundings { variable: &|name| env::var_os(name), executable: env::current_exe().ok() };
        let mut attempts = Vec::new();
        let Some(dynamic) = first(&search::cudnn(&surroundings), &mut attempts) else {
            return Err(Unavailable { what: "no cudnn library could be loaded".to_owned(), attempts });
        };
        Self::check(dynamic, attempts)
    }

    fn check(dynamic: Dynamic, attempts: Vec<String>) -> Result<Self, Unavailable> {
        // Never unloaded: the library keeps state of the driver that must not outlive its code.
        let dynamic: &'static Dynamic = Box::leak(Box::new(dynamic));
        let unavailable = |what: String| Unavailable { what, attempts: attempts.clone() };
        let api =
            symbols(dynamic).map_err(|e| unavailable(format!("the library is not cudnn 9: {}", innermost(&e))))?;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        // SAFETY: of this type in every version 9; takes nothing and touches no device.
        let version = Version(number(unsafe { (api.get_version)() }));
        if version < OLDEST {
            return Err(unavailable(format!("cudnn {version} is too old, {OLDEST} is the oldest that serves")));
        }
        // SAFETY: as `get_version`.
        let cudart = number(unsafe { (api.get_cudart_version)() });
        let path = NAMES_LOADED.iter().find_map(|name| loaded_path(name));
        let directory = path.as_deref().and_then(Path::parent);
        // Must be settled before any graph is described: without its cuBLASLt cuDNN ends the process.
        let cuda_major = cudart / 1000;
        let soname = format!("libcublasLt.so.{cuda_major}");
        let cublas_lt = load_companion(&soname, "cublas", cuda_major, directory).map_err(|attempts| Unavailable {
            what: format!("cudnn {version} needs {soname}, which could not be loaded"),
            attempts,
        })?;
        let nvrtc = load_companion(&format!("libnvrtc.so.{cuda_major}"), "cuda_nvrtc", cuda_major, directory);
        // SAFETY: as `get_version`.
        let max_device = number(unsafe { (api.get_max_device_version)() });
        let library =
            Self { api, version, cudart, max_device, path, cublas_lt, nvrtc, attempts, broken: OnceLock::new() };
        // SAFETY: compares the versions of the library's parts; takes nothing and touches no device.
        let checked = unsafe { (library.api.graph_version_check)() };
        match library.outcome("cudnnGraphVersionCheck", checked) {
            Ok(()) => Ok(library),
            Err(failure) => Err(Unavailable { what: failure.to_string(), attempts: library.attempts }),
        }
    }

    /// Version of the library.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// File of the library, where the system tells.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Version of the CUDA runtime inside the library: 13000 is 13.0.
    pub(crate) fn cudart_version(&self) -> u32 {
        self.cudart
    }

    /// Newest compute capability that the library knows: 1200 is 12.0.
    pub(crate) fn max_device_version(&self) -> u32 {
        self.max_device
    }

    /// File of cuBLASLt, where the system tells.
    pub(crate) fn cublas_lt(&self) -> Option<&Path> {
        self.cublas_lt.as_deref()
    }

    /// File of NVRTC where the system tells, or what was tried. Without it there are no kernels compiled at run time.
    ///
    /// # Errors
    /// Every place tried and what the loader said.
    pub(crate) fn nvrtc(&self) -> Result<Option<&Path>, &[String]> {
        self.nvrtc.as_ref().map(Option::as_deref).map_err(Vec::as_slice)
    }

    /// Places tried before the library was found.
    pub(crate) fn attempts(&self) -> &[String] {
        &self.attempts
    }

    /// The failure that showed the installation to be broken, if one did.
    pub(super) fn broken(&self) -> Option<&Failure> {
        self.broken.get()
    }

    /// A status as a result, with the text of the check that failed.
    pub(super) fn outcome(&self, call: &'static str, code: Status) -> Result<(), Failure> {
        if code == status::SUCCESS {
            return Ok(());
        }
        let mut buffer = [0u8; 1024];
        // SAFETY: writes at most the given number of bytes, end mark included, to memory of that size.
        unsafe { (self.api.get_last_error_string)(buffer.as_mut_ptr().cast(), buffer.len()) };
        let detail = CStr::from_bytes_until_nul(&buffer).map(CStr::to_string_lossy).unwrap_or_default();
        // SAFETY: a static text for any value, as the header promises.
        let name = unsafe { (self.api.get_error_string)(code) };
        let name = if name.is_null() {
            "unknown status".into()
        } else {
            // SAFETY: not null, ended by a zero, and static.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        };
        let detail = detail.trim().replace('\n', "; ");
        let text = if detail.is_empty() { name.into_owned() } else { format!("{name}: {detail}") };
        Err(Failure { call, status: code, text })
    }

    /// Takes a failure for what it says of the installation. Not for plans from files, of which one made by another version
    /// fails alike.
    pub(super) fn judge(&self, failure: Failure) -> Failure {
        if failure.is_installation() {
            // Another thread may have been faster.
            let _ = self.broken.set(failure.clone());
        }
        failure
    }
}

/// The names under which a loaded cuDNN may appear.
const NAMES_LOADED: [&str; 2] = ["libcudnn.so.9", "libcudnn.so"];

fn load_companion(
    soname: &str,
    package: &str,
    cuda_major: u32,
    cudnn: Option<&Path>,
) -> Result<Option<PathBuf>, Vec<String>> {
    let mut attempts = Vec::new();
    match first(&search::companion(soname, package, cuda_major, cudnn), &mut attempts) {
        Some(dynamic) => {
            // Kept for good: cuDNN finds it by its name whenever it asks.
            Box::leak(Box::new(dynamic));
            Ok(loaded_path(soname))
        }
        None => Err(attempts),
    }
}

/// The first candidate that loads; what the loader said of those before it goes to `attempts`.
fn first(candidates: &[Candidate], attempts: &mut Vec<String>) -> Option<Dynamic> {
    candidates.iter().find_map(|candidate| match candidate {
        Candidate::Loaded(name) => already_loaded(name),
        Candidate::File(path) => {
            open(path.as_os_str()).map_err(|e| attempts.push(format!("{}: {e}", path.display()))).ok()
        }
        Candidate::Name(name) => open(name.as_ref()).map_err(|e| attempts.push(format!("{name}: {e}"))).ok(),
    })
}

#[cfg(unix)]
fn open(path: &OsStr) -> Result<Dynamic, String> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: runs the initialisers of NVIDIA's libraries, which ask nothing of the program.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Dynamic::from).map_err(|e| innermost(&e))
}

/// Loads a library that others will look for by its name, and keeps it.
#[cfg(test)]
pub(super) fn load_for_good(path: &Path) -> Result<(), String> {
    open(path.as_os_str()).map(|library| {
        Box::leak(Box::new(library));
    })
}

#[cfg(not(unix))]
fn open(path: &OsStr) -> Result<Dynamic, String> {
    // SAFETY: runs the initialisers of NVIDIA's libraries, which ask nothing of the program.
    unsafe { Dynamic::new(path) }.map_err(|e| innermost(&e))
}

/// The loader's own words.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// A handle of a library only if the process has it already.
#[cfg(target_os = "linux")]
fn already_loaded(name: &str) -> Option<Dynamic> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    /// Of `dlfcn.h`.
    const RTLD_NOLOAD: i32 = 4;
    // SAFETY: loads nothing, so it runs no initialisers.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) }.ok().map(Dynamic::from)
}

#[cfg(not(target_os = "linux"))]
fn already_loaded(_: &str) -> Option<Dynamic> {
    None
}

/// File of a loaded library, from the process's memory map. `None` where there is no such map.
fn loaded_path(name: &str) -> Option<PathBuf> {
    path_in_map(&fs::read_to_string("/proc/self/maps").ok()?, name)
}

fn path_in_map(map: &str, name: &str) -> Option<PathBuf> {
    let paths = map.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    // A file may carry a longer version than the name that was asked for.
    let of_library = |file: &str| file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    paths.into_iter().find(|p| p.file_name().and_then(OsStr::to_str).is_some_and(of_library)).map(Path::to_owned)
}

fn symbols(library: &'static Dynamic) -> Result<Api, libloading::Error> {
    macro_rules! symbol {
        ($name:literal) => {{
            // SAFETY: the field's type is the function's in `cudnn.h` of every version 9.
            let symbol = unsafe { library.get($name) };
            *symbol?
        }};
    }
    Ok(Api {
        get_version: symbol!(b"cudnnGetVersion\0"),
        get_max_device_version: symbol!(b"cudnnGetMaxDeviceVersion\0"),
        get_cudart_version: symbol!(b"cudnnGetCudartVersion\0"),
        graph_version_check: symbol!(b"cudnnGraphVersionCheck\0"),
        get_error_string: symbol!(b"cudnnGetErrorString\0"),
        get_last_error_string: symbol!(b"cudnnGetLastErrorString\0"),
        create: symbol!(b"cudnnCreate\0"),
        set_stream: symbol!(b"cudnnSetStream\0"),
        create_descriptor: symbol!(b"cudnnBackendCreateDescriptor\0"),
        destroy_descriptor: symbol!(b"cudnnBackendDestroyDescriptor\0"),
        set_attribute: symbol!(b"cudnnBackendSetAttribute\0"),
        get_attribute: symbol!(b"cudnnBackendGetAttribute\0"),
        finalize: symbol!(b"cudnnBackendFinalize\0"),
        execute: symbol!(b"cudnnBackendExecute\0"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        for (number, text) in [(91_900, "9.19.0"), (90_100, "9.1.0"), (91_002, "9.10.2"), (8907, "8.9.7")] {
            assert_eq!(Version(number).to_string(), text);
        }
        assert!(Version(8907) < OLDEST && Version(90_000) < OLDEST);
    }

    #[test]
    fn a_loaded_library_is_found_in_the_memory_map() {
        let map = "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudnn_graph.so.9\n\
                   7f01-7f02 r-xp 00000000 08:01 13 /opt/a b/libcudnn.so.9.19.0\n\
                   7f02-7f03 rw-p 00000000 00:00 0 [heap]\n";
        assert_eq!(path_in_map(map, "libcudnn.so.9"), Some(PathBuf::from("/opt/a b/libcudnn.so.9.19.0")));
        assert_eq!(path_in_map(map, "libcudnn.so.90"), None);
        assert_eq!(path_in_map(map, "libcublasLt.so.13"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn failures_name_the_place_and_the_reason() {
        let mut attempts = Vec::new();
        let candidates = [
            Candidate::Loaded("libof-nobody.so.1".into()),
            Candidate::File("/nowhere/libcudnn.so.9".into()),
            Candidate::Name("libof-nobody.so.1".into()),
        ];
        assert!(first(&candidates, &mut attempts).is_none());
        assert_eq!(attempts.len(), 2);
        assert!(attempts[0].starts_with("/nowhere/libcudnn.so.9: ") && attempts[0].contains("No such file"));
        let unavailable = Unavailable { what: "no cudnn library could be loaded".into(), attempts };
        assert!(unavailable.to_string().contains("libof-nobody"), "{unavailable}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_library_is_not_taken_for_cudnn() {
        let libc = open("libc.so.6".as_ref()).unwrap();
        let error = Library::check(libc, vec!["first: failed".into()]).unwrap_err();
        assert!(error.what.contains("not cudnn 9") && error.what.contains("cudnnGetVersion"), "{error}");
        assert_eq!(error.attempts, ["first: failed"]);
    }
}
