"""diffusers' AutoencoderKLWan on the GPU in bf16: ms (median), peak memory, error against its own f32.

The weights and the inputs are those of ours: one safetensors file in the diffusers layout, one with the tensor "input"
(latents of a decode as the network takes them, frames of an encode in -1..1). A decode ends with u8 frames on the host,
an encode with latents on the device. `--compile` is channels-last memory and torch.compile."""

import argparse
import json
import math
import statistics
import time

import diffusers
import torch
from safetensors.torch import load_file

WAN21 = dict(base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True])
WAN22 = dict(
    base_dim=160, decoder_base_dim=256, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
    temperal_downsample=[False, True, True], in_channels=12, out_channels=12, is_residual=True, patch_size=2,
    scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
)  # fmt: skip

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("task", choices=["decode", "encode"])
parser.add_argument("model", choices=["wan21", "wan22"])
parser.add_argument("weights")
parser.add_argument("input")
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--error", action="store_true", help="psnr against f32 over the first two latents")
args = parser.parse_args()

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


def load(dtype: torch.dtype) -> torch.nn.Module:
    vae = diffusers.AutoencoderKLWan(**(WAN21 if args.model == "wan21" else WAN22))
    vae.load_state_dict(load_file(args.weights))
    return vae.to("cuda", dtype).eval().requires_grad_(False)


def decode(vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    frames = vae.decode(latents, return_dict=False)[0]
    return ((frames + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).cpu()


def encode(vae: torch.nn.Module, frames: torch.Tensor) -> torch.Tensor:
    return vae.encode(frames, return_dict=False)[0].mode()


run = decode if args.task == "decode" else encode
stored = load_file(args.input)["input"][None]
report = {}
with torch.inference_mode():
    vae = load(torch.bfloat16)
    x = stored.to("cuda", torch.bfloat16)
    if args.error:
        exact = load(torch.float32)
        few = stored[:, :, : 2 if args.task == "decode" else 5].to("cuda")
        call = (lambda v, x: v.decode(x, return_dict=False)[0]) if args.task == "decode" else encode
        want = call(exact, few.float())
        squared = ((call(vae, few.to(torch.bfloat16)).float() - want) ** 2).mean().item()
        report["psnr"] = 10 * math.log10(4 / squared)
        report["rel_l2"] = math.sqrt(squared / (want**2).mean().item())
        del exact, want
        torch.cuda.empty_cache()
    if args.compile:
        for layer in vae.modules():
            if isinstance(layer, torch.nn.Conv3d):
                layer.to(memory_format=torch.channels_last_3d)
        # Chunks have two shapes only; the loop over them stays in Python.
        part = vae.decoder if args.task == "decode" else vae.encoder
        part.forward = torch.compile(part.forward, dynamic=False)
    run(vae, x)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(vae, x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
how = "compiled channels-last" if args.compile else "eager"
version = torch.__version__.split("+")[0]
print(json.dumps({"peer": f"diffusers {diffusers.__version__} torch {version} {how}", "ms": statistics.median(times)} | report))
