// RMS norm over the channels of each position, with SiLU, behind copies of the frames before:
//
//     y[n, p] = past[n, p]                                                          for p < lead
//     y[n, lead + p] = silu(x[n, p] / max(|x[n, p]|, 1e-12) * sqrt(C) * gamma)      for p < extent
//     tail[n, p - (extent - kept)] = y[n, lead + p]                                 for the last `kept` p
//
// Reference: Wan-Video/Wan2.1, wan/modules/vae.py, RMS_norm; channels.rs is the same on the CPU.
//
// channel_rms_norm_last_K_*: channels-last, x [N, extent, C], past [N, lead, C], y [N, lead + extent, C], packed,
//     16-byte aligned, C a multiple of 16 bytes and at most K * lanes of them. A row of C channels belongs to `lanes`
//     neighbouring lanes of a warp, a power of two; each holds K vectors of 16 bytes of it in registers between the sum
//     and the scaling. Memory is read once and written once; only these kernels write a
//     tail.
// channel_rms_norm_last_any_*: the same for every C and alignment: a warp per row, which is read twice.
// channel_rms_norm_first_*: channels-first, x [N, C, extent], past [N, C, lead], y [N, C, lead + extent], packed. A
//     block takes 32 positions of all channels and reads them twice, the second time from its cache: 32 C elements.
//
// The first `norm_blocks` blocks along x work on rows, the others copy past; images lie along y. Squares are summed in
// f32: within a vector, over the vectors of a lane, over lanes. Shared memory: gamma as f32, 4 * K * 32 vectors, 2 to
// 5 KiB; 1 KiB in the last kernel. Indices have 64 bits.

#include "activation/silu.cuh"
#include "element.cuh"
#include "norm/reduce.cuh"

// `Params` in cuda/channels.rs.
struct Params {
    const void* past;
    const void* x;
    const void* gamma;
    void* out;
    void* tail; // [N, kept, C], used if kept > 0
    uint64_t images;
    // Positions of past and of x in one image.
    uint64_t lead;
    uint64_t extent;
    uint64_t kept;
    uint64_t channels;
    uint32_t norm_blocks;
    uint32_t lanes;
    uint32_t gamma_type;
    uint32_t silu;
};

constexpr int THREADS = 256;

// What x is multiplied by, sqrt(C) / norm. A NaN stays one.
__device__ __forceinline__ float row_factor(float squares, uint64_t channels) {
    const float norm = sqrtf(squares);
    return sqrtf(static_cast<float>(channels)) / (norm < 1e-12f ? 1e-12f : norm);
}

// Copies `count` vectors of past with the blocks that do not normalise.
template <typename T, int N>
__device__ __forceinline__ void copy_past(const T* past, T* out, uint64_t count, uint32_t norm_blocks) {
    const uint64_t step = static_cast<uint64_t>(gridDim.x - norm_blocks) * blockDim.x;
    const uint64_t start = static_cast<uint64_t>(blockIdx.x - norm_blocks) * blockDim.x + threadIdx.x;
    for (uint64_t i = start; i < count; i += step) store_vec<T, N>(out + i * N, load_vec<T, N>(past + i * N));
}

// The same vector, of which the compiler does not know that it is the same: otherwise it keeps the f32 of the sum for
// the scaling, twice the registers of the vector, and half as many rows are on their way at once.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> opaque(Vec<T, N> vec) {
    uint32_t words[sizeof(vec) / 4];
    memcpy(words, &vec, sizeof(vec));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(vec) / 4); ++i) asm volatile("" : "+r"(words[i]));
    memcpy(&vec, words, sizeof(vec));
    return vec;
}

template <typename T, int K> __device__ __forceinline__ void channels_last(const Params& p) {
    constexpr int N = PACK<T>;
    const uint64_t image_out = (p.lead + p.extent) * p.channels;
    if (blockIdx.x >= p.norm_blocks) {
        for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
            const uint64_t count = p.lead * p.channels;
            copy_past<T, N>(static_cast<const T*>(p.past) + n * count, static_cast<T*>(p.out) + n * image_out,
                            count / N, p.norm_blocks);
        }
        return;
    }
    __shared__ alignas(16) float weight[K * WARP * N];
    for (uint32_t c = threadIdx.x; c < p.channels; c += THREADS) weight[c] = load_as_float(p.gamma, p.gamma_type, c);
    __syncthreads();
    const uint32_t lane = threadIdx.x & (p.lanes - 1);
    bool holds[K];
#pragma unroll
    for (int k = 0; k < K; ++k) holds[k] = (k * p.lanes + lane) * N < p.channels;
    const uint32_t rows_per_block = THREADS / p.lanes;
    const uint64_t step = static_cast<uint64_t>(p.norm_blocks) * rows_per_block;
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * rows_per_block + threadIdx.x / p.lanes;
    // Rows of this thread, and of its warp: all lanes stay in the loop as long as one of them has a row.
    const uint64_t warp_first = first - threadIdx.x % WARP / p.lanes;
    const uint32_t mine = first < p.extent ? (p.extent - 1 - first) / step + 1 : 0;
    const uint32_t warp_rows = warp_first < p.extent ? (p.extent - 1 - warp_first) / step + 1 : 0;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        const T* from = static_cast<const T*>(p.x) + (n * p.extent + first) * p.channels + lane * N;
        T* to = static_cast<T*>(p.out) + n * image_out + (p.lead + first) * p.channels + lane * N;
        // Where the row would lie in the tail, which begins at row `extent - kept`.
        int64_t tail_row = static_cast<int64_t>(first) - static_cast<int64_t>(p.extent - p.kept);
        for (uint32_t i = 0; i < warp_rows;
             ++i, from += step * p.channels, to += step * p.channels, tail_row += static_cast<int64_t>(step)) {
            Vec<T, N> row[K] = {};
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (holds[k] && i < mine) row[k] = load_vec<T, N>(from + k * p.lanes * N);
            }
            const float factor = row_factor(sum_lanes(sum_squares(row), p.lanes), p.channels);
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!holds[k] || i >= mine) continue;
                float values[N];
                widen_all(opaque(row[k]), values);
