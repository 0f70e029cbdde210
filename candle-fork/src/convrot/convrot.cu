// Decoding, rotation and quantisation of rows of signed bytes; cpu.rs is the same on the CPU.
//
//     decode:    n = S q,  w = narrow(n (scale 2^-p))      for each group of 4^p columns
//     quantise:  r = 2^-p S x,  scale = max(max |r| / 127, 1e-30),  q = round(r / scale)   for each row
//
// S is the Kronecker power of [1 1 1 -1; 1 1 -1 1; 1 -1 1 1; -1 1 1 1]: element (i, j) is minus for an odd number of
// base-4 digits of i and j that add up to 3. "ConvRot", arXiv 2512.03673.
//
// Codes [rows, columns], x and w [rows, columns], all packed row-major; scales [rows], or [1] for decoding. Offsets have 64
// bits.
//   decode_256_*       groups of 256, by tensor cores, below.
//   decode_any_*       any group, also 1 (no rotation): a block owns a row, 1024 columns at a time, in shared memory.
//   quantize_256_*_P   groups of 256, in P passes of up to 4096 columns: a block owns a row, which stays in registers.
//   quantize_any_*     any group: as decode_any, twice over the row.
// Sums of the decoder are integers and exact. Those of the quantiser are f32, in the order that group.rs fixes.

#include "convrot/rotate.cuh"
#include "element.cuh"

// `DecodeParams` in cuda.rs.
struct DecodeParams {
    const int8_t* codes;
    const float* scales;
    void* out;
    uint64_t rows;
    uint64_t columns;
    // Groups of all rows, for decode_256.
    uint32_t groups;
    // Size of a group, for decode_any.
    uint32_t group;
    // 2^-p.
    float factor;
    // Whether each row has a scale.
    uint32_t per_row;
    // Groups of a row, for decode_256.
    Divisor groups_per_row;
};

static_assert(sizeof(DecodeParams) == 72, "as in cuda.rs");

// `QuantizeParams` in cuda.rs.
struct QuantizeParams {
    const void* x;
    int8_t* codes;
    float* scales;
    uint64_t rows;
    uint64_t columns;
    uint32_t group;
    float factor;
};

static_assert(sizeof(QuantizeParams) == 48, "as in cuda.rs");

constexpr int THREADS = 256;
constexpr float LEAST_SCALE = 1e-30f;
constexpr float LIMIT = 127.0f;

// ---- groups of 256 on tensor cores ---------------------------------------------------------------------------------
//
// A group is a matrix Q[hi][lo] of 16 x 16, and S of 256 is the Kronecker square of S of 16, so n = S16 Q S16: two products
// of 16 x 16 x 16. Codes are exact in f16; so is Q S16, whose elements lie within 2048; sums are f32 and exact.
//
// A warp owns a group. Lane (g, t) = (lane / 4, lane % 4) reads the words of columns 4t..4t+3 in rows g and g + 8: the warp
// reads 2 x 128 bytes in order. The tensor core wants slots 2t, 2t + 1, 2t + 8, 2t + 9 of the inner extent there, so S16 is
// permuted by `column` on that side; the same permutation of its other side leaves columns 4t..4t+3 of the result with the
// lane. Between the products the inner extent changes from lo to hi: each 8 x 8 block of halves is transposed across the
// warp.

// Groups that a warp has in flight, to hide the latency of memory.
constexpr int UNROLL = 8;

// Column of slot s.
__device__ __forceinline__ int column(int s) { return 4 * (s % 8 / 2) + 2 * (s / 8) + s % 2; }

// Element (i, j) of S16 as the bits of a half.
__device__ __forceinline__ uint32_t sign16(int i, int j) {
    const bool minus = ((i % 4 + j % 4 == 3) != (i / 4 + j / 4 == 3));
    return minus ? 0xbc00u : 0x3c00u;
}

__device__ __forceinline__ uint32_t pair(uint32_t low, uint32_t high) { return low | high << 16; }

