// Bulk copies by tensor map (TMA): boxes of a tensor to shared memory, announced to an mbarrier, and back in groups.
// A map is 128 opaque bytes to PTX; here it is TensorMap, as memory.py packs it and tensormap.replace changes it.
#pragma once

#include "atomics.h"
#include "tensor_memory.h"

namespace ptx {

struct TensorMap {
  uint64_t address;
  uint32_t rank, kind;  // kind: PTX ISA, "tensormap.replace", elemtype
  uint64_t extents[5];  // innermost first
  uint64_t strides[5];  // bytes
  uint32_t box[5];
  uint32_t swizzle;  // 0 none, 1 to 3: 32, 64, 128 bytes
  uint32_t nan;      // elements outside the tensor are read as NaN, else as 0
  uint32_t made;     // tensormap.replace wrote to it, or the host did
};
static_assert(sizeof(TensorMap) == 128);
constexpr int KINDS[] = {U8, U16, U32, S32, U64, S64, F16, F32, F32, F64, BF16, TF32};

struct Box {
  TensorMap map;
  int kind, size;         // type and bytes of an element
  int64_t offset, bytes;  // in shared memory
  int32_t at[5] = {};
  bool gathers;          // or scatters
  int32_t rows[4] = {};  // then the second coordinate of each of four rows

