// Choice of the instruction set: every kernel source is compiled once for each, and one is chosen at run time.
//
// tools/build_extensions.py defines RETRO_ISA (a namespace) and RETRO_ISA_LEVEL for each compilation, and
// RETRO_HAVE_<ISA> as 1 for the sets that are compiled, 0 for the others. A kernel's header declares its functions with
// RETRO_EVERY_ISA.
#pragma once
#include <array>
#include <string>

namespace retro {

// in the order of RETRO_ISA_LEVEL
enum Isa : int { PORTABLE, AVX2, AVX512, AVX512BF16, NEON, NEONBF16, SVE, AMX, ISA_COUNT };

Isa active_isa();                       // the set in use
std::string isa_name();                 // its name
std::string supported_isas();           // names that this build and this processor can run, slowest first
void set_isa(const std::string& name);  // "" restores the choice made at start; throws std::invalid_argument

}  // namespace retro

// AMX runs the code that is compiled for AVX512BF16, whose products use tile registers then (tiles.h).
#if RETRO_HAVE_AVX512BF16 && __has_include(<amxbf16intrin.h>)
#define RETRO_HAVE_AMX 1
#else
#define RETRO_HAVE_AMX 0
#endif

#define RETRO_IN(isa, ...) \
  namespace retro::isa {   \
  __VA_ARGS__              \
  }
#define RETRO_EVERY_ISA(...)        \
  RETRO_IN(portable, __VA_ARGS__)   \
  RETRO_IN(avx2, __VA_ARGS__)       \
  RETRO_IN(avx512, __VA_ARGS__)     \
  RETRO_IN(avx512bf16, __VA_ARGS__) \
  RETRO_IN(neon, __VA_ARGS__) RETRO_IN(neonbf16, __VA_ARGS__) RETRO_IN(sve, __VA_ARGS__)

// One function pointer for each instruction set, indexed by active_isa(), which is always a compiled one.
#define RETRO_TABLE(name)                                                                                           \
  std::array<decltype(&retro::portable::name), retro::ISA_COUNT> {                                                  \
    &retro::portable::name, RETRO_HAVE_AVX2 ? &retro::avx2::name : nullptr,                                         \
        RETRO_HAVE_AVX512 ? &retro::avx512::name : nullptr,                                                         \
        RETRO_HAVE_AVX512BF16 ? &retro::avx512bf16::name : nullptr, RETRO_HAVE_NEON ? &retro::neon::name : nullptr, \
        RETRO_HAVE_NEONBF16 ? &retro::neonbf16::name : nullptr, RETRO_HAVE_SVE ? &retro::sve::name : nullptr,       \
        RETRO_HAVE_AMX ? &retro::avx512bf16::name : nullptr                                                         \
  }
