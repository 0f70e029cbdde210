// Group norm with SiLU:
//
//     y = silu((x - mean) / sqrt(variance + eps) * weight[c] + bias[c])
//
// with the moments of each group of C / G channels of each image ("Group Normalization", Wu and He); groups.rs is the
// same on the CPU. Three launches:
//
// 1. group_norm_moments_{last,first}_*: every block takes the moments of one part: channels-last of a run of positions
//    of an image, for all its groups; channels-first of a run of memory of a group. To `partials` [images, groups,
//    parts].
// 2. group_norm_merge: a warp merges the parts of a group, to `statistics` [images, groups].
// 3. group_norm_apply_{last,first}_*: normalises.
//
// x and y are packed. last: x [images, extent, C], a thread keeps to its channels; first: x [images, C, extent].
// How much moves at once: `wide` 16 bytes; `4` elements, which lie in one group if 4 divides C / G; `1` element, for
// what is not aligned or does not divide.
//
// Moments: a thread takes values in runs of at most 32, subtracts the first of its run, and sums distances and their
// squares in f32, which costs no digits however large the mean; runs, threads and parts are merged in f64 in an order
// that the shape decides (Chan, Golub and LeVeque 1979). Shared memory: 6 KiB. Indices have 64 bits.

#include "activation/silu.cuh"
#include "element.cuh"
#include "norm/reduce.cuh"

// `Params` in cuda/groups.rs.
struct Params {
    const void* x;
    const void* weight;
    const void* bias;
    void* out;
    // Moments.
    void* partials;
    // Statistics.
    void* statistics;
    uint64_t images;
    uint64_t channels;
    uint64_t groups;
    // Positions of an image.
    uint64_t extent;
    uint64_t parts;
    // Positions (channels-last) or elements (channels-first) of a part; the last may be shorter.
    uint64_t part_len;
    double eps;
    uint32_t weight_type;
    uint32_t bias_type;
    uint32_t silu;
    uint32_t unused;
};

constexpr int THREADS = 256;

// Values that are summed in f32.
constexpr int RUN = 32;

// Count, mean, and sum of squared distances from the mean.
struct Moments {
    double count;
    double mean;
    double squares;

    __device__ __forceinline__ void merge(const Moments& other) {
        if (other.count == 0.0) return;
        const double all = count + other.count;
        const double share = other.count / all;
        const double distance = other.mean - mean;
        mean += distance * share;
        squares += other.squares + distance * distance * count * share;
        count = all;
    }
};

// Values of one thread that are summed in f32.
struct Run {
    float first;
    float distances;
    float squares;
    uint32_t count;

    __device__ __forceinline__ void add(float x) {
        if (count == 0) first = x;
        const float distance = x - first;
        distances += distance;
        squares = fmaf(distance, distance, squares);
        ++count;
    }

    __device__ __forceinline__ Moments moments() const {
        if (count == 0) return {};
        const double mean = static_cast<double>(distances) / count;
        const double around = squares - count * mean * mean;
        // Rounding may leave a little less than nothing; a NaN stays one.
        return {static_cast<double>(count), first + mean, around < 0.0 ? 0.0 : around};
    }
};

// Adds the vectors of N at `start`, `start + step`, .. below `end` to the moments, a run of them at a time: all of its
// loads are on their way before its first value is needed.
template <typename T, int N>
__device__ __forceinline__ void add_runs(Moments& moments, const T* x, uint64_t start, uint64_t end, uint64_t step) {
    constexpr int VECTORS = N == 1 ? 8 : RUN / N;
    for (uint64_t next = start; next < end; next += VECTORS * step) {
        Vec<T, N> vectors[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (next + i * step < end) vectors[i] = load_vec<T, N>(x + next + i * step);
        }
        Run run = {};
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (next + i * step >= end) continue;
            float values[N];
            widen_all(vectors[i], values);
#pragma unroll
            for (int j = 0; j < N; ++j) run.add(values[j]);
        }
        moments.merge(run.moments());
    }
}

// The moments of a group as the last kernel needs them; the mean in two parts, since the f32 nearest to a large mean
// alone would be too far from it.
struct Statistics {
    float mean;
    float correction;
    float inverse;
    float unused;
};

