// Run the kernel calls that tests/arm/emulated.py sends, compiled for one instruction set of 64-bit ARM and under an
// emulator. Numbers have the byte order of the machine, which is the same on both sides.
//
//   call   name '\n', argument
//   argument  'n' none; 'i' int64; 'd' double; 'v' type rank sizes strides bytes data; 't' count arguments
//   reply  0 and the data of every 'v' in order, or 1 and a message '\n'
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/chunked_cross_attention.h"
#include "cpu/cross_entropy.h"
#include "cpu/leaky_average.h"
#include "cpu/relative_attention.h"
#include "cpu/relative_logits.h"
#include "cpu/rms_norm.h"
#include "cpu/topk_chunks.h"

namespace retro::RETRO_ISA {
void check_primitives();  // primitives.cpp; throws std::runtime_error, which names the function
}
namespace kernels = retro::RETRO_ISA;

namespace {

template <class T> T receive() {
  T x;
  if (std::fread(&x, sizeof x, 1, stdin) != 1)
    std::exit(0);
  return x;
}

struct Argument {
  char kind = 'n';
  int64_t integer = 0;
  double real = 0;
  retro::View view;
  std::unique_ptr<char[]> data;  // 64 guard bytes on either side: the emulator does not check bounds
  int64_t bytes = 0;
  std::vector<Argument> parts;

  operator retro::View() const { return view; }
  operator int64_t() const { return kind == 'n' ? -1 : integer; }
  operator int() const { return static_cast<int>(integer); }
  operator double() const { return kind == 'd' ? real : static_cast<double>(integer); }
  operator bool() const { return integer != 0; }
};

constexpr int GUARD = 64;
constexpr char FILLING = 0x5a;

Argument receive_argument() {
  Argument a;
  a.kind = receive<char>();
  if (a.kind == 'i')
    a.integer = receive<int64_t>();
  if (a.kind == 'd')
    a.real = receive<double>();
  if (a.kind == 't') {
    const auto count = receive<int64_t>();
    for (int64_t i = 0; i < count; ++i)
      a.parts.push_back(receive_argument());
  }
  if (a.kind == 'v') {
    a.view.type = static_cast<retro::Type>(receive<int64_t>());
    a.view.rank = static_cast<int>(receive<int64_t>());
    for (int d = 0; d < a.view.rank; ++d)
      a.view.size[d] = receive<int64_t>();
    for (int d = 0; d < a.view.rank; ++d)
      a.view.stride[d] = receive<int64_t>();
    a.bytes = receive<int64_t>();
    a.data.reset(new char[a.bytes + 2 * GUARD]);
    std::memset(a.data.get(), FILLING, a.bytes + 2 * GUARD);
    a.view.data = a.data.get() + GUARD;
    if (a.bytes && std::fread(a.view.data, 1, a.bytes, stdin) != static_cast<size_t>(a.bytes))
      std::exit(0);
  }
  return a;
}

void check_guards(const Argument& a) {
  for (const Argument& part : a.parts)
    check_guards(part);
  for (int i = 0; a.data && i < GUARD; ++i)
    if (a.data[i] != FILLING || a.data[GUARD + a.bytes + i] != FILLING)
      throw std::runtime_error("a store outside a tensor");
}

void send_views(const Argument& a) {
  for (const Argument& part : a.parts)
    send_views(part);
  if (a.kind == 'v')
    std::fwrite(a.view.data, 1, a.bytes, stdout);
}

template <class Struct, size_t... I> Struct fields(const Argument& a, std::index_sequence<I...>) {
  if (a.parts.size() != sizeof...(I))
    throw std::runtime_error("expected another number of fields");
  return Struct{a.parts[I]...};
}

template <class T> struct As {
  static T from(const Argument& a) { return a; }
};
#define STRUCT(name, count)                                                                                          \
  template <> struct As<retro::name> {                                                                               \
    static retro::name from(const Argument& a) { return fields<retro::name>(a, std::make_index_sequence<count>{}); } \
  };
STRUCT(CrossAttention, 16)
STRUCT(CrossAttentionGrads, 8)
STRUCT(RelativeAttention, 20)
STRUCT(RelativeAttentionGrads, 7)
STRUCT(RelativeLogits, 6)

template <class... T, size_t... I> void run(void (*kernel)(T...), const Argument& a, std::index_sequence<I...>) {
  if (a.parts.size() != sizeof...(T))
    throw std::runtime_error("expected another number of arguments");
  kernel(As<std::remove_cv_t<std::remove_reference_t<T>>>::from(a.parts[I])...);
}
template <class... T> void run(void (*kernel)(T...), const Argument& a) {
  run(kernel, a, std::index_sequence_for<T...>{});
}

void dispatch(const std::string& name, const Argument& a) {
#define KERNEL(kernel) \
  if (name == #kernel) \
    return run(&kernels::kernel, a);
#ifndef WITHOUT_ATTENTION
  KERNEL(chunked_cross_attention_forward)
  KERNEL(chunked_cross_attention_backward)
  KERNEL(relative_attention_forward)
  KERNEL(relative_attention_backward)
#endif
  KERNEL(check_primitives)
  KERNEL(leaky_average_forward)
  KERNEL(leaky_average_backward)
  KERNEL(topk_chunks_forward)
  KERNEL(topk_chunks_backward)
#ifndef WITHOUT_RELATIVE_LOGITS
  KERNEL(relative_logits_forward)
  KERNEL(relative_logits_backward)
#endif
  KERNEL(rms_norm_forward)
  KERNEL(rms_norm_backward)
  KERNEL(softmax_losses)
  throw std::runtime_error("no kernel " + name);
}

}  // namespace

int main() {
  for (;;) {
    std::string name;
    for (char c; (c = receive<char>()) != '\n';)
      name += c;
    const Argument a = receive_argument();
    try {
      dispatch(name, a);
      check_guards(a);
      std::fputc(0, stdout);
      send_views(a);
    } catch (const std::exception& error) {
      std::fputc(1, stdout);
      std::fprintf(stdout, "%s\n", error.what());
    }
    std::fflush(stdout);
  }
}
