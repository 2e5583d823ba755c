// What boards have changed a layer by, in whole numbers, one table of functions per instruction set. fedmpq/kernels.h
// states the formulas.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fedmpq {

// Weights are gone through in tiles that stay in the first cache: the codes of some boards, the places and the sums.
constexpr int64_t change_tile = 1024, change_boards = 8;
// Seven codes from the byte of a plane on that the first of a tile is in, and what a register reads beyond the last.
constexpr int64_t change_room = 72;

// The codes low..high have cells that changes are kept within; none have where low > high.
struct CodeCells {
  int32_t low, high;
};

// Codes of one board and row: they stand for scale * code + offset units, and the change counts `weight` times.
struct BoardCodes {
  const uint8_t* codes;
  int32_t scale, offset, weight;
};

// out[i] = the change at place i, n of them.
using Changes = void(const BoardCodes& board, const int32_t* places, int64_t n, const CodeCells& cells, double* out);
// sums[i] += weight * the change at place i of each of so many boards; n is at most change_tile.
using AddChanges = void(const BoardCodes* boards, int64_t count, const int32_t* places, int64_t n, const CodeCells& cells,
                        int64_t* sums);

// places[i] of the weights of one row, with units added to all of them.
using Places = void(const float* weights, const uint8_t* codes, int64_t n, float step, const CodeCells& cells,
                    int32_t units, int32_t* places);

struct ChangeKernels {
  Changes* changes;
  AddChanges* add;
  Places* places;
};

extern const ChangeKernels changes_scalar;
#ifdef FEDMPQ_X86
extern const ChangeKernels changes_avx2;
extern const ChangeKernels changes_avx512;
#endif
#ifdef FEDMPQ_NEON
extern const ChangeKernels changes_neon;
#endif

}  // namespace fedmpq
