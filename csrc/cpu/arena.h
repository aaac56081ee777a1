// One buffer of scratch memory, handed out in aligned pieces: once from a null base to learn the size, then for real.
#pragma once
#include "simd.h"

namespace retro::RETRO_ISA {

// Hands out pieces of a buffer; with a null buffer it only counts.
class Arena {
 public:
  explicit Arena(void* base) : at_(reinterpret_cast<uintptr_t>(base)), start_(at_) {}
  template <class T>
  T* take(int64_t n) {
    auto* piece = reinterpret_cast<T*>(at_);
    at_ += (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return at_ - start_; }

 private:
  uintptr_t at_, start_;
};

}  // namespace retro::RETRO_ISA
