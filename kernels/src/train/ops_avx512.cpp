// AVX-512 with VNNI: one instruction multiplies 64 pairs of bytes and adds them to 16 sums.
#include "ops.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

namespace fedmpq {
namespace {

#include "passes.inc"

template <int Rows, int Blocks>
inline void tile(const Tile& t) {
  __m512i sums[Rows][Blocks];
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b)
      sums[r][b] = t.add ? _mm512_loadu_si512(t.out + r * t.out_stride + b * lanes) : _mm512_setzero_si512();
  const int8_t* w = t.w;
  for (int s = 0; s < t.segments; ++s) {
    const uint8_t* a = t.a + t.segment[s];
    for (int q = 0; q < t.quads; ++q, a += 4, w += 64) {
      __m512i weights[Blocks];
      for (int b = 0; b < Blocks; ++b) weights[b] = _mm512_loadu_si512(w + b * t.block);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, a + r * t.stride, 4);
        const __m512i codes = _mm512_set1_epi32(four);
        for (int b = 0; b < Blocks; ++b) sums[r][b] = _mm512_dpbusd_epi32(sums[r][b], codes, weights[b]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b) _mm512_storeu_si512(t.out + r * t.out_stride + b * lanes, sums[r][b]);
}

#include "tile_cases.inc"

}  // namespace

const Ops ops_avx512{
    "avx512",     false,      tile_cases, tile_cases, depthwise, depthwise_weights, statistics,
    requantize, pack,       unpack, backward_sums, backward_error, quantize_error, to_error};

}  // namespace fedmpq

#endif
