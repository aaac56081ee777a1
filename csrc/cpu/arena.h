// Allocation of aligned pieces from one buffer of scratch memory.
#pragma once
#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {

// Hands out consecutive pieces of a buffer, each aligned to 64 bytes. With a null buffer it only counts bytes.
class Arena {
 public:
  explicit Arena(void* base) : at_(reinterpret_cast<uintptr_t>(base)), start_(at_) {}
  template <class T> T* take(int64_t n) {
    auto* piece = reinterpret_cast<T*>(at_);
    at_ += (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  // Gives each pointer a piece of n elements.
  template <class... T> void give(int64_t n, T*&... pieces) { ((pieces = take<T>(n)), ...); }
  size_t used() const { return at_ - start_; }

 private:
  uintptr_t at_, start_;
};

// Returns a workspace in this thread's scratch memory. Its constructor runs twice: first with a null buffer, to count
// the bytes, and then with the memory.
template <class Workspace, class... Arguments> Workspace in_scratch(const Arguments&... arguments) {
  Arena counted(nullptr);
  Workspace(arguments..., counted);
  Arena arena(scratch(counted.used()));
  return Workspace(arguments..., arena);
}

}  // namespace retro::RETRO_ISA
