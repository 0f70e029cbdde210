"""Train the tiny LTX demonstration model: a convolutional VAE and a diffusion decoder, from nothing but procedural clips.

The published classes and names (`AutoencoderKLLTX2Video`, blocks of LTX-2.3 with the shortcuts of LTX-2, and
`LTX2VideoDiffusionDecoderModel` of LTX-2.5), 32 x 32 pixels and 8 frames per latent, only narrower: 32 latent channels. Coloured shapes that go round.

Usage: train_ltx_demo.py OUT_DIR [--minutes-vae 2.5] [--minutes-decoder 1.2] [--smoke]
Needs: torch, diffusers >= 0.42, safetensors; one CUDA GPU (or --smoke on a CPU). Steps run as CUDA graphs: layers are so
small that launching them one by one takes several times as long.
Writes OUT_DIR/ltx-demo (diffusers folders vae and diffusion_decoder), OUT_DIR/ltx-demo.latent (normalised latents of a
clip in ComfyUI's layout) and OUT_DIR/report.txt.
"""
import argparse
import json
import math
import os
import random
import time

import diffusers
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTX2Video
from diffusers.models.autoencoders import ltx2_diffusion_decoder as diffusion
from safetensors.torch import save_file

from demo_scenes import dev, render, scene

args = argparse.ArgumentParser()
args.add_argument('out')
args.add_argument('--smoke', action='store_true')
args.add_argument('--minutes-vae', type=float, default=2.5)
args.add_argument('--minutes-decoder', type=float, default=1.2)
args = args.parse_args()
torch.manual_seed(11)
random.seed(11)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True
BATCH = 1 if args.smoke else 16
FRAMES, SIDE = 17, 96
CHANNELS = 32

VAE = dict(in_channels=3, out_channels=3, latent_channels=CHANNELS, block_out_channels=(32, 32, 32, 64),
           decoder_block_out_channels=(32, 32, 32, 64), layers_per_block=(1, 1, 1, 1, 1),
           decoder_layers_per_block=(2, 2, 1, 1, 1), decoder_spatio_temporal_scaling=(True, True, True, True),
           decoder_inject_noise=(False,) * 5, upsample_residual=(True,) * 4, upsample_factor=(1, 1, 1, 2),
           upsample_type=('spatiotemporal', 'spatiotemporal', 'temporal', 'spatial'), decoder_causal=False,
           decoder_spatial_padding_mode='zeros', spatial_compression_ratio=32, temporal_compression_ratio=8)
DECODER = dict(latent_channels=CHANNELS, decoder_head_dim=32, decoder_stage_channels=(128, 64, 64, 64, 32),
               decoder_stage_depths=(1, 1, 1, 1, 2), decoder_stage_kernels=((3, 3, 3), (3, 5, 5), (3, 5, 5), (3, 5, 5)),
               decoder_upsample_channel_reductions=(2, 1, 1, 2), decoder_stage5_kernel=(5, 7, 7), decoder_t_emb_dim=32)


def clips(count, frames, height, width):
    """[count, 3, frames, height, width] in -1..=1: objects on circles and ellipses."""
    described = []
    for _ in range(count):
        background, gradient, objects, _ = scene()
        phases = [(random.random() * 7, random.uniform(-.25, .25), random.uniform(.1, .3)) for _ in objects]
        for t in range(frames):
            moved = [(what, (x + r * math.sin(p + s * t), y + r * math.cos(p + s * t)), size)
                     for (what, (x, y), size), (p, s, r) in zip(objects, phases)]
            described.append((background, gradient, moved, ''))
    pictures = F.interpolate(render(described, jitter=False), size=(height, width), mode='area')
    return pictures.reshape(count, frames, 3, height, width).transpose(1, 2).contiguous()


