// Whole vectors of elements to f32 and back: the device side of element.rs. Pairs of halves take one instruction each
// way.

#pragma once

#include <type_traits>

#include "cuda/common.cuh"

template <typename T, int N> __device__ __forceinline__ void widen_all(const Vec<T, N>& from, float (&to)[N]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
        uint32_t words[N / 2];
        memcpy(words, &from, sizeof(from));
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            to[2 * i] = __uint_as_float(words[i] << 16);
            to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = widen(from.v[i]);
    }
}

// Each rounded to the nearest, ties to even.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> narrow_all(const float (&from)[N]) {
    Vec<T, N> to;
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
        __nv_bfloat162 pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        memcpy(&to, pairs, sizeof(to));
    } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
        __half2 pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) pairs[i] = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
        memcpy(&to, pairs, sizeof(to));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to.v[i] = narrow<T>(from[i]);
    }
    return to;
}

// N neighbours of a small operand from `index` on; together they begin at a multiple of their size, or of 16 bytes.
template <int N>
__device__ __forceinline__ void load_run_as_float(const void* base, uint32_t type, uint64_t index, float (&to)[N]) {
    if constexpr (N == 1) {
        to[0] = load_as_float(base, type, index);
        return;
    }
    if (type == ELEMENT_F16) {
        widen_all(load_vec<__half, N>(static_cast<const __half*>(base) + index), to);
    } else if (type == ELEMENT_BF16) {
        widen_all(load_vec<__nv_bfloat16, N>(static_cast<const __nv_bfloat16*>(base) + index), to);
    } else {
        constexpr int PART = N < 4 ? N : 4;
#pragma unroll
        for (int i = 0; i < N; i += PART) {
            const Vec<float, PART> part = load_vec<float, PART>(static_cast<const float*>(base) + index + i);
#pragma unroll
            for (int j = 0; j < PART; ++j) to[i + j] = part.v[j];
        }
    }
}
