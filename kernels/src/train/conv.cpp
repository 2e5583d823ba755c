// Convolutions of codes, and both products of their backward pass, as tiles.
//
// Forward: an image's codes go into a zero-padded copy; a tile's rows are neighbouring output pixels, its segments the rows
// of the kernel. Backward to the input: the same on the errors, with the kernel turned round, for the pixels of each phase
// of the stride by themselves. Backward to the weights: the image channel by channel; a tile's rows are input channels, its segments image rows,
// and what it reads as weights are the errors, four neighbouring pixels together.
//
// Codes are bytes `code + zero`; sums are of codes, so zero times the sum of the weights is taken off in the end, and
// padding is `zero`.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "bitserial.h"
#include "fedmpq/training.h"
#include "ops.h"
#include "shuffle.h"
#include "threads.h"

namespace fedmpq {
namespace {

// Memory that lives for one call; no exceptions here, so it says itself when there is none.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(std::malloc(static_cast<size_t>(count > 0 ? count : 1) * sizeof(T)))) {}
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  T* data_;
};

// A number of sums for each image, and their totals in the order of the images, whichever thread made them.
template <class T>
class InOrder {
 public:
  InOrder(int images, int64_t count)
      : images_(images),
        count_(count),
        parts_(static_cast<T*>(std::calloc(static_cast<size_t>(images * count + 1), sizeof(T)))) {}
  ~InOrder() { std::free(parts_); }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
  explicit operator bool() const { return parts_ != nullptr; }
  T* operator[](int image) const { return parts_ + image * count_; }
  void total(double* sums) const {
    for (int64_t i = 0; i < count_; ++i) sums[i] = 0.0;
    for (int image = 0; image < images_; ++image)
      for (int64_t i = 0; i < count_; ++i) sums[i] += static_cast<double>((*this)[image][i]);
  }

 private:
  int images_;
  int64_t count_;
  T* parts_;
};

constexpr int slack = 64;  // bytes that a tile's last quad or a last vector may read beyond an image

int up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// One image: where its bytes come from and what they mean.
struct Source {
  const uint8_t* data;
  bool pairs;    // two 4-bit codes a byte
  int64_t bytes;  // of one image
  uint8_t flip;  // what every byte is xored with: 128 turns codes into signed bytes and errors into unsigned ones
};

// The padded copy of one group's channels of an image, and the sums of products over it.
struct Layout {
  int height, width, channels;       // of the source
  int padded_height, padded_width;   // of the copy
  int top, left, spread_h, spread_w; // source pixel (y, x) goes to (top + y * spread_h, left + x * spread_w)
  int group_channels, depth;         // channels a group has; rounded up to a multiple of 4
  uint8_t fill;
  int64_t size() const { return int64_t{padded_height} * padded_width * depth + slack; }
};

const uint8_t* bytes_of(const Source& source, int image, int64_t count, uint8_t* scratch) {
  const uint8_t* from = source.data + image * source.bytes;
  if (source.pairs) {
    ops().unpack(from, count, scratch);
    return scratch;
  }
  if (source.flip == 0) return from;
  for (int64_t i = 0; i < count; ++i) scratch[i] = from[i] ^ source.flip;
  return scratch;
}

void fill(uint8_t* from, const uint8_t* to, uint8_t value) { std::memset(from, value, static_cast<size_t>(to - from)); }

// The padded copy when whole rows can be copied, straight from the stored form.
void pad_rows(const Layout& layout, const Source& source, int image, uint8_t* out) {
  const uint8_t* data = source.data + image * source.bytes;
  const int64_t line = int64_t{layout.padded_width} * layout.depth, run = int64_t{layout.width} * layout.channels;
  const int64_t start = int64_t{layout.left} * layout.depth;
  const int64_t kept = run < line - start ? run : line - start;
  uint8_t* filled = out;  // everything before this is done
  for (int y = 0; y < layout.height && layout.top + y < layout.padded_height; ++y) {
    uint8_t* to = out + (layout.top + y) * line + start;
    fill(filled, to, layout.fill);
    if (source.pairs)
      ops().unpack(data + y * run / 2, kept, to);
    else if (source.flip == 0)
      std::memcpy(to, data + y * run, static_cast<size_t>(kept));
    else
      for (int64_t i = 0; i < kept; ++i) to[i] = data[y * run + i] ^ source.flip;
    filled = to + kept;
  }
  fill(filled, out + layout.size(), layout.fill);
}

// The padded copy in general: pixel by pixel.
void pad_pixels(const Layout& layout, const uint8_t* bytes, int group, uint8_t* out) {
  std::memset(out, layout.fill, static_cast<size_t>(layout.size()));
  const int row = layout.padded_width * layout.depth;
  for (int y = 0; y < layout.height; ++y) {
    const int to_y = layout.top + y * layout.spread_h;
    if (to_y < 0 || to_y >= layout.padded_height) continue;
    const uint8_t* from = bytes + int64_t{y} * layout.width * layout.channels + group * layout.group_channels;
    for (int x = 0; x < layout.width; ++x, from += layout.channels) {
      const int to_x = layout.left + x * layout.spread_w;
      if (to_x < 0 || to_x >= layout.padded_width) continue;
      std::memcpy(out + int64_t{to_y} * row + to_x * layout.depth, from, static_cast<size_t>(layout.group_channels));
    }
  }
}

bool by_rows(const Layout& layout, const Source& source) {
  return layout.group_channels == layout.channels && layout.depth == layout.channels && layout.spread_h == 1 &&
         layout.spread_w == 1 && layout.top >= 0 && layout.left >= 0 && layout.left <= layout.padded_width &&
         (!source.pairs || layout.width * layout.channels % 2 == 0);
}

void pad(const Layout& layout, const Source& source, int image, int group, uint8_t* scratch, uint8_t* out) {
  if (by_rows(layout, source)) return pad_rows(layout, source, image, out);
  const int64_t count = int64_t{layout.height} * layout.width * layout.channels;
  pad_pixels(layout, bytes_of(source, image, count, scratch), group, out);
}

// Correlation of a padded copy with packed weights.
struct Product {
  int kernel_h, kernel_w, dilation_h, dilation_w, stride_h, stride_w;
  int out_height, out_width, outputs;
  int blocks() const { return up(outputs, lanes) / lanes; }
  // Without dilation the pixels under a row of the kernel are one run of bytes.
  bool joined() const { return dilation_w == 1; }
  int segments() const { return joined() ? kernel_h : kernel_h * kernel_w; }
  int quads(int depth) const { return (joined() ? kernel_w : 1) * depth / 4; }
  int64_t packed_size(int depth) const { return int64_t{blocks()} * kernel_h * kernel_w * depth * lanes; }
};

// Where the weights of a product lie: weight(output, input, tap) is at output * by_output + input * by_input + order[tap].
struct Weights {
  const int8_t* data;
  int64_t by_output, by_input;
  const int32_t* order;
};

// Four weights of neighbouring inputs, of which there may be fewer, as a tile reads them; tap by tap, `by_tap` bytes apart.
void pack_quad(const int8_t* from, int64_t by_input, int inputs, int taps, const int32_t* order, int64_t by_tap, int8_t* to) {
  if (inputs < 4) {
    for (int c = 0; c < inputs; ++c)
      for (int tap = 0; tap < taps; ++tap) to[tap * by_tap + c] = from[c * by_input + order[tap]];
    return;
  }
  const int8_t *second = from + by_input, *third = second + by_input, *fourth = third + by_input;
  for (int tap = 0; tap < taps; ++tap, to += by_tap) {
    const int at = order[tap];
    const int8_t four[4] = {from[at], second[at], third[at], fourth[at]};
    std::memcpy(to, four, sizeof four);
  }
}

// packed[block][tap][quad][lane][byte], zero beyond the real ones.
void pack_weights(const Product& product, int inputs, int depth, const Weights& weights, int8_t* packed) {
  const int taps = product.kernel_h * product.kernel_w;
  if (inputs % 4 != 0 || product.outputs % lanes != 0)
    std::memset(packed, 0, static_cast<size_t>(product.packed_size(depth)));
  const int64_t by_tap = int64_t{depth} * lanes;
  for (int o = 0; o < product.outputs; ++o) {
    int8_t* lane = packed + (o / lanes) * taps * by_tap + o % lanes * 4;
    for (int c = 0; c < inputs; c += 4)
      pack_quad(weights.data + o * weights.by_output + c * weights.by_input, weights.by_input,
                inputs - c < 4 ? inputs - c : 4, taps, weights.order, by_tap, lane + c * lanes);
  }
}

// Where the sums of each group start: what `zero` in every code adds to them, which is as much as the sum of an output's
// weights times `zero`, is taken off beforehand.
class Start {
 public:
  Start(const Product& product, int depth, int groups, const int8_t* packed, int zero)
      : used_(zero != 0), stride_(product.blocks() * lanes), values_(used_ ? groups * stride_ : 0), ones_(depth + slack) {
    if (!used_ || !*this) return;
    std::memset(ones_.data(), 1, static_cast<size_t>(depth + slack));
    for (int g = 0; g < groups; ++g)
      sum_weights(product, depth, packed + g * product.packed_size(depth), values_.data() + int64_t{g} * stride_);
    for (int64_t i = 0; i < int64_t{groups} * stride_; ++i) values_.data()[i] *= -zero;
  }
  explicit operator bool() const { return values_ && ones_; }
  // Of all the outputs of a group; null if they start at zero.
  const int32_t* of(int group) const { return used_ ? values_.data() + int64_t{group} * stride_ : nullptr; }

