//! Models named owner/name, from a hub on this machine.

use std::{fs, path::Path};

use crate::{
    hub_server::{COMMIT, Faults, Server},
    support::{Ended, Place, demo_folder},
};

const QUICK: [&str; 8] = ["--steps", "1", "-W", "64", "-H", "64", "-s", "3"];

/// A hub with the demonstration model and what else stands in a repository.
fn server() -> Server {
    let mut files = vec![("README.md".to_owned(), b"# a model".to_vec())];
    collect(&demo_folder(), "", &mut files);
    Server::start(files)
}

fn collect(folder: &Path, prefix: &str, files: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            collect(&entry.path(), &format!("{name}/"), files);
        } else {
            files.push((name, fs::read(entry.path()).expect("a file")));
        }
    }
}

fn online(place: &Place, server: &Server, args: &[&str]) -> Ended {
    let mut command = place.command(args);
    command
        .env_remove("HF_HUB_OFFLINE")
        .env("HF_ENDPOINT", &server.endpoint)
        .output()
        .expect("the command starts")
        .into()
}

fn quick<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["generate", "a green square"], args, &QUICK].concat()
}

#[test]
fn a_model_of_the_hub_makes_the_picture_and_is_there_for_the_next_time() {
    let place = Place::new();
    let server = server();
    let ended = online(&place, &server, &quick(&["-o", "a.png", "-m", "owner/name"]));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "a.png\n"), "{ended:?}");
    // Progress is for terminals only.
    assert!(!ended.stderr.contains(['\r', '\x1b']), "{:?}", ended.stderr);
    place.succeeds(&quick(&["-o", "b.png"]));
    assert!(place.picture("a.png") == place.picture("b.png"));
    assert!(place.texts("a.png").iter().any(|(_, text)| text.contains("Model: owner/name")));
    assert!(!server.requests().iter().any(|request| request.path.contains("README")));

    place.succeeds(&quick(&["-o", "c.png", "-m", "owner/name"]));
    assert!(place.picture("a.png") == place.picture("c.png"));
    assert_eq!(server.requests(), []);
    let file = "owner/name/transformer/diffusion_pytorch_model.safetensors";
    place.succeeds(&quick(&["-o", "d.png", "--transformer", file]));
    assert!(place.picture("a.png") == place.picture("d.png"));
    // A hub that is away is said, and is no failure.
    let away = place
        .command(&quick(&["-o", "e.png", "-m", "owner/name"]))
        .env_remove("HF_HUB_OFFLINE")
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .output()
        .expect("the command starts");
    let stderr = String::from_utf8_lossy(&away.stderr);
    assert!(away.status.success() && stderr.contains("warning: ") && stderr.contains("127.0.0.1:1"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn verify_finds_a_flipped_bit_in_the_cache() {
    let place = Place::new();
    let server = server();
    let ended = online(&place, &server, &quick(&["-o", "a.png", "-m", "owner/name"]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let report = place.succeeds(&["verify", "owner/name"]).stdout;
    let file = "transformer/diffusion_pytorch_model.safetensors";
    for line in [format!("ok {file}"), "unchecked generation.json".to_owned()] {
        assert!(report.lines().any(|found| found == line), "no {line:?} in\n{report}");
    }
    let path = place.path("hf/hub/models--owner--name/snapshots").join(COMMIT).join(file);
    let mut bytes = fs::read(&path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("a writable file");
    let ended = place.run(&["verify", "owner/name"]);
    assert!(ended.code == Some(1) && ended.stdout.contains(&format!("BAD {file}")), "{ended:?}");
    assert!(ended.stderr.starts_with("error: 1 of ") && ended.stderr.contains(file), "{ended:?}");
}

#[test]
fn refusals_are_one_line_that_says_what_to_do() {
    let place = Place::new();
    let server = server();
    let refused = |args: &[&str], words: &[&str]| {
        let before = place.files();
        let ended = online(&place, &server, &quick(args));
        assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.lines().count()), (Some(1), "", 1), "{ended:?}");
        for word in words {
            assert!(ended.stderr.contains(word), "no {word:?} in {}", ended.stderr);
        }
        assert_eq!(place.files(), before);
    };
    refused(&["-o", "a.png", "-m", "other/name"], &["other/name", "HF_TOKEN"]);
    refused(&["-o", "a.png", "-m", "owner/name@v9"], &["revision v9"]);
    refused(&["-o", "a.png", "--transformer", "owner/name/x.gguf"], &["x.gguf", "README.md"]);
    let files = Server::start(vec![("x-Q8_0.gguf".to_owned(), b"GGUF".to_vec())]);
    let ended = online(&place, &files, &quick(&["-o", "a.png", "-m", "owner/name"]));
    assert_eq!((ended.code, ended.stderr.lines().count()), (Some(1), 1), "{ended:?}");
    assert!(
        ended.stderr.contains("--transformer owner/name/FILE") && ended.stderr.contains("x-Q8_0.gguf"),
        "{ended:?}"
    );
    server.set(Faults { refuses: Some((401, "GatedRepo")), ..Faults::default() });
    refused(&["-o", "a.png", "-m", "owner/name"], &["gated", "https://huggingface.co/owner/name", "HF_TOKEN"]);
    // What is no name of the hub is a path.
    refused(&["-o", "a.png", "-m", "./owner/name"], &["cannot open ./owner/name"]);
    place.fails(&quick(&["-o", "a.png", "-m", "owner/name"]), 1, &["HF_HUB_OFFLINE", "owner/name"]);
}
