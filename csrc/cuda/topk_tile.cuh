// Product of a CTA's 128 queries and 256 keys, in one struct per instruction. A struct defines the address of a 16-byte
// piece in a stage, and the rows and columns of a thread's sums. It adds the products of a stage in two steps: `begin`
// starts products that run while the CTA executes other instructions, and `finish` computes the remaining products and
// waits for all of them.
#pragma once

#include "simt.cuh"
#include "topk_chunks.h"
#include "topk_select.cuh"

namespace topk {

constexpr int TILE_Q = retro::TOPK_TILE_Q;
constexpr int TILE_S = retro::TOPK_TILE_S;
constexpr int THREADS = retro::TOPK_CHUNKS_SCAN.threads;
constexpr int WARPS = THREADS / WARP;

// mma.sync, for sm_80 and newer. 2 x 4 warps compute 64x64 sums each, and load their fragments with ldmatrix.
template <bool BF16_> struct MmaSync {
  static constexpr bool BF16 = BF16_;
  static constexpr int STEP_D = 32;  // elements of D per stage, which are rows of 64 bytes
  static constexpr int STAGES = 4;
  static constexpr int WARPS_N = 4;                       // warps side by side along the keys
  static constexpr int FRAGMENTS_M = 4, FRAGMENTS_N = 8;  // 16x8 sums each
  using Sums = float[FRAGMENTS_M][FRAGMENTS_N][4];

  // Places a piece so that eight rows that are read together are in eight different 16-byte banks.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * 64 + ((piece ^ ((row >> 1) & 3)) << 4);
  }

  static __device__ __forceinline__ void publish() {}

  static __device__ __forceinline__ void begin(Sums&, const unsigned char*, int) {}

  static __device__ __forceinline__ void finish(Sums& sums, const unsigned char* stage, int warp, int lane) {
    const int row_a = warp / WARPS_N * 64 + lane % 16;
    const int row_b = TILE_Q + warp % WARPS_N * 64 + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k16 = 0; k16 < STEP_D / 16; ++k16) {
      uint32_t a[FRAGMENTS_M][4], b[FRAGMENTS_N / 2][4];
#pragma unroll
      for (int m = 0; m < FRAGMENTS_M; ++m)
        simt::ldmatrix_x4(a[m], stage + place(row_a + m * 16, k16 * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < FRAGMENTS_N / 2; ++n)
        simt::ldmatrix_x4(b[n], stage + place(row_b + n * 16, k16 * 2 + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < FRAGMENTS_M; ++m) {
#pragma unroll
        for (int n = 0; n < FRAGMENTS_N; ++n)
          simt::mma16816<BF16>(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
};

// wgmma, for sm_90a only. Two warpgroups compute 64x256 sums each, and read both factors directly from shared memory.
template <bool BF16_> struct Wgmma {
  static constexpr bool BF16 = BF16_;
  static constexpr int STEP_D = 64;  // elements of D per stage; a row of 128 bytes is one span of the 128-byte swizzle
  static constexpr int STAGES = 3;
  static constexpr int WARPS_N = 1;
  static constexpr int FRAGMENTS_M = 1, FRAGMENTS_N = 32;
  using Sums = float[FRAGMENTS_M][FRAGMENTS_N][4];

  // The swizzle of the hardware: bits 4-6 of an address are combined with bits 7-9 by exclusive or. Stages start at
  // multiples of 1024 bytes.
  static __device__ __forceinline__ int place(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

  // A fence is needed, because the tensor cores read shared memory through the async proxy, and cp.async writes through
  // the generic proxy.
  static __device__ __forceinline__ void publish() { simt::fence_proxy_async(); }

  static __device__ __forceinline__ void begin(Sums& sums, const unsigned char* stage, int warp) {
    const uint64_t a = simt::swizzled128_descriptor(stage + warp / 4 * 64 * 128);
    const uint64_t b = simt::swizzled128_descriptor(stage + TILE_Q * 128);
    simt::wgmma_begin();
    // 16 elements are 32 bytes, which are 2 units of a descriptor
#pragma unroll
    for (int k16 = 0; k16 < STEP_D / 16; ++k16)
      simt::wgmma_64x256x16<BF16>(sums[0], a + k16 * 2, b + k16 * 2);
    simt::wgmma_commit();
  }

  static __device__ __forceinline__ void finish(Sums&, const unsigned char*, int, int) { simt::wgmma_wait(); }
};

// Sum `i` of fragment (m, n) belongs to this row of the tile and to this column of the warp's columns.
template <class Mma> __device__ __forceinline__ int fragment_row(int warp, int lane, int m, int i) {
  return warp / Mma::WARPS_N * (Mma::FRAGMENTS_M * 16) + m * 16 + lane / 4 + i / 2 * 8;
}
__device__ __forceinline__ int fragment_column(int lane, int n, int i) { return n * 8 + lane % 4 * 2 + i % 2; }

// Calls f(m, n, i) for every sum of a thread. The loops are unrolled, because registers cannot be indexed at run time.
template <class Mma, class Function> __device__ __forceinline__ void each_sum(Function&& f) {
#pragma unroll
  for (int m = 0; m < Mma::FRAGMENTS_M; ++m) {
#pragma unroll
    for (int n = 0; n < Mma::FRAGMENTS_N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        f(m, n, i);
    }
  }
}

}  // namespace topk
