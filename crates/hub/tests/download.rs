//! Downloads from a hub on this machine: what is fetched, what is not, and every way in which it can go wrong.

mod server;

use std::{cell::Cell, fs, ops::ControlFlow, path::PathBuf};

use hub::{Error, Fetched, RepoId, Settings, Token, Want, fetch};
use policy::{Event, Observer, Silent};
use tempfile::TempDir;

use self::server::{COMMIT, Faults, Request, Server};

const LARGE: usize = 3 << 20;
const MODEL: Want<'static> = Want::Model { without: &[] };

struct Place {
    server: Server,
    root: TempDir,
}

fn large(seed: usize) -> Vec<u8> {
    (0..LARGE).map(|i| (i * 7 + seed + i / 251) as u8).collect()
}

impl Place {
    fn new() -> Self {
        let index = r#"{"_class_name": "P", "transformer": ["diffusers", "T"], "vae": ["diffusers", "V"]}"#;
        let files = vec![
            ("README.md".to_owned(), b"# text".to_vec()),
            ("all-in-one.safetensors".to_owned(), large(1)),
            ("model_index.json".to_owned(), index.into()),
            ("transformer/config.json".to_owned(), b"{}".to_vec()),
            ("transformer/diffusion_pytorch_model.safetensors".to_owned(), large(2)),
            ("vae/config.json".to_owned(), b"{\"a\": 1}".to_vec()),
            ("vae/diffusion_pytorch_model.safetensors".to_owned(), large(3)),
        ];
        Self { server: Server::start(files), root: TempDir::new().expect("a folder") }
    }

    fn settings(&self) -> Settings {
        let cache = self.root.path().join("hub");
        Settings { cache, endpoint: self.server.endpoint.clone(), token: None, offline: false }
    }

    fn fetch(&self, want: Want<'_>) -> Result<Fetched, Error> {
        self.fetch_watched(want, &Silent)
    }

    fn fetch_watched(&self, want: Want<'_>, observer: &dyn Observer) -> Result<Fetched, Error> {
        fetch(&RepoId::parse("owner/name").expect("a name"), want, &self.settings(), observer)
    }

    fn repository(&self) -> PathBuf {
        self.root.path().join("hub/models--owner--name")
    }

    /// Contents that were asked for, with the part of it.
    fn contents(&self) -> Vec<(String, Option<String>)> {
        let contents = |r: Request| Some((r.path.strip_prefix("/contents/")?.to_owned(), r.range));
        self.server.requests().into_iter().filter_map(contents).collect()
    }
}

