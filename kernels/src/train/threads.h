// A small pool of threads. Work is cut into items that do not depend on how many threads there are, so results don't
// either.
#pragma once

#include <cstdint>

namespace fedmpq {

constexpr int max_threads = 64;

// Every thread has a share of the items, which are neighbours, and takes them in this order.
enum class Order { first_first, last_first };

struct Job;

// The items that one thread does: its own share and then what is left of the others'.
class Items {
 public:
  Items(Job& job, int thread) : job_(job), thread_(thread) {}
  // One that nobody else does, or -1 if there is none left.
  int take();
  // Which one it likely takes then, or -1 if that is none of its own.
  int next() const;

 private:
  Job& job_;
  int thread_, passed_ = 0;  // shares of which nothing is left
};

// Where the share of a thread begins.
inline int share_of(int thread, int threads, int items) {
  return static_cast<int>(static_cast<int64_t>(items) * thread / threads);
}

// Calls body(context, items, thread) on as many threads as there are items for, and at most on so many; `thread` is below
// `threads`. The caller takes part.
void parallel_shares(int items, int threads, Order order, void (*body)(void* context, Items& items, int thread),
                     void* context);

// The same with a lambda `void(Items& items, int thread)`.
template <class Body>
void parallel_shares(int items, int threads, Body&& body) {
  struct Call {
    static void run(void* context, Items& own, int thread) { (*static_cast<Body*>(context))(own, thread); }
  };
  parallel_shares(items, threads, Order::first_first, &Call::run, &body);
}

// A lambda `void(int item, int thread)` for every item in 0..items-1.
template <class Body>
void parallel(int items, int threads, Body&& body, Order order = Order::first_first) {
  struct Call {
    static void run(void* context, Items& own, int thread) {
      for (int item; (item = own.take()) >= 0;) (*static_cast<Body*>(context))(item, thread);
    }
  };
  parallel_shares(items, threads, order, &Call::run, &body);
}

}  // namespace fedmpq
