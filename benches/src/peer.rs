//! The peer programs: Python scripts under `benches/peers` that print one JSON object of figures.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

/// Figures of one run of a peer.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Program and version, for example `torch 2.11`.
    pub name: String,
    values: BTreeMap<String, f64>,
}

impl Peer {
    /// Runs `benches/peers/SCRIPT` with `python` and reads `{"peer": "...", "figure": number, ...}`.
    ///
    /// # Errors
    /// If the script cannot be run, fails, or prints something else.
    pub fn run(python: &Path, script: &str, args: &[&str]) -> Result<Self> {
        // Where this was built, or in the repository that this runs in.
        let built = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = if built.exists() { built } else { Path::new("benches") }.join("peers").join(script);
        let output =
            Command::new(python).arg(&path).args(args).output().with_context(|| format!("{python:?} {path:?}"))?;
        ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        let json: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&output.stdout).with_context(|| format!("output of {script}"))?;
        let name = json.get("peer").and_then(|v| v.as_str()).context("output names no peer")?.to_owned();
        Ok(Self { name, values: json.into_iter().filter_map(|(k, v)| Some((k, v.as_f64()?))).collect() })
    }

    /// One figure.
    ///
    /// # Errors
    /// If the peer did not report it.
    pub fn get(&self, figure: &str) -> Result<f64> {
        self.values.get(figure).copied().with_context(|| format!("{} reported no {figure}", self.name))
    }
}
