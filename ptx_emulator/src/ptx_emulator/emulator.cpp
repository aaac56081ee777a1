// Executes the bytecode of one kernel, cluster by cluster, all threads of a cluster in lockstep. Called through ctypes:
// see program.py.
//
// Threads that diverge at a branch run one group at a time until they reconverge. The group that is furthest behind
// runs first.

#include "bits.h"
#include "messages.h"
#include "tensor_map.h"

namespace ptx {

// clang-format off
const std::map<std::string, Handler> HANDLERS = {
    {"add", add}, {"sub", sub}, {"mul", mul}, {"mul.hi", mul_hi}, {"wide", wide}, {"mad", mad}, {"fma", fma},
    {"mixed", mixed}, {"with carry", with_carry}, {"div", div}, {"rem", rem},
    {"min", min_}, {"max", max_}, {"neg", neg}, {"abs", abs_}, {"ex2", ex2}, {"lg2", lg2}, {"rcp", rcp},
    {"sqrt", sqrt_}, {"rsqrt", rsqrt}, {"sin", sin_}, {"cos", cos_}, {"tanh", tanh_}, {"copysign", copysign_},
    {"and", and_}, {"or", or_}, {"xor", xor_}, {"not", not_}, {"shl", shl}, {"shr", shr}, {"bfe", bfe}, {"bfi", bfi},
    {"prmt", prmt}, {"lop3", lop3}, {"shf", shf}, {"popc", popc}, {"clz", clz}, {"brev", brev},
    {"mov", mov}, {"selp", selp}, {"setp", setp}, {"cvt", cvt}, {"cvt.pair", cvt_pair}, {"access", access},
    {"atom", atom}, {"cp.async", cp_async}, {"cp.async.commit", cp_commit}, {"cp.async.wait", cp_wait},
    {"bulk.load", bulk_load}, {"bulk.store", bulk_store}, {"bulk.commit", bulk_commit}, {"bulk.wait", bulk_wait},
    {"tensormap.replace", map_replace}, {"tensormap.copy", map_copy},
    {"bar", bar}, {"warp.sync", warp_sync}, {"fence", fence}, {"nothing", nothing}, {"fence.proxy.async", proxy_fence}, {"ret", ret},
    {"mapa", mapa}, {"cluster.arrive", cluster_arrive}, {"cluster.wait", cluster_wait}, {"st.async", st_async},
    {"copies.arrive", copies_arrive},
    {"trap", trap}, {"bra", bra}, {"print", print}, {"assertion", assertion}, {"shfl", shfl}, {"vote", vote},
    {"redux", redux},
    {"matrix rows", matrix_rows}, {"mma", mma}, {"wgmma", wgmma}, {"wgmma.fence", wgmma_fence},
    {"wgmma.commit", wgmma_commit}, {"wgmma.wait", wgmma_wait},
    {"elect", elect}, {"mbarrier.init", mbarrier_init}, {"mbarrier.inval", mbarrier_inval},
    {"mbarrier.arrive", mbarrier_arrive}, {"mbarrier.try_wait", mbarrier_try_wait},
    {"tcgen05.alloc", tensor_alloc}, {"tcgen05.dealloc", tensor_dealloc}, {"tcgen05.relinquish", tensor_relinquish},
    {"tcgen05.transfer", transfer}, {"tcgen05.wait", tensor_wait}, {"tcgen05.mma", tensor_mma},
    {"tcgen05.commit", tensor_commit},
};
// clang-format on

struct Program {
  std::vector<Ins> code;
  bool tracing = false;
  std::string printed;
  std::vector<int32_t> trace;  // the instructions in the order in which they were executed
  bool counts_traffic = false;
  std::vector<Traffic> traffic;                 // by argument tensor
  std::set<std::pair<int32_t, int32_t>> equal;  // instructions of two CTAs that stored equal bytes
};

constexpr int END = std::numeric_limits<int>::max();

class Run {
 public:
  Run(Program& program, Machine& machine) : program_(program), m_(machine), pc_(machine.threads) {}

  // One cluster, with its constants in their registers
  void cta() {
    while (step()) {
    }
    if (!ended_)
      m_.fault(deadlock());
    for (auto& flying : m_.products)
      if (!flying.items.empty())
        m_.fault("the kernel ends with a wgmma that was not waited for");
    for (auto& flying : m_.bulks)
      if (!flying.items.empty())
        m_.fault("the kernel ends with a bulk store that was not waited for");
    if (!m_.tensor.allocations.empty())
      m_.fault("the kernel ends with tensor memory that was not given back");
  }

