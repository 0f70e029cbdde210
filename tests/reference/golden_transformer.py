"""Goldens of tiny random FLUX.2 transformers: blocks and whole model. Usage: golden_transformer.py OUT_DIR"""
import math
import sys

import torch
from diffusers import Flux2Transformer2DModel

from golden_file import generator, published, randomize, record, save

COMMON = dict(attention_head_dim=20, axes_dims_rope=(2, 4, 6, 8), rope_theta=2000, eps=1e-6)
CASES = {
    # No guidance; three heads; an MLP ratio that is no integer.
    'flux2-transformer': dict(seed=101, grid=(3, 5), text=7, batch=2, timestep=0.617, guidance=None, config=dict(
        COMMON, num_layers=1, num_single_layers=1, num_attention_heads=3, joint_attention_dim=42, in_channels=28,
        timestep_guidance_channels=34, mlp_ratio=2.5, guidance_embeds=False)),
    # Guidance; several blocks of each kind.
    'flux2-transformer-guidance': dict(seed=102, grid=(5, 2), text=3, batch=1, timestep=0.283, guidance=3.7, config=dict(
        COMMON, num_layers=2, num_single_layers=3, num_attention_heads=2, joint_attention_dim=27, in_channels=12,
        out_channels=12, timestep_guidance_channels=18, mlp_ratio=3.0, guidance_embeds=True)),
}


def scale(name):
    """Small streams, so that the eps of the norms shows; the rest keeps unit variance."""
    return 0.1 if name.startswith(('x_embedder', 'context_embedder')) else 1.0


def ids(case):
    """(T, H, W, L) of the text, then of the image."""
    h, w = case['grid']
    text = torch.tensor([[0, 0, 0, l] for l in range(case['text'])])
    image = torch.tensor([[0, y, x, 0] for y in range(h) for x in range(w)])
    return text, image


def check_frequencies(width):
    """Refuses widths at which torch's f32 exp rounds a frequency of the sinusoid to the neighbour of the nearest float.

    At an angle of 3700 that neighbour moves the velocity by 1e-5; nobody who rounds correctly could match the golden.
    """
    half = width // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32) / half
    assert torch.equal(exponent.exp(), exponent.double().exp().float()), f'another timestep_guidance_channels than {width}, please'


for name, case in CASES.items():
    check_frequencies(case['config']['timestep_guidance_channels'])
    gen = generator(case['seed'])
    model = randomize(Flux2Transformer2DModel(**case['config']), gen, scale)
    h, w = case['grid']
    hidden_states = torch.randn(case['batch'], h * w, case['config']['in_channels'], generator=gen)
    encoder_hidden_states = torch.randn(case['batch'], case['text'], case['config']['joint_attention_dim'], generator=gen)
    txt_ids, img_ids = ids(case)
    timestep = torch.full((case['batch'],), case['timestep'])
    guidance = None if case['guidance'] is None else torch.full((case['batch'],), case['guidance'])

    inputs, outputs = {}, {}
    record(model.time_guidance_embed, inputs, outputs, 'time_guidance_embed')
    record(model.transformer_blocks[-1], inputs, outputs, 'double_block')
    record(model.single_transformer_blocks[-1], inputs, outputs, 'single_block')
    velocity = model(hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, timestep=timestep,
                     img_ids=img_ids, txt_ids=txt_ids, guidance=guidance, return_dict=False)[0]
    cos, sin = (torch.cat(pair) for pair in zip(model.pos_embed(txt_ids), model.pos_embed(img_ids)))
    inputs |= {'hidden_states': hidden_states, 'encoder_hidden_states': encoder_hidden_states, 'timestep': timestep,
               'grid': torch.tensor([h, w], dtype=torch.int32)}
    if guidance is not None:
        inputs['guidance'] = guidance
    # One value per pair, as rotary embeddings over adjacent pairs need them.
    inputs |= {'rope.cos': cos[:, ::2], 'rope.sin': sin[:, ::2]}
    # diffusers returns (encoder_hidden_states, hidden_states) from a double block.
    outputs['double_block.encoder_hidden_states'] = outputs.pop('double_block.0')
    outputs['double_block.hidden_states'] = outputs.pop('double_block.1')
    outputs['velocity'] = velocity
    save(f'{sys.argv[1]}/{name}.safetensors', __file__, case['seed'], published(model), model.state_dict(), inputs, outputs)
