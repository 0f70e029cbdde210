#!/bin/sh
# cargo's RUSTC_WRAPPER: compiles our own code with coverage counters for libFuzzer, everything else as usual.
case " $* " in
*" --crate-name weights "* | *" --crate-name safetensors_header "* | *" --crate-name gguf "* | *" --crate-name quant_marker "* | \
    *" --crate-name pth "*)
    exec "$@" -Cpasses=sancov-module -Ccodegen-units=1 \
        -Cllvm-args=-sanitizer-coverage-level=4 \
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
        -Cllvm-args=-sanitizer-coverage-pc-table \
        -Cllvm-args=-sanitizer-coverage-trace-compares
    ;;
*) exec "$@" ;;
esac
