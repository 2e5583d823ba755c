#include "changes.h"

#ifdef FEDMPQ_X86

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

#include "changes.inc"

}  // namespace

const ChangeKernels changes_avx512 = {changes<double>, add, places};

}  // namespace fedmpq

#endif
