"""A GGUF file with a matrix of every block type, and its values as the package gguf decodes them: `file`, the bytes of the
file; `out.TYPE`, the values in f32. Usage: gguf_types.py OUT_DIR
"""
import importlib.metadata
import json
import os
import sys
import tempfile

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize
from golden_file import LIMIT_BYTES, canonical
from safetensors.numpy import save_file

ROWS, COLUMNS = 3, 512
# Where the half-precision scales and minima of a block lie, in bytes.
SCALES = {
    'Q4_0': [0], 'Q4_1': [0, 2], 'Q5_0': [0], 'Q5_1': [0, 2], 'Q8_0': [0],
    'Q2_K': [80, 82], 'Q3_K': [108], 'Q4_K': [0, 2], 'Q5_K': [0, 2], 'Q6_K': [208],
    'IQ4_NL': [0], 'IQ4_XS': [0],
}


def blocks(kind, gen):
    """Noise with scales of the size of weights, of both signs."""
    elements, size = GGML_QUANT_SIZES[kind]
    found = gen.integers(0, 256, (ROWS * COLUMNS // elements, size), dtype=np.uint8)
    for at in SCALES[kind.name]:
        scales = gen.normal(0, 0.02, (len(found), 1)).astype('<f2')
        found[:, at:at + 2] = scales.view(np.uint8)
    return found.reshape(ROWS, -1)


def main(out):
    gen = np.random.default_rng(43)
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'types.gguf')
        writer = GGUFWriter(path, 'test')
        for name in SCALES:
            kind = GGMLQuantizationType[name]
            stored = blocks(kind, gen)
            writer.add_tensor(f'{name}.weight', stored, raw_dtype=kind)
            tensors[f'out.{name}'] = dequantize(stored, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        tensors['file'] = np.fromfile(path, dtype=np.uint8)
    path = os.path.join(out, 'gguf-types.safetensors')
    versions = {'numpy': np.__version__, 'gguf': importlib.metadata.version('gguf')}
    save_file(tensors, path, metadata={'seed': '43', 'script': os.path.basename(__file__), 'made_with': json.dumps(versions)})
    canonical(path)
    size = os.path.getsize(path)
    assert size <= LIMIT_BYTES, size
    print(f'{path}: {size} bytes, {len(tensors)} tensors')


main(sys.argv[1])
