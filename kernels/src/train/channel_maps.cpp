// What lies between a layer's passes: a few numbers a channel, each a single IEEE operation after the other in the order
// that training/normalization.py states, so that every machine agrees.
#include <cmath>
#include <limits>

#include "bounds.h"
#include "fedmpq/training.h"

namespace fedmpq {
namespace {

constexpr int64_t most_channels = 65536;

bool are_channels(int64_t channels) { return channels >= 1 && channels <= most_channels; }

bool is_valid(const FedmpqChannelMap* map) {
  if (map == nullptr || !are_channels(map->channels) || !given(map->scale, map->t_scale, map->t_shift)) return false;
  if (map->gamma == nullptr) return true;
  return map->count >= 1 && map->mean_at >= 0 && map->variance_at >= 0 &&
         given(map->beta, map->unit, map->sums, map->statistics, map->norm, map->bias, map->gain);
}

// One channel through BatchNorm.
void normalize(const FedmpqChannelMap& m, int o, double source, double target) {
  const double count = static_cast<double>(m.count);
  const double unbiased = count / static_cast<double>(m.count > 1 ? m.count - 1 : 1);
  const double s = static_cast<double>(m.scale[o]) * source, gamma = m.gamma[o];
  const double centre = m.sums[o] / count;
  const double mean = centre * s;
  double variance = m.sums[m.channels + o] / count - centre * centre;
  variance = variance < 0.0 ? 0.0 : variance;
  variance = variance * s * s;
  m.statistics[m.mean_at + o] = m.offset == nullptr ? mean : mean + static_cast<double>(m.offset[o]);
  m.statistics[m.variance_at + o] = variance * unbiased;
  const double inverse = 1.0 / std::sqrt(variance + m.eps);
  const double norm = s * inverse, bias = -(mean * inverse);
  m.norm[o] = static_cast<float>(norm);
  m.bias[o] = static_cast<float>(bias);
  m.t_scale[o] = static_cast<float>(norm * gamma / target);
  m.t_shift[o] = static_cast<float>((bias * gamma + static_cast<double>(m.beta[o])) / target);
  m.gain[o] = static_cast<float>(gamma * inverse * static_cast<double>(m.unit[o]));
}

void rescale(const FedmpqChannelMap& m, int o, double source, double target) {
  m.t_scale[o] = static_cast<float>(static_cast<double>(m.scale[o]) * source / target);
  m.t_shift[o] = static_cast<float>((m.offset == nullptr ? 0.0 : static_cast<double>(m.offset[o])) / target);
}

// The exact sum of numbers, rounded once: parts that do not overlap, the least first, hold it as it grows. A double has 2098
// bits of exponent and fraction, and each part at least 53 of them to itself.
class ExactSum {
 public:
  void add(double value) {
    int kept = 0;
    for (int i = 0; i < count_; ++i) {
      const bool larger = std::fabs(value) >= std::fabs(parts_[i]);
      const double high = larger ? value : parts_[i], low = larger ? parts_[i] : value;
      const double sum = high + low, rest = low - (sum - high);
      if (rest != 0.0) parts_[kept++] = rest;
      value = sum;
    }
    parts_[kept++] = value;
    count_ = kept;
  }

  double rounded() const {
    if (count_ == 0) return 0.0;
    int at = count_ - 1;
    double sum = parts_[at], rest = 0.0;
    while (at > 0 && rest == 0.0) {
      const double high = sum, low = parts_[--at];
      sum = high + low;
      rest = low - (sum - high);
    }
    // Half-way between two doubles, what is left below decides.
    if (at > 0 && ((rest < 0.0 && parts_[at - 1] < 0.0) || (rest > 0.0 && parts_[at - 1] > 0.0))) {
      const double twice = rest * 2.0, other = sum + twice;
      if (twice == other - sum) sum = other;
    }
    return sum;
  }

 private:
  double parts_[48];
  int count_ = 0;
};

double total(const double* values, int count) {
  ExactSum sum;
  for (int i = 0; i < count; ++i) sum.add(values[i]);
  return sum.rounded();
}

bool are_finite(const double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (!std::isfinite(values[i])) return false;
  return true;
}

void narrow(const double* from, int count, float* to) {
  for (int i = 0; to != nullptr && i < count; ++i) to[i] = static_cast<float>(from[i]);
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_map_channels(const FedmpqChannelMap* map, float source, float target) {
  if (!is_valid(map)) return not_valid;
  bool finite = true;
  for (int o = 0; o < map->channels; ++o) {
    if (map->gamma != nullptr)
      normalize(*map, o, source, target);
    else
      rescale(*map, o, source, target);
    finite = finite && std::isfinite(map->t_scale[o]) && std::isfinite(map->t_shift[o]);
  }
  return finite ? 0 : not_finite;
}

int32_t fedmpq_side_gradients(const double* sums, int32_t channels, int64_t count, int32_t below, float* clip, float* shift,
                              float* scale, float* mean_g, float* mean_gx) {
  if (!are_channels(channels) || count < 0 || !given(sums, clip, mean_g, mean_gx)) return not_valid;
  if (!are_finite(sums, int64_t{4} * channels)) return not_finite;
  const double above = total(sums + 2 * channels, channels);
  *clip = static_cast<float>(below != 0 ? above - total(sums + 3 * channels, channels) : above);
  narrow(sums, channels, shift);
  narrow(sums + channels, channels, scale);
  for (int o = 0; o < channels; ++o) {
    mean_g[o] = count > 0 ? static_cast<float>(sums[o] / static_cast<double>(count)) : 0.0f;
    mean_gx[o] = count > 0 ? static_cast<float>(sums[channels + o] / static_cast<double>(count)) : 0.0f;
  }
  return 0;
}

int32_t fedmpq_error_scales(const float* greatest, int32_t images, float source, const float* weight_scale, int32_t channels,
                            float* numbers, float* scales) {
  if (!is_batch(1, images) || !are_channels(channels) || !given(greatest, weight_scale, numbers, scales)) return not_valid;
  float most = greatest[0];
  for (int i = 0; i < images; ++i) {
    if (!std::isfinite(greatest[i])) return not_finite;
    most = greatest[i] > most ? greatest[i] : most;
  }
  const float scale = most / 127.0f;
  // Errors so small that the scale is denormal would have an infinite inverse; they count as nothing.
  numbers[0] = scale;
  numbers[1] = scale >= std::numeric_limits<float>::min() ? static_cast<float>(1.0 / static_cast<double>(scale)) : 0.0f;
  const float product = scale * source;
  for (int o = 0; o < channels; ++o) scales[o] = product / weight_scale[o];
  return 0;
}
