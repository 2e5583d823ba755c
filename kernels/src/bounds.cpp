#include "bounds.h"

#include <initializer_list>

#include "train/threads.h"

namespace fedmpq {
namespace {

constexpr int64_t most_side = 65536, most_elements = int64_t{1} << 28, most_images = int64_t{1} << 24;

bool within(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

// Whether three positive sides are no more than so many elements; two of them at a time stay within 64 bits.
bool few(int64_t a, int64_t b, int64_t c) { return a * b <= most_elements && a * b * c <= most_elements; }

// Along one axis: `out` windows of `kernel` elements, `dilation` apart, go over `size` elements.
bool slides(int64_t size, int64_t out, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
  for (const int64_t side : {size, out, kernel, stride, dilation})
    if (!within(side, 1, most_side)) return false;
  if (!within(pad, 0, most_side)) return false;
  const int64_t extent = dilation * (kernel - 1) + 1, room = size + 2 * pad;
  return extent <= room && out == (room - extent) / stride + 1;
}

// Whether these `count` pairs are spans, each of at least one of `size` elements.
bool are_spans(const int32_t* spans, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i)
    if (spans[2 * i] < 0 || spans[2 * i] >= spans[2 * i + 1] || spans[2 * i + 1] > size) return false;
  return true;
}

}  // namespace

bool is_valid(const FedmpqConv* conv) {
  if (conv == nullptr) return false;
  const FedmpqConv& c = *conv;
  for (const int64_t side : {c.channels, c.out_channels, c.groups})
    if (!within(side, 1, most_side)) return false;
  return within(c.images, 0, most_images) && c.channels % c.groups == 0 && c.out_channels % c.groups == 0 &&
         slides(c.height, c.out_height, c.kernel_h, c.stride_h, c.pad_h, c.dilation_h) &&
         slides(c.width, c.out_width, c.kernel_w, c.stride_w, c.pad_w, c.dilation_w) &&
         few(c.height, c.width, c.channels) && few(c.out_height, c.out_width, c.out_channels) &&
         few(c.kernel_h, c.kernel_w, 1) && few(c.channels / c.groups, int64_t{c.kernel_h} * c.kernel_w, c.out_channels);
}

bool is_valid(const FedmpqPool* pool) {
  if (pool == nullptr || !given(pool->rows, pool->columns)) return false;
  const FedmpqPool& p = *pool;
  for (const int64_t side : {p.height, p.width, p.channels, p.out_height, p.out_width})
    if (!within(side, 1, most_side)) return false;
  return within(p.images, 0, most_images) && few(p.height, p.width, p.channels) &&
         few(p.out_height, p.out_width, p.channels) && are_spans(p.rows, p.out_height, p.height) &&
         are_spans(p.columns, p.out_width, p.width);
}

bool is_valid(const FedmpqCodes* codes) {
  return codes != nullptr && codes->data != nullptr && within(codes->zero, 0, greatest_code(*codes));
}

bool is_batch(int64_t images, int64_t count) { return within(images, 0, most_images) && within(count, 1, most_elements); }

bool is_valid(const FedmpqExtent* extent) {
  return extent != nullptr && within(extent->images, 0, most_images) && within(extent->channels, 1, most_side) &&
         within(extent->pixels, 1, most_elements / extent->channels);
}

bool is_part(const FedmpqExtent& extent, int64_t start, int64_t channels) {
  return within(channels, 1, most_side) && within(start, 0, channels - extent.channels) &&
         within(extent.pixels, 1, most_elements / channels);
}

bool are_places(int64_t images, int64_t count, const int32_t* from, int64_t outs) {
  if (!is_batch(images, count) || !within(outs, 1, most_elements) || from == nullptr) return false;
  for (int64_t i = 0; i < outs; ++i)
    if (!within(from[i], -1, count - 1)) return false;
  return true;
}

bool is_range(float low, float high, bool pairs) {
  // What is not a number is within nothing.
  return low >= -255.0f && low <= high && high <= 255.0f && high - low <= (pairs ? 15.0f : 255.0f);
}

bool is_valid(const FedmpqRescale* rescale) {
  return rescale != nullptr && given(rescale->scale, rescale->shift) && is_range(rescale->low, rescale->high, false);
}

bool is_valid(const FedmpqNormalize* normalize) {
  return normalize != nullptr && given(normalize->norm, normalize->bias);
}

bool is_valid(const FedmpqUpdate* update) {
  if (update == nullptr || !within(update->bits, 1, 8) || !within(update->count, 1, most_elements)) return false;
  if (!within(update->row, 1, update->count) || update->count % update->row != 0) return false;
  if (!given(update->step, update->rate)) return false;
  switch (update->momentum_bits) {
    case 0:
      return true;
    case 8:
      return update->momentum_codes != nullptr && update->momentum_scales != nullptr;
    case 32:
      return update->momentum_codes != nullptr;
    default:
      return false;
  }
}

bool sums_fit(int64_t terms, int64_t code, int64_t weight) { return terms * code * weight <= most_sum; }

int threads_of(int32_t threads) { return threads < 1 ? 1 : (threads > max_threads ? max_threads : threads); }

FedmpqConv shortest_stride(const FedmpqConv& conv) {
  FedmpqConv short_one = conv;
  const int rows = conv.height + 2 * conv.pad_h, columns = conv.width + 2 * conv.pad_w;
  if (short_one.stride_h > rows) short_one.stride_h = rows;
  if (short_one.stride_w > columns) short_one.stride_w = columns;
  return short_one;
}

}  // namespace fedmpq
