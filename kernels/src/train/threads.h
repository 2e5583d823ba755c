// A small pool of threads. Work is cut into items that do not depend on how many threads there are, so results don't
// either.
#pragma once

namespace fedmpq {

// Calls body(context, item, thread) for every item in 0..items-1; `thread` is below `threads`. The caller takes part.
void parallel_for(int items, int threads, void (*body)(void* context, int item, int thread), void* context);

// The same with a lambda `void(int item, int thread)`.
template <class Body>
void parallel(int items, int threads, Body&& body) {
  struct Call {
    static void run(void* context, int item, int thread) { (*static_cast<Body*>(context))(item, thread); }
  };
  parallel_for(items, threads, &Call::run, &body);
}

constexpr int max_threads = 64;

}  // namespace fedmpq
