// Shortcuts without parameters around the stages of a video VAE, added to the stage's result; shortcut.rs is the same
// on the CPU. Reference: Wan-Video/Wan2.2, wan/modules/vae2_2.py, DupUp3D and AvgDown3D.
//
// With F = ft fs fs and the cell (tau, q, r) of a position numbered k = (tau fs + q) fs + r:
//
// dup_up_add_*:    y[n, o, t ft + tau - drop, h fs + q, w fs + r] = main[..] + x[n, (o F + k) / R, t, h, w],
//                      R = b F / a
// avg_down_add_*:  y[n, o, t, h, w] = main[..] + mean over i in o G .. o G + G of
//                      x[n, i / F, t ft + tau - before, h fs + q, w fs + r] with k = i % F, 0 before the first frame,
//                      G = a F / b
//
// for x of a channels and y of b. Sums in f32, rounded once.
//
// *_any_*: y packed, channels-last or channels-first; main and x with any strides. A thread owns an element of y.
// dup_up_add_wide_*: all channels-last and packed, 16-byte vectors; x is read as vectors too if a = b.
// Blocks lie along the pixels of a row of y, with their channels if it is channels-last (x), and along the rows of all
// frames, with the channels otherwise (y), in loops over the grid. No shared memory. Offsets have 64 bits; the launcher
// guarantees that a row of y has fewer than 2^31 elements, and that channels times F are fewer than 2^31.

#include "element.cuh"

// Distances of neighbours along N, C, T, H, W.
struct Strides {
    uint64_t n, c, t, h, w;
};

// `Params` in cuda/shortcut.rs.
struct Params {
    const void* main;
    const void* x;
    void* out;
    Strides main_strides;
    Strides x_strides;
    Strides out_strides;
    uint64_t images;
    // Extents of y.
    uint64_t channels;
    uint64_t frames;
    uint64_t height;
    uint64_t width;
    // Channels of x.
    uint64_t x_channels;
    // Frames dropped by dup_up_add, frames of zeros put before x by avg_down_add.
    uint64_t skip;
    uint32_t ft;
    uint32_t fs;
    // F, and neighbours that share a value (R) or are averaged (G).
    uint32_t cell;
    uint32_t neighbours;
    Divisor by_channels;
    Divisor by_fs;
    Divisor by_cell;
    Divisor by_neighbours;
    // Whether y is channels-last.
    uint32_t last;
    uint32_t unused;
};

constexpr int THREADS = 256;

// The axes of y that a row fixes; `channel` only if y is channels-first.
struct Row {
    uint64_t n, channel, frame, y;

    __device__ __forceinline__ static Row of(const Params& p, uint64_t index) {
        Row row;
        row.y = index % p.height;
        index /= p.height;
        row.frame = index % p.frames;
        index /= p.frames;
        row.channel = p.last ? 0 : index % p.channels;
        row.n = p.last ? index : index / p.channels;
        return row;
    }
};

__device__ __forceinline__ uint64_t rows(const Params& p) {
    return p.images * (p.last ? 1 : p.channels) * p.frames * p.height;
}

__device__ __forceinline__ uint64_t offset(const Strides& s, const Row& row, uint32_t channel, uint32_t column) {
    return row.n * s.n + channel * s.c + row.frame * s.t + row.y * s.h + column * s.w;
}

// What dup_up_add reads for one row of y: a row of x, and the row's part of the cell number.
struct Source {
    uint64_t start;
    uint32_t cell;

    __device__ __forceinline__ static Source of(const Params& p, const Row& row) {
        const uint64_t frame = row.frame + p.skip;
        const uint32_t tau = frame % p.ft, q = row.y % p.fs;
        return {row.n * p.x_strides.n + frame / p.ft * p.x_strides.t + row.y / p.fs * p.x_strides.h,
                (tau * p.fs + q) * p.fs};
    }
};

__device__ __forceinline__ uint32_t source_channel(const Params& p, uint32_t channel, uint32_t cell) {
    return p.by_neighbours.divide(channel * p.cell + cell);
}

