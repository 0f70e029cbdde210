//! Times ours against a baseline and a peer in the same run, prints ratios, keeps the record under `docs/perf`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use benches::{
    cpu::{self, Options},
    machine,
    record::{self, Row, Sink},
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
    /// Loading of a checkpoint (writes 7.75 GB into a temporary folder).
    Load,
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
    /// GPU: decoding of int8 weights and products of integers.
    GpuConvrot,
    /// GPU: loading of a checkpoint onto the device (writes 7.75 GB into a temporary folder).
    GpuLoad,
    /// GPU: neighborhood attention of the last stage of the LTX-2.5 diffusion decoder.
    #[value(name = "gpu-na3d")]
    GpuNa3d,
    /// GPU: clips through the convolutional VAE of LTX-2.
    GpuLtxConv,
    /// GPU: what `benches/profile/kernels.c` lists of such a decode.
    GpuLtxConvKernels,
    /// GPU: 121 frames of 768x512 through the diffusion decoder of LTX-2.5.
    GpuLtxDiffusion,
    /// GPU: 121 frames of 1280x704.
    #[value(name = "gpu-ltx-diffusion-704")]
    GpuLtxDiffusion704,
    /// GPU: 257 frames of 1920x1088 within 40 GiB.
    #[value(name = "gpu-ltx-diffusion-1088")]
    GpuLtxDiffusion1088,
    /// GPU: what `benches/profile/kernels.c` lists of a decode of 121 frames of 768x512.
    GpuLtxDiffusionKernels,
    /// GPU: clips through the Wan 2.1 VAE.
    GpuWan21,
    /// GPU: clips through the Wan 2.2 VAE.
    GpuWan22,
    /// GPU: steps of FLUX.2 klein 4B.
    GpuFlux2Step,
    /// GPU: steps of FLUX.2 klein 9B, with and without a reference picture.
    #[value(name = "gpu-flux2-step-9b")]
    GpuFlux2Step9b,
    /// GPU: FLUX.2 VAE decode.
    GpuFlux2Vae,
    /// GPU: text encoder of FLUX.2 klein 4B.
    GpuFlux2Text,
    /// GPU: prompt to PNG with FLUX.2 klein 4B, in time and memory.
    GpuFlux2Picture,
    /// GPU: the ops of a step and of a VAE decode, one by one; printed only.
    GpuFlux2Ops,
    /// GPU: steps of FLUX.2 klein 4B for a list of kernels, see benches/profile/kernels.c.
    GpuFlux2StepKernels,
    /// GPU: the same for VAE decodes.
    GpuFlux2VaeKernels,
    /// GPU: the same for prompts through the text encoder.
    GpuFlux2TextKernels,
}

/// Groups that run where there is no GPU.
const CPU: [Group; 7] = [Group::Gemm, Group::Conv, Group::Step, Group::Load, Group::Vae, Group::Wan, Group::Demo];
/// Groups that need a GPU and a build with feature `cuda`.
const GPU: [Group; 22] = [
    Group::GpuConvs,
    Group::GpuChain,
    Group::GpuConvrot,
    Group::GpuLoad,
    Group::GpuNa3d,
    Group::GpuLtxConv,
    Group::GpuLtxConvKernels,
    Group::GpuLtxDiffusion,
    Group::GpuLtxDiffusion704,
    Group::GpuLtxDiffusion1088,
    Group::GpuLtxDiffusionKernels,
    Group::GpuWan21,
    Group::GpuWan22,
    Group::GpuFlux2Step,
    Group::GpuFlux2Step9b,
    Group::GpuFlux2Vae,
    Group::GpuFlux2Text,
    Group::GpuFlux2Picture,
    Group::GpuFlux2Ops,
    Group::GpuFlux2StepKernels,
    Group::GpuFlux2VaeKernels,
    Group::GpuFlux2TextKernels,
];

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
    // At once: a run that is stopped keeps what it has measured.
    let mut sink = |row: Row| {
        println!("{}", row.summary());
        args.csv.as_deref().map_or(Ok(()), |path| record::save(path, &row))
    };
    if GPU.contains(&group) {
        gpu_rows(group, args, folder.path(), &mut sink)
    } else {
        rows(group, &Options { python: args.python.clone() }, &args.tallow, folder.path(), &mut sink)
    }
}

