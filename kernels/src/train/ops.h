// The table of training kernels that every instruction set fills: one integer product (`tile`) on which convolution,
// linear layers and both their backward passes run, and the passes over accumulators and errors between products.
//
// Everything here gives the same bits on every instruction set: integers are exact, and float code is written once
// (passes.inc), vectorised over channels, which never changes the order of a sum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fedmpq/training.h"
#include "isa.h"

namespace fedmpq {

constexpr int lanes = 16;    // output channels a block of weights holds, whatever the register width
constexpr int max_rows = 16; // rows a tile takes at a time

// How many sums of `terms` products surely add up within 16 bits, given the greatest magnitudes of their factors.
constexpr int products_that_fit(int terms, int code, int weight) {
  return 32767 / (terms * code * (weight > 0 ? weight : 1));
}

// out[r][16 b + l] = start[r][16 b + l] + sum over segments s, quads q, bytes i of a[r * stride + segment[s] + 4 q + i] * w[b][s][q][l][i]
struct Tile {
  const uint8_t* a;
  ptrdiff_t stride;
  int rows;  // 1..max_rows
  const int32_t* segment;
  int segments, quads;  // at least 1
  const int8_t* w;
  ptrdiff_t block;  // bytes between blocks of weights
  int blocks;       // 1 or 2
  int32_t* out;
  ptrdiff_t out_stride;
  const int32_t* start;  // null for zeros
  ptrdiff_t start_stride;
  int fit;  // sums of two products that surely add up within 16 bits; may be 0

  // Always inlined: a copy compiled for one instruction set must not serve another.
  [[gnu::always_inline]] const int32_t* start_of(int row, int b) const {
    return start == nullptr ? nullptr : start + row * start_stride + b * lanes;
  }
};

// Pairs of neighbouring outputs, as winograd.h says; pixels 2 p and 2 p + 1 of `out` are those of pair p. For each of four
// parts k, m[k][16 b + l] = start[k * start_part + 16 b + l] + sum over segments s, quads q, bytes i of
//   a[(4 p + k) * depth + segment[s] + 4 q + i] * w[k * part + b * block + ((s * depth/4 + q) * 16 + l) * 4 + i]
struct PairTile {
  const uint8_t* a;
  int depth;  // a multiple of 16
  int pairs;  // 1..max_rows
  const int32_t* segment;
  int segments;
  const int8_t* w;
  ptrdiff_t part, block;
  int blocks;  // 1 or 2
  const int32_t* start;
  ptrdiff_t start_part;
  int32_t* out;
  ptrdiff_t stride;  // sums between pixels
  int fit;           // as a tile's
};

using Rescale = FedmpqRescale;  // t is inside where low < t < high

// One channel at a time: out[p][c] = sum over taps k of (a[p * stride + tap[k] + c] - zero) * w[k][c]
struct Depthwise {
  const uint8_t* a;
  ptrdiff_t stride;
  int pixels, channels, taps, zero;
  int run;     // neighbouring taps that lie as far apart as pixels do; divides them all
  bool small;  // whether a byte of `a` less zero is a signed byte
  int fit;     // products that surely add up within 16 bits; at least 1
  const int32_t* tap;
  const int8_t* w;
  int32_t* out;
};

// t = ((left - left_zero) * left_scale + (right - right_zero) * right_scale) / step, as the integer eval forward has it;
// codes are clamp(rint(t), low, high) - low.
struct Addition {
  int left_zero, right_zero;
  float left_scale, right_scale, step, low, high;
};

// t = (left - left_zero) * (right - right_zero) * multiplier; codes are clamp(rint(t), low, high) - low.
struct Multiplication {
  int left_zero, right_zero;
  float multiplier, low, high;
};

// code = clamp(rint(code * multiplier), low, high)
struct Joining {
  int zero;
  float multiplier, low, high;
};

// The bits of a slope whose code fell outside; a slope itself is finite.
constexpr int32_t is_above = 0x7FC00001, is_below = 0x7FC00002;

// Weight decay of codes that share a step, and the momentum of floats.
struct Decay {
  float zero, step, factor, momentum;
};

// The bits of infinity: an exponent of all ones marks it and what is no number, and no other number's magnitude has bits as
// great.
constexpr uint32_t infinite_bits = 0x7F800000u;

// A stochastic move of codes that share a rate; fedmpq_update_codes states the rules.
struct Move {
  const float *direction, *uniforms;
  int64_t count;
  float rate;
  int bits;
  int32_t low, high;  // codes in use
};

// The Lasso's move of codes towards zero, which lies between middle - 1 and middle.
struct Lasso {
  const float* pull;  // by magnitude, 128 of them: how many codes, at most 256, none below 0
  const float* uniforms;
  int64_t count;
  int32_t low, middle;  // the least code in use
};

struct Ops {
  const char* name;
  // Whether tiles read `a` as signed bytes (cores that multiply only signed by signed): 8-bit codes then come with
  // 128 taken off. 4-bit codes are the same either way.
  bool signed_bytes;
  void (*tile)(const Tile&);
  void (*pair_tile)(const PairTile&);
  int pair_channels;  // the fewest inputs with which a pair_tile takes less time than tiles; 0 if it never does

  void (*depthwise)(const Depthwise&);
  // sums[k][c] += (a[p * stride + tap[k] + c] - zero) * error[p][c] over the pixels; w and out are not used
  void (*depthwise_weights)(const Depthwise&, const int8_t* error, int32_t* sums);

