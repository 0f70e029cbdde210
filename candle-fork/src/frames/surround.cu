// What a convolution sees around a clip, and the norm before it; surround.rs is the same on the CPU.
//
//     y[n, t] = past[n, t]                                                      for t < lead
//     y[n, lead + t, h, w] = z[n, clamp(t - before, 0, T - 1), mirror(h), mirror(w)]
//     z = silu(x / sqrt(mean over channels of x^2 + eps)), or x
//
// with mirror(i) the distance of i - m from 0, or from the other end if i - m lies beyond it: m rows and columns on each
// side are those inside of the border. Reference: Lightricks/LTX-2, packages/ltx-core, model/video_vae.
//
// x [N, T, H, W, C], past [N, lead, H + 2 m, W + 2 m, C], y [N, lead + before + T + after, H + 2 m, W + 2 m, C], packed,
// at 16-byte boundaries, C a multiple of 16 bytes. A position of y belongs to `lanes` neighbouring lanes of a warp, a
// power of two, each of which holds K vectors of 16 bytes (surround_K_*), of which the last may be beyond the channels.
// Positions at a border are normalised again: a few in a hundred. The first `rows_blocks` blocks along x work on
// positions, the others copy past; images lie along y. Squares are summed in f32: within a vector, over the vectors of a
// lane, over lanes. The launcher guarantees fewer than 2^31 positions in an image of y; other offsets have 64 bits. No
// shared memory.

#include "activation/silu.cuh"
#include "element.cuh"
#include "norm/reduce.cuh"

// `Params` in cuda/surround.rs.
struct Params {
    const void* past;
    const void* x;
    void* out;
    uint64_t images;
    uint64_t channels;
    // Positions of past in an image.
    uint64_t lead;
    // Positions of y behind them.
    uint32_t rows;
    uint32_t row_blocks;
    uint32_t lanes;
    // 0: x as it is. 1: the norm. 2: the norm and SiLU.
    uint32_t norm;
    float eps;
    // Extents of x.
    uint32_t frames;
    uint32_t height;
    uint32_t width;
    uint32_t before;
    uint32_t mirrored;
    Divisor by_height; // of y
    Divisor by_width;  // of y
};

constexpr int THREADS = 256;

__device__ __forceinline__ uint32_t mirror(uint32_t i, uint32_t mirrored, uint32_t extent) {
    const int32_t at = abs(static_cast<int32_t>(i) - static_cast<int32_t>(mirrored));
    const int32_t last = static_cast<int32_t>(extent) - 1;
    return at > last ? 2 * last - at : at;
}

// Position of x that position `row` of y, counted from the end of past, is made of.
__device__ __forceinline__ uint32_t source(const Params& p, uint32_t row) {
    uint32_t column, line;
    const uint32_t t = p.by_height.divide(p.by_width.divide(row, column), line);
    const uint32_t frame = min(t > p.before ? t - p.before : 0, p.frames - 1);
    return (frame * p.height + mirror(line, p.mirrored, p.height)) * p.width + mirror(column, p.mirrored, p.width);
}

template <typename T> __device__ __forceinline__ void copy_past(const Params& p, uint64_t image_out) {
    constexpr int N = PACK<T>;
    const uint64_t count = p.lead * p.channels / N;
    const uint64_t step = static_cast<uint64_t>(gridDim.x - p.row_blocks) * THREADS;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        const T* from = static_cast<const T*>(p.past) + n * p.lead * p.channels;
        T* to = static_cast<T*>(p.out) + n * image_out;
        for (uint64_t i = static_cast<uint64_t>(blockIdx.x - p.row_blocks) * THREADS + threadIdx.x; i < count; i += step) {
            store_vec(to + i * N, load_vec<T, N>(from + i * N));
        }
    }
}

template <typename T, int K> __device__ __forceinline__ void surround(const Params& p) {
    constexpr int N = PACK<T>;
    const uint64_t image_in = static_cast<uint64_t>(p.frames) * p.height * p.width * p.channels;
    const uint64_t image_out = (p.lead + p.rows) * p.channels;
    if (blockIdx.x >= p.row_blocks) return copy_past<T>(p, image_out);
    const uint32_t lane = threadIdx.x & (p.lanes - 1);
    bool holds[K];
#pragma unroll
    for (int k = 0; k < K; ++k) holds[k] = (k * p.lanes + lane) * N < p.channels;
    const uint32_t rows_per_block = THREADS / p.lanes, step = p.row_blocks * rows_per_block;
    const uint32_t in_warp = threadIdx.x % WARP / p.lanes;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        const T* x = static_cast<const T*>(p.x) + n * image_in + lane * N;
        T* out = static_cast<T*>(p.out) + n * image_out + p.lead * p.channels + lane * N;
        uint32_t row = blockIdx.x * rows_per_block + threadIdx.x / p.lanes;
        // All lanes of a warp stay in the loop as long as one of them has a row.
        for (; row - in_warp < p.rows; row += step) {
            const bool mine = row < p.rows;
            Vec<T, N> values[K] = {};
            if (mine) {
                const T* from = x + static_cast<uint64_t>(source(p, row)) * p.channels;
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    if (holds[k]) values[k] = load_vec<T, N>(from + k * p.lanes * N);
                }
            }
            float factor = 1.0f;
            if (p.norm) {
                const float squares = sum_lanes(sum_squares(values), p.lanes);
                factor = 1.0f / sqrtf(squares / static_cast<float>(p.channels) + p.eps);
            }
            if (!mine) continue;
            T* to = out + static_cast<uint64_t>(row) * p.channels;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!holds[k]) continue;
                if (p.norm) {
                    float wide[N];
                    widen_all(values[k], wide);
#pragma unroll
                    for (int j = 0; j < N; ++j) wide[j] *= factor;
                    if (p.norm == 2) {
#pragma unroll
                        for (int j = 0; j < N; ++j) wide[j] = silu<T>(wide[j]);
                    }
                    values[k] = narrow_all<T>(wide);
                }
                store_vec(to + k * p.lanes * N, values[k]);
            }
        }
    }
}

#define KERNEL(suffix, T, K)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, K > 4 ? 3 : 5)                                               \
        surround_##K##_##suffix(const __grid_constant__ Params p) {                                                    \
        surround<T, K>(p);                                                                                             \
    }

#define KERNELS(suffix, T) KERNEL(suffix, T, 1) KERNEL(suffix, T, 2) KERNEL(suffix, T, 4) KERNEL(suffix, T, 8)

FOR_EACH_HALF(KERNELS)
