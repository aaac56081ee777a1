// Tensor-core products: mma of a warp, wgmma of a warpgroup. Sums are of float32, in the order of k.
#pragma once

#include "memory.h"

namespace ptx {

inline float element(int type, uint64_t value) {
  if (type == F16) return from_f16(uint16_t(value));
  if (type == BF16) return from_bf16(uint16_t(value));
  if (type == E4M3) return from_e4m3(uint8_t(value));
  if (type == E5M2) return from_e5m2(uint8_t(value));
  if (type == S8) return float(int8_t(value));
  if (type == U8) return float(uint8_t(value));
  return as<float>(value & 0xffffe000u);  // tf32: the low 13 bits are not read
}

inline float half_of(int type, uint64_t two, int which) { return element(type, (two >> (16 * which)) & 0xffff); }

inline int operand_bytes(int type) { return type == TF32 ? 4 : BYTES[type]; }

// A fragment's registers hold rows lane/4 (+8) and columns by lane%4: PTX ISA, "Matrix Fragments for mma.m16n8k16" and
// its neighbours. A register has as many neighbours along k as fit in its four bytes
template <class Reg>
void read_a(int type, int k, Reg reg, float (&a)[16][32]) {
  int bytes = operand_bytes(type), each = 4 / bytes;
  for (int lane = 0; lane < WARP; ++lane)
    for (int r = 0; r < k / (2 * each); ++r)
      for (int e = 0; e < each; ++e)
        a[lane / 4 + 8 * (r & 1)][each * (lane % 4) + e + 4 * each * (r >> 1)] =
            element(type, (reg(r, lane) >> (8 * bytes * e)) & (0xffffffffu >> (32 - 8 * bytes)));
}

// The sum of an accumulator and a product, which of integers is one
inline uint64_t accumulated(int type, uint64_t c, float product, bool adds, bool saturates) {
  if (type == S32) {
    int64_t sum = (adds ? int64_t(int32_t(c)) : 0) + int64_t(product);
    return uint32_t(saturates ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
  }
  if (type == F16) return to_f16(adds ? double(from_f16(uint16_t(c))) + double(product) : double(product));
  return bits(adds ? as<float>(c) + product : product);
}

// f(register of the accumulators, element in it, row, column) of one lane's part of 16 rows, `columns` wide
template <class F>
void each_accumulator(int type, int columns, int lane, F f) {
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
  int of_b = int(i.option[1]), bytes = operand_bytes(i.type), each = 4 / bytes;
  int k = int(i.option[0]), na = k / (2 * each), nb = na / 2;
  m.each_warp([&](int w) {
    int first = w * WARP;
    float a[16][32], b[32][8];
    read_a(i.type, k, [&](int r, int lane) { return m.reg(i.s[r])[first + lane]; }, a);
    for (int lane = 0; lane < WARP; ++lane)
      for (int r = 0; r < nb; ++r)
        for (int e = 0; e < each; ++e)
          b[each * (lane % 4) + e + 4 * each * r][lane / 4] =
              element(of_b, (m.reg(i.s[na + r])[first + lane] >> (8 * bytes * e)) & (0xffffffffu >> (32 - 8 * bytes)));
    float out[16][8] = {};
    for (int row = 0; row < 16; ++row)
      for (int x = 0; x < k; ++x)
        for (int column = 0; column < 8; ++column) out[row][column] += a[row][x] * b[x][column];
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
    if ((d >> 49) & 7) m.fault("a base offset in a shared matrix descriptor is not emulated");
  }

  // Byte address of element (i, k), i along M or N; `transposed`: elements next to each other along i
  uint64_t at(int i, int k, int bytes, bool transposed) const {
    uint64_t linear;
    if (!transposed) {
      uint64_t byte = uint64_t(k) * bytes;
      if (swizzle == 16)
        linear = (byte / 16) * leading + byte % 16 + (i / 8) * stride + (i % 8) * 16;
      else
        linear = byte + (i % 8) * swizzle + (i / 8) * stride;
    } else {
      uint64_t byte = uint64_t(i) * bytes;
      if (swizzle == 16)
        linear = byte % 16 + (byte / 16) * stride + (k % 8) * 16 + (k / 8) * leading;
      else
        linear = byte % swizzle + (byte / swizzle) * leading + (k % 8) * swizzle + (k / 8) * stride;
    }
    uint64_t address = start + linear;
    return address ^ (((address >> 7) & (uint64_t(swizzle) / 16 - 1)) << 4);
  }
};

// A product reads shared memory through the asynchronous proxy: the writes must be fenced, and the data stay until it
// is waited for. readers: the warps that issue it, as bits from `first` on
inline void note_async_read(Machine& m, int64_t offset, int bytes, int first, int readers,
                            std::vector<uint32_t>& granules) {
  if (!m.checks) return;
  uint32_t mine = uint32_t((uint64_t(1) << readers) - 1) << first;
  for (int64_t g = offset / 2; g < (offset + bytes + 1) / 2; ++g) {
    Granule& granule = m.granules[g];
    std::string where = ", byte " + std::to_string(2 * g);
    if (granule.in_flight) m.fault("a product reads shared memory that an asynchronous copy still writes" + where);
    if (!granule.written) m.fault("a product reads uninitialised shared memory" + where);
    bool waited = granule.copied_epoch != m.epoch;  // a bulk copy's bytes need no fence, but one who waited for them
    for (int w = first; w < first + readers; ++w) waited |= m.tensor.waited[w] == m.epoch;
    if (!waited) m.fault("race: a product reads what a bulk copy wrote that another warp waited for" + where);
    bool fenced = false;  // by one of these warps after it saw the data, or by all who wrote them
    for (int w = first; w < first + readers; ++w) fenced |= m.proxy_time[w] > granule.write_time;
    if (!fenced) {
      fenced = true;
      for (int w = 0; w < m.warps; ++w)
        if ((granule.writers >> w) & 1) fenced &= m.proxy_time[w] > granule.write_time;
    }
    if (!fenced) m.fault("a product reads what no fence.proxy.async made visible" + where);
    // where several warps read every byte, one epoch with a writer is a race, whichever warp wrote
    if (granule.write_epoch == m.epoch && (readers > 1 || (granule.writers & ~mine)))
      m.fault("race: a product reads what was written since the last barrier" + where);
    granule.readers = granule.read_epoch == m.epoch ? granule.readers | mine : mine;
    granule.read_epoch = m.epoch;
    ++granule.async_reads;
    granules.push_back(uint32_t(g));
  }
}

inline void hold_register(Machine& m, Product& product, int index) {
  product.registers.push_back(index);
  ++m.pending[index];
  ++m.pending_count;
}

// type: of A, type2: of the accumulators, which are the destinations
// options: n, k, A in registers, A transposed, B transposed, the accumulator is read (-1: by the last source), type of
// B, integers saturate sources: [registers of A | descriptor of A], descriptor of B, accumulators, [predicate]
inline void wgmma(Machine& m, Ins& i) {
  int n = int(i.option[0]), k = int(i.option[1]), bytes = operand_bytes(i.type), of_b = int(i.option[6]);
  bool from_registers = i.option[2], a_transposed = i.option[3], b_transposed = i.option[4];
  int na = from_registers ? 4 : 1, accumulators = i.type2 == F16 ? n / 4 : n / 2;
  if (m.warps % 4) m.fault("wgmma needs whole warpgroups of 4 warps");
  for (int group = 0; group < m.warps / 4; ++group) {
    int active = 0;
    for (int t = group * WARPGROUP; t < (group + 1) * WARPGROUP; ++t) active += m.mask[t] != 0;
    if (active == 0) continue;
    if (active != WARPGROUP) m.fault("divergence: part of a warpgroup executes a wgmma");
    Product product{m.product_group[group], {}, {}};
    int first = group * WARPGROUP;
    auto uniform = [&](int source) {
      uint64_t* v = m.reg(source);
      for (int t = first; t < first + WARPGROUP; ++t)
        if (v[t] != v[first]) m.fault("a descriptor differs within its warpgroup", t);
      return v[first];
    };
    auto load = [&](int type, const Descriptor& at, int row, int x, bool transposed) {
      int64_t offset = int64_t(at.at(row, x, bytes, transposed) - SHARED_BASE);
      if (offset < 0 || offset + bytes > int64_t(m.shared.size()))
        m.fault("wgmma reads beyond shared memory: byte " + std::to_string(offset));
      note_async_read(m, offset, bytes, 4 * group, 4, product.granules);
      uint64_t value = 0;
      std::memcpy(&value, m.shared.data() + offset, bytes);
      return element(type, value);
    };
    std::vector<float> a(64 * k), b(size_t(k) * n);
    if (from_registers) {
      for (int r = 0; r < 4; ++r)
        for (int w = 4 * group; w < 4 * group + 4; ++w)
          if (m.checks && m.register_time[i.s[r]] > m.fence_time[w])
            m.fault("a register of A was written after the last wgmma.fence");
      for (int w = 0; w < 4; ++w) {
        float part[16][32];
        read_a(i.type, k, [&](int r, int lane) { return m.reg(i.s[r])[first + w * WARP + lane]; }, part);
        for (int row = 0; row < 16; ++row)
          for (int x = 0; x < k; ++x) a[(16 * w + row) * k + x] = part[row][x];
      }
    } else {
      Descriptor at(m, uniform(i.s[0]));
      for (int row = 0; row < 64; ++row)
        for (int x = 0; x < k; ++x) a[row * k + x] = load(i.type, at, row, x, a_transposed);
    }
    Descriptor at(m, uniform(i.s[na]));
    for (int column = 0; column < n; ++column)
      for (int x = 0; x < k; ++x) b[size_t(x) * n + column] = load(of_b, at, column, x, b_transposed);
    bool adds = i.option[5] >= 0 ? i.option[5] != 0 : uniform(i.s.back()) != 0;
    std::vector<float> out(size_t(64) * n, 0.0f);
    for (int row = 0; row < 64; ++row)
      for (int x = 0; x < k; ++x) {
        float scale = a[row * k + x];
        for (int column = 0; column < n; ++column) out[size_t(row) * n + column] += scale * b[size_t(x) * n + column];
      }
    for (int r = 0; r < accumulators; ++r) {
      if (m.checks && adds && !m.pending[i.d[r]])
        for (int w = 4 * group; w < 4 * group + 4; ++w)
          if (m.register_time[i.d[r]] > m.fence_time[w])
            m.fault("an accumulator was written after the last wgmma.fence");
      hold_register(m, product, i.d[r]);
    }
    for (int t = first; t < first + WARPGROUP; ++t)
      each_accumulator(i.type2, n, t % WARP, [&](int r, int e, int row, int column) {
        uint64_t& d = m.reg(i.d[r])[t];
        float sum = out[size_t(16 * ((t - first) / WARP) + row) * n + column];
        put(d, i.type2, e, accumulated(i.type2, got(d, i.type2, e), sum, adds, i.option[7]));
      });
    if (from_registers)
      for (int r = 0; r < 4; ++r) hold_register(m, product, i.s[r]);
    m.products[group].push_back(std::move(product));
  }
}

template <class F>
void each_warpgroup(Machine& m, F f) {
  for (int group = 0; group < m.warps / 4; ++group)
    if (m.mask[group * WARPGROUP]) f(group);
}
inline void wgmma_fence(Machine& m, Ins&) {
  m.each_warp([&](int w) { m.fence_time[w] = m.time; });
}
inline void wgmma_commit(Machine& m, Ins&) {
  each_warpgroup(m, [&](int group) { ++m.product_group[group]; });
}
inline void wgmma_wait(Machine& m, Ins& i) {  // option 0: groups that may stay in flight
  each_warpgroup(m, [&](int group) {
    auto& flying = m.products[group];
    size_t kept = 0;
    for (Product& product : flying) {
      if (product.group >= m.product_group[group] - i.option[0]) {
        if (&flying[kept] != &product) flying[kept] = std::move(product);  // onto itself it would lose its lists
        ++kept;
        continue;
      }
      uint32_t mine = 0xfu << (4 * group);
      for (uint32_t g : product.granules) {
        Granule& granule = m.granules[g];
        --granule.async_reads;
        granule.readers = granule.read_epoch == m.epoch ? granule.readers | mine : mine;
        granule.read_epoch = m.epoch;
      }
      for (int r : product.registers) --m.pending[r], --m.pending_count;
    }
    flying.resize(kept);
  });
}

}  // namespace ptx
