//! Times ours against a baseline and a peer in the same run, prints ratios, keeps the record under `docs/perf`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
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
    /// Wan 2.1 decode of three latent frames at 832x480 (takes minutes).
    Wan,
    /// The built-in demonstration, whole command.
    Demo,
    /// GPU: all convolutions of a steady latent frame of the Wan 2.1 decoder.
    GpuConvs,
    /// GPU: what stands between those convolutions; printed only.
    GpuChain,
    /// GPU: clips through the Wan 2.1 VAE.
    GpuWan21,
    /// GPU: clips through the Wan 2.2 VAE.
    GpuWan22,
}

/// Groups that run where there is no GPU.
const CPU: [Group; 6] = [Group::Gemm, Group::Conv, Group::Step, Group::Vae, Group::Wan, Group::Demo];
/// Groups that need a GPU and a build with feature `cuda`.
const GPU: [Group; 4] = [Group::GpuConvs, Group::GpuChain, Group::GpuWan21, Group::GpuWan22];

/// Times ours against a baseline and a peer.
#[derive(Debug, Parser)]
struct Args {
    /// Groups to run; all that need no GPU if none is named.
    groups: Vec<Group>,
    /// All groups that need a GPU.
    #[arg(long, conflicts_with = "groups")]
    gpu: bool,
    /// Python with torch and diffusers, for the peers.
    #[arg(long)]
    python: Option<PathBuf>,
    /// Also time diffusers compiled (GPU), which takes minutes.
    #[arg(long)]
    compiled_peer: bool,
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
            let all = if args.gpu { &GPU[..] } else { &CPU };
            let groups = if groups.is_empty() { all } else { groups };
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
    if args.compiled_peer {
        command.arg("--compiled-peer");
    }
    ensure!(command.arg("--tallow").arg(&args.tallow).status()?.success(), "{group:?} failed");
    Ok(())
}

fn run(group: Group, args: &Args) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let rows = if GPU.contains(&group) {
        gpu_rows(group, args, folder.path())?
    } else {
        rows(group, &Options { python: args.python.clone() }, &args.tallow, folder.path())?
    };
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
        Group::Wan => cpu::wan::rows(options, folder),
        Group::Demo => cpu::flux2::demo_rows(tallow, folder),
        Group::GpuConvs | Group::GpuChain | Group::GpuWan21 | Group::GpuWan22 => bail!("{group:?} needs a GPU"),
    }
}

#[cfg(feature = "cuda")]
fn gpu_rows(group: Group, args: &Args, folder: &Path) -> Result<Vec<Row>> {
    use benches::{
        gpu::{self, Gpu},
        wan::Model,
    };
    let options = gpu::Options { python: args.python.clone(), compiled_peer: args.compiled_peer };
    let gpu = Gpu::open()?;
    println!("{}", gpu.versions);
    match group {
        Group::GpuConvs => gpu::convs::rows(&gpu, &options),
        Group::GpuChain => gpu::chain::print(&gpu).map(|()| Vec::new()),
        Group::GpuWan21 => gpu::wan::rows(Model::Wan21, &gpu, &options, folder),
        _ => gpu::wan::rows(Model::Wan22, &gpu, &options, folder),
    }
}

#[cfg(not(feature = "cuda"))]
fn gpu_rows(group: Group, _: &Args, _: &Path) -> Result<Vec<Row>> {
    bail!("{group:?} needs a build with feature cuda")
}
