"""Makes crates/sampling/tests/data/torch_noise.json: pieces of torch.randn on a CPU.

Run from the repository root: python tests/reference/torch_noise.py
The values are those of a machine with AVX2 or AVX-512 (the two agree bit for bit); the script refuses to run on others,
where torch rounds the angles of long streams otherwise.
"""

import json
import pathlib
import platform

import torch

SEEDS = [0, 1, 42, 2**32, 2**32 + 5, 2**63, 2**64 - 1]
# Below 16 another rule holds; at 16 and above the tail differs when the length is not a multiple of 16.
LENGTHS = [1, 2, 3, 8, 14, 15, 16, 17, 24, 31, 32, 33, 47, 100, 128, 200]
LONG = [128 * 64 * 64, 65543]
# A piece of 24 values covers a tail of 16 and what lies before it.
PIECE = 24


def piece(seed, length, offset):
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)
    values = torch.randn(length, generator=generator, dtype=torch.float32)[max(offset, 0):][:PIECE]
    bits = "".join(f"{x & 0xFFFFFFFF:08x}" for x in values.view(torch.int32).tolist())
    return {"seed": seed, "len": length, "offset": max(offset, 0), "bits": bits}


def main():
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        raise SystemExit(f"torch runs with capability {capability} here, expected AVX2 or AVX512")
    rows = [piece(42, length, length - PIECE) for length in range(1, 201)]
    for seed in SEEDS:
        rows += [piece(seed, length, length - PIECE) for length in LENGTHS + LONG]
        rows += [piece(seed, length, length // 2 - 5) for length in LONG]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cpu_capability": capability}
    path = pathlib.Path("crates/sampling/tests/data/torch_noise.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"versions": {json.dumps(versions)},\n"pieces": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
