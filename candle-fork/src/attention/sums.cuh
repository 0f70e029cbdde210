// Lists of the sums of a product by a group of warps, for its instruction: where they stand in its text, and what they are.

#pragma once

#define PLACES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_48 PLACES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_52 PLACES_48 \
    ", %48, %49, %50, %51"
#define PLACES_56 PLACES_52 \
    ", %52, %53, %54, %55"
#define PLACES_64 PLACES_56 \
    ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_128 PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SUMS_4(c, i) "+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3])
#define SUMS_16(c, i) SUMS_4(c, i), SUMS_4(c, (i) + 4), SUMS_4(c, (i) + 8), SUMS_4(c, (i) + 12)
#define SUMS_32(c) SUMS_16(c, 0), SUMS_16(c, 16)
#define SUMS_48(c) SUMS_32(c), SUMS_16(c, 32)
#define SUMS_52(c) SUMS_48(c), SUMS_4(c, 48)
#define SUMS_56(c) SUMS_52(c), SUMS_4(c, 52)
#define SUMS_64(c) SUMS_48(c), SUMS_16(c, 48)
#define SUMS_128(c) SUMS_64(c), SUMS_16(c, 64), SUMS_16(c, 80), SUMS_16(c, 96), SUMS_16(c, 112)
