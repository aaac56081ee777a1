// The state of the CTAs of one cluster (mostly one): registers, shared memory with the state of each byte, global
// memory by region, and the faults. The CTAs are side by side: first all threads and the shared memory of rank 0, then
// rank 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "traffic.h"

namespace ptx {

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr uint64_t SHARED_BASE = 1024;  // so that no array has address 0
constexpr int RANK_BIT = 24;            // from this bit on, a shared address has the rank of its CTA
constexpr int64_t IDLE = 1 << 20;       // atomic updates that change nothing, in a row: a wait without end
constexpr uint64_t LOCAL_REGION = 201;  // a thread's own memory; 202 and 203 are parameters and constants
constexpr uint64_t FIRST_REGION = 256;  // below are the host's own addresses: pointers that a kernel finds in memory
constexpr int REGION_BITS = 40;         // every tensor has 2^40 addresses of its own: a wild offset meets no neighbour

template <class... Parts> std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Types, integers first, and their bytes
constexpr int U8 = 0, U16 = 1, U32 = 2, U64 = 3, S8 = 4, S16 = 5, S32 = 6, S64 = 7, F16 = 8, BF16 = 9, F32 = 10,
              F64 = 11, PRED = 12, F16X2 = 13, BF16X2 = 14, TF32 = 15, F32X2 = 16, E4M3 = 17, E5M2 = 18, U16X2 = 19,
              S16X2 = 20;
constexpr int BYTES[] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 4, 4, 4, 8, 1, 1, 4, 4};
inline bool is_signed(int type) { return type >= S8 && type <= S64; }

struct Machine;
struct Ins;
using Handler = void (*)(Machine&, Ins&);

struct Ins {
  Handler run;
  int type = U32, type2 = U32;
  int64_t option[8] = {};  // further operands of the handler: an offset, a mode, a count
  int predicate = -1;
  bool negate = false;
  int width = 4;          // bytes of the destination register
  std::vector<int> d, s;  // registers; immediates and symbols are registers that hold a constant
  // counted while running: executions by CTAs, requests by warps, sectors or wavefronts and their minimum
  int64_t executed = 0, requests = 0, units = 0, fewest = 0;
};

struct Region {
  uint64_t base;  // the address that the kernel sees
  uint8_t* host;
  int64_t bytes;
};

// The order of events in a cluster. Its agents are the warps, the copies that arrive at each mbarrier, and each warp's
// products. A clock ticks at each release. A warp has seen the clocks that it acquired.
using Clock = std::vector<int32_t>;  // by agent
struct Stamp {
  size_t agent = 0;
  int32_t clock = 0;  // 0: it never happened
};

struct Ordering {
  Clock clock;
  std::vector<Clock> seen;          // by warp; of itself it sees everything
  std::vector<int64_t> proxy_time;  // by warp: fence.proxy.async
  int64_t time = 0;

  explicit Ordering(size_t warps) : clock(warps, 1), seen(warps, Clock(warps)), proxy_time(warps, -1) {
    for (size_t w = 0; w < warps; ++w)
      seen[w][w] = std::numeric_limits<int32_t>::max();
  }
  static void join(Clock& into, const Clock& from) {
    into.resize(std::max(into.size(), from.size()));
    for (size_t k = 0; k < from.size(); ++k)
      into[k] = std::max(into[k], from[k]);
  }
  void acquire(int warp, const Clock& from) { join(seen[warp], from); }
  void release(int warp, Clock& into) {
    join(into, seen[warp]);
    into[warp] = clock[warp]++;
  }
  bool before(Stamp event, int warp) const {
    return event.clock == 0 || (event.agent < seen[warp].size() && seen[warp][event.agent] >= event.clock);
  }
};

// The warps that accessed each place, as bits, and when. An access that orders all others forgets them.
struct History {
  size_t warps = 0;
  std::vector<uint64_t> by = {};
  std::vector<int32_t> clocks = {};  // by place and warp

