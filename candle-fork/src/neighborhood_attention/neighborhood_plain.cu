// Neighborhood attention, one query at a time: the kernel for every shape and type, and the one that the fast one is checked
// by.
//
// Formula: out = softmax(scale q k^T) v over the window of each query and head; see window.rs.
// Layout: q, k, v [B, T, H, W, heads, D], last axis packed, D up to 256; out the same, contiguous.
// Ownership: a block owns one query of one head at a time, in a loop over the grid. It walks over the keys of the window in
// steps of 1024: scores, one thread per key; maximum, exponentials and sum; then D columns of values times 256 / D groups of
// keys. More than one step brings the earlier ones down to the larger maximum.
// Arithmetic: f32, in an order that depends on the shapes alone; rounded once. NaN and infinite scores give NaN; nothing
// else than the keys of the window is read.
// Shared memory: about 14 KiB. Index width: 64 bits, 32 inside of a window.
// Preconditions: D <= 256, keys of a window below 2^31, extents below 2^30; *_wide_*: D, all distances and addresses are
// multiples of 16 bytes.

#include "neighborhood_attention/neighborhood.cuh"

// `Params` in cuda/plain.rs.
struct PlainNeighborhood {
    Field q, k, v;
    void* out;
    uint64_t items; // queries of all heads and batch items
    Windows grid;
    uint32_t heads;
    uint32_t width; // D
    uint32_t keys;  // of a window
    float scale;
    Divisor plane; // keys of a window along H and W
    Divisor row;   // along W
};

static_assert(sizeof(PlainNeighborhood) == 240, "as in plain.rs");

constexpr int THREADS = 256, KEYS = 1024, WIDEST = 256;

template <typename T, int N> __device__ __forceinline__ float dot(const float* q, const T* k, uint32_t width) {
    float sum = 0.0f;
    for (uint32_t c = 0; c < width; c += N) {
        float part[N];
        widen_all(load_vec<T, N>(k + c), part);
#pragma unroll
        for (int i = 0; i < N; ++i) sum = fmaf(q[c + i], part[i], sum);
    }
    return sum;
}

template <typename T, int N> __device__ __forceinline__ void attend(const PlainNeighborhood& p) {
    __shared__ float scores[KEYS], query[WIDEST], sums[THREADS], scratch[32];
    __shared__ uint64_t values[KEYS];
    const uint32_t thread = threadIdx.x;
    const uint32_t groups = THREADS / p.width, group = thread / p.width, column = thread % p.width;
    const uint32_t extents[3] = {p.grid.frames, p.grid.extents[1], p.grid.extents[2]};

    for (uint64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        uint64_t rest = quotient(item, p.heads);
        const uint64_t head = item - rest * p.heads;
        uint32_t at[3];
        for (int axis = 2; axis >= 0; --axis) {
            const uint64_t outer = quotient(rest, extents[axis]);
            at[axis] = rest - outer * extents[axis];
            rest = outer;
        }
        const uint64_t batch = rest;
        const T* q = static_cast<const T*>(p.q.base) + batch * p.q.batch + head * p.q.head + p.q.at(at[0], at[1], at[2]);
        const T* k = static_cast<const T*>(p.k.base) + batch * p.k.batch + head * p.k.head;
        const T* v = static_cast<const T*>(p.v.base) + batch * p.v.batch + head * p.v.head;
        const uint32_t t0 = p.grid.start_plane(at[0]), h0 = p.grid.start(1, at[1]), w0 = p.grid.start(2, at[2]);

        for (uint32_t c = thread; c < p.width; c += THREADS) query[c] = widen(q[c]);
        __syncthreads();

        float maximum = -INFINITY, total = 0.0f, sum = 0.0f;
        for (uint32_t first = 0; first < p.keys; first += KEYS) {
            const uint32_t count = min(p.keys - first, KEYS);
            float largest = -INFINITY;
            for (uint32_t i = thread; i < count; i += THREADS) {
                uint32_t in_plane, w;
                const uint32_t t = p.plane.divide(first + i, in_plane);
                const uint32_t h = p.row.divide(in_plane, w);
                values[i] = p.v.at(t0 + t, h0 + h, w0 + w);
                scores[i] = p.scale * dot<T, N>(query, k + p.k.at(t0 + t, h0 + h, w0 + w), p.width);
                largest = fmaxf(largest, scores[i]);
            }
            const float next = fmaxf(maximum, block_max(largest, scratch));
            float weights = 0.0f;
            for (uint32_t i = thread; i < count; i += THREADS) {
                scores[i] = expf(scores[i] - next);
                weights += scores[i];
            }
            const float correction = first == 0 ? 0.0f : expf(maximum - next);
            // Its barriers let all threads see all weights.
            total = total * correction + block_sum(weights, scratch);
            maximum = next;
            sum *= correction;
            if (group < groups) {
                for (uint32_t i = group; i < count; i += groups) {
                    sum = fmaf(scores[i], widen(v[values[i] + column]), sum);
                }
            }
            __syncthreads();
        }

        sums[thread] = sum;
        __syncthreads();
        if (thread < p.width) {
            float all = 0.0f;
            for (uint32_t g = 0; g < groups; ++g) all += sums[g * p.width + thread];
            static_cast<T*>(p.out)[item * p.width + thread] = narrow<T>(all / total);
        }
        __syncthreads();
    }
}

#define KERNELS(suffix, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        neighborhood_plain_wide_##suffix(const __grid_constant__ PlainNeighborhood params) {                           \
        attend<T, PACK<T>>(params);                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        neighborhood_plain_1_##suffix(const __grid_constant__ PlainNeighborhood params) {                              \
        attend<T, 1>(params);                                                                                          \
    }

FOR_EACH_FLOAT(KERNELS)
