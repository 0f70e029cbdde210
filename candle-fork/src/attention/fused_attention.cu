// Attention without scores in memory.
//
// Formula: out = softmax(scale q k^T + mask) v for every head, over blocks of keys with a running maximum and sum
// ("FlashAttention", Dao et al., algorithm 1). The exponent is of two: factor = scale log2(e).
// Layout: q, out [B, Sq, H, D], k, v [B, Sk, Hkv, D], last axis packed, D a multiple of 8 up to WIDTH.
// Ownership: a block owns 128 queries of one head and walks over all keys that they see, 64 at a time; each of its four
// warps owns 32 queries. Scores, weights and sums stay in the registers of the warp.
// Arithmetic: products with f32 sums, softmax in f32; weights are rounded to T before they meet the values, their sum is of
// the exact ones; the result is rounded once. Nothing depends on other blocks, so neither on the batch nor on time. NaN and
// infinite scores give NaN.
// Shared memory: (128 + 2 * 2 * 64) * WIDTH * 2 bytes: queries, and keys and values of two steps, of which one is filled
// while the other is read. Rows are stored with their runs of 16 bytes permuted, run c of row r at c ^ (r % 8), so that eight
// rows of a run lie in different banks.
// Index width: 64 bits between rows, 32 bits inside.
// Preconditions: q, k, v, their strides and, if vector_out, out and its strides are multiples of 16 bytes; factor > 0; extents
// below 2^30; with causal, query i sees the keys up to i + ahead. Components from D to WIDTH and rows from Sq or Sk on are
// taken as zeros, and such keys as hidden.

#include "attention/fused_attention.cuh"

constexpr int QUERIES = 128, KEYS = 64, THREADS = 128;
constexpr int WARP_QUERIES = QUERIES / (THREADS / 32);

// Rows of WIDTH two-byte elements in shared memory.
template <int WIDTH> struct Stored {
    static constexpr int PITCH = WIDTH * 2;
    static constexpr int RUNS = PITCH / 16;

    static __device__ __forceinline__ int offset(int row, int run) { return row * PITCH + ((run ^ (row & 7)) << 4); }
};

// Begins to copy ROWS rows from `first` on; what lies beyond `rows` or `width` becomes zero.
template <typename T, int WIDTH, int ROWS>
__device__ __forceinline__ void fetch(uint32_t to, const T* from, uint64_t pitch, uint32_t first, uint32_t rows,
                                      uint32_t width) {
    constexpr int RUNS = Stored<WIDTH>::RUNS, STEP = THREADS / RUNS;
    const uint32_t run = threadIdx.x % RUNS, row = threadIdx.x / RUNS;
    const uint32_t bytes = 8 * run < width ? 16 : 0;
    // STEP is a multiple of 8, so the permutation is the same for all rows of a thread.
    const uint32_t place = to + Stored<WIDTH>::offset(row, run);
    const T* source = from + (first + row) * pitch + (bytes ? 8 * run : 0);
    if (first + ROWS <= rows) {
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i) {
            copy_async(place + i * STEP * Stored<WIDTH>::PITCH, source, bytes);
            source += STEP * pitch;
        }
        return;
    }
    // Once at most for each operand of a block.
#pragma unroll 1
    for (int i = 0; i < ROWS / STEP; ++i) {
        const bool exists = first + row + i * STEP < rows;
        copy_async(place + i * STEP * Stored<WIDTH>::PITCH, exists ? source : from, exists ? bytes : 0);
        source += STEP * pitch;
    }
}

