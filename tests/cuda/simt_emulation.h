// A CUDA block on one CPU core: every thread is a fiber, every barrier a yield. Slow, but exact in its waits.
//
// It replaces the instructions of csrc/cuda/simt.cuh. The target of a pending asynchronous copy holds 0xFF, so a
// missing wait gives NaN. The order of fibers is shuffled, so a missing barrier gives results that depend on the seed.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
  uint32_t x, y, z, w;
};

namespace emulation {

constexpr int WARP = 32;
constexpr size_t STACK = 256 * 1024;

struct Barrier {
  int expected = 0, arrived = 0;
  long generation = 0;
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Fiber {
  ucontext_t context;  // its start
  jmp_buf place;       // its next instruction: a jump needs no system call
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  const Barrier* waiting = nullptr;
  long generation = 0;
  std::vector<std::vector<Copy>> groups{1};  // the last one is open
};

struct Slot {
  alignas(16) unsigned char bytes[64];
};

struct Index {
  unsigned x;
};

inline std::vector<Fiber> fibers;
inline std::vector<Barrier> warps;
inline std::vector<Slot> slots;
inline Barrier block;
inline jmp_buf scheduler;
inline Index thread_index, block_index, grid_size;
inline std::function<void()> body;

inline void wait(Barrier& barrier) {
  Fiber& me = fibers[thread_index.x];
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  me.waiting = &barrier;
  me.generation = barrier.generation;
  if (!_setjmp(me.place))
    _longjmp(scheduler, 1);
}

inline void enter() {
  body();
  fibers[thread_index.x].done = true;
  _longjmp(scheduler, 1);
}

// Run the fiber until it waits or ends.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler))
    return;
  if (fiber.started)
    _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Run kernel() as `grid` blocks of `threads`, one block after the other.
inline void launch(unsigned grid, unsigned threads, unsigned seed, std::function<void()> kernel) {
  std::mt19937 random(seed);
  grid_size.x = grid;
  body = std::move(kernel);
  for (block_index.x = 0; block_index.x < grid; ++block_index.x) {
    fibers = std::vector<Fiber>(threads);
    slots.assign(threads, Slot{});
    warps.assign(threads / WARP, Barrier{WARP, 0, 0});
    block = Barrier{static_cast<int>(threads), 0, 0};
    std::vector<unsigned> order;
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      fiber.stack = std::make_unique<char[]>(STACK);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
      order.push_back(i);
    }
    for (unsigned left = threads; left > 0;) {
      bool moved = false;
      std::shuffle(order.begin(), order.end(), random);
      for (unsigned i : order) {
        Fiber& fiber = fibers[i];
        if (fiber.done || (fiber.waiting && fiber.waiting->generation == fiber.generation))
          continue;
        fiber.waiting = nullptr;
        thread_index.x = i;
        resume(fiber);
        moved = true;
        left -= fiber.done;
      }
      if (!moved) {
        std::fprintf(stderr, "emulation: block %u: %u threads wait for ever\n", block_index.x, left);
        std::abort();
      }
    }
  }
}

// Gather a value of every lane of the warp: out[lane].
template <typename T> inline void exchange(const T& mine, T (&out)[WARP]) {
  static_assert(sizeof(T) <= sizeof(Slot));
  const unsigned me = thread_index.x, first = me / WARP * WARP;
  std::memcpy(slots[me].bytes, &mine, sizeof(T));
  wait(warps[me / WARP]);
  for (int lane = 0; lane < WARP; ++lane)
    std::memcpy(&out[lane], slots[first + lane].bytes, sizeof(T));
  wait(warps[me / WARP]);
}

inline float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(mantissa + 1024), exponent - 25);
  if (exponent == 31)
    value = mantissa ? NAN : INFINITY;
  return bits >> 15 ? -value : value;
}

}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define gridDim emulation::grid_size

