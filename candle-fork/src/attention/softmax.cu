// Softmax over the rows of a tile of scores.
//
// Formula: weights[m, i, j] = exp(scores[m, i, j] - max) / sum, over the keys j that query i sees; 0 for the others.
// Layout: scores f32 [matrices, queries, pitch], weights T in the same places; pitch is a multiple of 8.
// Ownership: a block owns one row at a time, in a loop over the grid; a thread owns every blockDim.x-th run of four keys.
// Arithmetic: f32; each thread keeps a running maximum and sum, joined over the block in a fixed order; a second pass
// rounds the weights once. NaN and infinite scores give NaN.
// Shared memory: 32 floats.
// Index width: 64 bits.
// Preconditions: 16-byte aligned addresses. With T = float the weights may be the scores' memory: a thread writes only
// what it alone reads.

#include "element.cuh"

struct Softmax {
    const float* scores;
    void* weights;
    uint64_t rows; // of all matrices
    uint64_t queries; // rows of a matrix
    uint64_t keys;
    uint64_t pitch;
    uint64_t visible; // keys that the first query of a matrix sees
    uint64_t causal;  // further keys that each next query sees: 0 or 1
};

static_assert(sizeof(Softmax) == 64, "as in cuda.rs");

template <typename T> __device__ __forceinline__ float exponential(float x) { return __expf(x); }
template <> __device__ __forceinline__ float exponential<float>(float x) { return expf(x); }

template <typename T> __device__ void softmax(const Softmax& p) {
    __shared__ float scratch[32];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const float* scores = p.scores + row * p.pitch;
        T* weights = static_cast<T*>(p.weights) + row * p.pitch;
        const uint64_t visible = min(p.keys, p.visible + (row % p.queries) * p.causal);

        float most = -INFINITY, sum = 0.0f;
        for (uint64_t key = 4 * threadIdx.x; key < visible; key += 4 * blockDim.x) {
            const Vec<float, 4> x = load_vec<float, 4>(scores + key);
            float next = most;
#pragma unroll
            for (int i = 0; i < 4; ++i) next = key + i < visible ? fmaxf(next, x.v[i]) : next;
            // Nothing but minus infinity and NaN so far: the sum is still zero, and the second pass gives NaN.
            if (next == -INFINITY) continue;
            sum *= exponential<T>(most - next);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += key + i < visible ? exponential<T>(x.v[i] - next) : 0.0f;
            most = next;
        }
        const float peak = block_max(most, scratch);
        sum = block_sum(most == -INFINITY ? 0.0f : sum * exponential<T>(most - peak), scratch);
        const float scale = 1.0f / sum;

        for (uint64_t key = 4 * threadIdx.x; key < p.keys; key += 4 * blockDim.x) {
            const Vec<float, 4> x = load_vec<float, 4>(scores + key);
            float y[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = key + i < visible ? exponential<T>(x.v[i] - peak) * scale : 0.0f;
            store_vec<T, 4>(weights + key, narrow_all<T>(y));
        }
    }
}

#define SOFTMAX(suffix, T)                                                                                           \
    extern "C" __global__ void softmax_##suffix(const __grid_constant__ Softmax params) { softmax<T>(params); }

FOR_EACH_FLOAT(SOFTMAX)
