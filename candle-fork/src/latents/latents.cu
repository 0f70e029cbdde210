// Tokens of a grid of patches to latents; latents/mod.rs has the same as a composition.
//
//     y[b, k, i p + r, j q + s] = tokens[b, i w + j, n] std[n] + mean[n],   n = (k p + r) q + s
//
// tokens [B, h w, c p q] with any strides; std and mean f32, packed; y [B, c, h p, w q] packed, or [B, h p, w q, c] if
// `last`. Product and sum are rounded in f32 as on the CPU, then once to y's type.
// A thread owns an element of y in a loop over the grid. No shared memory. Offsets have 64 bits; the launcher guarantees
// fewer than 2^31 elements.

#include "element.cuh"

// `Params` in cuda.rs.
struct Params {
    const void* tokens;
    const float* std;
    const float* mean;
    void* out;
    uint64_t strides[3];
    uint64_t elements;
    // Extents of y: c, h p, w q.
    Divisor channels;
    Divisor rows;
    Divisor columns;
    // p and q.
    Divisor patch[2];
    // w.
    uint32_t grid_columns;
    uint32_t tokens_type;
    uint32_t last;
    uint32_t unused;
};

static_assert(sizeof(Params) == 160, "as in cuda.rs");

template <typename T> __device__ __forceinline__ void latents_from_tokens(const Params& p) {
    for (uint64_t element = grid_start(); element < p.elements; element += grid_step()) {
        uint32_t rest = element, channel, row, column;
        if (p.last) rest = p.channels.divide(rest, channel);
        rest = p.columns.divide(rest, column);
        rest = p.rows.divide(rest, row);
        if (!p.last) rest = p.channels.divide(rest, channel);
        uint32_t r, s;
        const uint32_t i = p.patch[0].divide(row, r), j = p.patch[1].divide(column, s);
        const uint32_t n = (channel * p.patch[0].value + r) * p.patch[1].value + s;
        const uint64_t from =
            rest * p.strides[0] + (uint64_t(i) * p.grid_columns + j) * p.strides[1] + n * p.strides[2];
        const float token = load_as_float(p.tokens, p.tokens_type, from);
        static_cast<T*>(p.out)[element] = narrow<T>(__fadd_rn(__fmul_rn(token, p.std[n]), p.mean[n]));
    }
}

#define KERNEL(suffix, T)                                                                                              \
    extern "C" __global__ void latents_from_tokens_##suffix(const __grid_constant__ Params p) {                        \
        latents_from_tokens<T>(p);                                                                                     \
    }

FOR_EACH_FLOAT(KERNEL)
