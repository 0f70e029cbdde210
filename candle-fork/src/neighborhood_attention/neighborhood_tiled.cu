// Neighborhood attention by tiles of matrix products. Needs compute capability 8.0.
//
// Formula: out = softmax(scale q k^T) v over the window of each query and head, with a running maximum and sum
// ("FlashAttention", Dao et al., algorithm 1). The exponent is of two: factor = scale log2(e). For windows see window.rs.
// Layout: q, k, v [B, T, H, W, heads, D], last axis packed, D a multiple of 8 up to WIDTH; out the same, contiguous.
// Ownership: a block owns a box of queries of one head: 4 along H and W, and along T one slice for each of its warps, at most
// eight. The sixteen queries of a slice are the rows of the warp's products. The block walks over the panel of keys that any
// of its queries sees, plane after plane along T, and through a plane in steps of 16 FIRST and 16 SECOND keys by turns. A warp
// passes over planes that its slice does not see, so T needs no mask; the mask along H and W is the same for all slices
// and planes and is made once.
// Queries beyond the grid repeat the last one and are not stored; places beyond the panel repeat its last key, hidden.
// Arithmetic: as fused_attention.cu. A NaN or an infinity in a value of the panel may reach all queries of the box that see
// its plane.
// Shared memory: keys and values of two steps, of which one is filled while the other is read; the queries, whose place takes
// the result; offsets of the keys and values of a plane; masks: `shared_bytes` of choose.rs. Rows are stored with their runs
// of 16 bytes permuted, run c of row r at c ^ (r % 8), so that eight rows of a run lie in different banks.
// Index width: 64 bits, 32 inside of a plane of the panel.
// Preconditions: addresses and distances are multiples of 16 bytes; factor > 0; extents below 2^30.

#include "neighborhood_attention/neighborhood.cuh"

// `Params` in cuda/tiled.rs.
struct TiledNeighborhood {
    Field q, k, v;
    void* out;
    Windows grid;
    uint32_t heads;
    uint32_t width;      // D
    uint32_t tiles;      // boxes along T
    uint32_t patches[2]; // along H and W
    uint32_t keys;       // places for offsets
    float factor;
    uint32_t unused;
};

static_assert(sizeof(TiledNeighborhood) == 216, "as in tiled.rs");

constexpr int SIDE = 4, SLICE = SIDE * SIDE, THREADS = 256;

// Rows of WIDTH two-byte elements in shared memory.
template <int WIDTH> struct Stored {
    static constexpr int PITCH = WIDTH * 2;
    static constexpr int RUNS = PITCH / 16;

    static __device__ __forceinline__ int offset(int row, int run) { return row * PITCH + ((run ^ (row & 7)) << 4); }
};

// The keys that a box sees of each plane.
struct Panel {
    uint32_t keys;
    const uint32_t* k_offsets;
    const uint32_t* v_offsets;
};

// Begins to copy ROWS keys and values from key `first` of a plane on. k and v are the plane's first, at this thread's run.
template <typename T, int WIDTH, int ROWS>
__device__ __forceinline__ void fetch(uint32_t k_to, uint32_t v_to, const T* k, const T* v, const Panel& panel,
                                      uint32_t first, uint32_t bytes) {
    constexpr uint32_t RUNS = Stored<WIDTH>::RUNS;
    const uint32_t run = threadIdx.x % RUNS, step = blockDim.x / RUNS;
    for (uint32_t row = threadIdx.x / RUNS; row < ROWS; row += step) {
        const uint32_t key = min(first + row, panel.keys - 1), place = Stored<WIDTH>::offset(row, run);
        copy_async(k_to + place, k + panel.k_offsets[key], bytes);
        copy_async(v_to + place, v + panel.v_offsets[key], bytes);
    }
}

// What a lane knows of its two queries, group and group + 8 of the slice.
template <int WIDTH> struct State {
    float sums[WIDTH / 8][4] = {};
    float maximum[2] = {-INFINITY, -INFINITY};
    float total[2] = {};
};

// Where a lane finds its rows of matrices, without the run; and the part of the run that depends on the lane.
template <int WIDTH> struct Lane {
    uint32_t q_row, k_row, v_row, q_run, k_run;
};

