// The patches of a convolution as the operand of a matrix product, for one tile of output pixels.
//
// Formula: patch(n, o, c, tap) = input[n, c, o stride + tap dilation - padding], or 0 outside of the input, over up to
// three axes (missing ones have extent 1).
// Layout: input: any strides. Columns:
//   im2col_rows_*     [pixel][group][tap][channel of the group]   for weights [K, taps, C / groups], channels-last
//   im2col_planes_4   [image][channel][tap][pixel]                for weights [K, C / groups, taps], channels-first
// Only bits move: rows_16 takes eight channels of two bytes at a time, rows_2 one, planes_4 one f32.
// Ownership: rows: a thread owns one vector of channels of one pixel and loops over the taps, so that the pixel is split
// into coordinates once; neighbouring threads take neighbouring channels. planes: a thread owns one pixel and loops over
// ROWS rows of the columns; neighbouring threads take neighbouring pixels.
// Index width: offsets into memory 64 bits; pixels of a tile and threads below 2^31, extents below 2^30 (`conv/tiles.rs`).
// Preconditions: rows_16: channels of a group in eights and packed, other strides and the address multiples of 16 bytes.

#include "conv/window.cuh"

struct Rows {
    const void* input;
    void* columns;
    uint64_t strides[5]; // N, C, D, H, W, in elements
    uint64_t image;
    uint32_t pixel;
    uint32_t pixels;
    Window window;
    Divisor lanes;           // vectors of channels of a pixel
    Divisor lanes_per_group; // vectors of channels of a group
};

static_assert(sizeof(Rows) == 216, "as in cuda.rs");

// Taps of a line whose loads a thread issues together: the commonest width.
constexpr int32_t IN_FLIGHT = 3;

// N elements of two bytes at a time.
template <int N> __device__ void im2col_rows(const Rows& p) {
    using Unit = typename Raw<2 * N>::type;
    const Window& w = p.window;
    const uint16_t* input = static_cast<const uint16_t*>(p.input);
    const int32_t taps = w.filter[0] * w.filter[1] * w.filter[2];
    const uint32_t groups = p.lanes.value / p.lanes_per_group.value;
    const uint64_t group_units = uint64_t(taps) * p.lanes_per_group.value;
    const int64_t threads = int64_t(p.pixels) * p.lanes.value;
    for (int64_t thread = grid_start(); thread < threads; thread += grid_step()) {
        uint32_t lane, lane_of_group, pixel_of_image;
        const uint32_t pixel = p.lanes.divide(uint32_t(thread), lane);
        const uint32_t group = p.lanes_per_group.divide(lane, lane_of_group);
        const uint32_t image = w.per_image.divide(p.pixel + pixel, pixel_of_image);
        int32_t at[3];
        origin(w, pixel_of_image, at);
        const uint16_t* channel = input + (p.image + image) * p.strides[0] + uint64_t(lane) * N * p.strides[1];
        Unit* out = static_cast<Unit*>(p.columns) + (uint64_t(pixel) * groups + group) * group_units + lane_of_group;
        for (int32_t t = 0; t < w.filter[0]; ++t) {
            const int32_t z = at[0] + t * w.dilation[0];
            for (int32_t r = 0; r < w.filter[1]; ++r) {
                const int32_t y = at[1] + r * w.dilation[1];
                const bool line = inside(z, w.input[0]) && inside(y, w.input[1]);
                const uint16_t* from = channel + int64_t(z) * int64_t(p.strides[2]) + int64_t(y) * int64_t(p.strides[3]);
                for (int32_t first = 0; first < w.filter[2]; first += IN_FLIGHT) {
                    Unit units[IN_FLIGHT];
#pragma unroll
                    for (int32_t i = 0; i < IN_FLIGHT; ++i) {
                        const int32_t s = first + i, x = at[2] + s * w.dilation[2];
                        units[i] = Unit{};
                        if (line && s < w.filter[2] && inside(x, w.input[2])) {
                            units[i] = __ldg(reinterpret_cast<const Unit*>(from + int64_t(x) * int64_t(p.strides[4])));
                        }
                    }
#pragma unroll
                    for (int32_t i = 0; i < IN_FLIGHT; ++i) {
                        if (first + i < w.filter[2]) {
                            *out = units[i];
                            out += p.lanes_per_group.value;
                        }
                    }
                }
            }
        }
    }
}

extern "C" __global__ void im2col_rows_16(const __grid_constant__ Rows params) { im2col_rows<8>(params); }
extern "C" __global__ void im2col_rows_2(const __grid_constant__ Rows params) { im2col_rows<1>(params); }

constexpr uint32_t ROWS = 8;

struct Planes {
    const float* input;
    float* columns;
    uint64_t strides[5]; // N, C, D, H, W, in elements
    uint64_t image;
    uint32_t pixel;
    uint32_t images;
    Window window;
    Divisor pixels;     // of the tile, per image
    Divisor taps;       // T x R x S
    Divisor slice_taps; // R x S
    Divisor line_taps;  // S
};

static_assert(sizeof(Planes) == 248, "as in cuda.rs");

extern "C" __global__ void im2col_planes_4(const __grid_constant__ Planes p) {
    const Window& w = p.window;
    const uint32_t rows = w.channels * p.taps.value;
    const int64_t threads = int64_t(p.images) * p.pixels.value;
    for (int64_t thread = grid_start(); thread < threads; thread += grid_step()) {
        uint32_t pixel;
        const uint32_t image = p.pixels.divide(uint32_t(thread), pixel);
        int32_t at[3];
        origin(w, p.pixel + pixel, at);
        const float* base = p.input + (p.image + image) * p.strides[0];
        float* out = p.columns + uint64_t(image) * rows * p.pixels.value + pixel;
        for (uint32_t first = blockIdx.y * ROWS; first < rows; first += gridDim.y * ROWS) {
            const uint32_t last = min(first + ROWS, rows);
            for (uint32_t row = first; row < last; ++row) {
                uint32_t t, r, s;
                const uint32_t channel = p.taps.divide(row, t);
                t = p.slice_taps.divide(t, r);
                r = p.line_taps.divide(r, s);
                const int32_t z = at[0] + int32_t(t) * w.dilation[0];
                const int32_t y = at[1] + int32_t(r) * w.dilation[1];
                const int32_t x = at[2] + int32_t(s) * w.dilation[2];
                float value = 0.0f;
                if (inside(z, w.input[0]) && inside(y, w.input[1]) && inside(x, w.input[2])) {
                    value = __ldg(base + channel * p.strides[1] + z * p.strides[2] + y * p.strides[3] + x * p.strides[4]);
                }
                out[uint64_t(row) * p.pixels.value] = value;
            }
        }
    }
}
