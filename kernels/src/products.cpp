// Scalar products of rows of whole numbers. A sum of doubles is exact, in whatever order, as long as it is a whole number
// below 2^53: so many columns are summed before they are added to two int64, and all instruction sets give the same.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bounds.h"
#include "fedmpq/kernels.h"
#include "isa.h"
#include "train/buffer.h"

#define FEDMPQ_INLINE inline __attribute__((always_inline))

namespace fedmpq {
namespace {

constexpr int64_t most_rows = int64_t{1} << 20, most_columns = int64_t{1} << 28, exact = int64_t{1} << 53;
constexpr double most_number = static_cast<double>(int64_t{1} << 26);
// Columns of all rows at a time, which a second-level cache holds of some hundred rows. They are copied to rows that do not
// all begin at the same place of a page, as rows of a power of two would: a first-level cache has room for few such.
constexpr int64_t block = 256, stride = block + 8;
constexpr int64_t high = 4;
constexpr int lower_bits = 26;

template <int64_t lanes>
struct Vector {
  typedef double Type __attribute__((vector_size(sizeof(double) * lanes)));
};

template <int64_t lanes>
FEDMPQ_INLINE typename Vector<lanes>::Type load(const double* from) {
  typename Vector<lanes>::Type values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// sums[i, j] += the products of `tall` rows from `left` on with `broad` rows from `right` on, n columns of them.
template <int64_t lanes, int64_t tall, int64_t broad>
FEDMPQ_INLINE void add_tile(const double* left, const double* right, int64_t n, double* sums, int64_t rows) {
  typename Vector<lanes>::Type total[tall][broad] = {};
  int64_t at = 0;
  for (; at + lanes <= n; at += lanes) {
    typename Vector<lanes>::Type theirs[broad];
    for (int64_t j = 0; j < broad; ++j) theirs[j] = load<lanes>(right + j * stride + at);
    for (int64_t i = 0; i < tall; ++i) {
      const auto own = load<lanes>(left + i * stride + at);
      for (int64_t j = 0; j < broad; ++j) total[i][j] += own * theirs[j];
    }
  }
  for (int64_t i = 0; i < tall; ++i)
    for (int64_t j = 0; j < broad; ++j) {
      double sum = 0.0;
      for (int64_t lane = 0; lane < lanes; ++lane) sum += total[i][j][lane];
      for (int64_t rest = at; rest < n; ++rest) sum += left[i * stride + rest] * right[j * stride + rest];
      sums[i * rows + j] += sum;
    }
}

// The lower triangle of sums[rows, rows], and some of what is above it.
template <int64_t lanes, int64_t wide>
FEDMPQ_INLINE void add_block(const double* numbers, int64_t rows, int64_t n, double* sums) {
  for (int64_t i = 0; i < rows; i += high) {
    const int64_t last = std::min(i + high, rows);
    for (int64_t j = 0; j < last; j += wide) {
      if (last - i == high && j + wide <= rows) {
        add_tile<lanes, high, wide>(numbers + i * stride, numbers + j * stride, n, sums + i * rows + j, rows);
        continue;
      }
      for (int64_t a = i; a < last; ++a)
        for (int64_t b = j; b < std::min(j + wide, rows); ++b)
          add_tile<lanes, 1, 1>(numbers + a * stride, numbers + b * stride, n, sums + a * rows + b, rows);
    }
  }
}

void add_block_portable(const double* numbers, int64_t rows, int64_t n, double* sums) {
  add_block<2, 2>(numbers, rows, n, sums);
}

#ifdef FEDMPQ_X86
__attribute__((target("avx2"))) void add_block_avx2(const double* numbers, int64_t rows, int64_t n, double* sums) {
  add_block<4, 2>(numbers, rows, n, sums);
}

__attribute__((target("avx512f"))) void add_block_avx512(const double* numbers, int64_t rows, int64_t n, double* sums) {
  add_block<8, 4>(numbers, rows, n, sums);
}
#endif

auto active_block() {
  switch (active_isa()) {
#ifdef FEDMPQ_X86
    case Isa::avx512:
    case Isa::avx512_vnni:
      return add_block_avx512;
    case Isa::avx_vnni:
    case Isa::avx2:
      return add_block_avx2;
#endif
    default:
      return add_block_portable;
  }
}

// The greatest magnitude, or -1 if a number is not whole, or too large.
double greatest(const double* numbers, int64_t count) {
  double most = 0.0;
  bool whole = true;
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::fabs(numbers[i]);
    whole &= size <= most_number && static_cast<double>(static_cast<int32_t>(size <= most_number ? size : 0.5)) == size;
    most = size > most ? size : most;
  }
  return whole ? most : -1.0;
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_whole_products(const double* numbers, int64_t rows, int64_t columns, int64_t* upper, int64_t* lower) {
  if (rows < 0 || rows > most_rows || columns < 0 || columns > most_columns) return not_valid;
  if (!given(numbers, upper, lower)) return not_valid;
  const double most = greatest(numbers, rows * columns);
  if (most < 0) return not_valid;
  const int64_t square = static_cast<int64_t>(most) * static_cast<int64_t>(most);
  const int64_t together = square == 0 ? exact : std::max(int64_t{1}, exact / square);
  const Buffer<double> sums(rows * rows), some(rows * stride);
  if (!sums || !some) return no_memory;
  const auto add = active_block();
  for (int64_t first = 0; first < columns; first += std::min(together, columns)) {
    const int64_t last = std::min(columns, first + std::min(together, columns));
    std::memset(sums.data(), 0, static_cast<size_t>(rows * rows) * sizeof(double));
    for (int64_t at = first; at < last; at += block) {
      const int64_t n = std::min(block, last - at);
      for (int64_t i = 0; i < rows; ++i)
        std::memcpy(some.data() + i * stride, numbers + i * columns + at, static_cast<size_t>(n) * sizeof(double));
      add(some.data(), rows, n, sums.data());
    }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t whole = static_cast<int64_t>(sums.data()[i * rows + j]);
        upper[i * rows + j] += whole >> lower_bits;
        lower[i * rows + j] += whole & ((int64_t{1} << lower_bits) - 1);
      }
  }
  return 0;
}
