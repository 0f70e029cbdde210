// Boxes of a tensor, copied to shared memory by the copy engine. Needs compute capability 9.0.

#pragma once

#include "cuda/barrier.cuh"

// CUtensorMap of the driver: extents, distances, and the box that a copy takes.
struct alignas(128) BoxMap {
    uint64_t opaque[16];
};

// Begins to copy the box at `at`, of which what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const BoxMap& map, const int32_t (&at)[5], uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                 "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier)
                 : "memory");
}
