// AVX-512 with VNNI: one instruction multiplies 64 pairs of bytes and adds them to 16 sums.
#include "ops.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

namespace fedmpq {
namespace {

constexpr int width = 16, product_lanes = 32;

#include "vectors.inc"
#include "vectors_avx2.inc"

template <>
inline Floats<16> clamped<16>(Floats<16> value, float low, float high) {
  const __m512 raised = _mm512_max_ps(_mm512_set1_ps(low), same_bits<__m512>(value));
  return same_bits<Floats<16>>(_mm512_min_ps(_mm512_set1_ps(high), raised));
}

template <>
inline Ints<16> load_bytes<16>(const uint8_t* from) {
  return same_bits<Ints<16>>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

template <>
inline void store_bytes<16>(Ints<16> value, uint8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(same_bits<__m512i>(value)));
}

template <>
inline Words<16> load_upper<16>(const uint16_t* from) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return same_bits<Words<16>>(_mm512_slli_epi32(halves, 16));
}

template <>
inline void store_upper<16>(Words<16> bits, uint16_t* to) {
  const __m512i halves = _mm512_srli_epi32(same_bits<__m512i>(bits), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(halves));
}

template <>
inline Products<32> load_factors<32>(const uint8_t* from) {
  return same_bits<Products<32>>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

template <>
inline Products<32> load_factors<32>(const int8_t* from) {
  return same_bits<Products<32>>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

template <>
inline void add_products<32>(Products<32> products, int32_t* to) {
  const __m512i both = same_bits<__m512i>(products);
  const auto low = same_bits<Ints<16>>(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(both)));
  const auto high = same_bits<Ints<16>>(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(both, 1)));
  store(load<16>(to) + low, to);
  store(load<16>(to + 16) + high, to + 16);
}

#include "passes.inc"
#include "update.inc"

template <int Rows, int Blocks>
inline void product(const Tile& t, int row) {
  const uint8_t* rows = t.a + row * t.stride;
  int32_t* out = t.out + row * t.out_stride;
  __m512i sums[Rows][Blocks];
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b)
      sums[r][b] = t.add ? _mm512_loadu_si512(out + r * t.out_stride + b * lanes) : _mm512_setzero_si512();
  const int8_t* w = t.w;
  for (int s = 0; s < t.segments; ++s) {
    // A pointer for every four rows, which the compiler must not fold into one: it would run out of registers for the
    // offsets of sixteen.
    const uint8_t* a[(Rows + 3) / 4];
    for (int g = 0; 4 * g < Rows; ++g) {
      a[g] = rows + t.segment[s] + 4 * g * t.stride;
      __asm__("" : "+r"(a[g]));
    }
    for (int q = 0; q < t.quads; ++q, w += 64) {
      __m512i weights[Blocks];
      for (int b = 0; b < Blocks; ++b) weights[b] = _mm512_loadu_si512(w + b * t.block);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, a[r / 4] + 4 * q + r % 4 * t.stride, 4);
        const __m512i codes = _mm512_set1_epi32(four);
        for (int b = 0; b < Blocks; ++b) sums[r][b] = _mm512_dpbusd_epi32(sums[r][b], codes, weights[b]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b) _mm512_storeu_si512(out + r * t.out_stride + b * lanes, sums[r][b]);
}

constexpr int unrolled = 16;

template <int Rows>
inline void tile(const Tile& t, int row) {
  if (t.blocks == 1) return product<Rows, 1>(t, row);
  // Twice eight sums already hide the latency of their additions.
  constexpr int first = Rows > 8 ? 8 : Rows;
  product<first, 2>(t, row);
  if constexpr (Rows > first) product<Rows - first, 2>(t, row + first);
}

#include "tile_rows.inc"

}  // namespace

const Ops ops_avx512{
    "avx512",     false,      tiles, depthwise, depthwise_weights, statistics,
    requantize, pack,       unpack, backward_sums, backward_error, quantize_error, to_error,
    add_codes, pass_error, decay, push_momentum, move_rounded, move_paper};

}  // namespace fedmpq

#endif