 private:
  Program& program_;
  Machine& m_;
  std::vector<int> pc_;
  bool together_ = true;               // all living threads at at_, and none waits
  bool ended_ = false, moved_ = true;  // moved_: since the threads at mbarriers were last tried again
  int at_ = 0;

  bool step() {
    if (!together_ && !gather())
      return false;
    if (at_ >= int(program_.code.size()))
      m_.fault("ran past the end of the program");
    Ins& i = program_.code[at_];
    m_.at = at_;
    select(i);
    ++m_.ordering.time;
    if (program_.tracing)
      program_.trace.push_back(at_);
    i.executed += m_.ctas > 1 ? parts() : 1;
    if (m_.pending_count)
      check_pending(i);
    m_.blocks = m_.exits = m_.branches = false;
    if (m_.active(0, m_.threads))
      i.run(m_, i);
    // a copy is a name: LLVM places copies of loop variables behind the fence, and ptxas makes one register of them
    bool copy = i.run == mov && i.d.size() == 1 && i.s.size() == 1 && !i.option[0];  // option 0: of a constant
    for (int group = 0; !i.d.empty() && group < m_.groups(); ++group)
      if (m_.active_group(group))
        for (int d : i.d)
          m_.register_time[m_.of_group(group, d)] =
              copy ? m_.register_time[m_.of_group(group, i.s[0])] : m_.ordering.time;
    return advance(i);
  }

  int parts() const {  // CTAs of which a thread is here
    int found = 0;
    for (int first = 0; first < m_.threads; first += m_.per_cta)
      found += std::any_of(&m_.scratch[first], &m_.scratch[first] + m_.per_cta, [](auto here) { return here != 0; });
    return found;
  }

  // Select the threads that run: the threads that are furthest behind, among the threads that do not wait
  bool gather() {
    int lowest = END;
    bool living = false;
    for (int t = 0; t < m_.threads; ++t) {
      living |= m_.alive[t];
      if (m_.alive[t] && m_.waits[t] == NOTHING)
        lowest = std::min(lowest, pc_[t]);
    }
    ended_ = !living;
    if (ended_)
      return false;
    if (lowest == END) {  // all wait: for threads that have ended, or for an mbarrier
      bool again = std::exchange(moved_, false);
      for (int number = 0; number < BARRIERS * m_.ctas; ++number) {
        Barrier& barrier = m_.barriers[number];
        if (barrier.arrived && !barrier.wanted && barrier.arrived == m_.living(number / BARRIERS))
          open(m_, number / BARRIERS, number % BARRIERS), again = true;
      }
      again |= open_cluster(m_);
      for (int8_t& waits : m_.waits)
        if (again && waits >= AT_MBARRIER)
          waits = NOTHING;
      return again && gather();
    }
    at_ = lowest;
    return true;
  }

  void select(Ins& i) {
    m_.all = i.predicate < 0;
    uint64_t* p = i.predicate < 0 ? nullptr : m_.reg(i.predicate);
    for (int t = 0; t < m_.threads; ++t) {
      bool here = m_.alive[t] && (together_ || (pc_[t] == at_ && m_.waits[t] == NOTHING));
      m_.scratch[t] = here;
      m_.mask[t] = here && (p == nullptr || (p[t] != 0) != i.negate);
      m_.all &= here;
    }
  }

  // The barrier at which a thread waits
  std::string barrier_of(int t) const {
    int reason = m_.waits[t];
    if (reason == AT_CLUSTER) {
      const auto& joined = m_.cluster.joined;
      return text("the barrier of the cluster", joined[t] ? "" : ", where it has not arrived", " (",
                  std::count(joined.begin(), joined.end(), m_.cluster.phase + 1), " threads of all)");
    }
    if (reason == AT_MBARRIER) {
      const Mbarrier& barrier = m_.tensor.barriers.at(m_.waits_at[t]);
      return text("the mbarrier at byte ", m_.waits_at[t] % m_.stride, " (", barrier.pending, " of ", barrier.expected,
                  " arrivals and ", barrier.bytes, " bytes are missing, phase ", barrier.phase, ")");
    }
    const Barrier& barrier = m_.barriers[m_.ranks[t] * BARRIERS + reason];
    return text("barrier ", reason, " (", barrier.arrived, " threads of ",
                barrier.wanted ? text(barrier.wanted) : "all", ")");
  }

