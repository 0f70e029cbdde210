"""Goldens of a tiny random Qwen3 encoder: every layer, and taps with and without pad rows. Usage: golden_text_encoder.py OUT_DIR"""
import sys

import torch
from transformers import Qwen3Config, Qwen3Model

from golden_file import generator, published, randomize, save

SEED = 201
# Six query heads on two key/value heads; the query width (60) is not the hidden size (44).
CONFIG = dict(vocab_size=37, hidden_size=44, intermediate_size=70, num_hidden_layers=5, num_attention_heads=6,
              num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-6, max_position_embeddings=64, tie_word_embeddings=True,
              rope_theta=1e6)
TAPS = (1, 2, 4)  # below the layer count: the last hidden state alone is taken after the final norm
LENGTH = 13
REAL = {'padded': 5, 'one': 1, 'full': LENGTH}


def scale(name):
    """Small streams, so that the eps of the norms shows."""
    return 0.1 * CONFIG['hidden_size'] ** 0.5 if name.startswith('embed_tokens') else 1.0


gen = generator(SEED)
model = randomize(Qwen3Model(Qwen3Config(**CONFIG)), gen, scale)
inputs, outputs = {}, {}
for case, n in REAL.items():
    input_ids = torch.randint(1, CONFIG['vocab_size'], (1, LENGTH), generator=gen)
    mask = (torch.arange(LENGTH) < n).long()[None]
    input_ids = input_ids * mask  # the pad token is 0
    states = model(input_ids=input_ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    inputs |= {f'{case}.input_ids': input_ids.int(), f'{case}.attention_mask': mask.int()}
    outputs[f'{case}.prompt_embeds'] = torch.cat([states[k] for k in TAPS], -1)
    if case == 'padded':  # layer by layer, real and pad rows; the last state is not one of a layer
        outputs |= {f'hidden_states.{k}': state for k, state in enumerate(states[:-1])}
save(f'{sys.argv[1]}/qwen3-encoder.safetensors', __file__, SEED, published(model), model.state_dict(), inputs, outputs,
     text_encoder_out_layers=str(list(TAPS)))