template <typename T, int WIDTH> __device__ __forceinline__ void attend(const FusedAttention& p) {
    using Row = Stored<WIDTH>;
    constexpr int STAGE = 2 * KEYS * Row::PITCH;
    extern __shared__ __align__(128) unsigned char memory[];

    const uint32_t at = blockIdx.x % p.tiles, head_of_item = blockIdx.x / p.tiles;
    // Later queries see more keys: they come first, so that the last blocks to run are short.
    const uint32_t tile = p.causal ? p.tiles - 1 - at : at;
    const uint64_t item = head_of_item / p.heads, head = head_of_item % p.heads, kv_head = head / p.heads_per_kv;
    const uint32_t first = tile * QUERIES;
    const T* q = static_cast<const T*>(p.q.base) + item * p.q.batch + head * p.q.head;
    const T* k = static_cast<const T*>(p.k.base) + item * p.k.batch + kv_head * p.k.head;
    const T* v = static_cast<const T*>(p.v.base) + item * p.v.batch + kv_head * p.v.head;

    // Keys that the first and the last query of the block see.
    const uint32_t fewest = p.causal ? min(p.k_len, first + 1 + p.ahead) : p.k_len;
    const uint32_t most = p.causal ? min(p.k_len, fewest + QUERIES - 1) : p.k_len;
    const int steps = (most + KEYS - 1) / KEYS;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const uint32_t q_shared = shared_address(memory), stages = q_shared + QUERIES * Row::PITCH;
    const uint32_t own_rows = q_shared + warp * WARP_QUERIES * Row::PITCH;

    // Where this lane's rows of matrices begin, without the run; and the part of the run that depends on the lane. Bit 5 and
    // above of the run's offset are those of the matrices' column.
    const uint32_t q_row = own_rows + (lane % 16) * Row::PITCH, q_run = ((lane / 16) ^ (lane % 8)) << 4;
    const uint32_t k_row = (lane % 8 + lane / 16 * 8) * Row::PITCH, k_run = ((lane / 8 % 2) ^ (lane % 8)) << 4;
    const uint32_t v_row = KEYS * Row::PITCH + (lane % 16) * Row::PITCH, v_run = q_run;

    fetch<T, WIDTH, QUERIES>(q_shared, q, p.q.position, first, p.q_len, p.width);
    fetch<T, WIDTH, KEYS>(stages, k, p.k.position, 0, p.k_len, p.width);
    fetch<T, WIDTH, KEYS>(stages + KEYS * Row::PITCH, v, p.v.position, 0, p.k_len, p.width);

    // Rows (i, r) of a lane are queries 16 i + 8 r + group of its warp.
    float sums[2][WIDTH / 8][4] = {};
    float maximum[2][2], total[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) maximum[i][r] = -INFINITY, total[i][r] = 0.0f;
    }

    for (int step = 0; step < steps; ++step) {
        const uint32_t stage = stages + (step % 2) * STAGE;
        wait_for_copies();
        // Everybody's copies are there, and nobody reads the other stage any more.
        __syncthreads();
        if (step + 1 < steps) {
            const uint32_t next = stages + ((step + 1) % 2) * STAGE, key = (step + 1) * KEYS;
            fetch<T, WIDTH, KEYS>(next, k, p.k.position, key, p.k_len, p.width);
            fetch<T, WIDTH, KEYS>(next + KEYS * Row::PITCH, v, p.v.position, key, p.k_len, p.width);
        }

        const float zeros[4] = {};
        float scores[2][KEYS / 8][4];
#pragma unroll
        for (int depth = 0; depth < WIDTH / 16; ++depth) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) load_matrices(a[i], q_row + i * 16 * Row::PITCH + (q_run ^ (depth << 5)));
