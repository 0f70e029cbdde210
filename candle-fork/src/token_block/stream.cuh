// What the kernels of narrow transformer blocks share: weights that stream through shared memory, rows of tokens as left
// operands, results in whole vectors. Needs compute capability 9.0.
//
// A block has three groups of four warps: the first lets one thread fetch weights, the others own 64 tokens each. Weights come
// in stages of 32 KiB, in the order in which products take them, laid out in memory as shared memory wants them (pack.rs).
//
// Shared memory: 64 tokens of 256 bf16 for each group (4 panels of 64 rows by 64 elements), the stages, their barriers.

#pragma once

#include "attention/pipeline.cuh"
#include "token_block/products.cuh"

constexpr int GROUPS = 2, GROUP = 128, THREADS = GROUP * (GROUPS + 1);
constexpr int CHANNELS = 256, ROWS = 64, TILE = ROWS * GROUPS;
constexpr uint32_t STAGE = 32768, STAGES = 5;
constexpr uint32_t PANEL = ROWS * 128, OWN = 4 * PANEL;
constexpr uint32_t SHARED_BYTES = 1024 + GROUPS * OWN + STAGES * (STAGE + 16);

// Registers of a thread, which groups hand over: 24 + 2 * 240 = 3 * 168.
constexpr int GIVEN = 24, TAKEN = 240;

// ---- weights -------------------------------------------------------------------------------------------------------

using Cursor = Turn<STAGES>;

// Addresses in shared memory.
struct Ring {
    uint32_t stages;
    uint32_t full;
    uint32_t empty;

    __device__ __forceinline__ static Ring at(uint32_t base) {
        const uint32_t stages = base + GROUPS * OWN, full = stages + STAGES * STAGE;
        return {stages, full, full + STAGES * 8};
    }

    // By one thread.
    __device__ __forceinline__ void init() const {
        for (uint32_t slot = 0; slot < STAGES; ++slot) {
            barrier_init(full + 8 * slot, 1);
            // A lane of each warp that multiplies.
            barrier_init(empty + 8 * slot, GROUPS * 4);
        }
        barriers_publish();
    }

    // Fetches a stage; by one thread.
    __device__ __forceinline__ void fetch(Cursor& cursor, const char* weights, uint32_t stage) const {
        barrier_wait(empty + 8 * cursor.stage, cursor.parity ^ 1);
        const uint32_t barrier = full + 8 * cursor.stage, to = stages + cursor.stage * STAGE;
        barrier_expect(barrier, STAGE);
        const char* from = weights + static_cast<uint64_t>(stage) * STAGE;
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(from), "r"(STAGE), "r"(barrier)
                     : "memory");
        cursor.advance();
    }

    // The address of the next stage, once it is there.
    __device__ __forceinline__ uint32_t take(Cursor& cursor) const {
        barrier_wait(full + 8 * cursor.stage, cursor.parity);
        const uint32_t stage = stages + cursor.stage * STAGE;
        cursor.advance();
        return stage;
    }

    // Gives the oldest stage that is still held back; by all threads of a warp, whose products with it are done.
    __device__ __forceinline__ void release(Cursor& cursor) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * cursor.stage);
        cursor.advance();
    }
};

// ---- tokens --------------------------------------------------------------------------------------------------------

// Where run `run` (16 bytes) of row `row` of a group's tokens lies.
__device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t run) {
    return run / 8 * PANEL + row * 128 + ((run % 8 ^ row % 8) << 4);
}

// The left operand of step `depth` (16 channels) of a group's tokens.
__device__ __forceinline__ uint64_t left_operand(uint32_t own, int depth) {
    return panel_columns(own + depth / 4 * PANEL + depth % 4 * 32);
}

// Begins to copy the group's rows from `first` on; zeros beyond the last.
__device__ __forceinline__ void fetch_rows(uint32_t own, const __nv_bfloat16* from, uint64_t first, uint64_t tokens) {
    const uint32_t thread = threadIdx.x % GROUP, run = thread % 32;
#pragma unroll
    for (uint32_t i = 0; i < ROWS / 4; ++i) {
        const uint32_t row = thread / 32 + 4 * i;
        const bool exists = first + row < tokens;
        copy_async(own + offset(row, run), exists ? from + (first + row) * CHANNELS + 8 * run : from, exists ? 16 : 0);
    }
}

// Lets the second-level cache fetch `bytes` at `from`, a part by each thread of both groups.
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
    for (uint32_t at = (threadIdx.x - GROUP) * 128; at < bytes; at += GROUPS * GROUP * 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + at));
    }
}

// words[j] of lane q of four to words[q] of lane j.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? got : words[i];
        words[i + 1] = odd ? words[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + 2], 2);
        words[i] = upper ? got : words[i];
        words[i + 2] = upper ? words[i + 2] : got;
    }
}

__device__ __forceinline__ float first_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// What a thread holds of a group's tokens: elements 4 c + 2 r + e are columns 8 c + 2 quad + e of row 16 warp + 8 r + group.
struct Place {
    uint32_t row;
    uint32_t quad;

