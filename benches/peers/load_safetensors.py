"""safetensors' own loading of a file onto the GPU, the file in the system's cache: ms, the median of three after one.

Usage: load_safetensors.py FILE"""

import json
import statistics
import sys
import time
from importlib.metadata import version

import torch
from safetensors.torch import load_file


def milliseconds() -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    tensors = load_file(sys.argv[1], device="cuda")
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del tensors
    return 1e3 * elapsed


times = [milliseconds() for _ in range(4)]
name = f"safetensors {version('safetensors')} torch {torch.__version__.split('+')[0]}"
print(json.dumps({"peer": name, "load": statistics.median(times[1:])}))
