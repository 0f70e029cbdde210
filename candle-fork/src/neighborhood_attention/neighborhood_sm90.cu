// Neighborhood attention for compute capability 9.0, heads of up to 64 components. Formula, arithmetic and layout of
// the result as in neighborhood_tiled.cu.
//
// Ownership: a block takes one item after another: queries of one head, 4 along T, 4 along one of H and W, the even
// axis, and 12 along the other, the long axis. It has three groups of four warps for products, each with four of the
// twelve, and a group of which one thread has copies made. A group's products have 64 rows: four slices along T, one
// for each warp, of sixteen queries.
// The block walks over the planes along T of the panel of keys that any of its queries sees. The products of a plane
// take the keys that any of the group's queries sees, 8 FIRST of them, and then 8 SECOND. While a group turns scores
// into weights, which a warp leaves out for planes that its slice does not see, the others' products are under way. The
// mask along H and W is made once an item; what is hidden by it or lies beyond the panel has weight zero.
// Shared memory: a ring of SLOTS boxes, which copies fill ahead: queries of an item, then keys and values of each plane
// by turns. Rows are stored as wgmma.cuh wants them. Then masks of the groups, places of the keys in a plane, barriers:
// `SHARED_BYTES` of choose/warp_groups.rs.
// Queries beyond the grid are not stored.
// A NaN or an infinity in a value may reach all queries of a group that multiplies its plane.
// Index width: 64 bits, 32 for positions.
// Preconditions: maps as cuda/warp_groups.rs makes them; `pitch` even; factor > 0.

#include "attention/pipeline.cuh"
#include "neighborhood_attention/neighborhood.cuh"
#include "neighborhood_attention/products.cuh"

// `Params` in cuda/warp_groups.rs.
struct Sm90Neighborhood {
    TensorMap q, k, v; // [heads, D, even axis, long axis, planes], from the inside out
    void* out;
    uint64_t items;
    Windows grid;        // T, long axis, even axis
    uint32_t heads;
    uint32_t width;      // D
    uint32_t tiles;      // of queries along T
    uint32_t patches[2]; // along the long axis and the even one
    uint32_t steps[2];   // positions from one to the next along them
    uint32_t pitch;      // keys of a box along the even axis
    uint32_t keys;       // that a group takes of a plane
    uint32_t rows;       // keys of a box
    float factor;
    uint32_t unused;
};

static_assert(sizeof(Sm90Neighborhood) == 512, "as in warp_groups.rs");

constexpr int WIDTH = 64, PITCH = 2 * WIDTH, SIDE = 4, SLICE = SIDE * SIDE;
constexpr int GROUPS = 3, SLICES = 4;
constexpr int CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
// Keys that products take of a plane, at most.
constexpr int KEYS = 200;
// Rows of a box, and what products reach behind it.
constexpr int ROWS = 312, BOX = ROWS * PITCH, SLOTS = 5;
constexpr int WORDS = 4;

struct Shared {
    uint32_t boxes, masks, places, full, empty;

    explicit __device__ __forceinline__ Shared(const void* memory) {
        boxes = (shared_address(memory) + 1023) / 1024 * 1024;
        masks = boxes + SLOTS * BOX;
        places = masks + GROUPS * WORDS * 32 * 4;
        full = places + KEYS * 4;
        empty = full + SLOTS * 8;
    }
};

// A slot of the ring.
struct Slot : Turn<SLOTS> {
    __device__ __forceinline__ uint32_t box(const Shared& shared) const { return shared.boxes + stage * BOX; }
    __device__ __forceinline__ uint32_t full(const Shared& shared) const { return shared.full + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(const Shared& shared) const { return shared.empty + 8 * stage; }
    __device__ __forceinline__ void wait(const Shared& shared) const { barrier_wait(full(shared), parity); }

    // This warp does not read it any more.
    __device__ __forceinline__ void release(const Shared& shared) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(shared));
    }
};

// Queries of a block.
struct Item {
    uint32_t batch, head;
    uint32_t t, t_end; // along T, among the queries
    uint32_t a, b;     // along the long and the even axis
    uint32_t plane;    // first of the panel
    uint32_t planes;