  // The state of every warp, or of the parts of it that are at different places
  std::string deadlock() const {
    std::string said = "deadlock: no warp can run";
    auto state = [&](int t) { return m_.alive[t] ? std::make_pair(pc_[t], int(m_.waits[t])) : std::make_pair(-1, 0); };
    for (int first = 0, end = 0; first < m_.threads; first = end) {
      int begin = m_.ranks[first] * m_.per_cta, next = std::min((first / WARP + 1) * WARP, m_.threads);
      for (end = first + 1; end < next && state(end) == state(first); ++end) {
      }
      said += text("\n  warp ", m_.number_of(first / WARP), m_.of_rank(m_.ranks[first]));
      if (first % WARP || end < next)
        said += text(", threads ", first - begin, " to ", end - 1 - begin, ",");
      bool ahead = m_.waits[first] < AT_MBARRIER;  // already at the instruction behind the barrier
      said += m_.alive[first] ? text(" waits at ", barrier_of(first), " at instruction ", pc_[first] - ahead)
                              : " has ended";
    }
    return said;
  }

  void check_pending(const Ins& i) {
    if (i.run == wgmma)
      return;  // a chain of products on one accumulator is ordered
    for (int group = 0; group < m_.groups(); ++group) {
      if (!m_.active_group(group))
        continue;
      for (auto [verb, registers] : {std::pair("writes", &i.d), std::pair("reads", &i.s)})
        for (int r : *registers)
          if (m_.pending[m_.of_group(group, r)])
            m_.fault(text(verb, " a register of a wgmma that was not waited for"));
    }
  }

  bool advance(Ins& i) {
    int target = m_.branches ? int(i.option[0]) : at_ + 1;
    moved_ |= !m_.blocks || i.run == bar || i.option[1];  // a test does not block
    bool as_one = !m_.branches || m_.active(0, m_.threads) == std::count(m_.alive.begin(), m_.alive.end(), 1);
    if (together_ && !m_.blocks && !m_.exits && as_one) {
      at_ = target;
      return true;
    }
    if (together_)
      std::fill(pc_.begin(), pc_.end(), at_);
    together_ = true;
    int common = END;
    for (int t = 0; t < m_.threads; ++t) {
      if (m_.scratch[t])
        pc_[t] = m_.waits[t] == AT_MBARRIER || m_.waits[t] == AT_CLUSTER ? at_ : m_.mask[t] ? target : at_ + 1;
      if (m_.mask[t] && m_.exits)
        m_.alive[t] = 0;
      if (!m_.alive[t])
        continue;
      if (common == END)
        common = pc_[t];
      together_ &= pc_[t] == common && m_.waits[t] == NOTHING;
    }
    together_ &= common != END;
    if (together_)
      at_ = common;
    return true;
  }
};

}  // namespace ptx

