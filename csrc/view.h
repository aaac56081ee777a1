// A tensor as kernels see it: an address, a type, sizes and strides (in elements). No torch, no Python.
#pragma once
#include <cstdint>

namespace retro {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The codes `retro_kernels/_native.py` writes; the two tables change together.
enum class Type : int { NONE = 0, F32 = 1, BF16 = 2, F16 = 3, BOOL = 4, I64 = 5, I32 = 6, I16 = 7, I8 = 8, U8 = 9 };

constexpr int MAX_RANK = 6;  // [B,L,K,R,G,D]

struct View {
  char* data = nullptr;  // null: the argument was None
  Type type = Type::NONE;
  int rank = 0;
  int64_t size[MAX_RANK] = {};
  int64_t stride[MAX_RANK] = {};

  explicit operator bool() const { return data != nullptr; }

  // Address of the element at the given leading indices; the remaining ones are 0.
  template <class T, class... Index>
  T* at(Index... index) const {
    const int64_t i[] = {static_cast<int64_t>(index)..., 0};
    int64_t offset = 0;
    for (unsigned d = 0; d < sizeof...(Index); ++d) offset += i[d] * stride[d];
    return reinterpret_cast<T*>(data) + offset;
  }
};

// Calls `f` with a value of the view's element type: by_type(x.type, [&](auto t) { using T = decltype(t); ... }).
template <class F>
inline void by_type(Type type, F&& f) {
  switch (type) {
    case Type::BF16:
      f(bf16{});
      break;
    case Type::F16:
      f(fp16{});
      break;
    default:
      f(float{});
      break;
  }
}

}  // namespace retro