    __device__ __forceinline__ Item(const Sm90Neighborhood& p, uint64_t index) {
        uint64_t rest = quotient(index, p.patches[1]);
        b = SIDE * uint32_t(index - rest * p.patches[1]);
        index = rest;
        rest = quotient(index, p.patches[0]);
        a = GROUPS * SIDE * uint32_t(index - rest * p.patches[0]);
        index = rest;
        rest = quotient(index, p.heads);
        head = uint32_t(index - rest * p.heads);
        batch = uint32_t(quotient(rest, p.tiles));
        t = SLICES * uint32_t(rest - uint64_t(batch) * p.tiles);
        t_end = min(t + SLICES, p.grid.frames);
        plane = p.grid.start_plane(t);
        planes = p.grid.start_plane(t_end - 1) + p.grid.windows[0] - plane;
    }
};

// First key along the long axis that the query `row` behind `first` sees; the last query stands for those beyond the
// grid.
__device__ __forceinline__ int32_t start_of(const Windows& grid, uint32_t first, uint32_t row) {
    return grid.start(1, min(first + row, grid.extents[1] - 1));
}

// Where the keys of a group begin along the long axis, behind the first of the box: a multiple of four, after whose rows the
// storage repeats. The windows of its four queries are within as many keys as a window has and three more.
__device__ __forceinline__ int32_t offset_of(const Windows& grid, uint32_t first, int32_t box, uint32_t group) {
    return (start_of(grid, first, SIDE * group) - box) / SIDE * SIDE;
}

// The first key of the box along the long axis: the last for which there are such offsets. It may lie before the grid.
__device__ __forceinline__ int32_t box_of(const Windows& grid, uint32_t first) {
    int32_t box = start_of(grid, first, 0);
    for (int tries = 0; tries < SIDE; ++tries) {
        bool fits = true;
        for (uint32_t group = 0; group < GROUPS; ++group) {
            const int32_t last = start_of(grid, first, SIDE * group + SIDE - 1);
            fits &= last <= box + offset_of(grid, first, box, group) + SIDE - 1;
        }
        if (fits) break;
        --box;
    }
    return box;
}

// `copy_box` of a tensor of five axes.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint32_t barrier, const int32_t (&at)[5]) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                 "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier)
                 : "memory");
}

// The copies of all items of a block.
__device__ __forceinline__ void produce(const Sm90Neighborhood& p, const Shared& shared) {
    Slot slot;
    const auto copy = [&](const TensorMap& map, const int32_t (&at)[5], uint32_t rows) {
        barrier_wait(slot.empty(shared), slot.parity ^ 1);
        barrier_expect(slot.full(shared), rows * PITCH);
        copy_box(slot.box(shared), map, slot.full(shared), at);
        slot.advance();
    };
    for (uint64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
        const Item item(p, index);
        const int32_t head = item.head, a = box_of(p.grid, item.a), b = p.grid.start(2, item.b);
        const int32_t q_plane = item.batch * p.grid.frames + item.t;
        const int32_t k_plane = item.batch * p.grid.extents[0] + item.plane;
        copy(p.q, {0, head, int32_t(item.b), int32_t(item.a), q_plane}, SLICES * GROUPS * SLICE);
        for (uint32_t plane = 0; plane < item.planes; ++plane) {
            const int32_t at[5] = {0, head, b, a, k_plane + int32_t(plane)};
            copy(p.k, at, p.rows);
            copy(p.v, at, p.rows);
        }
    }
}

// Of a step through 8 COLUMNS keys of a plane: what a lane has of the scores, and of the weights, in sixteens.
template <int COLUMNS> using Scores = float[4 * COLUMNS];
template <int COLUMNS> using Weights = uint32_t[(COLUMNS + 1) / 2][4];

// What a lane knows of its two queries, l / 4 and l / 4 + 8 of the warp's slice.
struct State {
    float sums[WIDTH / 2] = {};
    float maximum[2] = {-INFINITY, -INFINITY};
    float total[2] = {};
};

