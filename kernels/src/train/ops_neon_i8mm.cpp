// NEON with products of matrices of bytes: one instruction multiplies two rows of eight by two columns and adds them to four
// sums.
#include "ops.h"

#ifdef FEDMPQ_I8MM

#include <arm_neon.h>

namespace fedmpq {
namespace {

constexpr int width = 4, product_lanes = 8, small_lanes = 16, byte_registers = 4;

#include "vectors.inc"
#include "vectors_neon.inc"

#include "passes.inc"
#include "update.inc"

// Eight bytes of each of two rows.
inline int8x16_t both(int8x8_t first, int8x8_t second) { return vcombine_s8(first, second); }

inline int8x8_t one_quad(const int8_t* from) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return vcreate_s8(bytes);
}

// Rows x 16 outputs. A register has the sums of a pair of rows and a pair of outputs, row by row. An odd last row is its own
// neighbour; nobody reads those sums.
template <int Rows>
struct Sums {
  static constexpr int pairs = (Rows + 1) / 2;
  int32x4_t sums[pairs][8];

  static int second_of(int pair) { return 2 * pair + 1 < Rows ? 2 * pair + 1 : 2 * pair; }

  // Two quads, of which the second, if there is one, lies behind those of the 16 outputs.
  template <bool Two>
  [[gnu::always_inline]] void multiply(const int8x16_t (&codes)[pairs], const int8_t* w) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int32x4_t first = vreinterpretq_s32_s8(vld1q_s8(w + 16 * i));
      const int32x4_t second = Two ? vreinterpretq_s32_s8(vld1q_s8(w + 64 + 16 * i)) : vdupq_n_s32(0);
      const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      const int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(first, second));
#pragma GCC unroll 2
      for (int p = 0; p < pairs; ++p) {
        sums[p][2 * i] = vmmlaq_s32(sums[p][2 * i], codes[p], low);
        sums[p][2 * i + 1] = vmmlaq_s32(sums[p][2 * i + 1], codes[p], high);
      }
    }
  }

  [[gnu::always_inline]] void multiply(const int8_t* from, ptrdiff_t stride, const int8_t* w, int quads) {
    int8x16_t codes[pairs], next[pairs];
    int q = 0;
    for (; q + 4 <= quads; q += 4, from += 16, w += 256) {
      for (int p = 0; p < pairs; ++p) {
        const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(from + 2 * p * stride));
        const int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(from + second_of(p) * stride));
        codes[p] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
        next[p] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
      }
      multiply<true>(codes, w);
      multiply<true>(next, w + 128);
    }
    if (q + 2 <= quads) {
      for (int p = 0; p < pairs; ++p)
        codes[p] = both(vld1_s8(from + 2 * p * stride), vld1_s8(from + second_of(p) * stride));
      multiply<true>(codes, w);
      q += 2, from += 8, w += 128;
    }
    if (q == quads) return;
    for (int p = 0; p < pairs; ++p) codes[p] = both(one_quad(from + 2 * p * stride), one_quad(from + second_of(p) * stride));
    multiply<false>(codes, w);
  }

  void write(const int32_t* start, ptrdiff_t start_stride, int32_t* out, ptrdiff_t out_stride) const {
    for (int row = 0; row < Rows; ++row)
      for (int i = 0; i < 4; ++i) {
        const int64x2_t left = vreinterpretq_s64_s32(sums[row / 2][2 * i]);
        const int64x2_t right = vreinterpretq_s64_s32(sums[row / 2][2 * i + 1]);
        const int32x4_t own = vreinterpretq_s32_s64(row % 2 == 0 ? vzip1q_s64(left, right) : vzip2q_s64(left, right));
        const int32_t* from = start == nullptr ? nullptr : start + row * start_stride + 4 * i;
        vst1q_s32(out + row * out_stride + 4 * i, from == nullptr ? own : vaddq_s32(own, vld1q_s32(from)));
      }
  }
};

template <int Rows>
inline void product(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  Sums<Rows> own;
  for (auto& pair : own.sums)
    for (auto& sums : pair) sums = vdupq_n_s32(0);
  for (int s = 0; s < t.segments; ++s, w += 64 * t.quads)
    own.multiply(reinterpret_cast<const int8_t*>(a + t.segment[s]), t.stride, w, t.quads);
  own.write(start, t.start_stride, out, t.out_stride);
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  for (int b = 0; b < t.blocks; ++b)
    product<Rows>(t, t.a + row * t.stride, t.w + b * t.block, t.start_of(row, b), t.out + row * t.out_stride + b * lanes);
}

constexpr int unrolled = 4;

#include "tile_rows.inc"

#include "pair_tile.inc"

}  // namespace

const Ops ops_neon_i8mm{
    "neon_i8mm", true, tiles, pair_tiles<tiles>, 0,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq

#endif
