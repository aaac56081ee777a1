// Exact top-k for thousands of queries and up to 2^31 keys. In this case the tensor cores limit the speed.
//
// A CTA processes 128 queries. It walks over tiles of 256 keys of one split, in ascending order. 8 warps multiply
// (topk_tile.cuh). cp.async fills a ring buffer of stages that continues across tiles, so the epilogue of a tile
// overlaps with the loads of the next tile.
//
// The epilogue compares each sum with the current k-th score of its row. A tile without a higher score costs only this
// comparison. Otherwise 16 columns at a time go through shared memory to the warp that owns the row. The warp applies
// the masks and appends the candidates to the row's pending list. A full pending list is sorted into the row's list of
// k.
//
// Columns reach a row in ascending order, so the comparison "higher than the k-th" also decides ties. The kernel needs
// no atomics, because a position in a pending list is a count of votes. The values in a list are distinct, so the
// result depends neither on the number of splits nor on the order of CTAs.
#include "topk_chunks.h"
#include "topk_select.cuh"
#include "topk_tile.cuh"

namespace topk {

constexpr int ROWS_PER_WARP = TILE_Q / WARPS;  // rows whose lists a warp owns
constexpr int CHUNK = 16;                      // columns that go through shared memory at once
constexpr int CHUNKS = TILE_S / CHUNK;
constexpr int PENDING = 48;  // length of a row's pending list; a chunk adds up to 16 candidates
constexpr int STAGED_PITCH = CHUNK + 1;

template <class Mma> struct Shared {
  unsigned char stage[Mma::STAGES][(TILE_Q + TILE_S) * Mma::STEP_D * 2];  // queries, then keys
  int64_t pending[TILE_Q][PENDING];
  float staged[TILE_Q][STAGED_PITCH];
  float limit[TILE_Q];  // k-th score of the row's list; -inf while the list is not full
  float query_norm[TILE_Q];
  float key_norm[TILE_S];
  int count[TILE_Q];       // length of the pending list
  int have[TILE_Q];        // length of the row's list: 0 before the first merge, then k
  unsigned chunks[WARPS];  // bit c: chunk c of this warp's columns holds a survivor
};

static_assert(sizeof(Shared<MmaSync<true>>) == retro::TOPK_CHUNKS_SCAN.shared_bytes, "correct it in topk_chunks.h");
static_assert(sizeof(Shared<Wgmma<true>>) == retro::TOPK_CHUNKS_SCAN_WGMMA.shared_bytes, "correct it in topk_chunks.h");
static_assert(THREADS == retro::TOPK_CHUNKS_SCAN_WGMMA.threads && THREADS == retro::TOPK_CHUNKS_MERGE.threads,
              "one size of block");

struct Work {
  int batch, first_query, first_key, end_key, split;
};

// Neighbouring CTAs scan the same keys for different queries, so all CTAs but the first read the keys from L2.
__device__ __forceinline__ Work work_item(const retro::TopkChunks& call, int item) {
  const int q_blocks = (call.Q + TILE_Q - 1) / TILE_Q;
  Work work;
  // with causality, the last queries have the most keys to scan, so they start first
  work.first_query = (q_blocks - 1 - item % q_blocks) * TILE_Q;
  work.split = item / q_blocks % call.splits;
  work.batch = item / q_blocks / call.splits;
  work.first_key = work.split * call.split_len;
  const int64_t split_end = static_cast<int64_t>(work.first_key) + call.split_len;
  work.end_key = split_end < call.S ? static_cast<int>(split_end) : call.S;
  if (call.causal) {
    const int last_query = (work.first_query + TILE_Q < call.Q ? work.first_query + TILE_Q : call.Q) - 1;
    const int causal_end = last_query + call.causal_shift + 1;
    work.end_key = causal_end < work.end_key ? causal_end : work.end_key;
  }
  return work;
}

template <class T> __device__ __forceinline__ const T* row_of(const retro::Rows& rows, int batch, int row) {
  return static_cast<const T*>(rows.data) + batch * rows.batch + row * rows.row;
}

__device__ __forceinline__ int64_t document(const retro::Rows& docs, int batch, int row) {
  return docs.bytes == 8 ? *row_of<int64_t>(docs, batch, row) : *row_of<int32_t>(docs, batch, row);
}

__device__ __forceinline__ bool is_candidate(const retro::TopkChunks& call, const Work& work, int q, int s) {
  if (q >= call.Q || s >= work.end_key)
    return false;
  if (call.causal && s > q + call.causal_shift)
    return false;
  if (call.key_mask.data && !*row_of<uint8_t>(call.key_mask, work.batch, s))
    return false;
  return !call.query_doc.data || document(call.query_doc, work.batch, q) != document(call.key_doc, work.batch, s);
}

// Starts to copy step `step` of the tile at `first_key` into a stage, in 16-byte pieces.
template <class Mma> __device__ __forceinline__ void load_stage(const retro::TopkChunks& call, const Work& work,
                                                                unsigned char* stage, int first_key, int step) {
  const uint16_t* query = row_of<uint16_t>(call.query, work.batch, 0);
  const uint16_t* key = row_of<uint16_t>(call.key, work.batch, 0);
  constexpr int PIECES = Mma::STEP_D / 8;  // number of pieces per row
  const int piece = threadIdx.x % PIECES;
  const int d = step * Mma::STEP_D + piece * 8;
#pragma unroll 4
  for (int i = 0; i < (TILE_Q + TILE_S) * PIECES / THREADS; ++i) {
    const int row = threadIdx.x / PIECES + i * (THREADS / PIECES);
    const bool of_query = row < TILE_Q;
    const int number = of_query ? work.first_query + row : first_key + row - TILE_Q;
    const bool valid = d < call.D && number < (of_query ? call.Q : work.end_key);
    const uint16_t* source = of_query ? query + number * call.query.row + d : key + number * call.key.row + d;
    simt::cp_async16(stage + Mma::place(row, piece), valid ? source : (of_query ? query : key), valid);
  }
}

// Returns the sum of squares of key row `threadIdx.x` in this stage.
template <class Mma> __device__ __forceinline__ float stage_square(const unsigned char* stage) {
  float total = 0.0f;
#pragma unroll
  for (int piece = 0; piece < Mma::STEP_D / 8; ++piece) {
    const uint4 words = *reinterpret_cast<const uint4*>(stage + Mma::place(TILE_Q + threadIdx.x, piece));
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      simt::widen<Mma::BF16>(word[i], low, high);
      total += low * low;
      total += high * high;
    }
  }
  return total;
}