// c = a b, 16 x 8 by 16: f16 in, f32 out.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// An 8 x 8 matrix of halves, a row of which lies in four lanes, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ uint32_t half_pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &both, sizeof(bits));
    return bits;
}

// Four signed bytes as two pairs of halves. A byte in the mantissa of 1024 is that much more: 1024 + 128 + q.
__device__ __forceinline__ void halves(uint32_t codes, uint32_t& first, uint32_t& second) {
    const uint32_t biased = codes ^ 0x80808080u;
    const uint32_t words[2] = {__byte_perm(biased, 0x64646464u, 0x4140), __byte_perm(biased, 0x64646464u, 0x4342)};
    const __half2 bias = __half2half2(__ushort_as_half(0x6480));
    __half2 both[2];
    memcpy(both, words, sizeof(both));
    both[0] = __hsub2(both[0], bias);
    both[1] = __hsub2(both[1], bias);
    memcpy(&first, &both[0], sizeof(first));
    memcpy(&second, &both[1], sizeof(second));
}

template <typename T> __device__ __forceinline__ void decode_256(const DecodeParams& p) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // S16 as the right operand of the first product, by slots on both sides, and as the left one of the second.
    uint32_t right[2][2], left[4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = 2 * t + 8 * half, to = column(8 * tile + g);
            right[tile][half] = pair(sign16(column(slot), to), sign16(column(slot + 1), to));
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, col = 2 * t + i / 2 * 8;
        left[i] = pair(sign16(row, col), sign16(row, col + 1));
    }

    const uint64_t first = (uint64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32) * UNROLL;
    if (first >= p.groups) return;
    const int count = p.groups - first < UNROLL ? int(p.groups - first) : UNROLL;
    const uint32_t* codes = reinterpret_cast<const uint32_t*>(p.codes) + first * 64 + lane;
    uint32_t words[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        if (u < count) {
            words[u][0] = __ldcs(codes + u * 64);
            words[u][1] = __ldcs(codes + u * 64 + 32);
        }
    }
    T* out = static_cast<T*>(p.out) + first * 256 + g * 16 + t * 4;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        // The same for the whole warp.
        if (u >= count) break;
        uint32_t q[4];
        halves(words[u][0], q[0], q[2]);
        halves(words[u][1], q[1], q[3]);
        // Rows g, g + 8 of Q S16; then its halves with rows as the inner extent.
        uint32_t middle[2][2];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            float c[4];
            multiply(c, q, right[tile]);
            middle[tile][0] = transpose(half_pair(c[0], c[1]));
            middle[tile][1] = transpose(half_pair(c[2], c[3]));
        }
        float n[2][4];
        multiply(n[0], left, middle[0]);
        multiply(n[1], left, middle[1]);
        const uint32_t row = p.groups_per_row.divide(uint32_t(first) + u);
        const float factor = __fmul_rn(__ldg(p.scales + (p.per_row ? row : 0)), p.factor);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float y[4] = {__fmul_rn(n[0][2 * half], factor), __fmul_rn(n[0][2 * half + 1], factor),
                                __fmul_rn(n[1][2 * half], factor), __fmul_rn(n[1][2 * half + 1], factor)};
            store_vec<T, 4>(out + u * 256 + half * 128, narrow_all<T>(y));
        }
    }
}

// ---- any group -----------------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ void decode_any(const DecodeParams& p) {
    __shared__ float values[CHUNK];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const float factor = __fmul_rn(__ldg(p.scales + (p.per_row ? row : 0)), p.factor);
        const int8_t* codes = p.codes + row * p.columns;
        T* out = static_cast<T*>(p.out) + row * p.columns;
        for (uint64_t first = 0; first < p.columns; first += CHUNK) {
            const int count = p.columns - first < CHUNK ? int(p.columns - first) : CHUNK;
            for (int i = threadIdx.x; i < count; i += THREADS) values[i] = codes[first + i];
            rotate_chunk(values, count, p.group);
            for (int i = threadIdx.x; i < count; i += THREADS) {
                out[first + i] = narrow<T>(__fmul_rn(values[i], factor));
            }
            __syncthreads();
        }
    }
}

