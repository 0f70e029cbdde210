// RMS norm of heads, then their rotation; rope/normed/cpu.rs is the same on the CPU.
//
//     h = x / sqrt(mean(x^2) + eps) * weight
//     y[a] = cos[s, i] h[a] - sin[s, i] h[b],   y[b] = sin[s, i] h[a] + cos[s, i] h[b]
//
// for the pairs i of a head of 2 n components: (a, b) = (2 i, 2 i + 1) in *_interleaved_*, (i, i + n) in *_half_*.
//
// x [B, S, G, D] with a packed last axis and any distances of the others, y packed; cos and sin [S, n] f32, packed. A
// launch takes one run of the tokens; of its G heads the first `heads` have weights[0], the others weights[1].
// *_wide_*: a head belongs to D / (2 N) neighbouring threads, a power of two up to 32, each with the vectors of 16 bytes
//     (N elements) at the same place in both halves, held in registers; weights as f32 in shared memory (4 KiB).
// *_any_*: a head belongs to a warp; any width and alignment.
// Squares are summed in f32 in an order that the width decides. Offsets have 64 bits; the launcher guarantees fewer than
// 2^31 heads in all.

#include "element.cuh"
#include "norm/reduce.cuh"

// `Params` in cuda.rs.
struct Params {
    const void* x;
    const float* cos;
    const float* sin;
    const void* weights[2];
    void* out;
    // Distances of batch items, tokens and heads.
    uint64_t strides[3];
    // Heads of the launch.
    uint64_t items;
    uint64_t first_token;
    // S.
    uint64_t tokens;
    // G, and tokens of the run.
    Divisor all_heads;
    Divisor run_tokens;
    uint32_t weight_types[2];
    uint32_t heads;
    // D.
    uint32_t width;
    float eps;
    uint32_t unused;
};

static_assert(sizeof(Params) == 152, "as in cuda.rs");

constexpr int THREADS = 256;
constexpr int MAX_WIDTH = 512;

// Where a head lies.
struct Head {
    uint64_t from;
    uint64_t to;
    // Of its token's angles.
    uint64_t angle;
    uint32_t weight;

    __device__ __forceinline__ static Head of(const Params& p, uint32_t item) {
        uint32_t head, token;
        const uint32_t row = p.all_heads.divide(item, head);
        const uint32_t batch = p.run_tokens.divide(row, token);
        const uint64_t s = p.first_token + token;
        return {batch * p.strides[0] + s * p.strides[1] + head * p.strides[2],
                ((batch * p.tokens + s) * p.all_heads.value + head) * p.width, s * (p.width / 2),
                head < p.heads ? 0u : 1u};
    }
};

__device__ __forceinline__ float inverse_root(const Params& p, float squares) {
    return 1.0f / sqrtf(squares / static_cast<float>(p.width) + p.eps);
}

__device__ __forceinline__ void rotate(float& a, float& b, float cos, float sin) {
    const float first = cos * a - sin * b;
    b = sin * a + cos * b;
    a = first;
}

// K floats at an address that is a multiple of their size, or of 16 bytes.
template <int K> __device__ __forceinline__ void load_floats(const float* from, float (&to)[K]) {
    constexpr int PART = K < 4 ? K : 4;
#pragma unroll
    for (int i = 0; i < K; i += PART) {
        const Vec<float, PART> part = load_vec<float, PART>(from + i);
#pragma unroll
        for (int j = 0; j < PART; ++j) to[i + j] = part.v[j];
    }
}

// Rotates the neighbours of one vector, whose first angle is `angle`.
template <int N> __device__ __forceinline__ void rotate_neighbours(const Params& p, float (&x)[N], uint64_t angle) {
    float cos[N / 2], sin[N / 2];
    load_floats(p.cos + angle, cos);
    load_floats(p.sin + angle, sin);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
}

