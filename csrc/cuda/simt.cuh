// Instructions that the kernels need beyond C++.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define RETRO_WGMMA  // this pass compiles for sm_90a
#endif

namespace simt {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, or writes 16 zero bytes if not `valid`. This thread can read them after
// cp_async_wait.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest `PENDING` groups of this thread have arrived.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l%8 of matrix l/8, and receives the
// elements 2*(l%4) and 2*(l%4) + 1 of row l/4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// Computes c[16x8] += a[16x16] b[16x8] with 16-bit factors (bfloat16 or float16) and float32 sums.
template <bool BF16>
__device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Makes this thread's writes to shared memory, including writes by cp.async, visible to the tensor cores after the next
// barrier. This fence and the products of warpgroups exist on sm_90a only, and only its kernels use them.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Returns the descriptor of a tile of 128-byte rows in the 128-byte swizzle. It has the address of the tile and the
// distance of 1024 bytes from one group of 8 rows to the next, both in units of 16 bytes. The other offset is not used
// if a row is one span of the swizzle.
__device__ __forceinline__ uint64_t swizzled128_descriptor(const void* tile) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the products that were started. Their sums must not be accessed before `wgmma_wait`.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all committed products are in their sums.
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define RETRO_R4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define RETRO_R16(n) RETRO_R4(n), RETRO_R4(n + 1), RETRO_R4(n + 2), RETRO_R4(n + 3)
#define RETRO_SUMS \
  RETRO_R16(0), RETRO_R16(4), RETRO_R16(8), RETRO_R16(12), RETRO_R16(16), RETRO_R16(20), RETRO_R16(24), RETRO_R16(28)
#define RETRO_WGMMA_TEXT(type)                                                                     \
  "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                     \
  " {"                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "               \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "               \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
  "}, %128, %129, 1, 1, 1, 0, 0;"

// Computes c[64x256] += a[64x16] b[256x16]^T for the warpgroup. Both factors are in shared memory, with D contiguous.
template <bool BF16> __device__ __forceinline__ void wgmma_64x256x16(float (&c)[32][4], uint64_t a, uint64_t b) {
  if constexpr (BF16) {
    asm volatile(RETRO_WGMMA_TEXT("bf16") : RETRO_SUMS : "l"(a), "l"(b));
  } else {
    asm volatile(RETRO_WGMMA_TEXT("f16") : RETRO_SUMS : "l"(a), "l"(b));
  }
}

__device__ __forceinline__ unsigned ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
__device__ __forceinline__ int64_t shuffle_xor(int64_t value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, static_cast<long long>(value), lanes);
}
__device__ __forceinline__ float shuffle_xor(float value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}
__device__ __forceinline__ int64_t shuffle(int64_t value, int lane) {
  return __shfl_sync(0xffffffffu, static_cast<long long>(value), lane);
}

// Widens the two 16-bit elements of one word to float32.
template <bool BF16> __device__ __forceinline__ void widen(uint32_t word, float& low, float& high) {
  if constexpr (BF16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  } else {
    low = __half2float(__ushort_as_half(static_cast<uint16_t>(word & 0xffffu)));
    high = __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
  }
}

}  // namespace simt
