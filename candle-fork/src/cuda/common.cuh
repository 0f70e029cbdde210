// What the kernels of this crate share: float types as f32, 16-byte vectors, loops over 64-bit counts, exact division by
// launch constants, sums over a block in a fixed order.
//
// Conventions: a kernel takes one struct by value, declared `#[repr(C)]` with the same fields in its launcher; its name
// ends in the element type (`silu_bf16`); arithmetic is f32 and rounds once, when the result is stored.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <string.h>

// Calls `macro(suffix, type)` for the element types of the ops.
#define FOR_EACH_FLOAT(macro) macro(f32, float) macro(f16, __half) macro(bf16, __nv_bfloat16)
#define FOR_EACH_HALF(macro) macro(f16, __half) macro(bf16, __nv_bfloat16)

// ---- element types -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// To the nearest value of T, ties to even.
template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// The type of a small operand (bias, gamma) that need not be the type of the kernel: `Element` in `cuda/tensor.rs`.
enum ElementType : uint32_t { ELEMENT_F32 = 0, ELEMENT_F16 = 1, ELEMENT_BF16 = 2 };

__device__ __forceinline__ float load_as_float(const void* base, uint32_t type, int64_t index) {
    switch (type) {
    case ELEMENT_F16: return widen(static_cast<const __half*>(base)[index]);
    case ELEMENT_BF16: return widen(static_cast<const __nv_bfloat16*>(base)[index]);
    default: return static_cast<const float*>(base)[index];
    }
}

// ---- vectors -------------------------------------------------------------------------------------------------------

// N elements that move in one access when sizeof(T) * N is 2, 4, 8 or 16 and the address is a multiple of it.
template <typename T, int N> struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

// Elements of T in 16 bytes.
template <typename T> inline constexpr int PACK = 16 / sizeof(T);
template <typename T> using Pack = Vec<T, PACK<T>>;

template <int BYTES> struct Raw;
template <> struct Raw<2> { using type = unsigned short; };
template <> struct Raw<4> { using type = unsigned int; };
template <> struct Raw<8> { using type = uint2; };
template <> struct Raw<16> { using type = uint4; };

// One access of sizeof(T) * N bytes: plain member copies may be split by the compiler.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> load_vec(const T* from) {
    using R = typename Raw<sizeof(T) * N>::type;
    const R raw = *reinterpret_cast<const R*>(from);
    Vec<T, N> vec;
    memcpy(&vec, &raw, sizeof(raw));
    return vec;
}

template <typename T, int N> __device__ __forceinline__ void store_vec(T* to, const Vec<T, N>& vec) {
    using R = typename Raw<sizeof(T) * N>::type;
    R raw;
    memcpy(&raw, &vec, sizeof(raw));
    *reinterpret_cast<R*>(to) = raw;
}

template <typename T> __device__ __forceinline__ Pack<T> load_pack(const T* from) { return load_vec<T, PACK<T>>(from); }
template <typename T> __device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    store_vec<T, PACK<T>>(to, pack);
}

// ---- loops and division --------------------------------------------------------------------------------------------

// This thread's first index of a loop over a one-dimensional grid, and the step of that loop.
__device__ __forceinline__ int64_t grid_start() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t grid_step() { return int64_t(gridDim.x) * blockDim.x; }

// a / b; in 32 bits, which takes a fraction of the time, where both fit.
__device__ __forceinline__ uint64_t quotient(uint64_t a, uint64_t b) {
    return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// Division by a number that is fixed for a launch, exact for dividends below 2^31: `Divisor` in `cuda/launch.rs`.
struct Divisor {
    uint32_t value;
    uint32_t multiplier;
    uint32_t shift;
    uint32_t unused;

    __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
    // Sets `rest` to the remainder.
    __device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t& rest) const {
        const uint32_t quotient = divide(n);
        rest = n - quotient * value;
        return quotient;
    }
};

// ---- reductions ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

// Sum over all threads of a one-dimensional block (a multiple of 32), the same in every thread and every run. `scratch`
// is 32 floats of shared memory; it may be used again right after the call.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? scratch[lane] : 0.0f);
    __syncthreads();
    return x;
}

// Maximum over all threads of a block, as `block_sum`.
__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = warp_max(lane < warps ? scratch[lane] : -INFINITY);
    __syncthreads();
    return x;
}