#pragma unroll
                for (int j = 0; j < N; ++j) values[j] = values[j] * factor * weight[(k * p.lanes + lane) * N + j];
                if (p.silu) {
#pragma unroll
                    for (int j = 0; j < N; ++j) values[j] = silu<T>(values[j]);
                }
                const Vec<T, N> result = narrow_all<T>(values);
                store_vec(to + k * p.lanes * N, result);
                if (tail_row >= 0) {
                    T* tail = static_cast<T*>(p.tail) + (n * p.kept + tail_row) * p.channels;
                    store_vec(tail + (k * p.lanes + lane) * N, result);
                }
            }
        }
    }
}

template <typename T> __device__ __forceinline__ void channels_last_any(const Params& p) {
    const uint64_t image_out = (p.lead + p.extent) * p.channels;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        T* out = static_cast<T*>(p.out) + n * image_out;
        if (blockIdx.x >= p.norm_blocks) {
            const uint64_t count = p.lead * p.channels;
            copy_past<T, 1>(static_cast<const T*>(p.past) + n * count, out, count, p.norm_blocks);
            continue;
        }
        const uint32_t lane = threadIdx.x % WARP;
        const uint64_t step = static_cast<uint64_t>(p.norm_blocks) * (THREADS / WARP);
        uint64_t row = static_cast<uint64_t>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
        for (; row < p.extent; row += step) {
            const T* from = static_cast<const T*>(p.x) + (n * p.extent + row) * p.channels;
            T* to = out + (p.lead + row) * p.channels;
            float squares = 0.0f;
            for (uint64_t c = lane; c < p.channels; c += WARP) {
                const float value = widen(from[c]);
                squares = fmaf(value, value, squares);
            }
            const float factor = row_factor(sum_lanes(squares, WARP), p.channels);
            for (uint64_t c = lane; c < p.channels; c += WARP) {
                const float value = widen(from[c]) * factor * load_as_float(p.gamma, p.gamma_type, c);
                to[c] = narrow<T>(p.silu ? silu<T>(value) : value);
            }
        }
    }
}

// Threads that share the channels of a position.
constexpr int SHARES = THREADS / WARP;

template <typename T> __device__ __forceinline__ void channels_first(const Params& p) {
    __shared__ float partial[SHARES][WARP];
    const uint64_t out_extent = p.lead + p.extent;
    if (blockIdx.x >= p.norm_blocks) {
        const T* past = static_cast<const T*>(p.past);
        const uint64_t step = static_cast<uint64_t>(gridDim.y) * THREADS;
        for (uint64_t c = blockIdx.x - p.norm_blocks; c < p.images * p.channels; c += gridDim.x - p.norm_blocks) {
            T* out = static_cast<T*>(p.out) + c * out_extent;
            for (uint64_t i = static_cast<uint64_t>(blockIdx.y) * THREADS + threadIdx.x; i < p.lead; i += step) {
                out[i] = past[c * p.lead + i];
            }
        }
        return;
    }
    const uint32_t share = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        const uint64_t step = static_cast<uint64_t>(p.norm_blocks) * WARP;
        for (uint64_t start = static_cast<uint64_t>(blockIdx.x) * WARP; start < p.extent; start += step) {
            const uint64_t position = start + lane;
            // Threads without a position have no channels either.
            const uint64_t channels = position < p.extent ? p.channels : 0;
            const T* from = static_cast<const T*>(p.x) + n * p.channels * p.extent + position;
            T* to = static_cast<T*>(p.out) + n * p.channels * out_extent + p.lead + position;
            float squares = 0.0f;
#pragma unroll 4
            for (uint64_t c = share; c < channels; c += SHARES) {
                const float value = widen(from[c * p.extent]);
                squares = fmaf(value, value, squares);
            }
            __syncthreads();
            partial[share][lane] = squares;
            __syncthreads();
            squares = 0.0f;
#pragma unroll
            for (int i = 0; i < SHARES; ++i) squares += partial[i][lane];
            const float factor = row_factor(squares, p.channels);
#pragma unroll 4
            for (uint64_t c = share; c < channels; c += SHARES) {
                const float value = widen(from[c * p.extent]) * factor * load_as_float(p.gamma, p.gamma_type, c);
                to[c * out_extent] = narrow<T>(p.silu ? silu<T>(value) : value);
            }
        }
    }
}

#define KERNEL(name, blocks, body)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)                                                      \
        channel_rms_norm_##name(const __grid_constant__ Params p) {                                                    \
        body(p);                                                                                                       \
    }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(last_1_##suffix, 6, (channels_last<T, 1>))                                                                  \
    KERNEL(last_2_##suffix, 6, (channels_last<T, 2>))                                                                  \
    KERNEL(last_3_##suffix, 5, (channels_last<T, 3>))                                                                  \
    KERNEL(last_4_##suffix, 5, (channels_last<T, 4>))                                                                  \
    KERNEL(last_5_##suffix, 4, (channels_last<T, 5>))                                                                  \
    KERNEL(last_any_##suffix, 4, channels_last_any<T>)                                                                 \
    KERNEL(first_##suffix, 4, channels_first<T>)

FOR_EACH_FLOAT(KERNELS)
