// Registration of the CPU kernels. Each binding runs the entry of the active instruction set, without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/chunked_cross_attention.h"
#include "cpu/isa.h"
#include "cpu/leaky_average.h"
#include "cpu/matmul.h"
#include "cpu/parallel.h"
#include "cpu/parts.h"
#include "cpu/relative_attention.h"
#include "cpu/relative_logits.h"
#include "cpu/rms_norm.h"
#include "cpu/softmax_losses.h"
#include "cpu/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

namespace pybind11::detail {

// Calls, from `_native.problem(call)`, and what their gradients are written to, in the order of DIFFERENTIABLE.
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
void bind(py::module_& m, const char* name, retro::IsaTable<Result (*)(Arguments...)> table) {
  m.def(
      name, [table](Arguments... arguments) { return table.entry[retro::active_isa()](arguments...); },
      py::call_guard<py::gil_scoped_release>());
}

template <class Call>
using AttentionForward = retro::IsaTable<void (*)(const Call&, const retro::View&, const retro::View&, int)>;

// `name`(call, places).forward(given, address of out, address of lse, threads): an attention's forward pass again.
template <class Call>
void bind_repeated(py::module_& m, const char* name, AttentionForward<Call> table) {
  using Repeated = retro::Repeated<Call>;
  py::class_<Repeated>(m, name)
      .def(py::init<py::tuple, std::vector<size_t>>())
      .def("forward", [table](const Repeated& self, const py::list& given, uintptr_t out, uintptr_t lse, int threads) {
        const Call call = self.with(given);
        const int64_t* size = call.query.size;  // [B,N,H,D]
        const auto out_view = retro::contiguous(out, call.query.type, size[0], size[1], size[2], size[3]);
        const auto lse_view = retro::contiguous(lse, retro::Type::F32, size[0], size[2], size[1]);
        py::gil_scoped_release release;
        table.entry[retro::active_isa()](call, out_view, lse_view, threads);
      });
}

#define BIND(name) bind(m, #name, RETRO_TABLE(name))

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Vectorised CPU kernels over raw pointers; retro_kernels/ops/*/cpu.py are their only callers.";
  m.attr("abi") = 4;  // `_native.ABI`; the two change together
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
  bind_repeated<retro::CrossAttention>(m, "ChunkedCrossAttention", RETRO_TABLE(chunked_cross_attention_forward));
  bind_repeated<retro::RelativeAttention>(m, "RelativeAttention", RETRO_TABLE(relative_attention_forward));
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
  BIND(part_products);
  BIND(part_softmax);
  BIND(part_packing);
  BIND(part_reading);
  BIND(part_handover);
}