  // sum[c] += sum of acc, square[c] += sum of acc^2 over the pixels; exact up to 2^53. The sums of `fit` pixels, at least 1,
  // surely are within 32 bits.
  void (*statistics)(const int32_t* acc, int64_t pixels, int channels, int64_t fit, double* sum, double* square);
  // code - low, as bytes: clamp(rint(acc * scale + shift), low, high) - low
  void (*requantize)(const int32_t* acc, int64_t pixels, int channels, const Rescale& rescale, uint8_t* out);
  // bytes to 4-bit pairs and back; a last odd one stands alone in the low half
  void (*pack)(const uint8_t* bytes, int64_t count, uint8_t* out);
  void (*unpack)(const uint8_t* pairs, int64_t count, uint8_t* out);
  // Accumulators as 16-bit numbers; false if some are too large for that
  bool (*narrow)(const int32_t* acc, int64_t count, int16_t* out);
  // g = error where inside, else 0: sum_g += g, sum_gx += g * (acc * norm + bias); clipped errors above and below
  void (*backward_sums)(const int32_t* acc, const uint16_t* error, int64_t pixels, int channels, const Rescale& rescale,
                        const float* norm, const float* bias, float* sum_g, float* sum_gx, float* above,
                        float* below);
  // The same of accumulators that were narrowed; they are in acc again then
  void (*narrow_backward_sums)(const int16_t* narrow, const uint16_t* error, int64_t pixels, int channels,
                               const Rescale& rescale, const float* norm, const float* bias, int32_t* acc, float* sum_g,
                               float* sum_gx, float* above, float* below);
  // out = gain * (g - mean_g - (acc * norm + bias) * mean_gx), which may be where error is; the greatest magnitude
  float (*backward_error)(const int32_t* acc, const uint16_t* error, int64_t pixels, int channels,
                          const Rescale& rescale, const float* norm, const float* bias, const float* gain,
                          const float* mean_g, const float* mean_gx, uint16_t* out);
  // floor(clamp(error * inverse + (random + 1/2)/256, -127, 127.5) + 128) - 128
  void (*quantize_error)(const uint16_t* error, int64_t count, float inverse, const uint8_t* random, int8_t* out);
  // out = error-sized: acc * scale, or added to what is there
  void (*to_error)(const int32_t* acc, int64_t rows, int64_t count, float scale, bool add, uint16_t* out,
                   int64_t out_stride);
  // Codes of a sum; two bits at `shift` of each state are set to where it fell: 0 inside, 1 above, 2 below
  void (*add_codes)(const Addition& sum, int64_t count, const uint8_t* left, const uint8_t* right, int shift,
                    uint8_t* codes, uint8_t* states);
  // Rows of codes with another scale, as bytes code - low
  void (*join_codes)(const Joining& joining, int64_t rows, int64_t count, const uint8_t* from, uint8_t* out,
                     int64_t stride);
  // Zeroes errors that fell outside and adds them to above[i % 16] or below[i % 16]
  void (*pass_error)(const uint8_t* states, int64_t count, int shift, uint16_t* error, float* above, float* below);
  // out = table[code], of 256 entries
  void (*lookup)(const uint8_t* table, const uint8_t* codes, int64_t count, uint8_t* out);
  // error *= slopes[code]. If the table clips, some slopes are no number but have the bits `is_above` or `is_below`: errors of
  // those codes become 0 and are added to above[i % 16] or below[i % 16]
  void (*lookup_error)(const float* slopes, bool clips, const uint8_t* codes, int64_t count, uint16_t* error, float* above,
                       float* below);
  // Codes of the products of `left` with one `right` for each channel
  void (*multiply)(const Multiplication& m, int64_t pixels, int channels, const uint8_t* left, const uint8_t* right,
                   uint8_t* out);
  // With g = error where low < t < high, else 0: left_error = g * right * right_scale, which may be where error is, and by
  // channel sum += g * left; clipped errors above and below
  void (*multiply_error)(const Multiplication& m, float right_scale, int64_t pixels, int channels, const uint8_t* left,
                         const uint8_t* right, const uint16_t* error, uint16_t* left_error, float* sum, float* above,
                         float* below);

  // direction = gradient + factor * step * (code - zero) and, if there is a buffer, momentum * buffer, which becomes the same
  void (*decay)(const Decay&, const float* gradient, const uint8_t* codes, int64_t count, float* buffer, float* direction);
  // Those of the greatest magnitude, which compare like the numbers themselves; from `infinite_bits` on, not all are finite.
  uint32_t (*greatest_bits)(const float* values, int64_t count);
  // direction += momentum * scale * codes, which become the sum, as multiples of the new scale that is returned
  float (*push_momentum)(int8_t* codes, float scale, float momentum, int64_t count, float* direction);
  void (*move_paper)(const Move&, uint8_t* codes);
  void (*move_carried)(const Move&, uint8_t* codes, int8_t* fractions);
  void (*move_lasso)(const Lasso&, uint8_t* codes);
};

extern const Ops ops_scalar;
#ifdef FEDMPQ_X86
extern const Ops ops_avx2;
extern const Ops ops_avx512;
#endif
#ifdef FEDMPQ_AVX_VNNI
extern const Ops ops_avx_vnni;
extern const Ops ops_avx_vnni_evex;
#endif
#ifdef FEDMPQ_NEON
extern const Ops ops_neon;
extern const Ops ops_neon_dot;
#endif
#ifdef FEDMPQ_I8MM
extern const Ops ops_neon_i8mm;
#endif
#ifdef FEDMPQ_SVE
const Ops& ops_sve();
#endif

const Ops& ops();  // of the active instruction set

}  // namespace fedmpq
