// A tensor as kernels use it: an address, a type, sizes and strides (in elements), free of torch and Python.
#pragma once
#include <cstdint>

namespace retro {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Type codes, as in `retro_kernels/extensions.py`. The two tables must change together.
enum class Type : int { NONE = 0, F32 = 1, BF16 = 2, F16 = 3, BOOL = 4, I64 = 5, I32 = 6, I16 = 7, I8 = 8, U8 = 9 };

constexpr int MAX_RANK = 6;  // [B,L,K,R,G,D]

// Positions from a tensor are clamped to this bound, so that their sums with rows and lengths cannot overflow.
constexpr int64_t FARTHEST = int64_t{1} << 29;

struct View {
  char* data = nullptr;  // null: the argument was None
  Type type = Type::NONE;
  int rank = 0;
  int64_t size[MAX_RANK] = {};
  int64_t stride[MAX_RANK] = {};

  explicit operator bool() const { return data != nullptr; }

  // Returns entry b of the first dimension, as a batch of one entry.
  View entry(int64_t b) const {
    constexpr int BYTES[] = {0, 4, 2, 2, 1, 8, 4, 2, 1, 1};  // by type
    View one = *this;
    if (data) {
      one.data += b * stride[0] * BYTES[static_cast<int>(type)];
      one.size[0] = 1;
    }
    return one;
  }
  // Returns entry b of the first dimension, without this dimension.
  View drop(int64_t b) const {
    View one = entry(b);
    for (int d = 0; d + 1 < rank; ++d) {
      one.size[d] = size[d + 1];
      one.stride[d] = stride[d + 1];
    }
    if (data)
      --one.rank;
    return one;
  }

  // Returns the offset, in elements, of the given leading indices. The remaining indices are 0.
  template <class... Index> int64_t offset(Index... index) const {
    const int64_t i[] = {static_cast<int64_t>(index)..., 0};
    int64_t elements = 0;
    for (unsigned d = 0; d < sizeof...(Index); ++d)
      elements += i[d] * stride[d];
    return elements;
  }
  template <class T, class... Index> T* at(Index... index) const {
    return reinterpret_cast<T*>(data) + offset(index...);
  }
};

// Returns an element of any integer type.
template <class... Index> int64_t integer(const View& v, Index... index) {
  const int64_t offset = v.offset(index...);
  switch (v.type) {
    case Type::I64: return reinterpret_cast<const int64_t*>(v.data)[offset];
    case Type::I32: return reinterpret_cast<const int32_t*>(v.data)[offset];
    case Type::I16: return reinterpret_cast<const int16_t*>(v.data)[offset];
    case Type::I8: return reinterpret_cast<const int8_t*>(v.data)[offset];
    default: return reinterpret_cast<const uint8_t*>(v.data)[offset];
  }
}

// Returns the position of batch entry b from an int64 tensor [B], or 0 if the tensor is None.
inline int64_t position_of(const View& positions, int64_t b) {
  if (!positions)
    return 0;
  const int64_t p = integer(positions, b);
  return p < -FARTHEST ? -FARTHEST : p > FARTHEST ? FARTHEST : p;
}

// Calls `f` with a value of the element type, for example by_type(x.type, [&](auto t) { using T = decltype(t); ... }).
template <class Function> inline void by_type(Type type, Function&& f) {
  switch (type) {
    case Type::BF16: f(bf16{}); break;
    case Type::F16: f(fp16{}); break;
    default: f(float{}); break;
  }
}

}  // namespace retro
