// Additions and the loss: small beside the products, so written once, in plain C++.
//
// What quantization did to a sum is kept for the backward pass in two bits: 0 inside the range, 1 above, 2 below. Element i
// of an image's n has bits 2 (i / q) and up of byte i % q, q = ceil(n/4): neighbours lie in neighbouring bytes.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "bounds.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "scalars.h"
#include "threads.h"

namespace fedmpq {
namespace {

// Sums of errors that were clipped, in lanes: the order of additions is the same everywhere.
struct Clipped {
  float above[lanes], below[lanes];
};

// exp to about 2 units in the last place, by additions and multiplications alone, so that every machine agrees.
float exponential(float x) {
  x = x > -87.0f ? (x < 88.0f ? x : 88.0f) : -87.0f;  // also where x is no number, which no integer can stand for
  const float n = rounded(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float value = (p * r * r + r) + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return value * power;
}

// Natural logarithm of a positive number, likewise.
float logarithm(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int exponent = static_cast<int>(bits >> 23) - 126;
  bits = (bits & 0x007FFFFFu) | 0x3F000000u;
  float m;
  std::memcpy(&m, &bits, sizeof m);
  if (m < 0.70710678f) {
    m += m;
    --exponent;
  }
  m -= 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const float n = static_cast<float>(exponent);
  float value = m * z * p + n * -2.12194440e-4f;
  value += -0.5f * z;
  return (m + value) + n * 0.693359375f;
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_add(const FedmpqCodes* left, float left_scale, const FedmpqCodes* right, float right_scale, int32_t images,
                   int64_t count, float step, float low, float high, int32_t pairs, int32_t threads, uint8_t* out,
                   uint8_t* states) {
  if (!is_batch(images, count) || !is_valid(left) || !is_valid(right) || !given(out, states)) return not_valid;
  if (!is_range(low, high, pairs != 0)) return not_valid;
  if (!std::isfinite((left_scale > right_scale ? left_scale : right_scale) / step)) return not_finite;
  const int64_t quarter = (count + 3) / 4;
  const Addition sum{left->zero, right->zero, left_scale, right_scale, step, low, high};
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    auto* scratch = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(3 * count)));
    if (scratch == nullptr) {
      enough = false;
      return;
    }
    const uint8_t* a = as_bytes(*left, image, count, scratch);
    const uint8_t* b = as_bytes(*right, image, count, scratch + count);
    uint8_t* codes = pairs != 0 ? scratch + 2 * count : out + image * count;
    uint8_t* state = states + image * quarter;
    std::memset(state, 0, static_cast<size_t>(quarter));
    for (int part = 0; part < 4; ++part) {
      const int64_t start = part * quarter, end = start + quarter < count ? start + quarter : count;
      ops().add_codes(sum, end - start, a + start, b + start, 2 * part, codes + start, state);
    }
    if (pairs != 0) ops().pack(codes, count, out + image * ((count + 1) / 2));
    std::free(scratch);
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_clip_gradient(const double* clipped, int32_t below, float* clip) {
  if (!given(clipped, clip)) return not_valid;
  *clip = static_cast<float>(below != 0 ? clipped[0] - clipped[1] : clipped[0]);
  return 0;
}

int32_t fedmpq_pass_error(const uint8_t* states, int32_t images, int64_t count, int32_t threads, uint16_t* error,
                          double* clipped) {
  if (!is_batch(images, count) || !given(states, error, clipped)) return not_valid;
  const int64_t quarter = (count + 3) / 4;
  auto* parts = static_cast<Clipped*>(std::calloc(static_cast<size_t>(images) + 1, sizeof(Clipped)));
  if (parts == nullptr) return no_memory;
  parallel(images, threads, [&](int image, int) {
    for (int part = 0; part < 4; ++part) {
      const int64_t start = part * quarter, end = start + quarter < count ? start + quarter : count;
      ops().pass_error(states + image * quarter, end - start, 2 * part, error + image * count + start, parts[image].above,
                       parts[image].below);
    }
  });
  clipped[0] = clipped[1] = 0.0;
  for (int image = 0; image < images; ++image)
    for (int l = 0; l < lanes; ++l) {
      clipped[0] += static_cast<double>(parts[image].above[l]);
      clipped[1] += static_cast<double>(parts[image].below[l]);
    }
  std::free(parts);
  return 0;
}

int32_t fedmpq_add_errors(const uint16_t* other, int64_t count, uint16_t* error) {
  if (count < 0 || !given(other, error)) return not_valid;
  for (int64_t i = 0; i < count; ++i) error[i] = halved(widened(error[i]) + widened(other[i]));
  return 0;
}

int32_t fedmpq_softmax_loss(const int32_t* acc, int32_t samples, int32_t classes, const float* scale, const float* bias,
                            const float* shift, const int64_t* labels, float* gradient, double* loss) {
  if (samples < 1 || classes < 1 || !given(acc, scale, bias, shift, labels, gradient, loss)) return not_valid;
  for (int n = 0; n < samples; ++n)
    if (labels[n] < 0 || labels[n] >= classes) return not_valid;
  int32_t right = 0;
  double total = 0.0;
  for (int n = 0; n < samples; ++n) {
    float* g = gradient + int64_t{n} * classes;
    int best = 0;
    for (int k = 0; k < classes; ++k) {
      g[k] = (static_cast<float>(acc[int64_t{n} * classes + k]) * scale[k] + bias[k]) + shift[k];
      if (g[k] > g[best]) best = k;
    }
    right += best == labels[n];
    const float most = g[best], at_label = g[labels[n]];
    float sum = 0.0f;
    for (int k = 0; k < classes; ++k) {
      g[k] = exponential(g[k] - most);
      sum += g[k];
    }
    total += static_cast<double>(logarithm(sum) - (at_label - most));
    for (int k = 0; k < classes; ++k) g[k] = (g[k] / sum - (k == labels[n] ? 1.0f : 0.0f)) / static_cast<float>(samples);
  }
  *loss = total / samples;
  return right;
}

int32_t fedmpq_sigmoid_loss(const int32_t* acc, int32_t samples, int32_t outputs, const float* scale, const float* bias,
                            const float* targets, float* gradient, double* loss) {
  if (samples < 1 || outputs < 1 || !given(acc, scale, bias, targets, gradient, loss)) return not_valid;
  const float count = static_cast<float>(samples) * static_cast<float>(outputs);
  int32_t right = 0;
  double total = 0.0;
  for (int n = 0; n < samples; ++n)
    for (int k = 0; k < outputs; ++k) {
      const int64_t i = int64_t{n} * outputs + k;
      const float z = static_cast<float>(acc[i]) * scale[k] + bias[k], t = targets[i];
      const float small = exponential(z < 0 ? z : -z);
      const float sigmoid = (z < 0 ? small : 1.0f) / (1.0f + small);
      right += (z > 0) == (t > 0.5f);
      total += static_cast<double>((z > 0 ? z : 0.0f) - z * t) + static_cast<double>(logarithm(1.0f + small));
      gradient[i] = (sigmoid - t) / count;
    }
  *loss = total / samples / outputs;
  return right;
}

int32_t fedmpq_squared_loss(const int32_t* acc, int32_t samples, int32_t outputs, const float* scale, const float* bias,
                            const float* targets, float* gradient, double* loss) {
  if (samples < 1 || outputs < 1 || !given(acc, scale, bias, targets, gradient, loss)) return not_valid;
  const float count = static_cast<float>(samples) * static_cast<float>(outputs);
  double total = 0.0;
  for (int n = 0; n < samples; ++n)
    for (int k = 0; k < outputs; ++k) {
      const int64_t i = int64_t{n} * outputs + k;
      const float difference = static_cast<float>(acc[i]) * scale[k] + bias[k] - targets[i];
      total += static_cast<double>(difference) * static_cast<double>(difference);
      gradient[i] = 2.0f * difference / count;
    }
  *loss = total / samples / outputs;
  return 0;
}

int32_t fedmpq_halve_errors(const float* real, int64_t rows, int32_t channels, const float* gain, uint16_t* error,
                            float* greatest) {
  if (rows < 0 || channels < 1 || !given(real, gain, error, greatest)) return not_valid;
  float most = 0.0f;
  for (int64_t i = 0; i < rows; ++i)
    for (int c = 0; c < channels; ++c) {
      error[i * channels + c] = halved(real[i * channels + c] * gain[c]);
      const float value = widened(error[i * channels + c]);
      const float magnitude = value < 0 ? -value : value;
      most = magnitude > most ? magnitude : most;
    }
  *greatest = most;
  return 0;
}
