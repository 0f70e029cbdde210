// One product of rows with a stack of weights, whose results leave it finished: queries and keys normed and rotated, values
// as they are, a feed-forward branch behind its SwiGLU. Compute capability 9.0.
//
//     z = x w^T          x [rows, depth], w [columns, depth], both packed along the depth
//     columns of w: `head_columns` in heads of 128, of which the first `normed` are normed and rotated; then `mlp` gates, then
//     `mlp` values that they gate
//     heads[r, c] = z[r, c], of a normed head: h = z / sqrt(mean(z^2) + eps) * weight, then
//         (a, b) -> (cos a - sin b, sin a + cos b) for its pairs (2 i, 2 i + 1), angles of row r % tokens
//     branch[r, j] = silu(z[r, gates + j]) * z[r, values + j]
//
// A launch may have two such products, of other rows with other weights, and then no heads.
//
// A cluster of two blocks owns 256 rows and 256 columns at a time, each block 128 of the rows: the columns of two heads, or 128
// gates with the 128 values that belong to them. So what a thread needs for a result is in its own sums, or in those of the
// three threads beside it.
// In a block one thread has operands copied to a ring of STAGES in shared memory: its rows, and half of the columns, to both
// blocks. Two groups of four warps multiply, 64 rows each, and hand results over in shared memory for copies in bulk.
// Blocks stay, and walk over tiles, rows first, `group` tiles of rows at a time, so that the weights of a round of tiles are
// read once.
//
// Sums are f32, in steps of 16 along the depth from the first to the last: a row's bits depend on nothing but the row. The result is
// rounded once.

#include "activation/silu.cuh"
#include "attention/pipeline.cuh"
#include "element.cuh"
#include "projection/cluster.cuh"

constexpr int STAGES = 4;
constexpr uint32_t DEPTH = 64;
constexpr uint32_t ROWS = 128;
constexpr uint32_t COLUMNS = 256;
constexpr uint32_t HEAD = 128;
constexpr uint32_t GROUPS = 2;

constexpr uint32_t X_BYTES = ROWS * DEPTH * 2;
constexpr uint32_t W_BYTES = COLUMNS * DEPTH * 2;
constexpr uint32_t STAGE_BYTES = X_BYTES + W_BYTES;
// Results of a group: 64 rows of 128 columns, in two panels.
constexpr uint32_t PANEL_BYTES = 64 * 128;
constexpr uint32_t OUT_BYTES = 2 * PANEL_BYTES;
// Weights of the two norms.
constexpr uint32_t WEIGHT_BYTES = 2 * HEAD * 4;
// The ring, results, weights, barriers; room for the alignment.
constexpr uint32_t SHARED_BYTES = STAGES * STAGE_BYTES + GROUPS * OUT_BYTES + WEIGHT_BYTES + 2 * STAGES * 8 + 1024;

static_assert(SHARED_BYTES == 231488, "as in cuda.rs");

// `Params` in cuda.rs.
struct Params {
    // Boxes of [128, 64] of x and w, of each product.
    TensorMap x[2];
    TensorMap w[2];
    // Boxes of [64, 64] of what is written.
    TensorMap branch[2];
    TensorMap heads;
    const float* cos;
    const float* sin;
    // Of the first `first_heads` heads, and of the other normed ones; [128] each.
    const void* weights[2];
    uint32_t weight_types[2];
    uint32_t first_heads;
    uint32_t normed;
    // Tiles of columns: pairs of heads, 128 results of the branch.
    uint32_t head_tiles;
    uint32_t branch_tiles;
    // Tiles of rows of a cluster, of each product, and how many of them are walked over together.
    uint32_t row_tiles[2];
    uint32_t group;
    // Steps of the depth.
    uint32_t steps;
    // First gate and first value among the columns of w.
    uint32_t gates;
    uint32_t values;
    float eps;
    Divisor tokens;
    uint32_t unused[7];
};

static_assert(sizeof(Params) == 1024, "as in cuda.rs");

struct Tile {
    uint32_t product, row, column;

    __device__ __forceinline__ static uint32_t count(const Params& p) {
        return (p.row_tiles[0] + p.row_tiles[1]) * (p.head_tiles + p.branch_tiles);
    }

