"""diffusers' AutoencoderKLFlux2 decode, f32 on the CPU: seconds, median. Usage: diffusers_vae.py THREADS HEIGHT WIDTH RUNS"""

import json
import statistics
import sys
import time

import diffusers
import torch

threads, height, width, runs = map(int, sys.argv[1:5])
torch.set_num_threads(threads)
torch.manual_seed(0)
vae = diffusers.AutoencoderKLFlux2().eval()
latents = torch.randn(1, 32, height // 8, width // 8)
times = []
with torch.inference_mode():
    for _ in range(runs + 1):
        start = time.perf_counter()
        vae.decode(latents)
        times.append(time.perf_counter() - start)
print(json.dumps({"peer": f"diffusers {diffusers.__version__} torch {torch.__version__.split('+')[0]}", "seconds": statistics.median(times[1:])}))
