"""diffusers' AutoencoderKLWan (2.1) decode, f32 on the CPU: seconds of one run, frames into a file.

Usage: wan_diffusers_cpu.py THREADS WEIGHTS LATENTS FRAMES, safetensors files in the diffusers layout, with "input" and with "frames"."""

import json
import sys
import time

import diffusers
import torch
from safetensors.torch import load_file, save_file

threads, weights, latents, frames = sys.argv[1:5]
torch.set_num_threads(int(threads))
vae = diffusers.AutoencoderKLWan(base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True])
vae.load_state_dict(load_file(weights))
vae = vae.eval()
x = load_file(latents)["input"][None]
with torch.inference_mode():
    vae.decode(x[:, :, :1, :8, :8])
    start = time.perf_counter()
    y = vae.decode(x, return_dict=False)[0]
    seconds = time.perf_counter() - start
save_file({"frames": y[0].contiguous()}, frames)
print(json.dumps({"peer": f"diffusers {diffusers.__version__} torch {torch.__version__.split('+')[0]}", "seconds": seconds}))
