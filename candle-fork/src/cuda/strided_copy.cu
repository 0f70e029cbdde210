// Copies between two strided layouts of one shape.
//
// Formula: destination[i . destination strides] = source[i . source strides] for every index i of up to 8 axes.
// Ownership: a thread owns single units of the innermost axis, in a loop over the grid. Units are 1 to 16 bytes wide:
// as wide as extents, strides and addresses allow (`cuda/strides.rs`), so a packed innermost run moves in 16-byte
// accesses. Axes come sorted by the destination's strides: neighbouring threads write neighbouring units.
// Index width: offsets 64 bits; the split of the index runs in 32 bits without divisions while there are fewer than 2^31
// units, in 64 bits otherwise.
// Preconditions: both sides cover their last index; the destination overlaps neither itself nor the source.

#include "cuda/common.cuh"

constexpr int MAX_RANK = 8;

struct StridedCopy {
    const void* source;
    void* destination;
    uint64_t units;
    uint64_t rank;
    uint64_t dims[MAX_RANK];
    uint64_t source_strides[MAX_RANK];
    uint64_t destination_strides[MAX_RANK];
    Divisor divisors[MAX_RANK];
};

static_assert(sizeof(StridedCopy) == 352, "as in copy.rs");

template <typename Unit> __device__ void strided_copy(const StridedCopy& p) {
    const Unit* source = static_cast<const Unit*>(p.source);
    Unit* destination = static_cast<Unit*>(p.destination);
    const int last = int(p.rank) - 1;
    if (p.units < (uint64_t(1) << 31)) {
        for (int64_t unit = grid_start(); unit < int64_t(p.units); unit += grid_step()) {
            uint32_t left = uint32_t(unit), at;
            uint64_t from = 0, to = 0;
            for (int axis = last; axis > 0; --axis) {
                left = p.divisors[axis].divide(left, at);
                from += at * p.source_strides[axis];
                to += at * p.destination_strides[axis];
            }
            destination[to + left * p.destination_strides[0]] = source[from + left * p.source_strides[0]];
        }
    } else {
        for (int64_t unit = grid_start(); unit < int64_t(p.units); unit += grid_step()) {
            uint64_t left = unit, from = 0, to = 0;
            for (int axis = last; axis > 0; --axis) {
                const uint64_t at = left % p.dims[axis];
                left /= p.dims[axis];
                from += at * p.source_strides[axis];
                to += at * p.destination_strides[axis];
            }
            destination[to + left * p.destination_strides[0]] = source[from + left * p.source_strides[0]];
        }
    }
}

#define STRIDED_COPY(suffix, Unit)                                                                                   \
    extern "C" __global__ void strided_copy_##suffix(const __grid_constant__ StridedCopy params) {                  \
        strided_copy<Unit>(params);                                                                                  \
    }

STRIDED_COPY(1, uint8_t)
STRIDED_COPY(2, uint16_t)
STRIDED_COPY(4, uint32_t)
STRIDED_COPY(8, uint2)
STRIDED_COPY(16, uint4)
