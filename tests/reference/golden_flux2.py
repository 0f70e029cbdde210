"""Golden of one run of the demonstration pipeline: every stage from token ids to the picture.

Usage: golden_flux2.py MODEL OUT.safetensors PROMPT SEED HEIGHT WIDTH STEPS
"""
import json
import sys

import diffusers
import torch
import transformers
from diffusers import Flux2KleinPipeline
from safetensors.torch import save_file

from golden_file import canonical

model, out, prompt = sys.argv[1:4]
seed, height, width, steps = map(int, sys.argv[4:8])
pipe = Flux2KleinPipeline.from_pretrained(model, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
defaults = json.load(open(f'{model}/generation.json'))

text = pipe.tokenizer.apply_chat_template([{'role': 'user', 'content': prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False)
ids = pipe.tokenizer(text, return_tensors='pt', padding='max_length', truncation=True, max_length=defaults['max_sequence_length'])
prompt_embeds, _ = pipe.encode_prompt(prompt=prompt, device='cpu', max_sequence_length=defaults['max_sequence_length'],
                                      text_encoder_out_layers=tuple(defaults['text_encoder_out_layers']))
noise = torch.randn(1, 128, height // 16, width // 16, generator=torch.Generator().manual_seed(seed))
latents = []


def on_step(_pipe, _index, _timestep, state):
    latents.append(state['latents'].clone())
    return {}


image = pipe(prompt_embeds=prompt_embeds, height=height, width=width, num_inference_steps=steps, latents=noise.clone(),
             output_type='pt', callback_on_step_end=on_step).images
tensors = {'input_ids': ids['input_ids'].int(), 'attention_mask': ids['attention_mask'].int(), 'prompt_embeds': prompt_embeds, 'noise': noise,
           'timesteps': pipe.scheduler.timesteps.float(), 'sigmas': pipe.scheduler.sigmas.float(), 'image': image}
tensors |= {f'latents_step_{i}': l for i, l in enumerate(latents)}
save_file({k: v.contiguous() for k, v in tensors.items()}, out, metadata={
    'prompt': prompt, 'seed': str(seed), 'height': str(height), 'width': str(width), 'steps': str(steps), 'image': '(B,3,H,W) in [0,1], f32',
    'made_with': f'diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, CPU f32, script golden_flux2.py'})
canonical(out)
print(f'{out}: {len(latents)} steps, picture {image.min().item():.3f}..{image.max().item():.3f}')
