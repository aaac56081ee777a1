// AMX: products of pairs in tile registers. A register has 16 rows of 16 pairs (operands) or 16 floats (sums).
//
//   TileScope                             in a task: makes this thread's tile registers ready if AMX is active
//   tiles_ready                           whether they are ready; false at compile time if AMX was not compiled
//   load_tile clear_tile store_tile       registers 0 to 3 hold sums, TILE_A and TILE_B the operands
//   multiply_tiles<sum>()                 sum[i][j] += the products of the pairs A[i][k] and B[k][j], k = 0..15
#pragma once
#include <algorithm>
#include <type_traits>

#include "isa.h"
#include "simd.h"

#define RETRO_TILES (RETRO_ISA_LEVEL == 3 && RETRO_HAVE_AMX)

namespace retro::RETRO_ISA {

constexpr int TILE = 16;  // rows per tile, and pairs or sums per row

#if !RETRO_TILES
constexpr bool tiles_ready = false;
struct TileScope {
  TileScope() {}  // so that compilers do not warn about an unused variable
};
#else

constexpr int TILE_A = 6, TILE_B = 7;                    // registers of the operands; registers 0 to 3 hold sums
constexpr int ROW_BYTES = TILE * int{sizeof(uint32_t)};  // bytes per row of a tile

inline thread_local bool tiles_ready = false;  // true inside a TileScope

// While it exists, this thread's tile registers are ready for products, if AMX is the active instruction set.
class TileScope {
 public:
  TileScope() {
    if (tiles_ready || active_isa() != AMX)
      return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};  // bytes per row of each register
      uint8_t rows[16] = {};
    } layout;
    std::fill(layout.bytes, layout.bytes + 8, ROW_BYTES);
    std::fill(layout.rows, layout.rows + 8, TILE);
    asm volatile("ldtilecfg %0" ::"m"(layout));
    mine_ = tiles_ready = true;
  }
  ~TileScope() {
    if (!mine_)
      return;
    asm volatile("tilerelease");
    tiles_ready = false;
  }
  TileScope(const TileScope&) = delete;

 private:
  bool mine_ = false;
};

struct TileOperand {
  const void* data;
  int64_t stride;  // bytes
};

template <int REGISTER> RETRO_INLINE void load_tile(TileOperand x) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(x.data), "r"(x.stride), "i"(REGISTER) : "memory");
}
template <int REGISTER> RETRO_INLINE void store_tile(float* to, int64_t ld) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(ld * int64_t{4}), "i"(REGISTER) : "memory");
}
template <int REGISTER> RETRO_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(REGISTER)); }
template <int REGISTER> RETRO_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(TILE_B), "i"(TILE_A), "i"(REGISTER));
}

// Calls f(i) with the constants i = 0..COUNT-1, which are register numbers.
template <int COUNT, class Function> RETRO_INLINE void each_sum(Function&& f) {
  if constexpr (COUNT > 1)
    each_sum<COUNT - 1>(f);
  f(std::integral_constant<int, COUNT - 1>{});
}

// Copies `rows` rows of `width` words, which begin at row(i), and fills the tile up with zeros.
template <class Row> RETRO_INLINE TileOperand copied(int64_t rows, int width, uint32_t* copy, Row&& row) {
  for (int i = 0; i < TILE; ++i)
    _mm512_store_si512(copy + i * TILE, _mm512_maskz_loadu_epi32(first(i < rows ? width : 0), row(i < rows ? i : 0)));
  return {copy, ROW_BYTES};
}
#endif

}  // namespace retro::RETRO_ISA
