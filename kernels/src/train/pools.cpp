// Pools: small beside the products, so written once, in plain C++.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "bounds.h"
#include "buffer.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "scalars.h"
#include "threads.h"

namespace fedmpq {
namespace {

int64_t inputs(const FedmpqPool& p) { return int64_t{p.height} * p.width * p.channels; }
int64_t outputs(const FedmpqPool& p) { return int64_t{p.out_height} * p.out_width * p.channels; }

// Calls visit(y, x, where) for each pixel under each window, row by row; `where` is its first channel in the image.
template <class Visit>
void each_pixel(const FedmpqPool& p, Visit visit) {
  for (int y = 0; y < p.out_height; ++y)
    for (int x = 0; x < p.out_width; ++x)
      for (int from_y = p.rows[2 * y]; from_y < p.rows[2 * y + 1]; ++from_y)
        for (int from_x = p.columns[2 * x]; from_x < p.columns[2 * x + 1]; ++from_x)
          visit(y, x, (int64_t{from_y} * p.width + from_x) * p.channels);
}

// The most elements that a span of `count` spans has.
int64_t longest(const int32_t* spans, int count) {
  int64_t most = 0;
  for (int i = 0; i < count; ++i) most = spans[2 * i + 1] - spans[2 * i] > most ? spans[2 * i + 1] - spans[2 * i] : most;
  return most;
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_max_pool(const FedmpqPool* pool, const FedmpqCodes* codes, int32_t threads, uint8_t* out) {
  if (!is_valid(pool) || !is_valid(codes) || !given(out)) return not_valid;
  const FedmpqPool& p = *pool;
  const bool pairs = codes->pairs != 0;
  const int64_t count = inputs(p), outs = outputs(p);
  std::atomic<bool> enough{true};
  parallel(p.images, threads, [&](int image, int) {
    const Buffer<uint8_t> scratch(count + outs);
    if (!scratch) {
      enough = false;
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch.data());
    uint8_t* to = pairs ? scratch.data() + count : out + image * outs;
    std::memset(to, 0, static_cast<size_t>(outs));  // the least stored code
    each_pixel(p, [&](int y, int x, int64_t where) {
      uint8_t* best = to + (int64_t{y} * p.out_width + x) * p.channels;
      for (int c = 0; c < p.channels; ++c) best[c] = from[where + c] > best[c] ? from[where + c] : best[c];
    });
    if (pairs) ops().pack(to, outs, out + image * ((outs + 1) / 2));
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_max_pool_backward(const FedmpqPool* pool, const FedmpqCodes* codes, const uint16_t* error, int32_t threads,
                                 uint16_t* out) {
  if (!is_valid(pool) || !is_valid(codes) || !given(error, out)) return not_valid;
  const FedmpqPool& p = *pool;
  const int64_t count = inputs(p), outs = outputs(p);
  std::atomic<bool> enough{true};
  parallel(p.images, threads, [&](int image, int) {
    const Buffer<uint8_t> scratch(count);
    const Buffer<float> sums(count);
    if (!scratch || !sums) {
      enough = false;
      return;
    }
    std::fill_n(sums.data(), count, 0.0f);
    const uint8_t* from = as_bytes(*codes, image, count, scratch.data());
    const uint16_t* own = error + image * outs;
    for (int y = 0; y < p.out_height; ++y)
      for (int x = 0; x < p.out_width; ++x)
        for (int c = 0; c < p.channels; ++c) {
          int best = -1;
          int64_t where = 0;
          // The first of the greatest takes the error.
          for (int from_y = p.rows[2 * y]; from_y < p.rows[2 * y + 1]; ++from_y)
            for (int from_x = p.columns[2 * x]; from_x < p.columns[2 * x + 1]; ++from_x) {
              const int64_t at = (int64_t{from_y} * p.width + from_x) * p.channels + c;
              if (from[at] > best) best = from[at], where = at;
            }
          sums.data()[where] += widened(own[(int64_t{y} * p.out_width + x) * p.channels + c]);
        }
    for (int64_t i = 0; i < count; ++i) out[image * count + i] = halved(sums.data()[i]);
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_average_pool(const FedmpqPool* pool, const FedmpqCodes* codes, const float* multipliers, float low,
                            float high, int32_t threads, uint8_t* out) {
  if (!is_valid(pool) || !is_valid(codes) || !given(multipliers, out)) return not_valid;
  if (!is_range(low, high, false)) return not_valid;
  const FedmpqPool& p = *pool;
  const int64_t greatest = longest(p.rows, p.out_height) * longest(p.columns, p.out_width);
  if (!sums_fit(greatest, greatest_code(*codes), 1)) return sums_too_large;
  const int zero = codes->zero;
  const int64_t count = inputs(p), outs = outputs(p);
  std::atomic<bool> enough{true};
  parallel(p.images, threads, [&](int image, int) {
    const Buffer<uint8_t> scratch(count);
    const Buffer<int32_t> sums(outs);
    if (!scratch || !sums) {
      enough = false;
      return;
    }
    std::fill_n(sums.data(), outs, 0);
    const uint8_t* from = as_bytes(*codes, image, count, scratch.data());
    each_pixel(p, [&](int y, int x, int64_t where) {
      int32_t* sum = sums.data() + (int64_t{y} * p.out_width + x) * p.channels;
      for (int c = 0; c < p.channels; ++c) sum[c] += from[where + c] - zero;
    });
    uint8_t* to = out + image * outs;
    for (int64_t i = 0; i < outs; ++i)
      to[i] = static_cast<uint8_t>(static_cast<int32_t>(
          rounded(clamped(static_cast<float>(sums.data()[i]) * multipliers[i / p.channels], low, high)) - low));
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_average_pool_backward(const FedmpqPool* pool, const uint16_t* error, const float* shares, int32_t threads,
                                     uint16_t* out) {
  if (!is_valid(pool) || !given(error, shares, out)) return not_valid;
  const FedmpqPool& p = *pool;
  const int64_t count = inputs(p), outs = outputs(p);
  std::atomic<bool> enough{true};
  parallel(p.images, threads, [&](int image, int) {
    const Buffer<float> sums(count);
    if (!sums) {
      enough = false;
      return;
    }
    std::fill_n(sums.data(), count, 0.0f);
    each_pixel(p, [&](int y, int x, int64_t where) {
      const int64_t pixel = int64_t{y} * p.out_width + x;
      const uint16_t* own = error + image * outs + pixel * p.channels;
      for (int c = 0; c < p.channels; ++c) sums.data()[where + c] += widened(own[c]) * shares[pixel];
    });
    for (int64_t i = 0; i < count; ++i) out[image * count + i] = halved(sums.data()[i]);
  });
  return enough ? 0 : no_memory;
}
