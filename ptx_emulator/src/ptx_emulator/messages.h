// Messages of a kernel: printf, as far as C's format strings go, and assertions.
#pragma once

#include <cstdio>

#include "machine.h"

namespace ptx {

// A string of constant memory, which ends in 0
inline std::string text_at(Machine& m, uint64_t address, int thread) {
  std::string text;
  for (;; ++address) {
    char letter = char(*m.global(address, 1, thread));
    if (letter == 0)
      return text;
    text += letter;
  }
}

// One conversion of a format string, `spec`, of the value at `at`; moves `at` behind it
inline std::string converted(Machine& m, const std::string& spec, uint64_t& at, int thread) {
  char out[128] = {}, kind = spec.back();
  if (kind == '%')
    return "%";
  bool floating = std::string("aefgEFGA").find(kind) != std::string::npos;
  bool wide = floating || kind == 's' || kind == 'p' || spec.find('l') != std::string::npos;
  int size = wide ? 8 : 4;
  at = (at + size - 1) / size * size;
  uint64_t value = 0;
  std::memcpy(&value, m.global(at, size, thread), size);
  at += size;
  if (kind == 's')
    return text_at(m, value, thread);
  if (floating)
    std::snprintf(out, sizeof out, spec.c_str(), as<double>(value));
  else if (wide)
    std::snprintf(out, sizeof out, spec.c_str(), value);
  else
    std::snprintf(out, sizeof out, spec.c_str(), uint32_t(value));
  return out;
}

inline void print(Machine& m, Ins& i) {  // sources: address of the format, address of the values
  uint64_t *format = m.reg(i.s[0]), *values = m.reg(i.s[1]);
  m.each([&](int t) {
    std::string form = text_at(m, format[t], t);
    uint64_t at = values[t];
    for (size_t first = 0; first < form.size();) {
      size_t begin = std::min(form.find('%', first), form.size());
      size_t end = std::min(form.find_first_of("diouxXcspaefgAEFG%", begin + 1), form.size() - 1) + 1;
      m.printed += form.substr(first, begin - first);
      if (begin < form.size())
        m.printed += converted(m, form.substr(begin, end - begin), at, t);
      first = end;
    }
    for (int d : i.d)
      m.reg(d)[t] = 0;
  });
}

inline void assertion(Machine& m, Ins& i) {  // sources: addresses of message and file, line, address of the function
  m.each([&](int t) {
    std::string message = text_at(m, m.reg(i.s[0])[t], t), file = text_at(m, m.reg(i.s[1])[t], t);
    m.fault(text("device assertion: ", message, ", ", file, ":", uint32_t(m.reg(i.s[2])[t])), t);
  });
}

}  // namespace ptx