// Takes 16 GROUPS keys, of which bit 4 j + e of `mask` says whether the lane sees the one of score e of tile j.
template <typename T, int WIDTH, int GROUPS>
__device__ __forceinline__ void consume(State<WIDTH>& state, const Lane<WIDTH>& lane, uint32_t stage,
                                        const uint32_t* mask, float factor) {
    constexpr int PITCH = Stored<WIDTH>::PITCH, TILES = 2 * GROUPS;
    const float zeros[4] = {};
    float scores[TILES][4];
#pragma unroll
    for (int depth = 0; depth < WIDTH / 16; ++depth) {
        uint32_t a[4];
        load_matrices(a, lane.q_row + (lane.q_run ^ (depth << 5)));
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            uint32_t b[4];
            load_matrices(b, stage + lane.k_row + j * 16 * PITCH + (lane.k_run ^ (depth << 5)));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float(&to)[4] = scores[2 * j + half];
                if (depth == 0) {
                    multiply_add<T>(to, a, b[2 * half], b[2 * half + 1], zeros);
                } else {
                    multiply_add<T>(to, a, b[2 * half], b[2 * half + 1]);
                }
            }
        }
    }

#pragma unroll
    for (int word = 0; word < (TILES + 7) / 8; ++word) {
        const uint32_t bits = mask[word * 32];
#pragma unroll
        for (int j = 8 * word; j < 8 * word + 8 && j < TILES; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (!(bits >> (4 * (j % 8) + e) & 1)) scores[j][e] = -INFINITY;
            }
        }
    }

    bool risen = false;
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float next = state.maximum[r];
#pragma unroll
        for (int j = 0; j < TILES; ++j) next = fmaxf(next, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
        next = fmaxf(next, __shfl_xor_sync(0xffffffff, next, 1));
        next = fmaxf(next, __shfl_xor_sync(0xffffffff, next, 2));
        // A query that has seen no key yet has weights of zero, not of NaN.
        const float base = next == -INFINITY ? 0.0f : next;
        correction[r] = power_of_two((state.maximum[r] - base) * factor);
        risen |= correction[r] != 1.0f;
        state.maximum[r] = next;
        const float shift = base * factor;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& score = scores[j][2 * r + c];
                score = power_of_two(fmaf(score, factor, -shift));
                sum += score;
            }
        }
        state.total[r] = state.total[r] * correction[r] + sum;
    }
    // Seldom after the first planes.
    if (__any_sync(0xffffffff, risen)) {
#pragma unroll
        for (int c = 0; c < WIDTH / 8; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state.sums[c][e] *= correction[e / 2];
        }
    }

#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        uint32_t a[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float(&from)[4] = scores[2 * j + word / 2];
            a[word] = narrow_pair<T>(from[word % 2 * 2], from[word % 2 * 2 + 1]);
        }
#pragma unroll
        for (int c = 0; c < WIDTH / 16; ++c) {
            uint32_t b[4];
            load_transposed(b, stage + lane.v_row + j * 16 * PITCH + (lane.q_run ^ (c << 5)));
            multiply_add<T>(state.sums[2 * c], a, b[0], b[1]);
            multiply_add<T>(state.sums[2 * c + 1], a, b[2], b[3]);
        }
    }
}