    __device__ __forceinline__ static Tile of(const Params& p, uint32_t index) {
        const uint32_t columns = p.head_tiles + p.branch_tiles, first = p.row_tiles[0] * columns;
        const uint32_t product = index >= first ? 1 : 0;
        index -= product * first;
        const uint32_t whole = p.group * columns;
        const uint32_t group = index / whole, rest = index - group * whole;
        const uint32_t rows = min(p.group, p.row_tiles[product] - group * p.group);
        const uint32_t column = rest / rows;
        return {product, group * p.group + rest - column * rows, column};
    }
};

// Copies of the operands, for both blocks of the cluster.
__device__ __forceinline__ void copy_operands(const Params& p, uint32_t ring, uint32_t full, uint32_t empty, uint32_t rank) {
    Turn<STAGES> turn;
    const uint32_t tiles = Tile::count(p);
    for (uint32_t index = blockIdx.x / 2; index < tiles; index += gridDim.x / 2) {
        const Tile tile = Tile::of(p, index);
        const uint32_t row = (tile.row * 2 + rank) * ROWS;
        uint32_t column;
        if (tile.column < p.head_tiles) {
            column = tile.column * COLUMNS + rank * HEAD;
        } else {
            column = (rank == 0 ? p.gates : p.values) + (tile.column - p.head_tiles) * HEAD;
        }
        for (uint32_t step = 0; step < p.steps; ++step) {
            barrier_wait(empty + turn.stage * 8, turn.parity ^ 1);
            const uint32_t at = ring + turn.stage * STAGE_BYTES, barrier = full + turn.stage * 8;
            barrier_expect(barrier, STAGE_BYTES);
            copy_box(at, p.x[tile.product], barrier, step * DEPTH, row);
            copy_box_to_both(at + X_BYTES + rank * (W_BYTES / 2), p.w[tile.product], barrier, step * DEPTH, column);
            turn.advance();
        }
    }
}

// The sums of a group for a tile: 64 rows, all columns.
template <typename T>
__device__ __forceinline__ void products(float (&sums)[128], const Params& p, Turn<STAGES>& turn, uint32_t ring,
                                         uint32_t full, uint32_t empty, uint32_t group, bool elected) {
    uint32_t last = 0;
    for (uint32_t step = 0; step < p.steps; ++step) {
        barrier_wait(full + turn.stage * 8, turn.parity);
        const uint32_t at = ring + turn.stage * STAGE_BYTES;
        const uint64_t a = panel_columns(at + group * (X_BYTES / GROUPS)), b = panel_columns(at + X_BYTES);
        pin(sums);
        products_begin();
#pragma unroll
        for (int part = 0; part < DEPTH / 16; ++part) multiply_by_columns<T>(sums, a + part * 2, b + part * 2, step + part > 0);
        products_commit();
        // The step before is done: its place is free in both blocks.
        products_wait<1>();
        if (step > 0 && elected) arrive_in_both(empty + last * 8);
        last = turn.stage;
        turn.advance();
    }
    products_wait();
    pin(sums);
    if (elected) arrive_in_both(empty + last * 8);
}

// Norm and rotation of the two heads in the sums, of which `head` is the first.
__device__ __forceinline__ void norm_rotate(float (&sums)[128], const Params& p, const float* weights, uint32_t head, uint32_t row,
                                            uint32_t lane) {
    const float* weight = weights + (head < p.first_heads ? 0 : HEAD) + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float a = sums[64 * h + 4 * i + 2 * r], b = sums[64 * h + 4 * i + 2 * r + 1];
                squares = fmaf(a, a, fmaf(b, b, squares));
            }
            squares += __shfl_xor_sync(~0u, squares, 1);
            squares += __shfl_xor_sync(~0u, squares, 2);
            inverse[h] = 1.0f / sqrtf(squares / static_cast<float>(HEAD) + p.eps);
        }
        uint32_t token;
        p.tokens.divide(row + 8 * r, token);
        const uint64_t angle = static_cast<uint64_t>(token) * (HEAD / 2) + lane % 4;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float2 w = *reinterpret_cast<const float2*>(weight + 8 * i);
            const float c = __ldg(p.cos + angle + 4 * i), s = __ldg(p.sin + angle + 4 * i);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& a = sums[64 * h + 4 * i + 2 * r];
                float& b = sums[64 * h + 4 * i + 2 * r + 1];
                const float x = a * inverse[h] * w.x, y = b * inverse[h] * w.y;
                a = c * x - s * y;
                b = s * x + c * y;
            }
        }
    }
}