// Maximum of the bits of magnitudes, which are in the order of their values with NaN above all; the same in every thread.
__device__ __forceinline__ uint32_t block_max_bits(uint32_t most) {
    __shared__ uint32_t of_warps[THREADS / 32];
    const uint32_t lane = threadIdx.x % 32;
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    most = __reduce_max_sync(0xffffffffu, lane < blockDim.x / 32 ? of_warps[lane] : 0);
    __syncthreads();
    return most;
}

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Scale of a row, from its largest magnitude. Not by fmaxf, which would drop a NaN.
__device__ __forceinline__ float row_scale(uint32_t most) {
    const float scale = __fdiv_rn(__uint_as_float(most), LIMIT);
    return scale < LEAST_SCALE ? LEAST_SCALE : scale;
}

// A row whose scale is not finite has codes of 0.
__device__ __forceinline__ int8_t code(float x, float scale) {
    const float q = fminf(fmaxf(rintf(__fdiv_rn(x, scale)), -LIMIT), LIMIT);
    return isfinite(scale) ? int8_t(int(q)) : int8_t(0);
}

template <typename T> __device__ __forceinline__ void quantize_any(const QuantizeParams& p) {
    __shared__ float values[CHUNK];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T* x = static_cast<const T*>(p.x) + row * p.columns;
        int8_t* codes = p.codes + row * p.columns;
        uint32_t most = 0;
        float scale = 0.0f;
        for (int pass = 0; pass < 2; ++pass) {
            for (uint64_t first = 0; first < p.columns; first += CHUNK) {
                const int count = p.columns - first < CHUNK ? int(p.columns - first) : CHUNK;
                for (int i = threadIdx.x; i < count; i += THREADS) values[i] = widen(x[first + i]);
                rotate_chunk(values, count, p.group);
                for (int i = threadIdx.x; i < count; i += THREADS) {
                    const float v = __fmul_rn(values[i], p.factor);
                    if (pass == 0) most = max(most, magnitude(v));
                    else codes[first + i] = code(v, scale);
                }
                __syncthreads();
            }
            if (pass == 0) {
                scale = row_scale(block_max_bits(most));
                if (threadIdx.x == 0) p.scales[row] = scale;
            }
        }
    }
}

// ---- quantisation in groups of 256 ---------------------------------------------------------------------------------
//
// Half a warp owns a group, as many as the block has make a pass. Lane l reads columns 16 l .. 16 l + 15 of its group: two
// rounds in registers. Through shared memory it gets columns l + 16 j: the other two. Rows of the tile are 17 apart, so that
// the halves of a warp, 272 words apart, never meet in a bank. Codes go back the same way, four to a word.

constexpr int PITCH = 17;

// x / scale is found as x (1 / scale), which is off by less than 127 * 3 * 2^-24 = 2.3e-5 from the rounded quotient: the
// code is the same, unless the product lies that close to the middle of two.
constexpr float NEAR_TIE = 0.5f - 3e-5f;

// Adding it leaves a number of up to 2^22, rounded to the nearest, ties to even, in the low bits.
constexpr float ROUND = 12582912.0f;

// Bytes 0 of four words.
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// `code` of 16 values, four to a word.
__device__ __forceinline__ void codes_16(const float (&v)[16], float scale, float inverse, uint32_t (&words)[4]) {
    float farthest = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        uint32_t bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float q = __fmul_rn(v[4 * k + i], inverse);
            const float shifted = __fadd_rn(q, ROUND);
            farthest = fmaxf(farthest, fabsf(__fsub_rn(q, __fsub_rn(shifted, ROUND))));
            bits[i] = __float_as_uint(shifted);
        }
        words[k] = low_bytes(bits[0], bits[1], bits[2], bits[3]);
    }
    if (farthest < NEAR_TIE && isfinite(scale)) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        int bytes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes[i] = code(v[4 * k + i], scale);
        words[k] = low_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
    }
}

