// The window of a convolution: `Window` in tiles.rs.

#pragma once

#include "cuda/common.cuh"

struct Window {
    int32_t input[3];
    int32_t filter[3];
    int32_t stride[3];
    int32_t dilation[3];
    int32_t padding[3];
    uint32_t channels;
    // Output pixels of an image, of a slice (P x Q), of a line (Q).
    Divisor per_image;
    Divisor per_slice;
    Divisor per_line;
};

// Position along Z, P, Q of a pixel of an image.
__device__ __forceinline__ void position(const Window& w, uint32_t pixel, uint32_t (&at)[3]) {
    at[0] = w.per_slice.divide(pixel, at[1]);
    at[1] = w.per_line.divide(at[1], at[2]);
}

// First tap's position in the input, along D, H, W, of a pixel of an image.
__device__ __forceinline__ void origin(const Window& w, uint32_t pixel, int32_t (&at)[3]) {
    uint32_t output[3];
    position(w, pixel, output);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) at[axis] = int32_t(output[axis]) * w.stride[axis] - w.padding[axis];
}

__device__ __forceinline__ bool inside(int32_t at, int32_t extent) { return uint32_t(at) < uint32_t(extent); }
