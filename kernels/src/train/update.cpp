// The update of one layer's codes: weight decay, momentum, the stochastic move and the Lasso's, weight by weight.
// fedmpq.edge_client.update is its slow twin; both give the same codes.
#include <cmath>
#include <cstring>

#include "fedmpq/training.h"
#include "philox.h"

namespace {

constexpr int least_exponent = -64;
constexpr float sqrt_half = 0.70710678f;
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
    for (int64_t i = start; i < start + size; ++i) codes[i] = static_cast<int8_t>(std::nearbyint(direction[i] / safe));
  }
}

}  // namespace

int32_t fedmpq_update_codes(const FedmpqUpdate* update, const float* gradient, uint8_t* codes) {
  const FedmpqUpdate& u = *update;
  for (int64_t i = 0; i < u.count; ++i)
    if (!std::isfinite(gradient[i])) return -3;
  const float zero = u.bits == 8 ? 128.0f : static_cast<float>((1 << u.bits) - 1) / 2;
  const int32_t low = u.bits == 8 ? 1 : 0, high = (1 << u.bits) - 1, middle = 1 << (u.bits - 1);
  const PaperTable table = paper_table(u.bits);
  const float limit = static_cast<float>(1 << u.bits);
  float direction[chunk], uniforms[chunk], lasso[chunk];
  for (int64_t first = 0; first < u.count; first += chunk) {
    const int64_t count = u.count - first < chunk ? u.count - first : chunk;
    uint8_t* code = codes + first;
    for (int64_t i = 0; i < count; ++i) {
      const float weight = (static_cast<float>(code[i]) - zero) * u.step[(first + i) / u.row];
      direction[i] = gradient[first + i] + u.weight_decay * weight;
    }
    if (u.momentum_bits != 0) push_momentum(u, first, count, direction);
    fedmpq::philox_uniform(draws(u, 0), static_cast<uint32_t>(first / 4), count, uniforms);
    if (u.paper != 0 && u.pull != nullptr) fedmpq::philox_uniform(draws(u, 1), static_cast<uint32_t>(first / 4), count, lasso);
    for (int64_t i = 0; i < count; ++i) {
      const float rate = u.rate[(first + i) / u.row];
      int32_t c = code[i], move;
      if (u.paper != 0) {
        const int index = paper_index(std::fabs(direction[i]) * rate, table.last);
        move = table.moves[index] + (uniforms[i] < table.chances[index] ? 1 : 0);
        if (!(direction[i] > 0.0f)) move = -move;
      } else {
        float x = direction[i] * rate;
        if (u.pull != nullptr) {
          const float pull = u.pull[c >= middle ? c - middle : middle - 1 - c];
          x = x + (c >= middle ? pull : -pull);
        }
        x = x < -limit ? -limit : (x > limit ? limit : x);
        move = static_cast<int32_t>(std::floor(x + uniforms[i]));
      }
      c = clipped(c - move, low, high);
      if (u.paper != 0 && u.pull != nullptr) {
        const int32_t magnitude = c >= middle ? c - middle : middle - 1 - c;
        int32_t step = static_cast<int32_t>(std::floor(u.pull[magnitude] + lasso[i]));
        step = step < magnitude ? step : magnitude;
        c = clipped(c - (c >= middle ? step : -step), low, high);
      }
      code[i] = static_cast<uint8_t>(c);
    }
  }
  return 0;
}
