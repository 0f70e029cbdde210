"""Makes crates/wan-vae/tests/data: one narrow Wan 2.1 VAE with random weights, in bf16, in two layouts.

Run from the repository root: python tests/reference/wan_layouts.py
`diffusers.safetensors` holds the state dict of the diffusers class; `original.pth` the same tensors under their original
names, inside a `state_dict` as training code saves it. The names are those of tests/models/names/wan21-vae.layouts.tsv.
"""

import json
import pathlib
import platform

import diffusers
import safetensors.torch
import torch

OUT = pathlib.Path("crates/wan-vae/tests/data")
TABLE = pathlib.Path("tests/models/names/wan21-vae.layouts.tsv")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(21)
    # The published network but for its widths.
    vae = diffusers.AutoencoderKLWan(base_dim=2)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in vae.state_dict().items()}
    rows = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    original = {original: tensors[name] for original, name, _ in rows}
    if len(original) != len(tensors):
        raise SystemExit(f"{len(tensors)} tensors, {len(original)} of them in the table")
    safetensors.torch.save_file(tensors, OUT / "diffusers.safetensors")
    torch.save({"epoch": 1, "state_dict": original}, OUT / "original.pth")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
    (OUT / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