template <typename T, int PASSES> __device__ __forceinline__ void quantize_256(const QuantizeParams& p) {
    __shared__ __align__(16) float tiles[THREADS / 16][16 * PITCH];
    const uint32_t l = threadIdx.x % 16, half_warp = threadIdx.x / 16, pass_columns = blockDim.x * 16;
    float* tile = tiles[half_warp];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T* x = static_cast<const T*>(p.x) + row * p.columns;
        // All loads first: they wait for memory together.
        Pack<T> stored[PASSES][16 / PACK<T>];
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const uint32_t first = pass * pass_columns + half_warp * 256;
#pragma unroll
            for (int i = 0; i < 16 / PACK<T>; ++i) {
                if (first < p.columns) stored[pass][i] = load_pack(x + first + l * 16 + i * PACK<T>);
                else memset(&stored[pass][i], 0, sizeof(stored[pass][i]));
            }
        }
        float v[PASSES][16];
        uint32_t most = 0;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
            for (int i = 0; i < 16; i += PACK<T>) {
                float wide[PACK<T>];
                widen_all(stored[pass][i / PACK<T>], wide);
#pragma unroll
                for (int k = 0; k < PACK<T>; ++k) v[pass][i + k] = wide[k];
            }
            rotate_16(v[pass]);
#pragma unroll
            for (int i = 0; i < 16; ++i) tile[l * PITCH + i] = v[pass][i];
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 16; ++j) v[pass][j] = tile[j * PITCH + l];
            __syncwarp();
            rotate_16(v[pass]);
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                v[pass][j] = __fmul_rn(v[pass][j], p.factor);
                most = max(most, magnitude(v[pass][j]));
            }
        }
        const float scale = row_scale(block_max_bits(most));
        if (threadIdx.x == 0) p.scales[row] = scale;
        const float inverse = __fdiv_rn(1.0f, scale);
        uint32_t* words = reinterpret_cast<uint32_t*>(tile);
        // Where byte l % 4 of a first and of a second word is.
        const uint32_t own = l % 4 | (l % 4 + 4) << 4;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const uint32_t first = pass * pass_columns + half_warp * 256;
            uint32_t mine[4];
            codes_16(v[pass], scale, inverse, mine);
            // Word k of lane i has the codes of columns i + 16 (4 k .. 4 k + 3).
#pragma unroll
            for (int k = 0; k < 4; ++k) words[k * 16 + l] = mine[k];
            __syncwarp();
            uint32_t out[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint4 from = reinterpret_cast<const uint4*>(words)[l / 4 * 4 + k];
                out[k] = __byte_perm(__byte_perm(from.x, from.y, own), __byte_perm(from.z, from.w, own), 0x5410);
            }
            if (first < p.columns) {
                *reinterpret_cast<uint4*>(p.codes + row * p.columns + first + l * 16) =
                    make_uint4(out[0], out[1], out[2], out[3]);
            }
            __syncwarp();
        }
    }
}

#define KERNEL(name, PARAMS, body)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ PARAMS p) { body(p); }

#define KERNELS(suffix, T)                                                                                             \
    KERNEL(decode_256_##suffix, DecodeParams, decode_256<T>)                                                           \
    KERNEL(decode_any_##suffix, DecodeParams, decode_any<T>)                                                           \
    KERNEL(quantize_any_##suffix, QuantizeParams, quantize_any<T>)                                                     \
    KERNEL(quantize_256_##suffix##_1, QuantizeParams, (quantize_256<T, 1>))                                            \
    KERNEL(quantize_256_##suffix##_2, QuantizeParams, (quantize_256<T, 2>))                                            \
    KERNEL(quantize_256_##suffix##_3, QuantizeParams, (quantize_256<T, 3>))                                            \
    KERNEL(quantize_256_##suffix##_4, QuantizeParams, (quantize_256<T, 4>))

FOR_EACH_FLOAT(KERNELS)
