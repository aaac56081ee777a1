// Python's (address, type code, sizes, strides), or None, to a View; see `retro_kernels/_native.py: view`.
#pragma once
#include <pybind11/pybind11.h>

#include "view.h"

namespace pybind11::detail {

template <>
struct type_caster<retro::View> {
  PYBIND11_TYPE_CASTER(retro::View, const_name("View"));

  bool load(handle source, bool) {
    value = retro::View{};
    if (source.is_none()) return true;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 4) return false;
    auto parts = reinterpret_borrow<tuple>(source);
    sequence sizes = parts[2], strides = parts[3];
    const auto rank = static_cast<int>(sizes.size());
    if (rank > retro::MAX_RANK || strides.size() != sizes.size()) return false;
    value.data = reinterpret_cast<char*>(parts[0].cast<uintptr_t>());
    value.type = static_cast<retro::Type>(parts[1].cast<int>());
    value.rank = rank;
    for (int d = 0; d < rank; ++d) {
      value.size[d] = sizes[d].cast<int64_t>();
      value.stride[d] = strides[d].cast<int64_t>();
    }
    return true;
  }
};

}  // namespace pybind11::detail