fn rows(group: Group, options: &Options, tallow: &Path, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    match group {
        Group::Gemm => cpu::gemm::rows(sink),
        Group::Conv => cpu::conv::rows(options, sink),
        Group::Step => cpu::flux2::step_rows(folder, sink),
        Group::Load => cpu::load::rows(folder, sink),
        Group::Vae => cpu::flux2::vae_rows(options, folder, sink),
        Group::Wan => cpu::wan::rows(options, folder, sink),
        Group::Demo => cpu::flux2::demo_rows(tallow, folder, sink),
        group => bail!("{group:?} needs a GPU"),
    }
}

#[cfg(feature = "cuda")]
fn gpu_rows(group: Group, args: &Args, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    use benches::{
        gpu::{self, Gpu},
        wan::Model,
    };
    let options = gpu::Options { python: args.python.clone(), compiled_peer: args.compiled_peer };
    let gpu = Gpu::open()?;
    println!("{}", gpu.versions);
    match group {
        Group::GpuConvs => gpu::convs::rows(&gpu, &options, sink),
        Group::GpuChain => gpu::chain::print(&gpu),
        Group::GpuConvrot => gpu::convrot::rows(&gpu, &options, sink),
        Group::GpuLoad => gpu::load::rows(&gpu, &options, folder, sink),
        Group::GpuNa3d => gpu::na3d::rows(&gpu, &options, sink),
        Group::GpuLtxConv => gpu::ltx_conv::rows(&gpu, &options, sink),
        Group::GpuLtxConvKernels => gpu::ltx_conv::kernels(&gpu),
        Group::GpuLtxDiffusion => gpu::ltx_diffusion::rows(gpu::ltx_diffusion::SMALL, &gpu, &options, sink),
        Group::GpuLtxDiffusion704 => gpu::ltx_diffusion::rows(gpu::ltx_diffusion::MIDDLE, &gpu, &options, sink),
        Group::GpuLtxDiffusion1088 => gpu::ltx_diffusion::rows(gpu::ltx_diffusion::LARGE, &gpu, &options, sink),
        Group::GpuLtxDiffusionKernels => gpu::ltx_diffusion::kernels(&gpu),
        Group::GpuWan21 => gpu::wan::rows(Model::Wan21, &gpu, &options, folder, sink),
        Group::GpuWan22 => gpu::wan::rows(Model::Wan22, &gpu, &options, folder, sink),
        group => flux2_rows(group, &gpu, &options, sink),
    }
}

#[cfg(feature = "cuda")]
fn flux2_rows(
    group: Group,
    gpu: &benches::gpu::Gpu,
    options: &benches::gpu::Options,
    sink: &mut Sink<'_>,
) -> Result<()> {
    use benches::{flux2::Klein, gpu::flux2};
    match group {
        Group::GpuFlux2Step => flux2::step::rows(Klein::FourB, gpu, options, sink),
        Group::GpuFlux2Step9b => flux2::step::rows(Klein::NineB, gpu, options, sink),
        Group::GpuFlux2Vae => flux2::vae::rows(gpu, options, sink),
        Group::GpuFlux2Text => flux2::text::rows(gpu, options, sink),
        Group::GpuFlux2Picture => flux2::picture::rows(gpu, options, sink),
        Group::GpuFlux2StepKernels => flux2::kernels::step(gpu),
        Group::GpuFlux2VaeKernels => flux2::kernels::decode(gpu),
        Group::GpuFlux2TextKernels => flux2::kernels::text(gpu),
        _ => flux2::ops::print(gpu),
    }
}

#[cfg(not(feature = "cuda"))]
fn gpu_rows(group: Group, _: &Args, _: &Path, _: &mut Sink<'_>) -> Result<()> {
    bail!("{group:?} needs a build with feature cuda")
}