// Calls `each(row, channel, column)` for the elements of y that this thread owns.
template <typename Each> __device__ __forceinline__ void for_each_element(const Params& p, const Each& each) {
    const uint32_t elements = p.last ? p.width * p.channels : p.width;
    for (uint64_t index = blockIdx.y; index < rows(p); index += gridDim.y) {
        const Row row = Row::of(p, index);
        for (uint64_t i = grid_start(); i < elements; i += grid_step()) {
            uint32_t channel = row.channel, column = i;
            if (p.last) column = p.by_channels.divide(i, channel);
            each(row, channel, column);
        }
    }
}

template <typename T> __device__ __forceinline__ void dup_up_add(const Params& p) {
    for_each_element(p, [&](const Row& row, uint32_t channel, uint32_t column) {
        const Source source = Source::of(p, row);
        uint32_t r;
        const uint32_t w = p.by_fs.divide(column, r);
        const uint64_t from = source_channel(p, channel, source.cell + r) * p.x_strides.c + w * p.x_strides.w;
        const float sum = widen(static_cast<const T*>(p.main)[offset(p.main_strides, row, channel, column)]) +
                          widen(static_cast<const T*>(p.x)[source.start + from]);
        static_cast<T*>(p.out)[offset(p.out_strides, row, channel, column)] = narrow<T>(sum);
    });
}

template <typename T> __device__ __forceinline__ void dup_up_add_wide(const Params& p) {
    constexpr int N = PACK<T>;
    const uint32_t vectors = p.channels / N;
    const uint32_t across = vectors < THREADS ? vectors : THREADS, columns = THREADS / across;
    const uint32_t first = threadIdx.x / across;
    if (first >= columns) return;
    for (uint64_t index = blockIdx.y; index < rows(p); index += gridDim.y) {
        const Row row = Row::of(p, index);
        const Source source = Source::of(p, row);
        for (uint32_t column = blockIdx.x * columns + first; column < p.width; column += gridDim.x * columns) {
            uint32_t r;
            const uint32_t w = p.by_fs.divide(column, r);
            const T* x = static_cast<const T*>(p.x) + source.start + w * p.x_strides.w;
            for (uint32_t vector = threadIdx.x % across; vector < vectors; vector += across) {
                const uint64_t at = offset(p.out_strides, row, vector * N, column);
                float sum[N], other[N];
                widen_all(load_vec<T, N>(static_cast<const T*>(p.main) + at), sum);
                if (p.x_channels == p.channels) {
                    widen_all(load_vec<T, N>(x + vector * N), other);
                } else {
#pragma unroll
                    for (int i = 0; i < N; ++i) other[i] = widen(x[source_channel(p, vector * N + i, source.cell + r)]);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] += other[i];
                store_vec(static_cast<T*>(p.out) + at, narrow_all<T>(sum));
            }
        }
    }
}

template <typename T> __device__ __forceinline__ void avg_down_add(const Params& p) {
    const float share = 1.0f / p.neighbours;
    for_each_element(p, [&](const Row& row, uint32_t channel, uint32_t column) {
        float sum = 0.0f;
        for (uint32_t g = 0; g < p.neighbours; ++g) {
            uint32_t k, r, q;
            const uint32_t from_channel = p.by_cell.divide(channel * p.neighbours + g, k);
            const uint32_t tau = p.by_fs.divide(p.by_fs.divide(k, r), q);
            const uint64_t frame = row.frame * p.ft + tau;
            if (frame < p.skip) continue;
            const Strides& s = p.x_strides;
            sum += widen(static_cast<const T*>(p.x)[row.n * s.n + from_channel * s.c + (frame - p.skip) * s.t +
                                                    (row.y * p.fs + q) * s.h + (column * p.fs + r) * s.w]);
        }
        const float main = widen(static_cast<const T*>(p.main)[offset(p.main_strides, row, channel, column)]);
        static_cast<T*>(p.out)[offset(p.out_strides, row, channel, column)] = narrow<T>(main + sum * share);
    });
}

#define KERNEL(name, body)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) { body(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(dup_up_add_any_##suffix, dup_up_add<T>)                                                                     \
    KERNEL(dup_up_add_wide_##suffix, dup_up_add_wide<T>)                                                               \
    KERNEL(avg_down_add_any_##suffix, avg_down_add<T>)

FOR_EACH_FLOAT(KERNELS)
