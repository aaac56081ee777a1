// Python's calls and tensors, as structs and Views.
//
// Python's (address, type code, sizes, strides), or None, to a View; see `retro_kernels/core/native.py: view`.
#pragma once
#include <pybind11/pybind11.h>

#include <type_traits>
#include <utility>
#include <vector>

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

namespace retro {

// An element of a tuple, as the field it is given to wants it; an integer that is None becomes -1.
struct Field {
  pybind11::handle from;
  operator View() const { return from.cast<View>(); }
  operator int64_t() const { return from.is_none() ? -1 : from.cast<int64_t>(); }
  operator double() const { return from.cast<double>(); }
  operator bool() const { return from.cast<bool>(); }
};

template <size_t>
using FieldAt = Field;

template <class Struct, class, class = void>
struct TakesFields : std::false_type {};
template <class Struct, size_t... I>
struct TakesFields<Struct, std::index_sequence<I...>, std::void_t<decltype(Struct{FieldAt<I>{}...})>> : std::true_type {
};

template <class Struct, size_t COUNT = 1>
constexpr size_t count_fields() {
  if constexpr (TakesFields<Struct, std::make_index_sequence<COUNT + 1>>::value)
    return count_fields<Struct, COUNT + 1>();
  else
    return COUNT;
}

// A field as `Field` reads it, held apart from Python: a view may be given another address.
struct Value {
  View view;
  int64_t integer = -1;
  double real = 0;
  bool given = false;  // a view, with or without memory

  explicit Value(pybind11::handle from) {
    if (from.is_none()) return;
    given = PyTuple_Check(from.ptr());
    if (given)
      view = from.cast<View>();
    else if (PyFloat_Check(from.ptr()))
      real = from.cast<double>();
    else
      integer = from.cast<int64_t>(), real = static_cast<double>(integer);
  }
  operator View() const { return view; }
  operator int64_t() const { return integer; }
  operator double() const { return real; }
  operator bool() const { return integer != 0; }
};

// How many fields a struct has, so that it and the Python tuple it is made from can't part unnoticed.
template <class Struct>
constexpr size_t FIELDS = count_fields<Struct>();

// A call whose layouts are known, for calls that differ in addresses and in numbers at some of its fields.
template <class Struct>
class Repeated {
 public:
  // places: the fields that each call gives anew, in that order.
  Repeated(const pybind11::tuple& call, std::vector<size_t> places) : places(std::move(places)) {
    if (call.size() != FIELDS<Struct>) throw pybind11::type_error("expected a tuple of an op's arguments");
    for (pybind11::handle field : call) values.emplace_back(field);
    for (size_t place : this->places)
      if (place >= values.size()) throw pybind11::index_error("expected a field of the op's arguments");
  }
  // given: of a view its address, of a number the number.
  Struct with(const pybind11::list& given) const {
    if (given.size() != places.size()) throw pybind11::type_error("expected a number for each place");
    std::vector<Value> call = values;
    for (size_t i = 0; i < places.size(); ++i) {
      Value& value = call[places[i]];
      value.integer = given[i].template cast<int64_t>();
      if (value.given) value.view.data = reinterpret_cast<char*>(value.integer);
    }
    return made(call, std::make_index_sequence<FIELDS<Struct>>{});
  }

 private:
  template <size_t... I>
  static Struct made(const std::vector<Value>& call, std::index_sequence<I...>) {
    return Struct{call[I]...};
  }
  std::vector<Value> values;
  std::vector<size_t> places;
};

}  // namespace retro

namespace pybind11::detail {

// A tuple to a struct of Views and numbers, field by field.
template <class Struct>
struct fields_caster {
  PYBIND11_TYPE_CASTER(Struct, const_name("tuple of an op's arguments"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || static_cast<size_t>(PyTuple_GET_SIZE(source.ptr())) != retro::FIELDS<Struct>)
      return false;
    set(source, std::make_index_sequence<retro::FIELDS<Struct>>{});
    return true;
  }
  template <size_t... I>
  void set(handle source, std::index_sequence<I...>) {
    value = Struct{retro::Field{PyTuple_GET_ITEM(source.ptr(), I)}...};
  }
};

}  // namespace pybind11::detail
