// Four images become one of twice the extents; resample/cpu.rs is the same on the CPU.
//
//     y[2 r + a, 2 j + b] = parts[2 a + b][r, j]        for a and b in 0..2
//
// where r runs over the rows of all images, j over the pixels of a row, and a pixel is `pixel` packed elements: all
// channels in channels-last memory, one element in channels-first memory, whose planes are images of their own.
//
// interleave2d_wide_*, interleave2d_1_*: a thread owns one vector of 16 bytes (or an element) of a pixel of all four
// parts;
// interleave2d_pairs_*: pixels of one element, written in pairs. Blocks lie along the pixels of a row (x) and along
// rows (y), in loops over the grid. No shared memory. Indices have 64 bits, those within a row 32.
// The launcher guarantees packed operands, addresses aligned to the access, and at most 2^31 vectors in a row.

#include "cuda/common.cuh"

// `Params` in cuda.rs.
struct Params {
    const void* parts[4];
    void* out;
    // Rows of all images of a part.
    uint64_t rows;
    // Pixels of a row of a part.
    uint64_t width;
    // Vectors of a pixel.
    uint64_t pixel;
};

constexpr int THREADS = 256;

template <typename T, int N> __device__ __forceinline__ void interleave(const Params& p) {
    const uint32_t pixel = p.pixel, width = p.width;
    // Threads along a pixel, and pixels at a time.
    const uint32_t across = pixel < THREADS ? pixel : THREADS, pixels = THREADS / across;
    const uint32_t column = threadIdx.x % across, first = threadIdx.x / across;
    if (first >= pixels) return;
    for (uint64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const uint64_t from_row = row * width * pixel * N;
        T* out = static_cast<T*>(p.out) + row * 4 * width * pixel * N;
        for (uint32_t j = blockIdx.x * pixels + first; j < width; j += gridDim.x * pixels) {
            for (uint32_t vector = column; vector < pixel; vector += across) {
                const uint64_t from = from_row + (static_cast<uint64_t>(j) * pixel + vector) * N;
                Vec<T, N> values[4];
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    values[part] = load_vec<T, N>(static_cast<const T*>(p.parts[part]) + from);
                }
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const uint64_t at = static_cast<uint64_t>(part / 2) * 2 * width + 2 * j + part % 2;
                    store_vec(out + (at * pixel + vector) * N, values[part]);
                }
            }
        }
    }
}

template <typename T> __device__ __forceinline__ void interleave_pairs(const Params& p) {
    const uint64_t width = p.width;
    for (uint64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        T* out = static_cast<T*>(p.out) + row * 4 * width;
        for (uint64_t j = grid_start(); j < width; j += grid_step()) {
#pragma unroll
            for (int a = 0; a < 2; ++a) {
                const Vec<T, 2> pair = {{static_cast<const T*>(p.parts[2 * a])[row * width + j],
                                         static_cast<const T*>(p.parts[2 * a + 1])[row * width + j]}};
                store_vec(out + 2 * (a * width + j), pair);
            }
        }
    }
}

#define KERNEL(name, body)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) interleave2d_##name(const __grid_constant__ Params p) {      \
        body(p);                                                                                                       \
    }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(wide_##suffix, (interleave<T, PACK<T>>))                                                                    \
    KERNEL(1_##suffix, (interleave<T, 1>))                                                                             \
    KERNEL(pairs_##suffix, interleave_pairs<T>)

FOR_EACH_FLOAT(KERNELS)
