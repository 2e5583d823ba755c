// The update of one layer's codes: weight decay, momentum, the stochastic move and the Lasso's, weight by weight.
// fedmpq.edge_client.update is its slow twin; both give the same codes.
#include <cmath>
#include <cstring>

#include "fedmpq/training.h"
#include "philox.h"

namespace {

constexpr int bias = 127;  // of a float's exponent
constexpr int least_exponent = -64;
constexpr int64_t block = 128;  // weights that share a momentum scale
constexpr int64_t chunk = 1024;  // weights at a time; a multiple of `block` and of a Philox block

// round(log2 x) + 127 for x >= 0: the exponent, one more if the mantissa is at least sqrt(2). What is added carries into the
// exponent from the least float above sqrt(2) on; zero gives 0, infinity more than any number.
int32_t rounded_exponent(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<int32_t>((bits + (0x800000u - 0x3504F4u)) >> 23);
}

int32_t clipped(int32_t code, int32_t low, int32_t high) { return code < low ? low : (code > high ? high : code); }

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
  for (int64_t start = 0; start < count; start += block) {
    float& scale = u.momentum_scales[(first + start) / block];
    const int64_t size = count - start < block ? count - start : block;
    const float factor = scale * u.momentum;
    float greatest = 0.0f;
    for (int64_t i = start; i < start + size; ++i) {
      direction[i] = static_cast<float>(codes[i]) * factor + direction[i];
      const float magnitude = std::fabs(direction[i]);
      greatest = magnitude > greatest ? magnitude : greatest;
    }
    scale = greatest / 127.0f;
    const float safe = scale > 0.0f ? scale : 1.0f;
    for (int64_t i = start; i < start + size; ++i) {
      // A scale among the denormals is so coarse that the quotient can pass 127.
      const float q = std::nearbyint(direction[i] / safe);
      codes[i] = static_cast<int8_t>(q < -127.0f ? -127.0f : (q > 127.0f ? 127.0f : q));
    }
  }
}

// floor of numbers within the range of int32, in steps that every machine vectorises.
inline int32_t floored(float value) {
  const int32_t whole = static_cast<int32_t>(value);
  return whole - (value < static_cast<float>(whole) ? 1 : 0);
}

struct Range {
  int32_t low, high, middle;
  float zero;
};

// direction = gradient + decay * weight, for weights that share a step.
void decay(const float* __restrict gradient, const uint8_t* __restrict codes, int64_t count, float zero, float step,
           float factor, float* __restrict direction) {
  for (int64_t i = 0; i < count; ++i) {
    const float weight = (static_cast<float>(codes[i]) - zero) * step;
    direction[i] = gradient[i] + factor * weight;
  }
}

void move_rounded(const float* __restrict direction, const float* __restrict uniforms, int64_t count, float rate,
                  float limit, const Range& range, uint8_t* __restrict codes) {
  const int32_t low = range.low, high = range.high;
  for (int64_t i = 0; i < count; ++i) {
    float x = direction[i] * rate;
    x = x < -limit ? -limit : x;
    x = x > limit ? limit : x;
    codes[i] = static_cast<uint8_t>(clipped(codes[i] - floored(x + uniforms[i]), low, high));
  }
}

// With the Lasso's pull added to the move before its rounding.
void move_pulled(const float* direction, const float* uniforms, const float* pull, int64_t count, float rate,
                 float limit, const Range& range, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t c = codes[i];
    const float towards = pull[c >= range.middle ? c - range.middle : range.middle - 1 - c];
    float x = direction[i] * rate + (c >= range.middle ? towards : -towards);
    x = x < -limit ? -limit : (x > limit ? limit : x);
    codes[i] = static_cast<uint8_t>(clipped(c - floored(x + uniforms[i]), range.low, range.high));
  }
}

// The move in codes is the sum of 2^(q_i - 1), q_i = k + 2i - 1, i = 1..b: of those with q_i >= 1 as it is, of the others by
// chance. All together are 2^k (4^b - 1)/3, which a float holds exactly, and its whole part is just the former.
void move_paper(const float* __restrict direction, const float* __restrict uniforms, int64_t count, float rate, int bits,
                const Range& range, uint8_t* __restrict codes) {
  const int32_t low = range.low, high = range.high, saturated = bias + 1 - bits;
  const float all = static_cast<float>(((1 << 2 * bits) - 1) / 3);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t exponent = rounded_exponent(std::fabs(direction[i]) * rate);
    const int32_t held = exponent < bias + least_exponent ? bias + least_exponent : (exponent > saturated ? saturated : exponent);
    const uint32_t power_bits = static_cast<uint32_t>(held) << 23;
    float power;
    std::memcpy(&power, &power_bits, sizeof power);
    const float sum = all * power;
    const int32_t whole = static_cast<int32_t>(sum);
    int32_t move = whole + (uniforms[i] < sum - static_cast<float>(whole) ? 1 : 0);
    move = exponent > saturated ? high : move;
    move = exponent <= bias + least_exponent ? 0 : move;
    codes[i] = static_cast<uint8_t>(clipped(codes[i] - (direction[i] > 0.0f ? move : -move), low, high));
  }
}

// The Lasso's own move towards zero, never past it.
void move_lasso(const float* uniforms, const float* pull, int64_t count, const Range& range, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t c = codes[i], magnitude = c >= range.middle ? c - range.middle : range.middle - 1 - c;
    int32_t step = floored(pull[magnitude] + uniforms[i]);
    step = step < magnitude ? step : magnitude;
    codes[i] = static_cast<uint8_t>(clipped(c - (c >= range.middle ? step : -step), range.low, range.high));
  }
}

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
  const FedmpqUpdate& u = *update;
  if (!finite(gradient, u.count)) return -3;
  const Range range{u.bits == 8 ? 1 : 0, (1 << u.bits) - 1, 1 << (u.bits - 1),
                    u.bits == 8 ? 128.0f : static_cast<float>((1 << u.bits) - 1) / 2};
  const float limit = static_cast<float>(1 << u.bits);
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
      decay(gradient + start + i, code + i, size, range.zero, u.step[row], u.weight_decay, direction + i);
    });
    if (u.momentum_bits != 0) push_momentum(u, start, count, direction);
    if (!finite(direction, count)) return -3;
    fedmpq::philox_uniform(draws(u, 0), static_cast<uint32_t>(start / 4), count, uniforms);
    stretches(start, count, [&](int64_t i, int64_t size, int64_t row) {
      if (u.paper != 0)
        move_paper(direction + i, uniforms + i, size, u.rate[row], u.bits, range, code + i);
      else if (u.pull != nullptr)
        move_pulled(direction + i, uniforms + i, u.pull, size, u.rate[row], limit, range, code + i);
      else
        move_rounded(direction + i, uniforms + i, size, u.rate[row], limit, range, code + i);
    });
    if (u.paper == 0 || u.pull == nullptr) continue;
    fedmpq::philox_uniform(draws(u, 1), static_cast<uint32_t>(start / 4), count, uniforms);
    move_lasso(uniforms, u.pull, count, range, code);
  }
  return 0;
}
