// NEON without dot product: a register of eight products of bytes holds four each of two outputs, added as 16-bit
// numbers while they surely fit, then in pairs as 32-bit ones.
#include "ops.h"

#ifdef FEDMPQ_NEON

#include <arm_neon.h>

namespace fedmpq {
namespace {

constexpr int width = 4, product_lanes = 8;

#include "vectors.inc"
#include "vectors_neon.inc"

#include "passes.inc"

// The same four bytes twice.
inline int8x8_t quad(const uint8_t* from) {
  int32_t four;
  __builtin_memcpy(&four, from, sizeof four);
  return vreinterpret_s8_s32(vdup_n_s32(four));
}

// Four products each of outputs 0 and 1, 2 and 3, 4 and 5, 6 and 7, to eight sums.
inline void add_to(const int32x4_t low[2], const int32x4_t high[2], bool add, int32_t* out) {
  const int32x4_t first = vpaddq_s32(low[0], low[1]), second = vpaddq_s32(high[0], high[1]);
  vst1q_s32(out, add ? vaddq_s32(vld1q_s32(out), first) : first);
  vst1q_s32(out + 4, add ? vaddq_s32(vld1q_s32(out + 4), second) : second);
}

// Rows x 8 outputs as 16-bit numbers; the 32-bit ones are few enough accesses to live in memory.
template <int Rows>
struct Parts {
  int16x8_t part[Rows][4];

  void clear() {
    for (auto& row : part)
      for (auto& four : row) four = vdupq_n_s16(0);
  }

  void multiply(const Tile& t, const uint8_t* a, const int8_t* w, int quads) {
    for (int q = 0; q < quads; ++q, a += 4, w += 64) {
      const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const int8x8_t codes = quad(a + r * t.stride);
        part[r][0] = vmlal_s8(part[r][0], codes, vget_low_s8(w0));
        part[r][1] = vmlal_s8(part[r][1], codes, vget_high_s8(w0));
        part[r][2] = vmlal_s8(part[r][2], codes, vget_low_s8(w1));
        part[r][3] = vmlal_s8(part[r][3], codes, vget_high_s8(w1));
      }
    }
  }

  void flush(const Tile& t, bool add, int32_t* out) {
    for (int r = 0; r < Rows; ++r) {
      int32x4_t pairs[4];
      for (int i = 0; i < 4; ++i) pairs[i] = vpaddlq_s16(part[r][i]);
      add_to(pairs, pairs + 2, add, out + r * t.out_stride);
    }
    clear();
  }
};

template <int Rows>
inline void narrow(const Tile& t, const uint8_t* a, const int8_t* w, int32_t* out) {
  Parts<Rows> sums;
  sums.clear();
  bool add = t.add;
  int room = 2 * t.fit;
  for (int s = 0; s < t.segments; ++s)
    for (int q = 0; q < t.quads;) {
      const int count = t.quads - q < room ? t.quads - q : room;
      sums.multiply(t, a + t.segment[s] + 4 * q, w, count);
      w += 64 * count;
      q += count;
      room -= count;
      if (room > 0) continue;
      sums.flush(t, add, out);
      add = true;
      room = 2 * t.fit;
    }
  sums.flush(t, add, out);
}

// Two products fit whatever the bytes are.
template <int Rows>
inline void two_quads(const Tile& t, const uint8_t* a, const int8_t* w, int32x4_t (&sums)[Rows][4]) {
  const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16), next0 = vld1q_s8(w + 64), next1 = vld1q_s8(w + 80);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const int8x8_t codes = quad(a + r * t.stride), next = quad(a + r * t.stride + 4);
    const auto add = [&](int i, int8x8_t first, int8x8_t second) {
      sums[r][i] = vpadalq_s16(sums[r][i], vmlal_s8(vmull_s8(codes, first), next, second));
    };
    add(0, vget_low_s8(w0), vget_low_s8(next0));
    add(1, vget_high_s8(w0), vget_high_s8(next0));
    add(2, vget_low_s8(w1), vget_low_s8(next1));
    add(3, vget_high_s8(w1), vget_high_s8(next1));
  }
}

template <int Rows>
inline void one_quad(const Tile& t, const uint8_t* a, const int8_t* w, int32x4_t (&sums)[Rows][4]) {
  const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
  for (int r = 0; r < Rows; ++r) {
    const int8x8_t codes = quad(a + r * t.stride);
    sums[r][0] = vpadalq_s16(sums[r][0], vmull_s8(codes, vget_low_s8(w0)));
    sums[r][1] = vpadalq_s16(sums[r][1], vmull_s8(codes, vget_high_s8(w0)));
    sums[r][2] = vpadalq_s16(sums[r][2], vmull_s8(codes, vget_low_s8(w1)));
    sums[r][3] = vpadalq_s16(sums[r][3], vmull_s8(codes, vget_high_s8(w1)));
  }
}

template <int Rows>
inline void wide(const Tile& t, const uint8_t* a, const int8_t* w, int32_t* out) {
  int32x4_t sums[Rows][4];
  for (auto& row : sums)
    for (auto& four : row) four = vdupq_n_s32(0);
  for (int s = 0; s < t.segments; ++s) {
    const uint8_t* from = a + t.segment[s];
    int q = 0;
    for (; q + 2 <= t.quads; q += 2, from += 8, w += 128) two_quads<Rows>(t, from, w, sums);
    for (; q < t.quads; ++q, w += 64) one_quad<Rows>(t, from, w, sums);
  }
  for (int r = 0; r < Rows; ++r) add_to(sums[r], sums[r] + 2, t.add, out + r * t.out_stride);
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  const uint8_t* a = t.a + row * t.stride;
  for (int b = 0; b < t.blocks; ++b)
    for (int half = 0; half < 2; ++half) {
      const int8_t* w = t.w + b * t.block + 32 * half;
      int32_t* out = t.out + row * t.out_stride + b * lanes + 8 * half;
      // With less room than for eight quads, writing sums back would take longer than the products.
      if (t.fit >= 4)
        narrow<Rows>(t, a, w, out);
      else
        wide<Rows>(t, a, w, out);
    }
}

constexpr int unrolled = 4;

#include "tile_rows.inc"

}  // namespace

const Ops ops_neon{
    "neon", true,   tiles,         depthwise,      depthwise_weights, statistics, requantize,
    pack,   unpack, backward_sums, backward_error, quantize_error,    to_error};

}  // namespace fedmpq

#endif
