#!/bin/sh
# Makes every golden again, in a virtual environment with requirements.txt installed. Usage: make_goldens.sh [OUT_DIR]
# The pipeline goldens cost a few seconds, the blocks of klein 4B a minute; everything runs on the CPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../goldens}
demo=$here/../models/flux2-demo
wan_demo=$here/../models/wan-vae-demo
ltx_demo=$here/../models/ltx-demo
export CUDA_VISIBLE_DEVICES=
mkdir -p "$out"
cd "$here"
python golden_conv_gradients.py "$out"
python golden_transformer.py "$out"
python golden_klein_blocks.py "$out"
python golden_text_encoder.py "$out"
python golden_vae.py "$out" "$demo"
python golden_tokenizer.py "$out" "$demo"
python golden_flux2.py "$demo" "$out/flux2-a.safetensors" 'a red circle on a blue background' 7 128 128 4
python golden_flux2.py "$demo" "$out/flux2-b.safetensors" 'a green triangle to the left of a pink heart on a white background' 11 128 128 4
python golden_flux2.py "$demo" "$out/flux2-c.safetensors" 'a large yellow star at the top, black background' 3 96 160 6
python wan_demo.py "$wan_demo" "$out/wan-a.safetensors" 1 9 64 64
python wan_demo.py "$wan_demo" "$out/wan-b.safetensors" 2 1 64 64
python wan_demo.py "$wan_demo" "$out/wan-c.safetensors" 3 13 48 80
python wan_goldens.py "$out"
python golden_ltx_conv.py "$out"
python golden_ltx_diffusion.py "$out"
python ltx_demo.py "$ltx_demo" "$ltx_demo.latent" "$out/ltx-demo.safetensors" 7
python wan_checkpoints.py "$out" "$wan_demo"
python kitchen_golden.py "$out"
python gguf_types.py "$out"
