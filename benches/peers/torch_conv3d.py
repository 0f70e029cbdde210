"""torch's conv3d on the GPU, layer by layer: sums in ms, medians by CUDA events, inputs rotating.

Usage: torch_conv3d.py LAYERS, a JSON list of [channels in, channels out, filter, input shape, how many]. bf16 in
channels-last memory; f32 without TF32."""

import json
import statistics
import sys

import torch
import torch.nn.functional as F

ROTATED = 256 << 20
torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.benchmark = True


def milliseconds(layer: list, dtype: torch.dtype, runs: int) -> float:
    channels_in, channels_out, kernel, shape, _ = layer
    memory = torch.contiguous_format if dtype == torch.float32 else torch.channels_last_3d
    size = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()
    inputs = [
        torch.randn(shape, dtype=dtype, device="cuda").to(memory_format=memory) for _ in range(max(1, min(8, -(-ROTATED // size))))
    ]
    fan_in = channels_in * kernel[0] * kernel[1] * kernel[2]
    weight = (torch.randn(channels_out, channels_in, *kernel, device="cuda") * fan_in**-0.5).to(dtype)
    weight = weight.to(memory_format=memory)
    bias = torch.randn(channels_out, device="cuda").to(dtype)
    # A filter of two taps gets its zero in front: torch pads both sides alike, so one row more is computed.
    padding = (0, kernel[1] // 2, kernel[2] // 2)
    pairs = []
    for i in range(runs + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        F.conv3d(inputs[i % len(inputs)], weight, bias, padding=padding)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs[3:])


layers = [layer for layer in json.loads(sys.argv[1]) if layer[4] > 0]
report = {"peer": f"torch {torch.__version__.split('+')[0]} cudnn {torch.backends.cudnn.version()}"}
with torch.inference_mode():
    for name, dtype, runs in [("bf16", torch.bfloat16, 21), ("f32", torch.float32, 5)]:
        report[name] = sum(layer[4] * milliseconds(layer, dtype, runs) for layer in layers)
print(json.dumps(report))
