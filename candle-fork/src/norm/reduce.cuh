// Sums over the threads of a row, in an order that the shape alone decides.

#pragma once

#include "cuda/common.cuh"
#include "element.cuh"

constexpr int WARP = 32;

// Sum over `lanes` neighbouring lanes of a warp, a power of two; each of them gets it. All lanes of the warp take part.
template <typename S> __device__ __forceinline__ S sum_lanes(S value, uint32_t lanes) {
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, distance);
    }
    return value;
}

// Sum of the squares of what a lane holds of a row, vector by vector.
template <typename T, int N, int K> __device__ __forceinline__ float sum_squares(const Vec<T, N> (&row)[K]) {
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        float values[N];
        widen_all(row[k], values);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) sum = fmaf(values[j], values[j], sum);
        squares += sum;
    }
    return squares;
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
