// Choice of the instruction set. Every kernel source is compiled once per instruction set, and one set is chosen at run
// time.
//
// tools/build_extensions.py defines RETRO_ISA (a namespace) and RETRO_ISA_LEVEL for each compilation. It defines
// RETRO_HAVE_<ISA> as 1 for the sets that are compiled and as 0 for the others. A kernel's header declares its
// functions with RETRO_EVERY_ISA.
#pragma once
#include <array>
#include <string>

namespace retro {

// in the order of RETRO_ISA_LEVEL
enum Isa : int { PORTABLE, AVX2, AVX512, AVX512BF16, NEON, NEONBF16, SVE, AMX, ISA_COUNT };

Isa active_isa();                       // the set in use
std::string isa_name();                 // the name of the set in use
std::string supported_isas();           // names that this build and this processor can run, slowest first
void set_isa(const std::string& name);  // "" restores the choice made at start; throws std::invalid_argument

}  // namespace retro

// AMX runs the code that is compiled for AVX512BF16. The products then use tile registers (tiles.h).
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

// One function pointer per instruction set, indexed by active_isa(). The pointers of sets that were not compiled are
// null, but active_isa() never returns such a set.
#define RETRO_TABLE(name)                                                                                           \
  std::array<decltype(&retro::portable::name), retro::ISA_COUNT> {                                                  \
    &retro::portable::name, RETRO_HAVE_AVX2 ? &retro::avx2::name : nullptr,                                         \
        RETRO_HAVE_AVX512 ? &retro::avx512::name : nullptr,                                                         \
        RETRO_HAVE_AVX512BF16 ? &retro::avx512bf16::name : nullptr, RETRO_HAVE_NEON ? &retro::neon::name : nullptr, \
        RETRO_HAVE_NEONBF16 ? &retro::neonbf16::name : nullptr, RETRO_HAVE_SVE ? &retro::sve::name : nullptr,       \
        RETRO_HAVE_AMX ? &retro::avx512bf16::name : nullptr                                                         \
  }