  void resize(size_t places, size_t of) { warps = of, by.resize(places), clocks.resize(places * warps); }
  void note(size_t place, int warp, const Ordering& order) {
    by[place] |= uint64_t(1) << warp;
    clocks[place * warps + warp] = order.clock[warp];
  }
  // The warps whose access does not happen before what `warp` does now
  uint64_t unordered(size_t place, int warp, const Ordering& order) const {
    uint64_t found = 0;
    for (uint64_t left = by[place] & ~(uint64_t(1) << warp); left; left &= left - 1) {
      int w = __builtin_ctzll(left);
      found |= uint64_t(clocks[place * warps + w] > order.seen[warp][w]) << w;
    }
    return found;
  }
};

// barrier.cluster. A thread that arrives joins the phase that follows the last complete phase, and waits for its end.
struct ClusterBarrier {
  int64_t phase = 0;            // complete phases
  std::vector<int64_t> joined;  // by thread: the phase in which it arrived, or 0
  Clock released = {}, complete = {};
  Shared published = {}, learnt = {};  // the same for global memory
};

struct Granule {  // two bytes of shared memory
  int64_t write_time = -1;
  Stamp product, copied;    // when a product that read it, a bulk copy that wrote it arrived at an mbarrier
  int16_t async_reads = 0;  // products that read it and were not waited for
  bool in_flight = false, written = false;
  bool atomic = false;  // all writes that others have not seen were atomic
};

struct Copy {  // one cp.async that was not waited for
  int64_t group, number;
  uint64_t address;
  int bytes;
  uint8_t data[16];
};

struct Product {  // a wgmma, a tcgen05.mma or a bulk store that is in flight
  int64_t group, number;
  std::vector<uint32_t> granules = {};                // of shared memory, that it reads
  std::vector<size_t> registers = {};                 // that it takes in a warpgroup
  std::vector<uint32_t> results = {}, operands = {};  // cells of tensor memory
};

// Take finished operations out of `flying`, in order, and call f with each
template <class T, class Over, class F> void finish(std::vector<T>& flying, Over over, F f) {
  auto done = std::stable_partition(flying.begin(), flying.end(), [&](const T& item) { return !over(item); });
  std::for_each(done, flying.end(), f);
  flying.erase(done, flying.end());
}

// Operations that a thread or a warp began and has not waited for
template <class T> struct Flying {
  int64_t group = 0, made = 0;  // groups committed, operations begun
  std::vector<T> items = {};

  // Wait until at most `most` groups are in flight; -1: for all, committed or not
  template <class F> void wait(int64_t most, F f) {
    finish(items, [&](const T& item) { return item.group < group - most; }, f);
  }
};

struct Cell {                   // 32 bits of tensor memory
  uint32_t value = 0x7fffffff;  // NaN
  bool allocated = false, written = false;
  Stamp product;                      // when a product of it arrived at an mbarrier
  int16_t results = 0, operands = 0;  // products that write, that read it and were not waited for
  uint32_t storing = 0, loading = 0;  // warps whose tcgen05.st, tcgen05.ld was not waited for
};

struct Arrival {  // at an mbarrier, once it is waited for
  int warp = -1;  // a commit of tcgen05: when the warp's products before this one are done
  int64_t end = 0;
  int64_t offset = 0;  // a bulk copy or st.async: where in shared memory its bytes go
  std::vector<uint8_t> data = {};
  Clock clock = {};  // the clock that the commit releases
  int thread = -1;   // cp.async: the thread whose copies before number `end` are done

  void sees(Stamp event) { Ordering::join(clock, Clock(event.agent + 1)), clock[event.agent] = event.clock; }
};

