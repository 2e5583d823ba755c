// The update of one layer's codes: weight decay, momentum, the stochastic move and the Lasso's, weight by weight.
// fedmpq.edge_client.update is its slow twin; both give the same codes.
#include <cmath>
#include <cstring>

#include "fedmpq/training.h"
#include "philox.h"

namespace {

constexpr int least_exponent = -64;
constexpr float sqrt_half = 0.70710683f;  // the least float above it; the nearest lies below
constexpr int64_t block = 128;  // weights that share a momentum scale
constexpr int64_t chunk = 1024;  // weights at a time; a multiple of `block` and of a Philox block

struct PaperTable {
  int32_t moves[80];
  float chances[80];
  int last;
};

// Whole move and chance of one more for each k = round(log2(rate * |d|)), from the least up to saturation.
PaperTable paper_table(int bits) {
  PaperTable table{};
  int entries = 1;
  for (int k = least_exponent + 1; k < 2 - bits; ++k, ++entries) {
    int32_t move = 0;
    double chance = 0.0;
    for (int i = 1; i <= bits; ++i) {
      const int q = k + 2 * i - 1;
      if (q >= 1 && q <= bits) move += 1 << (q - 1);
      if (q <= 0) chance += std::ldexp(1.0, q - 1);
    }
    table.moves[entries] = move;
    table.chances[entries] = static_cast<float>(chance);
  }
  table.moves[entries] = (1 << bits) - 1;
  table.last = entries;
  return table;
}

// round(log2 x) from the float's own exponent and mantissa, as an index into the table.
int paper_index(float x, int last) {
  if (!(x > 0.0f)) return 0;
  if (std::isinf(x)) return last;
  int exponent;
  const float mantissa = std::frexp(x, &exponent);
  const int index = exponent - (mantissa < sqrt_half ? 1 : 0) - least_exponent;
  return index < 0 ? 0 : (index > last ? last : index);
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

void move_paper(const float* direction, const float* uniforms, int64_t count, float rate, const PaperTable& table,
                const Range& range, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const int index = paper_index(std::fabs(direction[i]) * rate, table.last);
    const int32_t move = table.moves[index] + (uniforms[i] < table.chances[index] ? 1 : 0);
    codes[i] = static_cast<uint8_t>(clipped(codes[i] - (direction[i] > 0.0f ? move : -move), range.low, range.high));
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
  const PaperTable table = paper_table(u.bits);
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
        move_paper(direction + i, uniforms + i, size, u.rate[row], table, range, code + i);
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