__device__ __forceinline__ uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Blocks: parts along x, images along y, along z as many groups at a time as have THREADS vectors, or one.
template <typename T, int N> __device__ __forceinline__ void moments_last(const Params& p) {
    __shared__ Moments shared[THREADS];
    const uint32_t group_vectors = p.channels / p.groups / N;
    const uint32_t groups_at_once = group_vectors < THREADS ? THREADS / group_vectors : 1;
    const uint64_t first_group = static_cast<uint64_t>(blockIdx.z) * groups_at_once;
    const uint32_t groups = smaller(p.groups - first_group, groups_at_once);
    const uint32_t vectors = groups * group_vectors;
    // Threads along the vectors of a position, and positions at a time.
    const uint32_t width = smaller(vectors, THREADS);
    const uint32_t rows = THREADS / width;
    const uint32_t column = threadIdx.x % width, row = threadIdx.x / width;
    const uint64_t start = blockIdx.x * p.part_len, end = smaller(start + p.part_len, p.extent);
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        const T* x = static_cast<const T*>(p.x) + n * p.extent * p.channels + first_group * group_vectors * N;
        Moments moments = {};
        for (uint32_t vector = column; row < rows && vector < vectors; vector += width) {
            add_runs<T, N>(moments, x + vector * N, (start + row) * p.channels, end * p.channels, rows * p.channels);
        }
        __syncthreads();
        shared[threadIdx.x] = moments;
        __syncthreads();
        for (uint32_t group = threadIdx.x; group < groups; group += THREADS) {
            const uint32_t columns = smaller(group_vectors, width);
            Moments all = {};
            for (uint32_t r = 0; r < rows; ++r) {
                for (uint32_t c = 0; c < columns; ++c) all.merge(shared[r * width + group * group_vectors + c]);
            }
            static_cast<Moments*>(p.partials)[(n * p.groups + first_group + group) * p.parts + blockIdx.x] = all;
        }
    }
}

// Blocks: parts along x, groups of all images along y.
template <typename T, int N> __device__ __forceinline__ void moments_first(const Params& p) {
    __shared__ Moments shared[THREADS];
    const uint64_t group_len = p.channels / p.groups * p.extent;
    const uint64_t start = blockIdx.x * p.part_len, end = smaller(start + p.part_len, group_len);
    for (uint64_t group = blockIdx.y; group < p.images * p.groups; group += gridDim.y) {
        const T* x = static_cast<const T*>(p.x) + group * group_len;
        Moments moments = {};
        add_runs<T, N>(moments, x, start + threadIdx.x * N, end, THREADS * N);
        __syncthreads();
        shared[threadIdx.x] = moments;
        for (uint32_t half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x].merge(shared[threadIdx.x + half]);
        }
        if (threadIdx.x == 0) static_cast<Moments*>(p.partials)[group * p.parts + blockIdx.x] = shared[0];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) group_norm_merge(const __grid_constant__ Params p) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * (THREADS / WARP);
    uint64_t group = static_cast<uint64_t>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    for (; group < p.images * p.groups; group += step) {
        const Moments* partials = static_cast<const Moments*>(p.partials) + group * p.parts;
        Moments all = {};
        for (uint64_t part = lane; part < p.parts; part += WARP) all.merge(partials[part]);
        for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
            const Moments other = {__shfl_down_sync(0xffffffff, all.count, distance),
                                   __shfl_down_sync(0xffffffff, all.mean, distance),
                                   __shfl_down_sync(0xffffffff, all.squares, distance)};
            all.merge(other);
        }
        if (lane == 0) {
            const float mean = static_cast<float>(all.mean);
            const float correction = static_cast<float>(all.mean - mean);
            const float inverse = static_cast<float>(1.0 / sqrt(all.squares / all.count + p.eps));
            static_cast<Statistics*>(p.statistics)[group] = {mean, correction, inverse, 0.0f};
        }
    }
}

// What one channel does to its values.
struct Affine {
    float mean;
    float correction;
    float factor;
    float bias;