struct Mbarrier {
  uint32_t expected, pending;
  size_t agent;  // its asynchronous operations, in Ordering
  uint32_t phase = 0;
  int64_t bytes = 0;  // that copies have still to bring
  std::vector<Arrival> commits = {};
  Clock arrived = {}, complete = {};  // released by the arrivals of this phase, and of the phase before
  Shared published = {};              // by arrivals of a cluster's CTAs: the clocks of their global memory
};

struct Barrier {   // of bar.sync and bar.arrive
  int wanted = 0;  // threads; 0: all that live
  int arrived = 0;
  Clock released = {};
};
// The reason why a thread waits: the number of a barrier, or one of these
constexpr int8_t NOTHING = -1, BARRIERS = 16, AT_MBARRIER = 16, YIELDS = 17, AT_CLUSTER = 18;  // YIELDS: to others

struct Tensor {
  std::vector<Cell> cells;
  std::map<uint32_t, uint32_t> allocations;          // first column, 512 for each rank: columns
  uint64_t given_up = 0;                             // the right to allocate, by rank as bits
  std::vector<Flying<Product>> products;             // by warp
  std::vector<std::vector<uint32_t>> loads, stores;  // by warp: cells of its tcgen05.ld, st that it did not wait for
  std::map<int64_t, Mbarrier> barriers;              // by offset in shared memory
  std::map<int64_t, size_t> agents;  // of mbarriers, also of earlier ones at this offset; of warp w's products: -1 - w
  History reads, writes;             // by cell

  size_t agent(int64_t name, Ordering& ordering) {
    auto [at, first] = agents.insert({name, ordering.clock.size()});
    if (first)
      ordering.clock.push_back(0);
    return at->second;
  }
};

struct Machine {
  int threads, warps, ctas, per_cta;  // per_cta: threads
  int64_t cta_bytes, stride;          // of shared memory: of a CTA, and from one CTA's to the next
  bool checks;
  std::vector<uint8_t> ranks;          // by thread
  std::vector<uint64_t> registers;     // [register][thread]
  std::vector<int64_t> register_time;  // [warpgroup][register]: when last written
  std::vector<int16_t> pending;        // [warpgroup][register]: wgmmas in flight that use it
  int pending_count = 0;
  std::vector<uint8_t> alive, mask, scratch;  // by thread; scratch: those at the current instruction
  bool all = true;                            // every thread executes the current instruction
  std::vector<uint8_t> shared;
  std::vector<Granule> granules;
  History reads, writes;  // by granule
  const std::vector<Region>&regions, &hosts;
  std::vector<uint8_t> carry;  // by thread: CC.CF
  int64_t local_bytes;
  std::vector<uint8_t> local;  // by thread
  std::string& printed;
  Ordering ordering;
  int64_t idle = 0;                              // atomic updates in a row that changed nothing
  std::vector<Flying<Copy>> copies;              // by thread
  std::vector<Flying<Product>> products, bulks;  // by thread; a wgmma counts for the first of its warpgroup
  Tensor tensor;
  std::vector<int64_t> fence_time;  // by warp: wgmma.fence
  std::vector<Barrier> barriers;    // by rank
  ClusterBarrier cluster;
  std::vector<Clock> fenced;                             // by warp: what its last fence makes a relaxed arrival release
  std::vector<int8_t> waits;                             // by thread
  std::vector<int64_t> waits_at;                         // by thread: the offset of the mbarrier
  bool blocks = false, exits = false, branches = false;  // the request of a control instruction's handler
  int at = 0;                                            // the current instruction
  Order* order = nullptr;                                // of CTAs: null if races between them are not looked for
  bool counts_traffic = false;
  std::vector<std::unordered_map<uint64_t, Sector>> sectors;  // by rank: of global memory, that the CTA touched

