"""Goldens of the Wan VAEs: every block kind, and whole networks of the Wan 2.2 and the Qwen-Image kind, tiny and random,
also in overlapping tiles.

Usage: wan_goldens.py OUT_DIR
"""
import json
import sys

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AvgDown3D, DupUp3D, WanAttentionBlock, WanCausalConv3d, WanResample, WanResidualBlock, WanRMS_norm, patchify, unpatchify)

from golden_file import generator, published, save
from wan_names import original

NETWORKS = {
    # Encoder and decoder of different widths; five channels of latents.
    'wan-22': dict(seed=501, make=AutoencoderKLWan, factor=16, config=dict(
        base_dim=3, decoder_base_dim=4, z_dim=5, dim_mult=[1, 2, 4, 4], num_res_blocks=1,
        temperal_downsample=[False, True, True], is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        scale_factor_spatial=16)),
    # Widths 3, 6, 9, 12, and 4 where a resampler halves 9; two blocks a stage, as published.
    'wan-qwen': dict(seed=502, make=AutoencoderKLQwenImage, factor=8, config=dict(
        base_dim=3, z_dim=5, dim_mult=[1, 2, 3, 4], num_res_blocks=2, temperal_downsample=[False, True, True])),
}
# Latent frames, rows and columns of the clips: not square, and as small as it gets.
CLIPS = [(1, 2, 3), (2, 1, 3), (3, 2, 1)]
# Of the tiled runs: side and distance of tiles in pixels, extents of the latents.
TILES = {
    'wan-22': dict(seed=511, tile=32, stride=16, decode=(2, 3, 4), encode=(2, 3, 5)),
    'wan-qwen': dict(seed=512, tile=32, stride=24, decode=(2, 7, 5), encode=(2, 7, 5)),
}


def randomize(module, gen):
    """Kernels of unit gain, gammas around one, biases around zero."""
    for name, t in sorted(module.state_dict().items()):
        normal = torch.randn(t.shape, generator=gen)
        if name.endswith('gamma'):
            t.copy_(1 + 0.3 * normal)
        elif t.ndim == 1:
            t.copy_(0.2 * normal)
        else:
            t.copy_(normal / t[0].numel() ** 0.5)
    return module.eval()


def pixels(gen, frames, height, width):
    """Random pixels as they are stored, and as the networks take them."""
    stored = torch.randint(0, 256, (3, frames, height, width), generator=gen, dtype=torch.uint8)
    return stored, stored.float()[None] / 127.5 - 1


def streamed(module, x, plan):
    """The module over pieces of so many frames with a cache, as encoder and decoder call it."""
    cache, parts = [None], []
    for piece in x.split(plan, 2):
        parts.append(module(piece, feat_cache=cache, feat_idx=[0]))
    return torch.cat(parts, 2)


