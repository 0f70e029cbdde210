// `fused_attention.cu` for compute capability 9.0, heads of 72 to 128 components.
//
// Formula, layout, arithmetic, preconditions: as there.
// Ownership: a block owns 128 queries of one head after another, 128 keys at a time. Its first group of four warps has tiles
// copied; each of the two others owns 64 of the queries ("FlashAttention-3", Shah et al., sections 3.1 and 3.2):
//
//   scores of a step, sums of the last step's weights    products, one behind the other
//   weights of the step; correction of the sums          begun while its own second product, and then the other group's, run
//
// The two take turns in beginning products, so that one computes weights while the other's products are under way.
// Shared memory: 7 tiles of 128 * 256 bytes and 2048: queries, and keys and values of three steps each, in panels of 64
// components as wgmma.cuh wants them; barriers; room for the alignment.
// Preconditions: maps describe q, k and v in boxes of 64 components by 128 positions.

#include "attention/fused_attention.cuh"
#include "attention/pipeline.cuh"

constexpr int QUERIES = 128, KEYS = 128, WIDTH = 128, STAGES = 3;
constexpr int GROUP = 128, GROUPS = 2, WARPS = GROUPS * GROUP / 32, THREADS = (GROUPS + 1) * GROUP;
// Bytes of 64 components of the queries and of a step's keys; of all components.
constexpr uint32_t QUERY_PANEL = QUERIES * 128, KEY_PANEL = KEYS * 128;
constexpr uint32_t QUERY_TILE = 2 * QUERY_PANEL, KEY_TILE = 2 * KEY_PANEL;
// What a thread of 65536 / THREADS registers gives, and what a computing one gets.
constexpr int FEW = 24, MANY = 240;
// The block's barriers: turns of the two groups, then one within each group.
constexpr uint32_t ORDER = 1, INSIDE = ORDER + GROUPS;

// `GroupParams` in cuda/groups.rs.
struct GroupAttention {
    TensorMap q, k, v; // [B, H, S, D] by their strides
    FusedAttention all;
    uint32_t blocks; // of 128 queries of one head
};

static_assert(sizeof(GroupAttention) == 640, "as in cuda/groups.rs");

// Shared memory by its addresses.
struct Memory {
    uint32_t base;

    __device__ __forceinline__ uint32_t queries() const { return base; }
    __device__ __forceinline__ uint32_t keys(uint32_t stage) const { return base + QUERY_TILE + stage * KEY_TILE; }
    __device__ __forceinline__ uint32_t values(uint32_t stage) const { return keys(STAGES + stage); }

    // Barriers: a tile has come; a tile is not needed any more.
    __device__ __forceinline__ uint32_t barrier(uint32_t index) const { return keys(2 * STAGES) + 8 * index; }
    __device__ __forceinline__ uint32_t queries_full() const { return barrier(0); }
    __device__ __forceinline__ uint32_t queries_empty() const { return barrier(1); }
    __device__ __forceinline__ uint32_t keys_full(uint32_t stage) const { return barrier(2 + stage); }
    __device__ __forceinline__ uint32_t keys_empty(uint32_t stage) const { return barrier(2 + STAGES + stage); }
    __device__ __forceinline__ uint32_t values_full(uint32_t stage) const { return barrier(2 + 2 * STAGES + stage); }
    __device__ __forceinline__ uint32_t values_empty(uint32_t stage) const { return barrier(2 + 3 * STAGES + stage); }
};

// 128 queries of a head.
struct Part {
    uint32_t first;  // query
    uint32_t item, head, kv_head;
    uint32_t fewest; // keys that the first query sees
    int steps;

    __device__ __forceinline__ Part(const FusedAttention& p, uint32_t index) {
        const uint32_t at = index % p.tiles, head_of_item = index / p.tiles;
        // Later queries see more keys: they come first, so that the last blocks to run are short.
        first = (p.causal ? p.tiles - 1 - at : at) * QUERIES;
        item = head_of_item / p.heads;
        head = head_of_item % p.heads;
        kv_head = head / p.heads_per_kv;
        fewest = p.causal ? min(p.k_len, first + 1 + p.ahead) : p.k_len;
        const uint32_t most = p.causal ? min(p.k_len, fewest + QUERIES - 1) : p.k_len;
        steps = (most + KEYS - 1) / KEYS;
    }
};

// Where run `run` of row `row` lies in the tile of queries.
__device__ __forceinline__ uint32_t panel_run(uint32_t row, uint32_t run) {
    return run / 8 * QUERY_PANEL + row * 128 + ((run % 8 ^ row % 8) << 4);
}

// Begins to copy a tile from position `first` on; `full` hears of it.
template <uint32_t PANEL>
__device__ __forceinline__ void fetch(uint32_t to, const TensorMap& map, uint32_t full, uint32_t first, uint32_t head,
                                      uint32_t item) {
    barrier_expect(full, 2 * PANEL);
    copy_box(to, map, full, 0, first, head, item);
    copy_box(to + PANEL, map, full, WIDTH / 2, first, head, item);
}

