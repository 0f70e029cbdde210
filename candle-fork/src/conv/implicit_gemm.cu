// Convolution in half precision as one matrix product whose left operand, the patches, is never written down: tiles of it
// are gathered straight into shared memory.
//
//     out[pixel, k] = sum over tap, c of input[pixel stride + tap dilation - padding, c] weight[k, tap, c] + bias[k]
//                     + residual[pixel, k]
//
// over up to three axes (missing ones have extent 1) and at most 32 taps; 0 outside of the input. Sums in f32, rounded once.
// Layout: input with packed channels, a multiple of 8, other strides multiples of 8 elements; weight [K, taps, C] packed;
// out and residual [.., K] with packed filters, pixels at the strides that they are given.
// Ownership: a block owns 128 pixels by 128 filters, each of its 4 warps 64 by 64. Depth goes by in steps of 64 products, up
// to STAGES of them on their way at a time; the order of the sum depends on nothing but C and the taps. Where 64 divides C
// the taps of 64 channels follow one another, so that neighbouring pixels are found in the near cache again; else the
// channels of a tap do, across its end.
// Shared memory: STAGES steps of both operands, rows of 128 bytes whose 16-byte chunks are permuted by the row (chunk ^ row %
// 8: eight rows of one chunk lie in eight different groups of banks); a table of the block's pixels; one of the taps. The
// result passes through the memory of the steps, so that rows are stored as rows.
// Index width: offsets 64 bits; pixels of all images and tiles below 2^31, extents below 2^30.

#include "attention/mma.cuh"
#include "conv/window.cuh"

// `Params` in implicit_gemm.rs.
struct Params {
    const void* input;
    const void* weight;
    const void* bias;     // may be null
    const void* residual; // may be null; lies as out does
    void* out;
    uint64_t strides[4];     // N, D, H, W, in elements
    uint64_t out_strides[4]; // N, Z, P, Q, in elements
    uint32_t pixels;
    uint32_t filters;
    uint32_t taps;
    uint32_t bias_type;
    // Whether all taps of 64 channels come before the next 64 channels.
    uint32_t taps_inside;
    // Whether rows of the result are stored in accesses of 16 bytes.
    uint32_t packed;
    Window window;
    Divisor filter_tiles;
};

static_assert(sizeof(Params) == 256, "as in implicit_gemm.rs");

constexpr int THREADS = 128;
constexpr int PIXELS = 128, FILTERS = 128, DEPTH = 64, STAGES = 3;
constexpr int CHUNK = 8, CHUNKS = DEPTH / CHUNK;
constexpr int STAGE = (PIXELS + FILTERS) * DEPTH;
// Rows that threads next to one another along the depth load at a time.
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;
// Distance of rows of the result in shared memory, in floats: pairs of eight rows lie in different banks.
constexpr int PITCH = FILTERS + 8;
// Extents of a warp's part, in fragments.
constexpr int TALL = 4, WIDE = 8;

// A pixel of the block: where its first tap lies in the input (its element in the result, at the end), and a bit for each tap
// that lies inside.
struct Pixel {
    int64_t start;
    uint32_t taps;
    uint32_t unused;
};

__device__ __forceinline__ void copy_async_near(uint32_t to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups of copies are on their way.
template <int N> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Element of a chunk of a row in shared memory.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t chunk) { return row * DEPTH + (chunk ^ (row & 7)) * CHUNK; }

__device__ __forceinline__ Pixel pixel_of(const Params& p, uint32_t pixel) {
    Pixel found = {0, 0, 0};
    if (pixel >= p.pixels) return found;
    const Window& w = p.window;
    uint32_t pixel_of_image;
    const uint32_t image = w.per_image.divide(pixel, pixel_of_image);
    int32_t at[3];
    origin(w, pixel_of_image, at);
    found.start = int64_t(image * p.strides[0]);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) found.start += at[axis] * int64_t(p.strides[axis + 1]);
    uint32_t tap = 0;
    for (int32_t t = 0; t < w.filter[0]; ++t) {
        for (int32_t r = 0; r < w.filter[1]; ++r) {
            for (int32_t s = 0; s < w.filter[2]; ++s, ++tap) {
                const bool hit = inside(at[0] + t * w.dilation[0], w.input[0]) &&
                                 inside(at[1] + r * w.dilation[1], w.input[1]) &&
                                 inside(at[2] + s * w.dilation[2], w.input[2]);
                found.taps |= uint32_t(hit) << tap;
            }
        }
    }
    return found;
}

