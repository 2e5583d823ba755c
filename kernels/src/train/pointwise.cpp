// Functions of codes by table and products of codes, over whole batches. What was clipped follows from the codes alone, so
// nothing else is kept for the way back.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "bounds.h"
#include "buffer.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "scalars.h"
#include "threads.h"

namespace fedmpq {
namespace {

constexpr int entries_of_table = 256;

// Sums of errors that were clipped, in lanes: the order of additions is the same everywhere.
struct Clipped {
  float above[lanes], below[lanes];
};

void total(const Clipped* parts, int images, double* clipped) {
  clipped[0] = clipped[1] = 0.0;
  for (int image = 0; image < images; ++image)
    for (int l = 0; l < lanes; ++l) {
      clipped[0] += static_cast<double>(parts[image].above[l]);
      clipped[1] += static_cast<double>(parts[image].below[l]);
    }
}

// The elements of an image as pixels and channels, of which the right factor has one code for each channel. Without
// `spread` it has one for each element: then stretches of elements are the channels of one pixel.
template <class Body>
void each_part(const FedmpqExtent& extent, bool spread, const Body& body) {
  constexpr int64_t stretch = 4096;
  const int64_t count = extent.pixels * extent.channels;
  if (spread) {
    body(int64_t{0}, extent.pixels, extent.channels);
    return;
  }
  for (int64_t first = 0; first < count; first += stretch)
    body(first, int64_t{1}, static_cast<int>(count - first < stretch ? count - first : stretch));
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_lookup(const FedmpqCodes* codes, int32_t images, int64_t count, const uint8_t* table, int32_t pairs,
                      int32_t threads, uint8_t* out) {
  if (!is_batch(images, count) || !is_valid(codes) || !given(table, out)) return not_valid;
  for (int i = 0; i < entries_of_table; ++i)
    if (pairs != 0 && table[i] > 15) return not_valid;
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    Buffer<uint8_t> scratch(2 * count);
    if (!scratch) {
      enough = false;
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch.data());
    uint8_t* to = pairs != 0 ? scratch.data() + count : out + image * count;
    ops().lookup(table, from, count, to);
    if (pairs != 0) ops().pack(to, count, out + image * ((count + 1) / 2));
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_lookup_backward(const FedmpqCodes* codes, int32_t images, int64_t count, const float* slopes,
                               const uint8_t* states, int32_t threads, uint16_t* error, double* clipped) {
  if (!is_batch(images, count) || !is_valid(codes) || !given(slopes, states, error, clipped)) return not_valid;
  float passed[entries_of_table];
  bool clips = false;
  for (int i = 0; i < entries_of_table; ++i) {
    if (states[i] > 2 || !std::isfinite(slopes[i])) return not_valid;
    passed[i] = slopes[i];
    if (states[i] == 0) continue;
    clips = true;
    std::memcpy(&passed[i], states[i] == 1 ? &is_above : &is_below, sizeof passed[i]);
  }
  auto* parts = static_cast<Clipped*>(std::calloc(static_cast<size_t>(images) + 1, sizeof(Clipped)));
  if (parts == nullptr) return no_memory;
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    Buffer<uint8_t> scratch(count);
    if (!scratch) {
      enough = false;
      return;
    }
    ops().lookup_error(passed, clips, as_bytes(*codes, image, count, scratch.data()), count,
                       error + image * count, parts[image].above, parts[image].below);
  });
  total(parts, images, clipped);
  std::free(parts);
  return enough ? 0 : no_memory;
}

int32_t fedmpq_multiply(const FedmpqCodes* left, const FedmpqCodes* right, const FedmpqExtent* extent, int32_t spread,
                        float multiplier, float low, float high, int32_t pairs, int32_t threads, uint8_t* out) {
  if (!is_valid(extent) || !is_valid(left) || !is_valid(right) || !given(out)) return not_valid;
  if (!is_range(low, high, pairs != 0)) return not_valid;
  const Multiplication m{left->zero, right->zero, multiplier, low, high};
  const int64_t count = extent->pixels * extent->channels, rights = spread != 0 ? extent->channels : count;
  std::atomic<bool> enough{true};
  parallel(extent->images, threads, [&](int image, int) {
    Buffer<uint8_t> scratch(2 * count + rights);
    if (!scratch) {
      enough = false;
      return;
    }
    const uint8_t* a = as_bytes(*left, image, count, scratch.data());
    const uint8_t* b = as_bytes(*right, image, rights, scratch.data() + 2 * count);
    uint8_t* to = pairs != 0 ? scratch.data() + count : out + image * count;
    each_part(*extent, spread != 0, [&](int64_t first, int64_t pixels, int channels) {
      ops().multiply(m, pixels, channels, a + first, b + first, to + first);
    });
    if (pairs != 0) ops().pack(to, count, out + image * ((count + 1) / 2));
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_multiply_backward(const FedmpqCodes* left, const FedmpqCodes* right, const FedmpqExtent* extent,
                                 int32_t spread, float multiplier, float low, float high, float left_scale,
                                 float right_scale, const uint16_t* error, int32_t threads, uint16_t* left_error,
                                 uint16_t* right_error, double* clipped) {
  if (!is_valid(extent) || !is_valid(left) || !is_valid(right)) return not_valid;
  if (!given(error, left_error, right_error, clipped) || !is_range(low, high, false)) return not_valid;
  const Multiplication m{left->zero, right->zero, multiplier, low, high};
  const int64_t count = extent->pixels * extent->channels, rights = spread != 0 ? extent->channels : count;
  auto* parts = static_cast<double*>(std::calloc(2 * static_cast<size_t>(extent->images) + 1, sizeof(double)));
  if (parts == nullptr) return no_memory;
  std::atomic<bool> enough{true};
  parallel(extent->images, threads, [&](int image, int) {
    const int64_t longest = spread != 0 ? rights : 4096;
    Buffer<uint8_t> scratch(count + rights);
    Buffer<float> sums(3 * longest);
    if (!scratch || !sums) {
      enough = false;
      return;
    }
    const uint8_t* a = as_bytes(*left, image, count, scratch.data());
    const uint8_t* b = as_bytes(*right, image, rights, scratch.data() + count);
    each_part(*extent, spread != 0, [&](int64_t first, int64_t pixels, int channels) {
      float *sum = sums.data(), *above = sum + channels, *below = above + channels;
      std::memset(sum, 0, 3 * static_cast<size_t>(channels) * sizeof(float));
      ops().multiply_error(m, right_scale, pixels, channels, a + first, b + first, error + image * count + first,
                           left_error + image * count + first, sum, above, below);
      for (int c = 0; c < channels; ++c) {
        right_error[image * rights + first + c] = halved(sum[c] * left_scale);
        parts[2 * image] += static_cast<double>(above[c]);
        parts[2 * image + 1] += static_cast<double>(below[c]);
      }
    });
  });
  clipped[0] = clipped[1] = 0.0;
  for (int image = 0; image < extent->images; ++image) {
    clipped[0] += parts[2 * image];
    clipped[1] += parts[2 * image + 1];
  }
  std::free(parts);
  return enough ? 0 : no_memory;
}
