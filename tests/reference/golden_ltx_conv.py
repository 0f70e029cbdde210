"""Goldens of the LTX-2 convolutional VAE: tiny and random, of the kinds of 2.0 and 2.3, with every option that no release
uses, and in tiles.

Usage: golden_ltx_conv.py OUT_DIR
"""
import sys

import torch
from diffusers import AutoencoderKLLTX2Video

from golden_file import generator, published, randomize, save

COMMON = dict(in_channels=3, out_channels=3, latent_channels=8, temporal_compression_ratio=8,
              downsample_type=('spatial', 'temporal', 'spatiotemporal', 'spatiotemporal'))
# Lists of the decoder are in the order of the encoder, but for upsample_type, which is in the order of the run.
CASES = {
    'ltx-conv-20': dict(seed=701, size=(9, 32, 32), latents=(1, 3, 2, 3), config=dict(
        COMMON, block_out_channels=(8, 16, 16, 32), layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 16), decoder_layers_per_block=(1, 2, 1), patch_size=4,
        decoder_spatio_temporal_scaling=(True,) * 2, decoder_inject_noise=(False,) * 3, upsample_residual=(True,) * 2,
        upsample_factor=(2, 2), upsample_type=('spatiotemporal',) * 2, spatial_compression_ratio=32,
        decoder_causal=False)),
    'ltx-conv-23': dict(seed=702, size=(9, 32, 48), latents=(2, 3, 1, 2), config=dict(
        COMMON, block_out_channels=(8, 16, 16, 16), layers_per_block=(1, 1, 1, 1, 2),
        decoder_block_out_channels=(4, 8, 8, 16), decoder_layers_per_block=(1, 1, 1, 2, 1), patch_size=2,
        spatio_temporal_scaling=(True,) * 4, decoder_spatio_temporal_scaling=(True,) * 4,
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(2, 2, 1, 2),
        upsample_type=('spatiotemporal', 'spatiotemporal', 'temporal', 'spatial'),
        spatial_compression_ratio=16, decoder_causal=False, decoder_spatial_padding_mode='zeros')),
    'ltx-conv-options': dict(seed=703, size=(9, 32, 48), latents=(2, 2, 2, 2), timestep=0.05, config=dict(
        COMMON, block_out_channels=(8, 16, 16, 16), layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(4, 8, 16), decoder_layers_per_block=(1, 1, 1, 2), patch_size=2,
        decoder_inject_noise=(True, False, True, True), timestep_conditioning=True,
        spatial_compression_ratio=16, encoder_causal=False, encoder_spatial_padding_mode='reflect',
        upsample_residual=(False, True, True),
        upsample_type=('spatiotemporal', 'spatial', 'temporal'))),
    # Rows and columns that end with a whole tile and with a part of one.
    'ltx-conv-tiles': dict(seed=704, size=(25, 24, 40), latents=(1, 4, 3, 5), tile=(16, 16), stride=(8, 8), config=dict(
        COMMON, block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 8, 8, 8), decoder_layers_per_block=(1, 1, 1, 1, 1), patch_size=1,
        spatio_temporal_scaling=(True,) * 4, decoder_spatio_temporal_scaling=(True,) * 4,
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(2, 1, 1, 1),
        upsample_type=('spatiotemporal', 'spatiotemporal', 'temporal', 'spatial'),
        spatial_compression_ratio=8, decoder_causal=False, decoder_spatial_padding_mode='zeros')),
}


def per_channel(vector):
    """[C] against [B, C, T, H, W]."""
    return vector.view(1, -1, 1, 1, 1)


for name, case in CASES.items():
    gen = generator(case['seed'])
    vae = AutoencoderKLLTX2Video(**case['config'])
    multiplier = vae.decoder.timestep_scale_multiplier
    vae.decoder.timestep_scale_multiplier = None
    randomize(vae, gen)
    vae.decoder.timestep_scale_multiplier = multiplier
    vae.latents_std.copy_(0.5 + torch.rand(vae.latents_std.shape, generator=gen))
    mean, std = per_channel(vae.latents_mean), per_channel(vae.latents_std)
    if 'tile' in case:
        frames, pixels = zip(case['tile'], case['stride'])
        vae.enable_tiling(pixels[0], pixels[0], frames[0], pixels[1], pixels[1], frames[1])
        vae.use_framewise_encoding = vae.use_framewise_decoding = True
    batch, *grid = case['latents']
    frames = torch.rand(1, 3, *case['size'], generator=gen) * 2 - 1
    latents = torch.randn(batch, 8, *grid, generator=gen)
    inputs, outputs = {'frames': frames, 'latents': latents}, {}
    outputs['latents'] = (vae.encode(frames).latent_dist.mode() - mean) / std

    # The noise that layers draw, in the order of the run.
    randn, drawn = torch.randn, []

    def recorded(*args, **kwargs):
        kwargs['generator'] = gen
        drawn.append(randn(*args, **kwargs))
        return drawn[-1]

    torch.randn = recorded
    timestep = torch.full((batch,), case['timestep']) if 'timestep' in case else None
    outputs['frames'] = vae.decode(latents * std + mean, timestep).sample
    torch.randn = randn
    inputs |= {f'noise.{i}': noise for i, noise in enumerate(drawn)}
    save(f'{sys.argv[1]}/{name}.safetensors', __file__, case['seed'], published(vae), vae.state_dict(), inputs, outputs)
