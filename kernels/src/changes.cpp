#include "changes.h"

#include <algorithm>

#include "bounds.h"
#include "fedmpq/kernels.h"
#include "planes.h"

namespace fedmpq {
namespace {

constexpr int64_t most_boards = int64_t{1} << 20, most_weights = int64_t{1} << 28;
constexpr float most_step = 3.4028234e38f;

const ChangeKernels& active() {
  switch (active_isa()) {
#ifdef FEDMPQ_X86
    case Isa::avx512:
    case Isa::avx512_vnni:
      return changes_avx512;
    case Isa::avx_vnni:
    case Isa::avx2:
      return changes_avx2;
#endif
#ifdef FEDMPQ_NEON
    case Isa::sve:
    case Isa::neon_i8mm:
    case Isa::neon_dot:
    case Isa::neon:
      return changes_neon;
#endif
    default:
      return changes_scalar;
  }
}

bool is_layer(int64_t rows, int64_t row, int32_t bits) {
  return bits >= 1 && bits <= 8 && rows >= 1 && rows <= most_weights && row >= 1 && row <= most_weights / rows;
}

bool is_valid(const FedmpqChanges* changes) {
  if (changes == nullptr) return false;
  const FedmpqChanges& c = *changes;
  if (!is_layer(c.rows, c.row, c.bits) || c.boards < 0 || c.boards > most_boards) return false;
  if (!given(c.planes, c.steps, c.places)) return false;
  return std::all_of(c.steps, c.steps + c.boards * c.rows,
                     [](int32_t step) { return step >= 1 && step <= FEDMPQ_MOST_CHANGE_STEP; });
}

int64_t plane_bytes(const FedmpqChanges& c) { return (c.rows * c.row + 7) / 8; }

// The first board with a padding bit set, or -1.
int64_t padded(const FedmpqChanges& c) {
  const int64_t unused = c.rows * c.row % 8;
  if (unused == 0) return -1;
  for (int64_t plane = 0; plane < c.boards * c.bits; ++plane)
    if (c.planes[(plane + 1) * plane_bytes(c) - 1] >> unused != 0) return plane / c.bits;
  return -1;
}

// Code 0 is not in use at 8 bits.
CodeCells cells_of(int32_t bits) { return {bits == 8 ? 1 : 0, (1 << bits) - 1}; }
CodeCells cells_of(const FedmpqChanges& c) { return c.within != 0 ? cells_of(c.bits) : CodeCells{1, 0}; }

int32_t twice_zero(int32_t bits) { return bits == 8 ? 256 : (1 << bits) - 1; }

BoardCodes board_codes(const FedmpqChanges& c, int64_t board, int64_t row, const uint8_t* codes, int32_t weight) {
  const int32_t step = c.steps[board * c.rows + row];
  return {codes, 2 * step, -twice_zero(c.bits) * step, weight};
}

// The codes of the weights first..last-1 of a board, which are within a tile; `codes` has room for seven more.
const uint8_t* unpacked(const FedmpqChanges& c, int64_t board, int64_t first, int64_t last, uint8_t* codes) {
  const int64_t start = first - first % 8;
  const uint8_t* planes = c.planes + board * c.bits * plane_bytes(c) + start / 8;
  active_planes().unpack[c.bits - 1](planes, plane_bytes(c), last - start, codes);
  return codes + (first - start);
}

// body(row, first, count) for the parts of one row each of the weights first..last-1.
template <class Body>
void each_row(const FedmpqChanges& c, int64_t first, int64_t last, const Body& body) {
  while (first < last) {
    const int64_t row = first / c.row, end = std::min(last, (row + 1) * c.row);
    body(row, first, end - first);
    first = end;
  }
}

// A tile of the boards board..board+count-1, at most change_boards of them.
void add_tile(const FedmpqChanges& c, int64_t board, int64_t count, int64_t first, int64_t last, const int32_t* weights,
              int64_t* sums) {
  uint8_t codes[change_boards][change_tile + change_room];
  for (int64_t i = 0; i < count; ++i) unpacked(c, board + i, first, last, codes[i]);
  each_row(c, first, last, [&](int64_t row, int64_t at, int64_t n) {
    BoardCodes boards[change_boards];
    for (int64_t i = 0; i < count; ++i)
      boards[i] = board_codes(c, board + i, row, codes[i] + (at - first), weights[board + i]);
    active().add(boards, count, c.places + at, n, cells_of(c), sums + at);
  });
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int64_t fedmpq_add_changes(const FedmpqChanges* changes, const int32_t* weights, int64_t* sums) {
  if (!is_valid(changes) || !given(weights, sums)) return not_valid;
  const FedmpqChanges& c = *changes;
  for (int64_t board = 0; board < c.boards; ++board)
    if (weights[board] < 0) return not_valid;
  if (const int64_t board = padded(c); board >= 0) return board;
  const int64_t m = c.rows * c.row;
  for (int64_t first = 0; first < m; first += change_tile)
    for (int64_t board = 0; board < c.boards; board += change_boards)
      add_tile(c, board, std::min(change_boards, c.boards - board), first, std::min(m, first + change_tile), weights, sums);
  return -1;
}

int64_t fedmpq_changes(const FedmpqChanges* changes, int64_t first, int64_t count, double* out) {
  if (!is_valid(changes) || out == nullptr) return not_valid;
  const FedmpqChanges& c = *changes;
  const int64_t m = c.rows * c.row;
  if (first < 0 || first > m || count < 0 || count > m - first) return not_valid;
  if (const int64_t board = padded(c); board >= 0) return board;
  uint8_t room[change_tile + change_room];
  for (int64_t board = 0; board < c.boards; ++board)
    for (int64_t start = first; start < first + count; start += change_tile) {
      const int64_t last = std::min(first + count, start + change_tile);
      const uint8_t* codes = unpacked(c, board, start, last, room);
      each_row(c, start, last, [&](int64_t row, int64_t at, int64_t n) {
        const BoardCodes one = board_codes(c, board, row, codes + (at - start), 0);
        active().changes(one, c.places + at, n, cells_of(c), out + board * count + (at - first));
      });
    }
  return -1;
}

int32_t fedmpq_places(const float* weights, const uint8_t* codes, const float* steps, int64_t rows, int64_t row,
                      int32_t bits, int32_t* places) {
  if (!is_layer(rows, row, bits) || !given(weights, codes) || !given(steps, places)) return not_valid;
  // What is not a number is above nothing.
  if (!std::all_of(steps, steps + rows, [](float step) { return step > 0.0f && step <= most_step; })) return not_valid;
  const int32_t units = twice_zero(bits) * (1 << FEDMPQ_CHANGE_BITS) / 2;
  for (int64_t r = 0; r < rows; ++r)
    active().places(weights + r * row, codes + r * row, row, steps[r], cells_of(bits), units, places + r * row);
  return 0;
}
