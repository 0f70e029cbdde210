"""What the golden scripts share: seeded random weights that hide nothing, and the file format.

A golden is a safetensors file of f32 tensors: the weights under their published state_dict names, the arguments as
`in.*`, the results as `out.*`. Its metadata holds the model's config as JSON, the seed, the script and the versions.
"""
import json
import os

import diffusers
import safetensors
import torch
import transformers
from safetensors.torch import save_file

torch.set_num_threads(1)  # one summation order on every machine
torch.use_deterministic_algorithms(True)

LIMIT_BYTES = 1_000_000


def generator(seed):
    """A CPU generator: everything random in a golden comes from one of these."""
    return torch.Generator().manual_seed(seed)


def randomize(module, gen, scale=lambda name: 1.0):
    """Fills a module with random values in the order of its names.

    Matrices and kernels are normal with variance `scale(name)^2 / fan_in`. Norm weights spread around one and biases
    around zero, batch statistics are far from (0, 1): a loader that skips or swaps one of them changes the result.
    """
    with torch.no_grad():
        for name, t in sorted(module.state_dict().items()):
            normal = torch.randn(t.shape, generator=gen)
            if name.endswith('num_batches_tracked'):
                t.fill_(1234)
            elif name.endswith('running_mean'):
                t.copy_(0.5 * normal)
            elif name.endswith('running_var'):
                t.copy_(0.5 + 3.5 * torch.rand(t.shape, generator=gen))
            elif t.ndim == 1:
                t.copy_((1.0 if name.endswith('weight') else 0.0) + 0.3 * normal)
            else:
                t.copy_(normal * scale(name) / t[0].numel() ** 0.5)
    return module.eval().requires_grad_(False)


def record(module, inputs, outputs, name):
    """Stores what goes into `module` and what comes out of it, under `name`, at its next call."""

    def hook(_, args, kwargs, result):
        for i, value in enumerate(args):
            if torch.is_tensor(value):
                inputs[f'{name}.{i}'] = value
        for key, value in kwargs.items():
            if torch.is_tensor(value):
                inputs[f'{name}.{key}'] = value
        for i, value in enumerate(result if isinstance(result, tuple) else (result,)):
            outputs[f'{name}.{i}' if isinstance(result, tuple) else name] = value

    module.register_forward_hook(hook, with_kwargs=True)


def canonical(path):
    """Sorts the header, whose order the writer leaves to chance, so that the same golden has the same bytes."""
    with open(path, 'rb') as f:
        data = f.read()
    end = 8 + int.from_bytes(data[:8], 'little')
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(',', ':')).encode()
    header += b' ' * (-len(header) % 8)
    with open(path, 'wb') as f:
        f.write(len(header).to_bytes(8, 'little') + header + data[end:])
    os.chmod(path, 0o644)


def save(path, script, seed, config, weights, inputs, outputs, **metadata):
    """Writes the golden; refuses one over the size limit, a non-finite one, and one that says nothing."""
    tensors = {k: v for k, v in weights.items()}
    tensors |= {f'in.{k}': v for k, v in inputs.items()} | {f'out.{k}': v for k, v in outputs.items()}
    tensors = {k: (v.float() if v.is_floating_point() else v).detach().contiguous().clone() for k, v in tensors.items()}
    for name, t in tensors.items():
        assert torch.isfinite(t.float()).all(), f'{name} is not finite'
        if name.startswith('out.'):
            assert t.float().std() > 1e-3, f'{name} is constant'
    made_with = {'torch': torch.__version__, 'diffusers': diffusers.__version__, 'transformers': transformers.__version__,
                 'safetensors': safetensors.__version__}
    save_file(tensors, path, metadata={'config': json.dumps(config), 'seed': str(seed), 'script': os.path.basename(script),
                                       'made_with': json.dumps(made_with), **metadata})
    canonical(path)
    size = os.path.getsize(path)
    assert size <= LIMIT_BYTES, f'{path} has {size} bytes'
    print(f'{path}: {size} bytes, {len(tensors)} tensors')
    for name, t in tensors.items():
        if name.startswith('out.'):
            print(f'  {name} {tuple(t.shape)} rms {t.float().square().mean().sqrt():.3f}')


def published(model):
    """The config as diffusers or transformers writes it, less what it does not write into config.json."""
    config = model.config.to_dict() if hasattr(model.config, 'to_dict') else dict(model.config)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items() if k not in ('_name_or_path', '_use_default_values')}
