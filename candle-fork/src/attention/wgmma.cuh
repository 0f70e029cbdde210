// Products by a group of four warps, which run on their own while the warps do something else. Needs compute capability
// 9.0 and no other.
//
// A product begins after `products_begin`, is under way after `products_commit` and done after `products_wait`; until then
// neither its sums nor its left operand may be touched. Warp w of the group owns rows 16 w to 16 w + 15, in the fragments of
// mma.cuh: words of A for [16, 16], sums in runs of four for [16, 8].
//
// The right operand lies in shared memory, in panels of 64 elements (128 bytes) by any number of rows, at multiples of 1024
// bytes; run c of 16 bytes of row r is stored at c ^ (r % 8).

#pragma once

#include "attention/mma.cuh"
#include "attention/sums.cuh"

// Orders the registers of products before those that follow.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until no more than PENDING commits are under way.
template <int PENDING = 0> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Shows what this thread wrote to shared memory to the products that follow. Of shared memory alone: a fence of all memory waits
// for this thread's stores to reach the device's.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving uses of sums over a begin or a wait.
template <int N> __device__ __forceinline__ void pin(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Keeps the registers of a left operand until here, and what is made for the next product from being made later.
template <int N> __device__ __forceinline__ void pin(uint32_t (&left)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) asm volatile("" : "+r"(left[i][word])::"memory");
    }
}

// The rows of one panel as columns: element (k, n) is element k of row n.
__device__ __forceinline__ uint64_t panel_columns(uint32_t address) {
    return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(1) << 16 | (address & 0x3ffff) >> 4;
}

// The rows of panels, `distance` bytes from one to the next: element (k, n) is element n % 64 of row k of panel n / 64.
__device__ __forceinline__ uint64_t panel_rows(uint32_t address, uint32_t distance) {
    return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(distance / 16) << 16 | (address & 0x3ffff) >> 4;
}

// c = a b, or c += a b if `add`, for b [16, 128] of `panel_rows`.
template <typename T>
__device__ __forceinline__ void multiply_by_rows(float (&c)[64], const uint32_t (&a)[4], uint64_t b, int add);

#define MULTIPLY_BY_ROWS(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_rows<T>(float (&c)[64], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %69, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_64 \
            "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n" \
            "}\n" \
            : SUMS_64(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

MULTIPLY_BY_ROWS(__nv_bfloat16, "bf16")
MULTIPLY_BY_ROWS(__half, "f16")

#undef MULTIPLY_BY_ROWS

// The same for a left operand [64, 16] in shared memory and b [16, 2 N] for N of 64 or 128, both of `panel_columns`: element
// (m, k) of the left one is element k of row m.
template <typename T, int N>
__device__ __forceinline__ void multiply_by_columns(float (&c)[N], uint64_t a, uint64_t b, int add);

// Operands are the SUMS sums of a lane, then a, b and `add`, whose places these are.
#define MULTIPLY_BY_COLUMNS(T, ELEMENT, COLUMNS, SUMS, A, B, ADD) \
    template <> \
    __device__ __forceinline__ void multiply_by_columns<T>(float (&c)[SUMS], uint64_t a, uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, " ADD ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_##SUMS \
            "}, " A ", " B ", p, 1, 1, 0, 0;\n" \
            "}\n" \
            : SUMS_##SUMS(c) \
            : "l"(a), "l"(b), "r"(add)); \
    }

MULTIPLY_BY_COLUMNS(__nv_bfloat16, "bf16", 128, 64, "%64", "%65", "%66")
MULTIPLY_BY_COLUMNS(__half, "f16", 128, 64, "%64", "%65", "%66")
MULTIPLY_BY_COLUMNS(__nv_bfloat16, "bf16", 256, 128, "%128", "%129", "%130")
MULTIPLY_BY_COLUMNS(__half, "f16", 256, 128, "%128", "%129", "%130")

#undef MULTIPLY_BY_COLUMNS