template <class Mma> __device__ __forceinline__ void query_norms(const retro::TopkChunks& call, const Work& work,
                                                                 Shared<Mma>& shared, int warp, int lane) {
  for (int i = 0; i < ROWS_PER_WARP; ++i) {
    const int row = warp * ROWS_PER_WARP + i, q = work.first_query + row;
    const uint16_t* source = row_of<uint16_t>(call.query, work.batch, q);
    float total = 0.0f;
    for (int d = lane * 2; q < call.Q && d < call.D; d += WARP * 2) {
      float low, high;
      simt::widen<Mma::BF16>(*reinterpret_cast<const uint32_t*>(source + d), low, high);
      total += low * low;
      total += high * high;
    }
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
      total += simt::shuffle_xor(total, lanes);
    if (lane == 0)
      shared.query_norm[row] = total;
  }
}

// Turns products into -||q-k||^2. Rounding may make a distance negative; a comparison sets it to 0 and keeps NaN.
template <class Mma>
__device__ __forceinline__ void to_l2(typename Mma::Sums& sums, const Shared<Mma>& shared, int warp, int lane) {
  const float* key_norm = shared.key_norm + warp % Mma::WARPS_N * (Mma::FRAGMENTS_N * 8);
  each_sum<Mma>([&](int m, int n, int i) {
    const float norms = shared.query_norm[fragment_row<Mma>(warp, lane, m, i)] + key_norm[fragment_column(lane, n, i)];
    const float score = 2.0f * sums[m][n][i] - norms;
    sums[m][n][i] = score > 0.0f ? 0.0f : score;
  });
}

