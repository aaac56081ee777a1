// Registration of the CPU kernels. Each binding runs the function of the active instruction set, without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/chunked_cross_attention.h"
#include "cpu/cross_entropy.h"
#include "cpu/isa.h"
#include "cpu/leaky_average.h"
#include "cpu/linear.h"
#include "cpu/parallel.h"
#include "cpu/relative_attention.h"
#include "cpu/relative_logits.h"
#include "cpu/rms_norm.h"
#include "cpu/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

namespace pybind11::detail {

// Calls as tuples, and tuples of their gradients in the order of DIFFERENTIABLE.
template <>
struct type_caster<retro::CrossAttention> : fields_caster<retro::CrossAttention> {};
template <>
struct type_caster<retro::CrossAttentionGrads> : fields_caster<retro::CrossAttentionGrads> {};
template <>
struct type_caster<retro::RelativeAttention> : fields_caster<retro::RelativeAttention> {};
template <>
struct type_caster<retro::RelativeAttentionGrads> : fields_caster<retro::RelativeAttentionGrads> {};
template <>
struct type_caster<retro::RelativeLogits> : fields_caster<retro::RelativeLogits> {};

}  // namespace pybind11::detail

namespace {

template <class Result, class... Arguments>
void bind(py::module_& m, const char* name, std::array<Result (*)(Arguments...), retro::ISA_COUNT> table) {
  const auto run = [table](Arguments... arguments) { return table[retro::active_isa()](arguments...); };
  m.def(name, run, py::call_guard<py::gil_scoped_release>());
}

#define BIND(name) bind(m, #name, RETRO_TABLE(name))

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Vectorised CPU kernels over raw pointers; retro_kernels/ops/*/cpu.py are their only callers.";
  m.attr("abi") = 4;  // `native.ABI`; the two change together
  m.attr("fields") = py::dict(py::arg("ChunkedCrossAttention") = retro::FIELDS<retro::CrossAttention>,
                              py::arg("RelativeAttention") = retro::FIELDS<retro::RelativeAttention>,
                              py::arg("RelativeLogits") = retro::FIELDS<retro::RelativeLogits>);
  m.def("set_isa", &retro::set_isa);
  m.def("isa_name", &retro::isa_name);
  m.def("supported_isas", &retro::supported_isas);
  m.def("watch_forks", &retro::watch_forks);
  m.def("advise_huge_pages", &retro::advise_huge_pages);
  BIND(chunked_cross_attention_forward);
  BIND(chunked_cross_attention_backward);
  BIND(leaky_average_forward);
  BIND(leaky_average_backward);
  BIND(topk_chunks_forward);
  BIND(topk_chunks_backward);
  BIND(relative_attention_forward);
  BIND(relative_attention_backward);
  BIND(relative_logits_forward);
  BIND(relative_logits_backward);
  BIND(matmul);
  BIND(rms_norm_forward);
  BIND(rms_norm_backward);
  BIND(softmax_losses);
}
