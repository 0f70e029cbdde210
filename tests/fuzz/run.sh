#!/bin/sh
# Fuzzes what is read from files: tests/fuzz/run.sh [SECONDS [TARGET..]], default 600 seconds for each of
# safetensors_header, gguf, quant_marker and pth.
#
# Works with the pinned stable compiler: libfuzzer-sys brings the fuzzing engine, and LLVM's coverage counters are switched
# on for the crates that matter (instrument.sh). Finds end up in artifacts/, the grown corpus in corpus/; git ignores
# both. A find becomes a unit test beside the parser.
set -eu
cd "$(dirname "$0")"
seconds=${1:-600}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- safetensors_header gguf quant_marker pth
for target; do
    RUSTC_WRAPPER="$PWD/instrument.sh" cargo build --bin "$target"
    mkdir -p "corpus/$target" "artifacts/$target"
    "${CARGO_TARGET_DIR:-target}/debug/$target" \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
        -dict="$target.dict" -artifact_prefix="artifacts/$target/" "corpus/$target" "seeds/$target"
done
