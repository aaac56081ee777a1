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

inline int kind_of(Machine& m, const TensorMap& map, int t) {
  if (!map.made || map.rank < 1 || map.rank > 5 || map.kind >= sizeof(KINDS) / sizeof(int))
    m.fault("a tensor map that nobody made", t);
  return KINDS[map.kind];
}

inline TensorMap map_at(Machine& m, uint64_t address, int t) {
  TensorMap map;
  for (size_t byte = 0; byte < sizeof(map); byte += 16)
    std::memcpy(reinterpret_cast<uint8_t*>(&map) + byte, m.global(address + byte, 16, t), 16);
  return map;
}

// f(bytes from the start of the box in shared memory, global address or 0 where outside) for each element of a box.
// rows: of a gather or scatter, the second coordinate of each of four rows
template <class F>
void each_of_box(const TensorMap& map, int size, const int32_t* at, const int32_t* rows, F f) {
  uint32_t box[5];
  for (uint32_t d = 0; d < 5; ++d) box[d] = d < map.rank ? map.box[d] : 1;
  if (rows) box[1] = 4;
  int64_t linear = 0;
  uint32_t k[5] = {};
  for (k[4] = 0; k[4] < box[4]; ++k[4])
    for (k[3] = 0; k[3] < box[3]; ++k[3])
      for (k[2] = 0; k[2] < box[2]; ++k[2])
        for (k[1] = 0; k[1] < box[1]; ++k[1])
          for (k[0] = 0; k[0] < box[0]; ++k[0], linear += size) {
            uint64_t address = map.address;
            bool inside = true;
            for (uint32_t d = 0; d < map.rank; ++d) {
              int64_t position = rows && d == 1 ? rows[k[1]] : int64_t(at[d]) + k[d];
              inside &= position >= 0 && uint64_t(position) < map.extents[d];
              address += uint64_t(position) * (d ? map.strides[d] : uint64_t(size));
            }
            f(linear, inside ? address : 0);
          }
}

inline int64_t swizzled(const TensorMap& map, int64_t address) {
  const int bytes[4] = {16, 32, 64, 128};
  return address ^ (((address >> 7) & (bytes[map.swizzle & 3] / 16 - 1)) << 4);
}

struct Box {
  TensorMap map;
  int kind, size;
  int64_t offset, bytes;
  int32_t at[5] = {}, rows[4] = {};
  bool gathers;
};

// option 0: offset in shared memory, option 1: of the map, option 2: coordinates, option 3: offset of the mbarrier,
// option 4: an Atomic, or -1, option 5: gather or scatter; sources: shared address, map, [mbarrier], coordinates
inline Box box_of(Machine& m, Ins& i, int t, int first) {
  Box box;
  box.map = map_at(m, m.reg(i.s[1])[t] + uint64_t(i.option[1]), t);
  box.kind = kind_of(m, box.map, t);
  box.size = BYTES[box.kind == TF32 ? F32 : box.kind];
  box.gathers = i.option[5] != 0;
  if (!box.gathers && box.map.rank != uint64_t(i.option[2])) m.fault("a tensor map of another rank", t);
  box.bytes = box.size;
  for (uint32_t d = 0; d < box.map.rank; ++d) box.bytes *= box.map.box[d];
  for (int k = 0; k < i.option[2]; ++k) {
    int32_t value = int32_t(m.reg(i.s[first + k])[t]);
    if (box.gathers && k > 0)
      box.rows[k - 1] = value;
    else
      box.at[k] = value;
  }
  if (box.gathers) box.bytes *= 4;
  uint64_t address = m.reg(i.s[0])[t] + uint64_t(i.option[0]);
  box.offset = int64_t((address & 0xffffffffu) - SHARED_BASE);
  if (box.offset % 128) m.fault("misaligned shared address of a bulk copy: " + std::to_string(box.offset), t);
  if (box.offset < 0 || box.offset + box.bytes > int64_t(m.shared.size()))
    m.fault("a bulk copy out of bounds of shared memory", t);
  return box;
}

