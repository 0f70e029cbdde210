"""Makes the `.pth` files of the loading tests: what `torch.save` writes around the elements of the demonstration VAE and
of the published ones.

Usage: wan_checkpoints.py OUT_DIR DEMO_MODEL

A golden holds the bytes of the whole file but for those of its storages (`rest`), and where each storage lies and which
tensor's elements it has (`spans`: offset, length, original name). The tests put the elements of the demonstration model
in; those of the published models stay zeros.
"""
import json
import os
import re
import sys
import tempfile
import zipfile

import torch
from safetensors.torch import load_file, save_file

from golden_file import canonical
from wan_names import check, original

NAMES = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'models', 'names')


def storages(path):
    """Offset and length of each storage in the file, in the order in which they were pickled."""
    with zipfile.ZipFile(path) as archive, open(path, 'rb') as f:
        found = {}
        for member in archive.infolist():
            number = re.search(r'/data/(\d+)$', member.filename)
            if number:
                assert member.compress_type == zipfile.ZIP_STORED
                f.seek(member.header_offset + 26)
                name, extra = (int.from_bytes(f.read(2), 'little') for _ in range(2))
                found[int(number[1])] = (member.header_offset + 30 + name + extra, member.file_size)
    return [found[i] for i in range(len(found))]


def skeleton(name, out, state, wrap=lambda state: state, **metadata):
    """Writes the golden of a state dict. `wrap` makes what is saved of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/wanx_vae.pth'  # its stem becomes the archive's folder, as in the published file
        torch.save(wrap(state), path)
        places = storages(path)
        assert len(places) == len(state)
        spans = [[at, length, name] for (at, length), name in zip(places, state)]
        rest, at = [], 0
        with open(path, 'rb') as f:
            for start, length, _ in sorted(spans):
                f.seek(at)
                rest.append(f.read(start - at))
                at = start + length
            f.seek(at)
            rest.append(f.read())
        size = os.path.getsize(path)
    rest = torch.frombuffer(bytearray(b''.join(rest)), dtype=torch.uint8)
    assert len(rest) + sum(length for _, length, _ in spans) == size
    target = f'{out}/{name}.safetensors'
    save_file({'rest': rest}, target, metadata={'spans': json.dumps(spans), 'script': os.path.basename(__file__),
                                                'made_with': f'torch {torch.__version__}', **metadata})
    canonical(target)
    print(f'{target}: {os.path.getsize(target)} bytes for a file of {size}, {len(spans)} storages')


if __name__ == '__main__':
    out, demo = sys.argv[1:]
    with open(f'{demo}/config.json') as f:
        config = json.load(f)
    tensors = load_file(f'{demo}/diffusion_pytorch_model.safetensors')
    names = {k: original(k, config['num_res_blocks'], config['is_residual']) for k in tensors}
    state = {names[k]: v.clone() for k, v in tensors.items()}
    skeleton('wan-demo-pth', out, state, original_names=json.dumps(names))
    skeleton('wan-demo-pth-wrapped', out, state, lambda state: {'epoch': 3, 'state_dict': state})
    for name, blocks, nested in [('wan21', 2, False), ('wan22', 2, True)]:
        table = check(f'{NAMES}/{name}-vae.layouts.tsv', blocks, nested)
        skeleton(f'{name}-pth'.replace('wan', 'wan-'), out, {k: torch.zeros(shape) for k, shape in table})