fn names(requests: Vec<(String, Option<String>)>) -> Vec<String> {
    requests.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn a_model_is_downloaded_once_and_only_what_it_needs() {
    let place = Place::new();
    let fetched = place.fetch(MODEL).expect("a download");
    assert_eq!((fetched.commit.as_str(), fetched.notice), (COMMIT, None));
    assert_eq!(fetched.path, place.repository().join("snapshots").join(COMMIT));
    let downloaded = names(place.contents());
    let expected = [
        "model_index.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ];
    assert_eq!(downloaded, expected);
    assert_eq!(fs::read(fetched.path.join("vae/diffusion_pytorch_model.safetensors")).expect("a file"), large(3));
    assert_eq!(fs::read_to_string(place.repository().join("refs/main")).expect("a file"), COMMIT);
    let left: Vec<_> = fs::read_dir(place.repository().join("blobs")).expect("a folder").flatten().collect();
    assert!(left.len() == 5 && left.iter().all(|e| !e.path().to_string_lossy().contains("incomplete")), "{left:?}");

    place.fetch(MODEL).expect("the same again");
    assert_eq!(names(place.contents()), [""; 0]);
    // And without the network.
    let offline = Settings { offline: true, endpoint: String::new(), ..place.settings() };
    let again = fetch(&RepoId::parse("owner/name").expect("a name"), MODEL, &offline, &Silent).expect("the cache");
    assert_eq!(again.path, fetched.path);
}

#[cfg(unix)]
#[test]
fn links_are_relative_and_lead_to_blobs_named_by_their_digest() {
    let place = Place::new();
    let fetched = place.fetch(Want::File("vae/diffusion_pytorch_model.safetensors")).expect("a download");
    let target = fs::read_link(&fetched.path).expect("a link");
    let digest = hub::digest::sha256(&fetched.path, &Silent).expect("a digest");
    assert_eq!(target, PathBuf::from(format!("../../../blobs/{digest}")));
    assert_eq!(hub::cache::promised(&fetched.path), Some(hub::Digest::Sha256(digest)));
    // The cache may be moved as a whole.
    let moved = place.root.path().join("moved");
    fs::rename(place.root.path().join("hub"), &moved).expect("a move");
    let file = moved.join("models--owner--name/snapshots").join(COMMIT).join("vae/diffusion_pytorch_model.safetensors");
    assert_eq!(fs::read(file).expect("a file"), large(3));
}

#[test]
fn components_from_elsewhere_are_not_downloaded() {
    let place = Place::new();
    let fetched = place.fetch(Want::Model { without: &["transformer"] }).expect("a download");
    assert!(fetched.path.join("transformer/config.json").is_file());
    let downloaded = names(place.contents());
    assert!(!downloaded.iter().any(|name| name.starts_with("transformer/diffusion")), "{downloaded:?}");
    assert!(downloaded.iter().any(|name| name.starts_with("vae/diffusion")), "{downloaded:?}");
}

#[test]
fn a_connection_that_breaks_is_taken_up_where_it_broke() {
    let place = Place::new();
    place.server.set(Faults { breaks: 2, ..Faults::default() });
    let file = "transformer/diffusion_pytorch_model.safetensors";
    let fetched = place.fetch(Want::File(file)).expect("a download");
    assert_eq!(fs::read(fetched.path).expect("a file"), large(2));
    let ranges: Vec<_> = place.contents().into_iter().map(|(_, range)| range).collect();
    let (half, rest) = (LARGE / 2, LARGE - LARGE / 2);
    assert_eq!(ranges, [None, Some(format!("bytes={half}-")), Some(format!("bytes={}-", half + rest / 2))]);
}

#[test]
fn a_stopped_download_goes_on_in_the_next_run() {
    let place = Place::new();
    let file = "transformer/diffusion_pytorch_model.safetensors";
    let seen = Cell::new(0);
    let stop = |event: &Event<'_>| match event {
        Event::Progress { done, total } => {
            assert_eq!(*total, 3);
            seen.set(seen.get().max(*done));
            if *done >= 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        _ => ControlFlow::Continue(()),
    };
    let error = place.fetch_watched(Want::File(file), &stop).expect_err("stopped");
    assert!(matches!(error, Error::Cancelled(_)) && seen.get() == 2, "{error}");
    let there: Vec<_> = fs::read_dir(place.repository().join("blobs")).expect("a folder").flatten().collect();
    assert!(there.len() == 1 && there[0].path().to_string_lossy().ends_with(".incomplete"), "{there:?}");
    let had = there[0].metadata().expect("a file").len();
    place.server.requests();
    let fetched = place.fetch(Want::File(file)).expect("a download");
    assert_eq!(fs::read(fetched.path).expect("a file"), large(2));
    assert_eq!(place.contents(), [(file.to_owned(), Some(format!("bytes={had}-")))]);
}

#[test]
fn a_server_without_ranges_begins_again() {
    let place = Place::new();
    place.server.set(Faults { breaks: 1, ignores_ranges: true, ..Faults::default() });
    let fetched = place.fetch(Want::File("all-in-one.safetensors")).expect("a download");
    assert_eq!(fs::read(fetched.path).expect("a file"), large(1));
    assert_eq!(place.contents().len(), 2);
}

#[test]
fn damaged_contents_are_refused_and_removed() {
    let place = Place::new();
    place.server.set(Faults { flips: true, ..Faults::default() });
    let error = place.fetch(Want::File("all-in-one.safetensors")).expect_err("damaged");
    assert!(matches!(error, Error::Damaged { what: "its sha256", .. }), "{error}");
    assert!(error.to_string().contains("all-in-one.safetensors"), "{error}");
    assert_eq!(fs::read_dir(place.repository().join("blobs")).expect("a folder").count(), 0);
    place.server.set(Faults::default());
    place.fetch(Want::File("all-in-one.safetensors")).expect("a download");
}

#[test]
fn refusals_of_the_hub_say_what_to_do() {
    let place = Place::new();
    let refused = |status, code| {
        place.server.set(Faults { refuses: Some((status, code)), ..Faults::default() });
        place.fetch(MODEL).expect_err("refused").to_string()
    };
    let gated = refused(401, "GatedRepo");
    assert!(gated.contains("https://huggingface.co/owner/name") && gated.contains("HF_TOKEN"), "{gated}");
    assert!(refused(401, "RepoNotFound").contains("no model owner/name"));
    assert!(refused(401, "").contains("HF_TOKEN"));
    assert!(refused(404, "RevisionNotFound").contains("no revision main"));
    assert!(refused(503, "").contains("503"));
    place.server.set(Faults::default());
    let text = place.fetch(Want::File("none.gguf")).expect_err("no such file").to_string();
    assert!(text.contains("none.gguf") && text.contains("README.md"), "{text}");
    let other = RepoId::parse("owner/name@v9").expect("a name");
    let text = fetch(&other, MODEL, &place.settings(), &Silent).expect_err("no such revision").to_string();
    assert!(text.contains("v9"), "{text}");
    assert!(!place.root.path().join("hub").exists(), "a refusal leaves something in the cache");
}

#[test]
fn a_hostile_list_of_files_reaches_nothing() {
    let place = Place::new();
    for path in ["../../x", "/tmp/x", "a/../../x", "a\\\\..\\\\x"] {
        let blob = "a".repeat(40);
        let list =
            format!(r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "{path}", "size": 1, "blobId": "{blob}"}}]}}"#);
        place.server.set(Faults { list: Some(list), ..Faults::default() });
        let error = place.fetch(MODEL).expect_err(path);
        assert!(matches!(error, Error::Answer { .. }), "{error}");
    }
    assert!(!place.root.path().join("hub").exists());
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let place = Place::new();
    let settings = Settings { token: Token::new("hf_secret"), ..place.settings() };
    fetch(&RepoId::parse("owner/name").expect("a name"), MODEL, &settings, &Silent).expect("a download");
    let (elsewhere, hub): (Vec<_>, Vec<_>) =
        place.server.requests().into_iter().partition(|request| request.path.starts_with("/contents/"));
    assert!(!hub.is_empty() && hub.iter().all(|r| r.authorization.as_deref() == Some("Bearer hf_secret")), "{hub:?}");
    assert!(!elsewhere.is_empty() && elsewhere.iter().all(|r| r.authorization.is_none()), "{elsewhere:?}");
}

#[test]
fn a_hub_out_of_reach_is_no_failure_if_the_cache_has_the_model() {
    let place = Place::new();
    let unreachable = Settings { endpoint: "http://127.0.0.1:1".to_owned(), ..place.settings() };
    let repo = RepoId::parse("owner/name").expect("a name");
    let error = fetch(&repo, MODEL, &unreachable, &Silent).expect_err("nothing there");
    assert!(matches!(error, Error::Transport { .. }), "{error}");
    let first = place.fetch(MODEL).expect("a download");
    let second = fetch(&repo, MODEL, &unreachable, &Silent).expect("the cache");
    assert_eq!(second.path, first.path);
    assert!(second.notice.is_some_and(|notice| notice.contains("127.0.0.1:1")));
}
