// The few instructions a kernel here needs beyond C++, each named once.
//
// With RETRO_EMULATE_CUDA a host header supplies them and the CUDA keywords instead, so that a plain C++ compiler can run
// a kernel's own index arithmetic, barriers and fragment layouts on a machine without a GPU.
#pragma once

#include <cstdint>

#ifdef RETRO_EMULATE_CUDA
#include "simt_emulation.h"
#else

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace simt {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, zeros where not `valid`; done once cp_async_wait says so, for this thread alone.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the latest `PENDING` groups of this thread have arrived.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane l names row l%8 of matrix l/8 and receives elements 2*(l%4), +1 of row l/4 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c[16x8] += a[16x16] b[16x8]: 16-bit factors (bfloat16 or float16), float32 sums.
template <bool BF16>
__device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

__device__ __forceinline__ float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

__device__ __forceinline__ unsigned ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
__device__ __forceinline__ int64_t shuffle_xor(int64_t value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, static_cast<long long>(value), lanes);
}
__device__ __forceinline__ float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
__device__ __forceinline__ int64_t shuffle(int64_t value, int lane) {
    return __shfl_sync(0xffffffffu, static_cast<long long>(value), lane);
}

}  // namespace simt
#endif

namespace simt {

// Two 16-bit elements of one word, widened.
template <bool BF16>
__device__ __forceinline__ void widen(uint32_t word, float& low, float& high) {
    if constexpr (BF16) {
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xffff0000u);
    } else {
        low = half_to_float(static_cast<uint16_t>(word & 0xffffu));
        high = half_to_float(static_cast<uint16_t>(word >> 16));
    }
}

}  // namespace simt
