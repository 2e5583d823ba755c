// The step with which a grid has the least error. The terms of a row are added as NumPy adds a contiguous row: in
// blocks of up to 128, eight partial sums in each, blocks in pairs. A search for steps by either gives the same steps.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "bounds.h"
#include "fedmpq/kernels.h"
#include "isa.h"
#include "train/buffer.h"
#include "train/threads.h"

#define FEDMPQ_INLINE inline __attribute__((always_inline))

namespace fedmpq {
namespace {

constexpr int64_t lanes = 8;
constexpr int64_t block = 128;
// Added and taken away again, it leaves a float of less than 2^22 rounded to a whole number, ties to even.
constexpr float rounding = 12582912.0f;
constexpr int64_t most = int64_t{1} << 40;

typedef float Lanes __attribute__((vector_size(sizeof(float) * lanes)));
typedef double WideLanes __attribute__((vector_size(sizeof(double) * lanes)));
// Sums over a row of up to four things.
typedef float Four __attribute__((vector_size(sizeof(float) * 4)));

struct FourLanes {
  Lanes of[4];

  FEDMPQ_INLINE FourLanes& operator+=(const FourLanes& other) {
    for (int i = 0; i < 4; ++i) of[i] += other.of[i];
    return *this;
  }
};

FEDMPQ_INLINE double widened(float value) { return static_cast<double>(value); }
FEDMPQ_INLINE WideLanes widened(Lanes values) { return __builtin_convertvector(values, WideLanes); }

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

// t = code - zero of a weight. Clipping to whole numbers before rounding gives what clipping after it does.
template <typename Value>
FEDMPQ_INLINE Value centred(Value weight, float step, const Grid& grid) {
  const Value low = Value{} + grid.low, high = Value{} + grid.high;
  Value code = weight / step + grid.zero;
  code = code < low ? low : code;
  code = code > high ? high : code;
  return ((code + rounding) - rounding) - grid.zero;
}

template <typename Value>
FEDMPQ_INLINE Value off(Value weight, float step, const Grid& grid) {
  return weight - centred(weight, step, grid) * step;
}

// What is added up over a row: (w - t*step)^2 for `count` steps at once,
template <int count>
struct SquaredErrors {
  const float* steps;
  const Grid& grid;

  FEDMPQ_INLINE FourLanes operator()(Lanes weight) const {
    FourLanes terms{};
    for (int i = 0; i < count; ++i) {
      const Lanes difference = off(weight, steps[i], grid);
      terms.of[i] = difference * difference;
    }
    return terms;
  }
  FEDMPQ_INLINE Four operator()(float weight) const {
    Four terms{};
    for (int i = 0; i < count; ++i) {
      const float difference = off(weight, steps[i], grid);
      terms[i] = difference * difference;
    }
    return terms;
  }
};

// t^2 and w*t,
struct EnergyAndProduct {
  float step;
  const Grid& grid;

