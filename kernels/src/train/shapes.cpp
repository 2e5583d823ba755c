// What moves codes and errors about without computing on them, but for the new scale of what is joined.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "bounds.h"
#include "buffer.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "scalars.h"
#include "threads.h"

using namespace fedmpq;

int32_t fedmpq_join(const FedmpqCodes* codes, const FedmpqExtent* extent, float multiplier, float low, float high,
                    int32_t start, int32_t channels, int32_t threads, uint8_t* out) {
  if (!is_valid(codes) || !is_valid(extent) || !is_range(low, high, false) || !given(out)) return not_valid;
  if (!is_part(*extent, start, channels)) return not_valid;
  const int64_t count = extent->pixels * extent->channels, outs = extent->pixels * channels;
  const Joining joining{codes->zero, multiplier, low, high};
  std::atomic<bool> enough{true};
  parallel(extent->images, threads, [&](int image, int) {
    const Buffer<uint8_t> scratch(count);
    if (!scratch) {
      enough = false;
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch.data());
    ops().join_codes(joining, extent->pixels, extent->channels, from, out + image * outs + start, channels);
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_part_errors(const uint16_t* error, const FedmpqExtent* extent, int32_t start, int32_t channels,
                           int32_t threads, uint16_t* out) {
  if (!is_valid(extent) || !given(error, out) || !is_part(*extent, start, channels)) return not_valid;
  const int64_t count = extent->pixels * extent->channels, ins = extent->pixels * channels;
  parallel(extent->images, threads, [&](int image, int) {
    const uint16_t* from = error + image * ins + start;
    uint16_t* to = out + image * count;
    for (int64_t pixel = 0; pixel < extent->pixels; ++pixel, from += channels, to += extent->channels)
      std::memcpy(to, from, static_cast<size_t>(extent->channels) * sizeof(uint16_t));
  });
  return 0;
}

int32_t fedmpq_rearrange(const FedmpqCodes* codes, int32_t images, int64_t count, const int32_t* from, int64_t outs,
                         int32_t threads, uint8_t* out) {
  if (!is_valid(codes) || !given(out) || !are_places(images, count, from, outs)) return not_valid;
  const bool pairs = codes->pairs != 0;
  const auto zero = static_cast<uint8_t>(codes->zero);
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    const Buffer<uint8_t> scratch(count + outs);
    if (!scratch) {
      enough = false;
      return;
    }
    const uint8_t* source = as_bytes(*codes, image, count, scratch.data());
    uint8_t* to = pairs ? scratch.data() + count : out + image * outs;
    for (int64_t i = 0; i < outs; ++i) to[i] = from[i] < 0 ? zero : source[from[i]];
    if (pairs) ops().pack(to, outs, out + image * ((outs + 1) / 2));
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_rearrange_backward(const uint16_t* error, int32_t images, int64_t count, const int32_t* from, int64_t outs,
                                  int32_t threads, uint16_t* out) {
  if (!given(error, out) || !are_places(images, count, from, outs)) return not_valid;
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    const Buffer<float> sums(count);
    if (!sums) {
      enough = false;
      return;
    }
    std::fill_n(sums.data(), count, 0.0f);
    const uint16_t* own = error + image * outs;
    for (int64_t i = 0; i < outs; ++i)
      if (from[i] >= 0) sums.data()[from[i]] += widened(own[i]);
    for (int64_t i = 0; i < count; ++i) out[image * count + i] = halved(sums.data()[i]);
  });
  return enough ? 0 : no_memory;
}