__device__ __forceinline__ int64_t tap_offset(const Params& p, uint32_t tap) {
    const Window& w = p.window;
    const uint32_t slice = w.filter[1] * w.filter[2];
    const uint32_t t = tap / slice, r = tap % slice / w.filter[2], s = tap % w.filter[2];
    return int64_t(t) * w.dilation[0] * int64_t(p.strides[1]) + int64_t(r) * w.dilation[1] * int64_t(p.strides[2]) +
           int64_t(s) * w.dilation[2] * int64_t(p.strides[3]);
}

// Where a pixel of the result lies.
__device__ __forceinline__ int64_t result_of(const Params& p, uint32_t pixel) {
    uint32_t pixel_of_image, at[3];
    const uint32_t image = p.window.per_image.divide(pixel, pixel_of_image);
    position(p.window, pixel_of_image, at);
    return image * p.out_strides[0] + at[0] * p.out_strides[1] + at[1] * p.out_strides[2] + at[2] * p.out_strides[3];
}

// The sums of a warp's part over one step, whose operands begin at `pixels` and `filters`.
template <typename T>
__device__ __forceinline__ void multiply_step(float (&sums)[TALL][WIDE][4], const T* pixels, const T* filters) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t left_row = warp / 2 * 64 + lane % 16, right_row = warp % 2 * 64 + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (uint32_t chunk = 0; chunk < CHUNKS; chunk += 2) {
        uint32_t left[TALL][4], right[WIDE / 2][4];
#pragma unroll
        for (int i = 0; i < TALL; ++i) {
            load_matrices(left[i], shared_address(pixels + place(left_row + i * 16, chunk + lane / 16)));
        }
#pragma unroll
        for (int j = 0; j < WIDE / 2; ++j) {
            load_matrices(right[j], shared_address(filters + place(right_row + j * 16, chunk + lane / 8 % 2)));
        }
#pragma unroll
        for (int i = 0; i < TALL; ++i) {
#pragma unroll
            for (int j = 0; j < WIDE; ++j) {
                multiply_add<T>(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1], sums[i][j]);
            }
        }
    }
}

// Stores the sums of the block, which lie in `staged`, with bias and residual.
template <typename T>
__device__ __forceinline__ void store_tile(const Params& p, const float* staged, const Pixel* pixels, uint32_t first_pixel,
                                           uint32_t first_filter) {
    constexpr uint32_t ACROSS = FILTERS / CHUNK, DOWN = THREADS / ACROSS;
    const uint32_t column = threadIdx.x % ACROSS * CHUNK, filter = first_filter + column;
    const uint32_t count = filter < p.filters ? min(p.filters - filter, uint32_t(CHUNK)) : 0;
    if (count == 0) return;
    float bias[CHUNK] = {};
    if (p.bias) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (i < count) bias[i] = load_as_float(p.bias, p.bias_type, filter + i);
        }
    }
    for (uint32_t row = threadIdx.x / ACROSS; row < PIXELS && first_pixel + row < p.pixels; row += DOWN) {
        float y[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i += 4) {
            const Vec<float, 4> part = load_vec<float, 4>(staged + row * PITCH + column + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) y[i + j] = part.v[j] + bias[i + j];
        }
        const int64_t at = pixels[row].start + filter;
        const T* residual = static_cast<const T*>(p.residual) + at;
        T* out = static_cast<T*>(p.out) + at;
        if (p.packed) {
            if (p.residual) {
                float x[CHUNK];
                widen_all(load_vec<T, CHUNK>(residual), x);
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) y[i] += x[i];
            }
            store_vec<T, CHUNK>(out, narrow_all<T>(y));
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                if (i < count) out[i] = narrow<T>(p.residual ? y[i] + widen(residual[i]) : y[i]);
            }
        }
    }
}

extern __shared__ uint4 shared_memory[];

