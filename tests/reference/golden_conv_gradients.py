"""Gradients of torch's conv1d and conv2d, with padding of its own before and behind. Usage: golden_conv_gradients.py OUT_DIR

For each case of the config: `in.NAME.x`, `.weight`, `.bias` and `.grad` (the output's gradient), `out.NAME.y`, `.x`,
`.weight` and `.bias` (the result, and the gradients of the operands).
"""
import sys

import torch
from golden_file import generator, save
from torch.nn import functional as F

SEED = 5
# name: (batch, channels, filters), extents, filter, stride, dilation, padding before and behind each axis, groups
CASES = {
    'line': ((2, 3, 4), [11], [3], [1], [1], [(1, 1)], 1),
    'line_causal_stride': ((2, 4, 6), [14], [4], [3], [1], [(3, 0)], 2),
    'line_dilated': ((1, 3, 5), [17], [3], [2], [3], [(0, 4)], 1),
    'line_depthwise': ((2, 5, 10), [9], [3], [1], [2], [(4, 1)], 5),
    'picture': ((2, 4, 5), [7, 6], [3, 3], [1, 1], [1, 1], [(1, 1), (1, 1)], 1),
    'picture_halved': ((1, 3, 4), [8, 10], [3, 3], [2, 2], [1, 1], [(0, 1), (0, 1)], 1),
    'picture_uneven': ((1, 4, 6), [9, 11], [3, 2], [2, 3], [1, 2], [(2, 0), (1, 3)], 2),
    'picture_dilated': ((1, 2, 3), [10, 9], [3, 3], [1, 2], [3, 2], [(3, 1), (0, 2)], 1),
    'picture_depthwise': ((2, 6, 6), [6, 7], [3, 3], [2, 1], [1, 1], [(1, 0), (2, 1)], 6),
    'picture_pointwise': ((2, 5, 7), [5, 6], [1, 1], [1, 1], [1, 1], [(0, 0), (0, 0)], 1),
    'picture_more_zeros_than_filter': ((1, 2, 3), [4, 5], [2, 2], [1, 2], [1, 1], [(3, 0), (0, 4)], 1),
    'picture_winograd': ((1, 16, 20), [18, 17], [3, 3], [1, 1], [1, 1], [(1, 1), (0, 1)], 1),
}


def main(out):
    gen = generator(SEED)
    inputs, outputs = {}, {}
    for name, ((n, c, k), extents, kernel, stride, dilation, padding, groups) in CASES.items():
        x = torch.randn([n, c, *extents], generator=gen)
        weight = torch.randn([k, c // groups, *kernel], generator=gen) * 0.5
        bias = torch.randn([k], generator=gen)
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        conv = F.conv1d if len(extents) == 1 else F.conv2d
        # F.pad counts axes from the last.
        padded = F.pad(leaves[0], [zeros for axis in reversed(padding) for zeros in axis])
        y = conv(padded, leaves[1], leaves[2], stride=stride, dilation=dilation, groups=groups)
        grad = torch.randn(y.shape, generator=gen)
        grads = torch.autograd.grad(y, leaves, grad.double())
        inputs |= {f'{name}.x': x, f'{name}.weight': weight, f'{name}.bias': bias, f'{name}.grad': grad}
        outputs |= {f'{name}.y': y} | {f'{name}.{what}': g for what, g in zip(('x', 'weight', 'bias'), grads)}
    keys = ('stride', 'dilation', 'padding', 'groups')
    config = {name: dict(zip(keys, case[3:])) for name, case in CASES.items()}
    save(f'{out}/conv-gradients.safetensors', __file__, SEED, config, {}, inputs, outputs)


main(sys.argv[1])
