"""Goldens of the FLUX.2 VAE: every block kind and the whole, tiny and random; and the demonstration VAE on pictures.

Usage: golden_vae.py OUT_DIR DEMO_MODEL
"""
import sys

import torch
from diffusers import AutoencoderKLFlux2

from demo_scenes import render
from golden_file import generator, published, randomize, record, save

COMMON = dict(in_channels=3, out_channels=3, sample_size=64, batch_norm_eps=1e-4)
CASES = {
    # Encoder and decoder of different widths, none of them a multiple of its neighbour.
    'flux2-vae': dict(seed=301, size=(48, 32), batch=2, config=dict(
        COMMON, block_out_channels=(8, 12, 20, 28), decoder_block_out_channels=(12, 16, 20, 32), layers_per_block=1,
        latent_channels=5, norm_num_groups=4)),
    # What a config may leave out: quantisation convolutions, attention; two resnets a level.
    'flux2-vae-plain': dict(seed=302, size=(16, 48), batch=1, config=dict(
        COMMON, block_out_channels=(4, 6, 10, 14), layers_per_block=2, latent_channels=3, norm_num_groups=2,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False)),
}


def patchify(z):
    """(B, C, 2h, 2w) -> (B, 4C, h, w), channel c*4 + py*2 + px."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, c * 4, h // 2, w // 2)


def unpatchify(z):
    """The inverse of patchify."""
    b, c, h, w = z.shape
    return z.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def statistics(vae):
    """Mean and deviation that the pipeline applies to patchified latents."""
    mean, var = vae.bn.running_mean.view(1, -1, 1, 1), vae.bn.running_var.view(1, -1, 1, 1)
    return mean, (var + vae.config.batch_norm_eps).sqrt()


def encode(vae, picture):
    """Pixels in -1..1 -> normalised, patchified latents."""
    mean, std = statistics(vae)
    return (patchify(vae.encode(picture).latent_dist.mode()) - mean) / std


def decode(vae, latents):
    """Normalised, patchified latents -> pixels, nominally -1..1, not clamped."""
    mean, std = statistics(vae)
    return vae.decode(unpatchify(latents * std + mean)).sample


def blocks(vae, inputs, outputs):
    """One block of each kind, at levels where its feature maps are small."""
    record(vae.encoder.down_blocks[3].resnets[0], inputs, outputs, 'encoder.down_blocks.3.resnets.0')  # with a shortcut
    record(vae.decoder.mid_block.resnets[1], inputs, outputs, 'decoder.mid_block.resnets.1')  # without
    record(vae.decoder.mid_block.attentions[0], inputs, outputs, 'decoder.mid_block.attentions.0')
    record(vae.encoder.down_blocks[2].downsamplers[0], inputs, outputs, 'encoder.down_blocks.2.downsamplers.0')
    record(vae.decoder.up_blocks[0].upsamplers[0], inputs, outputs, 'decoder.up_blocks.0.upsamplers.0')


for name, case in CASES.items():
    gen = generator(case['seed'])
    # Small streams, so that the eps of the group norms shows.
    vae = randomize(AutoencoderKLFlux2(**case['config']), gen, lambda name: 0.3)
    h, w = case['size']
    inputs, outputs = {}, {}
    picture = torch.rand(case['batch'], 3, h, w, generator=gen) * 2 - 1
    latents = torch.randn(case['batch'], 4 * case['config']['latent_channels'], h // 16, w // 16, generator=gen)
    if case['config'].get('mid_block_add_attention', True):
        blocks(vae, inputs, outputs)
    outputs |= {'moments': vae._encode(picture), 'latents': encode(vae, picture), 'picture': decode(vae, latents)}
    inputs |= {'picture': picture, 'latents': latents}
    save(f'{sys.argv[1]}/{name}.safetensors', __file__, case['seed'], published(vae), vae.state_dict(), inputs, outputs)

# The demonstration VAE on pictures of its world; the weights are in the model's folder.
SCENES = [
    ('red', True, [(['circle', 'yellow', 'huge'], (0, 0), 0.62)], 'a huge yellow circle on a red gradient background'),
    ('white', False, [(['triangle', 'green', ''], (-0.48, 0), 0.36), (['heart', 'pink', 'small'], (0.48, 0), 0.24)],
     'a green triangle to the left of a small pink heart on a white background'),
]
vae = AutoencoderKLFlux2.from_pretrained(f'{sys.argv[2]}/vae', torch_dtype=torch.float32).eval()
with torch.no_grad():
    pixels = ((render(SCENES, jitter=False).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    picture = pixels.float() / 127.5 - 1
    latents = encode(vae, picture)
    back = decode(vae, latents).clamp(-1, 1)
error = ((back - picture) / 2).square().mean((1, 2, 3))
print('PSNR of encode, decode:', [f'{p:.2f} dB' for p in (-10 * error.log10()).tolist()])
save(f'{sys.argv[1]}/flux2-demo-vae.safetensors', __file__, 0, published(vae), {}, {'pixels': pixels}, {'latents': latents},
     captions='\n'.join(s[3] for s in SCENES))
