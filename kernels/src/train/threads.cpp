#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fedmpq {
namespace {

struct Job {
  void (*body)(void*, int, int);
  void* context;
  int items;
  std::atomic<int> next{0};
};

void work(Job& job, int thread) {
  for (int item; (item = job.next.fetch_add(1, std::memory_order_relaxed)) < job.items;)
    job.body(job.context, item, thread);
}

// Workers sleep between jobs: a board's other processes need its cores.
class Pool {
 public:
  void run(Job& job, int threads) {
    std::unique_lock<std::mutex> only(running_);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (started_ < threads - 1) start();
      job_ = &job;
      wanted_ = threads - 1;
      busy_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    work(job, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

 private:
  void start() {
    const int thread = ++started_;
    std::thread([this, thread, seen = generation_]() mutable { loop(thread, seen); }).detach();
  }

  void loop(int thread, unsigned long seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (thread > wanted_) continue;
      Job& job = *job_;
      lock.unlock();
      work(job, thread);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex running_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int started_ = 0, wanted_ = 0, busy_ = 0;
  unsigned long generation_ = 0;
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

void parallel_for(int items, int threads, void (*body)(void*, int, int), void* context) {
  if (threads > items) threads = items;
  if (threads > max_threads) threads = max_threads;
  Job job;
  job.body = body;
  job.context = context;
  job.items = items;
  if (threads <= 1)
    work(job, 0);
  else
    the_pool().run(job, threads);
}

}  // namespace fedmpq
