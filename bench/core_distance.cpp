// How long a cache line takes from one core to another and back, in nanoseconds: two threads hand it to each other.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

namespace {

constexpr int turns = 100000;
alignas(128) std::atomic<int> line{0};

void wait_for(int value) {
  while (line.load(std::memory_order_acquire) != value) {
  }
}

}  // namespace

int main() {
  std::thread other([] {
    for (int turn = 0; turn < turns; ++turn) {
      wait_for(2 * turn + 1);
      line.store(2 * turn + 2, std::memory_order_release);
    }
  });
  const auto start = std::chrono::steady_clock::now();
  for (int turn = 0; turn < turns; ++turn) {
    line.store(2 * turn + 1, std::memory_order_release);
    wait_for(2 * turn + 2);
  }
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  other.join();
  std::printf("%.1f\n", taken.count() / turns);
}
