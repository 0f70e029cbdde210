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

#define KEYS_64(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %37, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_32 \
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n" \
            "}\n" \
            : SUMS_32(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_64(__nv_bfloat16, "bf16")
KEYS_64(__half, "f16")
#undef KEYS_64

#define KEYS_96(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[48], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %53, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n96k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_48 \
            "}, {%48, %49, %50, %51}, %52, p, 1, 1, 0;\n" \
            "}\n" \
            : SUMS_48(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_96(__nv_bfloat16, "bf16")
KEYS_96(__half, "f16")
#undef KEYS_96

#define KEYS_104(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[52], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %57, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n104k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_52 \
            "}, {%52, %53, %54, %55}, %56, p, 1, 1, 0;\n" \
            "}\n" \
            : SUMS_52(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_104(__nv_bfloat16, "bf16")
KEYS_104(__half, "f16")
#undef KEYS_104

#define KEYS_112(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[56], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %61, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n112k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_56 \
            "}, {%56, %57, %58, %59}, %60, p, 1, 1, 0;\n" \
            "}\n" \
            : SUMS_56(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_112(__nv_bfloat16, "bf16")
KEYS_112(__half, "f16")
#undef KEYS_112

#define VALUES_64(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_values<T>(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %37, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" \
            PLACES_32 \
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n" \
            "}\n" \
            : SUMS_32(c) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

VALUES_64(__nv_bfloat16, "bf16")
VALUES_64(__half, "f16")
#undef VALUES_64
