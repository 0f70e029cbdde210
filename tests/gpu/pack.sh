#!/usr/bin/env bash
# Builds the GPU suites, `ratios` and `tallow` with feature `cuda` and packs them for a machine with a GPU, which needs
# this repository and no toolchain: tests/gpu/run.sh runs them there. No GPU or driver is needed here, but `nvcc` is
# (.ci/cuda-toolkit.sh lays one out).
#
# Usage: tests/gpu/pack.sh [FILE]     default carry/gpu.tar.xz, which git ignores
# Environment: PROFILE (dev or release, default release), CARGO_TARGET_DIR, CUDA_COMPUTE_CAP
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1:-carry/gpu.tar.xz}
limit=$((60 << 20))
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Cargo reports each executable; they go under the names of their targets.
cargo build --workspace --locked --features tallow/cuda,benches/cuda,tests/cuda --profile "${PROFILE:-release}" \
  --test 'gpu_*' --bin ratios --bin tallow --message-format json-render-diagnostics |
  python3 -c '
import json, shutil, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable"):
        shutil.copy(message["executable"], sys.argv[1] + "/" + message["target"]["name"])
' "$folder"

cc -O1 -shared -fPIC -o "$folder/kernels.so" benches/profile/kernels.c -ldl
strip "$folder"/*
git describe --always --dirty=+ --exclude '*' --abbrev=12 > "$folder/commit"
mkdir -p "$(dirname "$out")"
# One dictionary over all: the programs hold the same kernels. A fast search: the time goes into the first of them.
tar -C "$folder" --sort=name --owner=0 --group=0 -cf - . | xz -T1 --lzma2=preset=2,dict=192MiB > "$out"
xz -t "$out"
ls -l "$folder"
size=$(stat -c %s "$out")
echo "$out: $((size >> 20)) MiB"
if [ "$size" -gt "$limit" ]; then
  echo "more than $((limit >> 20)) MiB" >&2
  exit 1
fi