extern "C" {

void* ptx_program() { return new ptx::Program; }

void ptx_free(void* program) { delete static_cast<ptx::Program*>(program); }

// fields: type, type2, predicate, negate, width, then 8 options
void ptx_append(void* program, const char* handler, const int64_t* fields, int nd, const int* d, int ns, const int* s) {
  ptx::Ins i;
  i.run = ptx::HANDLERS.at(handler);
  i.type = int(fields[0]), i.type2 = int(fields[1]), i.predicate = int(fields[2]), i.negate = fields[3] != 0;
  i.width = int(fields[4]);
  std::copy_n(fields + 5, 8, i.option);
  i.d.assign(d, d + nd);
  i.s.assign(s, s + ns);
  static_cast<ptx::Program*>(program)->code.push_back(std::move(i));
}

// Runs clusters first..last-1 of the grid, x fastest; a cluster is mostly one CTA. grid: three numbers of CTAs, then
// the CTAs of a cluster along each. constants: (register, value). specials: (register, number of a thread's value, a
// term added to it). places: (address, the host's address, bytes) of memory. Returns -1, or the index of the
// instruction that failed, with `message`; `where` is then the number of the cluster's first CTA.
int ptx_run(void* handle, int threads, int registers, const uint32_t* grid, int64_t first, int64_t last, int nconstants,
            const uint64_t* constants, int nspecials, const uint64_t* specials, int nplaces, const uint64_t* places,
            int64_t shared_bytes, int64_t local_bytes, int checks, int64_t* where, char* message, int message_bytes) {
  auto& program = *static_cast<ptx::Program*>(handle);
  std::vector<ptx::Region> regions, hosts;
  for (const uint64_t* place = places; place < places + 3 * nplaces; place += 3)
    (place[0] >> ptx::REGION_BITS < ptx::FIRST_REGION ? hosts : regions)
        .push_back({place[0], reinterpret_cast<uint8_t*>(place[1]), int64_t(place[2])});
  program.traffic.resize(std::max(program.traffic.size(), regions.size()));
  ptx::Order order;
  const uint64_t x = grid[0], y = grid[1], across = grid[3], down = grid[4], ctas = across * down * grid[5];
  for (int64_t n = first; n < last; ++n) {
    ptx::Machine m(int(ctas), threads, registers, shared_bytes, local_bytes, checks, regions, hosts, program.printed);
    for (int k = 0; k < nconstants; ++k)
      std::fill_n(m.reg(int(constants[2 * k])), m.threads, constants[2 * k + 1]);
    uint64_t cluster[] = {n % (x / across), n / (x / across) % (y / down), n / (x / across) / (y / down)};
    std::vector<int32_t> numbers;
    for (uint64_t rank = 0; rank < ctas; ++rank) {
      uint64_t in[] = {rank % across, rank / across % down, rank / across / down}, id[3];
      for (int k = 0; k < 3; ++k)
        id[k] = cluster[k] * grid[3 + k] + in[k];
      numbers.push_back(int32_t((id[2] * y + id[1]) * x + id[0]));
      for (uint64_t t = 0; t < uint64_t(threads); ++t) {
        const uint64_t values[] = {
            t,     t % ptx::WARP, id[0], id[1],      id[2],      rank,      rank << ptx::RANK_BIT,
            in[0], in[1],         in[2], cluster[0], cluster[1], cluster[2]};
        for (int k = 0; k < nspecials; ++k)
          m.reg(int(specials[3 * k]))[rank * threads + t] = values[specials[3 * k + 1]] + specials[3 * k + 2];
      }
    }
    *where = numbers[0];
    order.begin(numbers);
    m.order = checks && (last - first) * int64_t(ctas) > 1 ? &order : nullptr;
    m.counts_traffic = program.counts_traffic;
    ptx::Run run(program, m);
    try {
      run.cta();
    } catch (const std::exception& error) {
      std::snprintf(message, message_bytes, "%s", error.what());
      return m.at;
    }
    for (auto& sectors : m.sectors)
      for (auto& [number, sector] : sectors) {
        uint64_t index = (number * 32 >> ptx::REGION_BITS) - ptx::FIRST_REGION;
        if (index >= program.traffic.size())
          continue;
        ptx::Traffic& traffic = program.traffic[index];
        traffic.read += sector.read;
        traffic.written += sector.written != 0;
        traffic.in_part += sector.written != 0 && sector.written != ~0u;
        traffic.bytes_written += __builtin_popcount(sector.written);
      }
  }
  program.equal = std::move(order.equal);
  return -1;
}

// Copies one of a program's records to `out`, unless it is null, and returns the length. Per instruction the counts:
// executed, requests, units, fewest. The trace: the instructions in the order of execution since its first call. The
// traffic since its first call, by argument tensor: sectors read, written, written in part, and bytes written, each
// distinct per CTA. Equal: pairs of instructions by which two CTAs stored equal bytes without an order, in the last
// run. Printed: letters, which are forgotten when they are copied.
int64_t ptx_record(void* handle, int which, int64_t* out) {
  enum { COUNTS, TRACE, TRAFFIC, EQUAL, PRINTED };
  auto& program = *static_cast<ptx::Program*>(handle);
  std::vector<int64_t> record;
  program.tracing |= which == TRACE;
  program.counts_traffic |= which == TRAFFIC;
  if (which == COUNTS)
    for (const ptx::Ins& i : program.code)
      record.insert(record.end(), {i.executed, i.requests, i.units, i.fewest});
  if (which == TRACE)
    record.assign(program.trace.begin(), program.trace.end());
  if (which == TRAFFIC)
    for (const ptx::Traffic& one : program.traffic)
      record.insert(record.end(), {one.read, one.written, one.in_part, one.bytes_written});
  if (which == EQUAL)
    for (auto [one, other] : program.equal)
      record.insert(record.end(), {one, other});
  if (which == PRINTED)
    record.assign(program.printed.begin(), program.printed.end());
  if (out)
    std::copy(record.begin(), record.end(), out);
  if (out && which == PRINTED)
    program.printed.clear();
  return int64_t(record.size());
}
}