// What one thread does: all copies, in the order in which they are needed.
__device__ __forceinline__ void produce(const GroupAttention& p, Memory memory) {
    Turn<STAGES> keys, values;
    uint32_t queries = 1;
    const auto fetch_keys = [&](const Part& part, int step) {
        barrier_wait(memory.keys_empty(keys.stage), keys.parity ^ 1);
        fetch<KEY_PANEL>(memory.keys(keys.stage), p.k, memory.keys_full(keys.stage), step * KEYS, part.kv_head, part.item);
        keys.advance();
    };
    const auto fetch_values = [&](const Part& part, int step) {
        barrier_wait(memory.values_empty(values.stage), values.parity ^ 1);
        fetch<KEY_PANEL>(memory.values(values.stage), p.v, memory.values_full(values.stage), step * KEYS, part.kv_head,
                         part.item);
        values.advance();
    };
    for (uint32_t index = blockIdx.x; index < p.blocks; index += gridDim.x) {
        const Part part(p.all, index);
        fetch_keys(part, 0);
        barrier_wait(memory.queries_empty(), queries);
        fetch<QUERY_PANEL>(memory.queries(), p.q, memory.queries_full(), part.first, part.head, part.item);
        queries ^= 1;
        for (int step = 1; step < part.steps; ++step) {
            fetch_keys(part, step);
            fetch_values(part, step - 1);
        }
        fetch_values(part, part.steps - 1);
    }
}

// scores = q k^T
template <typename T> __device__ __forceinline__ void score(float (&scores)[KEYS / 2], uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int depth = 0; depth < WIDTH / 16; ++depth) {
        const uint32_t panel = depth / 4, at = depth % 4 * 32;
        multiply_by_columns<T>(scores, panel_columns(queries + panel * QUERY_PANEL + at),
                               panel_columns(keys + panel * KEY_PANEL + at), depth > 0);
    }
}

// sums += weights v
template <typename T>
__device__ __forceinline__ void gather(float (&sums)[WIDTH / 2], const uint32_t (&weights)[KEYS / 16][4], uint32_t values) {
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
        multiply_by_rows<T>(sums, weights[j], panel_rows(values + j * 16 * 128, KEY_PANEL), 1);
    }
}

template <typename T>
__device__ __forceinline__ void round_weights(uint32_t (&weights)[KEYS / 16][4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            weights[j][word] = narrow_pair<T>(scores[8 * j + 2 * word], scores[8 * j + 2 * word + 1]);
        }
    }
}

// What a lane knows of the softmax of its queries, 8 r + l / 4 of its warp for r = 0, 1.
struct Softmax {
    float maximum[2] = {-INFINITY, -INFINITY};
    float total[2] = {};
    float correction[2]; // of sums from before the last step
    float factor;

    // Scores of a step to weights.
    __device__ __forceinline__ void advance(float (&scores)[KEYS / 2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = maximum[r];
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) most = fmaxf(most, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
            correction[r] = power_of_two((maximum[r] - most) * factor);
            maximum[r] = most;
            const float shift = most * factor;
            float sum[2] = {};
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& weight = scores[4 * j + 2 * r + c];
                    weight = power_of_two(fmaf(weight, factor, -shift));
                    sum[c] += weight;
                }
            }
            total[r] = total[r] * correction[r] + (sum[0] + sum[1]);
        }
    }
};