inline void __syncthreads() { emulation::wait(emulation::block); }
inline void __syncwarp() { emulation::wait(emulation::warps[emulation::thread_index.x / emulation::WARP]); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename To, typename From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline float __int_as_float(int32_t bits) { return bits_as<float>(bits); }
inline int32_t __float_as_int(float value) { return bits_as<int32_t>(value); }

namespace simt {

inline void cp_async16(void* shared, const void* global, bool valid) {
  std::memset(shared, 0xFF, 16);
  emulation::fibers[threadIdx.x].groups.back().push_back({shared, global, valid});
}

inline void cp_async_commit() { emulation::fibers[threadIdx.x].groups.emplace_back(); }

template <int PENDING> inline void cp_async_wait() {
  auto& groups = emulation::fibers[threadIdx.x].groups;
  while (static_cast<int>(groups.size()) - 1 > PENDING) {
    for (const auto& copy : groups.front()) {
      if (copy.valid)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
  const void* rows[32];
  emulation::exchange(row, rows);
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; ++m)
    std::memcpy(&out[m], static_cast<const char*>(rows[m * 8 + lane / 4]) + lane % 4 * 4, 4);
  __syncwarp();
}

inline const unsigned char* shared_memory = nullptr;  // start of the emulated block's, a multiple of 1024

inline void fence_proxy_async() {}
inline void wgmma_begin() {}
inline void wgmma_commit() {}
inline void wgmma_wait() { __syncwarp(); }

inline uint64_t swizzled128_descriptor(const void* tile) {
  const auto address = static_cast<uint64_t>(static_cast<const unsigned char*>(tile) - shared_memory);
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

// Element k of row `row` of a descriptor's matrix, by the PTX manual: groups of 8 rows of 128 bytes, the stride offset
// apart; bits 4-6 of the whole address are exclusive-or'ed with its bits 7-9.
template <bool BF16> inline float described(uint64_t descriptor, int row, int k) {
  if (descriptor >> 62 != 1)
    std::abort();  // the 128-byte swizzle
  const uint64_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  uint64_t address = start + row / 8 * stride + row % 8 * 128 + k * 2;
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, shared_memory + address, 2);
  return BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : emulation::half_value(bits);
}

// c[n][i] of lane l in warp w of the warpgroup is row 16w + l / 4 + 8 * (i / 2), column 8n + 2 * (l % 4) + i % 2.
template <bool BF16> inline void wgmma_64x256x16(float (&c)[32][4], uint64_t a, uint64_t b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float left[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 16; ++k)
      left[half][k] = described<BF16>(a, warp * 16 + lane / 4 + half * 8, k);
  }
  for (int n = 0; n < 32; ++n) {
    for (int odd = 0; odd < 2; ++odd) {
      for (int k = 0; k < 16; ++k) {
        const float right = described<BF16>(b, n * 8 + lane % 4 * 2 + odd, k);
        c[n][odd] += left[0][k] * right;
        c[n][odd + 2] += left[1][k] * right;
      }
    }
  }
}

inline float half_to_float(uint16_t bits) { return emulation::half_value(bits); }

// The fragments as the PTX manual draws them: g = lane / 4, t = lane % 4; a[i] holds row g + 8 * (i % 2), columns
// 2t + 8 * (i / 2), +1; b[i] holds rows 2t + 8 * i, +1 of column g; c[i] is row g + 8 * (i / 2), column 2t + i % 2.
template <bool BF16> inline void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Factors {
    uint32_t a[4], b[2];
  };
  Factors all[32];
  emulation::exchange(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all);
  auto value = [](uint32_t word, int odd) {
    const uint16_t bits = static_cast<uint16_t>(odd ? word >> 16 : word);
    return BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : emulation::half_value(bits);
  };
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const Factors& left = all[row % 8 * 4 + k % 8 / 2];
      const Factors& right = all[column * 4 + k % 8 / 2];
      sum += value(left.a[row / 8 + k / 8 * 2], k % 2) * value(right.b[k / 8], k % 2);
    }
    c[i] = sum;
  }
}

inline unsigned ballot(bool vote) {
  bool votes[32];
  emulation::exchange(vote, votes);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    bits |= votes[lane] ? 1u << lane : 0u;
  return bits;
}

template <typename T> inline T shuffle_xor(T value, int lanes) {
  T all[32];
  emulation::exchange(value, all);
  return all[threadIdx.x % 32 ^ lanes];
}

inline int64_t shuffle(int64_t value, int lane) {
  int64_t all[32];
  emulation::exchange(value, all);
  return all[lane];
}

}  // namespace simt
