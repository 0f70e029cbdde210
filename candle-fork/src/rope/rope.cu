// Rotary position embeddings; rope/cpu.rs is the same on the CPU.
//
//     y[a] = cos[s, i] x[a] - sin[s, i] x[b],   y[b] = sin[s, i] x[a] + cos[s, i] x[b]
//
// for the pairs i of a head: (a, b) = (2 i, 2 i + 1) in rope_interleaved_*, (i, i + n) in rope_half_*. "RoFormer", Su
// et al., equation 34.
//
// x [B, S, H, 2 n] with heads that lie as their row layout says, y packed; cos and sin [S, n] f32, packed. A thread
// owns N neighbouring pairs of a head; threads lie along the pairs of a head, then along heads, in a loop over the
// grid.
// *_wide_*: accesses of 16 bytes: N pairs, and for interleaved ones half as many; *_1_*: single pairs.
// No shared memory. Offsets have 64 bits; the launcher guarantees fewer than 2^31 heads in all.

#include "element.cuh"
#include "row_layout.cuh"

// `Params` in cuda.rs.
struct Params {
    const void* x;
    const float* cos;
    const float* sin;
    void* out;
    RowLayout x_rows;
    // Heads of all positions and batch items.
    uint64_t rows;
    // Pairs of a head.
    uint64_t n;
    // H and S.
    Divisor heads;
    Divisor positions;
};

constexpr int THREADS = 256;

__device__ __forceinline__ void rotate(float& a, float& b, float cos, float sin) {
    const float first = cos * a - sin * b;
    b = sin * a + cos * b;
    a = first;
}

// Calls `each(x, y, angle, pair)` for runs of N pairs: the head in x and y, the index of its first angle, the first
// pair.
template <typename T, int N, typename Each> __device__ __forceinline__ void for_each_run(const Params& p, const Each& each) {
    const uint32_t runs = p.n / N;
    const uint32_t across = runs < THREADS ? runs : THREADS, heads = THREADS / across;
    const uint32_t first = threadIdx.x / across;
    if (first >= heads) return;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * heads;
    for (uint64_t row = static_cast<uint64_t>(blockIdx.x) * heads + first; row < p.rows; row += step) {
        uint32_t position;
        p.positions.divide(p.heads.divide(row), position);
        const T* x = static_cast<const T*>(p.x) + p.x_rows.start(row);
        T* y = static_cast<T*>(p.out) + row * 2 * p.n;
        for (uint32_t run = threadIdx.x % across; run < runs; run += across) {
            each(x, y, position * p.n, static_cast<uint64_t>(run) * N);
        }
    }
}

template <typename T, int N> __device__ __forceinline__ void interleaved(const Params& p) {
    for_each_run<T, N>(p, [&](const T* x, T* y, uint64_t angle, uint64_t pair) {
        float values[2 * N];
        widen_all(load_vec<T, 2 * N>(x + 2 * pair), values);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            rotate(values[2 * i], values[2 * i + 1], p.cos[angle + pair + i], p.sin[angle + pair + i]);
        }
        store_vec(y + 2 * pair, narrow_all<T>(values));
    });
}

template <typename T, int N> __device__ __forceinline__ void halves(const Params& p) {
    for_each_run<T, N>(p, [&](const T* x, T* y, uint64_t angle, uint64_t pair) {
        float a[N], b[N];
        widen_all(load_vec<T, N>(x + pair), a);
        widen_all(load_vec<T, N>(x + p.n + pair), b);
#pragma unroll
        for (int i = 0; i < N; ++i) rotate(a[i], b[i], p.cos[angle + pair + i], p.sin[angle + pair + i]);
        store_vec(y + pair, narrow_all<T>(a));
        store_vec(y + p.n + pair, narrow_all<T>(b));
    });
}

// One pair, whose elements are loaded apart: together they may not be aligned.
template <typename T> __device__ __forceinline__ void interleaved_one(const Params& p) {
    for_each_run<T, 1>(p, [&](const T* x, T* y, uint64_t angle, uint64_t pair) {
        float a = widen(x[2 * pair]), b = widen(x[2 * pair + 1]);
        rotate(a, b, p.cos[angle + pair], p.sin[angle + pair]);
        y[2 * pair] = narrow<T>(a);
        y[2 * pair + 1] = narrow<T>(b);
    });
}

#define KERNEL(name, body)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_##name(const __grid_constant__ Params p) { body(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(interleaved_wide_##suffix, (interleaved<T, PACK<T> / 2>))                                                   \
    KERNEL(interleaved_1_##suffix, interleaved_one<T>)                                                                 \
    KERNEL(half_wide_##suffix, (halves<T, PACK<T>>))                                                                    \
    KERNEL(half_1_##suffix, (halves<T, 1>))

FOR_EACH_FLOAT(KERNELS)
