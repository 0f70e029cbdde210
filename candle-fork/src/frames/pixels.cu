// Frames of squares of pixels in -1..=1 to interleaved bytes, or to planes of f32; rgb8.rs and clamped.rs are the same on the
// CPU, to the bit.
//
// frames_to_rgb8_*:  out[t, i p + q, j p + r, c] = round(255 clamp(x[channel, t, i, j] / 2 + 1 / 2, 0, 1)), ties to even
// clamped_frames_*:  out[c, t, i p + q, j p + r] = clamp(x[channel, t, i, j], -1, 1)
//
// with channel (c p + r) p + q, or (c p + q) p + r for `rows_first`. NaN and infinities become ends of the range; every block
// says in `flags` whether it met one.
//
// x with any strides, out packed. A thread owns a pixel of the result; blocks lie along its columns (x) and rows (y),
// in loops over the grid. No shared memory. Offsets have 64 bits; the launcher guarantees fewer than 2^31 rows and
// columns.

#include "cuda/common.cuh"

// `Params` in cuda/pixels.rs.
struct Params {
    const void* x;
    void* out;
    void* flags;
    // Distances in x along C, T, H, W.
    uint64_t strides[4];
    uint64_t frames;
    // Rows and columns of the result.
    uint64_t height;
    uint64_t width;
    // Side of a square.
    Divisor side;
    // Colours of the result.
    uint32_t channels;
    uint32_t rows_first;
};

constexpr int THREADS = 256;

template <typename T, bool BYTES> __device__ __forceinline__ void write_pixels(const Params& p) {
    bool broken = false;
    const uint32_t side = p.side.value;
    for (uint64_t row = blockIdx.y; row < p.frames * p.height; row += gridDim.y) {
        const uint64_t frame = row / p.height;
        uint32_t q;
        const uint32_t i = p.side.divide(row % p.height, q);
        const T* x = static_cast<const T*>(p.x) + frame * p.strides[1] + i * p.strides[2];
        const uint64_t plane = p.frames * p.height * p.width;
        for (uint64_t column = grid_start(); column < p.width; column += grid_step()) {
            uint32_t r;
            const uint32_t j = p.side.divide(column, r);
            const uint32_t cell = p.rows_first ? q * side + r : r * side + q;
            for (uint32_t c = 0; c < p.channels; ++c) {
                const float value = widen(x[(c * side * side + cell) * p.strides[0] + j * p.strides[3]]);
                broken |= !isfinite(value);
                if constexpr (BYTES) {
                    // Without contraction, so that the byte is that of the CPU.
                    const float unit = fminf(fmaxf(__fadd_rn(__fmul_rn(value, 0.5f), 0.5f), 0.0f), 1.0f);
                    static_cast<uint8_t*>(p.out)[(row * p.width + column) * p.channels + c] =
                        static_cast<uint8_t>(__float2uint_rn(__fmul_rn(255.0f, unit)));
                } else {
                    static_cast<float*>(p.out)[c * plane + row * p.width + column] = fminf(fmaxf(value, -1.0f), 1.0f);
                }
            }
        }
    }
    const bool any = __syncthreads_or(broken);
    if (threadIdx.x == 0) static_cast<uint32_t*>(p.flags)[blockIdx.y * gridDim.x + blockIdx.x] = any;
}

#define KERNEL(name, T, BYTES)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) {                     \
        write_pixels<T, BYTES>(p);                                                                                     \
    }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(frames_to_rgb8_##suffix, T, true)                                                                           \
    KERNEL(clamped_frames_##suffix, T, false)

FOR_EACH_FLOAT(KERNELS)
