//! `tallow verify` with lists of checksums.

use std::fs;

use crate::support::Place;

/// The sha256 of `abc` and of nothing (FIPS 180-2).
const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
const NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn place() -> Place {
    let place = Place::new();
    fs::create_dir_all(place.path("model/vae")).expect("a folder");
    fs::write(place.path("model/vae/a.safetensors"), "abc").expect("a file");
    fs::write(place.path("model/empty"), "").expect("a file");
    fs::write(place.path("model/SHA256SUMS"), format!("{ABC}  vae/a.safetensors\n{NOTHING} *empty\n")).expect("a file");
    place
}

#[test]
fn files_are_compared_with_the_list_beside_them() {
    let place = place();
    let ended = place.succeeds(&["verify", "model"]);
    assert_eq!(ended.stdout, "ok vae/a.safetensors\nok empty\n");
    assert_eq!(ended.stderr, "");
    let quiet = place.succeeds(&["verify", "model", "-q"]);
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let one = place.succeeds(&["verify", "model/vae/a.safetensors", "--manifest", "model/SHA256SUMS"]);
    assert_eq!(one.stdout, "ok model/vae/a.safetensors\n");
}

#[test]
fn a_flipped_bit_is_found_and_named() {
    let place = place();
    fs::write(place.path("model/vae/a.safetensors"), "abb").expect("a file");
    let ended = place.run(&["verify", "model"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stdout, "BAD vae/a.safetensors\nok empty\n");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    for words in ["error: 1 of 2 files", "vae/a.safetensors", ABC] {
        assert!(ended.stderr.contains(words), "no {words:?} in {}", ended.stderr);
    }
    place.fails(&["verify", "model", "-q"], 1, &["vae/a.safetensors"]);
    fs::remove_file(place.path("model/vae/a.safetensors")).expect("a file");
    place.fails(&["verify", "model", "-q"], 1, &["vae/a.safetensors", "1 of 2 files"]);
}

#[test]
fn nothing_to_compare_with_is_a_failure() {
    let place = place();
    fs::remove_file(place.path("model/SHA256SUMS")).expect("a file");
    place.fails(&["verify", "model"], 1, &["SHA256SUMS", "--manifest"]);
    place.fails(&["verify", "missing"], 1, &["missing"]);
    place.fails(&["verify", "owner/name"], 1, &["owner/name", "cache"]);
    place.fails(&["verify", "model", "--manifest", "none"], 1, &["none"]);
    fs::write(place.path("list"), format!("{ABC}  model/vae/a.safetensors\n{ABC}  ../x\n")).expect("a file");
    place.fails(&["verify", "model", "--manifest", "list"], 1, &["line 2", "list"]);
    fs::write(place.path("list"), format!("{ABC}  model/vae/a.safetensors\n")).expect("a file");
    place.fails(&["verify", "model/empty", "--manifest", "list"], 1, &["does not list", "empty"]);
}
