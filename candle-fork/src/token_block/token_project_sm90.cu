// The first half of a transformer block of 256 channels, up to its attention, in one pass over the tokens:
//
//     x' = x + context weight^T + bias                      if there is a context; x' takes the place of x
//     n = x' / sqrt(mean(x'^2) + eps) * norm
//     q, k, v = n weight^T + bias                           4 heads of 64 components each
//     q, k = rotate(head / sqrt(mean(head^2) + eps) * weight)
//
// in bf16 with f32 sums; x', n, q, k and v are rounded. Pairs of neighbours are rotated by the angle of their token along T
// (the first 8 pairs), H (12) or W (12).
//
// x and context [tokens, 256], out [tokens, 768], packed; tables [extent, pairs] of cosine and sine. Ownership, shared memory:
// stream.cuh. Stages of the weights: 4 of the context's, if there is one, then 4 each of q, k and v: 256 rows by 64 columns.
// Indices have 64 bits; the launcher guarantees positions below 2^31. A token's bits depend on nothing but the token and its
// position.

#include "token_block/stream.cuh"

constexpr int HEADS = CHANNELS / 64;

// `ProjectParams` in cuda.rs.
struct TokenProject {
    __nv_bfloat16* x;
    // Null without one.
    const __nv_bfloat16* context;
    const char* weights;
    const float* context_bias;
    const float* norm;
    // [3, 256].
    const float* qkv_bias;
    // [2, 64]: of queries, of keys.
    const float* head_norms;
    // Along T, H and W.
    const float2* tables[3];
    __nv_bfloat16* out;
    uint64_t tokens;
    // Position of token 0.
    uint32_t position;
    float eps;
    // H W, and W.
    Divisor plane;
    Divisor row;
};

static_assert(sizeof(TokenProject) == 136, "as in cuda.rs");

// The angles of a thread's two tokens.
struct Angles {
    const float2* along[2][3];

    __device__ __forceinline__ static Angles of(const TokenProject& p, uint64_t first, Place place) {
        Angles angles;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Tokens beyond the last take its angles.
            const uint64_t token = min(first + place.row + 8 * r, p.tokens - 1);
            uint32_t in_plane, w;
            const uint32_t t = p.plane.divide(p.position + static_cast<uint32_t>(token), in_plane);
            const uint32_t h = p.row.divide(in_plane, w);
            angles.along[r][0] = p.tables[0] + 8 * t + place.quad;
            angles.along[r][1] = p.tables[1] + 12 * h + place.quad;
            angles.along[r][2] = p.tables[2] + 12 * w + place.quad;
        }
        return angles;
    }

    // Of pair 4 c + quad.
    __device__ __forceinline__ float2 pair(int r, int c) const {
        if (c < 2) return along[r][0][4 * c];
        if (c < 5) return along[r][1][4 * c - 8];
        return along[r][2][4 * c - 20];
    }
};

// Norms and rotates the heads of queries or keys.
__device__ __forceinline__ void turn_heads(float (&values)[CHANNELS / 2], const float* weight, const Angles& angles,
                                           float eps, uint32_t quad) {
    float inverse[HEADS][2];
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float squares = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int at = 4 * (8 * head + c) + 2 * r;
                squares = fmaf(values[at], values[at], fmaf(values[at + 1], values[at + 1], squares));
            }
            inverse[head][r] = rsqrtf(sum_quad(squares) / 64 + eps);
        }
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float2 weights = *reinterpret_cast<const float2*>(weight + 8 * c + 2 * quad);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 angle = angles.pair(r, c);
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                const int at = 4 * (8 * head + c) + 2 * r;
                const float a = values[at] * inverse[head][r] * weights.x;
                const float b = values[at + 1] * inverse[head][r] * weights.y;
                values[at] = a * angle.x - b * angle.y;
                values[at + 1] = a * angle.y + b * angle.x;
            }
        }
    }
}

__device__ __forceinline__ void project(const TokenProject& p) {
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
            const uint32_t stages = p.context ? 16 : 12;
            for_each_tile(p.tokens, [&](uint64_t, uint64_t) {
                for (uint32_t stage = 0; stage < stages; ++stage) ring.fetch(cursor, p.weights, stage);
            });
        }
    } else {
        registers_take<TAKEN>();
        const uint32_t own = base + (group - 1) * OWN;
        const Place place = Place::own();
        Cursor next, held;
        float sums[CHANNELS / 2];
        for_each_tile(p.tokens, [&](uint64_t tile, uint64_t following) {
            const uint64_t first = tile * TILE + (group - 1) * ROWS;
            if (p.context) {
                group_sync(group, GROUP);
                fetch_rows(own, p.context, first, p.tokens);
                load_rows(sums, p.x, p.context_bias, first, p.tokens, place);
                wait_for_copies();
                publish_to_products();
                group_sync(group, GROUP);
                multiply_rows(sums, own, ring, next, held);
                store_rows(sums, p.x, CHANNELS, first, p.tokens, place);
            } else {
                load_rows(sums, p.x, nullptr, first, p.tokens, place);
            }
            norm_rows(sums, own, p.norm, p.eps, group, place);
            if ((following + 1) * TILE <= p.tokens) {
                prefetch(p.x + following * TILE * CHANNELS, TILE * CHANNELS * 2);
                if (p.context) prefetch(p.context + following * TILE * CHANNELS, TILE * CHANNELS * 2);
            }
            const Angles angles = Angles::of(p, first, place);
#pragma unroll 1
            for (int part = 0; part < 3; ++part) {
#pragma unroll
                for (int c = 0; c < CHANNELS / 8; ++c) {
                    const float* bias = p.qkv_bias + part * CHANNELS + 8 * c + 2 * place.quad;
                    const float2 pair = *reinterpret_cast<const float2*>(bias);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        sums[4 * c + 2 * r] = pair.x;
                        sums[4 * c + 2 * r + 1] = pair.y;
                    }
                }
                multiply_rows(sums, own, ring, next, held);
                if (part < 2) turn_heads(sums, p.head_norms + 64 * part, angles, p.eps, place.quad);
                store_rows(sums, p.out + part * CHANNELS, 3 * CHANNELS, first, p.tokens, place);
            }
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) token_project(const __grid_constant__ TokenProject params) {
    project(params);
}
