// Eq. 4's bit-serial form: a product of 4-bit codes and weights of few bits by AND and popcount on bit-planes. With A_j the
// planes of the codes a and B_i those of the weights' codes, a weight of b bits being 2 * code - (2^b - 1):
//   sum of a * weight = 2 * sum_ij 2^(i+j) popcount(A_j AND B_i) - (2^b - 1) * sum of a
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"
#include "weights.h"

namespace fedmpq {

constexpr int code_planes = 4;
constexpr int max_serial_bits = 7;  // a weight of 8 bits is no odd number

// Rows of codes against 16 outputs. Words are 64 bits along a segment; what `mask` lacks in a segment's last is no input.
struct BitTile {
  const uint8_t* a;         // plane j of row r, segment s starts at a + j * plane + r * stride + segment[s], in bytes
  ptrdiff_t plane, stride;
  int rows;
  const int32_t* segment;
  int segments, words;
  uint64_t last_mask;       // of the last word of every segment
  const uint64_t* w;        // w[bit][segment][word][output]
  int bits;
  int32_t* out;             // out[r * out_stride + output]
  ptrdiff_t out_stride;
  bool add;                 // to what is in out
};

struct BitSerial {
  // sums[r] = sum of a, which every output needs
  void (*sum)(const BitTile&, int32_t* sums);
  void (*product)(const BitTile&, const int32_t* sums);
};

extern const BitSerial bit_serial_scalar;
#ifdef FEDMPQ_X86
extern const BitSerial bit_serial_avx512;
#endif
#ifdef FEDMPQ_NEON
extern const BitSerial bit_serial_neon;
#endif

const BitSerial& bit_serial();  // of the active instruction set

// The width of odd weights within ±(2^bits - 1), of which `greatest` is the greatest magnitude, if the bit-serial form is to
// be used for them, else 0; a segment has `inputs` of them.
int serial_bits(const Stored& weights, int64_t count, int greatest, int inputs);

// Planes w[block][bit][segment][word][output] of weights that lie as a tile reads them, [block][segment][quad][output][4].
inline int64_t plane_words(int segments, int quads, int bits) {
  return int64_t{bits} * segments * ((quads + 15) / 16) * 16;
}
void weight_planes(const int8_t* packed, int blocks, int segments, int quads, int bits, uint64_t* planes);

}  // namespace fedmpq
