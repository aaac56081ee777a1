// csrc/cuda/topk_chunks.cu on the CPU, for test_topk_chunks.py.
#define RETRO_EMULATE_CUDA
#define RETRO_WGMMA
#include "../../csrc/cuda/topk_chunks.cu"

namespace topk {
alignas(1024) unsigned char memory[sizeof(Shared<Wgmma<true>>)];
}

namespace {

template <bool BF16, int R> void launch(const retro::TopkChunks& call, int blocks, unsigned seed, bool wgmma) {
  static_assert(sizeof(topk::Shared<topk::MmaSync<BF16>>) <= sizeof(topk::memory));
  std::memset(topk::memory, 0xFF, sizeof(topk::memory));
  simt::shared_memory = topk::memory;
  emulation::launch(blocks, topk::THREADS, seed, [&] {
    wgmma ? topk::topk_chunks_scan_wgmma<BF16, R>(call) : topk::topk_chunks_scan<BF16, R>(call);
  });
  const unsigned rows = call.B * call.Q;
  emulation::launch((rows + topk::WARPS - 1) / topk::WARPS, topk::THREADS, seed,
                    [&] { topk::topk_chunks_merge<R>(call); });
}

}  // namespace

extern "C" void emulate_topk_chunks(const retro::TopkChunks* call, int blocks, unsigned seed, int wgmma) {
  if (call->k + topk::PENDING <= 128) {
    call->bf16 ? launch<true, 4>(*call, blocks, seed, wgmma) : launch<false, 4>(*call, blocks, seed, wgmma);
  } else {
    call->bf16 ? launch<true, 8>(*call, blocks, seed, wgmma) : launch<false, 8>(*call, blocks, seed, wgmma);
  }
}

extern "C" int topk_chunks_size() { return sizeof(retro::TopkChunks); }
extern "C" int topk_shared_bytes(int wgmma) {
  return wgmma ? sizeof(topk::Shared<topk::Wgmma<true>>) : sizeof(topk::Shared<topk::MmaSync<true>>);
}
