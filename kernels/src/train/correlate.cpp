#include "correlate.h"

#include <algorithm>
#include <cstdlib>

#include "fedmpq/kernels.h"
#include "shuffle.h"

namespace fedmpq {
namespace {

// Taps of a kernel that a vector has room for.
constexpr int vector_taps = 16;

// Four weights of neighbouring inputs, of which there may be fewer, as a tile reads them; tap by tap, `by_tap` bytes apart.
void pack_quad(const Stored& from, int64_t by_input, int inputs, int taps, const int32_t* order, int64_t by_tap,
               int8_t* to) {
  if (inputs < 4) {
    for (int c = 0; c < inputs; ++c)
      for (int tap = 0; tap < taps; ++tap) to[tap * by_tap + c] = from[c * by_input + order[tap]];
    return;
  }
  const Stored second = from.from(by_input), third = second.from(by_input), fourth = third.from(by_input);
  for (int tap = 0; tap < taps; ++tap, to += by_tap) {
    const int at = order[tap];
    const int8_t four[4] = {from[at], second[at], third[at], fourth[at]};
    std::memcpy(to, four, sizeof four);
  }
}

// The weights in four words of a vector.
shuffle::F4 weights_in(shuffle::F4 words, const Stored& stored) {
  return reinterpret_cast<shuffle::F4>(stored.weights(reinterpret_cast<shuffle::V16>(words)));
}

// The same of four outputs and all taps at once. The taps of an input are read as one vector, whatever follows them.
void pack_four(const int8_t* from, const Weights& weights, int taps, int last, int64_t by_tap, int8_t* to) {
  shuffle::F4 quads[4][vector_taps / 4], rows[4];
  float by_source[vector_taps * 4];  // the quads of a tap, output by output: bytes that are never computed with
  for (int i = 0; i < 4; ++i)
    shuffle::interleave(reinterpret_cast<const uint8_t*>(from + i * weights.by_output), weights.by_input,
                        reinterpret_cast<uint8_t*>(quads[i]));
  for (int four = 0; four <= last / 4; ++four) {
    for (int i = 0; i < 4; ++i) rows[i] = weights_in(quads[i][four], weights.stored);
    shuffle::transpose(rows, by_source + 16 * four, 4);
  }
  for (int tap = 0; tap < taps; ++tap, to += by_tap) std::memcpy(to, by_source + 4 * weights.order[tap], 16);
}

// One tap and inputs side by side: quads as they are, four of four outputs at once.
void pack_words(const Product& product, int inputs, const Weights& weights, int8_t* packed) {
  for (int o = 0; o < product.outputs; o += 4) {
    const int outputs = product.outputs - o < 4 ? product.outputs - o : 4;
    const Stored from = weights.stored.from(o * weights.by_output);
    int8_t* to = packed + int64_t{o / lanes} * inputs * lanes + o % lanes * 4;
    int c = 0;
    for (shuffle::F4 rows[4]; outputs == 4 && c + 16 <= inputs; c += 16) {
      for (int i = 0; i < 4; ++i) {
        std::memcpy(&rows[i], from.data + i * weights.by_output + c, sizeof rows[i]);
        rows[i] = weights_in(rows[i], from);
      }
      shuffle::transpose(rows, reinterpret_cast<float*>(to + c * lanes), lanes);
    }
    for (; c < inputs; ++c)
      for (int i = 0; i < outputs; ++i) to[c / 4 * 4 * lanes + 4 * i + c % 4] = from[i * weights.by_output + c];
  }
}

// One tap and outputs side by side: the rows of four inputs interleaved.
void pack_rows(const Product& product, int inputs, const Weights& weights, int8_t* packed) {
  for (int o = 0; o < product.outputs; o += lanes)
    for (int c = 0; c < inputs; c += 4) {
      uint8_t* to = reinterpret_cast<uint8_t*>(packed);
      const auto* from = reinterpret_cast<const uint8_t*>(weights.stored.data + c * weights.by_input + o);
      shuffle::interleave(from, weights.by_input, to);
      for (int i = 0; i < 4; ++i, packed += lanes, to += lanes) {
        const shuffle::V16 own = weights.stored.weights(shuffle::load(to));
        std::memcpy(to, &own, sizeof own);
      }
    }
}

// Where taps do not start on a quad, as those of three colours: one weight after the other.
[[gnu::cold]] void pack_bytes(const Product& product, int inputs, int depth, const Weights& weights, int8_t* packed) {
  const int together = product.taps_of_segment(), quads = product.quads(depth);
  for (int o = 0; o < product.outputs; ++o)
    for (int tap = 0; tap < product.kernel_h * product.kernel_w; ++tap)
      for (int c = 0; c < inputs; ++c) {
        const int64_t segment = int64_t{o / lanes} * product.segments() + tap / together;
        const int byte = tap % together * depth + c;
        packed[((segment * quads + byte / 4) * lanes + o % lanes) * 4 + byte % 4] =
            weights.stored[o * weights.by_output + c * weights.by_input + weights.order[tap]];
      }
}

}  // namespace

void pack_weights(const Product& product, int inputs, int depth, const Weights& weights, int8_t* packed) {
  const int taps = product.kernel_h * product.kernel_w;
  if (inputs % 4 != 0 || product.outputs % lanes != 0)
    std::memset(packed, 0, static_cast<size_t>(product.packed_size(depth)));
  if (depth % 4 != 0) return pack_bytes(product, inputs, depth, weights, packed);
  const bool single = taps == 1 && weights.order[0] == 0 && inputs % 4 == 0;
  if (single && weights.by_input == 1) return pack_words(product, inputs, weights, packed);
  if (single && weights.by_output == 1 && product.outputs % lanes == 0)
    return pack_rows(product, inputs, weights, packed);
  const int64_t by_tap = int64_t{depth} * lanes;
  const int32_t last = *std::max_element(weights.order, weights.order + taps);  // some kernels leave taps out
  const int64_t count = (product.outputs - 1) * weights.by_output + (inputs - 1) * weights.by_input + last + 1;
  for (int o = 0; o < product.outputs; o += 4) {
    const int outputs = product.outputs - o < 4 ? product.outputs - o : 4;
    int8_t* lane = packed + (o / lanes) * taps * by_tap + o % lanes * 4;
    for (int c = 0; c < inputs; c += 4) {
      const int64_t at = o * weights.by_output + c * weights.by_input;
      const int own = inputs - c < 4 ? inputs - c : 4;
      const int64_t end = at + 3 * (weights.by_output + weights.by_input) + vector_taps;
      if (last < vector_taps && outputs == 4 && own == 4 && end <= count)
        pack_four(weights.stored.data + at, weights, taps, last, by_tap, lane + c * lanes);
      else
        for (int i = 0; i < outputs; ++i)
          pack_quad(weights.stored.from(at + i * weights.by_output), weights.by_input, own, taps, weights.order, by_tap,
                    lane + c * lanes + 4 * i);
    }
  }
}

int greatest_weight(const FedmpqConv& c, const Stored& weights) {
  const int64_t count = int64_t{c.out_channels} * (c.channels / c.groups) * c.kernel_h * c.kernel_w;
  // In bytes, of which a register holds most, and without a sign, as every x86 compares them: codes, or 128 more than weights.
  const uint8_t turned = weights.bits == 0 ? 128 : 0;
  uint8_t least = 255, most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto byte = static_cast<uint8_t>(weights.data[i] ^ turned);
    least = byte < least ? byte : least;
    most = byte > most ? byte : most;
  }
  if (weights.twice() != 0 && most > weights.zero()) return -1;
  const int factor = weights.twice() != 0 ? 2 : 1, zero = weights.bits == 0 ? 128 : weights.zero();
  return std::max(std::abs(factor * least - zero), std::abs(factor * most - zero));
}

