// Registration of the CUDA kernels. Tensors are passed as views, and the stream is passed as its handle. The functions
// enqueue the kernels and return.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

namespace {

int64_t stride(const retro::View& view, int dimension) {
  return view && view.size[dimension] > 1 ? view.stride[dimension] : 0;
}
int bytes(const retro::View& view) { return view.type == retro::Type::I64 ? 8 : 4; }

// Enqueues the kernels. Returns 0 or the CUDA error.
int topk_chunks(const retro::View& query, const retro::View& key, const retro::View& query_doc,
                const retro::View& key_doc, const retro::View& key_mask, const retro::View& partial,
                const retro::View& scores, const retro::View& indices, int k, bool l2, bool causal, int causal_shift,
                int splits, int split_len, int blocks, uintptr_t stream) {
  retro::TopkChunks call{};
  call.query = query.data;
  call.key = key.data;
  call.query_doc = query_doc.data;
  call.key_doc = key_doc.data;
  call.key_mask = reinterpret_cast<const uint8_t*>(key_mask.data);
  call.partial = reinterpret_cast<int64_t*>(partial.data);
  call.scores = reinterpret_cast<float*>(scores.data);
  call.indices = reinterpret_cast<int64_t*>(indices.data);
  call.stride_qb = stride(query, 0);
  call.stride_qn = stride(query, 1);
  call.stride_kb = stride(key, 0);
  call.stride_ks = stride(key, 1);
  call.stride_qdb = stride(query_doc, 0);
  call.stride_qdn = stride(query_doc, 1);
  call.stride_kdb = stride(key_doc, 0);
  call.stride_kds = stride(key_doc, 1);
  call.stride_mb = stride(key_mask, 0);
  call.stride_ms = stride(key_mask, 1);
  call.B = static_cast<int>(query.size[0]);
  call.Q = static_cast<int>(query.size[1]);
  call.S = static_cast<int>(key.size[1]);
  call.D = static_cast<int>(query.size[2]);
  call.k = k;
  call.l2 = l2;
  call.causal = causal;
  call.causal_shift = causal_shift;
  call.splits = splits;
  call.split_len = split_len;
  call.query_doc_bytes = bytes(query_doc);
  call.key_doc_bytes = bytes(key_doc);
  call.bf16 = query.type == retro::Type::BF16;
  return retro::topk_chunks(call, blocks, reinterpret_cast<void*>(stream));
}

// Returns the version of this library's runtime, and the newest version that the driver runs (0 without a driver).
// Versions are numbers 1000 * major + 10 * minor.
std::pair<int, int> versions() {
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  return {runtime, driver};
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels over raw pointers; retro_kernels/ops/*/cuda.py are their only callers.";
  m.attr("abi") = 2;  // must change together with `extensions.ABI`
  m.attr("architectures") = RETRO_CUDA_ARCHES;
  m.def("versions", &versions);
  m.attr("topk_tile_q") = retro::TOPK_TILE_Q;
  m.attr("topk_tile_s") = retro::TOPK_TILE_S;
  m.def("topk_chunks", &topk_chunks, py::call_guard<py::gil_scoped_release>());
}
