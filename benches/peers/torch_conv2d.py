"""torch's f32 conv2d on the CPU: GFLOP/s of two shapes of the FLUX.2 VAE, medians. Usage: torch_conv2d.py THREADS"""

import json
import statistics
import sys
import time

import torch

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)


def gflops(channels: int, size: int) -> float:
    x = torch.randn(1, channels, size, size)
    conv = torch.nn.Conv2d(channels, channels, 3, padding=1)
    times = []
    with torch.inference_mode():
        for i in range(12):
            start = time.perf_counter()
            conv(x)
            if i >= 3:
                times.append(time.perf_counter() - start)
    return 2 * channels * channels * 9 * size * size / statistics.median(times) / 1e9


print(json.dumps({"peer": f"torch {torch.__version__.split('+')[0]}", "128_256": gflops(128, 256), "512_64": gflops(512, 64)}))
