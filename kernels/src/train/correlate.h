// Correlation of padded images with weights as tiles read them: what a convolution and the way back to its input have in
// common.
#pragma once

#include <atomic>
#include <cstring>

#include "bitserial.h"
#include "bounds.h"
#include "buffer.h"
#include "padded.h"
#include "threads.h"
#include "weights.h"

namespace fedmpq {

// Correlation of a padded copy with packed weights.
struct Product {
  int kernel_h, kernel_w, dilation_h, dilation_w, stride_h, stride_w;
  int out_height, out_width, outputs;
  int blocks() const { return up(outputs, lanes) / lanes; }
  // Without dilation the pixels under a row of the kernel are one run of bytes.
  bool joined() const { return dilation_w == 1; }
  int segments() const { return joined() ? kernel_h : kernel_h * kernel_w; }
  int taps_of_segment() const { return joined() ? kernel_w : 1; }
  int quads(int depth) const { return up(taps_of_segment() * depth, 4) / 4; }
  int64_t packed_size(int depth) const { return int64_t{blocks()} * segments() * quads(depth) * lanes * 4; }
  // Rows of the output that are computed, and then read again, while they stay in the first cache.
  int band() const {
    constexpr int sums = 4096;
    const int rows = sums / (out_width * blocks() * lanes);
    return rows < 1 ? 1 : (rows < out_height ? rows : out_height);
  }
};

// Where the weights of a product lie: weight(output, input, tap) is at output * by_output + input * by_input + order[tap].
struct Weights {
  Stored stored;
  int64_t by_output, by_input;
  const int32_t* order;
};

// packed[block][segment][quad][lane][byte], zero beyond the real ones. The bytes of a segment are those of its taps, each
// with its inputs and, up to `depth`, zeros.
void pack_weights(const Product& product, int inputs, int depth, const Weights& weights, int8_t* packed);

// The greatest magnitude of a weight; -1 if there are codes of more bits than they are said to have.
int greatest_weight(const FedmpqConv& c, const Stored& weights);

// Products in one sum of a convolution.
inline int64_t terms_of(const FedmpqConv& c) { return int64_t{c.kernel_h} * c.kernel_w * (c.channels / c.groups); }

// Where the sums of each group start: what `zero` in every code adds to them, which is as much as the sum of an output's
// weights times `zero`, is taken off beforehand.
class Start {
 public:
  Start(const Product& product, int depth, int groups, const int8_t* packed, int zero)
      : used_(zero != 0), stride_(product.blocks() * lanes), values_(used_ ? int64_t{groups} * stride_ : 0),
        ones_(int64_t{4} * product.quads(depth) + slack), first_(product.segments()) {
    if (!used_ || !*this) return;
    std::memset(ones_.data(), 1, static_cast<size_t>(product.quads(depth)) * 4 + slack);
    std::memset(first_.data(), 0, static_cast<size_t>(product.segments()) * sizeof(int32_t));
    for (int g = 0; g < groups; ++g)
      sum_weights(product, depth, packed + g * product.packed_size(depth), values_.data() + int64_t{g} * stride_);
    for (int64_t i = 0; i < int64_t{groups} * stride_; ++i) values_.data()[i] *= -zero;
  }
  explicit operator bool() const { return values_ && ones_ && first_; }
  // Of all the outputs of a group; null if they start at zero.
  const int32_t* of(int group) const { return used_ ? values_.data() + int64_t{group} * stride_ : nullptr; }

 private:
  // The sum of each output's weights: their product with ones.
  void sum_weights(const Product& product, int depth, const int8_t* packed, int32_t* sums) const {
    const int quads = product.quads(depth);
    const int64_t block = int64_t{product.segments()} * quads * lanes * 4;
    for (int b = 0; b < product.blocks(); ++b)
      ops().tile({ones_.data(), 0, 1, first_.data(), product.segments(), quads, packed + b * block, static_cast<ptrdiff_t>(block),
                  1, sums + b * lanes, lanes, nullptr, 0, products_that_fit(2, 1, 127)});
  }

  bool used_;
  int stride_;
  Buffer<int32_t> values_;
  Buffer<uint8_t> ones_;
  Buffer<int32_t> first_;  // where every segment reads its ones: at the same place
};

// The runs of bytes under the kernel, from the first pixel on. For the bit-serial form their offsets are those of bits.
struct Segments {
  int count, quads;
  Buffer<int32_t> offsets;

