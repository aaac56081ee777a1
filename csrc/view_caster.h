// Conversion of calls and tensors from Python to structs and Views. In Python, a View is None or the tuple (address,
// type code, sizes, strides) that `view` in `retro_kernels/extensions.py` returns.
#pragma once
#include <pybind11/pybind11.h>

#include <type_traits>
#include <utility>

#include "view.h"

namespace pybind11::detail {

template <> struct type_caster<retro::View> {
  PYBIND11_TYPE_CASTER(retro::View, const_name("View"));

  bool load(handle source, bool) {
    value = retro::View{};
    if (source.is_none())
      return true;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 4)
      return false;
    auto parts = reinterpret_borrow<tuple>(source);
    sequence sizes = parts[2], strides = parts[3];
    const auto rank = static_cast<int>(sizes.size());
    if (rank > retro::MAX_RANK || strides.size() != sizes.size())
      return false;
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

namespace retro {

// Element of a tuple, which converts to the type of a field. An integer that is None becomes -1.
struct Field {
  pybind11::handle from;
  operator View() const { return from.cast<View>(); }
  operator int64_t() const { return from.is_none() ? -1 : from.cast<int64_t>(); }
  operator double() const { return from.cast<double>(); }
  operator bool() const { return from.cast<bool>(); }
};

// Returns whether a struct can be made of these fields.
template <class Struct, class... Fields> constexpr auto takes(int) -> decltype(Struct{Fields{}...}, true) {
  return true;
}
template <class Struct, class... Fields> constexpr bool takes(long) { return false; }

// Returns the number of fields of a struct, which Python compares with the number of fields of its class of calls.
template <class Struct, class... Fields> constexpr size_t fields() {
  if constexpr (takes<Struct, Fields..., Field>(0))
    return fields<Struct, Fields..., Field>();
  else
    return sizeof...(Fields);
}

}  // namespace retro

namespace pybind11::detail {

// Converts a tuple to a struct of Views and numbers, field by field. The struct is a call, or the gradients of a call
// in the order of DIFFERENTIABLE.
template <class Struct>
struct type_caster<Struct, enable_if_t<std::is_class_v<Struct> && std::is_aggregate_v<Struct>>> {
  PYBIND11_TYPE_CASTER(Struct, const_name("tuple of an op's arguments"));

  bool load(handle source, bool) {
    constexpr size_t COUNT = retro::fields<Struct>();
    if (!PyTuple_Check(source.ptr()) || static_cast<size_t>(PyTuple_GET_SIZE(source.ptr())) != COUNT)
      return false;
    set(source, std::make_index_sequence<COUNT>{});
    return true;
  }
  template <size_t... I> void set(handle source, std::index_sequence<I...>) {
    value = Struct{retro::Field{PyTuple_GET_ITEM(source.ptr(), I)}...};
  }
};

}  // namespace pybind11::detail
