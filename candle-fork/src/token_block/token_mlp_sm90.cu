// The second half of a transformer block of 256 channels, behind its attention, in one pass over the tokens:
//
//     x' = x + attended out^T + out_bias
//     n = x' / sqrt(mean(x'^2) + eps) * norm
//     y = x' + (silu(n gate^T + gate_bias) * (n up^T + up_bias)) down^T
//
// in bf16 with f32 sums; x', n and the gated hidden values are rounded, y once more. y takes the place of x.
//
// x and attended [tokens, 256], packed. Ownership, shared memory: stream.cuh. Stages of the weights: 4 of `out`, each 256 rows
// by 64 columns; then for each 64 hidden values 2 of gate and up (64 rows of each, by 128 columns) and one of `down` (256 rows
// by 64 columns). Biases of hidden values: for each 64, those of gate, then those of up. Indices have 64 bits. A token's bits
// depend on nothing but the token.

#include "token_block/stream.cuh"

// `MlpParams` in cuda.rs.
struct TokenMlp {
    __nv_bfloat16* x;
    const __nv_bfloat16* attended;
    const char* weights;
    const float* out_bias;
    const float* norm;
    const float* hidden_bias;
    uint64_t tokens;
    // 64 hidden values each.
    uint32_t chunks;
    float eps;
};

static_assert(sizeof(TokenMlp) == 64, "as in cuda.rs");

// x / (1 + exp(-x)), to be rounded to bf16: within 1e-6 (relative) down to x = -87, and 0 below.
__device__ __forceinline__ float silu(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + power_of_two(-1.44269504f * x)));
    return x * reciprocal;
}

// gate and up of 64 hidden values: elements 8 c + .. are of gate for c < 8, of up behind.
__device__ __forceinline__ void load_hidden_bias(float (&hidden)[64], const float* bias, uint32_t quad) {
#pragma unroll
    for (int c = 0; c < 16; ++c) {
        const float2 pair = *reinterpret_cast<const float2*>(bias + 8 * c + 2 * quad);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            hidden[4 * c + 2 * r] = pair.x;
            hidden[4 * c + 2 * r + 1] = pair.y;
        }
    }
}

__device__ __forceinline__ void mlp(const TokenMlp& p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
    const Ring ring = Ring::at(base);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();

    const uint32_t group = threadIdx.x / GROUP;
    if (group == 0) {
        registers_give<GIVEN>();
        if (threadIdx.x == 0) {
            Cursor cursor;
            for_each_tile(p.tokens, [&](uint64_t, uint64_t) {
                for (uint32_t stage = 0; stage < 4 + 3 * p.chunks; ++stage) {
                    ring.fetch(cursor, p.weights, stage);
                }
            });
        }
    } else {
        registers_take<TAKEN>();
        const uint32_t own = base + (group - 1) * OWN;
        const Place place = Place::own();
        Cursor next, held;
        float sums[CHANNELS / 2], hidden[64];
        uint32_t gated[4][4];
        for_each_tile(p.tokens, [&](uint64_t tile, uint64_t following) {
            const uint64_t first = tile * TILE + (group - 1) * ROWS;
            group_sync(group, GROUP);
            fetch_rows(own, p.attended, first, p.tokens);
            load_rows(sums, p.x, p.out_bias, first, p.tokens, place);
            wait_for_copies();
            publish_to_products();
            group_sync(group, GROUP);
            multiply_rows(sums, own, ring, next, held);
            norm_rows(sums, own, p.norm, p.eps, group, place);
            if ((following + 1) * TILE <= p.tokens) {
                prefetch(p.x + following * TILE * CHANNELS, TILE * CHANNELS * 2);
                prefetch(p.attended + following * TILE * CHANNELS, TILE * CHANNELS * 2);
            }

            pin(sums);
#pragma unroll 1
            for (uint32_t chunk = 0; chunk < p.chunks; ++chunk) {
                // While the products of the last chunk's `down` are under way.
                load_hidden_bias(hidden, p.hidden_bias + 128 * chunk, place.quad);
                pin(hidden);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t stage = ring.take(next);
                    products_begin();
#pragma unroll
                    for (int depth = 0; depth < 8; ++depth) {
                        const uint32_t at = stage + depth / 4 * (STAGE / 2) + depth % 4 * 32;
                        multiply_by_columns<__nv_bfloat16>(hidden, left_operand(own, 8 * half + depth), panel_columns(at), 1);
                    }
                    products_commit();
                }
                products_wait();
                pin(hidden);
                pin(sums);
                pin(gated);
                if (chunk > 0) ring.release(held);
                ring.release(held);
                ring.release(held);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
#pragma unroll
                    for (int word = 0; word < 4; ++word) {
                        const int at = 8 * step + 2 * word;
                        const float first = silu(hidden[at]) * hidden[32 + at];
                        const float second = silu(hidden[at + 1]) * hidden[32 + at + 1];
                        gated[step][word] = narrow_pair<__nv_bfloat16>(first, second);
                    }
                }
                pin(gated);
                const uint32_t stage = ring.take(next);
                products_begin();
#pragma unroll
                for (int step = 0; step < 4; ++step) multiply_by_256(sums, gated[step], panel_columns(stage + 32 * step));
                products_commit();
            }
            products_wait();
            pin(sums);
            pin(gated);
            ring.release(held);
            store_rows(sums, p.x, CHANNELS, first, p.tokens, place);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) token_mlp(const __grid_constant__ TokenMlp params) {
    mlp(params);
}
