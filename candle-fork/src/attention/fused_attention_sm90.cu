// `fused_attention.cu` for compute capability 9.0, heads of 72 to 128 components.
//
// Formula, layout, arithmetic, preconditions: as there.
// Ownership: a block owns 128 queries of one head, each of its two groups of four warps 64 of them. While a group turns the
// scores of one step into weights, the products of its last step's weights and of its next step's scores are under way.
// Shared memory: (128 + 2 * 2 * 64) * 256 + 1024 bytes: queries, and keys and values of two steps each, in panels of 64
// components as wgmma.cuh wants them; the last 1024 bytes are for the alignment.

#include "attention/fused_attention.cuh"
#include "attention/wgmma.cuh"

constexpr int QUERIES = 128, KEYS = 64, THREADS = 256, WIDTH = 128;
constexpr int RUNS = WIDTH / 8;
constexpr int STAGE = KEYS * WIDTH * 2;

// Where run `run` of row `row` lies among panels of ROWS rows.
template <int ROWS> __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t run) {
    return run / 8 * (ROWS * 128) + row * 128 + ((run % 8 ^ row % 8) << 4);
}

// Begins to copy ROWS rows from `first` on; what lies beyond `rows` or `width` becomes zero.
template <typename T, int ROWS>
__device__ __forceinline__ void fetch(uint32_t to, const T* from, uint64_t pitch, uint32_t first, uint32_t rows,
                                      uint32_t width) {
    constexpr int STEP = THREADS / RUNS;
    const uint32_t run = threadIdx.x % RUNS, row = threadIdx.x / RUNS;
    const uint32_t bytes = 8 * run < width ? 16 : 0;
    // STEP is a multiple of 8, so the permutation is the same for all rows of a thread.
    const uint32_t place = to + offset<ROWS>(row, run);
    const T* source = from + (first + row) * pitch + (bytes ? 8 * run : 0);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
        const bool exists = first + row + i * STEP < rows;
        copy_async(place + i * STEP * 128, exists ? source : from, exists ? bytes : 0);
        source += STEP * pitch;
    }
}

// scores = q k^T for the keys of a stage.
template <typename T>
__device__ __forceinline__ void score(float (&scores)[KEYS / 2], const uint32_t (&q)[WIDTH / 16][4], uint32_t keys) {
#pragma unroll
    for (int depth = 0; depth < WIDTH / 16; ++depth) {
        const uint32_t at = keys + depth / 4 * (KEYS * 128) + depth % 4 * 32;
        multiply_by_columns<T>(scores, q[depth], panel_columns(at), depth > 0);
    }
}

// sums += weights v for the values of a stage.
template <typename T>
__device__ __forceinline__ void gather(float (&sums)[WIDTH / 2], const uint32_t (&weights)[KEYS / 16][4], uint32_t values) {
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
        multiply_by_rows<T>(sums, weights[j], panel_rows(values + j * 16 * 128, KEYS * 128), 1);
    }
}

// What a lane knows of the softmax of its queries, 8 r + l / 4 of its warp for r = 0, 1.
struct Softmax {
    float maximum[2];
    float total[2];
    float correction[2]; // of sums from before the last step
    float factor;

    // Scores of a step to rounded weights.
    template <typename T>
    __device__ __forceinline__ void advance(float (&scores)[KEYS / 2], uint32_t (&weights)[KEYS / 16][4]) {
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
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& weight = scores[4 * j + 2 * r + c];
                    weight = power_of_two(fmaf(weight, factor, -shift));
                    sum += weight;
                }
            }
            total[r] = total[r] * correction[r] + sum;
        }
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                weights[j][word] = narrow_pair<T>(scores[8 * j + 2 * word], scores[8 * j + 2 * word + 1]);
            }
        }
    }
};

