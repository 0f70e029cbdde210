"""Names of the Wan VAEs' tensors in the two layouts, from the modules' places in the two implementations."""
import re

MODULES = [  # inside of a residual block
    ('norm1.gamma', 'residual.0.gamma'),
    ('conv1.', 'residual.2.'),
    ('norm2.gamma', 'residual.3.gamma'),
    ('conv2.', 'residual.6.'),
    ('conv_shortcut.', 'shortcut.'),
]
PLACES = [  # outside of the stages
    (r'quant_conv\.', 'conv1.'),
    (r'post_quant_conv\.', 'conv2.'),
    (r'(encoder|decoder)\.conv_in\.', r'\1.conv1.'),
    (r'(encoder|decoder)\.norm_out\.', r'\1.head.0.'),
    (r'(encoder|decoder)\.conv_out\.', r'\1.head.2.'),
    (r'(encoder|decoder)\.mid_block\.resnets\.0\.', r'\1.middle.0.'),
    (r'(encoder|decoder)\.mid_block\.attentions\.0\.', r'\1.middle.1.'),
    (r'(encoder|decoder)\.mid_block\.resnets\.1\.', r'\1.middle.2.'),
]


def original(name, blocks, nested):
    """The name in the original code of a diffusers name, for `blocks` residual blocks per encoder stage."""
    name = re.sub(r'^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.', r'encoder.downsamples.\1.downsamples.\2.', name)
    name = re.sub(r'^encoder\.down_blocks\.(\d+)\.downsampler\.', rf'encoder.downsamples.\1.downsamples.{blocks}.', name)
    name = re.sub(r'^encoder\.down_blocks\.(\d+)\.', r'encoder.downsamples.\1.', name)  # one list for all stages

    def up(match):
        stage, index = int(match[1]), blocks + 1 if match[2] is None else int(match[2])
        place = f'{stage}.upsamples.{index}' if nested else f'{stage * (blocks + 2) + index}'
        return f'decoder.upsamples.{place}.'

    name = re.sub(r'^decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0|upsampler)\.', up, name)
    for place, there in PLACES:
        name = re.sub('^' + place, there, name)
    for module, there in MODULES:
        name = re.sub(rf'^((?:encoder|decoder)\.(?:downsamples|upsamples|middle)\.[\d.a-z]*?){re.escape(module)}',
                      lambda m: m[1] + there, name)
    return name


def check(table, blocks, nested):
    """Holds the rules to a table of original name, diffusers name and shape."""
    with open(table) as f:
        rows = [line.rstrip('\n').split('\t') for line in f if not line.startswith('#')]
    for there, here, _ in rows:
        assert original(here, blocks, nested) == there, (here, original(here, blocks, nested), there)
    return [(there, tuple(int(extent) for extent in shape.split(','))) for there, _, shape in rows]
