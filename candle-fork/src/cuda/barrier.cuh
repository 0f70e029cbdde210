// Barriers in shared memory, 8 bytes each, that threads and copies arrive at. Needs compute capability 9.0.
//
// A barrier goes through phases of alternating parity, beginning with 0. A phase ends when as many have arrived as it was made
// for, and all the bytes that were announced to it have come. Waiting for a parity returns when the phase of that parity is
// over; for parity 1 before the first phase is, at once.

#pragma once

#include <stdint.h>

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Shows initialised barriers to copies. The block has to synchronise behind it.
__device__ __forceinline__ void barriers_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives if `arrive`, without a branch.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t arrive) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(barrier),
        "r"(arrive)
        : "memory");
}

// Arrives and announces copies of so many bytes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