// Returns a bit set: bit c is set if chunk c of this warp's columns has a score above the k-th score of its row. NaN
// and -inf are never above.
template <class Mma> __device__ __forceinline__ unsigned surviving_chunks(const typename Mma::Sums& sums,
                                                                          const Shared<Mma>& shared, int warp,
                                                                          int lane) {
  unsigned chunks = 0;
  each_sum<Mma>([&](int m, int n, int i) {
    chunks |= sums[m][n][i] > shared.limit[fragment_row<Mma>(warp, lane, m, i)] ? 1u << (n / 2) : 0u;
  });
  unsigned any = 0;
#pragma unroll
  for (int c = 0; c < Mma::FRAGMENTS_N / 2; ++c)
    any |= simt::ballot(chunks >> c & 1) ? 1u << c : 0u;
  return any;
}

// Writes chunk `c` of this warp's columns to shared memory.
template <class Mma> __device__ __forceinline__ void stage_chunk(const typename Mma::Sums& sums, Shared<Mma>& shared,
                                                                 int c, int warp, int lane) {
  each_sum<Mma>([&](int m, int n, int i) {
    if (n / 2 == c)
      shared.staged[fragment_row<Mma>(warp, lane, m, i)][fragment_column(lane, n % 2, i)] = sums[m][n][i];
  });
}

__device__ __forceinline__ int64_t* row_list(const retro::TopkChunks& call, const Work& work, int row) {
  const int64_t q = static_cast<int64_t>(work.batch) * call.Q + work.first_query + row;
  return call.partial + (q * call.splits + work.split) * call.k;
}

// Sorts the pending list of `row` into its list of k. All lanes of a warp call it.
template <class Mma, int PER_LANE>
__device__ void flush(const retro::TopkChunks& call, const Work& work, Shared<Mma>& shared, int row, int lane) {
  const int count = shared.count[row], have = shared.have[row];
  const int64_t last = merge_into<PER_LANE>(row_list(call, work, row), have, shared.pending[row], count, call.k, lane);
  __syncwarp();  // every lane has read the row's state
  if (lane == 0) {
    shared.limit[row] = score_of(last);
    shared.count[row] = 0;
    shared.have[row] = call.k;
  }
  __syncwarp();
}

// Appends candidates of the staged chunk, whose first column is key `first_key`, for this warp's rows, two at a time.
template <class Mma, int PER_LANE> __device__ __forceinline__ void append_chunk(const retro::TopkChunks& call,
                                                                                const Work& work, Shared<Mma>& shared,
                                                                                int first_key, int warp, int lane) {
  const int half = lane / CHUNK, column = lane % CHUNK;
#pragma unroll 1
  for (int i = 0; i < ROWS_PER_WARP; i += 2) {
    const int pair = warp * ROWS_PER_WARP + i, row = pair + half;
    const float score = shared.staged[row][column];
    if (!simt::ballot(score > shared.limit[row]))
      continue;
#pragma unroll 1
    for (int r = pair; r < pair + 2; ++r) {
      if (shared.count[r] > PENDING - CHUNK)
        flush<Mma, PER_LANE>(call, work, shared, r, lane);
    }
    const bool enters =
        score > shared.limit[row] && is_candidate(call, work, work.first_query + row, first_key + column);
    const unsigned mine = simt::ballot(enters) >> (half * CHUNK) & ((1u << CHUNK) - 1);
    const int count = shared.count[row];
    if (enters)
      shared.pending[row][count + __popc(mine & ((1u << column) - 1))] = pack(score, first_key + column);
    __syncwarp();
    if (column == 0)
      shared.count[row] = count + __popc(mine);
    __syncwarp();
  }
}

