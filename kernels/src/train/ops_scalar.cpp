// Portable C++: the reference every other table is compared with.
#include "ops.h"

namespace fedmpq {
namespace {

constexpr int width = 4, product_lanes = 8, small_lanes = 8, byte_registers = 1;

#include "vectors.inc"

struct ByteTable {
  static constexpr int together = 1;
  const uint8_t* table;

  explicit ByteTable(const uint8_t* entries) : table(entries) {}
  void look_up(const uint8_t* from, uint8_t* to) const { *to = table[*from]; }
};

#include "passes.inc"
#include "update.inc"

void tile(const Tile& t) {
  for (int r = 0; r < t.rows; ++r)
    for (int b = 0; b < t.blocks; ++b) {
      int32_t* out = t.out + r * t.out_stride + b * lanes;
      int32_t sums[lanes];
      const int32_t* start = t.start_of(r, b);
      for (int l = 0; l < lanes; ++l) sums[l] = start != nullptr ? start[l] : 0;
      const int8_t* w = t.w + b * t.block;
      for (int s = 0; s < t.segments; ++s) {
        const uint8_t* a = t.a + r * t.stride + t.segment[s];
        for (int q = 0; q < t.quads; ++q, a += 4, w += 4 * lanes)
          for (int l = 0; l < lanes; ++l)
            sums[l] += a[0] * w[4 * l] + a[1] * w[4 * l + 1] + a[2] * w[4 * l + 2] + a[3] * w[4 * l + 3];
      }
      for (int l = 0; l < lanes; ++l) out[l] = sums[l];
    }
}

#include "pair_tile.inc"

}  // namespace

const Ops ops_scalar{
    "scalar", false, tile, pair_tiles<tile>, 0,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq
