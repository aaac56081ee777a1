// Tasks on a persistent pool of threads. Which thread runs a task is undefined; the result of a task must not depend on
// it, nor on the number of threads: so results are bitwise the same for every thread count.
#pragma once
#include <cstddef>
#include <cstdint>

namespace retro {

using Task = void (*)(void* context, int64_t task);

// Runs task(context, t) for t = 0..tasks-1 on up to `threads` threads, the caller's included, in about that order. No
// more threads than processors, or than 16 where there are fewer, are ever started.
// Rethrows the first exception of a task. Inside a task it runs serially.
void run_tasks(int64_t tasks, int threads, Task task, void* context);

template <class Function>
void parallel_for(int64_t tasks, int threads, Function&& f) {
  run_tasks(tasks, threads, [](void* context, int64_t t) { (*static_cast<Function*>(context))(t); }, &f);
}

// To be told once, before the first task: the process that the package was imported in. A child forked since then, even
// before the extension was loaded, can't use the threads that torch had started in its parent.
void watch_forks(int64_t process);

// This thread's scratch memory, 64-byte aligned, contents undefined, valid until the thread's next call.
void* scratch(size_t bytes);

// Asks for huge pages where memory is touched for the first time; the system may refuse.
void advise_huge_pages(uintptr_t address, size_t bytes);

}  // namespace retro
