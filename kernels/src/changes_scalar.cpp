#include "changes.h"

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

#include "changes.inc"

}  // namespace

const ChangeKernels changes_scalar = {changes, add};

}  // namespace fedmpq
