"""Golden of the LTX demonstration model: latents, what both decoders make of them, and what the encoder makes of the result.

Usage: ltx_demo.py MODEL LATENTS OUT.safetensors SEED

The pixel noise is torch.randn((1, 3, F, H, W), generator=torch.Generator().manual_seed(SEED)). Pictures are bytes
[F, H, W, 3].
"""
import os
import sys

import diffusers
import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoDiffusionDecoderModel
from safetensors.torch import load_file, save_file

from golden_file import canonical

model, latents, out, seed = *sys.argv[1:4], int(sys.argv[4])
torch.set_num_threads(1)
torch.set_grad_enabled(False)
vae = AutoencoderKLLTX2Video.from_pretrained(os.path.join(model, 'vae'), torch_dtype=torch.float32).eval()
decoder = LTX2VideoDiffusionDecoderModel.from_pretrained(os.path.join(model, 'diffusion_decoder'), torch_dtype=torch.float32).eval()


def pixels(video):
    return (video[0].permute(1, 2, 3, 0) / 2 + .5).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()


# Two latent frames: the reference's attention on a CPU holds all pairs of tokens.
normalized = load_file(latents)['latent_tensor'][:, :, :2, :, :3].contiguous()
mean, std = (values.view(1, -1, 1, 1, 1) for values in (vae.latents_mean, vae.latents_std))
raw = normalized * std + mean
conv = pixels(vae.decode(raw, return_dict=False)[0])
generator = torch.Generator().manual_seed(seed)
diffusion = pixels(decoder.decode(raw, generator=generator, return_dict=False)[0])
again = vae.encode(conv.permute(3, 0, 1, 2)[None].float() / 127.5 - 1).latent_dist.mean
tensors = {'latents': normalized, 'conv': conv, 'diffusion': diffusion, 'encoded': ((again - mean) / std).contiguous()}
save_file(tensors, out, metadata={
    'layout': 'latents and encoded normalised (1,C,T,h,w); conv and diffusion bytes (F,H,W,3)', 'seed': str(seed),
    'made_with': f'diffusers {diffusers.__version__}, torch {torch.__version__}, CPU f32, script ltx_demo.py'})
canonical(out)
print(f'{out}: {tuple(conv.shape)}, mean difference of the decoders {(conv.float() - diffusion.float()).abs().mean():.2f} levels')