// 128 columns of the sums, from run `FIRST` of 8 on, to a tensor: through shared memory, by one thread's copies.
template <typename T, int FIRST>
__device__ __forceinline__ void write(const float (&sums)[128], const TensorMap& map, uint32_t staging, uint32_t row,
                                      uint32_t column, uint32_t group, uint32_t warp, uint32_t lane, bool elected) {
    // What was written before has been read.
    if (elected) stores_wait_read();
    group_sync(1 + group, 128);
    const uint32_t to = warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float* s = sums + 4 * (FIRST + i);
        const uint32_t run = (i % 8) + lane / 16;
        store_matrices(staging + (i / 8) * PANEL_BYTES + to * 128 + ((run ^ (to % 8)) * 16), narrow_pair<T>(s[0], s[1]),
                       narrow_pair<T>(s[2], s[3]), narrow_pair<T>(s[4], s[5]), narrow_pair<T>(s[6], s[7]));
    }
    publish_to_products();
    group_sync(1 + group, 128);
    if (elected) {
        store_box(map, staging, column, row);
        store_box(map, staging + PANEL_BYTES, column + 64, row);
        stores_commit();
    }
}

template <typename T> __device__ __forceinline__ void project(const Params& p) {
    extern __shared__ uint8_t shared[];
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const uint32_t ring = base, staging = base + STAGES * STAGE_BYTES;
    const uint32_t full = staging + GROUPS * OUT_BYTES + WEIGHT_BYTES, empty = full + STAGES * 8;
    float* weights = reinterpret_cast<float*>(shared + (staging + GROUPS * OUT_BYTES - shared_address(shared)));
    const uint32_t rank = cluster_rank();
    if (p.normed > 0 && threadIdx.x < 2 * HEAD) {
        const uint32_t which = threadIdx.x / HEAD;
        weights[threadIdx.x] = load_as_float(p.weights[which], p.weight_types[which], threadIdx.x % HEAD);
    }
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, 2 * GROUPS);
        }
        barriers_publish();
    }
    cluster_sync();
    const uint32_t group = threadIdx.x / 128;
    if (group == GROUPS) {
        registers_give<24>();
        if (threadIdx.x == GROUPS * 128) copy_operands(p, ring, full, empty, rank);
    } else {
        registers_take<240>();
        const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const bool elected = threadIdx.x % 128 == 0;
        const uint32_t out = staging + group * OUT_BYTES;
        Turn<STAGES> turn;
        const uint32_t tiles = Tile::count(p);
        for (uint32_t index = blockIdx.x / 2; index < tiles; index += gridDim.x / 2) {
            const Tile tile = Tile::of(p, index);
            const uint32_t row = (tile.row * 2 + rank) * ROWS + group * 64;
            float sums[128];
            products<T>(sums, p, turn, ring, full, empty, group, elected);
            if (tile.column < p.head_tiles) {
                const uint32_t head = tile.column * 2, own = row + warp * 16 + lane / 4;
                if (head < p.normed) norm_rotate(sums, p, weights, head, own, lane);
                write<T, 0>(sums, p.heads, out, row, head * HEAD, group, warp, lane, elected);
                write<T, 16>(sums, p.heads, out, row, (head + 1) * HEAD, group, warp, lane, elected);
            } else {
#pragma unroll
                for (int i = 0; i < 64; ++i) sums[i] = silu<T>(sums[i]) * sums[64 + i];
                write<T, 0>(sums, p.branch[tile.product], out, row, (tile.column - p.head_tiles) * HEAD, group, warp, lane, elected);
            }
        }
        if (elected) stores_wait();
    }
    // The other block may still copy to this one, or tell it of free places.
    cluster_sync();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384) projection_bf16(const __grid_constant__ Params p) {
    project<__nv_bfloat16>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384) projection_f16(const __grid_constant__ Params p) {
    project<__half>(p);
}
