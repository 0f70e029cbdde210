// Convolutions of many channels into at most three filters of 3 x 3 or 3 x 3 x 3, as at the end of an image decoder.
//
// Formula: y[n, z, p, q, k] = bias[k] + sum over c, t, r, s of x[n, z + t - pt, p + r - ph, q + s - pw, c] w[k, t, r, s, c].
// Layout: x: channels packed, other strides multiples of eight elements. w: [K, T, 3, 3, C] packed. y: [N, Z, P, Q, K] packed.
//
// Tensor cores make products of 8 columns or more, and here there are 3 filters. So the taps of a frame are columns too: a
// block multiplies the pixels of its tile, with a border of one, by the filters of all nine taps at once (27 columns), reads
// every pixel once, and sums the shifted products:
//
//   products [27, 340] = w_t [27, C] x [C, 340];   y_z[k, pixel] += sum over r, s of products[9 k + 3 r + s, pixel + (r, s)]
//
// Ownership: a warp owns 48 pixels of the products, a thread one pixel of the result and its sums for the TAPS frames of the
// result that a frame of x touches; a block owns a tile of 8 x 32 pixels of one image through all frames, in order.
// Numerics: f32 sums, in one order for every launch; rounded once.
// Index width: 64 bits in memory, 32 within a frame; padding of frames below TAPS (`few_filters.rs`).

#include "attention/mma.cuh"
#include "conv/window.cuh"

struct FewFilters {
    const void* input;
    const void* weight;
    const void* bias; // may be null
    void* output;
    uint64_t strides[4]; // N, D, H, W of x, in elements
    int32_t input_extents[3];
    int32_t output_extents[3];
    int32_t padding[3];
    int32_t filters;
    uint32_t bias_type;
    uint32_t tiles_across;
};

static_assert(sizeof(FewFilters) == 112, "as in few_filters.rs");

constexpr int TILE_H = 8, TILE_W = 32;
constexpr int HALO_W = TILE_W + 2, HALO = (TILE_H + 2) * HALO_W;
constexpr int FEW = 3, COLUMNS = 9 * FEW;
// m16n8k16: pixel groups of a warp, column groups.
constexpr int GROUPS = 3, COLUMN_GROUPS = (COLUMNS + 7) / 8;
constexpr int FEW_THREADS = TILE_H * TILE_W;
static_assert(FEW_THREADS / 32 * GROUPS * 16 >= HALO, "the warps cover the tile with its border");

// The channels of the pixels of a warp: of each group's rows `lane / 4` and 8 below, channels 8 (lane % 4) .. + 8 of every 32.
// The products may take channels in any order as long as both operands do: so they lie in 16 bytes of a thread.
template <int BLOCKS> struct Pixels {
    uint4 rows[GROUPS][2][BLOCKS];
};

