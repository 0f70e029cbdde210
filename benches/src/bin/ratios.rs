//! Times ours against a baseline and a peer in the same run, prints ratios, keeps the record under `docs/perf`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use benches::{
    cpu::{self, Options},
    machine,
    record::{self, Row},
};
use clap::{Parser, ValueEnum};

/// Groups of figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Group {
    /// Matrix products.
    Gemm,
    /// Convolutions.
    Conv,
    /// One klein 4B step (writes a 7.75 GB checkpoint into a temporary folder).
    Step,
    /// FLUX.2 VAE decode.
    Vae,
    /// The built-in demonstration, whole command.
    Demo,
}

/// Times ours against a baseline and a peer.
#[derive(Debug, Parser)]
struct Args {
    /// Groups to run; all if none is named.
    groups: Vec<Group>,
    /// Python with torch and diffusers, for the peers.
    #[arg(long)]
    python: Option<PathBuf>,
    /// Record to update, for example docs/perf/cpu.csv.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// The `tallow` program to time (group demo).
    #[arg(long, default_value = "target/release/tallow")]
    tallow: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    println!("{}, commit {}, {}", machine::processor(), machine::commit(), machine::date());
    match args.groups.as_slice() {
        [group] => run(*group, &args),
        groups => {
            let all = [Group::Gemm, Group::Conv, Group::Step, Group::Vae, Group::Demo];
            let groups = if groups.is_empty() { &all[..] } else { groups };
            groups.iter().try_for_each(|group| in_own_process(*group, &args))
        }
    }
}

/// A process per group: peaks of resident memory are per process.
fn in_own_process(group: Group, args: &Args) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(group.to_possible_value().context("group without a name")?.get_name());
    let optional = [("--python", args.python.as_ref()), ("--csv", args.csv.as_ref())];
    for (flag, path) in optional.into_iter().filter_map(|(flag, path)| Some((flag, path?))) {
        command.arg(flag).arg(path);
    }
    ensure!(command.arg("--tallow").arg(&args.tallow).status()?.success(), "{group:?} failed");
    Ok(())
}

fn run(group: Group, args: &Args) -> Result<()> {
    let options = Options { python: args.python.clone() };
    let folder = tempfile::tempdir()?;
    let rows = rows(group, &options, &args.tallow, folder.path())?;
    for row in &rows {
        println!("{}", row.summary());
    }
    args.csv.as_deref().map_or(Ok(()), |path| record::save(path, &rows))
}

fn rows(group: Group, options: &Options, tallow: &Path, folder: &Path) -> Result<Vec<Row>> {
    match group {
        Group::Gemm => cpu::gemm::rows(),
        Group::Conv => cpu::conv::rows(options),
        Group::Step => cpu::flux2::step_rows(folder),
        Group::Vae => cpu::flux2::vae_rows(options, folder),
        Group::Demo => cpu::flux2::demo_rows(tallow, folder),
    }
}
