#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>

namespace fedmpq {

// What one thread does first; a line of its own, for every item is taken by a write.
struct alignas(64) Share {
  std::atomic<int> taken;
  int first, end;

  int item(int number, Order order) const { return order == Order::first_first ? first + number : end - 1 - number; }
};

struct Job {
  void (*body)(void*, Items&, int) = nullptr;
  void* context = nullptr;
  int threads;
  Order order;
  Share shares[max_threads];

  // For as many threads as there are items, and at most so many.
  Job(int items, int most, Order by) : threads(most), order(by) {
    if (threads > items) threads = items;
    if (threads > max_threads) threads = max_threads;
    if (threads < 1) threads = 1;
    for (int thread = 0; thread < threads; ++thread) {
      shares[thread].taken.store(0, std::memory_order_relaxed);
      shares[thread].first = share_of(thread, threads, items);
      shares[thread].end = share_of(thread + 1, threads, items);
    }
  }
};

// From kernel to kernel a thread has the same images that way, and they are in its cache: cores that share none (other
// clusters of a board, other parts of a server's chip) took two threads to the time of one when each took whatever image
// was next.
int Items::take() {
  for (; passed_ < job_.threads; ++passed_) {
    Share& share = job_.shares[(thread_ + passed_) % job_.threads];
    const int number = share.taken.fetch_add(1, std::memory_order_relaxed);
    if (number < share.end - share.first) return share.item(number, job_.order);
  }
  return -1;
}

int Items::next() const {
  const Share& share = job_.shares[thread_];
  const int number = share.taken.load(std::memory_order_relaxed);
  return passed_ == 0 && number < share.end - share.first ? share.item(number, job_.order) : -1;
}

namespace {

void work(Job& job, int thread) {
  Items items(job, thread);
  job.body(job.context, items, thread);
}

// A training step is hundreds of jobs a few microseconds apart, and to fall asleep and be woken takes longer than that.
constexpr std::chrono::microseconds looks_out_for{200};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `come` is true before long.
template <class Come>
bool comes_soon(Come come) {
  const auto end = std::chrono::steady_clock::now() + looks_out_for;
  do {
    for (int i = 0; i < 32; ++i) {
      if (come()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return come();
}

// Workers look out for the next job for a moment and then sleep: a board's other processes need its cores.
class Pool {
 public:
  void run(Job& job, int threads) {
    std::unique_lock<std::mutex> only(running_);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (started_ < threads - 1 && start()) {
      }
      job_ = &job;
      wanted_ = started_ < threads - 1 ? started_ : threads - 1;
      busy_.store(wanted_, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(job, 0);
    const auto is_done = [this] { return busy_.load(std::memory_order_acquire) == 0; };
    if (comes_soon(is_done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, is_done);
  }

 private:
  struct Worker {
    Pool* pool;
    int thread;
    unsigned long seen;
  };

  // One more worker, if the system has a thread for it: those that there are do its work else. std::thread would end the
  // process.
  bool start() {
    auto* worker = new (std::nothrow) Worker{this, started_ + 1, generation_.load(std::memory_order_relaxed)};
    pthread_t made;
    const auto run_worker = [](void* given) -> void* {
      const Worker own = *static_cast<Worker*>(given);
      delete static_cast<Worker*>(given);
      own.pool->loop(own.thread, own.seen);
      return nullptr;
    };
    if (worker == nullptr || pthread_create(&made, nullptr, run_worker, worker) != 0) {
      delete worker;
      return false;
    }
    pthread_detach(made);
    ++started_;
    return true;
  }

  void loop(int thread, unsigned long seen) {
    const auto is_new = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    for (;;) {
      const bool soon = comes_soon(is_new);
      std::unique_lock<std::mutex> lock(mutex_);
      if (!soon) wake_.wait(lock, is_new);
      seen = generation_.load(std::memory_order_relaxed);
      if (thread > wanted_) continue;
      Job& job = *job_;
      lock.unlock();
      work(job, thread);
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      lock.lock();
      done_.notify_one();
    }
  }

  std::mutex running_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int started_ = 0, wanted_ = 0;
  std::atomic<int> busy_{0};
  std::atomic<unsigned long> generation_{0};
};

// Never destroyed: detached workers may outlive main. A forked child has none of the workers and starts its own pool.
Pool* pool = nullptr;
std::once_flag once;

void make_pool() { pool = new Pool; }

Pool& the_pool() {
  std::call_once(once, [] {
    make_pool();
    pthread_atfork(nullptr, nullptr, make_pool);
  });
  return *pool;
}

}  // namespace

void parallel_shares(int items, int threads, Order order, void (*body)(void*, Items&, int), void* context) {
  if (items < 1) return;
  Job job(items, threads, order);
  job.body = body;
  job.context = context;
  if (job.threads == 1)
    work(job, 0);
  else
    the_pool().run(job, job.threads);
}

}  // namespace fedmpq
