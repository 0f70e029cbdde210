// Floats of 8 bits times their scales: w[r, c] = narrow(scale[block of (r, c)] value(codes[r, c])); fp8.rs is the same on
// the CPU.
//
// Codes and w [rows, columns], packed row-major; scales of blocks of block_rows by block_columns, `across` in a row of
// blocks; first_row is the row of the first one in the matrix that the blocks were counted in.
// *_wide_*: a thread owns 16 neighbouring columns of one block at aligned places; *_1_*: one. Blocks of threads lie along the
// columns (x) and the rows (y), in loops over the grid. No shared memory. Offsets have 64 bits.

#include "element.cuh"

// `Params` in cuda.rs.
struct Params {
    const uint8_t* codes;
    const float* scales;
    void* out;
    uint64_t rows;
    uint64_t columns;
    uint64_t block_rows;
    uint64_t block_columns;
    uint64_t across;
    uint64_t first_row;
};

static_assert(sizeof(Params) == 72, "as in cuda.rs");

constexpr int THREADS = 256;

// Both are exact: the upper half of an f16; exponent and mantissa in an f16's place, 2^8 too small because the biases are 7
// and 15.
struct E5m2 {
    static __device__ __forceinline__ float value(uint8_t bits) {
        return widen(__ushort_as_half(static_cast<unsigned short>(bits << 8)));
    }
};

struct E4m3 {
    static __device__ __forceinline__ float value(uint8_t bits) {
        const unsigned short half = (bits & 0x80) << 8 | (bits & 0x7f) << 7;
        return (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : 256.0f * widen(__ushort_as_half(half));
    }
};

template <typename F, typename T, int N> __device__ __forceinline__ void decode(const Params& p) {
    constexpr int PART = N < PACK<T> ? N : PACK<T>;
    for (uint64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const float* scales = p.scales + (p.first_row + row) / p.block_rows * p.across;
        const uint8_t* codes = p.codes + row * p.columns;
        T* out = static_cast<T*>(p.out) + row * p.columns;
        for (uint64_t i = grid_start() * N; i < p.columns; i += grid_step() * N) {
            Vec<uint8_t, N> bytes;
            if constexpr (N == 1) bytes.v[0] = codes[i];
            else bytes = load_vec<uint8_t, N>(codes + i);
            const float scale = scales[i / p.block_columns];
#pragma unroll
            for (int part = 0; part < N; part += PART) {
                float y[PART];
#pragma unroll
                for (int k = 0; k < PART; ++k) y[k] = __fmul_rn(F::value(bytes.v[part + k]), scale);
                store_vec<T, PART>(out + i + part, narrow_all<T>(y));
            }
        }
    }
}

#define KERNEL(name, F, T, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) {                    \
        decode<F, T, N>(p);                                                                                            \
    }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(e4m3_wide_##suffix, E4m3, T, 16)                                                                            \
    KERNEL(e4m3_1_##suffix, E4m3, T, 1)                                                                                \
    KERNEL(e5m2_wide_##suffix, E5m2, T, 16)                                                                            \
    KERNEL(e5m2_1_##suffix, E5m2, T, 1)

FOR_EACH_FLOAT(KERNELS)
