// Products of 64 queries with the keys and the values of a plane, by a group of four warps. As attention/wgmma.cuh, whose
// operands these are, in other widths.

#pragma once

#include "attention/wgmma.cuh"

// c = a b, or c += a b if `add`: for b [16, 2 N] of `panel_columns`, N sums each lane.
template <typename T, int N>
__device__ __forceinline__ void multiply_by_keys(float (&c)[N], const uint32_t (&a)[4], uint64_t b, int add);

// The same for b [16, 64] of `panel_rows`.
template <typename T>
__device__ __forceinline__ void multiply_by_values(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add);

// NAME for b of so many COLUMNS, of `panel_rows` if ROWS is 1. Operands are the SUMS sums of a lane, then a, b and `add`, whose
// places these are.
#define PRODUCT(NAME, T, ELEMENT, COLUMNS, SUMS, A, B, ADD, ROWS) \
    template <> \
    __device__ __forceinline__ void NAME<T>(float (&c)[SUMS], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, " ADD ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_##SUMS \
            "}, {" A "}, " B ", p, 1, 1, " #ROWS ";\n" \
            "}\n" \
            : SUMS_##SUMS(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

#define PRODUCTS(T, ELEMENT) \
    PRODUCT(multiply_by_keys, T, ELEMENT, 64, 32, "%32, %33, %34, %35", "%36", "%37", 0) \
    PRODUCT(multiply_by_keys, T, ELEMENT, 96, 48, "%48, %49, %50, %51", "%52", "%53", 0) \
    PRODUCT(multiply_by_keys, T, ELEMENT, 104, 52, "%52, %53, %54, %55", "%56", "%57", 0) \
    PRODUCT(multiply_by_keys, T, ELEMENT, 112, 56, "%56, %57, %58, %59", "%60", "%61", 0) \
    PRODUCT(multiply_by_values, T, ELEMENT, 64, 32, "%32, %33, %34, %35", "%36", "%37", 1)

PRODUCTS(__nv_bfloat16, "bf16")
PRODUCTS(__half, "f16")

#undef PRODUCTS
#undef PRODUCT