    __device__ __forceinline__ static Place own() {
        const uint32_t thread = threadIdx.x % GROUP, lane = thread % 32;
        return {thread / 32 * 16 + lane / 4, lane % 4};
    }
};

// values = rows from `first` on, zeros beyond the last, + bias.
__device__ __forceinline__ void load_rows(float (&values)[CHANNELS / 2], const __nv_bfloat16* from, const float* bias,
                                          uint64_t first, uint64_t tokens, Place place) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint64_t row = first + place.row + 8 * r;
        const __nv_bfloat16* source = from + row * CHANNELS + 8 * place.quad;
#pragma unroll
        for (int k = 0; k < CHANNELS / 32; ++k) {
            uint4 vector = make_uint4(0, 0, 0, 0);
            if (row < tokens) vector = *reinterpret_cast<const uint4*>(source + 32 * k);
            uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
            transpose_quad(words);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                values[4 * (4 * k + j) + 2 * r] = first_of(words[j]);
                values[4 * (4 * k + j) + 2 * r + 1] = second_of(words[j]);
            }
        }
    }
    if (!bias) return;
#pragma unroll
    for (int c = 0; c < CHANNELS / 8; ++c) {
        const float2 pair = *reinterpret_cast<const float2*>(bias + 8 * c + 2 * place.quad);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            values[4 * c + 2 * r] += pair.x;
            values[4 * c + 2 * r + 1] += pair.y;
        }
    }
}

// Rounds rows and stores those that exist; `pitch` elements from one to the next.
__device__ __forceinline__ void store_rows(const float (&values)[CHANNELS / 2], __nv_bfloat16* to, uint64_t pitch,
                                           uint64_t first, uint64_t tokens, Place place) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint64_t row = first + place.row + 8 * r;
        __nv_bfloat16* target = to + row * pitch + 8 * place.quad;
#pragma unroll
        for (int k = 0; k < CHANNELS / 32; ++k) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 4 * (4 * k + j) + 2 * r;
                words[j] = narrow_pair<__nv_bfloat16>(values[at], values[at + 1]);
            }
            transpose_quad(words);
            // Of a store in C the compiler makes four, each of a word.
            if (row < tokens) {
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target + 32 * k), "r"(words[0]),
                             "r"(words[1]), "r"(words[2]), "r"(words[3])
                             : "memory");
            }
        }
    }
}

__device__ __forceinline__ float sum_quad(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Rounds values to what is stored of them, and makes the group's left operand of their RMS norm:
// values / sqrt(mean(values^2) + eps) * weight. All of the group, whose products with the old operand are done.
__device__ __forceinline__ void norm_rows(float (&values)[CHANNELS / 2], uint32_t own, const float* weight, float eps,
                                          uint32_t group, Place place) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < CHANNELS / 8; ++c) {
            float& first = values[4 * c + 2 * r];
            float& second = values[4 * c + 2 * r + 1];
            const uint32_t pair = narrow_pair<__nv_bfloat16>(first, second);
            first = first_of(pair);
            second = second_of(pair);
            squares = fmaf(first, first, fmaf(second, second, squares));
        }
        inverse[r] = rsqrtf(sum_quad(squares) / CHANNELS + eps);
    }
    group_sync(group, GROUP);
#pragma unroll
    for (int c = 0; c < CHANNELS / 8; ++c) {
        const float2 pair = *reinterpret_cast<const float2*>(weight + 8 * c + 2 * place.quad);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float first = values[4 * c + 2 * r] * inverse[r] * pair.x;
            const float second = values[4 * c + 2 * r + 1] * inverse[r] * pair.y;
            const uint32_t at = own + offset(place.row + 8 * r, c) + 4 * place.quad;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(narrow_pair<__nv_bfloat16>(first, second)) : "memory");
        }
    }
    publish_to_products();
    group_sync(group, GROUP);
}

// values += tokens * weights of the next four stages, [256, 256], panels of 256 rows each.
__device__ __forceinline__ void multiply_rows(float (&values)[CHANNELS / 2], uint32_t own, const Ring& ring, Cursor& next,
                                              Cursor& held) {
    pin(values);
#pragma unroll
    for (int panel = 0; panel < 4; ++panel) {
        const uint32_t stage = ring.take(next);
        products_begin();
#pragma unroll
        for (int depth = 0; depth < 4; ++depth) {
            multiply_by_columns<__nv_bfloat16>(values, left_operand(own, 4 * panel + depth), panel_columns(stage + 32 * depth), 1);
        }
        products_commit();
        if (panel > 0) {
            products_wait<1>();
            ring.release(held);
        }
    }
    products_wait();
    pin(values);
    ring.release(held);
}

// Calls `each` with the tiles of a block, every so many, and the one after.
template <typename Each> __device__ __forceinline__ void for_each_tile(uint64_t tokens, const Each& each) {
    const uint64_t tiles = (tokens + TILE - 1) / TILE;
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) each(tile, tile + gridDim.x);
}
