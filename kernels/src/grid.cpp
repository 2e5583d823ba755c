// Errors of weights on grids. The weights of a row are added as NumPy adds a contiguous row: in blocks of up to 128, eight
// partial sums in each, blocks in pairs. A search for steps by either gives the same steps to the bit.
#include <cstdint>

#include "bounds.h"
#include "fedmpq/kernels.h"
#include "isa.h"

#define FEDMPQ_INLINE inline __attribute__((always_inline))

namespace fedmpq {
namespace {

constexpr int64_t lanes = 8;
constexpr int64_t block = 128;
// Added and taken away again, it leaves a float of less than 2^22 rounded to a whole number, ties to even.
constexpr float rounding = 12582912.0f;
constexpr int64_t most = int64_t{1} << 40;

typedef float Lanes __attribute__((vector_size(sizeof(float) * lanes)));

struct Grid {
  float zero, low, high;

  explicit Grid(int32_t bits)
      : zero(bits == 8 ? 128.0f : static_cast<float>((1 << bits) - 1) / 2.0f),
        low(bits == 8 ? 1.0f : 0.0f),
        high(static_cast<float>((1 << bits) - 1)) {}
};

FEDMPQ_INLINE Lanes load(const float* from) {
  Lanes values;
  __builtin_memcpy(&values, from, sizeof values);
  return values;
}

// Clipping to whole numbers before rounding gives what clipping after it does.
template <typename Value>
FEDMPQ_INLINE Value squared_error(Value weight, float step, const Grid& grid) {
  const Value low = Value{} + grid.low, high = Value{} + grid.high;
  Value code = weight / step + grid.zero;
  code = code < low ? low : code;
  code = code > high ? high : code;
  code = (code + rounding) - rounding;
  const Value difference = weight - (code - grid.zero) * step;
  return difference * difference;
}

FEDMPQ_INLINE float block_sum(const float* weights, int64_t n, float step, const Grid& grid) {
  int64_t i = 0;
  float sum = 0.0f;
  if (n >= lanes) {
    Lanes sums = squared_error(load(weights), step, grid);
    for (i = lanes; i + lanes <= n; i += lanes) sums += squared_error(load(weights + i), step, grid);
    sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }
  for (; i < n; ++i) sum += squared_error(weights[i], step, grid);
  return sum;
}

// NumPy halves a row until no part is longer than a block, each first half a multiple of eight. The halves that are still
// to be added wait on a stack, which no row can fill.
FEDMPQ_INLINE float row_sum(const float* weights, int64_t n, float step, const Grid& grid) {
  struct Part {
    int64_t begin, size;
    bool has_left;
    float left;
  };
  Part stack[64];
  int depth = 0;
  stack[0] = {0, n, false, 0.0f};
  for (;;) {
    while (stack[depth].size > block) {
      int64_t half = stack[depth].size / 2;
      half -= half % lanes;
      stack[depth + 1] = {stack[depth].begin, half, false, 0.0f};
      ++depth;
    }
    float sum = block_sum(weights + stack[depth].begin, stack[depth].size, step, grid);
    for (--depth; depth >= 0 && stack[depth].has_left; --depth) sum = stack[depth].left + sum;
    if (depth < 0) return sum;
    Part& parent = stack[depth];
    int64_t half = parent.size / 2;
    half -= half % lanes;
    parent.left = sum;
    parent.has_left = true;
    stack[depth + 1] = {parent.begin + half, parent.size - half, false, 0.0f};
    ++depth;
  }
}

FEDMPQ_INLINE void all_errors(const float* rows, int64_t count, int64_t length, const float* steps, int64_t candidates,
                              int32_t bits, float* errors) {
  const Grid grid(bits);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t k = row * candidates; k < (row + 1) * candidates; ++k)
      errors[k] = row_sum(rows + row * length, length, steps[k], grid);
}

#ifdef FEDMPQ_X86
__attribute__((target("avx2"))) void all_errors_avx2(const float* rows, int64_t count, int64_t length, const float* steps,
                                                     int64_t candidates, int32_t bits, float* errors) {
  all_errors(rows, count, length, steps, candidates, bits, errors);
}
#endif

}  // namespace
}  // namespace fedmpq

int32_t fedmpq_grid_errors(const float* rows, int64_t count, int64_t length, const float* steps, int64_t candidates,
                           int32_t bits, float* errors) {
  const bool sizes = count >= 0 && length >= 0 && candidates >= 0 && count <= fedmpq::most && length <= fedmpq::most &&
                     candidates <= fedmpq::most;
  if (!sizes || bits < 1 || bits > 8 || !fedmpq::given(rows, steps, errors)) return fedmpq::not_valid;
#ifdef FEDMPQ_X86
  if (fedmpq::active_isa() == fedmpq::Isa::avx2 || fedmpq::active_isa() == fedmpq::Isa::avx512) {
    fedmpq::all_errors_avx2(rows, count, length, steps, candidates, bits, errors);
    return 0;
  }
#endif
  fedmpq::all_errors(rows, count, length, steps, candidates, bits, errors);
  return 0;
}
