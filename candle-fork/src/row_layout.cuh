// Where the rows of an operand lie: `RowLayout` in row_layout.rs.

#pragma once

#include "cuda/common.cuh"

// Row r begins at element (r / inner) * outer_pitch + (r % inner) * inner_pitch.
struct RowLayout {
    uint64_t inner;
    uint64_t outer_pitch;
    uint64_t inner_pitch;

    __device__ __forceinline__ uint64_t start(uint64_t row) const {
        return inner == 1 ? row * outer_pitch : row / inner * outer_pitch + row % inner * inner_pitch;
    }
};