  // Unwritten registers and memory hold neither 0 nor a number
  Machine(int ctas, int per_cta, int registers, int64_t shared_bytes, int64_t local_bytes, bool checks,
          const std::vector<Region>& regions, const std::vector<Region>& hosts, std::string& printed)
      : threads(ctas * per_cta), warps((threads + WARP - 1) / WARP), ctas(ctas), per_cta(per_cta),
        cta_bytes(shared_bytes), stride(ctas > 1 ? (shared_bytes + 1023) / 1024 * 1024 : shared_bytes), checks(checks),
        ranks(size_t(warps) * WARP), registers(size_t(registers) * threads, 0xdeadbeefdeadbeefull),
        register_time(size_t(registers) * groups(), -1), pending(register_time.size()), alive(threads, 1),
        mask(size_t(warps) * WARP), scratch(threads), shared(size_t(stride * ctas), 0xff),
        granules((shared.size() + 1) / 2), regions(regions), hosts(hosts), carry(threads), local_bytes(local_bytes),
        local(size_t(local_bytes) * threads, 0xcb), printed(printed), ordering(size_t(warps)), copies(threads),
        products(threads), bulks(threads), fence_time(warps, -1), barriers(size_t(ctas) * BARRIERS), fenced(warps),
        waits(threads, NOTHING), waits_at(threads) {
    for (int t = 0; t < threads; ++t)
      ranks[t] = uint8_t(t / per_cta);
    cluster.joined.resize(threads), sectors.resize(ctas);
    tensor.products.resize(warps), tensor.loads.resize(warps), tensor.stores.resize(warps);
    reads.resize(granules.size(), warps), writes.resize(granules.size(), warps);
  }

  int groups() const { return (warps + 3) / 4; }
  // The place of a warpgroup's register in `register_time` and `pending`
  size_t of_group(int group, int index) const { return size_t(group) * (pending.size() / groups()) + index; }
  bool active_group(int group) const {
    return all || active(group * WARPGROUP, std::min(WARPGROUP, warps * WARP - group * WARPGROUP));
  }
  uint64_t* reg(int index) { return registers.data() + size_t(index) * threads; }

  int number_of(int warp) const { return warp - ranks[warp * WARP] * per_cta / WARP; }  // in its CTA
  // Words for messages, empty without a cluster
  std::string of_rank(int64_t rank) const { return ctas > 1 ? text(" of the CTA of rank ", rank) : ""; }
  // The first of these warps, as seen by another: by its number where it is another CTA's
  std::string one_of(uint64_t others, int me) const {
    int other = __builtin_ctzll(others), rank = ranks[other * WARP];
    return rank == ranks[me * WARP] ? "another warp" : text("warp ", number_of(other), of_rank(rank));
  }
  [[noreturn]] void fault(const std::string& what, int thread = -1) {
    throw std::runtime_error(thread < 0 ? what
                                        : text(what, " (thread ", thread % per_cta, of_rank(ranks[thread]), ")"));
  }
  int living(int rank) const {
    auto first = alive.begin() + rank * per_cta;
    return int(std::count(first, first + per_cta, 1));
  }

  // f(the order between CTAs, in the part of each CTA of which a thread executes)
  template <class F> void each_cta(F f) {
    for (int rank = 0; rank < ctas && order != nullptr; ++rank)
      if (ctas == 1 || active(rank * per_cta, per_cta))
        f(order->as(rank));
  }

  template <class F> void each(F f) {
    if (all) {
      for (int t = 0; t < threads; ++t)
        f(t);
    } else {
      for (int t = 0; t < threads; ++t)
        if (mask[t])
          f(t);
    }
  }

  // f(thread) for the threads of a warp that execute
  template <class F> void each_of(int warp, F f) {
    for (int t = warp * WARP; t < (warp + 1) * WARP; ++t)
      if (mask[t])
        f(t);
  }

  // f(warp) for every warp of which a thread executes
  template <class F> void each_part(F f) {
    for (int w = 0; w < warps; ++w)
      if (active(w * WARP, WARP))
        f(w);
  }

  // f(warp) for every warp that executes; a part of one is refused
  template <class F> void each_warp(F f) {
    each_part([&](int w) {
      if (int n = active(w * WARP, WARP); n != WARP)
        fault(text("divergence: ", n, " of 32 threads of warp ", w, " execute it"));
      f(w);
    });
  }

