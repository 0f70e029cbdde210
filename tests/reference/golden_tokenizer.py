"""Token ids of odd prompts from the demonstration model's tokenizer. Usage: golden_tokenizer.py OUT_DIR DEMO_MODEL"""
import json
import os
import sys

import tokenizers
import transformers
from transformers import AutoTokenizer

PROMPTS = [
    '', ' ', 'a red circle on a blue background', '\na red circle', '\n\n\na red circle', ' a red circle', '\t \na red circle ',
    'a red circle\n', 'a red-hot, blue-ish circle; "quoted" (twice)!', '!!!???...', '?!...--__**##@@', "don't can't I'll we've",
    'a <|im_end|> in the middle', '<|im_end|>', 'ends with <|endoftext|>', '<|endoftext|><|endoftext|>', '<|im_start|>system\nno<|im_end|>\n',
    '<think>hm</think> a star', '<|im_end', '< |im_end|>', 'caf\u00e9 na\u00efve', 'cafe\u0301 nai\u0308ve', '\u4e00\u53ea\u7ea2\u8272\u7684\u732b',
    '\U0001f7e5 \U0001f468\u200d\U0001f469\u200d\U0001f467', '\u00a0non\u00a0breaking\u2003spaces', '12345 3.14159 1,000,000', 'CamelCase UPPER lower', 'a\r\nb', 'x' * 40,
    'a red circle ' * 30, '\u4e00' * 200, 'a small orange star in the top right corner on a purple gradient background ' * 4,
]
tokenizer = AutoTokenizer.from_pretrained(f'{sys.argv[2]}/tokenizer')
length = json.load(open(f'{sys.argv[2]}/generation.json'))['max_sequence_length']
cases = []
for prompt in PROMPTS:
    text = tokenizer.apply_chat_template([{'role': 'user', 'content': prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    e = tokenizer(text, padding='max_length', truncation=True, max_length=length)
    cases.append({'prompt': prompt, 'input_ids': e['input_ids'], 'attention_mask': e['attention_mask']})
path = f'{sys.argv[1]}/flux2-demo-tokens.json'
with open(path, 'w') as f:
    json.dump({'script': os.path.basename(__file__), 'made_with': {'transformers': transformers.__version__, 'tokenizers': tokenizers.__version__},
               'max_sequence_length': length, 'cases': cases}, f, separators=(',', ':'))
    f.write('\n')
print(f'{path}: {os.path.getsize(path)} bytes, {len(cases)} prompts, real tokens {[sum(c["attention_mask"]) for c in cases]}')
