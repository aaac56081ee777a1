// Packed candidates, and how a warp sorts and merges lists of candidates.
//
// A candidate is one int64. Its high half has the bits of the score, mapped so that a signed comparison orders them.
// Its low half has the inverted key index. A candidate is larger if its score is higher or, at equal scores, if its
// index is lower. Different keys have different values. retro_kernels/ops/topk_chunks/triton uses the same layout,
// which a test checks.
#pragma once

#include "simt.cuh"

namespace topk {

constexpr int WARP = 32;
constexpr int64_t NOTHING = INT64_MIN;  // below every candidate

__device__ __forceinline__ int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

__device__ __forceinline__ int64_t pack(float score, int index) {
  score = score == 0.0f ? 0.0f : score;  // gives -0.0 the bits of 0.0, because the two are equal
  const uint64_t high = static_cast<uint32_t>(ordered(__float_as_int(score)));
  return static_cast<int64_t>(high << 32 | static_cast<uint32_t>(0x7fffffff - index));
}

__device__ __forceinline__ float score_of(int64_t packed) {
  return packed == NOTHING ? -INFINITY : __int_as_float(ordered(static_cast<int32_t>(packed >> 32)));
}

__device__ __forceinline__ int64_t index_of(int64_t packed) {
  return packed == NOTHING ? -1 : 0x7fffffff - static_cast<int64_t>(packed & 0x7fffffff);
}

// Sorts the 32*PER_LANE values of a warp in descending order, with a bitonic sort. Value e is v[e / 32] of lane e % 32.
template <int PER_LANE> __device__ __forceinline__ void sort_descending(int64_t (&v)[PER_LANE], int lane) {
#pragma unroll
  for (int size = 2; size <= WARP * PER_LANE; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
#pragma unroll
      for (int r = 0; r < PER_LANE; ++r) {
        const int e = r * WARP + lane;
        if (stride < WARP) {
          const int64_t other = simt::shuffle_xor(v[r], stride);
          const bool keep_larger = ((e & size) == 0) == ((e & stride) == 0);
          v[r] = (v[r] > other) == keep_larger ? v[r] : other;
        } else if ((r & (stride / WARP)) == 0) {  // the pair is in this lane
          const int p = r + stride / WARP;
          const bool down = (e & size) == 0;
          const int64_t a = v[r], b = v[p];
          v[r] = (a > b) == down ? a : b;
          v[p] = (a > b) == down ? b : a;
        }
      }
    }
  }
}

// Returns value e of a warp's 32*PER_LANE values in every lane. e must be the same in all lanes.
template <int PER_LANE> __device__ __forceinline__ int64_t element(const int64_t (&v)[PER_LANE], int e) {
  int64_t mine = 0;
  // masks instead of selects, because the compiler would turn a chain of selects into an array in local memory
#pragma unroll
  for (int r = 0; r < PER_LANE; ++r)
    mine |= v[r] & -static_cast<int64_t>(e / WARP == r);
  return simt::shuffle(mine, e % WARP);
}

// Writes the k best of list[0, have) and extra[0, count) to list[0, k), in descending order, padded with NOTHING.
// Returns the new k-th value. All lanes of a warp must call it. `have` is 0 or k, and k + count <= 32*PER_LANE.
template <int PER_LANE> __device__ __forceinline__ int64_t merge_into(int64_t* list, int have, const int64_t* extra,
                                                                      int count, int k, int lane) {
  int64_t v[PER_LANE];
#pragma unroll
  for (int r = 0; r < PER_LANE; ++r) {
    const int e = r * WARP + lane;
    v[r] = e < have ? list[e] : NOTHING;
    if (e >= k && e < k + count)
      v[r] = extra[e - k];
  }
  sort_descending<PER_LANE>(v, lane);
#pragma unroll
  for (int r = 0; r < PER_LANE; ++r) {
    const int e = r * WARP + lane;
    if (e < k)
      list[e] = v[r];
  }
  __syncwarp();
  return element<PER_LANE>(v, k - 1);
}

}  // namespace topk
