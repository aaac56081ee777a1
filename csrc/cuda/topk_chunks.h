// Exact top-k of queries against keys: the arguments of the launcher, free of torch and of CUDA headers.
#pragma once

#include <cstdint>

namespace retro {

struct TopkChunks {
  const void* query;                                   // [B,Q,D] bfloat16 or float16, rows 16-byte aligned
  const void* key;                                     // [B or 1,S,D]
  const void* query_doc;                               // [B,Q] int32 or int64, or null
  const void* key_doc;                                 // [B or 1,S]
  const uint8_t* key_mask;                             // [B or 1,S], or null
  int64_t* partial;                                    // scratch [B*Q,splits,k]
  float* scores;                                       // [B*Q,k]
  int64_t* indices;                                    // [B*Q,k]
  int64_t stride_qb, stride_qn, stride_kb, stride_ks;  // in elements; 0 for a dimension of size 1
  int64_t stride_qdb, stride_qdn, stride_kdb, stride_kds, stride_mb, stride_ms;
  int B, Q, S, D, k;  // D is a multiple of 8, k is from 1 to 128
  int causal;         // if set, key j is a candidate of query i if j <= i + causal_shift
  int causal_shift;
  int splits, split_len;               // split_len is a multiple of the key tile
  int query_doc_bytes, key_doc_bytes;  // 4 or 8
  int bf16, l2;
};

// Enqueues the scan and the merge on `stream`. Returns 0 or the CUDA error. `blocks` is the number of CTAs that the
// device runs at the same time.
int topk_chunks(const TopkChunks& call, int blocks, void* stream);

constexpr int TOPK_TILE_Q = 128;  // queries per tile
constexpr int TOPK_TILE_S = 256;  // keys per tile

// Number of threads per CTA and bytes of dynamic shared memory of each kernel, under the kernel's name. `retro-bench
// static` reads these lines.
struct LaunchShape {
  int threads, shared_bytes;
};
constexpr LaunchShape TOPK_CHUNKS_SCAN{256, 159264};
constexpr LaunchShape TOPK_CHUNKS_SCAN_WGMMA{256, 208416};
constexpr LaunchShape TOPK_CHUNKS_MERGE{256, 0};

}  // namespace retro