// T: type; BLOCKS: channels / 32; TAPS: frames that a filter spans.
template <typename T, int BLOCKS, int TAPS> __device__ void few_filters(const FewFilters& p) {
    constexpr int CHANNELS = 32 * BLOCKS;
    __shared__ float products[COLUMNS][HALO];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quarter = lane % 4;
    const int32_t top = int32_t(blockIdx.x / p.tiles_across) * TILE_H;
    const int32_t left = int32_t(blockIdx.x % p.tiles_across) * TILE_W;
    const T* image = static_cast<const T*>(p.input) + blockIdx.y * p.strides[0];
    const T* weight = static_cast<const T*>(p.weight) + 8 * quarter;

    // Where this thread's pixels lie in a frame; negative: in the zeros around it.
    int32_t at[GROUPS][2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = (warp * GROUPS + g) * 16 + half * 8 + row;
            const int32_t y = top + pixel / HALO_W - p.padding[1], x = left + pixel % HALO_W - p.padding[2];
            const bool real = pixel < HALO && inside(y, p.input_extents[1]) && inside(x, p.input_extents[2]);
            at[g][half] = real ? int32_t(y * p.strides[2] + x * p.strides[3]) + 8 * quarter : -1;
        }
    }

    const int32_t y = top + threadIdx.x / TILE_W, x = left + threadIdx.x % TILE_W;
    const int corner = threadIdx.x / TILE_W * HALO_W + threadIdx.x % TILE_W;
    const bool owns = y < p.output_extents[1] && x < p.output_extents[2];

    // sums[t]: the frame of the result that tap t of the current frame belongs to.
    float sums[TAPS][FEW] = {};
    const int32_t last = p.output_extents[0] - 1 + TAPS - 1 - p.padding[0];
    for (int32_t d = 0; d <= last; ++d) {
        if (d < p.input_extents[0]) {
            Pixels<BLOCKS> pixels;
            const T* frame = image + d * p.strides[1];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int b = 0; b < BLOCKS; ++b) {
                        pixels.rows[g][half][b] = at[g][half] < 0
                            ? make_uint4(0, 0, 0, 0)
                            : *reinterpret_cast<const uint4*>(frame + at[g][half] + 32 * b);
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < TAPS; ++t) {
                // The same for all threads of the block.
                if (!inside(d + p.padding[0] - t, p.output_extents[0])) continue;
                __syncthreads();
#pragma unroll 1
                for (int n = 0; n < COLUMN_GROUPS; ++n) {
                    float sum[GROUPS][4] = {};
                    const int column = 8 * n + row, k = column / 9, tap = column % 9;
                    const bool real = column < COLUMNS && k < p.filters;
                    const T* filter = weight + ((k * TAPS + t) * 9 + tap) * CHANNELS;
#pragma unroll
                    for (int b = 0; b < BLOCKS; ++b) {
                        const uint4 w = real ? *reinterpret_cast<const uint4*>(filter + 32 * b) : make_uint4(0, 0, 0, 0);
#pragma unroll
                        for (int g = 0; g < GROUPS; ++g) {
                            const uint4 &upper = pixels.rows[g][0][b], &lower = pixels.rows[g][1][b];
                            multiply_add<T>(sum[g], {upper.x, lower.x, upper.y, lower.y}, w.x, w.y);
                            multiply_add<T>(sum[g], {upper.z, lower.z, upper.w, lower.w}, w.z, w.w);
                        }
                    }
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int pixel = (warp * GROUPS + g) * 16 + i / 2 * 8 + row;
                            const int to = 8 * n + 2 * quarter + i % 2;
                            if (to < COLUMNS && pixel < HALO) products[to][pixel] = sum[g][i];
                        }
                    }
                }
                __syncthreads();
#pragma unroll
                for (int k = 0; k < FEW; ++k) {
#pragma unroll
                    for (int tap = 0; tap < 9; ++tap) {
                        sums[t][k] += products[9 * k + tap][corner + tap / 3 * HALO_W + tap % 3];
                    }
                }
            }
        }
        const int32_t z = d + p.padding[0] - (TAPS - 1);
        if (z >= 0 && owns) {
            const int64_t pixel = (int64_t(blockIdx.y) * p.output_extents[0] + z) * p.output_extents[1] + y;
            T* out = static_cast<T*>(p.output) + (pixel * p.output_extents[2] + x) * p.filters;
#pragma unroll
            for (int k = 0; k < FEW; ++k) {
                const float bias = p.bias && k < p.filters ? load_as_float(p.bias, p.bias_type, k) : 0.0f;
                if (k < p.filters) out[k] = narrow<T>(sums[TAPS - 1][k] + bias);
            }
        }
#pragma unroll
        for (int t = TAPS - 1; t >= 0; --t) {
#pragma unroll
            for (int k = 0; k < FEW; ++k) sums[t][k] = t > 0 ? sums[t - 1][k] : 0.0f;
        }
    }
}

#define FEW_FILTERS(suffix, type, blocks, channels, taps)                                                             \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, blocks == 3 ? 2 : 1) few_filters_c##channels##_t##taps##_##suffix(           \
        const FewFilters p) {                                                                                         \
        few_filters<type, blocks, taps>(p);                                                                           \
    }

#define INSTANCES(suffix, type)                                                                                       \
    FEW_FILTERS(suffix, type, 3, 96, 1)                                                                               \
    FEW_FILTERS(suffix, type, 3, 96, 3)                                                                               \
    FEW_FILTERS(suffix, type, 4, 128, 1)                                                                              \
    FEW_FILTERS(suffix, type, 4, 128, 3)

FOR_EACH_HALF(INSTANCES)
