// csrc/cuda/topk_chunks.cu on the CPU, for test_topk_chunks.py.
#define RETRO_EMULATE_CUDA
#include "../../csrc/cuda/topk_chunks.cu"

namespace topk {
alignas(128) unsigned char memory[sizeof(Shared)];
}

namespace {
template <bool BF16, int R>
void launch(const retro::TopkChunks& call, int blocks, unsigned seed) {
    std::memset(topk::memory, 0xFF, sizeof(topk::memory));
    emulation::launch(blocks, topk::THREADS, seed, [&] { topk::topk_chunks_scan<BF16, R>(call); });
    const unsigned rows = call.B * call.Q;
    emulation::launch((rows + topk::WARPS - 1) / topk::WARPS, topk::THREADS, seed, [&] { topk::topk_chunks_merge<R>(call); });
}
}  // namespace

extern "C" void emulate_topk_chunks(const retro::TopkChunks* call, int blocks, unsigned seed) {
    if (call->k + topk::PENDING <= 128) {
        call->bf16 ? launch<true, 4>(*call, blocks, seed) : launch<false, 4>(*call, blocks, seed);
    } else {
        call->bf16 ? launch<true, 8>(*call, blocks, seed) : launch<false, 8>(*call, blocks, seed);
    }
}

extern "C" int topk_chunks_size() { return sizeof(retro::TopkChunks); }