  int active(int first, int threads) const {
    return int(std::count_if(mask.begin() + first, mask.begin() + first + threads, [](auto m) { return m != 0; }));
  }

  uint8_t* local_at(uint64_t address, int bytes, int thread) {
    int64_t offset = int64_t(address & ((uint64_t(1) << REGION_BITS) - 1));
    if (offset + bytes > local_bytes)
      fault(text("out of bounds of a thread's own memory: byte ", offset), thread);
    return local.data() + int64_t(thread) * local_bytes + offset;
  }

  uint8_t* global(uint64_t address, int bytes, int thread) {
    uint64_t index = address >> REGION_BITS;
    if (index == LOCAL_REGION)
      return local_at(address, bytes, thread);
    const Region* region = index - FIRST_REGION < regions.size() ? &regions[index - FIRST_REGION] : nullptr;
    // a pointer that a kernel found in memory, to a tensor whose address the program read
    for (auto one = hosts.begin(); region == nullptr && one != hosts.end(); ++one)
      if (address >= one->base && address + bytes <= one->base + one->bytes)
        region = &*one;
    if (region == nullptr)
      fault("global address outside every tensor", thread);
    int64_t offset = int64_t(address - region->base);
    if (offset < 0 || offset + bytes > region->bytes)
      fault(text("out of bounds of argument tensor ", index - FIRST_REGION, ": byte ", offset, " of ", region->bytes),
            thread);
    if (address % bytes)
      fault(text("misaligned global address: ", bytes, " bytes at offset ", offset), thread);
    return region->host + offset;
  }

  // The memory of an access, which is recorded. data: the bytes that a write stores, null where they are not known
  uint8_t* touch(uint64_t address, int bytes, int thread, Use use, int64_t bits = 0, const void* data = nullptr) {
    uint8_t* host = global(address, bytes, thread);
    uint64_t index = address >> REGION_BITS;
    if (index >= LOCAL_REGION && index < FIRST_REGION)
      return host;
    int rank = ctas > 1 ? ranks[thread] : 0;
    if (counts_traffic) {
      for (uint64_t first = address, end = address + bytes; first < end; first += 32 - first % 32) {
        Sector& sector = sectors[rank][first / 32];
        uint32_t mask = uint32_t(((uint64_t(1) << std::min<uint64_t>(32 - first % 32, end - first)) - 1) << first % 32);
        sector.read |= use != WRITES && (mask & ~sector.written);
        sector.written |= use != READS ? mask : 0;
      }
    }
    if (order != nullptr) {
      if (const Access* other = order->as(rank).note(host, bytes, at, use, bits & STRONG, data))
        fault(text("race between CTAs: ", VERBS[use], " a byte that is accessed by CTA number ", other->cta,
                   " at instruction ", other->at, " too, and no atomic with acquire and release orders the two"),
              thread);
      if (bits & STRONG)
        order->synchronise(host, bits, use);
    }
    return host;
  }
  // Ends an instruction whose accesses have these bits
  void touched(int64_t bits) {
    if (bits & RELEASES)
      each_cta([](Order& own) { own.tick(); });
  }

  // The place in `shared` of an address: of this thread's own CTA, unless the access may go to all of its cluster
  int64_t offset_of(uint64_t address, int bytes, int thread, bool remote = false) {
    auto low = uint32_t(address);
    int64_t offset = int64_t(low & ((1u << RANK_BIT) - 1)) - int64_t(SHARED_BASE), rank = low >> RANK_BIT;
    if (rank != ranks[thread]) {
      if (rank >= ctas)
        fault(text("out of bounds of shared memory: address ", low), thread);
      if (!remote)
        fault("an access to shared::cta with an address" + of_rank(rank), thread);
      if (living(int(rank)) == 0)
        fault("an access to the shared memory" + of_rank(rank) + ", which has ended", thread);
    }
    if (offset < 0 || offset + bytes > cta_bytes)
      fault(text("out of bounds of shared memory: byte ", offset, " of ", cta_bytes), thread);
    if (offset % bytes)
      fault(text("misaligned shared address: ", bytes, " bytes at ", offset), thread);
    return offset + rank * stride;
  }

