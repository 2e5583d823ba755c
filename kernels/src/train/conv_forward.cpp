// Convolutions of codes: an image's codes go into a zero-padded copy; a tile's rows are neighbouring output pixels, its
// segments the rows of the kernel.
//
// Codes are bytes `code + zero`; sums are of codes, so zero times the sum of the weights is taken off beforehand, and
// padding is `zero`.
#include "correlate.h"
#include "fedmpq/training.h"
#include "winograd.h"

namespace fedmpq {
namespace {

// Some rows of an image's accumulators while they are in the cache, and room for as many bytes unless they are stored.
struct Band {
  int image, y, rows;
  const int32_t* sums;
  uint8_t* bytes;
};

// What is done with a band: a lambda by its address, so that products are compiled once for all of them.
class After {
 public:
  template <class Body>
  After(const Body& body)
      : body_(&body), call_([](const void* own, const Band& band) { (*static_cast<const Body*>(own))(band); }) {}
  void operator()(const Band& band) const { call_(body_, band); }

 private:
  const void* body_;
  void (*call_)(const void*, const Band&);
};

// Pixels of one group's outputs to their place among all channels.
void scatter(const int32_t* sums, int64_t pixels, int outputs, int channels, int32_t* out) {
  const int64_t runs = outputs == channels ? 1 : pixels, run = outputs * pixels / runs;
  for (int64_t x = 0; x < runs; ++x)
    std::memcpy(out + x * channels, sums + x * run, static_cast<size_t>(run) * sizeof(int32_t));
}

// after(band) for stored accumulators whose pieces were computed in any order: sums of an image go by the order of its rows.
void all_bands(const FedmpqConv& c, int band, int threads, const int32_t* acc, const After& after) {
  const int64_t row = int64_t{c.out_width} * c.out_channels;
  parallel(c.images, threads, [&](int image, int) {
    for (int y = 0; y < c.out_height; y += band)
      after(Band{image, y, c.out_height - y < band ? c.out_height - y : band, acc + (int64_t{image} * c.out_height + y) * row,
                 nullptr});
  });
}

int32_t depthwise_forward(const FedmpqConv& c, const Source& source, int zero, const Stored& weights, int greatest,
                          int threads, int32_t* acc, const After& after) {
  const Layout layout = forward_layout(c, static_cast<uint8_t>(zero));
  if (!layout.is_small()) return not_valid;
  const int taps = c.kernel_h * c.kernel_w;
  Buffer<int8_t> by_tap(int64_t{taps} * c.channels);
  const Taps at(true, layout, c.kernel_h, c.kernel_w, c.dilation_h, c.dilation_w);
  if (!by_tap || !at) return no_memory;
  for (int k = 0; k < taps; ++k)
    for (int i = 0; i < c.channels; ++i) by_tap.data()[k * c.channels + i] = weights[i * taps + k];
  const int64_t raw = int64_t{c.height} * c.width * c.channels;
  const int64_t row = int64_t{c.out_width} * c.channels;
  const int fit = products_that_fit(1, source.pairs ? 15 : 255, greatest);
  const int band = Product{1, 1, 1, 1, 1, 1, c.out_height, c.out_width, c.channels}.band();
  const int64_t room = band * row;
  const Pieces pieces(c.images, c.out_height, c.out_width, acc != nullptr ? threads : 1);
  const auto one_piece = [&](int item, Scratch& scratch) {
    const auto [image, begin, end] = pieces.rows(item);
    pad(layout, source, image, 0, scratch.bytes.data(), scratch.padded.data());
    if (scratch.next >= 0) fetch_ahead(source, pieces.image(scratch.next));
    for (int y = begin; y < end; ++y) {
      const int first = y / band * band;
      int32_t* sums = acc != nullptr ? acc + (int64_t{image} * c.out_height + first) * row : scratch.sums.data();
      ops().depthwise({scratch.padded.data() + int64_t{y} * c.stride_h * layout.padded_width * c.channels,
                       c.stride_w * c.channels, c.out_width, c.channels, taps, zero,
                       c.dilation_w == c.stride_w ? c.kernel_w : 1, source.pairs, fit, at.offsets.data(), by_tap.data(),
                       sums + (y - first) * row});
      if (pieces.whole() && ((y + 1) % band == 0 || y + 1 == c.out_height))
        after(Band{image, first, y - first + 1, sums, scratch.bytes.data()});
    }
  };
  const int64_t bytes = raw < room ? room : raw;
  if (!with_scratch(bytes, layout.size(), room, pieces.count(), threads, one_piece)) return no_memory;
  if (!pieces.whole()) all_bands(c, band, threads, acc, after);
  return 0;
}

// Every group's weights as tiles read them and, where the bit-serial form is used, as bit-planes.
struct Packed {
  int64_t group_bytes, group_words;
  int bits;  // of a weight in the bit-serial form, else 0
  Buffer<int8_t> tiles;
  Buffer<uint64_t> planes;
  Buffer<int32_t> order;

