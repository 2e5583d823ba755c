// What the functions of the C interface rely on, checked where they are entered, in every build: a caller's mistake is a
// status, never memory that is not theirs.
#pragma once

#include <cstdint>

#include "fedmpq/training.h"
#include "train/weights.h"

namespace fedmpq {

// What functions return beside 0; fedmpq/kernels.h states it.
constexpr int32_t no_memory = -1, sums_too_large = -2, not_finite = -3, not_valid = -4;

// Bytes of a padded copy: 32 bits hold its offsets, with a bit to spare for their sums.
constexpr int64_t most_copy = int64_t{1} << 30;
constexpr int64_t most_sum = (int64_t{1} << 31) - 1;

// Whether none of these is null.
template <class... Pointers>
bool given(const Pointers*... pointers) {
  return (... && (pointers != nullptr));
}

// A convolution whose sizes are positive, fit one another and can be counted: no side above 65536, no more than 2^28
// elements in an image, in an output or in the weights.
bool is_valid(const FedmpqConv* conv);

// A pool whose every window has a pixel of the image and lies within it; no side above 65536, no image or output above 2^28
// elements.
bool is_valid(const FedmpqPool* pool);

// Codes of at most 255 more than the least, in memory that is there.
bool is_valid(const FedmpqCodes* codes);

// Weights, or codes of at most 8 bits, in memory that is there; greatest_weight looks at them.
inline bool is_valid(const Stored& weights) { return weights.data != nullptr && weights.bits <= 8; }

// So many images of so many elements each.
bool is_batch(int64_t images, int64_t count);

bool is_valid(const FedmpqExtent* extent);

// Whether the extent's channels are `start` and on of `channels` in all, which are few enough.
bool is_part(const FedmpqExtent& extent, int64_t start, int64_t channels);

// Whether each of the `outs` elements that `from` places comes from one of `count` elements, or, as -1, from nowhere.
bool are_places(int64_t images, int64_t count, const int32_t* from, int64_t outs);

// Codes from low to high that fit a byte, or half a byte if `pairs`.
bool is_range(float low, float high, bool pairs);

bool is_valid(const FedmpqRescale* rescale);
bool is_valid(const FedmpqNormalize* normalize);

bool is_valid(const FedmpqUpdate* update);

// Whether sums of so many products of factors up to these magnitudes fit 32 bits.
bool sums_fit(int64_t terms, int64_t code, int64_t weight);

// The greatest magnitude that a stored code's part of a product has.
inline int greatest_code(const FedmpqCodes& codes) { return codes.pairs != 0 ? 15 : 255; }

// Threads as they can be: at least one, at most as many as the pool has.
int threads_of(int32_t threads);

// The same convolution with strides no longer than what they stride over: a single window has no next one.
FedmpqConv shortest_stride(const FedmpqConv& conv);

}  // namespace fedmpq
