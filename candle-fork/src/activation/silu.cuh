// SiLU in f32, the device side of exp.rs.

#pragma once

#include "cuda/common.cuh"

// 2^x; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / (1 + exp(-x)), to be rounded to T.
//
// Both signs use h = exp(-|x| / 2): positive x gives x / (1 + h^2), negative x gives x h^2 / (1 + h^2) with one factor
// h applied last. The textbook form overflows in exp(-x) at x = -88.7, where the result is still 3e-37.
// For halves exponential and division are the approximate ones: within 2e-6 (relative) for |x| <= 20 and 1e-5 for |x|
// <= 100, less than a hundredth of what rounding to f16 costs.
template <typename T> __device__ __forceinline__ float silu(float x) {
    if constexpr (sizeof(T) == 4) {
        const float h = expf(-0.5f * fabsf(x));
        const float first = x < 0.0f ? h : 1.0f;
        return x * first / (1.0f + h * h) * first;
    } else {
        constexpr float HALF_LOG2_E = 0.72134752f;
        const float h = exp2_approximate(-HALF_LOG2_E * fabsf(x));
        const float first = x < 0.0f ? h : 1.0f;
        return __fdividef(x * first, fmaf(h, h, 1.0f)) * first;
    }
}