  Segments(const Product& product, const Layout& layout, bool serial)
      : count(product.segments()), quads(product.quads(layout.depth)), offsets(count) {
    if (!*this) return;
    const int line = layout.padded_width * layout.depth;
    for (int s = 0; s < count; ++s) {
      const int r = product.joined() ? s : s / product.kernel_w, c = product.joined() ? 0 : s % product.kernel_w;
      const int bytes = r * product.dilation_h * line + c * product.dilation_w * layout.depth;
      offsets.data()[s] = serial ? bytes / 8 : bytes;
    }
  }
  explicit operator bool() const { return static_cast<bool>(offsets); }
};

// The bit-serial form of a product: planes of one group's weights, and room for those of an image's codes.
struct Serial {
  int bits;  // of a weight; 0 if the form is not used
  const uint64_t* weights;
  uint8_t* codes;
};

// Rows of an image's output: all of them, or what one of several threads computes where there are more threads than images.
struct Rows {
  int image, first, last;
};

// The outputs of some images as what threads take one after the other: whole images, or pieces of them if they are too few.
class Pieces {
 public:
  Pieces(int images, int rows, int columns, int threads)
      : images_(images), rows_(rows), each_(images < 1 || images >= threads ? 1 : (threads + images - 1) / images) {
    constexpr int worth_it = 32;  // pixels: with fewer, a thread takes longer to read weights than to multiply by them
    const int64_t most = int64_t{rows} * columns / worth_it;
    each_ = most < each_ ? static_cast<int>(most) : each_;
    each_ = rows < each_ ? rows : each_;
    each_ = each_ < 1 ? 1 : each_;
  }
  int count() const { return images_ * each_; }
  bool whole() const { return each_ == 1; }
  Rows rows(int item) const {
    const int64_t piece = item % each_;
    return {item / each_, static_cast<int>(piece * rows_ / each_), static_cast<int>((piece + 1) * rows_ / each_)};
  }
  int image(int item) const { return item / each_; }

 private:
  int images_, rows_, each_;
};

// Some rows of the output from the pixel at `from` on, `line` bytes apart, their sums starting at `start`, or at zero if
// that is null: by tiles, or by bit-planes, which lie `plane` bytes apart and whose offsets are an eighth of those of bytes.
void tile_rows(const Product& product, int depth, const Segments& segments, const uint8_t* from, int64_t line, int rows,
               const int8_t* packed, int fit, const int32_t* start, int32_t* sums);
void bit_row(const Product& product, int depth, const Segments& segments, const uint8_t* from, int64_t plane,
             const Serial& serial, const int32_t* start, int32_t* sums);

// Some rows of the output, out_width x 16*blocks each, a band at a time: at target(y) those from y on, then
// done(y, rows, there). Sums start at `start`, or at zero.
template <class Target, class Done>
void correlate(const Product& product, const Layout& layout, const Segments& segments, const uint8_t* padded,
               const int8_t* packed, int fit, const Serial& serial, const int32_t* start, const Rows& piece, Target target,
               Done done) {
  const int64_t line = int64_t{layout.padded_width} * layout.depth * product.stride_h, codes = layout.size() - slack;
  if (serial.bits > 0) fedmpq_pack_planes(padded, codes, code_planes, serial.codes);
  const int64_t row = int64_t{product.out_width} * product.blocks() * lanes;
  for (int y = piece.first; y < piece.last; y += product.band()) {
    const int rows = piece.last - y < product.band() ? piece.last - y : product.band();
    int32_t* sums = target(y);
    for (int i = 0; i < rows && serial.bits > 0; ++i)
      bit_row(product, layout.depth, segments, serial.codes + (y + i) * line / 8, codes / 8, serial, start, sums + i * row);
    if (serial.bits == 0)
      tile_rows(product, layout.depth, segments, padded + y * line, line, rows, packed, fit, start, sums);
    done(y, rows, sums);
  }
}

// Drops the lanes beyond the real outputs: pixels x outputs, side by side.
void tidy(int32_t* sums, int64_t pixels, int outputs, int stride);

// Where a depthwise product's taps are from the first on, in bytes; empty for any other product.
struct Taps {
  Buffer<int32_t> offsets;
  Taps(bool deep, const Layout& layout, int kernel_h, int kernel_w, int dilation_h, int dilation_w);
  explicit operator bool() const { return static_cast<bool>(offsets); }
};

// Buffers of one thread for one kind of product.
struct Scratch {
  Buffer<uint8_t> bytes, padded, planes;
  Buffer<int32_t> sums;
  int next = -1;  // the item that likely comes after the one under way, if any
  Scratch(int64_t raw, int64_t copy, int64_t band)
      : bytes(raw + slack), padded(copy), planes(copy / 2 + slack), sums(band) {}
  explicit operator bool() const { return bytes && padded && planes && sums; }
};

// body(item, scratch) for all items. Whether there was memory.
template <class Body>
bool with_scratch(int64_t raw, int64_t copy, int64_t band, int items, int threads, Body body) {
  std::atomic<bool> enough{true};
  parallel_shares(items, threads, [&](Items& own, int) {
    Scratch scratch(raw, copy, band);
    if (!scratch) {
      enough = false;
      return;
    }
    for (int item; (item = own.take()) >= 0;) {
      scratch.next = own.next();
      body(item, scratch);
    }
  });
  return enough;
}

}  // namespace fedmpq
