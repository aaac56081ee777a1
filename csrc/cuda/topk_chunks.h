// Exact top-k of queries against keys: the arguments of the launcher, free of torch and of CUDA headers.
#pragma once

#include <cstdint>

namespace retro {

// Rows of a tensor, per batch entry. `data` is null if the tensor is None.
struct Rows {
  const void* data;
  int64_t batch, row;  // strides in elements; 0 for a dimension of size 1
  int64_t bytes;       // per document, 4 or 8
};

struct TopkChunks {
  Rows query, key;           // [B,Q,D] and [B or 1,S,D] bfloat16 or float16, aligned to 16 bytes
  Rows query_doc, key_doc;   // [B,Q] and [B or 1,S] int32 or int64, or null
  Rows key_mask;             // [B or 1,S] of bytes, or null
  int64_t* partial;          // scratch [B*Q,splits,k]
  float* scores;             // [B*Q,k]
  int64_t* indices;          // [B*Q,k]
  int B, Q, S, D, k;         // D is a multiple of 8, k is from 1 to 128
  int causal, causal_shift;  // if `causal` is set, key j is a candidate of query i if j <= i + causal_shift
  int splits, split_len;     // split_len is a multiple of the key tile
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