// Where a word of a mask has score i: seven to a byte, as many as can be made predicates at once.
__device__ __forceinline__ constexpr uint32_t bit_of(uint32_t i) { return i / 7 * 8 + i % 7; }

// How far, as a power of two, scores may rise above the maximum that sums are relative to before it follows them. Weights
// up to 2^RISE lose nothing in T, and rescaling becomes rare.
constexpr float RISE = 8.0f;

// Scores of a step to weights; `mask` says which ones the lane sees, see `mask_word`.
template <typename T, int COLUMNS>
__device__ __forceinline__ void advance(State& state, Scores<COLUMNS>& scores, Weights<COLUMNS>& weights,
                                        const uint32_t (&mask)[2], float factor) {
    // Two chains for each query, for the latency.
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& score = scores[4 * j + e];
            if (!(mask[(4 * j + e) / 28] >> bit_of((4 * j + e) % 28) & 1)) score = -INFINITY;
            most[e / 2][j % 2] = fmaxf(most[e / 2][j % 2], score);
        }
    }
    bool risen = false;
    float next[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) next[r] = fmaxf(most[r][0], most[r][1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) next[r] = fmaxf(next[r], __shfl_xor_sync(0xffffffff, next[r], 1));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        next[r] = fmaxf(next[r], __shfl_xor_sync(0xffffffff, next[r], 2));
        // Not if there is no key yet: the difference is NaN.
        const bool rises = (next[r] - state.maximum[r]) * factor > RISE;
        next[r] = rises ? next[r] : state.maximum[r];
        risen |= rises;
        // A query that has seen no key yet has weights of zero, not of NaN.
        shift[r] = next[r] == -INFINITY ? 0.0f : next[r] * factor;
    }
    if (__any_sync(0xffffffff, risen)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Exactly one where the maximum stays.
            const float base = next[r] == -INFINITY ? 0.0f : next[r];
            const float correction = power_of_two((state.maximum[r] - base) * factor);
            state.total[r] *= correction;
#pragma unroll
            for (int c = 0; c < WIDTH / 8; ++c) {
                state.sums[4 * c + 2 * r] *= correction;
                state.sums[4 * c + 2 * r + 1] *= correction;
            }
            state.maximum[r] = next[r];
        }
    }
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float pair[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                pair[c] = power_of_two(fmaf(scores[4 * j + 2 * r + c], factor, -shift[r]));
                sum[r][c] += pair[c];
            }
            weights[j / 2][j % 2 * 2 + r] = narrow_pair<T>(pair[0], pair[1]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.total[r] += sum[r][0] + sum[r][1];
    // The half of a product behind the last key.
    if (COLUMNS % 2 == 1) weights[COLUMNS / 2][2] = weights[COLUMNS / 2][3] = 0;
}

using Query = uint32_t[WIDTH / 16][4];

// The operand `bytes` behind another one.
__device__ __forceinline__ uint64_t behind(uint64_t operand, uint32_t bytes) {
    return operand >> 32 << 32 | (uint32_t(operand) + bytes / 16);
}

// A step through a plane: weights of 8 COLUMNS keys and their values.
template <typename T, int COLUMNS>
__device__ __forceinline__ void step(State& state, const Query& q, uint32_t keys, uint32_t values, bool sees,
                                     const uint32_t (&mask)[2], float factor) {
    const uint64_t columns = panel_columns(keys), rows = panel_rows(values, 1024);
    Scores<COLUMNS> scores;
    products_begin();
#pragma unroll
    for (int depth = 0; depth < WIDTH / 16; ++depth) {
        multiply_by_keys<T>(scores, q[depth], behind(columns, 32 * depth), depth > 0);
    }
    products_commit();
    products_wait();
    pin(scores);

    Weights<COLUMNS> weights;
    if (sees) {
        advance<T, COLUMNS>(state, scores, weights, mask, factor);
    } else {
#pragma unroll
        for (int j = 0; j < (COLUMNS + 1) / 2; ++j) {
#pragma unroll
            for (int word = 0; word < 4; ++word) weights[j][word] = 0;
        }
    }

    pin(weights);
    pin(state.sums);
    products_begin();
#pragma unroll
    for (int j = 0; j < (COLUMNS + 1) / 2; ++j) {
        multiply_by_values<T>(state.sums, weights[j], behind(rows, j * 16 * PITCH), 1);
    }
    products_commit();
    products_wait();
    pin(state.sums);
    pin(weights);
}