 private:
  // The sum of each output's weights: their product with ones.
  void sum_weights(const Product& product, int depth, const int8_t* packed, int32_t* sums) const {
    const int taps = product.kernel_h * product.kernel_w;
    const int64_t block = int64_t{taps} * depth * lanes;
    const int32_t first[1024] = {};  // where every tap reads its ones
    for (int b = 0; b < product.blocks(); ++b)
      ops().tile({ones_.data(), 0, 1, first, taps, depth / 4, packed + b * block, static_cast<ptrdiff_t>(block), 1,
                  sums + b * lanes, lanes, false, products_that_fit(2, 1, 127)});
  }

  bool used_;
  int stride_;
  Buffer<int32_t> values_;
  Buffer<uint8_t> ones_;
};

// The runs of bytes under the kernel, from the first pixel on.
struct Segments {
  int32_t offsets[1024];
  int count, quads;

  Segments(const Product& product, const Layout& layout)
      : count(product.segments()), quads(product.quads(layout.depth)) {
    const int line = layout.padded_width * layout.depth;
    for (int s = 0; s < count; ++s) {
      const int r = product.joined() ? s : s / product.kernel_w, c = product.joined() ? 0 : s % product.kernel_w;
      offsets[s] = r * product.dilation_h * line + c * product.dilation_w * layout.depth;
    }
  }
};

// One row of the output from the pixel at `from` on.
void tile_row(const Product& product, int depth, const Segments& segments, const uint8_t* from, const int8_t* packed,
              int fit, bool add, int32_t* sums) {
  const int blocks = product.blocks(), stride = product.stride_w * depth;
  const ptrdiff_t block = ptrdiff_t{segments.count} * segments.quads * lanes * 4;
  const auto tile = ops().tile;
  for (int b = 0; b < blocks; b += 2)
    for (int x = 0; x < product.out_width; x += max_rows) {
      const int rows = product.out_width - x < max_rows ? product.out_width - x : max_rows;
      tile({from + x * stride, stride, rows, segments.offsets, segments.count, segments.quads, packed + b * block, block,
            blocks - b < 2 ? 1 : 2, sums + (x * blocks + b) * lanes, blocks * lanes, add, fit});
    }
}

// The bit-serial form of a product: planes of one group's weights, and room for those of an image's codes.
struct Serial {
  int bits;  // of a weight; 0 if the form is not used
  const uint64_t* weights;
  uint8_t* codes;
};

// The same by bit-planes, whose offsets are an eighth of those of bytes. Planes lie `plane` bytes apart.
void bit_row(const Product& product, int depth, const Segments& segments, const uint8_t* from, int64_t plane,
             const Serial& serial, bool add, int32_t* sums) {
  const int blocks = product.blocks(), stride = product.stride_w * depth / 8, words = up(segments.quads, 16) / 16;
  const int used = 4 * segments.quads % 64;  // bits of the last word
  const int64_t block = plane_words(segments.count, segments.quads, serial.bits);
  int32_t code_sums[max_rows];
  for (int x = 0; x < product.out_width; x += max_rows) {
    const int rows = product.out_width - x < max_rows ? product.out_width - x : max_rows;
    BitTile tile{from + x * stride, plane, stride, rows, segments.offsets, segments.count, words,
                 used == 0 ? ~uint64_t{0} : (uint64_t{1} << used) - 1, serial.weights, serial.bits,
                 sums + int64_t{x} * blocks * lanes, blocks * lanes, add};
    bit_serial().sum(tile, code_sums);
    for (int b = 0; b < blocks; ++b, tile.w += block, tile.out += lanes) bit_serial().product(tile, code_sums);
  }
}

// Every row of the output, out_width x 16*blocks, at target(y); then row(y, there). Sums start at `start`, or at zero.
template <class Target, class Row>
void correlate(const Product& product, const Layout& layout, const uint8_t* padded, const int8_t* packed, int fit,
               const Serial& serial, const int32_t* start, Target target, Row row) {
  Segments segments(product, layout);
  const int64_t line = int64_t{layout.padded_width} * layout.depth * product.stride_h, codes = layout.size() - slack;
  if (serial.bits > 0) {
    fedmpq_pack_planes(padded, codes, code_planes, serial.codes);
    for (int s = 0; s < segments.count; ++s) segments.offsets[s] /= 8;
  }
  for (int y = 0; y < product.out_height; ++y) {
    int32_t* sums = target(y);
    const int stride = product.blocks() * lanes;
    for (int x = 0; x < product.out_width && start != nullptr; ++x)
      std::memcpy(sums + int64_t{x} * stride, start, static_cast<size_t>(stride) * sizeof(int32_t));
    if (serial.bits > 0)
      bit_row(product, layout.depth, segments, serial.codes + y * line / 8, codes / 8, serial, start != nullptr, sums);
    else
      tile_row(product, layout.depth, segments, padded + y * line, packed, fit, start != nullptr, sums);
    row(y, sums);
  }
}

int greatest_weight(const FedmpqConv& c, const int8_t* weights) {
  const int64_t count = int64_t{c.out_channels} * (c.channels / c.groups) * c.kernel_h * c.kernel_w;
  int greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int magnitude = weights[i] < 0 ? -weights[i] : weights[i];
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  return greatest;
}

bool is_depthwise(const FedmpqConv& c) { return c.groups == c.channels && c.out_channels == c.channels; }

Layout forward_layout(const FedmpqConv& c, uint8_t fill) {
  Layout layout{};
  layout.height = c.height, layout.width = c.width, layout.channels = c.channels;
  layout.padded_height = (c.out_height - 1) * c.stride_h + c.dilation_h * (c.kernel_h - 1) + 1;
  layout.padded_width = (c.out_width - 1) * c.stride_w + c.dilation_w * (c.kernel_w - 1) + 1;
  layout.top = c.pad_h, layout.left = c.pad_w, layout.spread_h = layout.spread_w = 1;
  layout.group_channels = is_depthwise(c) ? c.channels : c.channels / c.groups;
  layout.depth = is_depthwise(c) ? c.channels : up(layout.group_channels, 4);
  layout.fill = fill;
  return layout;
}

// The pixels of an input along one axis, or every so many of them, and the taps through which they reach errors. With a
// stride a pixel reaches only some of a kernel's taps, the same ones as every stride-th pixel: a phase of them.
struct Phase {
  int first, step, count;        // pixels
  int taps, last_tap, tap_step;  // backwards from the last
  int dilation;                  // errors between those of neighbouring taps
  int before, spread;            // where errors go in the padded copy: the first, and how far apart
};

// With dilation, all pixels are one phase, of which the errors have the stride's zeros in between.
int phases(int stride, int dilation) { return dilation == 1 ? stride : 1; }

Phase phase_of(int phase, int size, int kernel, int stride, int dilation, int pad) {
  if (phases(stride, dilation) == 1)
    return {0, 1, size, kernel, kernel - 1, 1, dilation, dilation * (kernel - 1) - pad, stride};
  const int first = ((phase - pad) % stride + stride) % stride;
  const int count = first < size ? (size - 1 - first) / stride + 1 : 0;
  const int taps = phase < kernel ? (kernel - 1 - phase) / stride + 1 : 0;
  return {first, stride, count, taps, phase + (taps - 1) * stride, stride, 1, taps - 1 - (first + pad - phase) / stride, 1};
}

Layout backward_layout(const FedmpqConv& c, const Phase& rows, const Phase& columns, uint8_t fill) {
  Layout layout{};
  layout.height = c.out_height, layout.width = c.out_width, layout.channels = c.out_channels;
  layout.padded_height = rows.count + rows.dilation * (rows.taps - 1);
  layout.padded_width = columns.count + columns.dilation * (columns.taps - 1);
  layout.top = rows.before, layout.left = columns.before;
  layout.spread_h = rows.spread, layout.spread_w = columns.spread;
  layout.group_channels = is_depthwise(c) ? c.out_channels : c.out_channels / c.groups;
  layout.depth = is_depthwise(c) ? c.out_channels : up(layout.group_channels, 4);
  layout.fill = fill;
  return layout;
}

Source source_of(const uint8_t* data, bool pairs, int64_t count, uint8_t flip) {
  return {data, pairs, pairs ? (count + 1) / 2 : count, flip};
}

// Drops the lanes beyond the real outputs: width x outputs, side by side.
void tidy(int32_t* sums, int width, int outputs, int stride) {
  if (outputs == stride) return;
  for (int x = 1; x < width; ++x)
    std::memmove(sums + int64_t{x} * outputs, sums + int64_t{x} * stride, static_cast<size_t>(outputs) * sizeof(int32_t));
}

// A row of one group's outputs to their place among all channels.
void scatter(const int32_t* sums, int width, int outputs, int channels, int32_t* out) {
  const int runs = outputs == channels ? 1 : width;
  const int64_t run = int64_t{outputs} * width / runs;
  for (int x = 0; x < runs; ++x)
    std::memcpy(out + int64_t{x} * channels, sums + x * run, static_cast<size_t>(run) * sizeof(int32_t));
}

// Buffers of one thread for one kind of product.
struct Scratch {
  Buffer<uint8_t> bytes, padded, planes;
  Buffer<int32_t> sums;
  Scratch(int64_t raw, int64_t copy, int64_t row) : bytes(raw + slack), padded(copy), planes(copy / 2 + slack), sums(row) {}
  explicit operator bool() const { return bytes && padded && planes && sums; }
};

template <class Body>
bool with_scratch(int64_t raw, int64_t copy, int64_t row, int items, int threads, Body body) {
  std::atomic<bool> enough{true};
  parallel(threads < items ? threads : items, threads, [&](int slot, int) {
    const int slots = threads < items ? threads : items;
    Scratch scratch(raw, copy, row);
    if (!scratch) {
      enough = false;
      return;
    }
    for (int item = slot; item < items; item += slots) body(item, scratch);
  });
  return enough;
}

// Where a depthwise product's taps are from the first on, in bytes.
void depthwise_taps(const Layout& layout, int kernel_h, int kernel_w, int dilation_h, int dilation_w, int32_t* taps) {
  for (int r = 0; r < kernel_h; ++r)
    for (int s = 0; s < kernel_w; ++s)
      *taps++ = (r * dilation_h * layout.padded_width + s * dilation_w) * layout.depth;
}

template <class After>
int32_t depthwise_forward(const FedmpqConv& c, const Source& source, int zero, const int8_t* weights, int threads,
                          int32_t* acc, After after) {
  const Layout layout = forward_layout(c, static_cast<uint8_t>(zero));
  const int taps = c.kernel_h * c.kernel_w;
  Buffer<int8_t> by_tap(int64_t{taps} * c.channels);
  if (!by_tap) return -1;
  for (int k = 0; k < taps; ++k)
    for (int i = 0; i < c.channels; ++i) by_tap.data()[k * c.channels + i] = weights[i * taps + k];
  int32_t offsets[1024];
  depthwise_taps(layout, c.kernel_h, c.kernel_w, c.dilation_h, c.dilation_w, offsets);
  const int64_t raw = int64_t{c.height} * c.width * c.channels;
  const int64_t out = int64_t{c.out_height} * c.out_width * c.channels;
  const int fit = products_that_fit(1, source.pairs ? 15 : 255, greatest_weight(c, weights));
  const bool enough = with_scratch(raw, layout.size(), 1, c.images, threads, [&](int image, Scratch& scratch) {
    pad(layout, source, image, 0, scratch.bytes.data(), scratch.padded.data());
    for (int y = 0; y < c.out_height; ++y)
      ops().depthwise({scratch.padded.data() + int64_t{y} * c.stride_h * layout.padded_width * c.channels,
                       c.stride_w * c.channels, c.out_width, c.channels, taps, zero, fit, offsets, by_tap.data(),
                       acc + image * out + int64_t{y} * c.out_width * c.channels});
    after(image);
  });
  return enough ? 0 : -1;
}

// The accumulators of every image; after(image) as soon as one's are there, while they are in the cache.
template <class After>
int32_t forward(const FedmpqConv& c, const uint8_t* codes, int32_t pairs, int32_t zero, const int8_t* weights,
                int32_t threads, int32_t* acc, After after) {
  const int64_t raw = int64_t{c.height} * c.width * c.channels;
  const int taps = c.kernel_h * c.kernel_w;
  if (is_depthwise(c))
    return depthwise_forward(c, source_of(codes, pairs != 0, raw, 0), zero, weights, threads, acc, after);
  // Cores that multiply signed bytes get 8-bit codes less 128; 4-bit ones fit as they are.
  const bool flip = ops().signed_bytes && pairs == 0;
  const int shifted = flip ? zero - 128 : zero;
  const Source source = source_of(codes, pairs != 0, raw, flip ? 128 : 0);
  const Layout layout = forward_layout(c, static_cast<uint8_t>(shifted));
  const int inputs = layout.group_channels, outputs = c.out_channels / c.groups;
  const Product product{c.kernel_h,   c.kernel_w,    c.dilation_h, c.dilation_w, c.stride_h,
                        c.stride_w, c.out_height, c.out_width,  outputs};
  Buffer<int8_t> packed(product.packed_size(layout.depth) * c.groups);
  if (!packed) return -1;
  int32_t order[1024];
  for (int tap = 0; tap < taps; ++tap) order[tap] = tap;
  for (int g = 0; g < c.groups; ++g)
    pack_weights(product, inputs, layout.depth,
                 {weights + int64_t{g} * outputs * inputs * taps, int64_t{inputs} * taps, taps, order},
                 packed.data() + g * product.packed_size(layout.depth));
  const Start start(product, layout.depth, c.groups, packed.data(), shifted);
  if (!start) return -1;
  const int stride = product.blocks() * lanes;
  const int fit = products_that_fit(2, pairs != 0 ? 15 : (flip ? 128 : 255), greatest_weight(c, weights));
  // Planes have whole bytes of a pixel.
  const int quads = product.quads(layout.depth);
  const int bits = pairs != 0 && inputs % 8 == 0 ? serial_bits(weights, int64_t{c.out_channels} * inputs * taps, 4 * quads) : 0;
  const int64_t group_words = product.blocks() * plane_words(product.segments(), quads, bits);
  Buffer<uint64_t> planes(group_words * c.groups);
  if (!planes) return -1;
  for (int g = 0; g < c.groups && bits > 0; ++g)
    weight_planes(packed.data() + g * product.packed_size(layout.depth), product.blocks(), product.segments(), quads, bits,
                  planes.data() + g * group_words);
  // Rows that need no tidying are summed where they belong.
  const bool direct = c.groups == 1 && outputs == stride;
  const bool enough =
      with_scratch(raw, layout.size(), int64_t{c.out_width} * stride, c.images, threads, [&](int image, Scratch& scratch) {
        int32_t* out = acc + int64_t{image} * c.out_height * c.out_width * c.out_channels;
        const auto target = [&](int y) {
          return direct ? out + int64_t{y} * c.out_width * c.out_channels : scratch.sums.data();
        };
        for (int g = 0; g < c.groups; ++g) {
          pad(layout, source, image, g, scratch.bytes.data(), scratch.padded.data());
          correlate(product, layout, scratch.padded.data(), packed.data() + g * product.packed_size(layout.depth),
                    fit, {bits, planes.data() + g * group_words, scratch.planes.data()}, start.of(g), target, [&](int y, int32_t* sums) {
                      if (direct) return;
                      tidy(sums, c.out_width, outputs, stride);
                      scatter(sums, c.out_width, outputs, c.out_channels,
                              out + int64_t{y} * c.out_width * c.out_channels + g * outputs);
                    });
        }
        after(image);
      });
  return enough ? 0 : -1;
}

// The weights of a phase's taps: as tiles read them, or tap by tap for a depthwise product.
void pack_backward(const FedmpqConv& c, const Product& product, int depth, const Phase& rows, const Phase& columns,
                   const int8_t* weights, int8_t* packed) {
  const int all = c.kernel_h * c.kernel_w, inputs = c.out_channels / c.groups, outputs = c.channels / c.groups;
  int32_t order[1024];
  int taps = 0;
  for (int r = 0; r < rows.taps; ++r)
    for (int s = 0; s < columns.taps; ++s)
      order[taps++] = (rows.last_tap - r * rows.tap_step) * c.kernel_w + columns.last_tap - s * columns.tap_step;
  if (is_depthwise(c)) {
    for (int k = 0; k < taps; ++k)
      for (int i = 0; i < c.channels; ++i) *packed++ = weights[i * all + order[k]];
    return;
  }
  for (int g = 0; g < c.groups; ++g)
    pack_weights(product, inputs, depth, {weights + int64_t{g} * outputs * inputs * all, all, int64_t{outputs} * all, order},
                 packed + g * product.packed_size(depth));
}

// Errors of the pixels of one phase in each direction.
int32_t backward_phase(const FedmpqConv& c, const Phase& rows, const Phase& columns, const int8_t* errors,
                       const int8_t* weights, float scale, bool add, int threads, uint16_t* out) {
  const bool deep = is_depthwise(c);
  // Errors are signed; cores that multiply unsigned by signed get them plus 128. Depthwise takes that off per product.
  const int zero = deep || !ops().signed_bytes ? 128 : 0;
  const int64_t raw = int64_t{c.out_height} * c.out_width * c.out_channels;
  const Source source = source_of(reinterpret_cast<const uint8_t*>(errors), false, raw, static_cast<uint8_t>(zero));
  const Layout layout = backward_layout(c, rows, columns, static_cast<uint8_t>(zero));
  const int groups = deep ? 1 : c.groups, outputs = c.channels / groups, taps = rows.taps * columns.taps;
  const Product product{rows.taps, columns.taps, rows.dilation, columns.dilation, 1, 1, rows.count, columns.count, outputs};
  Buffer<int8_t> packed(deep ? int64_t{taps} * c.channels : product.packed_size(layout.depth) * groups);
  if (!packed) return -1;
  pack_backward(c, product, layout.depth, rows, columns, weights, packed.data());
  const Start start(product, layout.depth, groups, packed.data(), deep ? 0 : zero);
  if (!start) return -1;
  int32_t offsets[1024];
  if (deep) depthwise_taps(layout, rows.taps, columns.taps, rows.dilation, columns.dilation, offsets);
  const int stride = product.blocks() * lanes;
  const int fit = products_that_fit(deep ? 1 : 2, deep || zero == 0 ? 128 : 255, greatest_weight(c, weights));
  const bool whole = groups == 1 && columns.step == 1;  // rows without gaps
  const auto one_group = [&](int image, int g, Scratch& scratch) {
    uint16_t* first = out + (int64_t{image} * c.height * c.width + columns.first) * c.channels + g * outputs;
    const auto emit = [&](int y, int32_t* sums) {
      ops().to_error(sums, whole ? 1 : columns.count, whole ? int64_t{columns.count} * outputs : outputs, scale, add,
                     first + int64_t{rows.first + y * rows.step} * c.width * c.channels, int64_t{columns.step} * c.channels);
    };
    pad(layout, source, image, g, scratch.bytes.data(), scratch.padded.data());
    if (deep) {
      for (int y = 0; y < rows.count; ++y) {
        ops().depthwise({scratch.padded.data() + int64_t{y} * layout.padded_width * c.channels, c.channels, columns.count,
                         c.channels, taps, zero, fit, offsets, packed.data(), scratch.sums.data()});
        emit(y, scratch.sums.data());
      }
      return;
    }
    correlate(product, layout, scratch.padded.data(), packed.data() + g * product.packed_size(layout.depth), fit, {},
              start.of(g), [&](int) { return scratch.sums.data(); }, [&](int y, int32_t* sums) {
                tidy(sums, columns.count, outputs, stride);
                emit(y, sums);
              });
  };
  const bool enough = with_scratch(raw, layout.size(), int64_t{columns.count} * stride, c.images, threads,
                                   [&](int image, Scratch& scratch) {
                                     for (int g = 0; g < groups; ++g) one_group(image, g, scratch);
                                   });
  return enough ? 0 : -1;
}

// Pixels that no tap reaches have no errors.
void clear_phase(const FedmpqConv& c, const Phase& rows, const Phase& columns, uint16_t* out) {
  for (int image = 0; image < c.images; ++image)
    for (int y = 0; y < rows.count; ++y)
      for (int x = 0; x < columns.count; ++x) {
        const int64_t row = int64_t{image} * c.height + rows.first + y * rows.step;
        const int64_t pixel = row * c.width + columns.first + x * columns.step;
        std::memset(out + pixel * c.channels, 0, static_cast<size_t>(c.channels) * sizeof(uint16_t));
      }
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_conv_forward(const FedmpqConv* conv, const uint8_t* codes, int32_t pairs, int32_t zero,
                            const int8_t* weights, int32_t threads, int32_t* acc, double* sums) {
  const FedmpqConv& c = *conv;
  const int64_t pixels = int64_t{c.out_height} * c.out_width;
  if (sums == nullptr) return forward(c, codes, pairs, zero, weights, threads, acc, [](int) {});
  InOrder<double> parts(c.images, 2 * c.out_channels);
  if (!parts) return -1;
  const int32_t status = forward(c, codes, pairs, zero, weights, threads, acc, [&](int image) {
    ops().statistics(acc + image * pixels * c.out_channels, pixels, c.out_channels, parts[image],
                     parts[image] + c.out_channels);
  });
  parts.total(sums);
  return status;
}

int32_t fedmpq_conv_backward_sums(const FedmpqConv* conv, const uint8_t* codes, int32_t pairs, int32_t zero,
                                  const int8_t* weights, const uint16_t* error, const float* scale, const float* shift,
                                  float low, float high, const float* norm, const float* bias, int32_t threads,
                                  int32_t* acc, double* sums) {
  const FedmpqConv& c = *conv;
  const int64_t pixels = int64_t{c.out_height} * c.out_width, count = pixels * c.out_channels;
  const Rescale rescale{scale, shift, low, high};
  InOrder<float> parts(c.images, 4 * c.out_channels);
  if (!parts) return -1;
  const int32_t status = forward(c, codes, pairs, zero, weights, threads, acc, [&](int image) {
    float* own = parts[image];
    ops().backward_sums(acc + image * count, error + image * count, pixels, c.out_channels, rescale, norm, bias, own,
                        own + c.out_channels, own + 2 * c.out_channels, own + 3 * c.out_channels);
  });
  parts.total(sums);
  return status;
}

int32_t fedmpq_conv_backward_input(const FedmpqConv* conv, const int8_t* errors, const int8_t* weights, float scale,
                                   int32_t add, int32_t threads, uint16_t* out) {
  const FedmpqConv& c = *conv;
  for (int i = 0; i < phases(c.stride_h, c.dilation_h); ++i)
    for (int j = 0; j < phases(c.stride_w, c.dilation_w); ++j) {
      const Phase rows = phase_of(i, c.height, c.kernel_h, c.stride_h, c.dilation_h, c.pad_h);
      const Phase columns = phase_of(j, c.width, c.kernel_w, c.stride_w, c.dilation_w, c.pad_w);
      if (rows.count == 0 || columns.count == 0) continue;
      if (rows.taps > 0 && columns.taps > 0) {
        if (backward_phase(c, rows, columns, errors, weights, scale, add != 0, threads, out) != 0) return -1;
      } else if (add == 0) {
        clear_phase(c, rows, columns, out);
      }
    }
  return 0;
}

namespace fedmpq {
namespace {

// Codes of a few images channel by channel, columns of one phase of the stride side by side:
// plane[phase][channel][image][y][x].
struct Planes {
  int phases, images, rows, row, channels;  // row: bytes of one row of one plane
  int64_t image() const { return int64_t{rows} * row; }
  int64_t plane() const { return images * image(); }
  int64_t size() const { return phases * channels * plane() + slack; }
};

// The planes' part of one image, which starts at `out`.
void to_planes(const FedmpqConv& c, const Planes& planes, const uint8_t* bytes, int first_channel, uint8_t* out) {
  const int64_t step = int64_t{c.stride_w} * c.channels;  // bytes between columns of one phase
  for (int y = 0; y < c.height && y + c.pad_h < planes.rows; ++y)
    for (int phase = 0; phase < planes.phases; ++phase) {
      // Columns x with (x + pad) % stride == phase go to (x + pad) / stride.
      const int first = (phase - c.pad_w % c.stride_w + c.stride_w) % c.stride_w;
      const int to = (first + c.pad_w) / c.stride_w;
      int columns = first < c.width ? (c.width - 1 - first) / c.stride_w + 1 : 0;
      if (columns > planes.row - to) columns = planes.row - to;
      const uint8_t* from = bytes + (int64_t{y} * c.width + first) * c.channels + first_channel;
      uint8_t* line = out + phase * planes.channels * planes.plane() + int64_t{y + c.pad_h} * planes.row + to;
      for (int channel = 0; channel < planes.channels && planes.channels >= lanes; channel += lanes) {
        // The last ones, if they are fewer, again together with those before them.
        const int own = channel + lanes <= planes.channels ? channel : planes.channels - lanes;
        for (int x = 0; x < columns; x += lanes)
          shuffle::transpose(from + x * step + own, step, columns - x < lanes ? columns - x : lanes,
                             line + own * planes.plane() + x, planes.plane());
      }
      for (int channel = 0; channel < planes.channels && planes.channels < lanes; ++channel)
        for (int x = 0; x < columns; ++x) line[channel * planes.plane() + x] = from[x * step + channel];
    }
}

// Up to four pixels' errors of up to 16 outputs beside each other. What lies beyond the real ones is left alone.
void to_quad(const int8_t* pixel, int64_t stride, int pixels, int outputs, int8_t* to) {
  for (int i = 0; i < pixels; ++i)
    for (int o = 0; o < outputs; ++o) to[4 * o + i] = pixel[i * stride + o];
}

// Errors of one image as a tile reads weights: quads[block][y][x / 4][lane][x % 4], blocks `block` bytes apart. Lanes beyond
// the real outputs may hold anything: nobody reads their sums. No byte is read from `end` on.
void to_quads(const FedmpqConv& c, const int8_t* errors, int outputs, int64_t block, const int8_t* end, int8_t* out) {
  const int64_t stride = c.out_channels;
  for (int y = 0; y < c.out_height; ++y)
    for (int x = 0; x < c.out_width; x += 4, out += lanes * 4) {
      const int8_t* pixel = errors + (int64_t{y} * c.out_width + x) * stride;
      const int pixels = c.out_width - x < 4 ? c.out_width - x : 4;
      int8_t* to = out;
      for (int o = 0; o < outputs; o += lanes, pixel += lanes, to += block)
        if (pixels == 4 && end - pixel >= 3 * stride + lanes)
          shuffle::interleave(reinterpret_cast<const uint8_t*>(pixel), stride, reinterpret_cast<uint8_t*>(to));
        else
          to_quad(pixel, stride, pixels, outputs - o < lanes ? outputs - o : lanes, to);
    }
}

void sum_errors(const int8_t* errors, int64_t pixels, int channels, int64_t* sums) {
  for (int64_t p = 0; p < pixels; ++p)
    for (int o = 0; o < channels; ++o) sums[o] += errors[p * channels + o];
}

// What one thread gathers over its images: sums of as many of them as 32 bits hold, and of all if those are more.
struct Gathered {
  Buffer<uint8_t> bytes, planes;
  Buffer<int8_t> quads;
  Buffer<int32_t> part;
  Buffer<int64_t> whole, errors;
  int64_t sums;
  bool flushed = false;
  Gathered(int64_t raw, int64_t planar, int64_t quad, int64_t sum_count, int64_t outputs, bool more)
      : bytes(raw + slack), planes(planar), quads(quad), part(sum_count), whole(more ? sum_count : 0), errors(outputs),
        sums(sum_count) {
    if (!*this) return;
    std::memset(part.data(), 0, static_cast<size_t>(sum_count) * sizeof(int32_t));
    if (more) std::memset(whole.data(), 0, static_cast<size_t>(sum_count) * sizeof(int64_t));
    std::memset(errors.data(), 0, static_cast<size_t>(outputs) * sizeof(int64_t));
  }
  explicit operator bool() const { return bytes && planes && quads && part && whole && errors; }
  void flush() {
    for (int64_t i = 0; i < sums; ++i) whole.data()[i] += part.data()[i];
    std::memset(part.data(), 0, static_cast<size_t>(sums) * sizeof(int32_t));
    flushed = true;
  }
  int64_t sum(int64_t i) const { return part.data()[i] + (flushed ? whole.data()[i] : 0); }
};

// Sums [tap][input][width] of one group, from all threads, to gradients [output][input][tap] of its outputs, a few of them
// at a time: they lie far apart.
void write_gradient(Gathered* const* gathered, int slots, int64_t first, int taps, int inputs, int width, int outputs,
                    const int64_t* taken_off, const float* scale, float* gradient) {
  for (int start = 0; start < outputs; start += lanes)
    for (int i = 0; i < inputs; ++i)
      for (int tap = 0; tap < taps; ++tap)
        for (int o = start; o < outputs && o < start + lanes; ++o) {
          int64_t sum = -taken_off[o];
          for (int slot = 0; slot < slots; ++slot) sum += gathered[slot]->sum(first + (int64_t{tap} * inputs + i) * width + o);
          gradient[(int64_t{o} * inputs + i) * taps + tap] = static_cast<float>(sum) * scale[o];
        }
}

}  // namespace
}  // namespace fedmpq

int32_t fedmpq_conv_backward_weights(const FedmpqConv* conv, const uint8_t* codes, int32_t pairs, int32_t zero,
                                     const int8_t* errors, const float* scale, int32_t threads, float* gradient) {
  const FedmpqConv& c = *conv;
  const int64_t raw = int64_t{c.height} * c.width * c.channels;
  const int64_t raw_errors = int64_t{c.out_height} * c.out_width * c.out_channels;
  const int taps = c.kernel_h * c.kernel_w;
  const bool deep = is_depthwise(c);
  const bool flip = !deep && ops().signed_bytes && pairs == 0;
  const int shifted = flip ? zero - 128 : zero;
  const Source source = source_of(codes, pairs != 0, raw, flip ? 128 : 0);
  const int inputs = c.channels / c.groups, outputs = c.out_channels / c.groups;
  const int quads = up(c.out_width, 4) / 4, blocks = up(outputs, lanes) / lanes, width = blocks * lanes;
  Planes planes{};
  planes.phases = c.stride_w;
  planes.rows = (c.out_height - 1) * c.stride_h + c.dilation_h * (c.kernel_h - 1) + 1;
  planes.row = (c.dilation_w * (c.kernel_w - 1)) / c.stride_w + 4 * quads;
  planes.channels = inputs;
  planes.images = 1;
  const Layout layout = forward_layout(c, static_cast<uint8_t>(shifted));
  const int64_t group_sums = int64_t{taps} * inputs * width;
  const int64_t all_sums = deep ? int64_t{taps} * c.channels : group_sums * c.groups;
  const int slots = threads < c.images ? (threads > 0 ? threads : 1) : c.images;
  Gathered* gathered[max_threads] = {};
  // An int32 sum holds so many images of the greatest possible products.
  const int64_t greatest = int64_t{127} * (pairs != 0 ? 15 : 255) * c.out_height * c.out_width;
  const int64_t holds = greatest > 0 ? ((int64_t{1} << 31) - 1) / greatest : 1;
  if (holds < 1 || slots > max_threads || taps > 1024) return -2;
  // Small images a few at a time: reading and writing the sums of all weights takes longer than a few products.
  constexpr int enough_quads = 64;
  const int few = enough_quads / (c.out_height * quads);
  if (!deep && c.groups == 1 && few > 1) planes.images = few < c.images / slots ? few : c.images / slots;
  if (planes.images > holds) planes.images = static_cast<int>(holds);
  // Rows that lie one after the other in the planes are one run; so are images.
  const bool joined = planes.row == 4 * quads && planes.rows == c.out_height && c.stride_h == 1;
  const int64_t block = int64_t{planes.images} * c.out_height * quads * lanes * 4;
  int32_t offsets[1024];
  if (deep) depthwise_taps(layout, c.kernel_h, c.kernel_w, c.dilation_h, c.dilation_w, offsets);
  Buffer<int32_t> rows(int64_t{planes.images} * c.out_height);
  if (!rows) return -1;
  for (int i = 0; i < planes.images * c.out_height; ++i)
    rows.data()[i] = (i / c.out_height * planes.rows + i % c.out_height * c.stride_h) * planes.row;
  std::atomic<bool> enough{true};
  const int fit = products_that_fit(deep ? 1 : 2, pairs != 0 ? 15 : (flip ? 128 : 255), 127);

  const auto deep_image = [&](int image, Gathered& own) {
    pad(layout, source, image, 0, own.bytes.data(), own.planes.data());
    for (int y = 0; y < c.out_height; ++y)
      ops().depthwise_weights({own.planes.data() + int64_t{y} * c.stride_h * layout.padded_width * c.channels,
                               c.stride_w * c.channels, c.out_width, c.channels, taps, zero, fit, offsets, nullptr, nullptr},
                              errors + image * raw_errors + int64_t{y} * c.out_width * c.channels, own.part.data());
  };
  // One group of `count` images from the first on, every slots-th.
  const auto few_images = [&](int first, int count, int g, Gathered& own) {
    std::memset(own.planes.data(), shifted, static_cast<size_t>(planes.size()));
    if (c.out_width % 4 != 0) std::memset(own.quads.data(), 0, static_cast<size_t>(blocks * block));
    for (int i = 0; i < count; ++i) {
      const int image = first + i * slots;
      const int8_t* error = errors + image * raw_errors;
      if (shifted != 0 && g == 0)
        sum_errors(error, int64_t{c.out_height} * c.out_width, c.out_channels, own.errors.data());
      to_planes(c, planes, bytes_of(source, image, raw, own.bytes.data()), g * inputs, own.planes.data() + i * planes.image());
      to_quads(c, error + g * outputs, outputs, block, errors + c.images * raw_errors,
               own.quads.data() + int64_t{i} * c.out_height * quads * lanes * 4);
    }
    const int segments = joined ? 1 : count * c.out_height, length = joined ? count * c.out_height * quads : quads;
    for (int b = 0; b < blocks; b += 2)
      for (int tap = 0; tap < taps; ++tap) {
        const int r = tap / c.kernel_w, column = (tap % c.kernel_w) * c.dilation_w;
        const uint8_t* from = own.planes.data() + (column % c.stride_w) * inputs * planes.plane() +
                              int64_t{r} * c.dilation_h * planes.row + column / c.stride_w;
        for (int i = 0; i < inputs; i += max_rows)
          ops().tile({from + i * planes.plane(), static_cast<ptrdiff_t>(planes.plane()),
                      inputs - i < max_rows ? inputs - i : max_rows, rows.data(), segments, length,
                      own.quads.data() + b * block, static_cast<ptrdiff_t>(block), blocks - b < 2 ? 1 : 2,
                      own.part.data() + g * group_sums + (int64_t{tap} * inputs + i) * width + b * lanes, width, true, fit});
      }
  };
  parallel(slots, threads, [&](int slot, int) {
    auto* own = new (std::nothrow) Gathered(raw, deep ? layout.size() : planes.size(), deep ? 1 : blocks * block, all_sums,
                                            c.out_channels, (c.images - 1 - slot) / slots + 1 > holds);
    gathered[slot] = own;
    if (own == nullptr || !*own) {
      enough = false;
      return;
    }
    int64_t held = 0;
    for (int image = slot; image < c.images; image += planes.images * slots) {
      const int left = (c.images - 1 - image) / slots + 1, count = left < planes.images ? left : planes.images;
      if (held + count > holds) {
        own->flush();
        held = 0;
      }
      held += count;
      if (deep) deep_image(image, *own);
      for (int g = 0; g < c.groups && !deep; ++g) few_images(image, count, g, *own);
    }
  });
  if (enough) {
    int64_t* taken_off = gathered[0]->errors.data();
    for (int o = 0; o < c.out_channels; ++o) {
      for (int slot = 1; slot < slots; ++slot) taken_off[o] += gathered[slot]->errors.data()[o];
      taken_off[o] *= shifted;
    }
    if (deep) write_gradient(gathered, slots, 0, taps, 1, c.channels, c.channels, taken_off, scale, gradient);
    for (int g = 0; g < c.groups && !deep; ++g)
      write_gradient(gathered, slots, g * group_sums, taps, inputs, width, outputs, taken_off + g * outputs,
                     scale + g * outputs, gradient + int64_t{g} * outputs * inputs * taps);
  }
  for (Gathered* own : gathered) delete own;
  return enough ? 0 : -1;
}
