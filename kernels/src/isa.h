// Run-time choice of instruction set. Each kernel family keeps one table of functions per instruction set, all of the
// same signatures, and looks up the table for active_isa(); the scalar table is the reference for the rest.
#pragma once

#if defined(__x86_64__)
#define FEDMPQ_X86 1
#elif defined(__aarch64__)
#define FEDMPQ_NEON 1
#endif

namespace fedmpq {

// avx512_vnni is avx512 without what came two generations later: shuffles of bytes, bit matrices and counts of bits.
enum class Isa { scalar, neon, neon_dot, neon_i8mm, sve, avx2, avx_vnni, avx512_vnni, avx512 };

Isa active_isa();

#ifdef FEDMPQ_AVX_VNNI
// Whether the CPU has AVX-VNNI as such. Where it has not, AVX-512 may have the same instructions in another encoding.
bool has_avx_vnni();
#endif

#ifdef FEDMPQ_SVE
// The length of its registers; to be asked on CPUs that have it.
int sve_bits();
#endif

}  // namespace fedmpq