// A word of the masks of a group, of 28 scores: lane l, word w at 32 w + l; words 0 and 1 for the first step, 2 and 3 for the
// second.
template <int FIRST>
__device__ __forceinline__ uint32_t mask_word(const Sm90Neighborhood& p, const Item& item, const uint32_t* places,
                                              int32_t keys, uint32_t group, uint32_t word, uint32_t lane) {
    const uint32_t first = word / 2 * 8 * FIRST, last = word / 2 ? KEYS : 8 * FIRST;
    uint32_t a_start[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) a_start[r] = start_of(p.grid, item.a, SIDE * group + lane / 16 + 2 * r) - keys;
    const uint32_t b_last = p.grid.extents[2] - 1;
    const uint32_t b_start = p.grid.start(2, min(item.b + lane / 4 % SIDE, b_last)) - p.grid.start(2, item.b);
    uint32_t bits = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < 28; ++i) {
        const uint32_t score = 28 * (word % 2) + i;
        const uint32_t key = first + 8 * (score / 4) + 2 * (lane % 4) + score % 2;
        const uint32_t place = key < last ? places[key] : ~0u;
        // Differences below zero wrap to large numbers.
        const bool seen = (place & 0xffff) - b_start < p.grid.windows[2] &&
                          (place >> 16) - a_start[score / 2 % 2] < p.grid.windows[1];
        bits |= uint32_t(seen) << bit_of(i);
    }
    return bits;
}

// The queries of a warp, from a box of them; what remains of them behind the rows of a box of values becomes zero.
__device__ __forceinline__ void take_queries(Query& q, uint32_t box, uint32_t first, uint32_t lane, uint32_t rows) {
    const uint32_t row = first + lane % 16;
#pragma unroll
    for (int depth = 0; depth < WIDTH / 16; ++depth) {
        load_matrices(q[depth], box + row * PITCH + ((2 * depth + lane / 16 ^ row % 8) << 4));
    }
    __syncwarp();
    if (row >= rows) {
#pragma unroll
        for (int run = 0; run < 4; ++run) {
            const uint32_t to = box + row * PITCH + (lane / 16 * 4 + run) * 16;
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
        }
        publish_to_products();
    }
}

template <typename T>
__device__ __forceinline__ void store(const Sm90Neighborhood& p, const Item& item, const State& state, uint32_t t,
                                      uint32_t group, uint32_t lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.total[r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const float scale = 1.0f / sum;
        const uint32_t a = item.a + SIDE * group + lane / 16 + 2 * r, b = item.b + lane / 4 % SIDE;
        if (t >= item.t_end || a >= p.grid.extents[1] || b >= p.grid.extents[2]) continue;
        const uint64_t plane = uint64_t(item.batch) * p.grid.frames + t;
        const uint64_t in_plane = uint64_t(a) * p.steps[0] + uint64_t(b) * p.steps[1];
        const uint64_t position = plane * p.grid.extents[1] * p.grid.extents[2] + in_plane;
        T* out = static_cast<T*>(p.out) + (position * p.heads + item.head) * p.width;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; ++c) {
            if (8 * c >= p.width) break;
            const float* sums = state.sums + 4 * c + 2 * r;
            const uint32_t pair = narrow_pair<T>(sums[0] * scale, sums[1] * scale);
            *reinterpret_cast<uint32_t*>(out + 8 * c + 2 * (lane % 4)) = pair;
        }
    }
}

