// Where the rows of an operand lie: `RowLayout` in row_layout.rs.

#pragma once

#include "cuda/common.cuh"

// Row r begins at element (r / inner) * outer_pitch + (r % inner) * inner_pitch.
struct RowLayout {
    uint64_t inner;
    uint64_t outer_pitch;
    uint64_t inner_pitch;

    __device__ __forceinline__ uint64_t start(uint64_t row) const {
        if (inner == 1) return row * outer_pitch;
        const uint64_t outer = quotient(row, inner);
        return outer * outer_pitch + (row - outer * inner) * inner_pitch;
    }
};
