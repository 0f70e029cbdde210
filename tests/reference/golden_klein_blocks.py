"""Golden of blocks at the widths of FLUX.2 klein 4B: transformer, VAE, text encoder. Usage: golden_klein_blocks.py OUT_DIR

The weights would take a gigabyte, so the file holds none: weights and arguments come from integers that any language makes
alike, and every value is exact in bf16. The file holds a part of each result in f64 arithmetic (the tables of the rotary
embeddings stay in f32), and how far the reference implementation in bf16 on the CPU is from it.
"""
import sys

import numpy as np
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_flux2 import Flux2PosEmbed, Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.models.upsampling import Upsample2D
from transformers import Qwen3Config, Qwen3Model

from golden_file import save

HIDDEN, HEADS, HEAD_DIM, MLP_RATIO, EPS = 3072, 24, 128, 3.0, 1e-6
TEXT, GRID = 128, (16, 32)
# Of the results that are kept, every so many along the second axis: tokens, or channels of a picture. The stride meets every
# place of a tile sooner or later.
STRIDE = 37
# Rows, columns of pictures in the VAE; tokens of a prompt, and how many of them are real.
PICTURE, PROMPT = (12, 20), (96, 61)


def stream(name):
    """FNV-1a of a tensor's name."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return state


def uniform(name, shape):
    """Odd multiples of 1/256 between -1 and 1: the top 8 bits of splitmix64 over the stream of the name."""
    count, parts = int(np.prod(shape)), []
    with np.errstate(over='ignore'):
        for start in range(0, count, 1 << 22):
            i = np.arange(start, min(count, start + (1 << 22)), dtype=np.uint64)
            z = np.uint64(stream(name)) + i * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            top = ((z ^ (z >> np.uint64(31))) >> np.uint64(56)).astype(np.int32)
            parts.append(((2 * top - 255) / 256).astype(np.float32))
    return torch.from_numpy(np.concatenate(parts)).reshape(shape)


def values(name, shape, scale, base=0.0):
    return (base + scale * uniform(name, shape)).bfloat16()


def fill(block, prefix):
    """Matrices and kernels of about unit gain, vectors about one."""
    with torch.no_grad():
        for name, t in block.state_dict().items():
            full = f'{prefix}.{name}'
            t.copy_(values(full, t.shape, 0.25, 1.0) if t.ndim == 1 else values(full, t.shape, 2.0**-5))
    return block.eval().requires_grad_(False)


def cast(module, dtype):
    """Parameters alone, as a checkpoint is loaded: tables stay in f32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


outputs, errors = {}, {}


def case(names, module, call):
    """`call(dtype)` runs the module: in f64 for the results, in bf16 for the distance from them."""
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        cast(module, dtype)
        result = call(dtype)
        results.append([x[:, ::STRIDE].double() for x in (result if isinstance(result, tuple) else (result,))])
    for name, want, got in zip(names, *results):
        outputs[name] = want
        errors[name] = ((got - want).norm() / want.norm()).item()


h, (height, width) = HIDDEN, GRID
text_ids = torch.tensor([[0, 0, 0, l] for l in range(TEXT)])
image_ids = torch.tensor([[0, y, x, 0] for y in range(height) for x in range(width)])
embed = Flux2PosEmbed(2000, [32] * 4)
rope = tuple(torch.cat(pair) for pair in zip(embed(text_ids), embed(image_ids)))
text, image = values('in.text', (1, TEXT, h), 2.0), values('in.image', (1, height * width, h), 2.0)
modulation = {name: values(f'in.modulation.{name}', (1, n * h), 0.5) for name, n in (('image', 6), ('text', 6), ('single', 3))}

double = fill(Flux2TransformerBlock(h, HEADS, HEAD_DIM, MLP_RATIO, EPS), 'double')
case(('double.text', 'double.image'), double, lambda dtype: double(
    image.to(dtype), text.to(dtype), modulation['image'].to(dtype), modulation['text'].to(dtype), image_rotary_emb=rope))
del double

single = fill(Flux2SingleTransformerBlock(h, HEADS, HEAD_DIM, MLP_RATIO, EPS), 'single')
case(('single',), single, lambda dtype: single(
    torch.cat([text, image], 1).to(dtype), None, modulation['single'].to(dtype), image_rotary_emb=rope))
del single

resnet = fill(ResnetBlock2D(in_channels=512, out_channels=256, temb_channels=None, groups=32, eps=EPS), 'vae.resnet')
case(('vae.resnet',), resnet, lambda dtype: resnet(values('in.vae.512', (1, 512, *PICTURE), 2.0).to(dtype), None))

middle = fill(Attention(512, heads=1, dim_head=512, eps=EPS, norm_num_groups=32, residual_connection=True, bias=True,
                        upcast_softmax=True, _from_deprecated_attn_block=True), 'vae.middle')
case(('vae.middle',), middle, lambda dtype: middle(values('in.vae.512', (1, 512, *PICTURE), 2.0).to(dtype)))

upsample = fill(Upsample2D(256, use_conv=True), 'vae.upsample')
case(('vae.upsample',), upsample, lambda dtype: upsample(values('in.vae.256', (1, 256, *PICTURE), 2.0).to(dtype)))

qwen3 = dict(hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
             rms_norm_eps=1e-6, rope_theta=1e6, num_hidden_layers=2, vocab_size=8)
encoder = Qwen3Model(Qwen3Config(**qwen3))
fill(encoder.layers[0], 'text.layers.0')
tokens, real = PROMPT
mask = (torch.arange(tokens) < real).long()[None]
case(('text',), encoder.eval().requires_grad_(False), lambda dtype: encoder(
    inputs_embeds=values('in.prompt', (1, tokens, qwen3['hidden_size']), 2.0).to(dtype), attention_mask=mask,
    output_hidden_states=True, use_cache=False).hidden_states[1])

config = dict(num_layers=1, num_single_layers=1, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, joint_attention_dim=7680,
              in_channels=128, out_channels=None, mlp_ratio=MLP_RATIO, axes_dims_rope=[32] * 4, rope_theta=2000,
              timestep_guidance_channels=256, guidance_embeds=False, eps=EPS, patch_size=1)
print({name: f'{error:.2e}' for name, error in errors.items()})
integers = {'grid': GRID, 'picture': PICTURE, 'prompt': PROMPT}
save(f'{sys.argv[1]}/flux2-klein-blocks.safetensors', __file__, 0, config, {},
     {name: torch.tensor(value, dtype=torch.int32) for name, value in integers.items()}, outputs,
     text=str(TEXT), stride=str(STRIDE), **{f'bf16.{name}': f'{error:.6e}' for name, error in errors.items()})
