// The passes between products over whole batches: images are the items that threads share, and whatever is summed in
// floating point is summed image by image, so the number of threads changes nothing.
#include <atomic>
#include <cstdlib>

#include "bounds.h"
#include "buffer.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "philox.h"
#include "threads.h"

using namespace fedmpq;

namespace {

// The product before left the accumulators of the last images in the cache.
constexpr Order in_the_cache = Order::last_first;

}  // namespace

int32_t fedmpq_requantize(const int32_t* acc, const FedmpqExtent* extent, const FedmpqRescale* rescale, int32_t pairs,
                          int32_t threads, uint8_t* out) {
  if (!is_valid(extent) || !is_valid(rescale) || !given(acc, out)) return not_valid;
  if (!is_range(rescale->low, rescale->high, pairs != 0)) return not_valid;
  const int images = extent->images, channels = extent->channels;
  const int64_t pixels = extent->pixels, count = pixels * channels;
  std::atomic<bool> enough{true};
  parallel(images, threads, [&](int image, int) {
    if (pairs == 0) {
      ops().requantize(acc + image * count, pixels, channels, *rescale, out + image * count);
      return;
    }
    auto* bytes = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(count)));
    if (bytes == nullptr) {
      enough = false;
      return;
    }
    ops().requantize(acc + image * count, pixels, channels, *rescale, bytes);
    ops().pack(bytes, count, out + image * ((count + 1) / 2));
    std::free(bytes);
  }, in_the_cache);
  return enough ? 0 : no_memory;
}

int32_t fedmpq_keep(const int32_t* acc, int32_t images, int64_t count, int32_t threads, int16_t* kept, int32_t* fit) {
  if (!is_batch(images, count) || !given(acc, kept, fit)) return not_valid;
  std::atomic<bool> all{true};
  parallel(images, threads, [&](int image, int) {
    if (all && !ops().narrow(acc + image * count, count, kept + image * count)) all = false;
  }, in_the_cache);
  *fit = all ? 1 : 0;
  return 0;
}

int32_t fedmpq_backward_error(const int32_t* acc, const uint16_t* error, const FedmpqExtent* extent,
                              const FedmpqRescale* rescale, const FedmpqNormalize* normalize, const float* gain,
                              const float* mean_g, const float* mean_gx, int32_t threads, uint16_t* out,
                              float* greatest) {
  if (!is_valid(extent) || !is_valid(rescale) || !is_valid(normalize)) return not_valid;
  if (!given(acc, error, gain, mean_g, mean_gx, out, greatest)) return not_valid;
  const int images = extent->images, channels = extent->channels;
  const int64_t pixels = extent->pixels, count = pixels * channels;
  parallel(images, threads, [&](int image, int) {
    greatest[image] = ops().backward_error(acc + image * count, error + image * count, pixels, channels, *rescale,
                                           normalize->norm, normalize->bias, gain, mean_g, mean_gx, out + image * count);
  }, in_the_cache);
  return 0;
}

int32_t fedmpq_quantize_error(const uint16_t* error, int32_t images, int64_t count, float inverse, uint32_t c1, uint32_t c2,
                              uint32_t c3, uint32_t k0, uint32_t k1, int32_t threads, int8_t* out) {
  if (!is_batch(images, count) || !given(error, out)) return not_valid;
  const PhiloxStream stream{c1, c2, c3, k0, k1};
  const int64_t blocks = (count + 15) / 16;  // of 16 random bytes, for one image
  if (images * blocks > int64_t{UINT32_MAX} + 1) return not_valid;
  parallel(images, threads, [&](int image, int) {
    constexpr int64_t chunk = 4096;
    uint32_t random[chunk / 4];
    for (int64_t done = 0; done < count; done += chunk) {
      const int64_t part = count - done < chunk ? count - done : chunk;
      philox_words(stream, static_cast<uint32_t>(image * blocks + done / 16), (part + 15) / 16, random);
      ops().quantize_error(error + image * count + done, part, inverse, reinterpret_cast<const uint8_t*>(random),
                           out + image * count + done);
    }
  });
  return 0;
}
