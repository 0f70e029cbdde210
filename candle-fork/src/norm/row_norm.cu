// Norms over the last axis:
//
//     rms_norm:    y[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * scale[i]
//     layer_norm:  y[r, i] = (x[r, i] - mean(x[r])) / sqrt(variance(x[r]) + eps) * (one + scale[b, i]) + shift[b, i]
//
//     gated_norm:  sum[r, i] = x[r, i] + gate[b, i] * y[r, i], rounded, and layer_norm of it
//     added_norm:  sum[r, i] = x[r, i] + y[r, i], rounded, and rms_norm of it
//
// with b = r / rows_per_batch. References: rows.rs is the same on the CPU; black-forest-labs/flux2: src/flux2/model.py.
//
// x (and y): rows of `width` packed elements that lie as their row layout says; results packed.
// A row belongs to `lanes` threads: a power of two up to 32, or the whole block.
// *_K_*: each thread holds K vectors of 16 bytes in registers, so memory is read once; rows are 16-byte aligned and
//     `width` is a multiple of 16 bytes, at most K * lanes of them.
// *_any_*: any width and alignment, a block per row, which is read again from the near cache for each pass.
//
// Squares are summed in f32 by each thread and in f64 over threads. The mean of a layer norm is corrected by the mean
// of the distances from it, so a large mean costs no digits. Shared memory: 8 warps times 8 bytes. Indices have 64
// bits.

#include "element.cuh"
#include "norm/reduce.cuh"
#include "row_layout.cuh"

// `Params` in cuda/rows.rs.
struct Params {
    const void* x;
    // May be null.
    const void* scale;
    const void* shift;
    void* out;
    // Only for gated_norm and added_norm, which has no gate.
    const void* y;
    const void* gate;
    void* sum;
    RowLayout x_rows;
    RowLayout y_rows;
    uint64_t rows;
    uint64_t width;
    uint64_t rows_per_batch;
    double eps;
    uint32_t lanes;
    uint32_t scale_type;
    uint32_t shift_type;
    // Added to the scale: 0, or 1 where a scale is what differs from 1.
    float one;
    uint32_t gate_type;
    uint32_t unused;
};

static_assert(sizeof(Params) == 160, "as in cuda/rows.rs");

constexpr int THREADS = 256;

__device__ __forceinline__ float inverse_root(double mean_square, double eps) {
    return 1.0f / sqrtf(static_cast<float>(mean_square + eps));
}

// What a row is shifted by (in two parts: the f32 nearest to a large mean is too far from it) and multiplied by.
struct Statistics {
    float mean;
    float correction;
    float inverse;
};

// `each(f)` calls f with every value of the row that this thread holds.
template <bool CENTERED, typename Each>
__device__ __forceinline__ Statistics statistics(const Each& each, const Params& p, double* shared) {
    const double count = static_cast<double>(p.width);
    Statistics s = {0.0f, 0.0f, 0.0f};
    if constexpr (CENTERED) {
        float sum = 0.0f;
        each([&](float x) { sum += x; });
        s.mean = static_cast<float>(sum_row(static_cast<double>(sum), p.lanes, shared) / count);
    }
    float distances = 0.0f, squares = 0.0f;
    each([&](float x) {
        const float distance = x - s.mean;
        if constexpr (CENTERED) distances += distance;
        squares = fmaf(distance, distance, squares);
    });
    double variance = sum_row(static_cast<double>(squares), p.lanes, shared) / count;
    if constexpr (CENTERED) {
        const double correction = sum_row(static_cast<double>(distances), p.lanes, shared) / count;
        s.correction = static_cast<float>(correction);
        variance -= correction * correction;
    }
    s.inverse = inverse_root(variance, p.eps);
    return s;
}

__device__ __forceinline__ float scale_at(const Params& p, uint64_t index) {
    return p.one + (p.scale ? load_as_float(p.scale, p.scale_type, index) : 0.0f);
}

__device__ __forceinline__ float shift_at(const Params& p, uint64_t index) {
    return p.shift ? load_as_float(p.shift, p.shift_type, index) : 0.0f;
}

template <bool CENTERED>
__device__ __forceinline__ float normal(float x, const Statistics& s) {
    if constexpr (CENTERED) return (x - s.mean - s.correction) * s.inverse;
    return x * s.inverse;
}

// N factors of y from `index` on: those of the gate, or 1.
template <int N> __device__ __forceinline__ void load_gate(const Params& p, uint64_t index, float (&gate)[N]) {
    if (p.gate) {
        load_run_as_float<N>(p.gate, p.gate_type, index, gate);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) gate[i] = 1.0f;
    }
}

// x + gate * y of N elements, rounded.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> gated(const Vec<T, N>& x, const Vec<T, N>& y, const float (&gate)[N]) {
    float a[N], b[N];
    widen_all(x, a);
    widen_all(y, b);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = fmaf(gate[i], b[i], a[i]);
    return narrow_all<T>(a);
}

