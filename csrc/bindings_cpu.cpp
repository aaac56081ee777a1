// Registration of the CPU kernels. Each binding runs the entry of the active instruction set, without the GIL.
#include <pybind11/pybind11.h>

#include "cpu/chunked_cross_attention.h"
#include "cpu/isa.h"
#include "cpu/leaky_average.h"
#include "cpu/parallel.h"
#include "cpu/relative_attention.h"
#include "cpu/relative_logits.h"
#include "cpu/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

namespace pybind11::detail {

// From `_native.problem(call)`: the fields of the Python NamedTuple, in order.
template <>
struct type_caster<retro::CrossAttention> {
  PYBIND11_TYPE_CASTER(retro::CrossAttention, const_name("CrossAttention"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 15) return false;
    auto field = reinterpret_borrow<tuple>(source);
    const auto view = [&](int i) { return field[i].cast<retro::View>(); };
    const auto integer = [&](int i) { return field[i].cast<int64_t>(); };
    const auto number = [&](int i) { return field[i].cast<double>(); };
    value = {view(0), view(1), view(2), integer(3), view(4), view(5), integer(6), view(7),
             view(8), view(9), view(10), number(11), integer(12), number(13), view(14)};
    return true;
  }
};

// Eight views, in the order of `ChunkedCrossAttention.DIFFERENTIABLE`.
template <>
struct type_caster<retro::CrossAttentionGrads> {
  PYBIND11_TYPE_CASTER(retro::CrossAttentionGrads, const_name("CrossAttentionGrads"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 8) return false;
    auto field = reinterpret_borrow<tuple>(source);
    const auto view = [&](int i) { return field[i].cast<retro::View>(); };
    value = {view(0), view(1), view(2), view(3), view(4), view(5), view(6), view(7)};
    return true;
  }
};

// The same for `RelativeAttention`; an unbounded window is None there and negative here.
template <>
struct type_caster<retro::RelativeAttention> {
  PYBIND11_TYPE_CASTER(retro::RelativeAttention, const_name("RelativeAttention"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 18) return false;
    auto field = reinterpret_borrow<tuple>(source);
    const auto view = [&](int i) { return field[i].cast<retro::View>(); };
    const auto integer = [&](int i) { return field[i].is_none() ? -1 : field[i].cast<int64_t>(); };
    const auto number = [&](int i) { return field[i].cast<double>(); };
    value = {view(0),     view(1),     view(2),  view(3),  view(4),  integer(5), view(6),    view(7),    field[8].cast<bool>(),
             integer(9),  integer(10), integer(11), view(12), view(13), view(14),   number(15), number(16), view(17)};
    return true;
  }
};

// Seven views, in the order of `RelativeAttention.DIFFERENTIABLE`.
template <>
struct type_caster<retro::RelativeAttentionGrads> {
  PYBIND11_TYPE_CASTER(retro::RelativeAttentionGrads, const_name("RelativeAttentionGrads"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 7) return false;
    auto field = reinterpret_borrow<tuple>(source);
    const auto view = [&](int i) { return field[i].cast<retro::View>(); };
    value = {view(0), view(1), view(2), view(3), view(4), view(5), view(6)};
    return true;
  }
};

// The same for `RelativeLogits`.
template <>
struct type_caster<retro::RelativeLogits> {
  PYBIND11_TYPE_CASTER(retro::RelativeLogits, const_name("RelativeLogits"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 6) return false;
    auto field = reinterpret_borrow<tuple>(source);
    const auto view = [&](int i) { return field[i].cast<retro::View>(); };
    const auto integer = [&](int i) { return field[i].cast<int64_t>(); };
    value = {view(0), view(1), integer(2), integer(3), view(4), integer(5)};
    return true;
  }
};

}  // namespace pybind11::detail

namespace {

template <class R, class... Arguments>
void bind(py::module_& m, const char* name, retro::IsaTable<R (*)(Arguments...)> table) {
  m.def(
      name, [table](Arguments... arguments) { return table.entry[retro::active_isa()](arguments...); },
      py::call_guard<py::gil_scoped_release>());
}

#define BIND(name) bind(m, #name, RETRO_TABLE(name))

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Vectorised CPU kernels over raw pointers; retro_kernels/cpu/*.py are their only callers.";
  m.attr("abi") = 1;
  m.def("set_isa", &retro::set_isa);
  m.def("isa_name", &retro::isa_name);
  m.def("supported_isas", &retro::supported_isas);
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
}
