// Times of the stages of a pass, for `retro-bench profile --stages`. They are off by default, and a scope then costs
// one load. A scope inside another one interrupts it, so that no time counts twice.
#pragma once
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace retro {

// In the order of STAGE_NAMES. REST is the time of a task outside of the other stages.
enum Stage : int { REST, PACK, POSITION_LOGITS, SCORES, SOFTMAX, VALUES, GRADIENTS, BAND, STORE, STAGE_COUNT };
constexpr const char* STAGE_NAMES[STAGE_COUNT] = {"rest",   "pack",      "position logits", "scores", "softmax",
                                                  "values", "gradients", "band gradients",  "write"};

// The measurements of one thread. Outside of all scopes `stage` is STAGE_COUNT.
struct StageTimes {
  using Clock = std::chrono::steady_clock;
  Clock::duration time[STAGE_COUNT + 1]{};
  double flops[STAGE_COUNT + 1]{};  // of matrix products, padding included
  int stage = STAGE_COUNT;
  Clock::time_point since{};

  int enter(int next) {
    const Clock::time_point now = Clock::now();
    time[stage] += now - since;
    since = now;
    return std::exchange(stage, next);
  }
};

inline std::atomic<bool> times_stages{false};
inline std::mutex stage_lock;
// The measurements of all threads. They are never freed, because the threads of the pool never end.
inline std::vector<StageTimes*> stage_times;

inline StageTimes& own_stage_times() {
  thread_local StageTimes* const own = [] {
    std::lock_guard<std::mutex> guard(stage_lock);
    return stage_times.emplace_back(new StageTimes);
  }();
  return *own;
}

// While it exists, the time of this thread belongs to a stage.
class InStage {
 public:
  explicit InStage(Stage stage) : on_(times_stages.load(std::memory_order_relaxed)) {
    if (on_)
      before_ = own_stage_times().enter(stage);
  }
  ~InStage() {
    if (on_)
      own_stage_times().enter(before_);
  }
  InStage(const InStage&) = delete;

 private:
  bool on_;
  int before_ = STAGE_COUNT;
};

// Adds the FLOPs of a product to the stage of this thread.
inline void count_product(double multiply_adds) {
  if (times_stages.load(std::memory_order_relaxed))
    own_stage_times().flops[own_stage_times().stage] += 2 * multiply_adds;
}

// Clears the times of all threads and starts to measure. No pass may run meanwhile.
inline void start_stage_times() {
  std::lock_guard<std::mutex> guard(stage_lock);
  for (StageTimes* times : stage_times)
    *times = StageTimes{};
  times_stages.store(true);
}

// Stops, and returns (seconds, FLOPs of products) of each stage, summed over threads. No pass may run meanwhile.
inline std::map<std::string, std::pair<double, double>> stop_stage_times() {
  times_stages.store(false);
  std::lock_guard<std::mutex> guard(stage_lock);
  std::map<std::string, std::pair<double, double>> sums;
  for (int stage = 0; stage < STAGE_COUNT; ++stage)
    for (const StageTimes* times : stage_times) {
      sums[STAGE_NAMES[stage]].first += std::chrono::duration<double>(times->time[stage]).count();
      sums[STAGE_NAMES[stage]].second += times->flops[stage];
    }
  return sums;
}

}  // namespace retro
