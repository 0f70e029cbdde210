"""Golden of the demonstration VAE: a clip of its world, its latents, and what they decode to.

Usage: wan_demo.py MODEL OUT.safetensors SEED FRAMES HEIGHT WIDTH
"""
import math
import random
import sys

import diffusers
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file

from demo_scenes import render, scene
from golden_file import canonical

model, out = sys.argv[1:3]
seed, count, height, width = map(int, sys.argv[3:7])
random.seed(seed)
torch.manual_seed(seed)
torch.set_grad_enabled(False)


def moved(place, t):
    """Where an object is at time t: objects go round."""
    return place[0] + 0.25 * math.sin(1 + 0.5 * t), place[1] + 0.25 * math.cos(0.4 * t)


background, gradient, objects, caption = scene()
frames = []
for t in range(count):
    there = (background, gradient, [(what, moved(place, t), radius) for what, place, radius in objects], caption)
    frames.append(F.interpolate(render([there], jitter=False), size=(height, width), mode='area'))
video = torch.stack(frames, 2)
vae = AutoencoderKLWan.from_pretrained(model, torch_dtype=torch.float32).eval()
latents = vae.encode(video).latent_dist
decoded = vae.decode(latents.mean, return_dict=False)[0]
tensors = {'video': video, 'latent_mean': latents.mean, 'latent_logvar': latents.logvar, 'decoded': decoded}
save_file({k: v.contiguous() for k, v in tensors.items()}, out, metadata={
    'layout': 'video and decoded (B,3,T,H,W) in [-1,1]; latents raw, not normalised', 'caption': caption,
    'seed': str(seed), 'made_with': f'diffusers {diffusers.__version__}, torch {torch.__version__}, CPU f32, script wan_demo.py'})
canonical(out)
print(f'{out}: {caption}; mean error {(decoded - video).abs().mean().item():.4f}')
