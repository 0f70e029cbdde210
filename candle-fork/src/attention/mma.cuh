// Products of small matrices by a warp, and what feeds them: asynchronous copies to shared memory, matrices from shared
// memory to registers. Needs compute capability 8.0.
//
// The fragments of a warp, for lane l with group g = l / 4 and t = l % 4:
//   A [16, 16] row-major, 4 words of two elements: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8) and the next columns;
//   B [16, 8], 2 words: rows (2t, 2t + 1) and (2t + 8, 2t + 9) of column g;
//   C [16, 8] in f32: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).

#pragma once

#include "element.cuh"

// d = a b + c; d may be c.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&c)[4]);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                     const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// c += a b
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add<T>(c, a, b0, b1, c);
}

// An address in shared memory as the instructions below take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four matrices [8, 8] of two-byte elements. Lane l gives the address of row l % 8 of matrix l / 8, and gets of matrix i the
// elements (l / 4, 2 (l % 4)) and the next column, as word i.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

// The same, of the transposed matrices.
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

// Begins to copy 16 bytes to shared memory, or zeros if `bytes` is 0 and not 16. Nothing is read then, but the address has to
// be one.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Waits for all copies that this thread began.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 2^x, to two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two values rounded to T, the first in the lower half.
template <typename T> __device__ __forceinline__ uint32_t narrow_pair(float first, float second) {
    const float pair[2] = {first, second};
    const Vec<T, 2> narrow = narrow_all<T>(pair);
    uint32_t word;
    memcpy(&word, &narrow, sizeof(word));
    return word;
}
