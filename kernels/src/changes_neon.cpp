#include "changes.h"

#ifdef FEDMPQ_NEON

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

#include "changes.inc"

}  // namespace

const ChangeKernels changes_neon = {changes<double>, add, places};

}  // namespace fedmpq

#endif
