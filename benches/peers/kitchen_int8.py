"""comfy-kitchen's int8 linear layers with ConvRot, and its decoding of a matrix, on the GPU: ms, medians by CUDA events,
inputs rotating.

Usage: kitchen_int8.py SHAPES, a JSON list of [rows, in_features, out_features]. bf16. Needs the package comfy-kitchen with
its CUDA backend; an eager fallback is refused, because its times would mean nothing."""

import importlib.metadata
import json
import statistics
import sys

import comfy_kitchen
import torch

ROTATED = 256 << 20
GROUP = 256
DECODED = (16384, 4096)
torch.manual_seed(0)


def milliseconds(call, inputs: list, runs: int = 21) -> float:
    pairs = []
    for i in range(runs + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(inputs[i % len(inputs)])
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs[5:])


def copies(size: int) -> int:
    return max(1, min(8, -(-ROTATED // size)))


def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device="cuda")
    return codes, torch.rand(rows, 1, device="cuda") * 1e-3 + 1e-4


def linear(rows: int, columns: int, features: int) -> float:
    codes, scales = quantized(features, columns)
    inputs = [torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(copies(2 * rows * columns))]
    bias = torch.randn(features, dtype=torch.bfloat16, device="cuda")

    def call(x: torch.Tensor) -> torch.Tensor:
        return comfy_kitchen.int8_linear(x, codes, scales, bias, torch.bfloat16, convrot=True, convrot_groupsize=GROUP)

    return milliseconds(call, inputs)


def decoded() -> float:
    decode = comfy_kitchen.registry.get_implementation("dequantize_int8_convrot_weight_dtype", backend="cuda")
    code = comfy_kitchen.DTYPE_TO_CODE[torch.bfloat16]
    matrices = [quantized(*DECODED) for _ in range(copies(DECODED[0] * DECODED[1]))]
    return milliseconds(lambda pair: decode(pair[0], pair[1], GROUP, code), matrices)


assert comfy_kitchen.registry.is_available("cuda"), "comfy-kitchen has no CUDA backend here"
version = importlib.metadata.version("comfy-kitchen")
report = {"peer": f"comfy-kitchen {version} torch {torch.__version__.split('+')[0]}"}
with torch.inference_mode():
    for rows, columns, features in json.loads(sys.argv[1]):
        report[f"{rows}x{columns}x{features}"] = linear(rows, columns, features)
    report["decode"] = decoded()
print(json.dumps(report))
