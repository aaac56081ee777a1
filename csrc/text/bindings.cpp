// The module `retro_model._text`. retro_model/data passes arrays in C order and checks them. Every call runs without
// the GIL.
#include "text.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <type_traits>

namespace py = pybind11;
using namespace retro::text;

// Accepts arrays of exactly this type, which the caller keeps alive. The array must be writable unless T is const.
template <class T> struct pybind11::detail::type_caster<Array<T>> {
  PYBIND11_TYPE_CASTER(Array<T>, const_name("numpy.ndarray"));

  bool load(handle source, bool) {
    using Numbers = array_t<std::remove_const_t<T>, array::c_style>;
    if (!Numbers::check_(source))
      return false;
    auto array = reinterpret_borrow<Numbers>(source);
    if (array.ndim() > 3)
      return false;
    if constexpr (std::is_const_v<T>)
      value.data = array.data();
    else
      value.data = array.mutable_data();
    std::copy_n(array.shape(), array.ndim(), value.size);
    return true;
  }
};

PYBIND11_MODULE(_text, module) {
  module.doc() = "Token-sequence routines; called through retro_model.data.text";
  module.attr("abi") = 1;  // must change together with `ABI` of retro_model/data/text.py
  const auto bind = [&](const char* name, auto function) {
    module.def(name, function, py::call_guard<py::gil_scoped_release>());
  };
  bind("prefixes", &prefixes);
  bind("signatures", &signatures);
  bind("jaccards", &jaccards);
  bind("bm25", &bm25);
}
