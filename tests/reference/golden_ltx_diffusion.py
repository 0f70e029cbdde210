"""Goldens of tiny random LTX-2.5 diffusion decoders: stages, blocks, whole decode, tiles. Usage: golden_ltx_diffusion.py OUT_DIR

Latents go in as the model takes them (denormalised). The noise is what the model drew, so that a decode can be given it.
"""
import sys

import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder as reference

from golden_file import generator, published, randomize, record, save

# Narrow widths; every stage with a window, and along every axis with factors, of its own. 8 frames of 8x8 pixels per latent.
COMMON = dict(latent_channels=6, patch_size=2, decoder_head_dim=16, decoder_stage_channels=(32, 32, 16, 16, 16),
              decoder_stage_depths=(1, 2, 1, 1, 2), decoder_stage_kernels=((3, 3, 3), (3, 5, 3), (5, 3, 3), (3, 5, 5)),
              decoder_upsample_strides=((1, 2, 1), (2, 1, 1), (2, 1, 2), (2, 2, 2)),
              decoder_upsample_channel_reductions=(1, 2, 1, 1), decoder_stage5_kernel=(5, 7, 9), decoder_t_emb_dim=24,
              spatial_compression_ratio=8)

CASES = {
    # As published: one step, the network gives the pixels.
    'ltx-diffusion': dict(seed=301, latent=(1, 2, 3, 4), steps=1, config=dict(
        COMMON, decoder_timestep_scale_multiplier=1000.0, decoder_model_output_type='x0', decoder_num_inference_steps=1)),
    # Three steps of a network that gives velocities, two clips.
    'ltx-diffusion-v': dict(seed=302, latent=(2, 2, 3, 3), steps=3, config=dict(
        COMMON, decoder_timestep_scale_multiplier=100.0, decoder_model_output_type='v', decoder_num_inference_steps=3)),
    # Two steps in overlapping tiles along every axis, the last ones wider; one canvas of noise.
    'ltx-diffusion-tiles': dict(seed=303, latent=(1, 3, 5, 4), steps=2, tiles=dict(
        tile_sample_min_height=24, tile_sample_min_width=20, tile_sample_min_num_frames=10, tile_sample_stride_height=16,
        tile_sample_stride_width=12, tile_sample_stride_num_frames=6), config=dict(
            COMMON, decoder_timestep_scale_multiplier=1000.0, decoder_model_output_type='x0', decoder_num_inference_steps=2)),
}


def scale(name):
    """Modulations that matter but do not drown the stream."""
    return 0.5 if 'shared_adaln' in name or 'scale_shift_table' in name else 1.0


def run(case):
    gen = generator(case['seed'])
    model = randomize(reference.LTX2VideoDiffusionDecoderModel(**case['config']), gen, scale)
    batch, t, h, w = case['latent']
    latent = torch.randn(batch, case['config']['latent_channels'], t, h, w, generator=gen)

    noises, drawn = [], reference.randn_tensor

    def remember(*args, **kwargs):
        noises.append(drawn(*args, **kwargs))
        return noises[-1].clone()

    reference.randn_tensor = remember
    tiles = case.get('tiles')
    if tiles:
        model.enable_tiling(**tiles)
    inputs, outputs = {}, {}
    recorded = case['steps'] == 1
    if recorded:
        decoder = model.decoder
        record(decoder.det_stages[0][0], {}, outputs, 'stage_1')
        record(decoder.upsamples[2], {}, outputs, 'features')
        record(decoder.upsamples[3], {}, outputs, 'context')
        record(decoder.shared_adaln, {}, outputs, 'modulation')
        record(decoder.diff_blocks[0], {}, outputs, 'diff_block')
    video = model.decode(latent, generator=gen, num_inference_steps=case['steps'], return_dict=False)[0]
    reference.randn_tensor = drawn
    assert len(noises) == 1, 'one canvas'
    inputs |= {'latent': latent, 'noise': noises[0]}
    outputs['video'] = video
    modulation = [outputs.pop(f'modulation.{i}') for i in range(7)] if recorded else None
    if modulation:
        outputs['modulation'] = torch.cat(modulation, dim=-1).flatten(1)
    config = published(model)
    extra = {'steps': str(case['steps'])}
    if tiles:
        extra |= {name.removeprefix('tile_sample_'): str(value) for name, value in tiles.items()}
    return model.state_dict(), config, inputs, outputs, extra


for name, case in CASES.items():
    weights, config, inputs, outputs, extra = run(case)
    save(f'{sys.argv[1]}/{name}.safetensors', __file__, case['seed'], config, weights, inputs, outputs, **extra)
