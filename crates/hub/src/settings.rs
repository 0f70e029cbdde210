//! Where the cache is and how the hub is spoken to: the variables that Python's huggingface_hub uses.

use std::{ffi::OsString, fmt, fs, path::PathBuf};

use crate::error::{Error, Result};

/// The public hub.
pub const ENDPOINT: &str = "https://huggingface.co";

/// A token of the hub. It cannot be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// From its text; none if that is empty or could not stand in a header.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let fits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Self(text.to_owned()))
    }

    #[cfg(feature = "download")]
    pub(crate) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// How the hub and its cache are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Folder of the cache, with a `models--OWNER--NAME` in it for each model.
    pub cache: PathBuf,
    /// Address of the hub, without a slash at the end.
    pub endpoint: String,
    /// Token that is sent to the hub, and to nobody else.
    pub token: Option<Token>,
    /// Look into the cache only.
    pub offline: bool,
}

impl Settings {
    /// Reads environment variables through `variable` and, if they name no token, the file that `hf auth login` writes.
    ///
    /// | variable | effect |
    /// |---|---|
    /// | `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE` | folder of the cache |
    /// | `HF_HOME` | its parent; by default `$XDG_CACHE_HOME/huggingface`, or `.cache/huggingface` at home |
    /// | `HF_ENDPOINT` | another hub |
    /// | `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_TOKEN_PATH` | token, or the file that holds it |
    /// | `HF_HUB_DISABLE_IMPLICIT_TOKEN` | send no token |
    /// | `HF_HUB_OFFLINE` | look into the cache only |
    ///
    /// # Errors
    /// [`Error::NoCache`] if no variable leads to a place for the cache.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        let path = |name| set(name).map(PathBuf::from);
        let text = |name| set(name).and_then(|value| value.into_string().ok());
        let user = || path("HOME").or_else(|| path("USERPROFILE"));
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| user().map(|home| home.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or(Error::NoCache)?;
        let token = || {
            let given = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
            let file = path("HF_TOKEN_PATH").or_else(|| home.as_ref().map(|home| home.join("token")));
            let stored = || fs::read_to_string(file?).ok();
            Token::new(&given.or_else(stored)?)
        };
        let token = if is_on(text("HF_HUB_DISABLE_IMPLICIT_TOKEN")) { None } else { token() };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Ok(Self { cache, endpoint, token, offline: is_on(text("HF_HUB_OFFLINE")) })
    }
}

/// As huggingface_hub reads a switch.
fn is_on(value: Option<String>) -> bool {
    value.is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings> {
        Settings::from_variables(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
    }

    fn cache(variables: &[(&str, &str)]) -> String {
        settings(variables).unwrap().cache.display().to_string()
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        let home = ("HOME", "/h");
        assert_eq!(cache(&[home]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/hf")]), "/hf/hub");
        assert_eq!(cache(&[home, ("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/old");
        assert_eq!(cache(&[home, ("HF_HUB_CACHE", "/new"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/new");
        assert_eq!(cache(&[home, ("HF_HUB_CACHE", "")]), "/h/.cache/huggingface/hub");
        assert!(matches!(settings(&[]), Err(Error::NoCache)));
    }

    #[test]
    fn tokens_come_from_variable_or_file_and_are_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token, None);
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token, Token::new("hf_file"));
        let both = settings(&[("HF_HOME", home), ("HF_TOKEN", " hf_variable ")]).unwrap();
        assert_eq!(both.token, Token::new("hf_variable"));
        assert!(!format!("{both:?}").contains("variable"), "{both:?}");
        let off = [("HF_HOME", home), ("HF_TOKEN", "a"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(settings(&off).unwrap().token, None);
        assert_eq!(Token::new("a\r\nb"), None);
    }

    #[test]
    fn switches_and_endpoint() {
        let home = ("HOME", "/h");
        let offline = |value| settings(&[home, ("HF_HUB_OFFLINE", value)]).unwrap().offline;
        assert!(offline("1") && offline("true") && offline("YES") && !offline("0") && !offline(""));
        assert_eq!(settings(&[home]).unwrap().endpoint, ENDPOINT);
        assert_eq!(settings(&[home, ("HF_ENDPOINT", "http://m/")]).unwrap().endpoint, "http://m");
    }
}
