// Pools: small beside the products, so written once, in plain C++.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "bounds.h"
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
    auto* scratch = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(count + outs)));
    if (scratch == nullptr) {
      enough = false;
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch);
    uint8_t* to = pairs ? scratch + count : out + image * outs;
    std::memset(to, 0, static_cast<size_t>(outs));  // the least stored code
    each_pixel(p, [&](int y, int x, int64_t where) {
      uint8_t* best = to + (int64_t{y} * p.out_width + x) * p.channels;
      for (int c = 0; c < p.channels; ++c) best[c] = from[where + c] > best[c] ? from[where + c] : best[c];
    });
    if (pairs) ops().pack(to, outs, out + image * ((outs + 1) / 2));
    std::free(scratch);
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
    auto* scratch = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(count)));
    auto* sums = static_cast<float*>(std::calloc(static_cast<size_t>(count), sizeof(float)));
    if (scratch == nullptr || sums == nullptr) {
      enough = false;
      std::free(scratch);
      std::free(sums);
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch);
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
          sums[where] += widened(own[(int64_t{y} * p.out_width + x) * p.channels + c]);
        }
    for (int64_t i = 0; i < count; ++i) out[image * count + i] = halved(sums[i]);
    std::free(scratch);
    std::free(sums);
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
    auto* scratch = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(count)));
    auto* sums = static_cast<int32_t*>(std::calloc(static_cast<size_t>(outs), sizeof(int32_t)));
    if (scratch == nullptr || sums == nullptr) {
      enough = false;
      std::free(scratch);
      std::free(sums);
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch);
    each_pixel(p, [&](int y, int x, int64_t where) {
      int32_t* sum = sums + (int64_t{y} * p.out_width + x) * p.channels;
      for (int c = 0; c < p.channels; ++c) sum[c] += from[where + c] - zero;
    });
    uint8_t* to = out + image * outs;
    for (int64_t i = 0; i < outs; ++i)
      to[i] = static_cast<uint8_t>(static_cast<int32_t>(
          rounded(clamped(static_cast<float>(sums[i]) * multipliers[i / p.channels], low, high)) - low));
    std::free(scratch);
    std::free(sums);
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
    auto* sums = static_cast<float*>(std::calloc(static_cast<size_t>(count), sizeof(float)));
    if (sums == nullptr) {
      enough = false;
      return;
    }
    each_pixel(p, [&](int y, int x, int64_t where) {
      const int64_t pixel = int64_t{y} * p.out_width + x;
      const uint16_t* own = error + image * outs + pixel * p.channels;
      for (int c = 0; c < p.channels; ++c) sums[where + c] += widened(own[c]) * shares[pixel];
    });
    for (int64_t i = 0; i < count; ++i) out[image * count + i] = halved(sums[i]);
    std::free(sums);
  });
  return enough ? 0 : no_memory;
}
