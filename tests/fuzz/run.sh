#!/bin/sh
# Fuzzes the safetensors header parser: tests/fuzz/run.sh [SECONDS], default 600.
#
# Works with the pinned stable compiler: libfuzzer-sys brings the fuzzing engine, and LLVM's coverage counters are switched
# on for the two crates that matter (instrument.sh). Finds end up in artifacts/, the grown corpus in corpus/; git ignores
# both. A find becomes a unit test beside the parser.
set -eu
cd "$(dirname "$0")"
seconds=${1:-600}
RUSTC_WRAPPER="$PWD/instrument.sh" cargo build --bin safetensors_header
mkdir -p corpus/safetensors_header artifacts/safetensors_header
exec "${CARGO_TARGET_DIR:-target}/debug/safetensors_header" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
    -dict=safetensors.dict -artifact_prefix=artifacts/safetensors_header/ \
    corpus/safetensors_header seeds/safetensors_header
