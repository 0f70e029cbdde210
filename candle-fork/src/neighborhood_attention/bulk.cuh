// Boxes of a tensor, copied to shared memory by the copy engine, and the barriers that say when they are there and when their
// place is free. Needs compute capability 9.0.
//
// A barrier counts arrivals, and bytes of copies that were announced to it. Once all are in, its phase ends and the next one
// begins: phase 0 is even, phase 1 odd and so on.

#pragma once

#include <stdint.h>

// CUtensorMap of the driver: extents, distances, and the box that a copy takes.
struct alignas(128) BoxMap {
    uint64_t opaque[16];
};

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Shows new barriers to the copy engine.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces copies of so many bytes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the last even or odd phase has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t odd) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}\n" ::"r"(barrier),
                 "r"(odd)
                 : "memory");
}

// Begins to copy the box at `at`, of which what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const BoxMap& map, const int32_t (&at)[5], uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                 "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier)
                 : "memory");
}
