//! The policy is a thread's own, and the default gives the same bytes whatever is installed.

use std::{path::Path, process::Command, sync::Barrier};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    ConvParams,
    conv::{conv_nd, conv_nd_add},
    cudnn_policy::{Backend, Counters, Policy, counters, enter, take_counters},
};
use policy::ExecutionIdentity;
use tests::gpu::{Counted, DTYPES, cuda, cudnn, noise, on, poison, relative_error, values};

/// Calls of each thread.
const CALLS: u64 = 50;

/// A convolution's operands on the device.
struct Operands {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
}

impl Operands {
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let tensor =
            |seed, scale, dims: &[usize]| -> Result<Tensor> { Ok(noise(seed, scale, dims, dtype)?.to_device(device)?) };
        Ok(Self {
            x: tensor(1, 1.0, &[1, 96, 4, 30, 33])?,
            weight: tensor(2, 0.02, &[96, 96, 3, 3, 3])?,
            bias: tensor(3, 0.5, &[96])?,
            residual: tensor(4, 1.0, &[1, 96, 2, 30, 33])?,
        })
    }

    fn run(&self) -> Result<Tensor> {
        let params = ConvParams { padding: [(0, 0), (1, 1), (1, 1)], ..ConvParams::default() };
        Ok(conv_nd_add(&self.x, &self.weight, Some(&self.bias), &self.residual, &params)?)
    }
}

#[test]
fn an_identity_names_cudnn_if_it_has_computed() -> Result<()> {
    let suite = "gpu_policy, identities";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let has_cudnn = cudnn(suite, &device)?;
    let x = noise(1, 1.0, &[1, 16, 9, 9], DType::BF16)?.to_device(&device)?;
    let weight = noise(2, 0.1, &[16, 16, 3, 3], DType::BF16)?.to_device(&device)?;
    for (backend, computes) in [(Backend::Im2col, false), (Backend::Required, true)] {
        if computes && !has_cudnn {
            continue;
        }
        let Counted { result, counters } = on(backend, || Ok(conv_nd::<2>(&x, &weight, None, &ConvParams::default())?));
        result?;
        let identity = ExecutionIdentity::executed(&counters, &device, DType::BF16);
        println!("{}", serde_json::to_string(&identity)?);
        ensure!(identity.device.starts_with("cuda-"), "{identity:?}");
        ensure!(identity.conv.is_some() == computes && identity.cudnn.is_some() == computes, "{identity:?}");
    }
    Ok(())
}

#[test]
fn threads_with_opposite_policies_do_not_meet() -> Result<()> {
    let suite = "gpu_policy with two threads";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if !cudnn(suite, &device)? {
        return Ok(());
    }
    let operands = Operands::new(DType::BF16, &device)?;
    device.synchronize()?;
    let alone = values(&operands.run()?)?;
    let start = Barrier::new(2);
    let thread = |backend: Backend| -> Result<(Counters, Vec<Vec<f64>>)> {
        take_counters();
        let _guard = enter(Policy::new(backend));
        start.wait();
        let results = (0..CALLS).map(|_| values(&operands.run()?)).collect::<Result<_>>()?;
        Ok((counters(), results))
    };
    let (im2col, cudnn) = std::thread::scope(|scope| -> Result<_> {
        let threads = [Backend::Im2col, Backend::Required].map(|backend| scope.spawn(move || thread(backend)));
        let [im2col, cudnn] = threads.map(|thread| thread.join().ok().context("a thread panicked")?);
        Ok((im2col?, cudnn?))
    })?;
    ensure!(im2col.0 == Counters::default(), "im2col counted {:?}", im2col.0);
    ensure!(cudnn.0.dispatched == CALLS && cudnn.0.attempts == CALLS, "cudnn counted {:?}", cudnn.0);
    for (call, result) in im2col.1.iter().enumerate() {
        ensure!(*result == alone, "call {call} of the im2col thread has other bytes");
    }
    for (call, result) in cudnn.1.iter().enumerate() {
        ensure!(*result == cudnn.1[0], "call {call} of the cudnn thread has other bytes than its first");
        ensure!(relative_error(result, &alone) < 1e-2, "call {call} of the cudnn thread is off");
    }
    // A thread started under a policy begins at the default.
    let _guard = enter(Policy::new(Backend::Required));
    let fresh = std::thread::scope(|scope| {
        let thread = scope.spawn(|| -> Result<_> { Ok((values(&operands.run()?)?, counters())) });
        thread.join().ok().context("the thread panicked")?
    })?;
    ensure!(fresh == (alone, Counters::default()), "a fresh thread did not run im2col");
    Ok(())
}

/// A hash of the bits of everything that the default path gives here.
fn digest(device: &Device) -> Result<u64> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |tensor: &Tensor| -> Result<()> {
        for value in values(tensor)? {
            hash = (hash ^ value.to_bits()).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    };
    for dtype in DTYPES {
        let operands = Operands::new(dtype, device)?;
        poison(device, operands.residual.elem_count() * dtype.size_in_bytes())?;
        add(&operands.run()?)?;
        let picture = operands.x.flatten(1, 2)?;
        let weight = noise(5, 0.05, &[64, 384, 3, 3], dtype)?.to_device(device)?;
        let params = ConvParams { padding: [(1, 1), (1, 1)], ..ConvParams::default() };
        add(&conv_nd(&picture, &weight, None, &params)?)?;
    }
    Ok(hash)
}

/// Not a test: prints the digest of a process of its own.
#[test]
#[ignore = "run by the other tests"]
fn child() -> Result<()> {
    let device = cuda("the child of gpu_policy")?.context("no device")?;
    println!("DIGEST {:016x}", digest(&device)?);
    Ok(())
}

#[test]
fn the_default_gives_the_same_bytes_with_and_without_cudnn() -> Result<()> {
    let Some(device) = cuda("gpu_policy, bytes of the default")? else { return Ok(()) };
    let here = digest(&device)?;
    ensure!(digest(&device)? == here, "two runs in one process differ");
    let folder = tempfile::tempdir()?;
    let nowhere = folder.path().join("libcudnn.so.9");
    for cudnn in [None, None, Some(nowhere.as_path())] {
        let there = digest_of_a_process(cudnn)?;
        ensure!(there == here, "{here:016x} here, {there:016x} in a process with TALLOW_CUDNN={cudnn:?}");
    }
    Ok(())
}

fn digest_of_a_process(cudnn: Option<&Path>) -> Result<u64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["child", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    if let Some(cudnn) = cudnn {
        command.env("TALLOW_CUDNN", cudnn);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    let digest = text.lines().find_map(|line| line.split_once("DIGEST ")).context("no digest")?.1;
    Ok(u64::from_str_radix(digest.trim(), 16)?)
}