// What a group of warps does: attention of its 64 queries of every part.
template <typename T>
__device__ __forceinline__ void consume(const FusedAttention& p, uint32_t blocks, Memory memory, unsigned char* queries) {
    const uint32_t own_group = threadIdx.x / GROUP - 1, warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32;
    const uint32_t group = lane / 4, quad = lane % 4;
    // Rows of the group, and of this warp.
    const uint32_t group_rows = own_group * (QUERIES / GROUPS), own = group_rows + 16 * warp;
    const uint32_t own_queries = memory.queries() + group_rows * 128;
    const uint32_t own_turn = ORDER + own_group, other_turn = ORDER + 1 - own_group;
    const uint32_t arrives = lane == 0;

    Turn<STAGES> keys, values;
    uint32_t parity = 0;
    float scores[KEYS / 2], sums[WIDTH / 2];
    uint32_t weights[KEYS / 16][4];
    // The first group begins.
    if (own_group == 1) group_arrive(other_turn, GROUPS * GROUP);

    for (uint32_t index = blockIdx.x; index < blocks; index += gridDim.x) {
        const Part part(p, index);
        Softmax softmax;
        softmax.factor = p.factor;
        // Hides the keys of a step that a query does not see.
        const auto hide = [&](int step) {
#pragma unroll
            for (int e = 0; e < KEYS / 2; ++e) {
                const uint32_t key = step * KEYS + e / 4 * 8 + 2 * quad + e % 2;
                const uint32_t visible = p.causal ? min(p.k_len, part.fewest + own + e % 4 / 2 * 8 + group) : p.k_len;
                if (key >= visible) scores[e] = -INFINITY;
            }
        };

        barrier_wait(memory.queries_full(), parity);
        parity ^= 1;
        barrier_wait(memory.keys_full(keys.stage), keys.parity);
        pin(scores);
        products_begin();
        score<T>(scores, own_queries, memory.keys(keys.stage));
        products_commit();
        products_wait();
        pin(scores);
        barrier_arrive(memory.keys_empty(keys.stage), arrives);
        keys.advance();
        hide(0);
        softmax.advance(scores);
        round_weights<T>(weights, scores);
#pragma unroll
        for (int e = 0; e < WIDTH / 2; ++e) sums[e] = 0.0f;

        const auto advance = [&](int step, auto hides) {
            barrier_wait(memory.keys_full(keys.stage), keys.parity);
            group_sync(own_turn, GROUPS * GROUP);
            pin(scores);
            pin(sums);
            pin(weights);
            products_begin();
            score<T>(scores, own_queries, memory.keys(keys.stage));
            products_commit();
            barrier_wait(memory.values_full(values.stage), values.parity);
            products_begin();
            gather<T>(sums, weights, memory.values(values.stage));
            products_commit();
            group_arrive(other_turn, GROUPS * GROUP);
            products_wait<1>();
            pin(scores);
            barrier_arrive(memory.keys_empty(keys.stage), arrives);
            keys.advance();
            if constexpr (decltype(hides)::value) hide(step);
            softmax.advance(scores);
            products_wait();
            pin(sums);
            pin(weights);
            barrier_arrive(memory.values_empty(values.stage), arrives);
            values.advance();
            round_weights<T>(weights, scores);
#pragma unroll
            for (int e = 0; e < WIDTH / 2; ++e) sums[e] *= softmax.correction[e % 4 / 2];
        };
        // Steps of which every query sees all keys come first.
        const int clear = max(1, int(part.fewest / KEYS));
        int step = 1;
        for (; step < clear; ++step) advance(step, std::false_type());
        for (; step < part.steps; ++step) advance(step, std::true_type());

        barrier_wait(memory.values_full(values.stage), values.parity);
        pin(sums);
        pin(weights);
        products_begin();
        gather<T>(sums, weights, memory.values(values.stage));
        products_commit();
        products_wait();
        pin(sums);
        barrier_arrive(memory.values_empty(values.stage), arrives);
        values.advance();

        // Nobody needs the group's queries any more: their place takes the result, so that it leaves in whole rows.
        group_sync(INSIDE + own_group, GROUP);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = softmax.total[r];
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            const float scale = 1.0f / sum;
            const uint32_t row = own + 8 * r + group;
#pragma unroll
            for (int c = 0; c < WIDTH / 8; ++c) {
                const uint32_t pair = narrow_pair<T>(sums[4 * c + 2 * r] * scale, sums[4 * c + 2 * r + 1] * scale);
                *reinterpret_cast<uint32_t*>(queries + panel_run(row, c) + 4 * quad) = pair;
            }
        }
        __syncwarp();
        T* out = static_cast<T*>(p.out.base) + part.item * p.out.batch + part.head * p.out.head;
#pragma unroll
        for (int i = 0; i < 16 * 16 / 32; ++i) {
            const uint32_t row = own + 2 * i + lane / 16, run = lane % 16;
            const uint64_t position = part.first + row;
            if (8 * run >= p.width || position >= p.q_len) continue;
            const Vec<T, 8> found = load_vec<T, 8>(reinterpret_cast<const T*>(queries + panel_run(row, run)));
            T* place = out + position * p.out.position + 8 * run;
            if (p.vector_out) {
                store_vec<T, 8>(place, found);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) place[e] = found.v[e];
            }
        }
        // What was written here comes before the next copy.
        publish_to_products();
        __syncwarp();
        barrier_arrive(memory.queries_empty(), arrives);
    }
    // The turn that the other group has given away last.
    if (own_group == 0) group_sync(own_turn, GROUPS * GROUP);
}

template <typename T> __device__ __forceinline__ void attend(const GroupAttention& p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023) / 1024 * 1024;
    const Memory memory = {base};
    if (threadIdx.x == 0) {
        barrier_init(memory.queries_full(), 1);
        barrier_init(memory.queries_empty(), WARPS);
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            barrier_init(memory.keys_full(stage), 1);
            barrier_init(memory.keys_empty(stage), WARPS);
            barrier_init(memory.values_full(stage), 1);
            barrier_init(memory.values_empty(stage), WARPS);
        }
        barriers_publish();
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_give<FEW>();
        if (threadIdx.x == 0) produce(p, memory);
    } else {
        registers_take<MANY>();
        consume<T>(p.all, p.blocks, memory, shared + (base - unaligned));
    }
}

#define FUSED_ATTENTION_SM90(suffix, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        fused_attention_sm90_##suffix(const __grid_constant__ GroupAttention params) {                                \
        attend<T>(params);                                                                                            \
    }

FOR_EACH_HALF(FUSED_ATTENTION_SM90)