class Clips:
    """Clips drawn once, then shown mirrored and with their colours exchanged."""

    def __init__(self, count):
        parts = [clips(4, FRAMES, SIDE, SIDE) for _ in range(count // 4)]
        self.bytes = torch.cat([((part + 1) * 127.5).round().to(torch.uint8) for part in parts])

    def fill(self, batch):
        chosen = self.bytes[torch.randint(len(self.bytes), (len(batch),), device=dev)]
        chosen = chosen[:, random.sample(range(3), 3)]
        flipped = [axis for axis in (3, 4) if random.random() < .5]
        batch.copy_(chosen.flip(flipped)[:, :, :batch.shape[2]].float() / 127.5 - 1)


def rate(fraction, peak):
    return peak * min(1, 30 * fraction + .02) * (.5 + .5 * math.cos(math.pi * fraction)) + 1e-6


def train(module, minutes, peak, batch, loss_of):
    on_gpu = dev == 'cuda'
    speed = torch.tensor(peak, device=dev) if on_gpu else peak
    optimizer = torch.optim.AdamW(module.parameters(), lr=speed, betas=(.9, .95), weight_decay=1e-4, capturable=on_gpu)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    replay, loss = step, None
    if on_gpu:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                data.fill(batch)
                step()
        torch.cuda.current_stream().wait_stream(side)
        try:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = step()
            replay = graph.replay
        except RuntimeError as problem:
            print(f'no graph: {problem}', flush=True)
            torch.cuda.synchronize()
            replay, loss = step, None
    start, steps, fraction = time.time(), 0, 0
    while steps < 2 if args.smoke else fraction < 1:
        fraction = 0 if args.smoke else (time.time() - start) / (60 * minutes)
        if on_gpu:
            optimizer.param_groups[0]['lr'].fill_(rate(min(fraction, 1), peak))
        else:
            optimizer.param_groups[0]['lr'] = rate(fraction, peak)
        data.fill(batch)
        result = replay()
        if steps % 500 == 0:
            # Also keeps the host from running ahead of the clock.
            print(f'{steps:6d} {fraction:.2f} {(result if loss is None else loss).item():.4f}', flush=True)
        elif steps % 20 == 0 and on_gpu:
            torch.cuda.synchronize()
        steps += 1
    print(f'{steps} steps', flush=True)


def error(got, want):
    return F.l1_loss(got, want) + 2 * F.mse_loss(got, want)


class Dense:
    """Windows by a mask over all pairs: for small grids, with a backward pass."""
    masks = {}

    def mask(self, grid, window):
        key = (grid, window)
        if key not in self.masks:
            allowed = torch.ones(1, 1, dtype=torch.bool, device=dev)
            for n, k in zip(grid, window):
                i = torch.arange(n, device=dev)
                start = (i - k // 2).clamp(0, n - k)
                axis = (i[None] >= start[:, None]) & (i[None] < start[:, None] + k)
                a, b = allowed.shape[0], n
                allowed = (allowed[:, None, :, None] & axis[None, :, None, :]).reshape(a * b, a * b)
            self.masks[key] = allowed
        return self.masks[key]

    def __call__(self, attn, x, block_mask=None):
        b, t, h, w, c = x.shape
        q, k, v = (y.reshape(b, t * h * w, attn.heads, attn.head_dim).transpose(1, 2) for y in attn.project_qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask((t, h, w), attn.kernel_size), scale=1.0)
        return attn.to_out[0](y.transpose(1, 2).reshape(b, t, h, w, c))


data = Clips(8 if args.smoke else 1600)
vae = AutoencoderKLLTX2Video(**VAE).to(dev)


def vae_loss(video):
    mean = vae.encode(video).latent_dist.mean
    # A little noise, so that latents mean the same when they are rounded.
    return error(vae.decode(mean + .02 * torch.randn_like(mean), return_dict=False)[0], video) + 1e-4 * mean.square().mean()


train(vae, args.minutes_vae, 2e-3, torch.empty(BATCH, 3, FRAMES, SIDE, SIDE, device=dev), vae_loss)
vae.eval().requires_grad_(False)
drawn = [clips(BATCH, FRAMES, SIDE, SIDE) for _ in range(4)]
latents = torch.cat([vae.encode(video).latent_dist.mean.transpose(0, 1).flatten(1) for video in drawn], 1)
mean, std = latents.mean(1), latents.std(1).clamp_min(1e-3)

decoder = diffusion.LTX2VideoDiffusionDecoderModel(**DECODER).to(dev)
for model in (vae, decoder):
    model.latents_mean.copy_(mean)
    model.latents_std.copy_(std)
attentions = [m for m in decoder.modules() if isinstance(m, diffusion.LTX2VideoVaeNeighborhoodAttention)]
for attention in attentions:
    attention.set_processor(Dense())


def decoder_loss(video):
    return error(decoder.decoder(vae.encode(video).latent_dist.mean), video)


train(decoder, args.minutes_decoder, 2e-3, torch.empty(max(1, BATCH // 2), 3, 9, SIDE, SIDE, device=dev), decoder_loss)
decoder.eval().requires_grad_(False)

folder = os.path.join(args.out, 'ltx-demo')
for model, part in ((vae, 'vae'), (decoder, 'diffusion_decoder')):
    model.to(torch.bfloat16).save_pretrained(os.path.join(folder, part))
    model.float()
with open(os.path.join(folder, 'model_index.json'), 'w') as file:
    json.dump({'_class_name': 'LTX2Pipeline', 'vae': ['diffusers', 'AutoencoderKLLTX2Video'],
               'diffusion_decoder': ['diffusers', 'LTX2VideoDiffusionDecoderModel']}, file, indent=2)

random.seed(5)
video = clips(1, 25, 96, 128)
latents = vae.encode(video).latent_dist.mean
# The statistics as they are stored.
mean, std = (values.view(1, -1, 1, 1, 1) for values in (vae.latents_mean, vae.latents_std))
normalised = (latents - mean) / std
save_file({'latent_tensor': normalised.float().cpu().contiguous(), 'latent_format_version_0': torch.zeros(0)},
          os.path.join(args.out, 'ltx-demo.latent'), metadata={'vae': 'ltx-demo', 'latents': 'normalized'})
with torch.no_grad():
    convolutional = vae.decode(latents, return_dict=False)[0]
    diffused = decoder.decode(latents, return_dict=False)[0]
lines = [f'{name}: mean error {(got - video).abs().mean().item():.4f} of a range of 2'
         for name, got in (('conv', convolutional), ('diffusion', diffused))]
lines += [f'{name}: {sum(p.numel() for p in model.parameters())} parameters' for name, model in (('vae', vae), ('decoder', decoder))]
lines.append(f'diffusers {diffusers.__version__}, torch {torch.__version__}, {dev}')
print('\n'.join(lines))
with open(os.path.join(args.out, 'report.txt'), 'w') as file:
    file.write('\n'.join(lines) + '\n')
