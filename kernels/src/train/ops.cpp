#include "ops.h"

namespace fedmpq {

const Ops& ops() {
  switch (active_isa()) {
#ifdef FEDMPQ_X86
    case Isa::avx512:
    case Isa::avx512_vnni:
      return ops_avx512;
    case Isa::avx2:
      return ops_avx2;
#endif
#ifdef FEDMPQ_AVX_VNNI
    case Isa::avx_vnni:
#ifdef FEDMPQ_AVX_VNNI_TWIN
      if (!has_avx_vnni()) return ops_avx_vnni_evex;
#endif
      return ops_avx_vnni;
#endif
#ifdef FEDMPQ_SVE
    case Isa::sve:
      return ops_sve();
#endif
#ifdef FEDMPQ_I8MM
    case Isa::neon_i8mm:
      return ops_neon_i8mm;
#endif
#ifdef FEDMPQ_NEON
    case Isa::neon_dot:
      return ops_neon_dot;
    case Isa::neon:
      return ops_neon;
#endif
    default:
      return ops_scalar;
  }
}

}  // namespace fedmpq