template <typename T> __device__ __forceinline__ void attend(const FusedAttention& p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t unaligned = shared_address(memory), base = (unaligned + 1023) / 1024 * 1024;
    const uint32_t keys = base + QUERIES * WIDTH * 2, values = keys + 2 * STAGE;

    const uint32_t at = blockIdx.x % p.tiles, head_of_item = blockIdx.x / p.tiles;
    // Later queries see more keys: they come first, so that the last blocks to run are short.
    const uint32_t tile = p.causal ? p.tiles - 1 - at : at;
    const uint64_t item = head_of_item / p.heads, head = head_of_item % p.heads, kv_head = head / p.heads_per_kv;
    const uint32_t first = tile * QUERIES;
    const T* q = static_cast<const T*>(p.q.base) + item * p.q.batch + head * p.q.head;
    const T* k = static_cast<const T*>(p.k.base) + item * p.k.batch + kv_head * p.k.head;
    const T* v = static_cast<const T*>(p.v.base) + item * p.v.batch + kv_head * p.v.head;

    // Keys that the first and the last query of the block see.
    const uint32_t fewest = p.causal ? first + 1 + (p.k_len - p.q_len) : p.k_len;
    const uint32_t most = p.causal ? min(p.k_len, fewest + QUERIES - 1) : p.k_len;
    const int steps = (most + KEYS - 1) / KEYS;

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    // Four warps of 16 queries make a group's 64.
    const uint32_t own = 16 * warp;

    fetch<T, QUERIES>(base, q, p.q.position, first, p.q_len, p.width);
    fetch<T, KEYS>(keys, k, p.k.position, 0, p.k_len, p.width);
    wait_for_copies();
    publish_to_products();
    __syncthreads();
    if (steps > 1) fetch<T, KEYS>(keys + STAGE, k, p.k.position, KEYS, p.k_len, p.width);

    uint32_t query[WIDTH / 16][4];
#pragma unroll
    for (int depth = 0; depth < WIDTH / 16; ++depth) {
        load_matrices(query[depth], base + offset<QUERIES>(own + lane % 16, 2 * depth + lane / 16));
    }

    float sums[WIDTH / 2] = {}, scores[KEYS / 2], next[KEYS / 2];
    uint32_t weights[KEYS / 16][4], narrow[KEYS / 16][4];
    Softmax softmax = {{-INFINITY, -INFINITY}, {}, {}, p.factor};

    // Hides the keys of a step that a query does not see.
    const auto hide = [&](int step) {
        if ((step + 1) * KEYS <= fewest) return;
#pragma unroll
        for (int e = 0; e < KEYS / 2; ++e) {
            const uint32_t key = step * KEYS + e / 4 * 8 + 2 * quad + e % 2;
            const uint32_t visible = p.causal ? min(p.k_len, fewest + own + e % 4 / 2 * 8 + group) : p.k_len;
            if (key >= visible) scores[e] = -INFINITY;
        }
    };
    // Waits for what was fetched during the last step, and fetches for the next: values of this step, keys of the one after
    // the next. The products of the last step are done, so their stages are free.
    const auto turn = [&](int step) {
        wait_for_copies();
        publish_to_products();
        __syncthreads();
        if (step + 2 < steps) {
            fetch<T, KEYS>(keys + step % 2 * STAGE, k, p.k.position, (step + 2) * KEYS, p.k_len, p.width);
        }
        fetch<T, KEYS>(values + step % 2 * STAGE, v, p.v.position, step * KEYS, p.k_len, p.width);
    };

    pin(scores);
    products_begin();
    score<T>(scores, query, keys);
    products_commit();
    products_wait();
    pin(scores);

    hide(0);
    turn(0);
    pin(next);
    products_begin();
    // With one step alone, scores of nothing, which nobody looks at; as behind the last step below. Products that are under
    // way on some paths only would be made to wait for one another.
    score<T>(next, query, keys + STAGE);
    products_commit();
    softmax.advance<T>(scores, weights);
    pin(weights);
    products_wait();
    pin(next);

    for (int step = 1; step < steps; ++step) {
#pragma unroll
        for (int e = 0; e < KEYS / 2; ++e) scores[e] = next[e];
        // Not below: with a branch among them, products are waited for at once.
        hide(step);
        turn(step);
        pin(next);
        pin(sums);
        products_begin();
        gather<T>(sums, weights, values + (step + 1) % 2 * STAGE);
        score<T>(next, query, keys + (step + 1) % 2 * STAGE);
        products_commit();
        softmax.advance<T>(scores, narrow);
        // All of it before the wait.
        pin(narrow);
        products_wait();
        pin(next);
        pin(sums);
        pin(weights);
        // Always: if only where a maximum has risen, the compiler makes the products wait for one another.
#pragma unroll
        for (int e = 0; e < WIDTH / 2; ++e) sums[e] *= softmax.correction[e % 4 / 2];
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
#pragma unroll
            for (int word = 0; word < 4; ++word) weights[j][word] = narrow[j][word];
        }
    }

    wait_for_copies();
    publish_to_products();
    __syncthreads();
    pin(sums);
    products_begin();
    gather<T>(sums, weights, values + (steps + 1) % 2 * STAGE);
    products_commit();
    products_wait();
    pin(sums);

    // The queries of a warp are in its registers: their place takes the result, so that it leaves in whole rows.
    unsigned char* rows = memory + (base - unaligned);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = softmax.total[r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const float scale = 1.0f / sum;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; ++c) {
            const uint32_t pair = narrow_pair<T>(sums[4 * c + 2 * r] * scale, sums[4 * c + 2 * r + 1] * scale);
            *reinterpret_cast<uint32_t*>(rows + offset<QUERIES>(own + 8 * r + group, c) + 4 * quad) = pair;
        }
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out.base) + item * p.out.batch + head * p.out.head;
    for (uint32_t i = lane; i < 16 * RUNS; i += 32) {
        const uint32_t row = own + i / RUNS, run = i % RUNS;
        const uint64_t position = first + row;
        if (8 * run >= p.width || position >= p.q_len) continue;
        const Vec<T, 8> found = load_vec<T, 8>(reinterpret_cast<const T*>(rows + offset<QUERIES>(row, run)));
        T* place = out + position * p.out.position + 8 * run;
        if (p.vector_out) {
            store_vec<T, 8>(place, found);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) place[e] = found.v[e];
        }
    }
}

#define FUSED_ATTENTION_SM90(suffix, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        fused_attention_sm90_##suffix(const __grid_constant__ FusedAttention params) {                                \
        attend<T>(params);                                                                                            \
    }

FOR_EACH_HALF(FUSED_ATTENTION_SM90)