template <typename T> __device__ __forceinline__ void implicit_gemm(const Params& p) {
    T* tiles = reinterpret_cast<T*>(shared_memory);
    Pixel* pixels = reinterpret_cast<Pixel*>(tiles + STAGES * STAGE);
    int64_t* tap_offsets = reinterpret_cast<int64_t*>(pixels + PIXELS);
    const T* input = static_cast<const T*>(p.input);
    const T* weight = static_cast<const T*>(p.weight);
    const uint32_t channels = p.window.channels, depth = channels * p.taps;

    uint32_t filter_tile;
    const uint32_t first_pixel = p.filter_tiles.divide(blockIdx.x, filter_tile) * PIXELS;
    const uint32_t first_filter = filter_tile * FILTERS;
    // As many threads as pixels.
    pixels[threadIdx.x] = pixel_of(p, first_pixel + threadIdx.x);
    if (threadIdx.x < p.taps) tap_offsets[threadIdx.x] = tap_offset(p, threadIdx.x);
    __syncthreads();

    // What this thread loads next: one chunk of every ROWS_AT_ONCE-th row of both operands.
    const uint32_t chunk = threadIdx.x % CHUNKS, first_row = threadIdx.x / CHUNKS;
    uint32_t tap = 0, channel = chunk * CHUNK;
    if (!p.taps_inside) {
        tap = channel / channels;
        channel -= tap * channels;
    }
    const auto load = [&](uint32_t stage) {
        T* left = tiles + stage * STAGE;
        T* right = left + PIXELS * DEPTH;
        const bool any = tap < p.taps;
        const int64_t from_start = any ? tap_offsets[tap] + channel : 0;
#pragma unroll
        for (uint32_t row = first_row; row < PIXELS; row += ROWS_AT_ONCE) {
            const Pixel pixel = pixels[row];
            const bool hit = any && (pixel.taps >> tap & 1);
            copy_async_near(shared_address(left + place(row, chunk)), input + (hit ? pixel.start + from_start : 0),
                            hit ? 16 : 0);
        }
#pragma unroll
        for (uint32_t row = first_row; row < FILTERS; row += ROWS_AT_ONCE) {
            const uint32_t filter = first_filter + row;
            const bool hit = any && filter < p.filters;
            const uint64_t from = hit ? uint64_t(filter) * depth + tap * channels + channel : 0;
            copy_async(shared_address(right + place(row, chunk)), weight + from, hit ? 16 : 0);
        }
        if (!p.taps_inside) {
            for (channel += DEPTH; channel >= channels; channel -= channels) ++tap;
        } else if (++tap == p.taps) {
            tap = 0;
            channel += DEPTH;
        }
    };

    float sums[TALL][WIDE][4] = {};
    const uint32_t steps = (depth + DEPTH - 1) / DEPTH;
    for (uint32_t step = 0; step < STAGES - 1; ++step) {
        if (step < steps) load(step);
        end_of_group();
    }
    uint32_t now = 0, next = STAGES - 1;
    for (uint32_t step = 0; step < steps; ++step) {
        // This step has arrived, for every thread; and every thread is done with the one before, whose place is loaded next.
        wait_for_groups<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(next);
        end_of_group();
        multiply_step<T>(sums, tiles + now * STAGE, tiles + now * STAGE + PIXELS * DEPTH);
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    wait_for_groups<0>();
    __syncthreads();

    float* staged = reinterpret_cast<float*>(shared_memory);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t top = warp / 2 * 64 + lane / 4, left = warp % 2 * 64 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Vec<float, 2> pair = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
                store_vec(staged + (top + i * 16 + half * 8) * PITCH + left + j * 8, pair);
            }
        }
    }
    if (first_pixel + threadIdx.x < p.pixels) pixels[threadIdx.x].start = result_of(p, first_pixel + threadIdx.x);
    __syncthreads();
    store_tile<T>(p, staged, pixels, first_pixel, first_filter);
}

#define KERNEL(suffix, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        implicit_gemm_##suffix(const __grid_constant__ Params p) {                                                     \
        implicit_gemm<T>(p);                                                                                           \
    }

FOR_EACH_HALF(KERNEL)