  // `visit` of each granule of an access to shared memory, its number and the thread's warp
  template <class Visit> void each_granule(int64_t offset, int bytes, int thread, Visit visit) {
    if (!checks)
      return;
    for (int64_t g = offset / 2; g < (offset + bytes + 1) / 2; ++g)
      visit(granules[g], g, thread / WARP);
  }

  template <class... Parts> [[noreturn]] void fault_in(int64_t granule, int thread, const Parts&... what) {
    fault(text(what..., ", byte ", 2 * granule % stride, of_rank(2 * granule / stride)), thread);
  }

  // An access of a thread to shared memory. data: the bytes that a write stores, null where they are not known
  template <Use use> void note(int64_t offset, int bytes, int thread, const uint8_t* data = nullptr) {
    each_granule(offset, bytes, thread, [&](Granule& granule, int64_t g, int me) {
      uint64_t others = writes.unordered(g, me, ordering);
      auto races = [&] {
        if (use == READS)
          return granule.atomic || others == writes.by[g];
        if (use == UPDATES)  // atomic updates by several warps do not race with each other
          return !granule.atomic;
        // equal values are not a race: several warps hold copies of one value
        return bytes > 1 && (!data || std::memcmp(shared.data() + 2 * g, data + (2 * g - offset), 2) != 0);
      };
      if (granule.in_flight)
        fault_in(g, thread, VERBS[use], " shared memory that an asynchronous copy still writes");
      if (use != WRITES && !granule.written)
        fault_in(g, thread, VERBS[use], " uninitialised shared memory");
      if (use != READS && granule.async_reads)
        fault_in(g, thread, VERBS[use], " shared memory that a product in flight reads");
      if (uint64_t readers = use == READS ? 0 : reads.unordered(g, me, ordering))
        fault_in(g, thread, "race: ", VERBS[use], " what ", one_of(readers, me), " read since the last barrier");
      if (use != READS && !ordering.before(granule.product, me))
        fault_in(g, thread, "race: ", VERBS[use], " what a product read that another warp waited for");
      if (others && races())
        fault_in(g, thread, "race: ", VERBS[use], " what ", one_of(others, me), " wrote since the last barrier");
      if (use != WRITES && !ordering.before(granule.copied, me))
        fault_in(g, thread, "race: ", VERBS[use], " what a bulk copy wrote that another warp waited for");
      if (use == READS)
        return reads.note(g, me, ordering);
      bool own = (writes.by[g] >> me & 1) && writes.clocks[g * warps + me] == ordering.clock[me];
      granule.atomic = use == UPDATES && (granule.atomic || (!others && !own));
      reads.by[g] = 0, writes.by[g] = others ? writes.by[g] : 0;
      writes.note(g, me, ordering);
      granule.write_time = ordering.time;
      granule.written = true;
    });
  }

  // An asynchronous copy to shared memory begins
  void note_copy(int64_t offset, int bytes, int thread) {
    note<WRITES>(offset, bytes, thread);
    each_granule(offset, bytes, thread, [](Granule& granule, int64_t, int) { granule.in_flight = true; });
  }

  // CTAs run one after another, so a CTA that waits for a later CTA would wait forever
  void note_progress(bool changes, int thread) {
    idle = changes ? 0 : idle + 1;
    if (idle > IDLE)
      fault(text("no progress: ", IDLE,
                 " atomic updates in a row changed nothing; CTAs run one after another here, "
                 "and one that waits for a later one waits for ever"),
            thread);
  }

