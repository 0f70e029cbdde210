// A block whose warps have parts of their own: one thread has tiles of tensors copied to shared memory, groups of four warps
// compute with them. Needs compute capability 9.0.

#pragma once

#include "attention/wgmma.cuh"
#include "cuda/barrier.cuh"

// A description of a tensor that the driver has encoded (cuda/tensor_map.rs).
struct alignas(128) TensorMap {
    uint64_t words[16];
};

// A place in a ring of STAGES, and the parity of the phase that its barriers are in.
template <int STAGES> struct Turn {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Begins to copy the box of a tensor of four axes from these coordinates on, which tells `barrier` of its bytes. What lies
// outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint32_t barrier, uint32_t x, uint32_t y,
                                         uint32_t z, uint32_t w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Waits until `threads` threads, whole warps, have arrived at the block's barrier `id` (1 to 15); the other only arrives.
__device__ __forceinline__ void group_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void group_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// How many registers each thread of a group has from here on: a multiple of 8. All of its warps have to ask for the same.
template <int COUNT> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
