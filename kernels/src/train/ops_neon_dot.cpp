// NEON with dot product: one instruction multiplies 16 pairs of signed bytes and adds them to four sums.
#include "ops.h"

#ifdef FEDMPQ_NEON

#include <arm_neon.h>

namespace fedmpq {
namespace {

constexpr int width = 4, product_lanes = 8, small_lanes = 16, byte_registers = 4;

#include "vectors.inc"
#include "vectors_neon.inc"

#include "passes.inc"
#include "update.inc"

// One quad of each row, which is number `Quad` of the four in its register, with its weights.
template <int Quad, int Rows>
inline void multiply(const int8x16_t (&codes)[Rows], const int8_t* w, int32x4_t (&sums)[Rows][4]) {
#pragma GCC unroll 4
  for (int l = 0; l < 4; ++l) {
    const int8x16_t weights = vld1q_s8(w + 16 * l);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r][l] = vdotq_laneq_s32(sums[r][l], weights, codes[r], Quad);
  }
}

template <int Rows>
inline void product(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  int32x4_t sums[Rows][4];
  for (int r = 0; r < Rows; ++r)
    for (int l = 0; l < 4; ++l) sums[r][l] = start != nullptr ? vld1q_s32(start + r * t.start_stride + 4 * l) : vdupq_n_s32(0);
  for (int s = 0; s < t.segments; ++s) {
    const int8_t* from = reinterpret_cast<const int8_t*>(a + t.segment[s]);
    int8x16_t codes[Rows];
    int q = 0;
    for (; q + 4 <= t.quads; q += 4, from += 16, w += 256) {
      for (int r = 0; r < Rows; ++r) codes[r] = vld1q_s8(from + r * t.stride);
      multiply<0>(codes, w, sums);
      multiply<1>(codes, w + 64, sums);
      multiply<2>(codes, w + 128, sums);
      multiply<3>(codes, w + 192, sums);
    }
    if (q + 2 <= t.quads) {
      for (int r = 0; r < Rows; ++r) codes[r] = vcombine_s8(vld1_s8(from + r * t.stride), vdup_n_s8(0));
      multiply<0>(codes, w, sums);
      multiply<1>(codes, w + 64, sums);
      q += 2, from += 8, w += 128;
    }
    if (q < t.quads) {
      for (int r = 0; r < Rows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, from + r * t.stride, sizeof four);
        codes[r] = vreinterpretq_s8_s32(vdupq_n_s32(four));
      }
      multiply<0>(codes, w, sums);
      w += 64;
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int l = 0; l < 4; ++l) vst1q_s32(out + r * t.out_stride + 4 * l, sums[r][l]);
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  for (int b = 0; b < t.blocks; ++b)
    product<Rows>(t, t.a + row * t.stride, t.w + b * t.block, t.start_of(row, b),
                  t.out + row * t.out_stride + b * lanes);
}

constexpr int unrolled = 4;

#include "tile_rows.inc"

#include "pair_tile.inc"

}  // namespace

const Ops ops_neon_dot{
    "neon_dot", true, tiles, pair_tiles<tiles>, 0,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq

#endif
