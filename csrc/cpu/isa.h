// Which instruction set runs: every kernel source is compiled once per instruction set, one is chosen at run time.
//
// setup.py defines RETRO_ISA (a namespace) and RETRO_ISA_LEVEL for a per-ISA compilation, and RETRO_HAVE_<ISA> for each
// one that the compiler can target. A kernel's header declares its entry points with RETRO_EVERY_ISA.
#pragma once
#include <string>

namespace retro {

enum Isa : int {
  PORTABLE = 0,
  AVX2 = 1,
  AVX512 = 2,
  AVX512BF16 = 3,
  NEON = 4,
  NEONBF16 = 5,
  SVE = 6,
  AMX = 7,
  ISA_COUNT = 8
};

Isa active_isa();                       // the set that runs now
std::string isa_name();                 // its name
std::string supported_isas();           // names this build and this processor can run, slowest first, by spaces
void set_isa(const std::string& name);  // "" restores the choice made at start; throws std::invalid_argument

}  // namespace retro

#ifndef RETRO_HAVE_AVX2
#define RETRO_HAVE_AVX2 0
#endif
#ifndef RETRO_HAVE_AVX512
#define RETRO_HAVE_AVX512 0
#endif
#ifndef RETRO_HAVE_AVX512BF16
#define RETRO_HAVE_AVX512BF16 0
#endif

#ifndef RETRO_HAVE_NEON
#define RETRO_HAVE_NEON 0
#endif
#ifndef RETRO_HAVE_NEONBF16
#define RETRO_HAVE_NEONBF16 0
#endif
#ifndef RETRO_HAVE_SVE
#define RETRO_HAVE_SVE 0
#endif

// AMX runs what is compiled for AVX512BF16, which multiplies pairs in tile registers where they are ready (parallel.h).
#if RETRO_HAVE_AVX512BF16 && __has_include(<amxbf16intrin.h>)
#define RETRO_HAVE_AMX 1
#else
#define RETRO_HAVE_AMX 0
#endif

#define RETRO_EVERY_ISA(...)    \
  namespace retro::portable {   \
  __VA_ARGS__                   \
  }                             \
  namespace retro::avx2 {       \
  __VA_ARGS__                   \
  }                             \
  namespace retro::avx512 {     \
  __VA_ARGS__                   \
  }                             \
  namespace retro::avx512bf16 { \
  __VA_ARGS__                   \
  }                             \
  namespace retro::neon {       \
  __VA_ARGS__                   \
  }                             \
  namespace retro::neonbf16 {   \
  __VA_ARGS__                   \
  }                             \
  namespace retro::sve {        \
  __VA_ARGS__                   \
  }

#if RETRO_HAVE_AVX2
#define RETRO_AVX2(name) &retro::avx2::name
#else
#define RETRO_AVX2(name) nullptr
#endif
#if RETRO_HAVE_AVX512
#define RETRO_AVX512(name) &retro::avx512::name
#else
#define RETRO_AVX512(name) nullptr
#endif
#if RETRO_HAVE_AVX512BF16
#define RETRO_AVX512BF16(name) &retro::avx512bf16::name
#else
#define RETRO_AVX512BF16(name) nullptr
#endif
#if RETRO_HAVE_NEON
#define RETRO_NEON(name) &retro::neon::name
#else
#define RETRO_NEON(name) nullptr
#endif
#if RETRO_HAVE_NEONBF16
#define RETRO_NEONBF16(name) &retro::neonbf16::name
#else
#define RETRO_NEONBF16(name) nullptr
#endif
#if RETRO_HAVE_SVE
#define RETRO_SVE(name) &retro::sve::name
#else
#define RETRO_SVE(name) nullptr
#endif

namespace retro {

template <class Function>
struct IsaTable {
  Function entry[ISA_COUNT];
};

}  // namespace retro

// One function pointer per instruction set, indexed by active_isa(), which never names one that wasn't compiled.
#define RETRO_TABLE(name)                                                                                     \
  ::retro::IsaTable<decltype(&retro::portable::name)> {                                                       \
    {                                                                                                         \
      &retro::portable::name, RETRO_AVX2(name), RETRO_AVX512(name), RETRO_AVX512BF16(name), RETRO_NEON(name), \
          RETRO_NEONBF16(name), RETRO_SVE(name), RETRO_AVX512BF16(name)                                       \
    }                                                                                                         \
  }
