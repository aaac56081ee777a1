// Tasks on a persistent pool of threads. Any thread may run a task. A task's result must depend neither on its thread
// nor on the number of threads, so that results have the same bits for every number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace retro {

using Task = void (*)(void* context, int64_t task);

// Runs task(context, t) for t = 0..tasks-1 on up to `threads` threads, the caller's included, roughly in that order. It
// starts at most as many threads as there are processors, or 16 if there are fewer. Rethrows the first exception of a
// task. Inside a task it runs serially.
void run_tasks(int64_t tasks, int threads, Task task, void* context);

template <class Function> void parallel_for(int64_t tasks, int threads, Function&& f) {
  run_tasks(tasks, threads, [](void* context, int64_t t) { (*static_cast<Function*>(context))(t); }, &f);
}

// Call once before the first task, with the id of the process that imported the package. A child that was forked since,
// even before the extension was loaded, can't use the threads that torch started in its parent.
void watch_forks(int64_t process);

// This thread's scratch memory, 64-byte aligned and not initialised, valid until the thread's next call.
void* scratch(size_t bytes);

// Asks for huge pages where memory is touched for the first time; the system may refuse.
void advise_huge_pages(uintptr_t address, size_t bytes);

}  // namespace retro
