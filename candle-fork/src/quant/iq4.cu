// Blocks of GGUF files whose codes of 4 bits name the values of a table, IQ4_NL and IQ4_XS: w = narrow(scale value(code));
// iq4.rs is the same on the CPU, with the same bits.
//
// Blocks one after another, rows are whole blocks; w packed, in the same order. A thread owns 32 neighbouring elements that
// share a scale: 16 bytes of codes at an even address, the first 16 elements in the low nibbles. Threads loop over the grid.
// No shared memory. Offsets have 64 bits.

#include "element.cuh"

// `Iq4Params` in cuda.rs.
struct Params {
    const uint8_t* codes;
    void* out;
    uint64_t runs;
};

static_assert(sizeof(Params) == 24, "as in cuda.rs");

constexpr int THREADS = 256;
constexpr int RUN = 32;

__constant__ float VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

__device__ __forceinline__ float half_at(const uint8_t* at) {
    return widen(__ushort_as_half(*reinterpret_cast<const unsigned short*>(at)));
}

// A block of 32 with one scale.
struct NonLinear {
    static __device__ __forceinline__ float run(const uint8_t* all, uint64_t index, const uint8_t*& codes) {
        const uint8_t* block = all + index * (2 + RUN / 2);
        codes = block + 2;
        return half_at(block);
    }
};

// A block of 256 with one scale and eight of 6 bits, less 32: four bits in their half of a byte, two in a word.
struct Super {
    static __device__ __forceinline__ float run(const uint8_t* all, uint64_t index, const uint8_t*& codes) {
        const uint8_t* block = all + index / 8 * (2 + 2 + 4 + 4 * RUN);
        const int part = static_cast<int>(index % 8);
        const int low = block[4 + part / 2] >> (4 * (part % 2)) & 0xf;
        const int high = *reinterpret_cast<const unsigned short*>(block + 2) >> (2 * part) & 3;
        codes = block + 8 + part * (RUN / 2);
        return __fmul_rn(half_at(block), static_cast<float>((high << 4 | low) - 32));
    }
};

template <typename F, typename T> __device__ __forceinline__ void decode(const Params& p) {
    // The lanes of a warp ask for different values: shared memory would serve them at once, constant memory does not, so the
    // table is in registers of the warp.
    const float mine = VALUES[threadIdx.x % 16];
    const uint64_t step = grid_step();
    // All lanes of a warp stay in the loop for as long as one has work, because they read one another's values.
    for (uint64_t first = grid_start() - threadIdx.x % 32; first < p.runs; first += step) {
        const uint64_t run = first + threadIdx.x % 32;
        const bool owns = run < p.runs;
        const uint8_t* codes;
        const float scale = F::run(p.codes, owns ? run : p.runs - 1, codes);
        T* out = static_cast<T*>(p.out) + run * RUN;
        unsigned short pairs[RUN / 4];
#pragma unroll
        for (int i = 0; i < RUN / 4; ++i) pairs[i] = reinterpret_cast<const unsigned short*>(codes)[i];
#pragma unroll
        for (int part = 0; part < RUN; part += PACK<T>) {
            float y[PACK<T>];
#pragma unroll
            for (int k = 0; k < PACK<T>; ++k) {
                const int i = part + k, byte = i % (RUN / 2);
                const int code = pairs[byte / 2] >> (8 * (byte % 2) + 4 * (i / (RUN / 2))) & 0xf;
                y[k] = __fmul_rn(scale, __shfl_sync(0xffffffff, mine, code));
            }
            if (owns) store_pack<T>(out + part, narrow_all<T>(y));
        }
    }
}

#define KERNEL(name, F, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Params p) { decode<F, T>(p); }

#define KERNELS(suffix, T) KERNEL(iq4_nl_##suffix, NonLinear, T) KERNEL(iq4_xs_##suffix, Super, T)

FOR_EACH_FLOAT(KERNELS)
