// Two blocks of a cluster, which copy for one another, and results that leave shared memory in boxes. Compute capability 9.0.

#pragma once

#include "attention/pipeline.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of both blocks, and what they wrote before.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier at this place in each of the two blocks. What this thread wrote is not shown to the other block: that would
// be a fence of all memory.
__device__ __forceinline__ void arrive_in_both(uint32_t barrier) {
#pragma unroll
    for (uint32_t rank = 0; rank < 2; ++rank) {
        asm volatile(
            "{\n"
            ".reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
            "}\n" ::"r"(barrier),
            "r"(rank)
            : "memory");
    }
}

// `copy_box` of a matrix.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint32_t barrier, uint32_t x, uint32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// The same to this place in both blocks, each of whose barriers at the place of `barrier` is told of the bytes.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const TensorMap& map, uint32_t barrier, uint32_t x, uint32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3))
        : "memory");
}

// Begins to copy a box from shared memory to a matrix; what lies outside of the matrix is not written.
__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t from, uint32_t x, uint32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from), "r"(x),
                 "r"(y)
                 : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory has been read, and until all has been written.
__device__ __forceinline__ void stores_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four matrices of 8 rows of 16 bytes; lanes 8 m to 8 m + 7 have the places of the rows of matrix m.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
