// Standard normal values from a counter:
//
//     [x0, x1, ..] = philox4x32-10(key = seed, counter = [0, 0, index])
//     y[index] = sqrt(-2 log((x0 + 0.5) / 2^32)) sin(2 pi (x1 + 0.5) / 2^32)
//
// in f64, rounded to f32 and then to the result's type ("Parallel Random Numbers: As Easy as 1, 2, 3", Salmon et al., section
// 4.3; the reference is crates/sampling/src/noise/philox.rs). A thread owns single values, in a loop over the grid. Indices
// have 64 bits.

#include "cuda/common.cuh"

// `Params` in cuda.rs.
struct NoiseParams {
    void* out;
    uint64_t count;
    uint64_t seed;
};

static_assert(sizeof(NoiseParams) == 24, "as in cuda.rs");

__device__ __forceinline__ uint2 philox(uint64_t seed, uint64_t index) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c0 = 0, c1 = 0, c2 = static_cast<uint32_t>(index), c3 = static_cast<uint32_t>(index >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t(0xD2511F53u) * c0, second = uint64_t(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(second);
        c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(first);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return make_uint2(c0, c1);
}

__device__ __forceinline__ double unit_interval(uint32_t x) { return (x + 0.5) / 4294967296.0; }

template <typename T> __device__ __forceinline__ void normal(const NoiseParams& p) {
    T* out = static_cast<T*>(p.out);
    for (uint64_t i = grid_start(); i < p.count; i += grid_step()) {
        const uint2 x = philox(p.seed, i);
        const double radius = sqrt(-2.0 * log(unit_interval(x.x)));
        out[i] = narrow<T>(static_cast<float>(radius * sin(6.283185307179586 * unit_interval(x.y))));
    }
}

#define NORMAL_NOISE(suffix, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) normal_noise_##suffix(const __grid_constant__ NoiseParams p) { \
        normal<T>(p);                                                                                                \
    }

FOR_EACH_FLOAT(NORMAL_NOISE)