template <typename T, int WIDTH, int FIRST, int SECOND>
__device__ __forceinline__ void attend(const TiledNeighborhood& p) {
    using Row = Stored<WIDTH>;
    constexpr uint32_t HALF_STAGE = 16 * FIRST * Row::PITCH, STAGE = 2 * HALF_STAGE;
    constexpr uint32_t WORDS = (FIRST + 3) / 4;
    constexpr uint32_t CYCLE = 16 * (FIRST + SECOND);
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, id = threadIdx.x % 32;
    unsigned char* queries = memory + 2 * STAGE;
    uint32_t* k_offsets = reinterpret_cast<uint32_t*>(queries + warps * SLICE * Row::PITCH);
    uint32_t* v_offsets = k_offsets + p.keys;
    uint32_t* masks = v_offsets + p.keys;

    // Neighbouring patches follow one another: they share most keys.
    uint32_t rest = blockIdx.x;
    const uint32_t patch_w = rest % p.patches[1];
    rest /= p.patches[1];
    const uint32_t patch_h = rest % p.patches[0];
    rest /= p.patches[0];
    const uint32_t head = rest % p.heads;
    rest /= p.heads;
    const uint32_t tile = rest % p.tiles, item = rest / p.tiles;

    const uint32_t* extents = p.grid.extents;
    const uint32_t* windows = p.grid.windows;
    const uint32_t frames = p.grid.frames;
    const uint32_t t_first = uint64_t(tile) * frames / p.tiles, t_end = uint64_t(tile + 1) * frames / p.tiles;
    const uint32_t h_first = SIDE * patch_h, h_last = min(h_first + SIDE, extents[1]) - 1;
    const uint32_t w_first = SIDE * patch_w, w_last = min(w_first + SIDE, extents[2]) - 1;
    const uint32_t t0 = p.grid.start_plane(t_first), h0 = p.grid.start(1, h_first), w0 = p.grid.start(2, w_first);
    const uint32_t planes = p.grid.start_plane(t_end - 1) + windows[0] - t0;
    const uint32_t across = p.grid.start(2, w_last) + windows[2] - w0;
    const uint32_t keys = (p.grid.start(1, h_last) + windows[1] - h0) * across;
    const Panel panel = {keys, k_offsets, v_offsets};

    uint32_t steps = (keys + CYCLE - 1) / CYCLE;
    if (SECOND > 0) steps = 2 * steps - ((keys - 1) % CYCLE < 16 * FIRST);
    const auto first_key = [](uint32_t step) {
        return SECOND > 0 ? step / 2 * CYCLE + step % 2 * 16 * FIRST : step * CYCLE;
    };

    for (uint32_t key = threadIdx.x; key < keys; key += blockDim.x) {
        const uint32_t h = key / across, w = key % across;
        k_offsets[key] = h * p.k.axes[1] + w * p.k.axes[2];
        v_offsets[key] = h * p.v.axes[1] + w * p.v.axes[2];
    }
    for (uint32_t index = threadIdx.x; index < steps * WORDS * 32; index += blockDim.x) {
        const uint32_t lane = index % 32, word = index / 32 % WORDS, step = index / 32 / WORDS;
        const uint32_t end = min(keys, first_key(step + 1));
        uint32_t bits = 0;
        for (uint32_t bit = 0; bit < 32; ++bit) {
            const uint32_t query = lane / 4 + bit / 2 % 2 * 8;
            const uint32_t key = first_key(step) + 8 * (8 * word + bit / 4) + lane % 4 * 2 + bit % 2;
            const uint32_t h = h0 + key / across - p.grid.start(1, min(h_first + query / SIDE, h_last));
            const uint32_t w = w0 + key % across - p.grid.start(2, min(w_first + query % SIDE, w_last));
            // Differences below zero wrap to large numbers.
            if (key < end && h < windows[1] && w < windows[2]) bits |= 1u << bit;
        }
        masks[index] = bits;
    }

    const uint32_t run = threadIdx.x % Row::RUNS, bytes = 8 * run < p.width ? 16 : 0, component = bytes ? 8 * run : 0;
    const T* q = static_cast<const T*>(p.q.base) + item * p.q.batch + head * p.q.head + component;
    const T* k = static_cast<const T*>(p.k.base) + item * p.k.batch + head * p.k.head + component + p.k.at(t0, h0, w0);
    const T* v = static_cast<const T*>(p.v.base) + item * p.v.batch + head * p.v.head + component + p.v.at(t0, h0, w0);
    const uint32_t stages = shared_address(memory), q_shared = shared_address(queries);

    for (uint32_t row = threadIdx.x / Row::RUNS; row < warps * SLICE; row += blockDim.x / Row::RUNS) {
        const uint32_t t = min(t_first + row / SLICE, t_end - 1);
        const uint32_t h = min(h_first + row % SLICE / SIDE, h_last), w = min(w_first + row % SIDE, w_last);
        copy_async(q_shared + Row::offset(row, run), q + p.q.at(t, h, w), bytes);
    }
    // The offsets and masks of all threads are there.
    __syncthreads();
    fetch<T, WIDTH, 16 * FIRST>(stages, stages + HALF_STAGE, k, v, panel, 0, bytes);

    const uint32_t own_run = ((id / 16) ^ (id % 8)) << 4;
    const Lane<WIDTH> lane = {
        q_shared + (warp * SLICE + id % 16) * Row::PITCH,
        (id % 8 + id / 16 * 8) * Row::PITCH,
        HALF_STAGE + (id % 16) * Row::PITCH,
        own_run,
        ((id / 8 % 2) ^ (id % 8)) << 4,
    };
    const bool exists = t_first + warp < t_end;
    // The planes of the panel that this warp's slice sees.
    const uint32_t own_first = exists ? p.grid.start_plane(t_first + warp) - t0 : planes;

    State<WIDTH> state;
    uint32_t stage = stages, other = stages + STAGE;
    for (uint32_t plane = 0; plane < planes; ++plane) {
        const bool sees = plane >= own_first && plane < own_first + windows[0];
        for (uint32_t step = 0; step < steps; ++step) {
            wait_for_copies();
            // Everybody's copies are there, and nobody reads the other stage any more.
            __syncthreads();
            const bool last = step + 1 == steps;
            if (!last || plane + 1 < planes) {
                const uint32_t next = last ? 0 : step + 1;
                const T* next_k = k + (plane + last) * p.k.axes[0];
                const T* next_v = v + (plane + last) * p.v.axes[0];
                const uint32_t key = first_key(next);
                if (SECOND > 0 && next % 2 == 1) {
                    // At least one, for the compiler's sake.
                    constexpr int ROWS = SECOND > 0 ? 16 * SECOND : 16;
                    fetch<T, WIDTH, ROWS>(other, other + HALF_STAGE, next_k, next_v, panel, key, bytes);
                } else {
                    fetch<T, WIDTH, 16 * FIRST>(other, other + HALF_STAGE, next_k, next_v, panel, key, bytes);
                }
            }
            if (sees) {
                const uint32_t* mask = masks + step * WORDS * 32 + id;
                if constexpr (SECOND > 0) {
                    if (step % 2 == 1) {
                        consume<T, WIDTH, SECOND>(state, lane, stage, mask, p.factor);
                    } else {
                        consume<T, WIDTH, FIRST>(state, lane, stage, mask, p.factor);
                    }
                } else {
                    consume<T, WIDTH, FIRST>(state, lane, stage, mask, p.factor);
                }
            }
            const uint32_t spare = stage;
            stage = other;
            other = spare;
        }
    }
    if (!exists) return;

    // The queries of a warp are read by it alone: their place takes the result, so that it leaves in whole rows.
    __syncwarp();
    unsigned char* own = queries + warp * SLICE * Row::PITCH;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.total[r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const float scale = 1.0f / sum;
        const int row = 8 * r + id / 4;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; ++c) {
            const uint32_t pair = narrow_pair<T>(state.sums[c][2 * r] * scale, state.sums[c][2 * r + 1] * scale);
            *reinterpret_cast<uint32_t*>(own + Row::offset(row, c) + id % 4 * 4) = pair;
        }
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out);
    for (uint32_t at = id; at < SLICE * Row::RUNS; at += 32) {
        const uint32_t row = at / Row::RUNS, column = at % Row::RUNS;
        const uint32_t h = h_first + row / SIDE, w = w_first + row % SIDE;
        if (8 * column >= p.width || h > h_last || w > w_last) continue;
        const uint64_t plane = uint64_t(item) * frames + t_first + warp;
        const uint64_t position = (plane * extents[1] + h) * extents[2] + w;
        T* place = out + (position * p.heads + head) * p.width + 8 * column;
        store_vec<T, 8>(place, load_vec<T, 8>(reinterpret_cast<const T*>(own + Row::offset(row, column))));
    }
}

// Two blocks of a multiprocessor hide each other's waits, where their sums leave registers for it.
#define KERNEL(suffix, T, WIDTH, FIRST, SECOND, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        neighborhood_##WIDTH##_##FIRST##_##SECOND##_##suffix(const __grid_constant__ TiledNeighborhood params) {       \
        attend<T, WIDTH, FIRST, SECOND>(params);                                                                       \
    }
#define KERNELS(suffix, T)                                                                                             \
    KERNEL(suffix, T, 64, 7, 6, 2)                                                                                     \
    KERNEL(suffix, T, 64, 4, 0, 2)                                                                                     \
    KERNEL(suffix, T, 128, 4, 0, 1)

FOR_EACH_HALF(KERNELS)
