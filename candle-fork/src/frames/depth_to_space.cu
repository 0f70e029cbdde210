// Channels become frames and pixels, with a shortcut of the input added; depth_to_space.rs is the same on the CPU.
//
//     y[n, t pt + u - drop, h ph + q, w pw + r, c] = main[n, t, h, w, k C + c] + x[n, t, h, w, (c mod c') K + k]
//
// with k = (u ph + q) pw + r, K = pt ph pw, y of C channels and x of K c', of which C is a multiple; without x, main
// alone. Sums in f32, rounded once. Reference: Lightricks/LTX-2, packages/ltx-core, model/video_vae, DepthToSpaceUpsample.
//
// All channels-last and packed, at 16-byte boundaries, C in whole vectors of 16 bytes. A thread owns a vector of y, in a
// loop over the grid; images lie along y. Channels of x are read one by one: those of a position are few and stay in
// cache. The launcher guarantees fewer than 2^31 vectors in an image of y; offsets have 64 bits. No shared memory.

#include "element.cuh"

// `Params` in cuda/depth_to_space.rs.
struct Params {
    const void* main;
    const void* x;
    void* out;
    uint64_t images;
    // Vectors in an image of y, and its channels.
    uint32_t vectors;
    uint32_t channels;
    // K, and c'.
    uint32_t cells;
    uint32_t runs;
    // Extents of main.
    uint32_t frames;
    uint32_t height;
    uint32_t width;
    uint32_t drop;
    Divisor by_vectors; // of a position
    Divisor by_height;  // of y
    Divisor by_width;   // of y
    Divisor by_pt;
    Divisor by_ph;
    Divisor by_pw;
    Divisor by_runs;
};

constexpr int THREADS = 256;

template <typename T, bool ADD> __device__ __forceinline__ void depth_to_space(const Params& p) {
    constexpr int N = PACK<T>;
    const uint64_t image_in = static_cast<uint64_t>(p.frames) * p.height * p.width;
    const uint64_t wide = static_cast<uint64_t>(p.cells) * p.channels, shortcut = static_cast<uint64_t>(p.cells) * p.runs;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        for (uint64_t i = grid_start(); i < p.vectors; i += grid_step()) {
            uint32_t vector, column, line, u, q, r;
            const uint32_t position = p.by_vectors.divide(i, vector);
            const uint32_t frame = p.by_height.divide(p.by_width.divide(position, column), line);
            const uint32_t t = p.by_pt.divide(frame + p.drop, u);
            const uint32_t h = p.by_ph.divide(line, q), w = p.by_pw.divide(column, r);
            const uint32_t k = (u * p.by_ph.value + q) * p.by_pw.value + r, c = vector * N;
            const uint64_t from = n * image_in + (static_cast<uint64_t>(t) * p.height + h) * p.width + w;
            Vec<T, N> result =
                load_vec<T, N>(static_cast<const T*>(p.main) + from * wide + static_cast<uint64_t>(k) * p.channels + c);
            if constexpr (ADD) {
                float sum[N];
                widen_all(result, sum);
                const T* x = static_cast<const T*>(p.x) + from * shortcut + k;
                uint32_t run;
                p.by_runs.divide(c, run);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    sum[j] += widen(x[run * p.cells]);
                    if (++run == p.runs) run = 0;
                }
                result = narrow_all<T>(sum);
            }
            store_vec(static_cast<T*>(p.out) + (n * p.vectors + i) * N, result);
        }
    }
}

#define KERNEL(name, T, ADD)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) depth_to_space_##name(const __grid_constant__ Params p) {    \
        depth_to_space<T, ADD>(p);                                                                                     \
    }

#define KERNELS(suffix, T) KERNEL(move_##suffix, T, false) KERNEL(add_##suffix, T, true)

FOR_EACH_HALF(KERNELS)