template <typename T, int FIRST, int SECOND>
__device__ __forceinline__ void consume(const Sm90Neighborhood& p, const Shared& shared, uint32_t* masks,
                                        const uint32_t* places) {
    // The same for all lanes, which the compiler is to see.
    const uint32_t index_of_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const uint32_t group = index_of_warp / 4, warp = index_of_warp % 4, lane = threadIdx.x % 32;
    masks += group * WORDS * 32;
    Slot slot;
    for (uint64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
        const Item item(p, index);
        const int32_t box = box_of(p.grid, item.a), offset = offset_of(p.grid, item.a, box, group);
        group_sync(group + 1, 128);
        masks[32 * warp + lane] = mask_word<FIRST>(p, item, places, box + offset, group, warp, lane);
        group_sync(group + 1, 128);
        uint32_t mask[2][2];
#pragma unroll
        for (int word = 0; word < WORDS; ++word) mask[word / 2][word % 2] = masks[32 * word + lane];

        Query q;
        slot.wait(shared);
        take_queries(q, slot.box(shared), (warp * GROUPS + group) * SLICE, lane, p.rows);
        slot.release(shared);
        slot.advance();

        const uint32_t t = item.t + warp;
        // The planes of the panel that this warp's slice sees.
        const uint32_t from = t < item.t_end ? p.grid.start_plane(t) - item.plane : item.planes;
        const uint32_t own = offset * p.pitch * PITCH;

        State state;
        for (uint32_t plane = 0; plane < item.planes; ++plane) {
            const bool sees = plane >= from && plane < from + p.grid.windows[0];
            const Slot keys = slot;
            slot.advance();
            keys.wait(shared);
            slot.wait(shared);
            step<T, FIRST>(state, q, keys.box(shared) + own, slot.box(shared) + own, sees, mask[0], p.factor);
            if constexpr (SECOND > 0) {
                const uint32_t at = own + 8 * FIRST * PITCH;
                step<T, SECOND>(state, q, keys.box(shared) + at, slot.box(shared) + at, sees, mask[1], p.factor);
            }
            keys.release(shared);
            slot.release(shared);
            slot.advance();
        }
        store<T>(p, item, state, t, group, lane);
    }
}

template <typename T, int FIRST, int SECOND> __device__ __forceinline__ void attend(const Sm90Neighborhood& p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared(memory);
    unsigned char* boxes = memory + (shared.boxes - shared_address(memory));
    uint32_t* masks = reinterpret_cast<uint32_t*>(boxes + (shared.masks - shared.boxes));
    uint32_t* places = reinterpret_cast<uint32_t*>(boxes + (shared.places - shared.boxes));

    // Copies leave the rows behind a box alone: they have to be numbers.
    const uint32_t tail = (ROWS - p.rows) * PITCH / 16;
    for (uint32_t i = threadIdx.x; i < SLOTS * tail; i += THREADS) {
        reinterpret_cast<uint4*>(boxes + i / tail * BOX + p.rows * PITCH)[i % tail] = uint4{0, 0, 0, 0};
    }
    for (uint32_t key = threadIdx.x; key < KEYS; key += THREADS) {
        places[key] = key < p.keys ? key / p.pitch << 16 | key % p.pitch : ~0u;
    }
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(shared.full + 8 * slot, 1);
            barrier_init(shared.empty + 8 * slot, CONSUMERS / 32);
        }
        barriers_publish();
    }
    publish_to_products();
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        registers_give<32>();
        if (threadIdx.x == CONSUMERS) produce(p, shared);
    } else {
        registers_take<160>();
        consume<T, FIRST, SECOND>(p, shared, masks, places);
    }
}

#define KERNEL(suffix, T, FIRST, SECOND)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        neighborhood_sm90_##FIRST##_##SECOND##_##suffix(const __grid_constant__ Sm90Neighborhood params) {             \
        attend<T, FIRST, SECOND>(params);                                                                              \
    }
#define KERNELS(suffix, T)                                                                                             \
    KERNEL(suffix, T, 13, 12)                                                                                          \
    KERNEL(suffix, T, 14, 0)                                                                                           \
    KERNEL(suffix, T, 8, 0)

FOR_EACH_HALF(KERNELS)
