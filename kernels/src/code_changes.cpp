// What layers have changed by, in whole numbers, on the grid of whole steps that lies nearest.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bounds.h"
#include "fedmpq/kernels.h"
#include "train/buffer.h"

namespace fedmpq {
namespace {

// A change is fraction + 256 (trained - sent), and stands here as twice that, plus 1 at odd places of the row.
constexpr int fractions_of_code = 256;
constexpr int32_t most_twice = 2 * (fractions_of_code * 255 + 128) + 1;
constexpr int64_t most_weights = int64_t{1} << 28;
constexpr int rounds = 3, series = 12;
// Changes are counted in an array of their range, unless that is so many times as long as the row.
constexpr int64_t dense = 8;

// The grid of one step. A code is a quotient rounded down, of whole numbers that a double holds exactly. That quotient is a
// whole number or at least 2^-18 away from one, and rounding moves numbers within the codes by less than 2^-44.
struct Grid {
  int64_t step, factor, offset, zero;
  double divisor, low, high;

  Grid(int64_t s, int bits)
      : step(s),
        factor(bits == 8 ? 2 : 1),
        offset(bits == 8 ? 257 * s : s << (bits - 1)),
        zero(bits == 8 ? 256 : (1 << bits) - 1),
        divisor(static_cast<double>(factor * s)),
        low(bits == 8 ? 1 : 0),
        high((1 << bits) - 1) {}

  int64_t code(int32_t twice) const {
    const int64_t change = twice >> 1, odd = twice & 1;
    const double place = static_cast<double>(factor * change + offset - (factor == 2 ? 0 : odd)) / divisor;
    return static_cast<int64_t>(place < low ? low : (place > high ? high : place));
  }

  uint64_t squared_error(int32_t twice) const {
    const int64_t change = twice >> 1;
    const uint64_t apart = static_cast<uint64_t>(2 * change - step * (2 * code(twice) - zero));
    return apart * apart;
  }
};

struct Row {
  const uint8_t *sent, *trained;
  const int8_t* fractions;
  int64_t size;

  int32_t twice(int64_t i) const {
    const int32_t change = fractions_of_code * (trained[i] - sent[i]) + fractions[i];
    return 2 * change + static_cast<int32_t>(i & 1);
  }
};

// Every change that a row has and how often: weights are many, and their changes are whole numbers of a small range.
class Distinct {
 public:
  explicit Distinct(int64_t longest)
      : range_(dense * longest < 2 * most_twice ? dense * longest : 2 * most_twice),
        table_(range_ + 1),
        values_(longest),
        times_(longest) {}
  explicit operator bool() const { return table_ && values_ && times_; }

  void count(const Row& row) {
    int32_t least = 0, most = 0;
    for (int64_t i = 0; i < row.size; ++i) {
      const int32_t twice = row.twice(i);
      least = twice < least ? twice : least;
      most = twice > most ? twice : most;
    }
    least_ = least;
    widest_ = most >> 1 > -(least >> 1) ? most >> 1 : -(least >> 1);
    is_dense_ = most - least <= (dense * row.size < range_ ? dense * row.size : range_);
    size_ = 0;
    if (!is_dense_) {
      // A sum over all of them is the same sum.
      for (; size_ < row.size; ++size_) {
        values_.data()[size_] = row.twice(size_);
        times_.data()[size_] = 1;
      }
      return;
    }
    std::memset(table_.data(), 0, static_cast<size_t>(most - least + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < row.size; ++i) ++table_.data()[row.twice(i) - least];
    for (int32_t place = 0; place <= most - least; ++place) {
      if (table_.data()[place] == 0) continue;
      values_.data()[size_] = least + place;
      times_.data()[size_++] = table_.data()[place];
    }
  }

  // The greatest magnitude of a change.
  int64_t widest() const { return widest_; }

  // As it wraps in 64 bits.
  int64_t squared_error(const Grid& grid) const {
    uint64_t sum = 0;
    for (int64_t i = 0; i < size_; ++i)
      sum += static_cast<uint64_t>(times_.data()[i]) * grid.squared_error(values_.data()[i]);
    return static_cast<int64_t>(sum);
  }

  void write_codes(const Row& row, const Grid& grid, uint8_t* codes) {
    if (!is_dense_) {
      for (int64_t i = 0; i < row.size; ++i) codes[i] = static_cast<uint8_t>(grid.code(row.twice(i)));
      return;
    }
    for (int64_t i = 0; i < size_; ++i)
      table_.data()[values_.data()[i] - least_] = static_cast<int32_t>(grid.code(values_.data()[i]));
    for (int64_t i = 0; i < row.size; ++i) codes[i] = static_cast<uint8_t>(table_.data()[row.twice(i) - least_]);
  }

 private:
  int64_t range_;
  Buffer<int32_t> table_, values_, times_;
  int64_t size_ = 0, widest_ = 0;
  int32_t least_ = 0;
  bool is_dense_ = true;
};

// The whole number nearest to low (high/low)^(place/(series - 1)). Only an exact tie could come out differently where
// libraries differ in a power's last bit, and a power that is no whole number is irrational: there is none.
int64_t between(int64_t low, int64_t high, int place) {
  const double ratio = static_cast<double>(high) / static_cast<double>(low);
  return static_cast<int64_t>(
      std::nearbyint(static_cast<double>(low) * std::pow(ratio, static_cast<double>(place) / (series - 1))));
}

// Adds `step` to the ascending `tried`, unless it is there.
int with(int64_t* tried, int count, int64_t step) {
  int place = count;
  while (place > 0 && tried[place - 1] > step) --place;
  if (place > 0 && tried[place - 1] == step) return count;
  for (int i = count; i > place; --i) tried[i] = tried[i - 1];
  tried[place] = step;
  return count + 1;
}

// The best of a geometric series of whole steps up to one that spans the change, then of finer ones.
int64_t least_error_step(const Distinct& changes, int bits) {
  const int64_t reach = bits == 8 ? 254 : (1 << bits) - 1, span = (2 * changes.widest() + reach - 1) / reach;
  int64_t low = 1, best = span > 1 ? span : 1, high = best;
  for (int round = 0; round < rounds; ++round) {
    int64_t tried[series + 1];
    tried[0] = best;
    int count = 1, place = 0;
    for (int i = 0; i < series; ++i) count = with(tried, count, between(low, high, i));
    int64_t least = 0;
    for (int i = 0; i < count; ++i) {
      const int64_t error = changes.squared_error(Grid(tried[i], bits));
      if (i == 0 || error < least) {
        least = error;
        place = i;
      }
    }
    best = tried[place];
    low = tried[place > 0 ? place - 1 : 0];
    high = tried[place + 1 < count ? place + 1 : count - 1];
  }
  return best;
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_code_changes(const uint8_t* sent, const uint8_t* trained, const int8_t* fractions, int64_t rows, int64_t row,
                            int32_t bits, int32_t* steps, uint8_t* codes) {
  if (bits < 1 || bits > 8 || rows < 0 || rows > most_weights || row < 1 || row > most_weights) return not_valid;
  if (rows * row > most_weights || !given(sent, trained, fractions, steps, codes)) return not_valid;
  Distinct changes(row);
  if (!changes) return no_memory;
  for (int64_t r = 0; r < rows; ++r) {
    const Row one{sent + r * row, trained + r * row, fractions + r * row, row};
    changes.count(one);
    const int64_t step = least_error_step(changes, bits);
    steps[r] = static_cast<int32_t>(step);
    changes.write_codes(one, Grid(step, bits), codes + r * row);
  }
  return 0;
}
