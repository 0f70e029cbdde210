"""diffusers' AutoencoderKLLTX2Video on the GPU in bf16: ms (median), peak memory, error against its own f32.

Random weights and inputs: only shapes count. `ms` begins and ends on the device; `host_ms`, of a decode, ends with u8 frames
on the host. `--compile` is channels-last memory and torch.compile."""

import argparse
import json
import math
import statistics
import time

import diffusers
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("task", choices=["decode", "encode"])
parser.add_argument("config", help="config.json of the VAE, as text")
parser.add_argument("extents", help="[frames, height, width] of the latents, or of the frames")
parser.add_argument("--runs", type=int, default=5)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(1)
config = {name: value for name, value in json.loads(args.config).items() if not name.startswith("_")}
decodes = args.task == "decode"


def decode(vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    return vae.decode(latents, return_dict=False)[0]


def decode_to_host(vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    frames = decode(vae, latents)
    return ((frames + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).cpu()


def encode(vae: torch.nn.Module, frames: torch.Tensor) -> torch.Tensor:
    return vae.encode(frames, return_dict=False)[0].mode()


def timed(run) -> float:
    run(vae, x)
    times = []
    for _ in range(args.runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(vae, x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


report = {}
run = decode if decodes else encode
with torch.inference_mode():
    with torch.device("cuda"):
        vae = diffusers.AutoencoderKLLTX2Video(**config)
        for weight in vae.parameters():
            weight.normal_(0, 0.02)
        x = torch.randn(1, config["latent_channels"] if decodes else 3, *json.loads(args.extents))
    if not decodes:
        x = (x * 0.4).clamp_(-1, 1)
    vae = vae.to(torch.bfloat16).eval().requires_grad_(False)
    x = x.to(torch.bfloat16)
    if args.compile:
        for layer in vae.modules():
            if isinstance(layer, torch.nn.Conv3d):
                layer.to(memory_format=torch.channels_last_3d)
        part = vae.decoder if decodes else vae.encoder
        part.forward = torch.compile(part.forward, dynamic=False)
    run(vae, x)
    torch.cuda.reset_peak_memory_stats()
    report["ms"] = timed(run)
    report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if decodes:
        report["host_ms"] = timed(decode_to_host)
    if not args.compile:
        few = x[:, :, : 2 if decodes else 9]
        got = run(vae, few).float()
        want = run(vae.float(), few.float())
        squared = ((got - want) ** 2).mean().item()
        report["psnr"] = 10 * math.log10(4 / squared)
        report["rel_l2"] = math.sqrt(squared / (want**2).mean().item())
how = "compiled channels-last" if args.compile else "eager"
version = torch.__version__.split("+")[0]
print(json.dumps({"peer": f"diffusers {diffusers.__version__} torch {version} {how}"} | report))
