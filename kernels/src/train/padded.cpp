#include "padded.h"

#include <cstring>

namespace fedmpq {
namespace {

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

}  // namespace

FedmpqConv side_by_side(const FedmpqConv& c, bool pairs, int threads) {
  constexpr int enough = 64;  // pixels
  const int pixels = c.height * c.width;  // 2^28 at most
  const bool pointwise = c.kernel_h * c.kernel_w == 1 && c.stride_h * c.stride_w == 1 && c.pad_h + c.pad_w == 0;
  // Images of an odd number of 4-bit codes have half a byte between them.
  if (!pointwise || is_depthwise(c) || (pairs && pixels % 2 != 0 && c.channels % 2 != 0)) return c;
  const int share = c.images / (threads > 1 ? threads : 1);
  int most = share < enough / pixels ? share : enough / pixels;
  while (most > 1 && c.images % most != 0) --most;
  if (most <= 1) return c;
  FedmpqConv row = c;
  row.images = c.images / most;
  row.height = row.out_height = 1;
  row.width = row.out_width = most * pixels;
  return row;
}

Layout forward_layout(const FedmpqConv& c, uint8_t fill) {
  Layout layout{};
  layout.height = c.height, layout.width = c.width, layout.channels = c.channels;
  layout.padded_height = (c.out_height - 1) * c.stride_h + c.dilation_h * (c.kernel_h - 1) + 1;
  layout.padded_width = (c.out_width - 1) * c.stride_w + c.dilation_w * (c.kernel_w - 1) + 1;
  layout.top = c.pad_h, layout.left = c.pad_w, layout.spread_h = layout.spread_w = 1;
  layout.group_channels = is_depthwise(c) ? c.channels : c.channels / c.groups;
  layout.depth = depth_of(layout.group_channels, is_depthwise(c) || c.dilation_w == 1);
  layout.fill = fill;
  return layout;
}

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

void fetch_ahead(const Source& source, int image) {
  constexpr int64_t line = 64, most = 1 << 16;  // bytes; more would drive out what is in use
  const int64_t bytes = source.bytes < most ? source.bytes : most;
  const uint8_t* from = source.data + image * source.bytes;
  for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(from + at, 0, 2);
}

void pad(const Layout& layout, const Source& source, int image, int group, uint8_t* scratch, uint8_t* out) {
  if (by_rows(layout, source)) return pad_rows(layout, source, image, out);
  const int64_t count = int64_t{layout.height} * layout.width * layout.channels;
  pad_pixels(layout, bytes_of(source, image, count, scratch), group, out);
}

}  // namespace fedmpq
