// Run-time choice of instruction set. Each kernel family keeps one table of functions per instruction set, all of the
// same signatures, and looks up the table for active_isa(); the scalar table is the reference for the rest.
#pragma once

#if defined(__x86_64__)
#define FEDMPQ_X86 1
#elif defined(__aarch64__)
#define FEDMPQ_NEON 1
#endif

namespace fedmpq {

enum class Isa { scalar, neon, neon_dot, avx2, avx512 };

Isa active_isa();

}  // namespace fedmpq
