// What the kernels of neighborhood attention share: operands, and windows as in window.rs.

#pragma once

#include "attention/mma.cuh"

// [B, T, H, W, heads, D], last axis packed; distances in elements.
struct Field {
    const void* base;
    uint64_t batch;
    uint64_t axes[3]; // T, H, W
    uint64_t head;

    __device__ __forceinline__ uint64_t at(uint32_t t, uint32_t h, uint32_t w) const {
        return t * axes[0] + h * axes[1] + w * axes[2];
    }
};

// Positions of keys along T, H and W, and the keys along each that a query sees: never more than there are positions. Queries
// have the same positions along H and W; along T there are `frames` of them, from `first` on.
struct Windows {
    uint32_t extents[3];
    uint32_t windows[3];
    uint32_t first;
    uint32_t frames;

    // First plane of keys that queries of frame `t` see.
    __device__ __forceinline__ uint32_t start_plane(uint32_t t) const { return start(0, first + t); }

    // First key along `axis` that a query at `i` sees.
    __device__ __forceinline__ uint32_t start(int axis, uint32_t i) const {
        const uint32_t half = windows[axis] / 2;
        return min(i > half ? i - half : 0, extents[axis] - windows[axis]);
    }
};
