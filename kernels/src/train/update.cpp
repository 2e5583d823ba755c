// The update of one layer's codes: weight decay, momentum, the stochastic move and the Lasso's, weight by weight.
// fedmpq.training.update is its slow twin; both give the same codes.
#include <cstring>

#include "bounds.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "philox.h"

using fedmpq::ops;

namespace {

constexpr int64_t block = 128;  // weights that share a momentum scale
constexpr int64_t chunk = 1024;  // weights at a time; a multiple of `block` and of a Philox block

fedmpq::PhiloxStream draws(const FedmpqUpdate& u, uint32_t purpose) {
  return {u.step_number, u.round, u.layer * 16 + purpose, u.seed, u.client};
}

// direction[i] = momentum * buffer + decayed gradient, the buffer replaced by it.
void push_momentum(const FedmpqUpdate& u, int64_t first, int64_t count, float* direction) {
  if (u.momentum_bits == 32) {
    float* buffer = static_cast<float*>(u.momentum_codes) + first;
    for (int64_t i = 0; i < count; ++i) {
      buffer[i] = buffer[i] * u.momentum + direction[i];
      direction[i] = buffer[i];
    }
    return;
  }
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

// What the Lasso does to each code: looked up, since which codes follow one another cannot be foreseen.
struct Lasso {
  float pull[256];  // of a code's magnitude
  int32_t magnitude[256], sign[256];

  Lasso(const float* table, const Range& range) {
    for (int32_t c = 0; c <= range.high && table != nullptr; ++c) {
      sign[c] = c >= range.middle ? 1 : -1;
      magnitude[c] = c >= range.middle ? c - range.middle : range.middle - 1 - c;
      // As far as a code can move at most, so that the integer it becomes exists.
      const float wanted = table[magnitude[c]];
      pull[c] = wanted > 0.0f ? (wanted < 256.0f ? wanted : 256.0f) : 0.0f;
    }
  }

  // Towards zero, never past it.
  void move(const float* uniforms, int64_t count, const Range& range, uint8_t* codes) const {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t c = codes[i], most = magnitude[c];
      const int32_t drawn = static_cast<int32_t>(pull[c] + uniforms[i]);  // neither is negative
      const int32_t moved = c - sign[c] * (drawn < most ? drawn : most);
      codes[i] = static_cast<uint8_t>(moved < range.low ? range.low : moved);
    }
  }
};

bool finite(const float* values, int64_t count) {
  // An exponent of all ones marks infinity and NaN.
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= (bits & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
  }
  return bad == 0;
}

}  // namespace

int32_t fedmpq_update_codes(const FedmpqUpdate* update, const float* gradient, uint8_t* codes) {
  if (!fedmpq::is_valid(update) || !fedmpq::given(gradient, codes)) return fedmpq::not_valid;
  const FedmpqUpdate& u = *update;
  if (!finite(gradient, u.count)) return fedmpq::not_finite;
  const Range range{u.bits == 8 ? 1 : 0, (1 << u.bits) - 1, 1 << (u.bits - 1),
                    u.bits == 8 ? 128.0f : static_cast<float>((1 << u.bits) - 1) / 2};
  const Lasso lasso(u.pull, range);
  float direction[chunk], uniforms[chunk];
  // For each stretch of a chunk that shares a step and a rate: body(first, count, row), counted from the chunk's start.
  const auto stretches = [&u](int64_t start, int64_t count, auto body) {
    for (int64_t i = 0; i < count;) {
      const int64_t row = (start + i) / u.row, end = (row + 1) * u.row - start < count ? (row + 1) * u.row - start : count;
      body(i, end - i, row);
      i = end;
    }
  };
  for (int64_t start = 0; start < u.count; start += chunk) {
    const int64_t count = u.count - start < chunk ? u.count - start : chunk;
    uint8_t* code = codes + start;
    stretches(start, count, [&](int64_t i, int64_t size, int64_t row) {
      ops().decay(gradient + start + i, code + i, size, range.zero, u.step[row], u.weight_decay, direction + i);
    });
    if (u.momentum_bits != 0) push_momentum(u, start, count, direction);
    if (!finite(direction, count)) return fedmpq::not_finite;
    fedmpq::philox_uniform(draws(u, 0), static_cast<uint32_t>(start / 4), count, uniforms);
    stretches(start, count, [&](int64_t i, int64_t size, int64_t row) {
      const fedmpq::Move move{direction + i, uniforms + i, size, u.rate[row], u.bits, range.low, range.high};
      if (u.fractions == nullptr)
        ops().move_paper(move, code + i);
      else
        ops().move_carried(move, code + i, u.fractions + start + i);
    });
    if (u.fractions != nullptr || u.pull == nullptr) continue;
    fedmpq::philox_uniform(draws(u, 1), static_cast<uint32_t>(start / 4), count, uniforms);
    lasso.move(uniforms, count, range, code);
  }
  return 0;
}
