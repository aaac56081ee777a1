// Run-time detection of the instruction sets that the processor and the operating system support.
#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define RETRO_X86
#endif

namespace retro {
namespace {

constexpr const char* NAMES[ISA_COUNT] = {"portable", "avx2", "avx512", "avx512bf16", "neon", "neonbf16", "sve", "amx"};

#ifdef RETRO_X86
// Asks Linux to save the tile registers of this process, and returns whether it does. The permission is permanent. Its
// only cost is some memory on the stacks.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long GET = 0x1022, REQUEST = 0x1023, TILE_DATA = 18;  // arch_prctl(2): ARCH_GET_XCOMP_PERM and so on
  uint64_t given = 0;
  syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
  return syscall(SYS_arch_prctl, GET, &given) == 0 && given & (uint64_t{1} << TILE_DATA);
#else
  return false;
#endif
}

Isa best_of_processor() {
  unsigned a, b, c = 0, d;
  __get_cpuid(1, &a, &b, &c, &d);
  // GCC 10 cannot test F16C by name. The tests by name include that the operating system saves the registers.
  if (!(c & bit_F16C) || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return PORTABLE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return AVX2;
  if (!__builtin_cpu_supports("avx512bf16"))
    return AVX512;
  constexpr unsigned TILES = 1u << 22 | 1u << 24;  // AMX-BF16 and AMX-TILE
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  static const bool tiles = (d & TILES) == TILES && may_use_tiles();
  return tiles ? AMX : AVX512BF16;
}
#elif defined(__aarch64__)
Isa best_of_processor() {
#if defined(__linux__)
  constexpr unsigned long BF16 = 1ul << 14, SVE_BF16 = 1ul << 12, HAS_SVE = 1ul << 22;  // HWCAP2_*, HWCAP_SVE
  constexpr int GET_LENGTH = 51, LENGTH_MASK = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
  const unsigned long has = getauxval(AT_HWCAP2);
  if (!(has & BF16))
    return NEON;
  if (!(has & SVE_BF16) || !(getauxval(AT_HWCAP) & HAS_SVE))
    return NEONBF16;
  const int length = prctl(GET_LENGTH);                                 // negative: an error
  return length >= 0 && (length & LENGTH_MASK) == 32 ? SVE : NEONBF16;  // compiled for vectors of 32 bytes
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return NEONBF16;
#else
  return NEON;
#endif
}
#else
Isa best_of_processor() { return PORTABLE; }
#endif

// Returns whether the processor multiplies pairs of bf16 faster than floats, without tile registers. Intel's processors
// with AVX-512 execute vdpbf16ps at no more than half the rate of float multiply-adds, so converting the operands to
// pairs would be slower. The kernels for AVX512 widen bf16 to float while they pack.
bool pairs_pay() {
#ifdef RETRO_X86
  return !__builtin_cpu_is("intel");
#else
  return true;
#endif
}

// A build has kernels for one family of processors only, so a processor runs all sets up to its best one.
bool supported(int isa) {
  constexpr bool COMPILED[ISA_COUNT] = {
      true,           RETRO_HAVE_AVX2, RETRO_HAVE_AVX512, RETRO_HAVE_AVX512BF16, RETRO_HAVE_NEON, RETRO_HAVE_NEONBF16,
      RETRO_HAVE_SVE, RETRO_HAVE_AMX};
  return COMPILED[isa] && isa <= best_of_processor();
}

Isa parse(const std::string& name) {
  const auto isa = static_cast<int>(std::find(NAMES, NAMES + ISA_COUNT, name) - NAMES);
  if (isa == ISA_COUNT || !supported(isa))
    throw std::invalid_argument("instruction set " + name + " is not supported here; have: " + supported_isas());
  return static_cast<Isa>(isa);
}

Isa initial() {
  const char* wanted = std::getenv("RETRO_KERNELS_ISA");
  if (wanted && *wanted)
    return parse(wanted);
  int best = ISA_COUNT - 1;
  while (!supported(best) || (best == AVX512BF16 && supported(AVX512) && !pairs_pay()))
    --best;
  return static_cast<Isa>(best);
}

std::atomic<int> active{-1};

}  // namespace

Isa active_isa() {
  int isa = active.load(std::memory_order_relaxed);
  if (isa < 0)
    active.store(isa = initial(), std::memory_order_relaxed);
  return static_cast<Isa>(isa);
}

std::string isa_name() { return NAMES[active_isa()]; }

std::string supported_isas() {
  std::string names;
  for (int isa = 0; isa < ISA_COUNT; ++isa)
    if (supported(isa))
      names += (names.empty() ? "" : " ") + std::string(NAMES[isa]);
  return names;
}

void set_isa(const std::string& name) { active.store(name.empty() ? initial() : parse(name)); }

}  // namespace retro
