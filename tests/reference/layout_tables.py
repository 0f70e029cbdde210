"""Makes tests/models/names/{flux2-dev,flux2-vae,qwen3-8b}.layouts.tsv: what each tensor of one layout is in another.

Run from the repository root: python tests/reference/layout_tables.py
diffusers' converters and the `gguf` package (not in requirements.txt: gguf==0.19.0) are the oracles. A converter is fed
tensors whose rows carry the number of their tensor and of their row, so that parts and exchanged halves show in its output.
Columns: name in the file, name in the model, shape in the file, and `part/of` or `swapped` where not all of it is taken.
"""

import pathlib

import diffusers
import gguf
import torch
from diffusers.loaders import single_file_utils

NAMES = pathlib.Path("tests/models/names")
ROWS = 6


def read(table):
    rows = (line.split("\t") for line in (NAMES / table).read_text().splitlines() if not line.startswith("#"))
    return {name: shape for name, shape in rows}


def write(table, title, rows):
    text = "".join("\t".join(row) + "\n" for row in rows)
    (NAMES / table).write_text(f"# {title}; {len(rows)} tensors\n{text}")


def tagged(names):
    """Rows of tensor i hold i and their own number."""
    tags = {name: torch.stack([torch.full((ROWS,), i), torch.arange(ROWS)], 1).float() for i, name in enumerate(names)}
    return tags, list(names)


def take(rows):
    """What is taken of the tensor whose rows these are."""
    if rows == list(range(ROWS)):
        return ""
    if rows == list(range(ROWS // 2, ROWS)) + list(range(ROWS // 2)):
        return "swapped"
    part, of = rows[0] // len(rows), ROWS // len(rows)
    assert rows == list(range(part * len(rows), (part + 1) * len(rows))), rows
    return f"{part}/{of}"


def transformer():
    shapes = read("flux2-dev.bfl.tsv")
    tags, names = tagged(shapes)
    converted = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers(dict(tags))
    rows = []
    for model, tensor in converted.items():
        (i,) = set(tensor[:, 0].int().tolist())
        rows.append((names[i], model, shapes[names[i]], take(tensor[:, 1].int().tolist())))
    write("flux2-dev.layouts.tsv", f"BFL and diffusers {diffusers.__version__}, FLUX.2 dev", sorted(rows))


def vae():
    """The converter reads BFL's names; which one became which is found by asking it about each name alone."""
    shapes = read("flux2-vae.tsv")
    with torch.device("meta"):
        config = dict(diffusers.AutoencoderKLFlux2().config)
    blocks = len(config["block_out_channels"])
    names = [f"{side}.{end}.{p}" for side in ("encoder", "decoder") for end in ("conv_in", "conv_out", "norm_out") for p in ("weight", "bias")]
    resnet = [f"{layer}.{p}" for layer in ("norm1", "conv1", "norm2", "conv2", "nin_shortcut") for p in ("weight", "bias")]
    for side, way, count, sampler in (("encoder", "down", 2, "downsample"), ("decoder", "up", 3, "upsample")):
        names += [f"{side}.mid.block_{n}.{part}" for n in (1, 2) for part in resnet]
        names += [f"{side}.mid.attn_1.{layer}.{p}" for layer in ("norm", "q", "k", "v", "proj_out") for p in ("weight", "bias")]
        names += [f"{side}.{way}.{i}.block.{j}.{part}" for i in range(blocks) for j in range(count) for part in resnet]
        names += [f"{side}.{way}.{i}.{sampler}.conv.{p}" for i in range(blocks) for p in ("weight", "bias")]
    tags = {name: torch.full((1, 1, 1, 1), float(i)) for i, name in enumerate(names)}
    converted = single_file_utils.convert_ldm_vae_checkpoint(dict(tags), config)
    rows = []
    for model, tensor in converted.items():
        if model not in shapes:
            continue  # a part that this network does not have
        name, shape = names[int(tensor.flatten()[0])], shapes[model]
        if ".attn_1." in name and name.endswith(".weight") and not name.endswith("norm.weight"):
            shape += ",1,1"
        rows.append((name, model, shape, ""))
    # The converter drops these: BFL keeps the maps inside of the networks.
    for model in set(shapes) - {row[1] for row in rows}:
        inside = {"quant_conv": "encoder.", "post_quant_conv": "decoder.", "bn": ""}[model.split(".")[0]]
        rows.append((inside + model, model, shapes[model], ""))
    assert len(rows) == len(shapes)
    write("flux2-vae.layouts.tsv", f"BFL and diffusers {diffusers.__version__}, FLUX.2 VAE", sorted(rows))


def text_encoder():
    shapes = read("qwen3-8b.tsv")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 36)
    rows = [(names.get_name(model, try_suffixes=(".weight",)), model, shape, "") for model, shape in shapes.items()]
    write("qwen3-8b.layouts.tsv", "llama.cpp (gguf 0.19.0) and transformers, Qwen3 8B", sorted(rows))


if __name__ == "__main__":
    transformer()
    vae()
    text_encoder()
