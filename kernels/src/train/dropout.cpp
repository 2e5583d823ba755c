// Dropout of codes and of their errors, whose numbers are drawn anew on the way back instead of being kept.
#include <atomic>
#include <cstring>

#include "bounds.h"
#include "buffer.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "philox.h"
#include "scalars.h"
#include "threads.h"

namespace fedmpq {
namespace {

constexpr int64_t chunk = 4096;  // numbers drawn at a time

struct Drawing {
  PhiloxStream stream;
  int64_t count, channels;  // elements of an image
  bool whole;
  float rate;

  int64_t numbers() const { return whole ? channels : count; }
  int64_t blocks() const { return (numbers() + 3) / 4; }
  bool fits(int64_t images) const { return images * blocks() <= int64_t{UINT32_MAX} + 1; }

  // body(element, kept) for every element of an image.
  template <class Body>
  void each(int image, const Body& body) const {
    float numbers[chunk];
    for (int64_t done = 0; done < this->numbers(); done += chunk) {
      const int64_t part = this->numbers() - done < chunk ? this->numbers() - done : chunk;
      philox_uniform(stream, static_cast<uint32_t>(image * blocks() + done / 4), part, numbers);
      const int64_t repeats = whole ? count / channels : 1;
      for (int64_t again = 0; again < repeats; ++again)
        for (int64_t i = 0; i < part; ++i) body(again * channels + done + i, numbers[i] >= rate);
    }
  }
};

bool is_rate(float rate) { return rate > 0.0f && rate < 1.0f; }

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_drop(const FedmpqCodes* codes, const FedmpqExtent* extent, int32_t whole, float rate, uint32_t c1, uint32_t c2,
                    uint32_t c3, uint32_t k0, uint32_t k1, int32_t threads, uint8_t* out) {
  if (!is_valid(codes) || !is_valid(extent) || !given(out) || !is_rate(rate)) return not_valid;
  const int64_t count = extent->pixels * extent->channels;
  const Drawing drawing{{c1, c2, c3, k0, k1}, count, extent->channels, whole != 0, rate};
  if (!drawing.fits(extent->images)) return not_valid;
  const bool pairs = codes->pairs != 0;
  const auto zero = static_cast<uint8_t>(codes->zero);
  std::atomic<bool> enough{true};
  parallel(extent->images, threads, [&](int image, int) {
    const Buffer<uint8_t> scratch(pairs ? 2 * count : 0);
    if (!scratch) {
      enough = false;
      return;
    }
    const uint8_t* from = as_bytes(*codes, image, count, scratch.data());
    uint8_t* to = pairs ? scratch.data() + count : out + image * count;
    drawing.each(image, [=](int64_t i, bool kept) { to[i] = kept ? from[i] : zero; });
    if (pairs) ops().pack(to, count, out + image * ((count + 1) / 2));
  });
  return enough ? 0 : no_memory;
}

int32_t fedmpq_drop_errors(const FedmpqExtent* extent, int32_t whole, float rate, float factor, uint32_t c1, uint32_t c2,
                           uint32_t c3, uint32_t k0, uint32_t k1, int32_t threads, uint16_t* error) {
  if (!is_valid(extent) || !given(error) || !is_rate(rate)) return not_valid;
  const int64_t count = extent->pixels * extent->channels;
  const Drawing drawing{{c1, c2, c3, k0, k1}, count, extent->channels, whole != 0, rate};
  if (!drawing.fits(extent->images)) return not_valid;
  parallel(extent->images, threads, [&](int image, int) {
    uint16_t* own = error + image * count;
    drawing.each(image, [=](int64_t i, bool kept) { own[i] = kept ? halved(widened(own[i]) * factor) : uint16_t{0}; });
  });
  return 0;
}
