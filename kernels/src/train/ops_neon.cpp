// NEON without dot product: a register of eight products of bytes holds four each of two outputs, added as 16-bit
// numbers while they surely fit, then in pairs as 32-bit ones.
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

// Eight outputs' sums from two 32-bit numbers for each of them, two outputs a register, and the start, if there is one.
inline void write(const int32x4_t (&pairs)[4], const int32_t* start, int32_t* out) {
  const int32x4_t first = vpaddq_s32(pairs[0], pairs[1]), second = vpaddq_s32(pairs[2], pairs[3]);
  vst1q_s32(out, start != nullptr ? vaddq_s32(vld1q_s32(start), first) : first);
  vst1q_s32(out + 4, start != nullptr ? vaddq_s32(vld1q_s32(start + 4), second) : second);
}

// Four neighbouring quads of a row.
inline int32x4_t four_quads(const uint8_t* from) { return vreinterpretq_s32_u8(vld1q_u8(from)); }

// One quad, four times the same.
inline int8x16_t spread(const uint8_t* from) {
  int32_t four;
  __builtin_memcpy(&four, from, sizeof four);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

template <int Quad>
inline int8x16_t spread(int32x4_t quads) {
  return vreinterpretq_s8_s32(vdupq_laneq_s32(quads, Quad));
}

// Rows x 16 outputs as 16-bit numbers, of which writing adds up to 32-bit ones in memory.
template <int Rows>
struct Narrow16 {
  int16x8_t part[Rows][8];

  void clear() {
    for (auto& row : part)
      for (auto& sums : row) sums = vdupq_n_s16(0);
  }

  void multiply(const int8x16_t (&codes)[Rows], const int8_t* w) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int8x16_t weights = vld1q_s8(w + 16 * i);
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) {
        part[r][2 * i] = vmlal_s8(part[r][2 * i], vget_low_s8(codes[r]), vget_low_s8(weights));
        part[r][2 * i + 1] = vmlal_high_s8(part[r][2 * i + 1], codes[r], weights);
      }
    }
  }

  template <int Quad>
  void multiply(const int32x4_t (&quads)[Rows], const int8_t* w) {
    int8x16_t codes[Rows];
    for (int r = 0; r < Rows; ++r) codes[r] = spread<Quad>(quads[r]);
    multiply(codes, w + 64 * Quad);
  }

  void multiply(const Tile& t, const uint8_t* a, const int8_t* w, int quads) {
    int q = 0;
    for (; q + 4 <= quads; q += 4, a += 16, w += 256) {
      int32x4_t codes[Rows];
      for (int r = 0; r < Rows; ++r) codes[r] = four_quads(a + r * t.stride);
      multiply<0>(codes, w);
      multiply<1>(codes, w);
      multiply<2>(codes, w);
      multiply<3>(codes, w);
    }
    for (; q < quads; ++q, a += 4, w += 64) {
      int8x16_t codes[Rows];
      for (int r = 0; r < Rows; ++r) codes[r] = spread(a + r * t.stride);
      multiply(codes, w);
    }
  }

  void flush(const Tile& t, const int32_t* start, ptrdiff_t start_stride, int32_t* out) {
    for (int r = 0; r < Rows; ++r)
      for (int half = 0; half < 2; ++half) {
        int32x4_t pairs[4];
        for (int i = 0; i < 4; ++i) pairs[i] = vpaddlq_s16(part[r][4 * half + i]);
        const int32_t* own = start != nullptr ? start + r * start_stride + 8 * half : nullptr;
        write(pairs, own, out + r * t.out_stride + 8 * half);
      }
    clear();
  }
};

template <int Rows>
inline void narrow(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  Narrow16<Rows> sums;
  sums.clear();
  ptrdiff_t start_stride = t.start_stride;
  int room = 2 * t.fit;
  for (int s = 0; s < t.segments; ++s)
    for (int q = 0; q < t.quads;) {
      const int count = t.quads - q < room ? t.quads - q : room;
      sums.multiply(t, a + t.segment[s] + 4 * q, w, count);
      w += 64 * count;
      q += count;
      room -= count;
      if (room > 0) continue;
      sums.flush(t, start, start_stride, out);
      start = out, start_stride = t.out_stride;
      room = 2 * t.fit;
    }
  sums.flush(t, start, start_stride, out);
}

// Rows x 8 outputs as 32-bit numbers: two products of bytes fit in 16 bits whatever they are.
template <int Rows>
struct Wide {
  int32x4_t sums[Rows][4];

  void two(int row, int8x16_t codes, int8x16_t next, const int8_t* w) {
    for (int i = 0; i < 2; ++i) {
      const int8x16_t first = vld1q_s8(w + 16 * i), second = vld1q_s8(w + 64 + 16 * i);
      const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(first)), high = vmull_high_s8(codes, first);
      sums[row][2 * i] = vpadalq_s16(sums[row][2 * i], vmlal_s8(low, vget_low_s8(next), vget_low_s8(second)));
      sums[row][2 * i + 1] = vpadalq_s16(sums[row][2 * i + 1], vmlal_high_s8(high, next, second));
    }
  }

  void one(int row, int8x16_t codes, const int8_t* w) {
    for (int i = 0; i < 2; ++i) {
      const int8x16_t weights = vld1q_s8(w + 16 * i);
      const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(weights));
      sums[row][2 * i] = vpadalq_s16(sums[row][2 * i], low);
      sums[row][2 * i + 1] = vpadalq_s16(sums[row][2 * i + 1], vmull_high_s8(codes, weights));
    }
  }
};

template <int Rows>
inline void wide(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  Wide<Rows> wide;
  for (auto& row : wide.sums)
    for (auto& sums : row) sums = vdupq_n_s32(0);
  for (int s = 0; s < t.segments; ++s) {
    const uint8_t* from = a + t.segment[s];
    int q = 0;
    for (; q + 4 <= t.quads; q += 4, from += 16, w += 256)
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) {
        const int32x4_t quads = four_quads(from + r * t.stride);
        wide.two(r, spread<0>(quads), spread<1>(quads), w);
        wide.two(r, spread<2>(quads), spread<3>(quads), w + 128);
      }
    for (; q < t.quads; ++q, from += 4, w += 64)
      for (int r = 0; r < Rows; ++r) wide.one(r, spread(from + r * t.stride), w);
  }
  for (int r = 0; r < Rows; ++r)
    write(wide.sums[r], start != nullptr ? start + r * t.start_stride : nullptr, out + r * t.out_stride);
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  const uint8_t* a = t.a + row * t.stride;
  for (int b = 0; b < t.blocks; ++b) {
    const int8_t* w = t.w + b * t.block;
    int32_t* out = t.out + row * t.out_stride + b * lanes;
    const int32_t* start = t.start_of(row, b);
    // With less room than for eight quads, writing sums back would take longer than the products.
    if (t.fit >= 4) {
      narrow<Rows>(t, a, w, start, out);
    } else {
      wide<Rows>(t, a, w, start, out);
      wide<Rows>(t, a, w + 32, start != nullptr ? start + 8 : nullptr, out + 8);
    }
  }
}

constexpr int unrolled = 2;

#include "tile_rows.inc"

#include "pair_tile.inc"

}  // namespace

const Ops ops_neon{
    "neon", true, tiles, pair_tiles<tiles>, 0,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq

#endif
