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
