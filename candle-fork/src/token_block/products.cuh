// Products of a group of four warps with weights in shared memory, in bf16; see attention/wgmma.cuh for fragments, panels and
// when results may be touched. Needs compute capability 9.0 and no other.

#pragma once

#include "attention/wgmma.cuh"

// c += a b: a [64, 16] in registers, b [16, 256] of 256 rows, of `panel_columns`.
__device__ __forceinline__ void multiply_by_256(float (&c)[128], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        PLACES_128
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n"
        "}\n"
        : SUMS_128(c)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
