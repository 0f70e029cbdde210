// Products of 64 queries with the keys and the values of a plane, by a group of four warps. As attention/wgmma.cuh, whose
// operands these are, in other widths.

#pragma once

#include "attention/wgmma.cuh"

// c = a b, or c += a b if `add`: for b [16, 2 N] of `panel_columns`, N sums each lane.
template <typename T, int N>
__device__ __forceinline__ void multiply_by_keys(float (&c)[N], const uint32_t (&a)[4], uint64_t b, int add);

// The same for b [16, 64] of `panel_rows`.
template <typename T>
__device__ __forceinline__ void multiply_by_values(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add);

#define KEYS_64(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %37, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
            "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n" \
            "}\n" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
              "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), \
              "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), \
              "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), \
              "+f"(c[29]), "+f"(c[30]), "+f"(c[31]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_64(__nv_bfloat16, "bf16")
KEYS_64(__half, "f16")
#undef KEYS_64

#define KEYS_96(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[48], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %53, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n96k16.f32." ELEMENT "." ELEMENT " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
            "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
            "%40, %41, %42, %43, %44, %45, %46, %47" \
            "}, {%48, %49, %50, %51}, %52, p, 1, 1, 0;\n" \
            "}\n" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
              "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), \
              "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), \
              "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), \
              "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
              "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), \
              "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_96(__nv_bfloat16, "bf16")
KEYS_96(__half, "f16")
#undef KEYS_96

#define KEYS_104(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[52], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %57, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n104k16.f32." ELEMENT "." ELEMENT " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
            "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
            "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51" \
            "}, {%52, %53, %54, %55}, %56, p, 1, 1, 0;\n" \
            "}\n" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
              "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), \
              "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), \
              "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), \
              "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
              "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), \
              "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), \
              "+f"(c[50]), "+f"(c[51]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_104(__nv_bfloat16, "bf16")
KEYS_104(__half, "f16")
#undef KEYS_104

#define KEYS_112(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_keys<T>(float (&c)[56], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %61, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n112k16.f32." ELEMENT "." ELEMENT " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
            "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
            "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
            "}, {%56, %57, %58, %59}, %60, p, 1, 1, 0;\n" \
            "}\n" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
              "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), \
              "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), \
              "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), \
              "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), \
              "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), \
              "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), \
              "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

KEYS_112(__nv_bfloat16, "bf16")
KEYS_112(__half, "f16")
#undef KEYS_112

#define VALUES_64(T, ELEMENT) \
    template <> \
    __device__ __forceinline__ void multiply_by_values<T>(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, %37, 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
            "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n" \
            "}\n" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
              "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), \
              "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), \
              "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), \
              "+f"(c[29]), "+f"(c[30]), "+f"(c[31]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }

VALUES_64(__nv_bfloat16, "bf16")
VALUES_64(__half, "f16")
#undef VALUES_64
