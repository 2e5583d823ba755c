#include "isa.h"

#include <atomic>
#include <cstring>

#ifdef FEDMPQ_NEON
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

struct Named {
  Isa isa;
  const char* name;
};

constexpr Named best_first[] = {
    {Isa::avx512, "avx512"},     {Isa::avx2, "avx2"},     {Isa::neon_dot, "neon_dot"},
    {Isa::neon, "neon"},         {Isa::scalar, "scalar"}};

bool supported(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return true;
#ifdef FEDMPQ_X86
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("avx512vpopcntdq");
#endif
#ifdef FEDMPQ_NEON
    case Isa::neon:
      return true;
    case Isa::neon_dot:
      return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    default:
      return false;
  }
}

Isa best() {
#ifdef FEDMPQ_X86
  __builtin_cpu_init();
#endif
  for (const Named& candidate : best_first)
    if (supported(candidate.isa)) return candidate.isa;
  return Isa::scalar;
}

std::atomic<Isa> active{best()};

}  // namespace

Isa active_isa() { return active.load(std::memory_order_relaxed); }

}  // namespace fedmpq

const char* fedmpq_isa(void) {
  for (const auto& candidate : fedmpq::best_first)
    if (candidate.isa == fedmpq::active_isa()) return candidate.name;
  return "scalar";
}

int32_t fedmpq_force_isa(const char* name) {
  if (name == nullptr) return -1;
  for (const auto& candidate : fedmpq::best_first) {
    if (std::strcmp(candidate.name, name) != 0) continue;
    if (!fedmpq::supported(candidate.isa)) return -1;
    fedmpq::active.store(candidate.isa, std::memory_order_relaxed);
    return 0;
  }
  return -1;
}