template <class Mma, int PER_LANE>
__device__ __forceinline__ void take_survivors(const retro::TopkChunks& call, const Work& work, Shared<Mma>& shared,
                                               const typename Mma::Sums& sums, int first_key, int warp, int lane) {
  constexpr int WARP_CHUNKS = Mma::FRAGMENTS_N / 2;
  const unsigned mine = surviving_chunks<Mma>(sums, shared, warp, lane);
  if (lane == 0)
    shared.chunks[warp] = mine;
  __syncthreads();
  unsigned all = 0;
  for (int w = 0; w < WARPS; ++w)
    all |= shared.chunks[w] << (w % Mma::WARPS_N * WARP_CHUNKS);
#pragma unroll 1  // the sums fill the registers
  for (int c = 0; c < CHUNKS; ++c) {
    if (!(all >> c & 1))
      continue;
    if (warp % Mma::WARPS_N == c / WARP_CHUNKS)
      stage_chunk<Mma>(sums, shared, c % WARP_CHUNKS, warp, lane);
    __syncthreads();
    append_chunk<Mma, PER_LANE>(call, work, shared, first_key + c * CHUNK, warp, lane);
    __syncthreads();  // before the next chunk is staged, and before limits are read again
  }
}

template <class Mma, int PER_LANE>
__device__ __forceinline__ void scan_item(const retro::TopkChunks& call, const Work& work, Shared<Mma>& shared) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (threadIdx.x < TILE_Q) {
    shared.limit[threadIdx.x] = -INFINITY;
    shared.count[threadIdx.x] = shared.have[threadIdx.x] = 0;
  }
  if (call.l2)
    query_norms<Mma>(call, work, shared, warp, lane);
  __syncthreads();

  const int keys = work.end_key - work.first_key;
  const int steps = (call.D + Mma::STEP_D - 1) / Mma::STEP_D;
  const int total = (keys > 0 ? (keys + TILE_S - 1) / TILE_S : 0) * steps;  // at most 2^22 tiles of 2^7 steps
  int load_key = work.first_key, load_step = 0, load_at = 0;                // keys, step and stage of the next load
  int loaded = 0;
  auto load_next = [&] {
    if (loaded < total)
      load_stage<Mma>(call, work, shared.stage[load_at], load_key, load_step);
    simt::cp_async_commit();  // past the end the group is empty, but it must exist, because cp_async_wait counts groups
    ++loaded;
    load_at = (load_at + 1) % Mma::STAGES;
    if (++load_step == steps) {
      load_step = 0;
      load_key += TILE_S;
    }
  };
  for (int i = 0; i < Mma::STAGES - 1; ++i)
    load_next();

  typename Mma::Sums sums;
  each_sum<Mma>([&](int m, int n, int i) { sums[m][n][i] = 0.0f; });
  float square = 0.0f;
  int key = work.first_key, step = 0, at = 0;
  for (int done = 0; done < total; ++done) {
    simt::cp_async_wait<Mma::STAGES - 2>();
    Mma::publish();
    __syncthreads();  // all pieces of this stage have arrived, and no thread reads the stage that is filled next
    Mma::begin(sums, shared.stage[at], warp);
    load_next();  // while the tensor cores work
    Mma::finish(sums, shared.stage[at], warp, lane);
    if (call.l2)
      square += stage_square<Mma>(shared.stage[at]);
    at = (at + 1) % Mma::STAGES;
    if (++step < steps)
      continue;
    if (call.l2) {
      shared.key_norm[threadIdx.x] = square;
      __syncthreads();
      to_l2<Mma>(sums, shared, warp, lane);
    }
    take_survivors<Mma, PER_LANE>(call, work, shared, sums, key, warp, lane);
    each_sum<Mma>([&](int m, int n, int i) { sums[m][n][i] = 0.0f; });
    square = 0.0f;
    step = 0;
    key += TILE_S;
  }
  simt::cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < ROWS_PER_WARP; ++i) {
    const int row = warp * ROWS_PER_WARP + i;
    // an empty list is also written, because the merge reads it
    if (work.first_query + row < call.Q && (shared.count[row] > 0 || shared.have[row] == 0))
      flush<Mma, PER_LANE>(call, work, shared, row, lane);
  }
  __syncthreads();  // before the next item starts over
}

