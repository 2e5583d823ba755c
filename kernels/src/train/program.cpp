// Runs calls that were made ready before: between two kernels there is no more than an indirect call.
#include "fedmpq/program.h"

#include <cstring>
#include <ctime>
#include <iterator>
#include <utility>

#include "bounds.h"

namespace fedmpq {
namespace {

template <auto Function>
struct Unpacked;

// A function called with the values that lie at so many addresses.
template <class... Arguments, int32_t (*Function)(Arguments...)>
struct Unpacked<Function> {
  static constexpr int64_t arguments = sizeof...(Arguments);

  static int32_t call(const int64_t* addresses) { return call(addresses, std::index_sequence_for<Arguments...>{}); }

 private:
  template <size_t... I>
  static int32_t call(const int64_t* addresses, std::index_sequence<I...>) {
    return Function(*reinterpret_cast<const Arguments*>(static_cast<intptr_t>(addresses[I]))...);
  }
};

struct Entry {
  const char* name;
  int64_t arguments;
  int32_t (*call)(const int64_t* addresses);
};

constexpr Entry entries[] = {
#define FEDMPQ_FUNCTION(name) {#name, Unpacked<name>::arguments, Unpacked<name>::call},
#include "functions.inc"
#undef FEDMPQ_FUNCTION
};

bool are_calls(const int32_t* functions, int32_t count, const int64_t* addresses, int64_t arguments) {
  int64_t taken = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (functions[i] < 0 || functions[i] >= static_cast<int32_t>(std::size(entries))) return false;
    taken += entries[functions[i]].arguments;
  }
  if (taken != arguments) return false;
  for (int64_t i = 0; i < arguments; ++i)
    if (addresses[i] == 0) return false;
  return true;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_function(const char* name) {
  if (name == nullptr) return -1;
  for (size_t i = 0; i < std::size(entries); ++i)
    if (std::strcmp(entries[i].name, name) == 0) return static_cast<int32_t>(i);
  return -1;
}

int32_t fedmpq_run(const int32_t* functions, int32_t count, const int64_t* addresses, int64_t arguments, int32_t* stopped,
                   double* seconds) {
  if (stopped == nullptr) return not_valid;
  *stopped = -1;
  if (count < 0 || !given(functions, addresses) || !are_calls(functions, count, addresses, arguments)) return not_valid;
  double before = seconds != nullptr ? thread_seconds() : 0.0;
  for (int32_t i = 0; i < count; ++i) {
    const Entry& entry = entries[functions[i]];
    const int32_t status = entry.call(addresses);
    addresses += entry.arguments;
    if (seconds != nullptr) {
      const double now = thread_seconds();
      seconds[i] += now - before;
      before = now;
    }
    if (status < 0) {
      *stopped = i;
      return status;
    }
  }
  return 0;
}
