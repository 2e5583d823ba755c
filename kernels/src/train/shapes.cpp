// What moves codes and errors about without computing on them, but for the new scale of what is joined.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "bounds.h"
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
    auto* scratch = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(count)));
    if (scratch == nullptr) {
      enough = false;
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch);
    ops().join_codes(joining, extent->pixels, extent->channels, from, out + image * outs + start, channels);
    std::free(scratch);
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
    auto* scratch = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(count + outs)));
    if (scratch == nullptr) {
      enough = false;
      return;
    }
    const uint8_t* source = as_bytes(*codes, image, count, scratch);
    uint8_t* to = pairs ? scratch + count : out + image * outs;
    for (int64_t i = 0; i < outs; ++i) to[i] = from[i] < 0 ? zero : source[from[i]];
    if (pairs) ops().pack(to, outs, out + image * ((outs + 1) / 2));
    std::free(scratch);
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_rearrange_backward(const uint16_t* error, int32_t images, int64_t count, const int32_t* from, int64_t outs,
                                  int32_t threads, uint16_t* out) {
  if (!given(error, out) || !are_places(images, count, from, outs)) return not_valid;
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    auto* sums = static_cast<float*>(std::calloc(static_cast<size_t>(count), sizeof(float)));
    if (sums == nullptr) {
      enough = false;
      return;
    }
    const uint16_t* own = error + image * outs;
    for (int64_t i = 0; i < outs; ++i)
      if (from[i] >= 0) sums[from[i]] += widened(own[i]);
    for (int64_t i = 0; i < count; ++i) out[image * count + i] = halved(sums[i]);
    std::free(sums);
  });
  return enough ? 0 : no_memory;
}