inline void bulk_load(Machine& m, Ins& i) {
  m.each([&](int t) {
    Box box = box_of(m, i, t, 3);
    int64_t where = m.offset_of((m.reg(i.s[2])[t] + uint64_t(i.option[3])) & 0xffffffffu, 8, t);
    auto barrier = m.tensor.barriers.find(where);
    if (barrier == m.tensor.barriers.end()) m.fault("no mbarrier was initialised at byte " + std::to_string(where), t);
    Arrival arrival;
    arrival.offset = box.offset;
    arrival.data.resize(size_t(box.bytes));
    std::vector<uint64_t> addresses;
    each_of_box(box.map, box.size, box.at, box.gathers ? box.rows : nullptr, [&](int64_t linear, uint64_t address) {
      uint8_t* to =
          arrival.data.data() + swizzled(box.map, box.offset + SHARED_BASE + linear) - SHARED_BASE - box.offset;
      uint64_t value = box.map.nan ? ~uint64_t(0) : 0;
      if (address) {
        std::memcpy(&value, m.global(address, box.size, t), box.size);
        addresses.push_back(address);
      }
      if (box.kind == TF32) value = (value + 0x1000) & 0xffffe000u;
      std::memcpy(to, &value, box.size);
    });
    count_sectors(i, addresses, box.size);
    m.note_write(box.offset, int(box.bytes), t, nullptr);
    if (m.checks)
      for (int64_t g = box.offset / 2; g < (box.offset + box.bytes) / 2; ++g) m.granules[g].in_flight = true;
    barrier->second.commits.push_back(std::move(arrival));
  });
}

inline void bulk_store(Machine& m, Ins& i) {
  m.each([&](int t) {
    Box box = box_of(m, i, t, 2);
    Bulk bulk{m.bulk_group[t], {}};
    note_async_read(m, box.offset, int(box.bytes), t / WARP, 1, bulk.granules);
    std::vector<uint64_t> addresses;
    each_of_box(box.map, box.size, box.at, box.gathers ? box.rows : nullptr, [&](int64_t linear, uint64_t address) {
      if (!address) return;
      uint8_t *from = m.shared.data() + swizzled(box.map, box.offset + SHARED_BASE + linear) - SHARED_BASE,
              *to = m.global(address, box.size, t);
      uint64_t value = 0, old = 0;
      std::memcpy(&value, from, box.size);
      std::memcpy(&old, to, box.size);
      if (i.option[4] >= 0) value = updated(m, int(i.option[4]), box.kind, old, value, 0, true);
      std::memcpy(to, &value, box.size);
      addresses.push_back(address);
    });
    count_sectors(i, addresses, box.size);
    m.bulks[t].push_back(std::move(bulk));
  });
}
inline void bulk_commit(Machine& m, Ins&) {
  m.each([&](int t) { ++m.bulk_group[t]; });
}
inline void bulk_wait(Machine& m, Ins& i) {  // option 0: groups that may stay in flight
  m.each([&](int t) {
    auto& flying = m.bulks[t];
    size_t kept = 0;
    uint32_t me = 1u << (t / WARP);
    for (Bulk& bulk : flying) {
      if (bulk.group >= m.bulk_group[t] - i.option[0]) {
        if (&flying[kept] != &bulk) flying[kept] = std::move(bulk);
        ++kept;
        continue;
      }
      for (uint32_t g : bulk.granules) {
        Granule& granule = m.granules[g];
        --granule.async_reads;
        granule.readers = granule.read_epoch == m.epoch ? granule.readers | me : me;
        granule.read_epoch = m.epoch;
      }
    }
    flying.resize(kept);
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
      std::memcpy(m.global(m.reg(i.s[0])[t] + uint64_t(i.option[0] + byte), 16, t), part, 16);
    }
  });
}

}  // namespace ptx
