// The transform of ConvRot in shared memory and in registers: `transform` of group.rs, in its order of sums.

#pragma once

#include <stdint.h>

// Elements of shared memory that a block transforms at a time; a multiple of every group.
constexpr int CHUNK = 1024;

// One step: y[d] = sum - 2 x[3 - d].
__device__ __forceinline__ void rotate_4(float& x0, float& x1, float& x2, float& x3) {
    const float sum = __fadd_rn(__fadd_rn(x0, x1), __fadd_rn(x2, x3));
    const float y0 = __fsub_rn(sum, __fadd_rn(x3, x3)), y1 = __fsub_rn(sum, __fadd_rn(x2, x2));
    const float y2 = __fsub_rn(sum, __fadd_rn(x1, x1)), y3 = __fsub_rn(sum, __fadd_rn(x0, x0));
    x0 = y0;
    x1 = y1;
    x2 = y2;
    x3 = y3;
}

// Two rounds over 16 registers.
__device__ __forceinline__ void rotate_16(float (&x)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) rotate_4(x[i], x[i + 1], x[i + 2], x[i + 3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) rotate_4(x[i], x[i + 4], x[i + 8], x[i + 12]);
}

// All rounds of the groups in `count` elements of shared memory, whole groups, after everybody has written his; ends with a
// barrier. `group` is 1 (nothing to do) or a power of 4 up to CHUNK.
__device__ __forceinline__ void rotate_chunk(float* values, int count, uint32_t group) {
    __syncthreads();
    for (uint32_t stride = 1; stride < group; stride *= 4) {
        for (uint32_t i = threadIdx.x; i < uint32_t(count) / 4; i += blockDim.x) {
            float* x = values + i / stride * (4 * stride) + i % stride;
            rotate_4(x[0], x[stride], x[2 * stride], x[3 * stride]);
        }
        __syncthreads();
    }
}
