// Activations and sums that end a residual branch; cpu.rs is the same on the CPU.
//
// silu_*:           y[i] = x[i] / (1 + exp(-x[i]))
// residual_*:       y[i] = x[i] + z[i]
// swiglu_*:         y[r, i] = silu(x[r, i]) * x[r, n + i]
// gate_residual_*:  y[r, i] = x[r, i] + gate[r / rows_per_batch, i] * z[r, i]
//
// The first two take memory as it comes, `count` packed elements; a thread owns one vector per step of a loop over the
// grid, and single elements at the end. The others take rows of n elements that lie as their row layouts say, x, z and y;
// a thread owns one vector of ROWS rows at a time: blocks lie along the vectors of a row (x, as many as there are), along
// the rows of a batch item (y) and along batch items (z), in loops over the grid.
// *_wide_*: 16-byte accesses: addresses, and for rows n and pitches, are multiples of it. *_1_*: anything.
// No shared memory. Indices have 64 bits.

#include "activation/silu.cuh"
#include "element.cuh"
#include "row_layout.cuh"

// `FlatParams` in cuda.rs.
struct FlatParams {
    const void* x;
    const void* z;
    void* out;
    uint64_t count;
};

// `RowParams` in cuda.rs.
struct RowParams {
    const void* x;
    const void* z;
    const void* gate;
    void* out;
    RowLayout x_rows;
    RowLayout z_rows;
    RowLayout out_rows;
    // Elements of a row of the result.
    uint64_t n;
    uint64_t batches;
    uint64_t rows_per_batch;
    uint32_t gate_type;
    uint32_t unused;
};

constexpr int THREADS = 256;

// Rows whose loads a thread issues together.
constexpr int ROWS = 4;

// Loads N elements as f32.
template <typename T, int N> __device__ __forceinline__ void load(const T* from, float (&to)[N]) {
    widen_all(load_vec<T, N>(from), to);
}

// y[i] = f(x[i], z[i]), z read only if BINARY.
template <typename T, int N, bool BINARY, typename F> __device__ __forceinline__ void flat(const FlatParams& p, F f) {
    const T* x = static_cast<const T*>(p.x);
    const T* z = static_cast<const T*>(p.z);
    T* out = static_cast<T*>(p.out);
    const uint64_t vectors = p.count / N;
    for (uint64_t i = grid_start(); i < vectors; i += grid_step()) {
        float a[N], b[N];
        load<T, N>(x + i * N, a);
        if constexpr (BINARY) load<T, N>(z + i * N, b);
#pragma unroll
        for (int k = 0; k < N; ++k) a[k] = f(a[k], BINARY ? b[k] : 0.0f);
        store_vec(out + i * N, narrow_all<T>(a));
    }
    for (uint64_t i = vectors * N + grid_start(); i < p.count; i += grid_step()) {
        out[i] = narrow<T>(f(widen(x[i]), BINARY ? widen(z[i]) : 0.0f));
    }
}

template <typename T, int N> __device__ __forceinline__ void silu_flat(const FlatParams& p) {
    flat<T, N, false>(p, [](float x, float) { return silu<T>(x); });
}

template <typename T, int N> __device__ __forceinline__ void residual(const FlatParams& p) {
    flat<T, N, true>(p, [](float x, float z) { return x + z; });
}

// Calls `each(first, rows)` for the runs of at most ROWS rows that this thread has of a batch item.
template <typename Each>
__device__ __forceinline__ void for_each_run(const RowParams& p, uint64_t batch, const Each& each) {
    const uint64_t step = static_cast<uint64_t>(gridDim.y) * ROWS;
    for (uint64_t row = static_cast<uint64_t>(blockIdx.y) * ROWS; row < p.rows_per_batch; row += step) {
        const uint64_t left = p.rows_per_batch - row;
        each(batch * p.rows_per_batch + row, static_cast<int>(left < ROWS ? left : ROWS));
    }
}

template <typename T, int N> __device__ __forceinline__ void swiglu(const RowParams& p) {
    const uint64_t i = grid_start() * N;
    if (i >= p.n) return;
    const T* x = static_cast<const T*>(p.x) + i;
    T* out = static_cast<T*>(p.out) + i;
    for_each_run(p, 0, [&](uint64_t first, int rows) {
        Vec<T, N> gates[ROWS], ups[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            const T* from = x + p.x_rows.start(first + r);
            gates[r] = load_vec<T, N>(from);
            ups[r] = load_vec<T, N>(from + p.n);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            float gate[N], up[N];
            widen_all(gates[r], gate);
            widen_all(ups[r], up);
#pragma unroll
            for (int k = 0; k < N; ++k) gate[k] = silu<T>(gate[k]) * up[k];
            store_vec(out + p.out_rows.start(first + r), narrow_all<T>(gate));
        }
    });
}

template <typename T, int N> __device__ __forceinline__ void gate_residual(const RowParams& p) {
    const uint64_t i = grid_start() * N;
    if (i >= p.n) return;
    const T* x = static_cast<const T*>(p.x) + i;
    const T* z = static_cast<const T*>(p.z) + i;
    T* out = static_cast<T*>(p.out) + i;
    for (uint64_t batch = blockIdx.z; batch < p.batches; batch += gridDim.z) {
        float gate[N];
        load_run_as_float<N>(p.gate, p.gate_type, batch * p.n + i, gate);
        for_each_run(p, batch, [&](uint64_t first, int rows) {
            Vec<T, N> xs[ROWS], zs[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= rows) break;
                xs[r] = load_vec<T, N>(x + p.x_rows.start(first + r));
                zs[r] = load_vec<T, N>(z + p.z_rows.start(first + r));
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= rows) break;
                float a[N], b[N];
                widen_all(xs[r], a);
                widen_all(zs[r], b);
#pragma unroll
                for (int k = 0; k < N; ++k) a[k] = fmaf(gate[k], b[k], a[k]);
                store_vec(out + p.out_rows.start(first + r), narrow_all<T>(a));
            }
        });
    }
}

#define KERNEL(name, PARAMS, body)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ PARAMS p) { body(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(silu_wide_##suffix, FlatParams, (silu_flat<T, PACK<T>>))                                                    \
    KERNEL(silu_1_##suffix, FlatParams, (silu_flat<T, 1>))                                                             \
    KERNEL(residual_wide_##suffix, FlatParams, (residual<T, PACK<T>>))                                                 \
    KERNEL(residual_1_##suffix, FlatParams, (residual<T, 1>))                                                          \
    KERNEL(swiglu_wide_##suffix, RowParams, (swiglu<T, PACK<T>>))                                                      \
    KERNEL(swiglu_1_##suffix, RowParams, (swiglu<T, 1>))                                                               \
    KERNEL(gate_residual_wide_##suffix, RowParams, (gate_residual<T, PACK<T>>))                                        \
    KERNEL(gate_residual_1_##suffix, RowParams, (gate_residual<T, 1>))

FOR_EACH_FLOAT(KERNELS)
