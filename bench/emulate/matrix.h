// Tensor-core products: mma of a warp, wgmma of a warpgroup. Sums are of float32, in the order of k.
#pragma once

#include "memory.h"

namespace ptx {

inline float element(int type, uint64_t value) {
  if (type == F16) return from_f16(uint16_t(value));
  if (type == BF16) return from_bf16(uint16_t(value));
  return as<float>(value & 0xffffe000u);  // tf32: the low 13 bits are not read
}

inline float half_of(int type, uint64_t two, int which) { return element(type, (two >> (16 * which)) & 0xffff); }

// A fragment's registers hold rows lane/4 (+8) and columns by lane%4:
// PTX ISA, "Matrix Fragments for mma.m16n8k16" and ".m16n8k8"
template <class Reg>
void read_a(int type, int k, Reg reg, float (&a)[16][16]) {
  for (int lane = 0; lane < WARP; ++lane) {
    int row = lane / 4, column = lane % 4;
    if (type == TF32) {
      for (int r = 0; r < k / 2; ++r) a[row + 8 * (r & 1)][column + 4 * (r >> 1)] = element(type, reg(r, lane));
    } else {
      for (int r = 0; r < k / 4; ++r)
        for (int e = 0; e < 2; ++e)
          a[row + 8 * (r & 1)][2 * column + e + 8 * (r >> 1)] = half_of(type, reg(r, lane), e);
    }
  }
}

inline void mma(Machine& m, Ins& i) {  // type: of the operands; option 0: k; sources a, b, c in a row
  int k = int(i.option[0]), na = i.type == TF32 ? k / 2 : k / 4, nb = na / 2;
  m.each_warp([&](int w) {
    int first = w * WARP;
    float a[16][16], b[16][8];
    read_a(i.type, k, [&](int r, int lane) { return m.reg(i.s[r])[first + lane]; }, a);
    for (int lane = 0; lane < WARP; ++lane)
      for (int r = 0; r < nb; ++r) {
        uint64_t v = m.reg(i.s[na + r])[first + lane];
        if (i.type == TF32)
          b[lane % 4 + 4 * r][lane / 4] = element(i.type, v);
        else
          for (int e = 0; e < 2; ++e) b[2 * (lane % 4) + e + 8 * r][lane / 4] = half_of(i.type, v, e);
      }
    float out[16][8] = {};
    for (int row = 0; row < 16; ++row)
      for (int x = 0; x < k; ++x)
        for (int column = 0; column < 8; ++column) out[row][column] += a[row][x] * b[x][column];
    for (int lane = 0; lane < WARP; ++lane)
      for (int r = 0; r < 4; ++r) {
        float c = as<float>(m.reg(i.s[na + nb + r])[first + lane]);
        m.reg(i.d[r])[first + lane] = bits(c + out[lane / 4 + 8 * (r >> 1)][2 * (lane % 4) + (r & 1)]);
      }
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

// A product reads shared memory through the asynchronous proxy: what was written must be fenced, and stay until it is
// waited for. readers: the warps that issue it, as bits from `first` on
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

// type: of the operands. destinations: accumulators
// options: n, k, A in registers, A transposed, B transposed, the accumulator is read (-1: by the last source)
// sources: [registers of A | descriptor of A], descriptor of B, accumulators, [predicate]
inline void wgmma(Machine& m, Ins& i) {
  int n = int(i.option[0]), k = int(i.option[1]), bytes = BYTES[i.type == TF32 ? F32 : i.type];
  bool from_registers = i.option[2], a_transposed = i.option[3], b_transposed = i.option[4];
  int na = from_registers ? 4 : 1, accumulators = n / 2;
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
    auto load = [&](const Descriptor& at, int row, int x, bool transposed) {
      int64_t offset = int64_t(at.at(row, x, bytes, transposed) - SHARED_BASE);
      if (offset < 0 || offset + bytes > int64_t(m.shared.size()))
        m.fault("wgmma reads beyond shared memory: byte " + std::to_string(offset));
      note_async_read(m, offset, bytes, 4 * group, 4, product.granules);
      uint64_t value = 0;
      std::memcpy(&value, m.shared.data() + offset, bytes);
      return element(i.type, value);
    };
    std::vector<float> a(64 * k), b(size_t(k) * n);
    if (from_registers) {
      for (int r = 0; r < 4; ++r)
        for (int w = 4 * group; w < 4 * group + 4; ++w)
          if (m.checks && m.register_time[i.s[r]] > m.fence_time[w])
            m.fault("a register of A was written after the last wgmma.fence");
      for (int w = 0; w < 4; ++w) {
        float part[16][16];
        read_a(i.type, k, [&](int r, int lane) { return m.reg(i.s[r])[first + w * WARP + lane]; }, part);
        for (int row = 0; row < 16; ++row)
          for (int x = 0; x < k; ++x) a[(16 * w + row) * k + x] = part[row][x];
      }
    } else {
      Descriptor at(m, uniform(i.s[0]));
      for (int row = 0; row < 64; ++row)
        for (int x = 0; x < k; ++x) a[row * k + x] = load(at, row, x, a_transposed);
    }
    Descriptor at(m, uniform(i.s[na]));
    for (int column = 0; column < n; ++column)
      for (int x = 0; x < k; ++x) b[size_t(x) * n + column] = load(at, column, x, b_transposed);
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
      uint64_t* d = m.reg(i.d[r]);
      for (int t = first; t < first + WARPGROUP; ++t) {
        int lane = t % WARP, row = 16 * ((t - first) / WARP) + lane / 4 + 8 * ((r >> 1) & 1),
            column = 8 * (r / 4) + 2 * (lane % 4) + (r & 1);
        float sum = out[size_t(row) * n + column];
        d[t] = bits(adds ? as<float>(d[t]) + sum : sum);
      }
      hold_register(m, product, i.d[r]);
    }
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