void tile_rows(const Product& product, int depth, const Segments& segments, const uint8_t* from, int64_t line, int rows,
               const int8_t* packed, int fit, const int32_t* start, int32_t* sums) {
  const int blocks = product.blocks(), stride = product.stride_w * depth, width = product.out_width;
  const ptrdiff_t block = ptrdiff_t{segments.count} * segments.quads * lanes * 4;
  Tile tile{from, stride, 0, segments.offsets.data(), segments.count, segments.quads, packed, block, 0, sums, blocks * lanes,
            nullptr, 0, fit};
  // All rows with a block's weights before the next ones, which the first cache may have no room for as well.
  for (int b = 0; b < blocks; b += 2) {
    tile.w = packed + b * block;
    tile.blocks = blocks - b < 2 ? 1 : 2;
    tile.start = start != nullptr ? start + b * lanes : nullptr;
    for (int y = 0; y < rows; ++y)
      for (int x = 0; x < width; x += max_rows) {
        tile.a = from + y * line + x * stride;
        tile.rows = width - x < max_rows ? width - x : max_rows;
        tile.out = sums + ((int64_t{y} * width + x) * blocks + b) * lanes;
        ops().tile(tile);
      }
  }
}

void bit_row(const Product& product, int depth, const Segments& segments, const uint8_t* from, int64_t plane,
             const Serial& serial, const int32_t* start, int32_t* sums) {
  const int blocks = product.blocks(), stride = product.stride_w * depth / 8, words = up(segments.quads, 16) / 16;
  const int used = 4 * segments.quads % 64;  // bits of the last word
  const int64_t block = plane_words(segments.count, segments.quads, serial.bits);
  int32_t code_sums[max_rows];
  for (int x = 0; x < product.out_width && start != nullptr; ++x)
    std::memcpy(sums + int64_t{x} * blocks * lanes, start, static_cast<size_t>(blocks) * lanes * sizeof(int32_t));
  for (int x = 0; x < product.out_width; x += max_rows) {
    const int rows = product.out_width - x < max_rows ? product.out_width - x : max_rows;
    BitTile tile{from + x * stride, plane, stride, rows, segments.offsets.data(), segments.count, words,
                 used == 0 ? ~uint64_t{0} : (uint64_t{1} << used) - 1, serial.weights, serial.bits,
                 sums + int64_t{x} * blocks * lanes, blocks * lanes, start != nullptr};
    bit_serial().sum(tile, code_sums);
    for (int b = 0; b < blocks; ++b, tile.w += block, tile.out += lanes) bit_serial().product(tile, code_sums);
  }
}

void tidy(int32_t* sums, int64_t pixels, int outputs, int stride) {
  if (outputs == stride) return;
  for (int64_t x = 1; x < pixels; ++x)
    std::memmove(sums + x * outputs, sums + x * stride, static_cast<size_t>(outputs) * sizeof(int32_t));
}

[[gnu::cold]] Taps::Taps(bool deep, const Layout& layout, int kernel_h, int kernel_w, int dilation_h, int dilation_w)
    : offsets(deep ? int64_t{kernel_h} * kernel_w : 0) {
  int32_t* to = offsets.data();
  for (int r = 0; r < kernel_h && deep && *this; ++r)
    for (int s = 0; s < kernel_w; ++s) *to++ = (r * dilation_h * layout.padded_width + s * dilation_w) * layout.depth;
}

}  // namespace fedmpq
