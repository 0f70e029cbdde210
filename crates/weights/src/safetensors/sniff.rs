//! Other formats, told by their first bytes.

/// What a file is that does not parse as safetensors, with advice; `None` if nothing is recognised.
pub(crate) fn sniff(file: &[u8]) -> Option<&'static str> {
    const MAGIC: &[(&[u8], &str)] = &[
        (b"version https://git-lfs", "a Git LFS pointer, not the weights themselves (fetch them with `git lfs pull`)"),
        (b"GGUF", "a GGUF file"),
        (b"FUGG", "a big-endian GGUF file"),
        (b"lmgg", "a file in the old GGML format (convert it to GGUF)"),
        (b"tjgg", "a file in the old GGML format (convert it to GGUF)"),
        (b"fmgg", "a file in the old GGML format (convert it to GGUF)"),
        (b"PK\x03\x04", "a zip archive, probably a PyTorch checkpoint (.pth, .pt, .ckpt)"),
        (b"\x89HDF\r\n", "an HDF5 file"),
        (b"\x93NUMPY", "a NumPy array"),
        (b"\x89PNG", "a PNG picture"),
        (b"\xff\xd8\xff", "a JPEG picture"),
        (b"%PDF", "a PDF document"),
        (b"\x1f\x8b", "a gzip archive (unpack it first)"),
        (b"\x28\xb5\x2f\xfd", "a Zstandard archive (unpack it first)"),
        (b"Entry not found", "a download server's error message"),
        (b"Invalid username or password", "a download server's error message (a token is needed)"),
        (b"Access to model", "a download server's error message (a token is needed)"),
    ];
    if let Some((_, found)) = MAGIC.iter().find(|(magic, _)| file.starts_with(magic)) {
        return Some(found);
    }
    // Pickle protocols 2 to 5: PROTO, version, then an opcode.
    if matches!(file, [0x80, 2..=5, ..]) {
        return Some("a Python pickle, probably an old PyTorch checkpoint");
    }
    let text = file.iter().position(|b| !b.is_ascii_whitespace() && !matches!(b, 0xef | 0xbb | 0xbf))?;
    let start = file[text..].get(..14).unwrap_or(&file[text..]).to_ascii_lowercase();
    if start.starts_with(b"<!doctype html") || start.starts_with(b"<html") || start.starts_with(b"<!--") {
        return Some("an HTML page, probably an error or login page of the download server");
    }
    if start.starts_with(b"<?xml") {
        return Some("an XML document, probably an error message of the download server");
    }
    if start.starts_with(b"{") {
        return Some("a JSON file");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::sniff;

    #[test]
    fn common_mistakes_are_named() {
        let cases: &[(&[u8], &str)] = &[
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS"),
            (b"GGUF\x03\0\0\0", "GGUF"),
            (b"PK\x03\x04\0\0", "PyTorch"),
            (b"\x80\x02}q\0", "pickle"),
            (b"\x80\x05\x95", "pickle"),
            (b"\n  <!DOCTYPE HTML><html>", "HTML"),
            (b"\xef\xbb\xbf<html lang=en>", "HTML"),
            (b"<?xml version=\"1.0\"?><Error>", "XML"),
            (b"{\"metadata\": {}}", "JSON"),
        ];
        for (bytes, word) in cases {
            assert!(sniff(bytes).is_some_and(|s| s.contains(word)), "{word}");
        }
        assert_eq!(sniff(b""), None);
        assert_eq!(sniff(b"\0\0\0\0"), None);
        assert_eq!(sniff(b"\x80"), None);
    }
}