  Packed(const FedmpqConv& c, const Product& product, const Layout& layout, const Stored& weights, int greatest, bool pairs)
      : group_bytes(product.packed_size(layout.depth)),
        group_words(0),
        bits(bits_of(c, product, layout, weights, greatest, pairs)),
        tiles(group_bytes * c.groups),
        planes(c.groups * product.blocks() * plane_words(product.segments(), product.quads(layout.depth), bits)),
        order(int64_t{c.kernel_h} * c.kernel_w) {
    if (!*this) return;
    const int taps = c.kernel_h * c.kernel_w, inputs = layout.group_channels, quads = product.quads(layout.depth);
    group_words = product.blocks() * plane_words(product.segments(), quads, bits);
    for (int tap = 0; tap < taps; ++tap) order.data()[tap] = tap;
    for (int g = 0; g < c.groups; ++g) {
      const Weights own{weights.from(int64_t{g} * product.outputs * inputs * taps), int64_t{inputs} * taps, taps,
                        order.data()};
      pack_weights(product, inputs, layout.depth, own, tiles.data() + g * group_bytes);
      if (bits > 0)
        weight_planes(tiles.data() + g * group_bytes, product.blocks(), product.segments(), quads, bits,
                      planes.data() + g * group_words);
    }
  }
  explicit operator bool() const { return tiles && planes && order; }

 private:
  // Planes have whole bytes of a pixel.
  static int bits_of(const FedmpqConv& c, const Product& product, const Layout& layout, const Stored& weights, int greatest,
                     bool pairs) {
    if (!pairs || layout.group_channels % 8 != 0) return 0;
    const int64_t count = int64_t{c.out_channels} * layout.group_channels * c.kernel_h * c.kernel_w;
    return serial_bits(weights, count, greatest, 4 * product.quads(layout.depth));
  }
};

// The accumulators of every image, with weights of at most `greatest`; after(band) in the order of an image's rows as soon
// as some are there. Without `acc` they are nowhere else.
int32_t products(const FedmpqConv& c, const uint8_t* codes, bool pairs, int zero, const Stored& weights, int greatest,
                 int threads, int32_t* acc, const After& after) {
  const int64_t raw = int64_t{c.height} * c.width * c.channels;
  if (is_depthwise(c))
    return depthwise_forward(c, source_of(codes, pairs, raw, 0), zero, weights, greatest, threads, acc, after);
  // Cores that multiply signed bytes get 8-bit codes less 128; 4-bit ones fit as they are.
  const bool flip = ops().signed_bytes && !pairs;
  const int shifted = flip ? zero - 128 : zero;
  const Source source = source_of(codes, pairs, raw, flip ? 128 : 0);
  const Layout layout = forward_layout(c, static_cast<uint8_t>(shifted));
  if (!layout.is_small()) return not_valid;
  const int outputs = c.out_channels / c.groups;
  const Product product{c.kernel_h, c.kernel_w,   c.dilation_h, c.dilation_w, c.stride_h,
                        c.stride_w, c.out_height, c.out_width,  outputs};
  const Packed packed(c, product, layout, weights, greatest, pairs);
  if (!packed) return no_memory;
  const Winograd winograd(c, layout, packed.tiles.data(), source, packed.bits == 0);
  if (!winograd) return no_memory;
  const Start start(product, layout.depth, c.groups, packed.tiles.data(), shifted);
  const Segments segments(product, layout, packed.bits > 0);
  if (!start || !segments) return no_memory;
  const int fit = products_that_fit(2, pairs ? 15 : (flip ? 128 : 255), greatest);
  const int stride = product.blocks() * lanes;
  const int64_t row = int64_t{c.out_width} * c.out_channels;
  const bool direct = c.groups == 1 && outputs == stride;  // rows that need no tidying are summed where they belong
  const int64_t copy = (layout.size() + slack - 1) / slack * slack;  // what Winograd's form reads starts on a cache line
  const Pieces pieces(c.images, c.out_height, c.out_width, acc != nullptr ? threads : 1);
  const auto one_group = [&](const Rows& piece, int g, Scratch& scratch) {
    const int image = piece.image;
    int32_t* out = acc != nullptr ? acc + int64_t{image} * c.out_height * row : nullptr;
    const Serial serial{packed.bits, packed.planes.data() + g * packed.group_words, scratch.planes.data()};
    pad(layout, source, image, g, scratch.bytes.data(), scratch.padded.data());
    if (scratch.next >= 0 && g == 0) fetch_ahead(source, pieces.image(scratch.next));
    const auto target = [&](int y) { return direct && out != nullptr ? out + y * row : scratch.sums.data(); };
    const auto done = [&](int y, int rows, int32_t* sums) {
      const int64_t pixels = int64_t{rows} * c.out_width;
      if (!direct) tidy(sums, pixels, outputs, stride);
      if (!direct && out != nullptr) scatter(sums, pixels, outputs, c.out_channels, out + y * row + g * outputs);
      if (g < c.groups - 1 || !pieces.whole()) return;
      after(Band{image, y, rows, out != nullptr ? out + y * row : sums, scratch.bytes.data()});
    };
    uint8_t* padded = scratch.padded.data();
    if (winograd.used()) {
      winograd.turn(padded, piece, padded + copy);
      correlate(winograd, product, padded + copy, piece, target, done);
    } else {
      correlate(product, layout, segments, padded, packed.tiles.data() + g * packed.group_bytes, fit, serial, start.of(g),
                piece, target, done);
    }
  };
  const int64_t room = int64_t{product.band()} * c.out_width * stride;
  const bool enough = with_scratch(raw < room ? room : raw, copy + winograd.room(), room, pieces.count(), threads,
                                   [&](int item, Scratch& scratch) {
                                     for (int g = 0; g < c.groups; ++g) one_group(pieces.rows(item), g, scratch);
                                   });
  if (!enough) return no_memory;
  if (!pieces.whole()) all_bands(c, product.band(), threads, acc, after);
  return 0;
}

// The same of images by themselves, however they are multiplied.
int32_t forward(const FedmpqConv& c, const FedmpqCodes& codes, const Stored& weights, int greatest, int threads,
                int32_t* acc, const After& after) {
  if (c.images == 0) return 0;
  const bool pairs = codes.pairs != 0;
  const FedmpqConv row = side_by_side(c, pairs, threads);
  const int together = c.images / row.images;
  if (together <= 1) return products(c, codes.data, pairs, codes.zero, weights, greatest, threads, acc, after);
  const int64_t outputs = int64_t{c.out_height} * c.out_width * c.out_channels;
  return products(row, codes.data, pairs, codes.zero, weights, greatest, threads, acc, [&](const Band& band) {
    for (int i = 0; i < together; ++i)
      after(Band{band.image * together + i, 0, c.out_height, band.sums + i * outputs, band.bytes});
  });
}

// What sums up the errors of an image's rows by channel, for accumulators that are computed and for those that were kept.
struct BackwardSums {
  const FedmpqConv& c;
  const uint16_t* error;
  const FedmpqRescale& rescale;
  const FedmpqNormalize& normalize;
  int32_t* acc;
  InOrder<float>& parts;