  FEDMPQ_INLINE FourLanes operator()(Lanes weight) const {
    const Lanes code = centred(weight, step, grid);
    return {{code * code, weight * code, Lanes{}, Lanes{}}};
  }
  FEDMPQ_INLINE Four operator()(float weight) const {
    const float code = centred(weight, step, grid);
    return Four{code * code, weight * code, 0.0f, 0.0f};
  }
};

// (w - t*step)^2, squared in double precision,
struct Noise {
  float step;
  const Grid& grid;
  template <typename Value>
  FEDMPQ_INLINE auto operator()(Value weight) const {
    const auto difference = widened(off(weight, step, grid));
    return difference * difference;
  }
};

// or w^2.
struct Square {
  template <typename Value>
  FEDMPQ_INLINE Value operator()(Value weight) const {
    return weight * weight;
  }
};

// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
template <typename Sums>
FEDMPQ_INLINE auto folded(const Sums& sums) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

FEDMPQ_INLINE Four folded(const FourLanes& sums) {
  return Four{folded(sums.of[0]), folded(sums.of[1]), folded(sums.of[2]), folded(sums.of[3])};
}

template <typename Term>
FEDMPQ_INLINE auto block_sum(const float* weights, int64_t n, const Term& term) {
  int64_t i = 0;
  decltype(term(0.0f)) sum{};
  if (n >= lanes) {
    auto sums = term(load(weights));
    for (i = lanes; i + lanes <= n; i += lanes) sums += term(load(weights + i));
    sum = folded(sums);
  }
  for (; i < n; ++i) sum += term(weights[i]);
  return sum;
}

// NumPy halves a row until no part is longer than a block, each first half a multiple of eight. The halves that are still
// to be added wait on a stack, which no row can fill.
template <typename Term>
FEDMPQ_INLINE auto row_sum(const float* weights, int64_t n, const Term& term) {
  using Sum = decltype(term(0.0f));
  struct Part {
    int64_t begin, size;
    bool has_left;
    Sum left;
  };
  const Sum none = Sum{};
  Part stack[64];
  int depth = 0;
  stack[0] = {0, n, false, none};
  for (;;) {
    while (stack[depth].size > block) {
      int64_t half = stack[depth].size / 2;
      half -= half % lanes;
      stack[depth + 1] = {stack[depth].begin, half, false, none};
      ++depth;
    }
    auto sum = block_sum(weights + stack[depth].begin, stack[depth].size, term);
    for (--depth; depth >= 0 && stack[depth].has_left; --depth) sum = stack[depth].left + sum;
    if (depth < 0) return sum;
    Part& parent = stack[depth];
    int64_t half = parent.size / 2;
    half -= half % lanes;
    parent.left = sum;
    parent.has_left = true;
    stack[depth + 1] = {parent.begin + half, parent.size - half, false, none};
    ++depth;
  }
}

// The search for the step with the least error: ever finer geometric series of steps on a sample, from a grid that reaches
// `narrowest` deviations either side to one that spans the weights; then codes for the step and the step for the codes in
// turns on the whole row, `step = sum w*t / sum t^2`.
constexpr int series = 16;
constexpr int searches = 3;
constexpr int alternations = 3;
constexpr double narrowest = 0.25;
constexpr float least_step = 0x1p-30f;

FEDMPQ_INLINE float larger(float a, float b) { return a > b ? a : b; }
FEDMPQ_INLINE float smaller(float a, float b) { return a < b ? a : b; }

// Rounded once from double precision, so that it does not matter whose library has computed it.
FEDMPQ_INLINE float power(float base, float exponent) {
  return static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
}

FEDMPQ_INLINE float spanning_step(const float* row, int64_t length, const Grid& grid) {
  Lanes low{}, high{};
  int64_t i = 0;
  for (; i + lanes <= length; i += lanes) {
    const Lanes weights = load(row + i);
    low = weights < low ? weights : low;
    high = weights > high ? weights : high;
  }
  float widest = 0.0f;
  for (int lane = 0; lane < lanes; ++lane) widest = larger(widest, larger(-low[lane], high[lane]));
  for (; i < length; ++i) widest = larger(widest, std::fabs(row[i]));
  return larger(static_cast<float>(2.0 / static_cast<double>(grid.high)) * widest, least_step);
}

FEDMPQ_INLINE float searched_step(const float* sample, int64_t length, float spanning, const Grid& grid) {
  const float deviation = std::sqrt(row_sum(sample, length, Square{}) / static_cast<float>(length));
  const float narrow = deviation * static_cast<float>(2.0 * narrowest / static_cast<double>(grid.high));
  float low = smaller(larger(narrow, least_step), spanning), high = spanning, step = spanning;
  for (int search = 0; search < searches; ++search) {
    const float ratio = high / low;
    const auto candidate = [&](int k) {
      return low * power(ratio, static_cast<float>(static_cast<double>(k) / (series - 1)));
    };
    float least = 0.0f;
    for (int k = 0; k < series; k += 4) {
      const float steps[4] = {candidate(k), candidate(k + 1), candidate(k + 2), candidate(k + 3)};
      const Four errors = row_sum(sample, length, SquaredErrors<4>{steps, grid});
      for (int i = 0; i < 4; ++i) {
        if (k + i > 0 && !(errors[i] < least)) continue;
        least = errors[i];
        step = steps[i];
      }
    }
    const float gap = power(ratio, static_cast<float>(1.0 / (series - 1)));
    low = larger(step / gap, least_step);
    high = smaller(step * gap, spanning);
  }
  return step;
}

FEDMPQ_INLINE float settled_step(const float* row, int64_t length, float step, const Grid& grid) {
  for (int i = 0; i < alternations; ++i) {
    const Four sums = row_sum(row, length, EnergyAndProduct{step, grid});
    if (sums[0] > 0.0f) step = larger(sums[1] / larger(sums[0], 1e-12f), least_step);
  }
  return step;
}

FEDMPQ_INLINE void all_steps(const float* rows, int64_t count, int64_t length, const float* samples, int64_t sampled,
                             int32_t bits, float* steps) {
  const Grid grid(bits);
  for (int64_t r = 0; r < count; ++r) {
    const float* row = rows + r * length;
    const float spanning = spanning_step(row, length, grid);
    const float step = settled_step(row, length, searched_step(samples + r * sampled, sampled, spanning, grid), grid);
    const float both[2] = {step, spanning};
    const Four errors = row_sum(row, length, SquaredErrors<2>{both, grid});
    steps[r] = errors[0] < errors[1] ? step : spanning;
  }
}

FEDMPQ_INLINE void all_noise(const float* rows, int64_t count, int64_t length, const float* steps, int32_t bits,
                             double* noise) {
  const Grid grid(bits);
  for (int64_t r = 0; r < count; ++r) noise[r] = row_sum(rows + r * length, length, Noise{steps[r], grid});
}

#ifdef FEDMPQ_X86
__attribute__((target("avx2"))) void all_steps_avx2(const float* rows, int64_t count, int64_t length, const float* samples,
                                                    int64_t sampled, int32_t bits, float* steps) {
  all_steps(rows, count, length, samples, sampled, bits, steps);
}

__attribute__((target("avx2"))) void all_noise_avx2(const float* rows, int64_t count, int64_t length, const float* steps,
                                                    int32_t bits, double* noise) {
  all_noise(rows, count, length, steps, bits, noise);
}

bool has_avx2() {
  const Isa isa = active_isa();
  return isa == Isa::avx2 || isa == Isa::avx_vnni || isa == Isa::avx512_vnni || isa == Isa::avx512;
}
#endif

bool within(int64_t size, int64_t least) { return size >= least && size <= most; }

void write_steps(const float* rows, int64_t count, int64_t length, const float* samples, int64_t sampled, int32_t bits,
                 float* steps) {
#ifdef FEDMPQ_X86
  if (has_avx2()) return all_steps_avx2(rows, count, length, samples, sampled, bits, steps);
#endif
  all_steps(rows, count, length, samples, sampled, bits, steps);
}

void write_noise(const float* rows, int64_t count, int64_t length, const float* steps, int32_t bits, double* noise) {
#ifdef FEDMPQ_X86
  if (has_avx2()) return all_noise_avx2(rows, count, length, steps, bits, noise);
#endif
  all_noise(rows, count, length, steps, bits, noise);
}

int64_t sample_stride(int64_t length, int64_t searched) {
  int64_t stride = length / searched > 1 ? length / searched : 1;
  while (std::gcd(stride, length) > 1) ++stride;
  return stride;
}

// Steps and noise of the rows of one grid; false if there is no memory for its sample.
bool find_grid(const float* rows, int64_t count, int64_t length, int64_t searched, int32_t bits, float* steps,
               double* noise) {
  const int64_t stride = sample_stride(length, searched), sampled = (length + stride - 1) / stride;
  if (stride == 1) {
    write_steps(rows, count, length, rows, length, bits, steps);
  } else {
    const Buffer<float> sample(sampled);
    if (!sample) return false;
    for (int64_t r = 0; r < count; ++r) {
      const float* row = rows + r * length;
      for (int64_t i = 0; i < sampled; ++i) sample.data()[i] = row[i * stride];
      write_steps(row, 1, length, sample.data(), sampled, bits, steps + r);
    }
  }
  write_noise(rows, count, length, steps, bits, noise);
  return true;
}

}  // namespace
}  // namespace fedmpq

