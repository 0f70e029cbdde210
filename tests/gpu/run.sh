#!/usr/bin/env bash
# Runs the packed GPU suites and the GPU figures on a machine with a GPU, from the root of the repository.
#
# Usage: tests/gpu/run.sh OUT [PART..]
#   parts: doctor smoke ops attention neighborhood projection conv backward policy fallback convrot wan ltx_conv ltx_diffusion
#          flux2 flux2_blocks stages convs ratios-convrot load na3d ltx-conv ltx-diffusion wan21 wan22 flux2-step flux2-vae
#          flux2-text flux2-picture (all of these if none is named),
#          flux2-step-9b, ltx-diffusion-704, ltx-diffusion-1088, flux2-ops (a table of the ops of a step),
#          {flux2-step,flux2-vae,flux2-text,ltx-conv,ltx-diffusion}-kernels (lists of kernels),
#          memcheck-SUITE for every suite (slow)
# OUT gets gpu.log (everything), summary.txt (the table that is printed last), h200.csv (the record, brought up to date), and
# PART.md for each list of kernels.
# Environment:
#   PACK       the archive, default carry/gpu.tar.xz
#   CUDNN      file or folder of cuDNN, 9.15 or later; default: the one that PYTHON has
#   OLD_CUDNN  one that is wrong for video, 9.8 to 9.14; default: the one that the system's loader finds
#   CUDA_LIBS  folders of libcublas and its like; default: those that PYTHON has, then /usr/local/cuda/lib64
#   PYTHON     default python3; with torch, diffusers and comfy-kitchen it is the peer of the figures
#   LIMIT      seconds for each part, default 600
#   RATIOS     more arguments for `ratios`, for example --compiled-peer
#   GPU_SEED   seed of the inputs; default: a fresh one for each suite
set -uo pipefail

out=${1:?usage: tests/gpu/run.sh OUT [PART..]}
shift
[ $# -gt 0 ] || set -- doctor smoke ops attention neighborhood projection conv backward policy fallback convrot wan ltx_conv \
  ltx_diffusion flux2 flux2_blocks stages convs ratios-convrot load na3d ltx-conv ltx-diffusion wan21 wan22 flux2-step \
  flux2-vae flux2-text flux2-picture
mkdir -p "$out"
log=$out/gpu.log
python=${PYTHON:-python3}
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
tar -xJf "${PACK:-carry/gpu.tar.xz}" -C "$bin" || exit 1

# Folders of the libraries that come with torch.
packages() {
  "$python" -c 'import glob, os, torch
print("\n".join(sorted(glob.glob(os.path.join(os.path.dirname(torch.__path__[0]), "nvidia", "*", "lib")))))' 2>/dev/null
}
libs=${CUDA_LIBS:-$(packages | grep -v cudnn | paste -sd:)}
export LD_LIBRARY_PATH=$libs:/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}:/usr/local/nvidia/lib64
TALLOW_CUDNN=${CUDNN:-$(packages | grep cudnn | head -1)}
if [ -n "$TALLOW_CUDNN" ]; then export TALLOW_CUDNN; else unset TALLOW_CUDNN; fi
export OLD_CUDNN=${OLD_CUDNN:-$(ldconfig -p 2>/dev/null | awk '/libcudnn\.so\.9/ { print $NF; exit }')}
export REQUIRE_CUDA=${REQUIRE_CUDA:-1}
export TALLOW_COMMIT=${TALLOW_COMMIT:-$(cat "$bin/commit")}

[ ! -f docs/perf/h200.csv ] || cp docs/perf/h200.csv "$out/h200.csv"
ratios=("$bin/ratios" --csv "$out/h200.csv")
if "$python" -c 'import diffusers, safetensors, torch' 2>/dev/null; then
  ratios+=(--python "$(command -v "$python")")
fi
read -ra more <<< "${RATIOS:-}"

{
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader
  echo "commit $TALLOW_COMMIT, cudnn ${TALLOW_CUDNN:-by search}, old cudnn ${OLD_CUDNN:-none}"
} 2>&1 | tee "$log"

summary=()
failed=0
for part in "$@"; do
  case $part in
    doctor) command=("$bin/tallow" doctor) ;;
    smoke | ops | attention | neighborhood | projection | conv | backward | policy | fallback | convrot | wan | ltx_conv | \
      ltx_diffusion | flux2 | flux2_blocks | stages)
      command=("$bin/gpu_$part" --nocapture)
      ;;
    flux2-*-kernels | ltx-*-kernels)
      # The driver loads the list into the program; see benches/profile/kernels.c.
      kernels=$bin/kernels.so
      [ -f "$kernels" ] || cc -O1 -shared -fPIC -o "$kernels" benches/profile/kernels.c -ldl
      title="$part, MOLD_ATTENTION=${MOLD_ATTENTION:-} MOLD_CONV=${MOLD_CONV:-}"
      command=(env CUDA_INJECTION64_PATH="$kernels" KERNEL_RUNS=5 KERNEL_TABLE="$out/$part.md" KERNEL_TITLE="$title"
        "$bin/ratios" "gpu-$part")
      ;;
    convs | load | na3d | ltx-* | wan21 | wan22 | flux2-*) command=("${ratios[@]}" ${more[@]+"${more[@]}"} "gpu-$part") ;;
    ratios-convrot) command=("${ratios[@]}" ${more[@]+"${more[@]}"} gpu-convrot) ;;
    memcheck-*) command=(compute-sanitizer --tool memcheck --error-exitcode 99 "$bin/gpu_${part#memcheck-}" --nocapture --test-threads=1) ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
  echo "== $part" | tee -a "$log"
  start=$SECONDS
  timeout -k 10 "${LIMIT:-600}" "${command[@]}" > "$bin/said" 2>&1
  status=$?
  cat "$bin/said" >> "$log"
  tail -n 60 "$bin/said"
  result=ok
  [ $status -eq 0 ] || { result="FAILED ($status)"; failed=1; }
  summary+=("$(printf '%-16s %-14s %4d s' "$part" "$result" $((SECONDS - start)))")
done
echo "== summary"
printf '%s\n' "${summary[@]}" | tee "$out/summary.txt"
exit $failed
