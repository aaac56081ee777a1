// Runs tasks on a persistent pool of threads. Any thread may run a task. The result of a task must depend neither on
// its thread nor on the number of threads, so that results have the same bits for every number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace retro {

using Task = void (*)(void* context, int64_t task);

// Runs task(context, t) for t = 0..tasks-1, roughly in this order, on up to `threads` threads, including the caller's
// thread. The number of threads is limited to the number of processors, or to 16 if there are fewer processors.
// Rethrows the first exception of a task. A call from inside a task runs serially.
void run_tasks(int64_t tasks, int threads, Task task, void* context);

template <class Function> void parallel_for(int64_t tasks, int threads, Function&& f) {
  run_tasks(tasks, threads, [](void* context, int64_t t) { (*static_cast<Function*>(context))(t); }, &f);
}

// Must be called once before the first task, with the id of the process that imported the package. A process that was
// forked since then, even before the extension was loaded, cannot use the threads that torch started in its parent.
void watch_forks(int64_t process);

// Returns this thread's scratch memory. It is aligned to 64 bytes, not initialised, and valid until the thread's next
// call.
void* scratch(size_t bytes);

// Asks the system to use huge pages for this memory, which must not have been touched yet. The system may refuse.
void advise_huge_pages(uintptr_t address, size_t bytes);

}  // namespace retro