  int64_t row() const { return int64_t{c.out_width} * c.out_channels; }

  void computed(const Band& band) const {
    float* own = parts[band.image];
    const int64_t first = (int64_t{band.image} * c.out_height + band.y) * row();
    ops().backward_sums(band.sums, error + first, int64_t{band.rows} * c.out_width, c.out_channels, rescale, normalize.norm,
                        normalize.bias, own, own + c.out_channels, own + 2 * c.out_channels, own + 3 * c.out_channels);
  }

  void kept(int image, const int16_t* from) const {
    float* own = parts[image];
    const int64_t first = image * c.out_height * row();
    ops().narrow_backward_sums(from + first, error + first, int64_t{c.out_height} * c.out_width, c.out_channels, rescale,
                               normalize.norm, normalize.bias, acc + first, own, own + c.out_channels,
                               own + 2 * c.out_channels, own + 3 * c.out_channels);
  }
};

// The groups of a convolution are multiplied one after the other, so that all outputs of a pixel are nowhere but in `acc`.
bool needs_accumulators(const FedmpqConv& c) { return c.groups > 1 && !is_depthwise(c); }

// 0 if the arguments that every forward product has are what the kernels rely on; `greatest` is then the weights'.
int32_t forward_status(const FedmpqConv* conv, const FedmpqCodes* codes, const Stored& weights, const int32_t* acc,
                       int& greatest) {
  if (!is_valid(conv) || !is_valid(codes) || !is_valid(weights)) return not_valid;
  if (acc == nullptr && needs_accumulators(*conv)) return not_valid;
  greatest = greatest_weight(*conv, weights);
  if (greatest < 0) return not_valid;
  return sums_fit(terms_of(*conv), greatest_code(*codes), greatest) ? 0 : sums_too_large;
}

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_conv_forward(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights, uint32_t bits,
                            int32_t threads, int32_t* acc, double* sums) {
  int greatest = 0;
  if (const int32_t status = forward_status(conv, codes, {weights, bits}, acc, greatest); status != 0) return status;
  const FedmpqConv c = shortest_stride(*conv);
  threads = threads_of(threads);
  if (sums == nullptr) return forward(c, *codes, {weights, bits}, greatest, threads, acc, [](const Band&) {});
  InOrder<double> parts(c.images, 2 * c.out_channels);
  if (!parts) return no_memory;
  const int64_t most = terms_of(c) * greatest_code(*codes) * greatest;
  const int64_t fit = most > 0 ? INT32_MAX / most : INT32_MAX;
  const int32_t status = forward(c, *codes, {weights, bits}, greatest, threads, acc, [&](const Band& band) {
    double* own = parts[band.image];
    ops().statistics(band.sums, int64_t{band.rows} * c.out_width, c.out_channels, fit > 1 ? fit : 1, own,
                     own + c.out_channels);
  });
  parts.total(sums);
  return status;
}

int32_t fedmpq_conv_backward_sums(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights, uint32_t bits,
                                  const int16_t* kept, const int32_t* fit, const uint16_t* error,
                                  const FedmpqRescale* rescale, const FedmpqNormalize* normalize, int32_t threads,
                                  int32_t* acc, double* sums) {
  int greatest = 0;
  const bool is_kept = kept != nullptr && fit != nullptr && *fit != 0;
  if (is_kept && (!is_valid(conv) || !given(acc))) return not_valid;
  const Stored stored{weights, bits};
  if (const int32_t status = is_kept ? 0 : forward_status(conv, codes, stored, acc, greatest); status != 0) return status;
  if (!is_valid(rescale) || !is_valid(normalize) || !given(error, sums)) return not_valid;
  const FedmpqConv c = shortest_stride(*conv);
  threads = threads_of(threads);
  InOrder<float> parts(c.images, 4 * c.out_channels);
  if (!parts) return no_memory;
  const BackwardSums sum{c, error, *rescale, *normalize, acc, parts};
  int32_t status = 0;
  if (is_kept)
    parallel(c.images, threads, [&](int image, int) { sum.kept(image, kept); });
  else
    status = forward(c, *codes, stored, greatest, threads, acc, [&](const Band& band) { sum.computed(band); });
  parts.total(sums);
  return status;
}

int32_t fedmpq_conv_requantize(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights, uint32_t bits,
                               const FedmpqRescale* rescale, int32_t pairs, int32_t threads, uint8_t* out) {
  int greatest = 0;
  if (const int32_t status = forward_status(conv, codes, {weights, bits}, nullptr, greatest); status != 0) return status;
  if (!is_valid(rescale) || !is_range(rescale->low, rescale->high, pairs != 0) || !given(out)) return not_valid;
  const FedmpqConv c = shortest_stride(*conv);
  const int64_t row = int64_t{c.out_width} * c.out_channels, count = c.out_height * row;
  if (pairs != 0 && row % 2 != 0 && c.out_height > 1) return not_valid;  // rows would share a byte
  return forward(c, *codes, {weights, bits}, greatest, threads_of(threads), nullptr, [&](const Band& band) {
    uint8_t* to = out + band.image * (pairs != 0 ? (count + 1) / 2 : count) + band.y * row / (pairs != 0 ? 2 : 1);
    uint8_t* bytes = pairs != 0 ? band.bytes : to;
    ops().requantize(band.sums, int64_t{band.rows} * c.out_width, c.out_channels, *rescale, bytes);
    if (pairs != 0) ops().pack(bytes, band.rows * row, to);
  });
}

int32_t fedmpq_conv_backward_error(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights, uint32_t bits,
                                   const uint16_t* error, const FedmpqRescale* rescale, const FedmpqNormalize* normalize,
                                   const float* gain, const float* mean_g, const float* mean_gx, int32_t threads,
                                   uint16_t* out, float* greatest) {
  int most = 0;
  if (const int32_t status = forward_status(conv, codes, {weights, bits}, nullptr, most); status != 0) return status;
  if (!is_valid(rescale) || !is_valid(normalize)) return not_valid;
  if (!given(error, gain, mean_g, mean_gx, out, greatest)) return not_valid;
  const FedmpqConv c = shortest_stride(*conv);
  const int64_t row = int64_t{c.out_width} * c.out_channels;
  for (int image = 0; image < c.images; ++image) greatest[image] = 0.0f;
  return forward(c, *codes, {weights, bits}, most, threads_of(threads), nullptr, [&](const Band& band) {
    const int64_t first = (int64_t{band.image} * c.out_height + band.y) * row;
    const float own = ops().backward_error(band.sums, error + first, int64_t{band.rows} * c.out_width, c.out_channels,
                                           *rescale, normalize->norm, normalize->bias, gain, mean_g, mean_gx, out + first);
    if (own > greatest[band.image]) greatest[band.image] = own;
  });
}