template <class Mma, int PER_LANE>
__device__ __forceinline__ void scan(const retro::TopkChunks& call, unsigned char* memory) {
  Shared<Mma>& shared = *reinterpret_cast<Shared<Mma>*>(memory);
  const int items = call.B * ((call.Q + TILE_Q - 1) / TILE_Q) * call.splits;
  for (int item = blockIdx.x; item < items; item += gridDim.x)
    scan_item<Mma, PER_LANE>(call, work_item(call, item), shared);
}

template <bool BF16, int PER_LANE> __global__ void __launch_bounds__(THREADS, 1)
    topk_chunks_scan(const retro::TopkChunks call) {
  extern __shared__ __align__(1024) unsigned char memory[];
  scan<MmaSync<BF16>, PER_LANE>(call, memory);
}

// The kernel has a body only for sm_90a, and is launched only there.
template <bool BF16, int PER_LANE> __global__ void __launch_bounds__(THREADS, 1)
    topk_chunks_scan_wgmma(const retro::TopkChunks call) {
#ifdef RETRO_WGMMA
  extern __shared__ __align__(1024) unsigned char memory[];
  scan<Wgmma<BF16>, PER_LANE>(call, memory);
#endif
}

// A warp merges the lists of a row's splits into the k best.
template <int PER_LANE> __global__ void __launch_bounds__(THREADS) topk_chunks_merge(const retro::TopkChunks call) {
  const int lane = threadIdx.x % WARP;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row >= static_cast<int64_t>(call.B) * call.Q)
    return;  // for the whole warp
  const int64_t many = static_cast<int64_t>(call.splits) * call.k;
  const int64_t* from = call.partial + row * many;
  int64_t v[PER_LANE];
#pragma unroll
  for (int r = 0; r < PER_LANE; ++r)
    v[r] = NOTHING;
  for (int64_t start = 0; start < many; start += WARP * PER_LANE - call.k) {
#pragma unroll
    for (int r = 0; r < PER_LANE; ++r) {
      const int e = r * WARP + lane;
      if (e >= call.k)
        v[r] = start + e - call.k < many ? from[start + e - call.k] : NOTHING;
    }
    sort_descending<PER_LANE>(v, lane);
  }
#pragma unroll
  for (int r = 0; r < PER_LANE; ++r) {
    const int e = r * WARP + lane;
    if (e < call.k) {
      call.scores[row * call.k + e] = score_of(v[r]);
      call.indices[row * call.k + e] = index_of(v[r]);
    }
  }
}

}  // namespace topk

namespace retro {
namespace {

template <bool BF16, int PER_LANE> cudaError_t launch(const TopkChunks& call, int blocks, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess)
    return error;
  const bool hopper = major == 9 && RETRO_CUDA_HOPPER;  // only sm_90a has the wgmma scan, and an old nvcc lacks sm_90a
  const int bytes = hopper ? TOPK_CHUNKS_SCAN_WGMMA.shared_bytes : TOPK_CHUNKS_SCAN.shared_bytes;
  auto* scan = hopper ? topk::topk_chunks_scan_wgmma<BF16, PER_LANE> : topk::topk_chunks_scan<BF16, PER_LANE>;
  error = cudaFuncSetAttribute(scan, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess)
    return error;
  scan<<<blocks, topk::THREADS, bytes, stream>>>(call);
  const int64_t rows = static_cast<int64_t>(call.B) * call.Q;
  topk::topk_chunks_merge<PER_LANE>
      <<<static_cast<unsigned>((rows + topk::WARPS - 1) / topk::WARPS), topk::THREADS, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace

int topk_chunks(const TopkChunks& call, int blocks, void* stream) {
  const bool narrow = call.k + topk::PENDING <= 128;  // both lists are sorted together, as 32*PER_LANE values
  auto* run =
      call.bf16 ? (narrow ? &launch<true, 4> : &launch<true, 8>) : (narrow ? &launch<false, 4> : &launch<false, 8>);
  return run(call, blocks, static_cast<cudaStream_t>(stream));
}

}  // namespace retro
