// Registration of the CPU kernels. Each binding runs the function of the active instruction set, without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/chunked_cross_attention.h"
#include "cpu/cross_entropy.h"
#include "cpu/isa.h"
#include "cpu/leaky_average.h"
#include "cpu/merge_attention.h"
#include "cpu/parallel.h"
#include "cpu/relative_attention.h"
#include "cpu/relative_logits.h"
#include "cpu/rms_norm.h"
#include "cpu/stages.h"
#include "cpu/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

namespace {

template <class Result, class... Arguments>
void bind(py::module_& m, const char* name, std::array<Result (*)(Arguments...), retro::ISA_COUNT> table) {
  const auto run = [table](Arguments... arguments) { return table[retro::active_isa()](arguments...); };
  m.def(name, run, py::call_guard<py::gil_scoped_release>());
}

#define BIND(name) bind(m, #name, RETRO_TABLE(name))
#define BIND_BOTH(op) BIND(op##_forward), BIND(op##_backward)

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Vectorised CPU kernels over raw pointers; retro_kernels/ops/*/cpu.py are their only callers.";
  m.attr("abi") = 6;  // must change together with `extensions.ABI`
  m.attr("fields") = py::dict(py::arg("ChunkedCrossAttention") = retro::fields<retro::CrossAttention>(),
                              py::arg("RelativeAttention") = retro::fields<retro::RelativeAttention>(),
                              py::arg("RelativeLogits") = retro::fields<retro::RelativeLogits>());
  m.def("set_isa", &retro::set_isa);
  m.def("isa_name", &retro::isa_name);
  m.def("supported_isas", &retro::supported_isas);
  m.def("watch_forks", &retro::watch_forks);
  m.def("advise_huge_pages", &retro::advise_huge_pages);
  m.def("start_stage_times", &retro::start_stage_times);
  m.def("stop_stage_times", &retro::stop_stage_times);
  BIND_BOTH(chunked_cross_attention);
  BIND_BOTH(leaky_average);
  BIND_BOTH(topk_chunks);
  BIND_BOTH(relative_attention);
  BIND_BOTH(relative_logits);
  BIND_BOTH(rms_norm);
  BIND_BOTH(merge_attention);
  BIND(softmax_losses);
}
