// The way of errors back through a convolution: a correlation of them with the kernel turned round, for the pixels of each
// phase of the stride by themselves.
#include "correlate.h"
#include "fedmpq/training.h"

namespace fedmpq {
namespace {

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
  layout.depth = depth_of(layout.group_channels, is_depthwise(c) || columns.dilation == 1);
  layout.fill = fill;
  return layout;
}

// The weights of a phase's taps: as tiles read them, or tap by tap for a depthwise product. Whether there was memory.
bool pack_backward(const FedmpqConv& c, const Product& product, int depth, const Phase& rows, const Phase& columns,
                   const Stored& weights, int8_t* packed) {
  const int all = c.kernel_h * c.kernel_w, inputs = c.out_channels / c.groups, outputs = c.channels / c.groups;
  Buffer<int32_t> orders(int64_t{rows.taps} * columns.taps);
  if (!orders) return false;
  int32_t* order = orders.data();
  int taps = 0;
  for (int r = 0; r < rows.taps; ++r)
    for (int s = 0; s < columns.taps; ++s)
      order[taps++] = (rows.last_tap - r * rows.tap_step) * c.kernel_w + columns.last_tap - s * columns.tap_step;
  if (is_depthwise(c)) {
    for (int k = 0; k < taps; ++k)
      for (int i = 0; i < c.channels; ++i) *packed++ = weights[i * all + order[k]];
    return true;
  }
  for (int g = 0; g < c.groups; ++g)
    pack_weights(product, inputs, depth,
                 {weights.from(int64_t{g} * outputs * inputs * all), all, int64_t{outputs} * all, order},
                 packed + g * product.packed_size(depth));
  return true;
}

// Errors of the pixels of one phase in each direction.
int32_t backward_phase(const FedmpqConv& c, const Phase& rows, const Phase& columns, const int8_t* errors,
                       const Stored& weights, float scale, int greatest, bool add, int threads, uint16_t* out) {
  const bool deep = is_depthwise(c);
  // Errors are signed; cores that multiply unsigned by signed get them plus 128. Depthwise takes that off per product.
  const int zero = deep || !ops().signed_bytes ? 128 : 0;
  const int64_t raw = int64_t{c.out_height} * c.out_width * c.out_channels;
  const Source source = source_of(reinterpret_cast<const uint8_t*>(errors), false, raw, static_cast<uint8_t>(zero));
  const Layout layout = backward_layout(c, rows, columns, static_cast<uint8_t>(zero));
  if (!layout.is_small()) return not_valid;
  const int groups = deep ? 1 : c.groups, outputs = c.channels / groups, taps = rows.taps * columns.taps;
  const Product product{rows.taps, columns.taps, rows.dilation, columns.dilation, 1, 1, rows.count, columns.count, outputs};
  Buffer<int8_t> packed(deep ? int64_t{taps} * c.channels : product.packed_size(layout.depth) * groups);
  if (!packed || !pack_backward(c, product, layout.depth, rows, columns, weights, packed.data())) return no_memory;
  const Start start(product, layout.depth, groups, packed.data(), deep ? 0 : zero);
  const Segments segments(product, layout, false);
  const Taps at(deep, layout, rows.taps, columns.taps, rows.dilation, columns.dilation);
  if (!start || !segments || !at) return no_memory;
  const int stride = product.blocks() * lanes;
  const int fit = products_that_fit(deep ? 1 : 2, deep || zero == 0 ? 128 : 255, greatest);
  // Sums that lie one after the other as the errors do go in one call: of all rows, or of a row.
  const bool whole_rows = groups == 1 && columns.step == 1, whole = whole_rows && rows.step == 1;
  const Pieces pieces(c.images, rows.count, columns.count, threads);
  const auto one_group = [&](const Rows& piece, int g, Scratch& scratch) {
    const int image = piece.image;
    uint16_t* first = out + (int64_t{image} * c.height * c.width + columns.first) * c.channels + g * outputs;
    const auto emit = [&](int y, int count, int32_t* sums) {
      const int64_t row = int64_t{columns.count} * outputs, runs = whole_rows ? 1 : columns.count;
      for (int i = 0; i < (whole ? 1 : count); ++i)
        ops().to_error(sums + i * row, runs, (whole ? count : 1) * row / runs, scale, add,
                       first + int64_t{rows.first + (y + i) * rows.step} * c.width * c.channels,
                       int64_t{columns.step} * c.channels);
    };
    pad(layout, source, image, g, scratch.bytes.data(), scratch.padded.data());
    if (scratch.next >= 0 && g == 0) fetch_ahead(source, pieces.image(scratch.next));
    if (deep) {
      for (int y = piece.first; y < piece.last; ++y) {
        ops().depthwise({scratch.padded.data() + int64_t{y} * layout.padded_width * c.channels, c.channels, columns.count,
                         c.channels, taps, zero, columns.dilation == 1 ? columns.taps : 1, true, fit, at.offsets.data(),
                         packed.data(), scratch.sums.data()});
        emit(y, 1, scratch.sums.data());
      }
      return;
    }
    correlate(product, layout, segments, scratch.padded.data(), packed.data() + g * product.packed_size(layout.depth),
              fit, {}, start.of(g), piece, [&](int) { return scratch.sums.data(); }, [&](int y, int count, int32_t* sums) {
                tidy(sums, int64_t{count} * columns.count, outputs, stride);
                emit(y, count, sums);
              });
  };
  const int64_t band = int64_t{deep ? 1 : product.band()} * columns.count * stride;
  const bool enough = with_scratch(raw, layout.size(), band, pieces.count(), threads,
                                   [&](int item, Scratch& scratch) {
                                     for (int g = 0; g < groups; ++g) one_group(pieces.rows(item), g, scratch);
                                   });
  return enough ? 0 : no_memory;
}

// Whether 32 bits hold the sums of errors times weights: an input's pixel meets the taps of one phase, for each output.
bool backward_sums_fit(const FedmpqConv& c, int greatest) {
  const auto reached = [](int64_t kernel, int64_t stride, int dilation) {
    return phases(static_cast<int>(stride), dilation) == 1 ? kernel : (kernel + stride - 1) / stride;
  };
  const int64_t taps = reached(c.kernel_h, c.stride_h, c.dilation_h) * reached(c.kernel_w, c.stride_w, c.dilation_w);
  return sums_fit(taps * (c.out_channels / c.groups), 128, greatest);
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

int32_t fedmpq_conv_backward_input(const FedmpqConv* conv, const int8_t* errors, const int8_t* weights, uint32_t bits,
                                   float scale, int32_t add, int32_t threads, uint16_t* out) {
  const Stored stored{weights, bits};
  if (!is_valid(conv) || !is_valid(stored) || !given(errors, out)) return not_valid;
  const int greatest = greatest_weight(*conv, stored);
  if (greatest < 0) return not_valid;
  if (!backward_sums_fit(*conv, greatest)) return sums_too_large;
  if (conv->images == 0) return 0;
  threads = threads_of(threads);
  const FedmpqConv c = side_by_side(shortest_stride(*conv), false, threads);
  for (int i = 0; i < phases(c.stride_h, c.dilation_h); ++i) {
    const Phase rows = phase_of(i, c.height, c.kernel_h, c.stride_h, c.dilation_h, c.pad_h);
    for (int j = 0; j < phases(c.stride_w, c.dilation_w) && rows.count > 0; ++j) {
      const Phase columns = phase_of(j, c.width, c.kernel_w, c.stride_w, c.dilation_w, c.pad_w);
      if (columns.count == 0) continue;
      if (rows.taps > 0 && columns.taps > 0) {
        const int32_t status =
            backward_phase(c, rows, columns, errors, stored, scale, greatest, add != 0, threads, out);
        if (status != 0) return status;
      } else if (add == 0) {
        clear_phase(c, rows, columns, out);
      }
    }
  }
  return 0;
}
