"""diffusers' LTX2VideoDiffusionDecoderModel on the GPU in bf16: ms (median), peak memory.

Random weights and latents: only shapes count. Attention is comfy-kitchen's na3d, the fastest of its backends: diffusers' own
processors are NATTEN, which is fetched from elsewhere, and flex_attention, whose mask does not fit any memory at these sizes.
`ms` begins and ends on the device; `host_ms` ends with u8 frames on the host. `--tiled` is diffusers' tiling."""

import argparse
import importlib.metadata
import json
import statistics
import time

import comfy_kitchen
import diffusers
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("config", help="config.json of the decoder, as text")
parser.add_argument("extents", help="[frames, height, width] of the latents")
parser.add_argument("--runs", type=int, default=2)
parser.add_argument("--tiled", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
config = {name: value for name, value in json.loads(args.config).items() if not name.startswith("_")}


class KitchenProcessor:
    def __call__(self, attn, hidden_states, block_mask=None):
        query, key, value = (part.contiguous() for part in attn.project_qkv(hidden_states))
        result = comfy_kitchen.na3d(query, key, value, list(attn.kernel_size), scale=1.0)
        return attn.to_out[0](result.reshape(hidden_states.shape))


def decode(latents: torch.Tensor) -> torch.Tensor:
    return model.decode(latents, generator=generator, return_dict=False)[0]


def decode_to_host(latents: torch.Tensor) -> torch.Tensor:
    return ((decode(latents) + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).cpu()


def timed(run) -> float:
    run(latents)
    times = []
    for _ in range(args.runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(latents)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


generator = torch.Generator("cuda").manual_seed(0)
with torch.inference_mode():
    with torch.device("cuda"):
        model = diffusers.LTX2VideoDiffusionDecoderModel(**config)
    model = model.to("cuda", torch.bfloat16).eval()
    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(KitchenProcessor())
    if args.tiled:
        model.enable_tiling()
    latents = torch.randn(1, config["latent_channels"], *json.loads(args.extents), device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # The kernels of both backends give the same; the one that is faster at the last stage is the peer.
    times = {}
    for backend in ("cuda", "triton"):
        if comfy_kitchen.registry.is_available(backend):
            with comfy_kitchen.registry.use_backend(backend):
                times[backend] = timed(decode)
    fastest = min(times, key=times.get)
    with comfy_kitchen.registry.use_backend(fastest):
        host_ms = timed(decode_to_host)
    peak = torch.cuda.max_memory_allocated() / 2**30

how = f"eager{' tiled' if args.tiled else ''} comfy-kitchen {importlib.metadata.version('comfy-kitchen')} {fastest}"
name = f"diffusers {diffusers.__version__} torch {torch.__version__.split('+')[0]} {how}"
print(json.dumps({"peer": name, "ms": times[fastest], "host_ms": host_ms, "peak_gib": peak}))
