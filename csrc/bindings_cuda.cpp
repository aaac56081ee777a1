// Registration of the CUDA kernels. Tensors are passed as views, and the stream is passed as its handle. The functions
// enqueue the kernels and return.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

namespace {

retro::Rows rows(const retro::View& view) {
  const auto stride = [&](int dimension) { return view && view.size[dimension] > 1 ? view.stride[dimension] : 0; };
  return {view.data, stride(0), stride(1), view.type == retro::Type::I64 ? 8 : 4};
}

// Enqueues the kernels. Returns 0 or the CUDA error.
int topk_chunks(const retro::View& query, const retro::View& key, const retro::View& query_doc,
                const retro::View& key_doc, const retro::View& key_mask, const retro::View& partial,
                const retro::View& scores, const retro::View& indices, int k, bool l2, bool causal, int causal_shift,
                int splits, int split_len, int blocks, uintptr_t stream) {
  const auto size = [](const retro::View& view, int dimension) { return static_cast<int>(view.size[dimension]); };
  const retro::TopkChunks call{rows(query),
                               rows(key),
                               rows(query_doc),
                               rows(key_doc),
                               rows(key_mask),
                               partial.at<int64_t>(),
                               scores.at<float>(),
                               indices.at<int64_t>(),
                               size(query, 0),
                               size(query, 1),
                               size(key, 1),
                               size(query, 2),
                               k,
                               causal,
                               causal_shift,
                               splits,
                               split_len,
                               query.type == retro::Type::BF16,
                               l2};
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
