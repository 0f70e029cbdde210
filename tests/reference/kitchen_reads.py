"""Loads a file of `tallow quantize` with comfy-kitchen and compares it with the plain one. Fails if a matrix is off by more
than quantisation allows, or if kitchen would have written other codes. Usage: kitchen_reads.py QUANTISED PLAIN
"""
import json
import sys

import torch
from comfy_kitchen.tensor import QuantizedTensor, TensorCoreFP8Layout, TensorWiseINT8Layout
from safetensors import safe_open


def load(path):
    with safe_open(path, 'pt') as f:
        return {name: f.get_tensor(name) for name in f.keys()}


def int8(codes, scale, marker, plain):
    """The decoded matrix, and the share of codes that kitchen writes for the same f32 matrix."""
    group = marker['convrot_groupsize']
    shape = tuple(codes.shape)
    params = TensorWiseINT8Layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=shape, convrot=True, convrot_groupsize=group)
    arguments = {'per_channel': True, 'convrot': True, 'convrot_groupsize': group}
    theirs = QuantizedTensor.from_float(plain, 'TensorWiseINT8Layout', **arguments)
    difference = (theirs._qdata.int() - codes.int()).abs()
    assert difference.max() <= 1, 'a code is off by more than a unit'
    return TensorWiseINT8Layout.dequantize(codes, params), (difference == 0).float().mean().item()


def fp8(codes, scale, marker, plain):
    params = TensorCoreFP8Layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=tuple(codes.shape))
    theirs = (plain / scale).to(torch.float8_e4m3fn)
    same = (theirs.view(torch.uint8) == codes.view(torch.uint8)).float().mean().item()
    return TensorCoreFP8Layout.dequantize(codes, params), same


def main(quantised, plain):
    torch.set_num_threads(1)
    quantised, plain = load(quantised), load(plain)
    formats = {'int8_tensorwise': (int8, 0.02), 'float8_e4m3fn': (fp8, 0.04)}
    modules = [name.removesuffix('.comfy_quant') for name in quantised if name.endswith('.comfy_quant')]
    assert modules, 'no matrix is quantised'
    for module in modules:
        marker = json.loads(bytes(quantised[f'{module}.comfy_quant'].tolist()))
        decode, most = formats[marker['format']]
        want = plain[f'{module}.weight'].float()
        got, same = decode(quantised[f'{module}.weight'], quantised[f'{module}.weight_scale'], marker, want)
        error = ((got.float() - want).norm() / want.norm()).item()
        print(f'{module}: {marker}, relative error {error:.4f}, {100 * same:.3f} % of the codes are kitchen\'s')
        assert error < most and same > 0.999, module
    for name, tensor in plain.items():
        if name.removesuffix('.weight') not in modules:
            assert torch.equal(quantised[name], tensor), name
    print(f'{len(modules)} matrices agree')


main(*sys.argv[1:])
