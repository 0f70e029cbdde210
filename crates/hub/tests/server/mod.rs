//! A hub on this machine, with the faults of the real one. Also the tests of the command run against it.

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

/// The commit of every repository here.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the next answers do wrong.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    /// So many contents break off halfway.
    pub(crate) breaks: usize,
    /// Contents come from the beginning, whatever part is asked for.
    pub(crate) ignores_ranges: bool,
    /// The first byte of contents is another one.
    pub(crate) flips: bool,
    /// Status and `x-error-code` of every answer.
    pub(crate) refuses: Option<(u16, &'static str)>,
    /// The list of files has this instead of its own text.
    pub(crate) list: Option<String>,
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) range: Option<String>,
    pub(crate) authorization: Option<String>,
}

/// The hub; it holds one repository, `owner/name`.
pub(crate) struct Server {
    /// Its address.
    pub(crate) endpoint: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    files: Vec<(String, Vec<u8>)>,
    faults: Faults,
    requests: Vec<Request>,
    port: u16,
}

impl Server {
    /// Starts it with these files; it ends with the process.
    pub(crate) fn start(files: Vec<(String, Vec<u8>)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(Mutex::new(State { files, port, ..State::default() }));
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                // A client that hangs up is no failure of the server.
                thread::spawn(move || drop(serve(&stream, &state)));
            }
        });
        Self { endpoint: format!("http://127.0.0.1:{port}"), state }
    }

    /// From now on, answers do this wrong.
    pub(crate) fn set(&self, faults: Faults) {
        self.state.lock().expect("the state").faults = faults;
    }

    /// Everything that was asked for since the last call.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().expect("the state").requests)
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut request = Request { path, range: None, authorization: None };
    for line in lines {
        let line = line?;
        match line.split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("range") => request.range = Some(value.to_owned()),
            Some((name, value)) if name.eq_ignore_ascii_case("authorization") => {
                request.authorization = Some(value.to_owned());
            }
            Some(_) => {}
            None => break,
        }
    }
    let answer = answer(&request, &mut state.lock().expect("the state"));
    (&mut &*stream).write_all(&answer)
}

fn answer(request: &Request, state: &mut State) -> Vec<u8> {
    state.requests.push(request.clone());
    if let Some((status, code)) = state.faults.refuses {
        return head(&format!("{status} No"), &format!("x-error-code: {code}\r\ncontent-length: 0\r\n"));
    }
    if let Some(rest) = request.path.strip_prefix("/api/models/owner/name/revision/") {
        let text = state.faults.list.clone().unwrap_or_else(|| list(&state.files));
        if !rest.starts_with("main?") && !rest.starts_with(COMMIT) {
            return head("404 Not Found", "x-error-code: RevisionNotFound\r\ncontent-length: 0\r\n");
        }
        let mut out = head("200 OK", &format!("content-length: {}\r\n", text.len()));
        out.extend(text.as_bytes());
        return out;
    }
    if let Some(file) = request.path.strip_prefix(&format!("/owner/name/resolve/{COMMIT}/")) {
        // Another name of this machine stands for the other server that contents come from.
        let location = format!("location: http://localhost:{}/contents/{file}\r\ncontent-length: 0\r\n", state.port);
        return head("302 Found", &location);
    }
    let file = request.path.strip_prefix("/contents/");
    match state.files.iter().find(|(path, _)| Some(path.as_str()) == file).cloned() {
        Some((_, bytes)) => contents(request, bytes, &mut state.faults),
        None => head("404 Not Found", "x-error-code: RepoNotFound\r\ncontent-length: 0\r\n"),
    }
}

fn contents(request: &Request, mut bytes: Vec<u8>, faults: &mut Faults) -> Vec<u8> {
    if faults.flips {
        bytes[0] ^= 1;
    }
    let range = request.range.as_ref().filter(|_| !faults.ignores_ranges);
    let from = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let (status, from) = match from {
        Some(from) => ("206 Partial Content", from),
        None => ("200 OK", 0),
    };
    let (len, total) = (bytes.len() - from, bytes.len());
    let headers = format!("content-length: {len}\r\ncontent-range: bytes {from}-{}/{total}\r\n", total - 1);
    let mut out = head(status, &headers);
    let mut part = &bytes[from..];
    if faults.breaks > 0 {
        faults.breaks -= 1;
        part = &part[..len / 2];
    }
    out.extend(part);
    out
}

fn head(status: &str, headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n").into_bytes()
}

/// As the hub lists files: those of 1000 bytes and more are large ones, with a sha256.
fn list(files: &[(String, Vec<u8>)]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let entry = |(index, (path, bytes)): (usize, &(String, Vec<u8>))| {
        let git = format!("{index:040x}");
        let (size, scratch) = (bytes.len(), folder.path().join("x"));
        std::fs::write(&scratch, bytes).expect("a file");
        let sha256 = hub::digest::sha256(&scratch, &policy::Silent).expect("a digest");
        let lfs = format!(r#", "lfs": {{"sha256": "{sha256}", "size": {size}, "pointerSize": 134}}"#);
        let lfs = if size < 1000 { "" } else { &lfs };
        format!(r#"{{"rfilename": "{path}", "size": {size}, "blobId": "{git}"{lfs}}}"#)
    };
    let entries: Vec<String> = files.iter().enumerate().map(entry).collect();
    format!(r#"{{"id": "owner/name", "sha": "{COMMIT}", "siblings": [{}]}}"#, entries.join(", "))
}