template <typename T, bool CENTERED, bool GATED, int K> __device__ __forceinline__ void held(const Params& p) {
    constexpr int N = PACK<T>;
    const T* x = static_cast<const T*>(p.x);
    T* out = static_cast<T*>(p.out);
    __shared__ double shared[THREADS / WARP];
    const uint32_t lane = threadIdx.x & (p.lanes - 1);
    const uint64_t vectors = p.width / N;
    const uint64_t rows_per_block = blockDim.x / p.lanes;
    const uint64_t step = gridDim.x * rows_per_block;
    const uint64_t first = blockIdx.x * rows_per_block + threadIdx.x / p.lanes;
    // All threads that share a warp, or a row, stay in the loop as long as one of them has a row.
    const uint64_t shared_first = p.lanes > WARP ? first : first - threadIdx.x % WARP / p.lanes;
    // Weights of an RMS norm are the same for all rows.
    float weight[CENTERED ? 1 : K][N];
    if constexpr (!CENTERED) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const uint64_t vector = k * p.lanes + lane;
            if (vector >= vectors) continue;
            if (p.scale) load_run_as_float<N>(p.scale, p.scale_type, vector * N, weight[k]);
#pragma unroll
            for (int i = 0; i < N; ++i) weight[k][i] = p.one + (p.scale ? weight[k][i] : 0.0f);
        }
    }
    for (uint64_t offset = 0; shared_first + offset < p.rows; offset += step) {
        const uint64_t row = first + offset;
        const bool inside = row < p.rows;
        Vec<T, N> vectors_held[K];
        bool holds[K];
        const T* from = x + (inside ? p.x_rows.start(row) : 0);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const uint64_t vector = k * p.lanes + lane;
            holds[k] = inside && vector < vectors;
            if (holds[k]) vectors_held[k] = load_vec<T, N>(from + vector * N);
        }
        const uint64_t batch = CENTERED && inside ? quotient(row, p.rows_per_batch) * p.width : 0;
        if constexpr (GATED) {
            const T* other = static_cast<const T*>(p.y) + (inside ? p.y_rows.start(row) : 0);
            Vec<T, N> others[K];
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (holds[k]) others[k] = load_vec<T, N>(other + (k * p.lanes + lane) * N);
            }
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!holds[k]) continue;
                const uint64_t start = (k * p.lanes + lane) * N;
                float gate[N];
                load_gate<N>(p, batch + start, gate);
                vectors_held[k] = gated<T, N>(vectors_held[k], others[k], gate);
                store_vec(static_cast<T*>(p.sum) + row * p.width + start, vectors_held[k]);
            }
        }
        const auto each = [&](auto f) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!holds[k]) continue;
                float values[N];
                widen_all(vectors_held[k], values);
#pragma unroll
                for (int i = 0; i < N; ++i) f(values[i]);
            }
        };
        const Statistics s = statistics<CENTERED>(each, p, shared);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (!holds[k]) continue;
            const uint64_t start = (k * p.lanes + lane) * N;
            float values[N];
            widen_all(vectors_held[k], values);
            if constexpr (CENTERED) {
                float scale[N] = {}, shift[N] = {};
                if (p.scale) load_run_as_float<N>(p.scale, p.scale_type, batch + start, scale);
                if (p.shift) load_run_as_float<N>(p.shift, p.shift_type, batch + start, shift);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    values[i] = fmaf(normal<CENTERED>(values[i], s), p.one + scale[i], shift[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < N; ++i) values[i] = normal<CENTERED>(values[i], s) * weight[k][i];
            }
            store_vec(out + row * p.width + start, narrow_all<T>(values));
        }
    }
}

template <typename T, bool CENTERED, bool GATED> __device__ __forceinline__ void any(const Params& p) {
    const T* x = static_cast<const T*>(p.x);
    T* out = static_cast<T*>(p.out);
    __shared__ double shared[THREADS / WARP];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T* from = x + p.x_rows.start(row);
        const uint64_t batch = CENTERED ? quotient(row, p.rows_per_batch) * p.width : 0;
        if constexpr (GATED) {
            // Each thread reads afterwards what it writes here.
            const T* other = static_cast<const T*>(p.y) + p.y_rows.start(row);
            T* sum = static_cast<T*>(p.sum) + row * p.width;
            for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) {
                float gate[1];
                load_gate<1>(p, batch + i, gate);
                store_vec(sum + i, gated<T, 1>(load_vec<T, 1>(from + i), load_vec<T, 1>(other + i), gate));
            }
            from = sum;
        }
        const auto each = [&](auto f) {
            for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) f(widen(from[i]));
        };
        const Statistics s = statistics<CENTERED>(each, p, shared);
        for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) {
            const float y = normal<CENTERED>(widen(from[i]), s), scale = scale_at(p, batch + i);
            out[row * p.width + i] = narrow<T>(CENTERED ? fmaf(y, scale, shift_at(p, batch + i)) : y * scale);
        }
    }
}

#define KERNEL(name, body)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) { body(p); }

#define NORM(op, suffix, T, CENTERED, GATED)                                                                           \
    KERNEL(op##_1_##suffix, (held<T, CENTERED, GATED, 1>))                                                             \
    KERNEL(op##_2_##suffix, (held<T, CENTERED, GATED, 2>))                                                             \
    KERNEL(op##_3_##suffix, (held<T, CENTERED, GATED, 3>))                                                             \
    KERNEL(op##_4_##suffix, (held<T, CENTERED, GATED, 4>))                                                             \
    KERNEL(op##_5_##suffix, (held<T, CENTERED, GATED, 5>))                                                             \
    KERNEL(op##_any_##suffix, (any<T, CENTERED, GATED>))

#define KERNELS(suffix, T)                                                                                             \
    NORM(rms_norm, suffix, T, false, false)                                                                            \
    NORM(layer_norm, suffix, T, true, false)                                                                           \
    NORM(gated_norm, suffix, T, true, true)                                                                            \
    NORM(added_norm, suffix, T, false, true)

FOR_EACH_FLOAT(KERNELS)
