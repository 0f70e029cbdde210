// Whether two matrices of two-byte elements have the same bits; *differ is set to 1 if not, and left alone otherwise.
//
// Rows of `cols` elements at a distance of `pitch` in both. Blocks lie along the columns (x) and along the rows (y), in
// loops over the grid. Indices have 64 bits.

#include "cuda/common.cuh"

// `Params` in choose.rs.
struct Params {
    const uint16_t* a;
    const uint16_t* b;
    uint32_t* differ;
    uint64_t rows;
    uint64_t cols;
    uint64_t pitch;
};

extern "C" __global__ void same_rows_2(const __grid_constant__ Params p) {
    bool differ = false;
    for (uint64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        for (uint64_t i = grid_start(); i < p.cols; i += grid_step()) {
            differ |= p.a[row * p.pitch + i] != p.b[row * p.pitch + i];
        }
    }
    // Every writer writes the same.
    if (differ) *p.differ = 1;
}
