"""Matrices quantised and decoded by comfy-kitchen's eager backend: a file as ComfyUI would load it, with the plain matrices
as `in.NAME` and kitchen's decoded ones as `out.NAME`. Usage: kitchen_golden.py OUT_DIR
"""
import importlib.metadata
import json
import os
import sys

import torch
from comfy_kitchen.tensor import AsymW4A8Int8Layout, QuantizedTensor, TensorCoreConvRotW4A4Layout, TensorWiseINT8Layout
from golden_file import LIMIT_BYTES, canonical
from safetensors.torch import save_file

INT8, W4A4, W4A8 = TensorWiseINT8Layout, TensorCoreConvRotW4A4Layout, AsymW4A8Int8Layout
ROTATED = {'per_channel': True, 'convrot': True}

# Name: rows, columns, type of the plain matrix, layout, its arguments, what the marker says.
CASES = {
    'rotated_256': (24, 512, torch.float32, INT8, ROTATED | {'convrot_groupsize': 256}, {'convrot': True, 'convrot_groupsize': 256}),
    'rotated_64': (17, 192, torch.float32, INT8, ROTATED | {'convrot_groupsize': 64}, {'convrot': True, 'convrot_groupsize': 64}),
    'rotated_16': (9, 160, torch.float32, INT8, ROTATED | {'convrot_groupsize': 16}, {'convrot': True, 'convrot_groupsize': 16}),
    'rotated_bf16': (32, 768, torch.bfloat16, INT8, ROTATED | {'convrot_groupsize': 256}, {'convrot': True}),
    'plain_rows': (8, 96, torch.float32, INT8, {'per_channel': True}, {}),
    'plain_tensor': (8, 96, torch.float32, INT8, {'per_channel': False}, {}),
    'w4a4': (16, 512, torch.float32, W4A4, {}, {'convrot_groupsize': 256, 'quant_group_size': 64, 'linear_dtype': 'int4'}),
    'w4a8': (16, 512, torch.float32, W4A8, {}, {'group_size': 16, 'convrot_groupsize': 256}),
}
FORMATS = {INT8: 'int8_tensorwise', W4A4: 'convrot_w4a4', W4A8: 'asym_w4a8_int8'}


def matrix(rows, columns, gen):
    """Normal values of the size of weights, and a few columns that stand out, as in trained models."""
    w = 0.02 * torch.randn(rows, columns, generator=gen)
    w[:, torch.randperm(columns, generator=gen)[:3]] *= 15
    return w


def main(out):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(41)
    tensors = {}
    for name, (rows, columns, dtype, layout, arguments, marker) in CASES.items():
        plain = matrix(rows, columns, gen).to(dtype)
        quantised = QuantizedTensor.from_float(plain, layout.__name__, **arguments)
        module = f'blocks.0.{name}'
        for suffix, tensor in layout.state_dict_tensors(quantised._qdata, quantised._params).items():
            tensors[f'{module}.weight{suffix}'] = tensor
        # The decoder's own type is the plain matrix's; w4a8 is only accurate when it is asked for f32.
        tensors[f'out.{name}'] = quantised.dequantize().float()
        tensors[f'in.{name}'] = plain.float()
        text = json.dumps({'format': FORMATS[layout]} | marker).encode()
        tensors[f'{module}.comfy_quant'] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    path = os.path.join(out, 'convrot-kitchen.safetensors')
    versions = {'torch': torch.__version__, 'comfy-kitchen': importlib.metadata.version('comfy-kitchen')}
    save_file(tensors, path, metadata={'seed': '41', 'script': os.path.basename(__file__), 'made_with': json.dumps(versions)})
    canonical(path)
    size = os.path.getsize(path)
    assert size <= LIMIT_BYTES, size
    print(f'{path}: {size} bytes, {len(tensors)} tensors')


main(sys.argv[1])
