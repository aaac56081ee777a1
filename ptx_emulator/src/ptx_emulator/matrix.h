// Tensor-core products: mma of a warp, wgmma of a warpgroup. Sums are of float32, in the order of k.
#pragma once

#include "memory.h"

namespace ptx {

// A register has as many neighbours along k as fit in its four bytes; this is the one at `e`
inline float packed(Machine& m, int type, uint64_t four, int e) {
  return element(m, type, four >> (8 * BYTES[type] * e));
}

// A fragment's registers hold rows lane/4 (+8) and columns by lane%4: PTX ISA, "Matrix Fragments for mma.m16n8k16" and
// its neighbours. first: a thread; a: [16][k]
inline void read_a(Machine& m, Ins& i, int k, int first, float* a) {
  int each = 4 / BYTES[i.type];
  for (int lane = 0; lane < WARP; ++lane)
    for (int r = 0; r < k / (2 * each); ++r)
      for (int e = 0; e < each; ++e)
        a[(lane / 4 + 8 * (r & 1)) * k + each * (lane % 4) + e + 4 * each * (r >> 1)] =
            packed(m, i.type, m.reg(i.s[r])[first + lane], e);
}

// out [rows][columns] += a [rows][k] b [k][columns]
inline void multiply(const float* a, const float* b, float* out, int rows, int k, int columns) {
  for (int row = 0; row < rows; ++row)
    for (int x = 0; x < k; ++x)
      for (int column = 0; column < columns; ++column)
        out[row * columns + column] += a[row * k + x] * b[x * columns + column];
}

// The sum of an accumulator and a product, which of integers is one
inline uint64_t accumulated(int type, uint64_t c, float product, bool adds, bool saturates) {
  if (type == S32) {
    int64_t sum = (adds ? int64_t(int32_t(c)) : 0) + int64_t(product);
    return uint32_t(saturates ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
  }
  if (type == F16)
    return to_f16(adds ? double(from_f16(uint16_t(c))) + double(product) : double(product));
  return bits(adds ? as<float>(c) + product : product);
}

// f(register of the accumulators, element in it, row, column) of one lane's part of 16 rows, `columns` wide
template <class F> void each_accumulator(int type, int columns, int lane, F f) {
  int each = type == F16 ? 2 : 1;
  for (int r = 0; r < columns / (2 * each); ++r)
    for (int e = 0; e < each; ++e) {
      int at = r * each + e;  // as float32 would count
      f(r, e, lane / 4 + 8 * ((at >> 1) & 1), 8 * (at / 4) + 2 * (lane % 4) + (at & 1));
    }
}

inline void put(uint64_t& d, int type, int e, uint64_t value) {
  d = type == F16 ? (e ? (d & 0xffff) | value << 16 : (d & ~uint64_t(0xffff)) | value) : value;
}
inline uint64_t got(uint64_t c, int type, int e) { return type == F16 ? (c >> (16 * e)) & 0xffff : c; }

// type: of A, type2: of the accumulators; option 0: k, option 1: type of B, option 2: integers saturate;
// sources a, b, c in a row
inline void mma(Machine& m, Ins& i) {
  int of_b = int(i.option[1]), each = 4 / BYTES[i.type], k = int(i.option[0]), na = k / (2 * each), nb = na / 2;
  m.each_warp([&](int w) {
    int first = w * WARP;
    float a[16 * 32], b[32][8], out[16][8] = {};
    read_a(m, i, k, first, a);
    for (int lane = 0; lane < WARP; ++lane)
      for (int r = 0; r < nb; ++r)
        for (int e = 0; e < each; ++e)
          b[each * (lane % 4) + e + 4 * each * r][lane / 4] = packed(m, of_b, m.reg(i.s[na + r])[first + lane], e);
    multiply(a, *b, *out, 16, k, 8);
    for (int lane = 0; lane < WARP; ++lane)
      each_accumulator(i.type2, 8, lane, [&](int r, int e, int row, int column) {
        uint64_t c = got(m.reg(i.s[na + nb + r])[first + lane], i.type2, e);
        put(m.reg(i.d[r])[first + lane], i.type2, e, accumulated(i.type2, c, out[row][column], true, i.option[2]));
      });
  });
}

// Where a shared matrix descriptor puts things: PTX ISA, "Matrix Descriptor Format" and "Shared Memory Matrix Layout"
struct Descriptor {
  uint64_t start, leading, stride;
  int swizzle;  // bytes of a row of the pattern: 16 (none), 32, 64, 128

  explicit Descriptor(Machine& m, uint64_t d) {
    start = (d & 0x3fff) << 4;
    leading = ((d >> 16) & 0x3fff) << 4;
    stride = ((d >> 32) & 0x3fff) << 4;
    const int rows[4] = {16, 128, 64, 32};
    swizzle = rows[(d >> 62) & 3];
    if ((d >> 49) & 7)
      m.fault("a base offset in a shared matrix descriptor is not emulated");
  }

  // Byte address of element (i, k), i along M or N; `transposed`: elements next to each other along i
  uint64_t at(int i, int k, int bytes, bool transposed) const {
    uint64_t byte = uint64_t(transposed ? i : k) * bytes, row = transposed ? k : i, down = stride, across = leading;
    if (transposed && swizzle == 16)
      std::swap(down, across);
    uint64_t address = start + row % 8 * swizzle + row / 8 * down;
    address += transposed || swizzle == 16 ? byte % swizzle + byte / swizzle * across : byte;  // else a row holds all k
    return address ^ (((address >> 7) & (uint64_t(swizzle) / 16 - 1)) << 4);
  }
};

// A product reads shared memory through the asynchronous proxy: the writes must be fenced, and the data stay until it
// is waited for. readers: the warps that issue it, as bits from `first` on
inline void note_async_read(Machine& m, int64_t offset, int bytes, int first, int readers,
                            std::vector<uint32_t>& granules) {
  if (!m.checks)
    return;
  uint64_t mine = ((uint64_t(1) << readers) - 1) << first;
  for (int64_t g = offset / 2; g < (offset + bytes + 1) / 2; ++g) {
    Granule& granule = m.granules[g];
    if (granule.in_flight)
      m.fault_in(g, -1, "a product reads shared memory that an asynchronous copy still writes");
    if (!granule.written)
      m.fault_in(g, -1, "a product reads uninitialised shared memory");
    bool waited = granule.copied.clock == 0;  // a bulk copy's bytes need no fence, but one who waited for them
    bool fenced = false, all = true;          // by one of these warps after it saw the data, or by all who wrote them
    uint64_t unseen = 0;
    for (int w = 0; w < m.warps; ++w) {
      bool after = m.ordering.proxy_time[w] > granule.write_time;
      all &= !(m.writes.by[g] >> w & 1) || after;
      if (!(mine >> w & 1))
        continue;
      waited |= m.ordering.before(granule.copied, w);
      fenced |= after;
      unseen |= m.writes.unordered(g, w, m.ordering);
      m.reads.note(g, w, m.ordering);
    }
    if (!waited)
      m.fault_in(g, -1, "race: a product reads what a bulk copy wrote that another warp waited for");
    if (!fenced && !all)
      m.fault_in(g, -1, "a product reads what no fence.proxy.async made visible");
    if (unseen)
      m.fault_in(g, -1, "race: a product reads what was written since the last barrier");
    ++granule.async_reads;
    granules.push_back(uint32_t(g));
  }
}

// A product's operands in shared memory, and the warps that read them
struct Operands {
  Machine& m;
  int k, first, readers, thread;  // thread: issues the product, or -1
  std::vector<uint32_t>& granules;
  int rank;  // rank of the CTA whose memory has the granules

  // [rows][k], or turned, [k][rows]
  std::vector<float> matrix(const Descriptor& at, int type, int rows, bool transposed, bool turned) const {
    std::vector<float> out(size_t(rows) * k);
    int bytes = BYTES[type];
    for (int row = 0; row < rows; ++row)
      for (int x = 0; x < k; ++x) {
        int64_t offset = int64_t(at.at(row, x, bytes, transposed) - SHARED_BASE);
        if (offset < 0 || offset + bytes > m.cta_bytes)
          m.fault(text("a product reads beyond shared memory: byte ", offset), thread);
        offset += rank * m.stride;
        note_async_read(m, offset, bytes, first, readers, granules);
        uint64_t value = 0;
        std::memcpy(&value, m.shared.data() + offset, bytes);
        out[turned ? size_t(x) * rows + row : size_t(row) * k + x] = element(m, type, value);
      }
    return out;
  }
};

// These warps waited for it
inline void release(Machine& m, const Product& product, uint64_t warps) {
  for (uint32_t g : product.granules) {
    --m.granules[g].async_reads;
    for (uint64_t left = warps; left; left &= left - 1)
      m.reads.note(g, __builtin_ctzll(left), m.ordering);
  }
  for (size_t r : product.registers)
    --m.pending[r], --m.pending_count;
}

// type: of A, type2: of the accumulators, which are the destinations
// options: n, k, A in registers, A transposed, B transposed, type of B, integers saturate
// sources: [registers of A | descriptor of A], descriptor of B, accumulators, whether these are added
inline void wgmma(Machine& m, Ins& i) {
  int n = int(i.option[0]), k = int(i.option[1]), of_b = int(i.option[5]);
  bool from_registers = i.option[2], a_transposed = i.option[3], b_transposed = i.option[4];
  int na = from_registers ? 4 : 1;
  if (m.warps % 4 || (m.ctas > 1 && m.per_cta % WARPGROUP))
    m.fault("wgmma needs whole warpgroups of 4 warps");
  for (int group = 0; group < m.warps / 4; ++group) {
    int first = group * WARPGROUP, active = m.active(first, WARPGROUP);
    if (active == 0)
      continue;
    if (active != WARPGROUP)
      m.fault("divergence: part of a warpgroup executes a wgmma");
    Product product{m.products[first].group, 0};
    auto uniform = [&](int source) {
      uint64_t* v = m.reg(source);
      for (int t = first; t < first + WARPGROUP; ++t)
        if (v[t] != v[first])
          m.fault("a descriptor differs within its warpgroup", t);
      return v[first];
    };
    auto check_fence = [&](int r, const char* what) {
      for (int w = 4 * group; w < 4 * group + 4; ++w)
        if (m.checks && m.register_time[m.of_group(group, r)] > m.fence_time[w])
          m.fault(text(what, " was written after the last wgmma.fence"));
    };
    Operands shared{m, k, 4 * group, 4, -1, product.granules, m.ranks[first]};
    std::vector<float> a(64 * k), out(size_t(64) * n);
    if (from_registers) {
      for (int r = 0; r < 4; ++r)
        check_fence(i.s[r], "a register of A");
      for (int w = 0; w < 4; ++w)
        read_a(m, i, k, first + w * WARP, &a[16 * w * k]);
    } else {
      a = shared.matrix(Descriptor(m, uniform(i.s[0])), i.type, 64, a_transposed, false);
    }
    std::vector<float> b = shared.matrix(Descriptor(m, uniform(i.s[na])), of_b, n, b_transposed, true);
    bool adds = uniform(i.s.back()) != 0;
    multiply(a.data(), b.data(), out.data(), 64, k, n);
    for (int d : i.d)
      if (adds && !m.pending[m.of_group(group, d)])
        check_fence(d, "an accumulator");
    for (int t = first; t < first + WARPGROUP; ++t)
      each_accumulator(i.type2, n, t % WARP, [&](int r, int e, int row, int column) {
        uint64_t& d = m.reg(i.d[r])[t];
        float sum = out[size_t(16 * ((t - first) / WARP) + row) * n + column];
        put(d, i.type2, e, accumulated(i.type2, got(d, i.type2, e), sum, adds, i.option[6]));
      });
    std::vector<int> used = i.d;
    used.insert(used.end(), i.s.begin(), i.s.begin() + (from_registers ? na : 0));
    for (int r : used) {
      product.registers.push_back(m.of_group(group, r));
      ++m.pending[product.registers.back()], ++m.pending_count;
    }
    m.products[first].items.push_back(std::move(product));
  }
}

constexpr Handler wgmma_fence = [](Machine& m, Ins&) {
  m.each_warp([&](int w) { m.fence_time[w] = m.ordering.time; });
};
constexpr Handler wgmma_commit = [](Machine& m, Ins&) { m.each([&](int t) { ++m.products[t].group; }); };
inline void wgmma_wait(Machine& m, Ins& i) {  // option 0: groups that may stay in flight
  m.each([&](int t) {
    auto over = [&](const Product& product) { release(m, product, uint64_t(0xf) << (t / WARP)); };
    m.products[t].wait(i.option[0], over);
  });
}

}  // namespace ptx
