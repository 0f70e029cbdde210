// Products of signed bytes and what becomes of their sums; cpu.rs is the same on the CPU.
//
//     y[r, c] = narrow(float(sum_k x[r, k] w[c, k]) (sx[r] sw[c]) + bias[c])
//
// x [rows, depth] and w [columns, depth] of bytes, packed; sx [rows] and sw [columns] or [1]; y with rows `pitch` elements
// apart. Sums are integers, hence exact; both scales are multiplied first; every operation is rounded by itself.
//   scale_*   the sums are there, [rows, columns] packed. A thread owns one vector of columns per step of its loop over rows.
//             *_wide_*: 16 bytes of y at aligned places; *_1_*: single columns.
//   few_*     the products too: for few rows, or extents that a library does not take. A warp owns a column and 8 rows at a
//             time; w is read once for each 8 rows. *_wide_*: 16 bytes at aligned places; *_1_*: single bytes.
// Offsets have 64 bits.

#include "element.cuh"

// `Params` in cuda.rs.
struct Params {
    // For few_*.
    const int8_t* x;
    const int8_t* w;
    // For scale_*.
    const int32_t* sums;
    const float* x_scales;
    const float* w_scales;
    // 0 for none.
    const void* bias;
    void* out;
    uint64_t rows;
    uint64_t columns;
    uint64_t depth;
    uint64_t pitch;
    uint32_t bias_type;
    // Whether each column has a scale.
    uint32_t per_column;
};

static_assert(sizeof(Params) == 96, "as in cuda.rs");

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// Rows that few_* keeps sums of.
constexpr int ROWS = 8;

__device__ __forceinline__ float finish(const Params& p, int32_t sum, float x_scale, float w_scale, uint64_t column) {
    const float y = __fmul_rn(__int2float_rn(sum), __fmul_rn(x_scale, w_scale));
    return p.bias ? __fadd_rn(y, load_as_float(p.bias, p.bias_type, column)) : y;
}

template <typename T, int N> __device__ __forceinline__ void scale(const Params& p) {
    const uint64_t step = grid_step() * N;
    for (uint64_t column = grid_start() * N; column < p.columns; column += step) {
        float w_scales[N];
#pragma unroll
        for (int i = 0; i < N; ++i) w_scales[i] = p.w_scales[p.per_column ? column + i : 0];
        for (uint64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
            const int32_t* sums = p.sums + row * p.columns + column;
            const float x_scale = p.x_scales[row];
            float y[N];
            constexpr int PART = N < 4 ? N : 4;
#pragma unroll
            for (int part = 0; part < N; part += PART) {
                const Vec<int32_t, PART> four = load_vec<int32_t, PART>(sums + part);
#pragma unroll
                for (int i = 0; i < PART; ++i) {
                    y[part + i] = finish(p, four.v[i], x_scale, w_scales[part + i], column + part + i);
                }
            }
            store_vec<T, N>(static_cast<T*>(p.out) + row * p.pitch + column, narrow_all<T>(y));
        }
    }
}

// Sums of ROWS rows from `row` on with one column, in all lanes; rows beyond the last repeat it.
template <bool WIDE> __device__ __forceinline__ void dots(const Params& p, uint64_t row, uint64_t column, int32_t (&sums)[ROWS]) {
    const int lane = threadIdx.x % 32;
    const int8_t* w = p.w + column * p.depth;
    const int8_t* x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        x[r] = p.x + min(row + r, p.rows - 1) * p.depth;
        sums[r] = 0;
    }
    if constexpr (WIDE) {
        for (uint64_t k = lane * 16; k < p.depth; k += 32 * 16) {
            const uint4 b = *reinterpret_cast<const uint4*>(w + k);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const uint4 a = *reinterpret_cast<const uint4*>(x[r] + k);
                sums[r] = __dp4a(int(a.x), int(b.x), sums[r]);
                sums[r] = __dp4a(int(a.y), int(b.y), sums[r]);
                sums[r] = __dp4a(int(a.z), int(b.z), sums[r]);
                sums[r] = __dp4a(int(a.w), int(b.w), sums[r]);
            }
        }
    } else {
        for (uint64_t k = lane; k < p.depth; k += 32) {
            const int32_t b = w[k];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[r] += x[r][k] * b;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = __reduce_add_sync(0xffffffffu, sums[r]);
}

template <typename T, bool WIDE> __device__ __forceinline__ void few(const Params& p) {
    const uint64_t column = uint64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (column >= p.columns) return;
    const float w_scale = p.w_scales[p.per_column ? column : 0];
    for (uint64_t first = uint64_t(blockIdx.y) * ROWS; first < p.rows; first += uint64_t(gridDim.y) * ROWS) {
        int32_t sums[ROWS];
        dots<WIDE>(p, first, column, sums);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint64_t row = first + r;
            if (threadIdx.x % 32 == r && row < p.rows) {
                const float y = finish(p, sums[r], p.x_scales[row], w_scale, column);
                static_cast<T*>(p.out)[row * p.pitch + column] = narrow<T>(y);
            }
        }
    }
}

#define KERNEL(name, ...)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) { __VA_ARGS__(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(scale_wide_##suffix, scale<T, PACK<T>>)                                                                     \
    KERNEL(scale_1_##suffix, scale<T, 1>)                                                                              \
    KERNEL(few_wide_##suffix, few<T, true>)                                                                            \
    KERNEL(few_1_##suffix, few<T, false>)

FOR_EACH_FLOAT(KERNELS)
