#include "isa.h"

#include <atomic>
#include <cstring>

#ifdef FEDMPQ_AVX_VNNI
#include <cpuid.h>
#endif
#ifdef FEDMPQ_NEON
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // headers older than Linux 5.6
#define HWCAP2_I8MM (1 << 13)
#endif
#ifndef HWCAP2_SVEI8MM
#define HWCAP2_SVEI8MM (1 << 9)
#endif
#endif

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

struct Named {
  Isa isa;
  const char* name;
};

constexpr Named best_first[] = {
    {Isa::avx512, "avx512"},       {Isa::avx512_vnni, "avx512_vnni"}, {Isa::avx_vnni, "avx_vnni"}, {Isa::avx2, "avx2"},
    {Isa::sve, "sve"},             {Isa::neon_i8mm, "neon_i8mm"},     {Isa::neon_dot, "neon_dot"}, {Isa::neon, "neon"},
    {Isa::scalar, "scalar"}};

bool supported(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return true;
#ifdef FEDMPQ_X86
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
    case Isa::avx512_vnni:
      return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    case Isa::avx512:
      return supported(Isa::avx512_vnni) && __builtin_cpu_supports("avx512vpopcntdq") &&
             __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
#endif
#ifdef FEDMPQ_AVX_VNNI
    case Isa::avx_vnni:
#ifdef FEDMPQ_AVX_VNNI_TWIN
      if (supported(Isa::avx512_vnni)) return true;
#endif
      return supported(Isa::avx2) && has_avx_vnni();
#endif
#ifdef FEDMPQ_SVE
    case Isa::sve:
      return supported(Isa::neon_i8mm) && (getauxval(AT_HWCAP) & HWCAP_SVE) != 0 &&
             (getauxval(AT_HWCAP2) & HWCAP2_SVEI8MM) != 0;
#endif
#ifdef FEDMPQ_I8MM
    case Isa::neon_i8mm:
      return supported(Isa::neon_dot) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
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

// SVE takes more instructions than NEON where its registers are no longer (docs/performance.md, "Instructions on ARM").
bool worth_while([[maybe_unused]] Isa isa) {
#ifdef FEDMPQ_SVE
  if (isa == Isa::sve) return sve_bits() > 128;
#endif
  return true;
}

Isa best() {
#ifdef FEDMPQ_X86
  __builtin_cpu_init();
#endif
  for (const Named& candidate : best_first)
    if (supported(candidate.isa) && worth_while(candidate.isa)) return candidate.isa;
  return Isa::scalar;
}

std::atomic<Isa> active{best()};

}  // namespace

#ifdef FEDMPQ_AVX_VNNI
bool has_avx_vnni() {
  // Asked once: to ask a virtual machine's CPU takes microseconds.
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
  }();
  return has;
}
#endif

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
