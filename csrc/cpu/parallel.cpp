// Threads take tasks from one atomic counter. If the process has loaded torch's OpenMP, the threads belong to OpenMP.
// OpenMP threads spin for milliseconds after each of torch's loops, and other threads would compete with them.
// Otherwise the threads are workers of a pool, which sleep on a condition variable.
#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "stages.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define RETRO_PAUSE() _mm_pause()
#else
#define RETRO_PAUSE() std::this_thread::yield()
#endif

namespace retro {
namespace {

// Number of threads that is allowed on every machine. More threads than processors do not gain speed, but tests use
// them to find races.
constexpr int FEWEST = 16;
constexpr int SPINS = 400;  // pauses before a thread sleeps: about 10 us, a little longer than waking it up takes

thread_local bool inside_task = false;

struct Job {
  Task task;
  void* context;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  std::mutex lock{};
  std::exception_ptr error{};

  void work() {
    const InStage rest(REST);
    inside_task = true;
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      try {
        task(context, t);
      } catch (...) {
        std::lock_guard<std::mutex> guard(lock);
        if (!error)
          error = std::current_exception();
        next.store(tasks, std::memory_order_relaxed);
      }
    }
    inside_task = false;
  }
};

class Pool {
 public:
  void run(Job& job, int threads) {
    std::lock_guard<std::mutex> one_job_at_a_time(job_lock_);
    const int helpers = grow(threads - 1);
    {
      std::lock_guard<std::mutex> guard(lock_);
      job_ = &job;
      wanted_ = helpers;
      running_.store(helpers, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work();
    for (int spin = 0; running_.load(std::memory_order_acquire) && spin < SPINS; ++spin)
      RETRO_PAUSE();
    std::unique_lock<std::mutex> guard(lock_);
    done_.wait(guard, [&] { return running_.load(std::memory_order_acquire) == 0; });
  }

 private:
  // Starts workers until there are `helpers` of them or the system refuses. Returns the number that the job can use.
  int grow(int helpers) {
    while (workers_ < helpers) {
      try {
        // workers live as long as the process, and the pool is never destroyed
        std::thread([this, index = workers_, seen = generation_.load()] { serve(index, seen); }).detach();
      } catch (const std::system_error&) {
        return workers_;
      }
      ++workers_;
    }
    return helpers;
  }

  void serve(int index, uint64_t seen) {
    for (;;) {
      for (int spin = 0; generation_.load(std::memory_order_acquire) == seen && spin < SPINS; ++spin)
        RETRO_PAUSE();
      {
        std::unique_lock<std::mutex> guard(lock_);
        wake_.wait(guard, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        seen = generation_.load(std::memory_order_acquire);
        if (index >= wanted_)
          continue;
      }
      job_->work();
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> guard(lock_);  // without it the caller could miss the notification
        done_.notify_one();
      }
    }
  }

  std::mutex job_lock_, lock_;
  std::condition_variable wake_, done_;
  int workers_ = 0;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> running_{0};
  int wanted_ = 0;
  Job* job_ = nullptr;
};

// A forked child does not have the threads of its parent, and its locks are in an unknown state. So the child starts a
// pool of its own. It does not use OpenMP, which would wait for the parent's threads.
std::atomic<Pool*> pool{new Pool};
std::atomic<bool> forked{false};

using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

// Returns the function behind GCC's `#pragma omp parallel` in the runtime that torch has loaded, or null without one.
Parallel openmp() {
#ifdef __SANITIZE_THREAD__
  return nullptr;  // the sanitizer does not know the synchronisation of OpenMP's threads
#else
  static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return forked.load(std::memory_order_relaxed) ? nullptr : found;
#endif
}

}  // namespace

void watch_forks(int64_t process) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool), forked.store(true); });
  (void)registered;
  if (process != getpid())
    forked.store(true);  // forked before the extension was loaded
}

void run_tasks(int64_t tasks, int threads, Task task, void* context) {
  if (tasks <= 0)
    return;
  if (tasks == 1 || threads <= 1 || inside_task) {
    const InStage rest(REST);
    for (int64_t t = 0; t < tasks; ++t)
      task(context, t);
    return;
  }
  Job job{task, context, tasks};
  const int64_t most = std::max<int64_t>(FEWEST, std::thread::hardware_concurrency());
  threads = static_cast<int>(std::min({int64_t{threads}, tasks, most}));  // the caller's included
  if (const Parallel parallel = openmp())
    parallel([](void* all) { static_cast<Job*>(all)->work(); }, &job, static_cast<unsigned>(threads), 0);
  else
    pool.load()->run(job, threads);
  if (job.error)
    std::rethrow_exception(job.error);
}

void* scratch(size_t bytes) {
  constexpr size_t LINE = 64, PAGE = 4096;
  thread_local std::unique_ptr<void, decltype(&std::free)> buffer(nullptr, &std::free);
  thread_local size_t held = 0;
  if (bytes > held) {
    buffer.reset();
    held = 0;
    const size_t rounded = (bytes + PAGE - 1) / PAGE * PAGE;
    buffer.reset(std::aligned_alloc(LINE, rounded));
    if (!buffer)
      throw std::bad_alloc();
    held = rounded;
  }
  return buffer.get();
}

void advise_huge_pages([[maybe_unused]] uintptr_t address, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = (address + page - 1) / page * page,
                  end = (address + bytes) / page * page;
  if (begin < end)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace retro