#pragma unroll
            for (int j = 0; j < KEYS / 16; ++j) {
                uint32_t b[4];
                load_matrices(b, stage + k_row + j * 16 * Row::PITCH + (k_run ^ (depth << 5)));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float(&to)[4] = scores[i][2 * j + half];
                        if (depth == 0) {
                            multiply_add<T>(to, a[i], b[2 * half], b[2 * half + 1], zeros);
                        } else {
                            multiply_add<T>(to, a[i], b[2 * half], b[2 * half + 1]);
                        }
                    }
                }
            }
        }

        // Keys that not every query of the block sees.
        if ((step + 1) * KEYS > fewest) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const uint32_t key = step * KEYS + 8 * j + 2 * quad + e % 2;
                        const uint32_t query = warp * WARP_QUERIES + 16 * i + 8 * (e / 2) + group;
                        const uint32_t visible = p.causal ? min(p.k_len, fewest + query) : p.k_len;
                        if (key >= visible) scores[i][j][e] = -INFINITY;
                    }
                }
            }
        }

        bool risen = false;
        float correction[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float next = maximum[i][r];
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) {
                    next = fmaxf(next, fmaxf(scores[i][j][2 * r], scores[i][j][2 * r + 1]));
                }
                next = fmaxf(next, __shfl_xor_sync(0xffffffff, next, 1));
                next = fmaxf(next, __shfl_xor_sync(0xffffffff, next, 2));
                correction[i][r] = power_of_two((maximum[i][r] - next) * p.factor);
                risen |= correction[i][r] != 1.0f;
                maximum[i][r] = next;
                const float shift = next * p.factor;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& score = scores[i][j][2 * r + c];
                        score = power_of_two(fmaf(score, p.factor, -shift));
                        sum += score;
                    }
                }
                total[i][r] = total[i][r] * correction[i][r] + sum;
            }
        }
        // Seldom after the first steps.
        if (__any_sync(0xffffffff, risen)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int c = 0; c < WIDTH / 8; ++c) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[i][c][e] *= correction[i][e / 2];
                }
            }
        }

#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int word = 0; word < 4; ++word) {
                    const float(&from)[4] = scores[i][2 * j + word / 2];
                    a[i][word] = narrow_pair<T>(from[word % 2 * 2], from[word % 2 * 2 + 1]);
                }
            }
#pragma unroll
            for (int c = 0; c < WIDTH / 16; ++c) {
                uint32_t b[4];
                load_transposed(b, stage + v_row + j * 16 * Row::PITCH + (v_run ^ (c << 5)));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    multiply_add<T>(sums[i][2 * c], a[i], b[0], b[1]);
                    multiply_add<T>(sums[i][2 * c + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

    // The queries of a warp are read by it alone: their place takes the result, so that it leaves in whole rows.
    __syncwarp();
    unsigned char* own = memory + warp * WARP_QUERIES * Row::PITCH;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = total[i][r];
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            const float scale = 1.0f / sum;
            const int row = 16 * i + 8 * r + group;
#pragma unroll
            for (int c = 0; c < WIDTH / 8; ++c) {
                const uint32_t pair = narrow_pair<T>(sums[i][c][2 * r] * scale, sums[i][c][2 * r + 1] * scale);
                *reinterpret_cast<uint32_t*>(own + Row::offset(row, c) + 4 * quad) = pair;
            }
        }
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out.base) + item * p.out.batch + head * p.out.head;
    const int runs = p.width / 8;
    for (int at = lane; at < WARP_QUERIES * Row::RUNS; at += 32) {
        const int row = at / Row::RUNS, run = at % Row::RUNS;
        const uint64_t query = first + warp * WARP_QUERIES + row;
        if (run >= runs || query >= p.q_len) continue;
        const Vec<T, 8> values = load_vec<T, 8>(reinterpret_cast<const T*>(own + Row::offset(row, run)));
        T* place = out + query * p.out.position + 8 * run;
        if (p.vector_out) {
            store_vec<T, 8>(place, values);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) place[e] = values.v[e];
        }
    }
}

// Two blocks of a multiprocessor hide each other's waits.
#define FUSED_ATTENTION(suffix, T, WIDTH)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
        fused_attention_##WIDTH##_##suffix(const __grid_constant__ FusedAttention params) {                           \
        attend<T, WIDTH>(params);                                                                                     \
    }
#define FUSED_ATTENTION_64(suffix, T) FUSED_ATTENTION(suffix, T, 64)
#define FUSED_ATTENTION_128(suffix, T) FUSED_ATTENTION(suffix, T, 128)

FOR_EACH_HALF(FUSED_ATTENTION_64)
FOR_EACH_HALF(FUSED_ATTENTION_128)
