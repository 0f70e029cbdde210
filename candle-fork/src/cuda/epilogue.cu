// What follows a matrix product: bias and residual added to its f32 sums, rounded once.
//
// Formula: result[r, c] = round(sums[r, c] + bias[c] + residual[r, c])       epilogue_columns_*
//          result[p, i] = sums[p, i] + bias[p % channels] + residual[p, i]   epilogue_planes_f32
// Layout: sums, residual and result are packed alike. Bias and residual may be absent (null).
// Ownership: columns: a thread owns 16 bytes of the result (or one element where columns or addresses do not allow
// that), in a loop over the grid. Planes: block row y owns planes y, y + rows of the grid, ..; a thread owns elements of
// a plane.
// Index width: columns: 32 bits, the launcher cuts the rows below 2^31 elements; planes: 64 bits.
// Preconditions: with f32, result and sums may be the same memory: a thread reads what it writes before it writes it.

#include "element.cuh"

struct Columns {
    const float* sums;
    const void* bias;
    const void* residual;
    void* result;
    uint32_t elements;
    uint32_t bias_type;
    uint32_t packed;
    uint32_t unused;
    Divisor columns;
};

static_assert(sizeof(Columns) == 64, "as in epilogue.rs");

template <typename T, int N> __device__ void epilogue_columns(const Columns& p) {
    const T* residual = static_cast<const T*>(p.residual);
    T* result = static_cast<T*>(p.result);
    for (int64_t item = grid_start(); item < p.elements / N; item += grid_step()) {
        const uint32_t first = uint32_t(item) * N;
        float y[N];
        constexpr int PART = N < 4 ? N : 4;
#pragma unroll
        for (int i = 0; i < N; i += PART) {
            const Vec<float, PART> part = load_vec<float, PART>(p.sums + first + i);
#pragma unroll
            for (int j = 0; j < PART; ++j) y[i + j] = part.v[j];
        }
        if (p.bias) {
            uint32_t column;
            p.columns.divide(first, column);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += load_as_float(p.bias, p.bias_type, column + i);
        }
        if (residual) {
            float x[N];
            widen_all(load_vec<T, N>(residual + first), x);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] += x[i];
        }
        store_vec<T, N>(result + first, narrow_all<T>(y));
    }
}

#define EPILOGUE_COLUMNS(suffix, T)                                                                                  \
    extern "C" __global__ void epilogue_columns_##suffix(const __grid_constant__ Columns params) {                  \
        if (params.packed) epilogue_columns<T, PACK<T>>(params);                                                     \
        else epilogue_columns<T, 1>(params);                                                                         \
    }

FOR_EACH_FLOAT(EPILOGUE_COLUMNS)

struct Planes {
    float* result;
    const void* bias;
    const float* residual;
    uint64_t planes;
    uint64_t elements;
    uint32_t channels;
    uint32_t bias_type;
};

static_assert(sizeof(Planes) == 48, "as in epilogue.rs");

extern "C" __global__ void epilogue_planes_f32(const __grid_constant__ Planes p) {
    for (uint64_t plane = blockIdx.y; plane < p.planes; plane += gridDim.y) {
        const float bias = p.bias ? load_as_float(p.bias, p.bias_type, plane % p.channels) : 0.0f;
        const uint64_t start = plane * p.elements;
        for (uint64_t i = grid_start(); i < p.elements; i += grid_step()) {
            float y = p.result[start + i] + bias;
            if (p.residual) y += p.residual[start + i];
            p.result[start + i] = y;
        }
    }
}
