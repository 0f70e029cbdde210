// Sums over the threads of a row, in an order that the shape alone decides.

#pragma once

#include "cuda/common.cuh"

constexpr int WARP = 32;

// Sum over `lanes` neighbouring lanes of a warp, a power of two; each of them gets it. All lanes of the warp take part.
template <typename S> __device__ __forceinline__ S sum_lanes(S value, uint32_t lanes) {
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, distance);
    }
    return value;
}

// Sum over the threads of one row: `lanes` of a warp, or the whole block if they are more than a warp. `shared` has a
// place for every warp. Every thread of the row gets the sum; all threads of the block take part.
template <typename S> __device__ __forceinline__ S sum_row(S value, uint32_t lanes, S* shared) {
    if (lanes <= WARP) return sum_lanes(value, lanes);
    value = sum_lanes(value, WARP);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = value;
    __syncthreads();
    value = shared[0];
    for (uint32_t warp = 1; warp < blockDim.x / WARP; ++warp) value += shared[warp];
    return value;
}
