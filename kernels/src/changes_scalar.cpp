#include "changes.h"

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

#include "changes.inc"

}  // namespace

const ChangeKernels changes_scalar = {changes<double>, add, places};

}  // namespace fedmpq
