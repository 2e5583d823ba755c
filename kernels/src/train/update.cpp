// The update of one layer's codes: weight decay, momentum, the stochastic move and the Lasso's, weight by weight.
// fedmpq.training.update is its slow twin; both give the same codes.
#include <atomic>
#include <cstring>

#include "bounds.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "philox.h"
#include "threads.h"

using fedmpq::ops;

namespace {

constexpr int64_t block = 128;  // weights that share a momentum scale
constexpr int64_t chunk = 1024;  // weights at a time; a multiple of `block` and of a Philox block

fedmpq::PhiloxStream draws(const FedmpqUpdate& u, uint32_t step_number, uint32_t purpose) {
  return {step_number, u.round, u.layer * 16 + purpose, u.seed, u.client};
}

// direction[i] = momentum * buffer + decayed gradient, the buffer of 8-bit numbers replaced by it.
void push_momentum(const FedmpqUpdate& u, int64_t first, int64_t count, float* direction) {
  int8_t* codes = static_cast<int8_t*>(u.momentum_codes) + first;
  float* scale = u.momentum_scales + first / block;
  for (int64_t start = 0; start < count; start += block, ++scale)
    *scale = ops().push_momentum(codes + start, *scale, u.momentum, count - start < block ? count - start : block,
                                 direction + start);
}

struct Range {
  int32_t low, high, middle;
  float zero;
};

// The Lasso's pull by magnitude, as far as a code can move at most, so that the integer it becomes exists.
struct Pull {
  float by_magnitude[128] = {};
  float greatest = 0.0f;

  Pull(const float* table, int32_t magnitudes) {
    for (int32_t m = 0; m < magnitudes && table != nullptr; ++m) {
      by_magnitude[m] = table[m] > 0.0f ? (table[m] < 256.0f ? table[m] : 256.0f) : 0.0f;
      greatest = by_magnitude[m] > greatest ? by_magnitude[m] : greatest;
    }
  }

  // Whether a code may move by one of these numbers: most pulls are so weak that few chunks have a number close enough to 1.
  bool moves(const float* uniforms, int64_t count) const {
    const uint32_t bits = ops().greatest_bits(uniforms, count);
    float most;
    std::memcpy(&most, &bits, sizeof most);
    return greatest + most >= 1.0f;
  }
};

bool finite(const float* values, int64_t count) { return ops().greatest_bits(values, count) < fedmpq::infinite_bits; }

// One layer's update, a chunk of its weights at a time.
struct LayerUpdate {
  const FedmpqUpdate& u;
  uint32_t step_number;
  const float* gradient;
  uint8_t* codes;
  Range range;
  Pull pull;

  LayerUpdate(const FedmpqUpdate& update, uint32_t number, const float* from, uint8_t* to)
      : u(update),
        step_number(number),
        gradient(from),
        codes(to),
        range{u.bits == 8 ? 1 : 0, (1 << u.bits) - 1, 1 << (u.bits - 1),
              u.bits == 8 ? 128.0f : static_cast<float>((1 << u.bits) - 1) / 2},
        pull(u.pull, range.middle) {}

  // For each stretch of a chunk that shares a step and a rate: body(first, count, row), counted from the chunk's start.
  template <class Body>
  void stretches(int64_t start, int64_t count, Body body) const {
    for (int64_t i = 0; i < count;) {
      const int64_t row = (start + i) / u.row, end = (row + 1) * u.row - start < count ? (row + 1) * u.row - start : count;
      body(i, end - i, row);
      i = end;
    }
  }

  // False if the gradient and the momentum together are not finite.
  bool move(int64_t start, int64_t count) const {
    float direction[chunk], uniforms[chunk];
    float* floats = u.momentum_bits == 32 ? static_cast<float*>(u.momentum_codes) : nullptr;
    uint8_t* code = codes + start;
    stretches(start, count, [&](int64_t i, int64_t size, int64_t row) {
      ops().decay({range.zero, u.step[row], u.weight_decay, u.momentum}, gradient + start + i, code + i, size,
                  floats != nullptr ? floats + start + i : nullptr, direction + i);
    });
    if (u.momentum_bits == 8) push_momentum(u, start, count, direction);
    if (!finite(direction, count)) return false;
    fedmpq::philox_uniform(draws(u, step_number, 0), static_cast<uint32_t>(start / 4), count, uniforms);
    stretches(start, count, [&](int64_t i, int64_t size, int64_t row) {
      const fedmpq::Move move{direction + i, uniforms + i, size, u.rate[row], u.bits, range.low, range.high};
      if (u.fractions == nullptr)
        ops().move_paper(move, code + i);
      else
        ops().move_carried(move, code + i, u.fractions + start + i);
    });
    if (u.fractions != nullptr || u.pull == nullptr) return true;
    fedmpq::philox_uniform(draws(u, step_number, 1), static_cast<uint32_t>(start / 4), count, uniforms);
    if (pull.moves(uniforms, count)) ops().move_lasso({pull.by_magnitude, uniforms, count, range.low, range.middle}, code);
    return true;
  }
};

// Whether body(first, count) is true of every part of so many weights; threads share the parts.
template <class Body>
bool of_all(int64_t weights, int threads, int64_t part, const Body& body) {
  std::atomic<bool> all{true};
  fedmpq::parallel(static_cast<int>((weights + part - 1) / part), threads, [&](int item, int) {
    const int64_t first = item * part;
    if (!body(first, weights - first < part ? weights - first : part)) all = false;
  });
  return all;
}

}  // namespace

int32_t fedmpq_update_codes(const FedmpqUpdate* update, uint32_t step_number, int32_t threads, const float* gradient,
                            uint8_t* codes) {
  if (!fedmpq::is_valid(update) || !fedmpq::given(gradient, codes)) return fedmpq::not_valid;
  constexpr int64_t part = 8 * chunk;  // which takes longer than to hand it to another thread
  const auto is_finite = [&](int64_t first, int64_t count) { return finite(gradient + first, count); };
  if (!of_all(update->count, threads, part, is_finite)) return fedmpq::not_finite;
  const LayerUpdate layer(*update, step_number, gradient, codes);
  const auto move = [&](int64_t first, int64_t count) {
    for (int64_t done = 0; done < count; done += chunk)
      if (!layer.move(first + done, count - done < chunk ? count - done : chunk)) return false;
    return true;
  };
  return of_all(update->count, threads, part, move) ? 0 : fedmpq::not_finite;
}
