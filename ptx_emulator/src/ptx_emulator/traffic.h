// Accesses of CTAs to global memory: bytes read and written per tensor, and races between CTAs.
//
// Clusters are executed one after another, so a race between them never shows in the values. Each access is recorded by
// CTA and clock. A CTA's clock ticks at each release. An acquire joins the clocks that a release stored at the same
// address. Two accesses to one byte are a race if one of them writes, at least one of them is an ordinary (weak)
// access, and the clocks do not order them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx {

enum Use { READS, WRITES, UPDATES };
constexpr const char* VERBS[] = {"reads", "writes", "updates"};

// How an access takes part in the order between CTAs: bits of an instruction's option
constexpr int64_t ACQUIRES = 1, RELEASES = 2, STRONG = 4;

struct Traffic {  // for one tensor: distinct sectors per CTA, summed over CTAs
  int64_t read = 0, written = 0, in_part = 0, bytes_written = 0;
};

struct Sector {
  bool read = false;     // a byte that this CTA had not written
  uint32_t written = 0;  // bytes, as bits
};

using Clocks = std::map<int32_t, int32_t>;  // CTA: its clock
using Shared = std::shared_ptr<const Clocks>;

struct Access {
  int32_t cta = -1, clock = 0, at = 0;  // at: the instruction
  bool strong = false;
};

struct Touched {
  Access writer, reader, earlier;  // the last writer, the last reader, the last reader of another CTA
};

struct Page {
  int grain = 16;  // bytes of a cell
  std::vector<Touched> cells;
};

constexpr uint64_t PAGE = 4096;

class Order {
 public:
  std::set<std::pair<int32_t, int32_t>> equal;  // instructions of two CTAs that stored equal bytes

  // The CTAs of a cluster begin; `as` says which of them accesses memory from now on
  void begin(const std::vector<int32_t>& ctas) {
    own_.assign(ctas.size(), {});
    for (size_t rank = 0; rank < ctas.size(); ++rank)
      own_[rank].cta = ctas[rank];
    as(0);
  }
  Order& as(int rank) {
    me_ = &own_[rank];
    return *this;
  }

  // Return the earlier access that races with this one, or null. data: the bytes that a write stores
  const Access* note(uint8_t* host, int bytes, int at, Use use, bool strong, const void* data) {
    Access now{me_->cta, me_->clock, at, strong};
    bool same = use == WRITES && data && std::memcmp(host, data, bytes) == 0;
    uint64_t first = reinterpret_cast<uint64_t>(host), end = first + bytes;
    while (first < end) {
      Page& page = page_of(first, int(std::min<uint64_t>(end - first, 16)));
      Touched& cell = page.cells[first % PAGE / page.grain];
      first += page.grain - first % page.grain;
      for (const Access* other : {&cell.writer, &cell.reader, &cell.earlier}) {
        if ((other != &cell.writer && use == READS) || ordered(*other) || (strong && other->strong))
          continue;
        if (!same) {
          raced_ = *other;
          return &raced_;
        }
        equal.insert({at, other->at});
      }
      if (use != READS) {
        cell = {now, {}, {}};
      } else {
        if (cell.reader.cta != me_->cta)
          cell.earlier = cell.reader;
        cell.reader = now;
      }
    }
    return nullptr;
  }

  // Orders a strong access: a read with ACQUIRES adopts the clocks that the address holds, and a write stores clocks
  void synchronise(const uint8_t* host, int64_t bits, Use use) {
    Shared& at = released_[host];
    if (use != WRITES && at)
      bits& ACQUIRES ? join(at) : void(me_->unfenced.push_back(at));
    if (use == READS)
      return;
    Shared own = bits & RELEASES ? snapshot() : me_->fenced;
    at = use == UPDATES ? joined(at, own) : own;
  }
  // Called after an instruction that releases, because it does not publish later accesses
  void tick() {
    ++me_->clock;
    me_->own = nullptr;
  }
  void fence() {
    for (const Shared& one : me_->unfenced)
      join(one);
    me_->unfenced.clear();
    me_->fenced = snapshot();
    tick();
  }
  // An arrival at a barrier of the cluster. A relaxed arrival publishes the writes before the last fence.
  void publish(Shared& into, bool relaxed) {
    into = joined(into, relaxed ? me_->fenced : snapshot());
    tick();
  }
  void join(const Shared& other) {
    if (other == me_->learnt || !other)
      return;
    merge(me_->seen, *other);
    me_->learnt = other;
    me_->own = nullptr;
  }

 private:
  struct View {  // what one CTA has seen
    int32_t cta = 0, clock = 0;
    Clocks seen = {};
    std::vector<Shared> unfenced = {};          // learnt by relaxed reads: a fence acquires it
    Shared fenced = {}, own = {}, learnt = {};  // learnt: the last clocks that it joined
  };
  std::vector<View> own_;  // by rank
  View* me_ = nullptr;
  std::unordered_map<const uint8_t*, Shared> released_;
  std::unordered_map<uint64_t, Page> pages_;
  uint64_t number_ = 0;
  Page* last_ = nullptr;
  Shared joined_[3];  // the last two clocks that were joined, and their join
  Access raced_;

  bool ordered(const Access& other) const {
    if (other.cta < 0 || other.cta == me_->cta)
      return true;
    auto found = me_->seen.find(other.cta);
    return found != me_->seen.end() && found->second >= other.clock;
  }

  static void merge(Clocks& into, const Clocks& from) {
    for (auto [cta, clock] : from) {
      auto [place, made] = into.insert({cta, clock});
      if (!made)
        place->second = std::max(place->second, clock);
    }
  }
  Shared joined(const Shared& a, const Shared& b) {
    if (!a || !b || a == b)
      return a ? a : b;
    if (joined_[0] != a || joined_[1] != b) {
      auto made = std::make_shared<Clocks>(*a);
      merge(*made, *b);
      joined_[0] = a, joined_[1] = b, joined_[2] = std::move(made);
    }
    return joined_[2];
  }
  Shared snapshot() {
    if (!me_->own) {
      auto made = std::make_shared<Clocks>(me_->seen);
      (*made)[me_->cta] = me_->clock;
      me_->own = std::move(made);
    }
    return me_->own;
  }

  // The page of an address. Its cells become smaller if an access begins or ends within one
  Page& page_of(uint64_t address, int bytes) {
    if (last_ == nullptr || address / PAGE != number_)
      number_ = address / PAGE, last_ = &pages_[number_];
    Page& page = *last_;
    int grain = page.grain;
    while (address % grain || bytes % grain)
      grain /= 2;
    if (page.cells.empty()) {
      page.cells.resize(PAGE / grain);
    } else if (grain != page.grain) {
      std::vector<Touched> split(PAGE / grain);
      for (size_t k = 0; k < split.size(); ++k)
        split[k] = page.cells[k * grain / page.grain];
      page.cells = std::move(split);
    }
    page.grain = grain;
    return page;
  }
};

}  // namespace ptx