int32_t fedmpq_grid_noise(const float* rows, int64_t count, int64_t length, const float* steps, int32_t bits,
                          double* noise) {
  const bool sizes = fedmpq::within(count, 0) && fedmpq::within(length, 0);
  if (!sizes || bits < 1 || bits > 8 || !fedmpq::given(rows, steps, noise)) return fedmpq::not_valid;
  fedmpq::write_noise(rows, count, length, steps, bits, noise);
  return 0;
}

int32_t fedmpq_least_error_grids(const float* weights, int64_t size, const int64_t* starts, const int64_t* counts,
                                 const int64_t* lengths, const int32_t* bits, int64_t grids, int64_t searched,
                                 int32_t threads, const int64_t* firsts, int64_t room, float* steps, double* noise) {
  if (!fedmpq::within(size, 0) || !fedmpq::within(room, 0) || grids < 0 || grids > INT32_MAX) return fedmpq::not_valid;
  if (searched < 1) return fedmpq::not_valid;
  if (!fedmpq::given(weights, starts, counts, lengths, bits, firsts, steps, noise)) return fedmpq::not_valid;
  for (int64_t g = 0; g < grids; ++g) {
    if (bits[g] < 1 || bits[g] > 8 || lengths[g] < 1 || lengths[g] > size || counts[g] < 1) return fedmpq::not_valid;
    if (counts[g] > size / lengths[g] || starts[g] < 0 || starts[g] > size - counts[g] * lengths[g]) return fedmpq::not_valid;
    if (counts[g] > room || firsts[g] < 0 || firsts[g] > room - counts[g]) return fedmpq::not_valid;
  }
  std::atomic<bool> has_memory{true};
  fedmpq::parallel(static_cast<int>(grids), fedmpq::threads_of(threads), [&](int g, int) {
    const int64_t start = starts[g], first = firsts[g];
    if (!fedmpq::find_grid(weights + start, counts[g], lengths[g], searched, bits[g], steps + first, noise + first))
      has_memory.store(false, std::memory_order_relaxed);
  });
  return has_memory.load(std::memory_order_relaxed) ? 0 : fedmpq::no_memory;
}
