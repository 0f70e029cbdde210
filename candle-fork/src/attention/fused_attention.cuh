// What the launcher of fused attention (cuda/fused.rs) passes to its kernels.

#pragma once

#include "attention/mma.cuh"

// [B, S, H, D], last axis packed; distances in elements.
struct Rows {
    void* base;
    uint64_t batch;
    uint64_t position;
    uint64_t head;
};

struct FusedAttention {
    Rows q, k, v, out;
    uint32_t q_len, k_len;
    uint32_t heads;
    uint32_t heads_per_kv; // query heads that share a key head
    uint32_t width;        // D
    uint32_t tiles;        // of 128 queries
    uint32_t causal;
    uint32_t vector_out;
    float factor;
    uint32_t ahead;        // with causal: query i sees keys up to i + ahead
};

static_assert(sizeof(FusedAttention) == 168, "as in fused.rs");