def blocks(out):
    gen = generator(500)
    weights, inputs, outputs = {}, {}, {}

    def add(name, module):
        weights.update({f'{name}.{k}': v for k, v in randomize(module, gen).state_dict().items()})
        return module

    def case(name, x, y):
        inputs[name], outputs[name] = x, y

    def noise(*shape):
        return torch.randn(1, *shape, generator=gen)

    x = noise(5, 4, 3, 6)
    case('conv', x, add('conv', WanCausalConv3d(5, 7, 3, padding=1))(x))

    x = noise(6, 3, 2, 5)
    x[:, :, 1, 0, 3] = 0  # a position whose channels are all zero
    y = add('norm', WanRMS_norm(6, images=False))(x)
    assert (y[:, :, 1, 0, 3] == 0).all()
    case('norm', x, y)
    y = add('norm_image', WanRMS_norm(6))(x[0].transpose(0, 1)).transpose(0, 1)[None]
    case('norm_image', x, y)

    x = noise(6, 5, 4, 3)
    case('residual', x, add('residual', WanResidualBlock(6, 6))(x))
    case('residual_shortcut', x, add('residual_shortcut', WanResidualBlock(6, 10))(x))

    attention = add('attention', WanAttentionBlock(10))
    for h, w in [(1, 1), (7, 9)]:
        x = noise(10, 2, h, w)
        case(f'attention.{h * w}', x, attention(x))

    # Doubling in time takes one frame and then any number, halving takes one and then pairs: two frames cannot be halved.
    for mode, width, lengths in [('upsample2d', 10, (1, 2, 5)), ('upsample3d', 10, (1, 2, 5)),
                                 ('downsample2d', 5, (1, 2, 5)), ('downsample3d', 5, (1, 3, 5))]:
        module = add(mode, WanResample(width, mode))
        for frames in lengths:
            x = noise(width, frames, 2, 3) if mode.startswith('up') else noise(width, frames, 6, 4)
            later = [2] * (frames // 2) if mode == 'downsample3d' else [1] * (frames - 1)
            case(f'{mode}.{frames}', x, streamed(module, x, [1, *later]))
    # As the Wan 2.2 decoder has it: the width stays.
    x = noise(6, 3, 2, 3)
    case('upsample3d_wide', x, streamed(add('upsample3d_wide', WanResample(6, 'upsample3d', 6)), x, [1, 1, 1]))

    # The shortcuts of every stage, with the published numbers of channels per mean and of repeats.
    for name, a, b, ft, fs in [('enc0', 3, 3, 1, 2), ('enc1', 3, 6, 2, 2), ('enc2', 5, 10, 2, 2), ('enc3', 5, 5, 1, 1)]:
        x = noise(a, 5, 4, 6)
        case(f'avg_down.{name}', x, AvgDown3D(a, b, ft, fs)(x))
    for name, a, b, ft, fs in [('dec0', 5, 5, 2, 2), ('dec1', 3, 3, 2, 2), ('dec2', 6, 3, 1, 2)]:
        x = noise(a, 3, 2, 3)
        case(f'dup_up.{name}', x, DupUp3D(a, b, ft, fs)(x, first_chunk=True))

    x = noise(3, 2, 4, 6)
    case('patchify', x, patchify(x, 2))
    x = noise(12, 2, 2, 3)
    case('unpatchify', x, unpatchify(x, 2))
    save(f'{out}/wan-blocks.safetensors', __file__, 500, {}, weights, inputs, outputs)


def network(name, out):
    case = NETWORKS[name]
    gen, config, factor = generator(case['seed']), case['config'], case['factor']
    mean = [round(0.3 * v, 4) for v in torch.randn(config['z_dim'], generator=gen).tolist()]
    std = [round(0.5 + v, 4) for v in torch.rand(config['z_dim'], generator=gen).tolist()]
    vae = randomize(case['make'](latents_mean=mean, latents_std=std, **config), gen)
    inputs, outputs = {}, {}
    for n, h, w in CLIPS:
        stored, x = pixels(gen, 4 * n - 3, h * factor, w * factor)
        latents = torch.randn(1, config['z_dim'], n, h, w, generator=gen)
        inputs |= {f'video.{n}': stored, f'latents.{n}': latents}
        outputs |= {f'latents.{n}': vae.encode(x).latent_dist.mode(), f'video.{n}': vae.decode(latents).sample}
    # Weights as files of half the width round them, and f32 all the same.
    state = {k: v.clone() for k, v in vae.state_dict().items()}
    for dtype in (torch.float16, torch.bfloat16):
        vae.load_state_dict({k: v.to(dtype).float() for k, v in state.items()})
        key = f'2.{str(dtype).removeprefix("torch.")}'
        x = inputs['video.2'].float()[None] / 127.5 - 1
        outputs |= {f'latents.{key}': vae.encode(x).latent_dist.mode(), f'video.{key}': vae.decode(inputs['latents.2']).sample}
    vae.load_state_dict(state)
    # Most values lie inside of -1..1, some beyond: both the network and the clamp show.
    share = torch.cat([(outputs[f'video.{n}'].abs() == 1).flatten() for n, *_ in CLIPS]).float().mean().item()
    print(f'{name}: {share:.1%} of the pixels are clamped')
    assert 0.001 < share < 0.3
    names = {k: original(k, config['num_res_blocks'], 'is_residual' in config) for k in vae.state_dict()}
    classes = {'_class_name': type(vae).__name__}
    save(f'{out}/{name}.safetensors', __file__, case['seed'], classes | published(vae), vae.state_dict(), inputs, outputs,
         original_names=json.dumps(names))
    return vae, factor


def tiles(name, vae, factor, out):
    """The same network in tiles; the weights are in its own file."""
    case = TILES[name]
    gen, tile, stride = generator(case['seed']), case['tile'], case['stride']
    vae.enable_tiling(tile, tile, stride, stride)
    n, h, w = case['encode']
    stored, x = pixels(gen, 4 * n - 3, h * factor, w * factor)
    n, h, w = case['decode']
    latents = torch.randn(1, vae.config.z_dim, n, h, w, generator=gen)
    # The class of Qwen-Image does not clamp when it decodes tiles; the other does.
    outputs = {'latents': vae.encode(x).latent_dist.mode(), 'video': vae.decode(latents).sample.clamp(-1, 1)}
    vae.use_tiling = False
    for key, whole in [('latents', vae.encode(x).latent_dist.mode()), ('video', vae.decode(latents).sample)]:
        difference = ((outputs[key] - whole).norm() / whole.norm()).item()
        print(f'{name}: {key} in tiles differ by {difference:.1%} from whole ones')
        assert difference > 0.01
    save(f'{out}/{name}-tiles.safetensors', __file__, case['seed'], {}, {}, {'video': stored, 'latents': latents}, outputs,
         tile=str(tile), stride=str(stride))


if __name__ == '__main__':
    torch.set_grad_enabled(False)
    blocks(sys.argv[1])
    for name in NETWORKS:
        tiles(name, *network(name, sys.argv[1]), sys.argv[1])