    // Channels and groups fit 32 bits, in which a division costs a quarter.
    __device__ __forceinline__ static Affine of(const Params& p, uint64_t image, uint64_t channel) {
        const uint32_t group_channels = static_cast<uint32_t>(p.channels) / static_cast<uint32_t>(p.groups);
        const uint64_t group = image * p.groups + static_cast<uint32_t>(channel) / group_channels;
        const Statistics s = static_cast<const Statistics*>(p.statistics)[group];
        const float weight = load_as_float(p.weight, p.weight_type, channel);
        return {s.mean, s.correction, s.inverse * weight, load_as_float(p.bias, p.bias_type, channel)};
    }

    __device__ __forceinline__ float operator()(float x) const { return (x - mean - correction) * factor + bias; }
};

// Vectors of a thread that are on their way at once.
constexpr int AT_ONCE = 4;

// Blocks: positions along x, images along y, THREADS vectors of a position at a time along z.
template <typename T, int N> __device__ __forceinline__ void apply_last(const Params& p) {
    const uint64_t vectors = smaller(p.channels / N - static_cast<uint64_t>(blockIdx.z) * THREADS, THREADS);
    const uint32_t width = vectors, rows = THREADS / width;
    const uint32_t column = threadIdx.x % width, row = threadIdx.x / width;
    if (row >= rows) return;
    const uint64_t channel = (static_cast<uint64_t>(blockIdx.z) * THREADS + column) * N;
    for (uint64_t n = blockIdx.y; n < p.images; n += gridDim.y) {
        Affine affine[N];
#pragma unroll
        for (int i = 0; i < N; ++i) affine[i] = Affine::of(p, n, channel + i);
        const uint64_t image = n * p.extent * p.channels + channel;
        const T* x = static_cast<const T*>(p.x) + image;
        T* out = static_cast<T*>(p.out) + image;
        const uint64_t end = p.extent * p.channels;
        const uint64_t step = static_cast<uint64_t>(gridDim.x) * rows * p.channels;
        const uint64_t start = (static_cast<uint64_t>(blockIdx.x) * rows + row) * p.channels;
        for (uint64_t next = start; next < end; next += AT_ONCE * step) {
            Vec<T, N> vectors[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                if (next + k * step < end) vectors[k] = load_vec<T, N>(x + next + k * step);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                if (next + k * step >= end) continue;
                float values[N];
                widen_all(vectors[k], values);
#pragma unroll
                for (int i = 0; i < N; ++i) values[i] = affine[i](values[i]);
                if (p.silu) {
#pragma unroll
                    for (int i = 0; i < N; ++i) values[i] = silu<T>(values[i]);
                }
                store_vec(out + next + k * step, narrow_all<T>(values));
            }
        }
    }
}

// Blocks: positions along x, channels of all images along y.
template <typename T, int N> __device__ __forceinline__ void apply_first(const Params& p) {
    for (uint64_t plane = blockIdx.y; plane < p.images * p.channels; plane += gridDim.y) {
        const Affine affine = Affine::of(p, plane / p.channels, plane % p.channels);
        const T* x = static_cast<const T*>(p.x) + plane * p.extent;
        T* out = static_cast<T*>(p.out) + plane * p.extent;
        const uint64_t step = static_cast<uint64_t>(gridDim.x) * THREADS * N;
        for (uint64_t i = (static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x) * N; i < p.extent; i += step) {
            float values[N];
            widen_all(load_vec<T, N>(x + i), values);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float y = affine(values[k]);
                values[k] = p.silu ? silu<T>(y) : y;
            }
            store_vec(out + i, narrow_all<T>(values));
        }
    }
}

#define KERNEL(name, body)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) group_norm_##name(const __grid_constant__ Params p) { body(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(moments_last_4_##suffix, (moments_last<T, 4>))                                                              \
    KERNEL(moments_last_1_##suffix, (moments_last<T, 1>))                                                              \
    KERNEL(moments_first_wide_##suffix, (moments_first<T, PACK<T>>))                                                   \
    KERNEL(moments_first_1_##suffix, (moments_first<T, 1>))                                                            \
    KERNEL(apply_last_wide_##suffix, (apply_last<T, PACK<T>>))                                                         \
    KERNEL(apply_last_1_##suffix, (apply_last<T, 1>))                                                                  \
    KERNEL(apply_first_wide_##suffix, (apply_first<T, PACK<T>>))                                                       \
    KERNEL(apply_first_1_##suffix, (apply_first<T, 1>))

FOR_EACH_FLOAT(KERNELS)