  void read_shared(uint64_t address, int bytes, int thread, void* out, bool remote = false) {
    int64_t offset = offset_of(address, bytes, thread, remote);
    note<READS>(offset, bytes, thread);
    std::memcpy(out, shared.data() + offset, bytes);
  }

  void write_shared(uint64_t address, int bytes, int thread, const void* data, bool remote = false) {
    int64_t offset = offset_of(address, bytes, thread, remote);
    note<WRITES>(offset, bytes, thread, static_cast<const uint8_t*>(data));
    std::memcpy(shared.data() + offset, data, bytes);
  }
};

template <class T> T as(uint64_t value) {
  T out;
  std::memcpy(&out, &value, sizeof(T));
  return out;
}

template <class T> uint64_t bits(T value) {
  uint64_t out = 0;
  std::memcpy(&out, &value, sizeof(T));
  return out;
}

inline uint64_t zero_extended(uint64_t value, int bytes) {
  return bytes >= 8 ? value : value & ((uint64_t(1) << (8 * bytes)) - 1);
}

inline int64_t sign_extended(uint64_t value, int bytes) {
  int shift = 64 - 8 * bytes;
  return int64_t(value << shift) >> shift;
}

// A value of `type`, extended by its sign or by zeros
inline uint64_t extended(uint64_t value, int type) {
  return is_signed(type) ? uint64_t(sign_extended(value, BYTES[type])) : zero_extended(value, BYTES[type]);
}

// The same as a register of `width` bytes holds it
inline uint64_t held(uint64_t value, int type, int width) { return zero_extended(extended(value, type), width); }

inline float from_bf16(uint16_t b) { return as<float>(uint64_t(b) << 16); }

// Round to nearest even straight from double: a float in between would round twice
inline uint16_t to_bf16(double x) {
  if (x != x)
    return 0x7fff;
  float near = float(x);
  uint32_t b = uint32_t(bits(near));
  if (double(near) != x)  // round to odd, so that the second rounding finds a tie only where x is one
    b = (b - (std::fabs(double(near)) > std::fabs(x))) | 1;
  return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t h) { return float(as<_Float16>(h)); }
inline uint16_t to_f16(double x) { return uint16_t(bits(static_cast<_Float16>(x))); }

// Eight bits: e4m3 has no infinity and NaN where the other bits are all set, e5m2 is the upper half of a float16
inline float from_e4m3(uint8_t b) {
  int exponent = (b >> 3) & 15, mantissa = b & 7;
  if ((b & 0x7f) == 0x7f)
    return as<float>(0x7fc00000u);
  float magnitude = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
  return b & 0x80 ? -magnitude : magnitude;
}
inline float from_e5m2(uint8_t b) { return from_f16(uint16_t(uint16_t(b) << 8)); }

// To nearest even; a number that is too large becomes the largest
inline uint8_t to_fp8(double x, int mantissa_bits, int bias, double largest) {
  if (x != x)
    return 0x7f;
  uint8_t sign = std::signbit(x) ? 0x80 : 0;
  double a = std::min(std::fabs(x), largest);
  int exponent = a > 0 ? std::max(std::ilogb(a), 1 - bias) : 1 - bias, one = 1 << mantissa_bits;
  int steps = int(std::nearbyint(std::ldexp(a, mantissa_bits - exponent)));
  if (steps == 2 * one)
    steps = one, ++exponent;
  return uint8_t(sign | (steps < one ? steps : ((exponent + bias) << mantissa_bits) + steps - one));
}
inline uint8_t to_e4m3(double x) { return to_fp8(x, 3, 7, 448); }
inline uint8_t to_e5m2(double x) { return to_fp8(x, 2, 15, 57344); }

inline float flushed(float x) {
  return (x > -1.17549435e-38f && x < 1.17549435e-38f) ? (x < 0 || (x == 0 && bits(x)) ? -0.0f : 0.0f) : x;
}

}  // namespace ptx