template <typename T, bool INTERLEAVED> __device__ __forceinline__ void wide(const Params& p) {
    constexpr int N = PACK<T>;
    __shared__ alignas(16) float weights[2 * MAX_WIDTH];
    for (uint32_t i = threadIdx.x; i < 2 * p.width; i += THREADS) {
        const uint32_t which = i < p.width ? 0 : 1;
        weights[i] = load_as_float(p.weights[which], p.weight_types[which], i - which * p.width);
    }
    __syncthreads();
    const uint32_t n = p.width / 2, lanes = n / N, lane = threadIdx.x & (lanes - 1);
    const uint32_t heads_at_once = THREADS / lanes;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * heads_at_once;
    // All threads of a block stay in the loop, since those of a warp add up together.
    for (uint64_t base = static_cast<uint64_t>(blockIdx.x) * heads_at_once; base < p.items; base += step) {
        const uint64_t item = base + threadIdx.x / lanes;
        const bool inside = item < p.items;
        const Head head = Head::of(p, inside ? item : base);
        const T* x = static_cast<const T*>(p.x) + head.from + lane * N;
        float a[N], b[N];
        widen_all(load_vec<T, N>(x), a);
        widen_all(load_vec<T, N>(x + n), b);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) squares = fmaf(a[i], a[i], fmaf(b[i], b[i], squares));
        const float inverse = inverse_root(p, sum_lanes(squares, lanes));
        float first[N], second[N];
        load_floats(weights + head.weight * p.width + lane * N, first);
        load_floats(weights + head.weight * p.width + n + lane * N, second);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            a[i] = a[i] * inverse * first[i];
            b[i] = b[i] * inverse * second[i];
        }
        if constexpr (INTERLEAVED) {
            rotate_neighbours(p, a, head.angle + lane * N / 2);
            rotate_neighbours(p, b, head.angle + (n + lane * N) / 2);
        } else {
            float cos[N], sin[N];
            load_floats(p.cos + head.angle + lane * N, cos);
            load_floats(p.sin + head.angle + lane * N, sin);
#pragma unroll
            for (int i = 0; i < N; ++i) rotate(a[i], b[i], cos[i], sin[i]);
        }
        if (!inside) continue;
        T* out = static_cast<T*>(p.out) + head.to + lane * N;
        store_vec(out, narrow_all<T>(a));
        store_vec(out + n, narrow_all<T>(b));
    }
}

template <typename T, bool INTERLEAVED> __device__ __forceinline__ void any(const Params& p) {
    const uint32_t n = p.width / 2, lane = threadIdx.x % WARP;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * (THREADS / WARP);
    uint64_t item = static_cast<uint64_t>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    for (; item < p.items; item += step) {
        const Head head = Head::of(p, item);
        const T* x = static_cast<const T*>(p.x) + head.from;
        T* out = static_cast<T*>(p.out) + head.to;
        float squares = 0.0f;
        for (uint32_t i = lane; i < p.width; i += WARP) {
            const float value = widen(x[i]);
            squares = fmaf(value, value, squares);
        }
        const float inverse = inverse_root(p, sum_lanes(squares, WARP));
        const void* weight = p.weights[head.weight];
        const uint32_t type = p.weight_types[head.weight];
        for (uint32_t i = lane; i < n; i += WARP) {
            const uint32_t first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + 1 : i + n;
            float a = widen(x[first]) * inverse * load_as_float(weight, type, first);
            float b = widen(x[second]) * inverse * load_as_float(weight, type, second);
            rotate(a, b, p.cos[head.angle + i], p.sin[head.angle + i]);
            out[first] = narrow<T>(a);
            out[second] = narrow<T>(b);
        }
    }
}

#define KERNEL(name, body)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) norm_rope_##name(const __grid_constant__ Params p) { body(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(interleaved_wide_##suffix, (wide<T, true>))                                                                 \
    KERNEL(interleaved_any_##suffix, (any<T, true>))                                                                   \
    KERNEL(half_wide_##suffix, (wide<T, false>))                                                                       \
    KERNEL(half_any_##suffix, (any<T, false>))

FOR_EACH_FLOAT(KERNELS)
