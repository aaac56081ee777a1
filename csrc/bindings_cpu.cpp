// Registration of the CPU kernels. Each binding runs the entry of the active instruction set, without the GIL.
#include <pybind11/pybind11.h>

#include "cpu/isa.h"
#include "cpu/leaky_average.h"
#include "cpu/topk_chunks.h"
#include "view_caster.h"

namespace py = pybind11;

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
  BIND(leaky_average_forward);
  BIND(leaky_average_backward);
  BIND(topk_chunks_forward);
  BIND(topk_chunks_backward);
}