  // f(byte of the box in shared memory, global address or 0 where outside) for each element
  template <class F> void each(F f) const {
    for (uint64_t linear = 0; linear < uint64_t(bytes); linear += size) {
      uint64_t address = map.address, rest = linear / size;
      bool inside = true;
      for (uint32_t d = 0; d < map.rank; ++d) {
        uint64_t length = gathers && d == 1 ? 4 : map.box[d], k = rest % length;
        int64_t position = gathers && d == 1 ? rows[k] : at[d] + int64_t(k);
        rest /= length;
        inside &= position >= 0 && uint64_t(position) < map.extents[d];
        address += uint64_t(position) * (d ? map.strides[d] : uint64_t(size));
      }
      int64_t place = offset + SHARED_BASE + linear;
      place ^= ((place >> 7) & ((1 << (map.swizzle & 3)) - 1)) << 4;
      f(place - SHARED_BASE - offset, inside ? address : 0);
    }
  }
};

// Sources: the shared address, the map, [the mbarrier], the coordinates, [the mask of CTAs]. Options:
//   0  offset of the shared address
//   1  offset of the map's address
//   2  number of coordinates
//   3  offset of the mbarrier
//   4  an Update, or -1
//   5  gather or scatter
//   6  where the box goes: 0 to the own CTA, 1 to a CTA of the cluster, 2 to each CTA of the mask with its mbarrier,
//      3 to each CTA of the mask with the mbarrier of one CTA of its pair
inline Box box_of(Machine& m, Ins& i, int t, int first) {
  Box box;
  uint64_t address = m.reg(i.s[1])[t] + uint64_t(i.option[1]);
  for (size_t byte = 0; byte < sizeof(TensorMap); byte += 16)
    std::memcpy(reinterpret_cast<uint8_t*>(&box.map) + byte, m.touch(address + byte, 16, t, READS), 16);
  if (!box.map.made || box.map.rank < 1 || box.map.rank > 5 || box.map.kind >= std::size(KINDS))
    m.fault("a tensor map that nobody made", t);
  box.kind = KINDS[box.map.kind];
  box.size = BYTES[box.kind];
  box.gathers = i.option[5] != 0;
  if (!box.gathers && box.map.rank != uint64_t(i.option[2]))
    m.fault("a tensor map of another rank", t);
  box.bytes = box.gathers ? 4 * box.size : box.size;
  for (uint32_t d = 0; d < box.map.rank; ++d)
    box.bytes *= box.map.box[d];
  for (int k = 0; k < i.option[2]; ++k)
    (box.gathers && k > 0 ? box.rows[k - 1] : box.at[k]) = int32_t(m.reg(i.s[first + k])[t]);
  box.offset = m.offset_of(m.reg(i.s[0])[t] + uint64_t(i.option[0]), 1, t, i.option[6] != 0);
  if (box.offset % m.stride % 128)
    m.fault(text("misaligned shared address of a bulk copy: ", box.offset % m.stride), t);
  if (box.offset % m.stride + box.bytes > m.cta_bytes)
    m.fault("a bulk copy out of bounds of shared memory", t);
  return box;
}

inline void bulk_load(Machine& m, Ins& i) {
  m.each([&](int t) {
    Box box = box_of(m, i, t, 3);
    int64_t barrier = m.offset_of(m.reg(i.s[2])[t] + uint64_t(i.option[3]), 8, t, i.option[6] != 0);
    Arrival arrival{-1, 0, box.offset, std::vector<uint8_t>(size_t(box.bytes))};
    std::vector<uint64_t> addresses;
    box.each([&](int64_t at, uint64_t address) {
      uint64_t value = box.map.nan ? ~uint64_t(0) : 0;
      if (address) {
        std::memcpy(&value, m.touch(address, box.size, t, READS), box.size);
        addresses.push_back(address);
      }
      if (box.kind == TF32)
        value = (value + 0x1000) & 0xffffe000u;
      std::memcpy(&arrival.data[at], &value, box.size);
    });
    count_sectors(i, addresses, box.size);
    int64_t own = box.offset / m.stride, mask = i.option[6] < 2 ? 1 << own : m.reg(i.s.back())[t] & 0xffff;
    each_of_mask(m, uint64_t(mask), box.offset, t, [&](int rank, int64_t at) {
      int64_t of = i.option[6] < 2    ? barrier / m.stride
                   : i.option[6] == 2 ? rank
                                      : rank / 2 * 2 + barrier / m.stride % 2;
      Mbarrier& announced = mbarrier_at(m, barrier % m.stride + of * m.stride, t);
      m.note_copy(arrival.offset = at, int(box.bytes), t);
      announced.commits.push_back(arrival);
    });
  });
}

inline void bulk_store(Machine& m, Ins& i) {
  m.each([&](int t) {
    Box box = box_of(m, i, t, 2);
    Product bulk{m.bulks[t].group, 0};
    note_async_read(m, box.offset, int(box.bytes), t / WARP, 1, bulk.granules);
    std::vector<uint64_t> addresses;
    box.each([&](int64_t at, uint64_t address) {
      if (!address)
        return;
      uint64_t value = 0, old = 0;
      std::memcpy(&value, &m.shared[box.offset + at], box.size);
      bool updates = i.option[4] >= 0;
      uint8_t* to = m.touch(address, box.size, t, updates ? UPDATES : WRITES, updates ? STRONG : 0, &value);
      std::memcpy(&old, to, box.size);
      if (updates)
        value = updated(m, int(i.option[4]), box.kind, old, value, 0, true);
      std::memcpy(to, &value, box.size);
      addresses.push_back(address);
    });
    count_sectors(i, addresses, box.size);
    m.bulks[t].items.push_back(std::move(bulk));
  });
}
constexpr Handler bulk_commit = [](Machine& m, Ins&) { m.each([&](int t) { ++m.bulks[t].group; }); };
inline void bulk_wait(Machine& m, Ins& i) {  // option 0: groups that may stay in flight
  m.each([&](int t) {
    m.bulks[t].wait(i.option[0], [&](const Product& bulk) { release(m, bulk, uint64_t(1) << (t / WARP)); });
  });
}

// tensormap.replace of a map in shared memory. option 0: offset, option 1: byte of TensorMap, option 2: bytes
// option 3: a term added to the value; sources: address, value
inline void map_replace(Machine& m, Ins& i) {
  m.each([&](int t) {
    uint64_t address = m.reg(i.s[0])[t] + uint64_t(i.option[0]), value = m.reg(i.s[1])[t] + uint64_t(i.option[3]);
    uint32_t made = 1;
    m.write_shared(address + uint64_t(i.option[1]), int(i.option[2]), t, &value);
    m.write_shared(address + offsetof(TensorMap, made), 4, t, &made);
  });
}

// A warp copies a map from shared to global memory. options 0, 1: offsets; sources: to, from
inline void map_copy(Machine& m, Ins& i) {
  m.each_warp([&](int w) {
    int t = w * WARP;
    for (int byte = 0; byte < int(sizeof(TensorMap)); byte += 16) {
      uint8_t part[16];
      m.read_shared(m.reg(i.s[1])[t] + uint64_t(i.option[1] + byte), 16, t, part);
      std::memcpy(m.touch(m.reg(i.s[0])[t] + uint64_t(i.option[0] + byte), 16, t, WRITES, 0, part), part, 16);
    }
  });
}

}  // namespace ptx
