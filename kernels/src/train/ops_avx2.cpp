// AVX2: bytes multiplied in pairs, sums of pairs added as 16-bit numbers while they surely fit; where less than two do,
// it is faster to widen everything first.
#include "ops.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

namespace fedmpq {
namespace {

constexpr int width = 8, product_lanes = 16;

#include "vectors.inc"
#include "vectors_avx2.inc"
#include "passes.inc"

inline __m256i load_ints(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_ints(__m256i value, int32_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
inline __m256i load_weights(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline int32_t quad(const uint8_t* from) {
  int32_t four;
  __builtin_memcpy(&four, from, 4);
  return four;
}

// Rows x 16 sums of 16 bits each are half of the registers; the 32-bit ones are few enough accesses to live in memory.
template <int Rows>
struct Narrow16 {
  __m256i part[Rows][2];

  void clear() {
    for (auto& row : part) row[0] = row[1] = _mm256_setzero_si256();
  }

  void multiply(const Tile& t, const uint8_t* a, const int8_t* w, int quads) {
    for (int q = 0; q < quads; ++q, a += 4, w += 64) {
      const __m256i w0 = load_weights(w), w1 = load_weights(w + 32);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m256i codes = _mm256_set1_epi32(quad(a + r * t.stride));
        part[r][0] = _mm256_add_epi16(part[r][0], _mm256_maddubs_epi16(codes, w0));
        part[r][1] = _mm256_add_epi16(part[r][1], _mm256_maddubs_epi16(codes, w1));
      }
    }
  }

  void flush(const Tile& t, int32_t* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < Rows; ++r)
      for (int h = 0; h < 2; ++h) {
        int32_t* to = out + r * t.out_stride + 8 * h;
        store_ints(_mm256_add_epi32(load_ints(to), _mm256_madd_epi16(part[r][h], ones)), to);
      }
    clear();
  }
};

template <int Rows>
inline void narrow(const Tile& t, const uint8_t* a, const int8_t* w, int32_t* out) {
  if (!t.add)
    for (int r = 0; r < Rows; ++r)
      for (int h = 0; h < 2; ++h) store_ints(_mm256_setzero_si256(), out + r * t.out_stride + 8 * h);
  Narrow16<Rows> sums;
  sums.clear();
  int room = t.fit;
  for (int s = 0; s < t.segments; ++s)
    for (int q = 0; q < t.quads;) {
      const int count = t.quads - q < room ? t.quads - q : room;
      sums.multiply(t, a + t.segment[s] + 4 * q, w, count);
      w += 64 * count;
      q += count;
      room -= count;
      if (room > 0) continue;
      sums.flush(t, out);
      room = t.fit;
    }
  sums.flush(t, out);
}

// Rows x 8 outputs, two sums each of two products, as 32-bit numbers.
template <int Rows>
inline void wide(const Tile& t, const uint8_t* a, const int8_t* w, int32_t* out) {
  __m256i sums[Rows][2];
  for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
  for (int s = 0; s < t.segments; ++s) {
    const uint8_t* from = a + t.segment[s];
    for (int q = 0; q < t.quads; ++q, from += 4, w += 64) {
      const __m256i both = load_weights(w);
      const __m256i w0 = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(both));
      const __m256i w1 = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(both, 1));
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m256i codes = _mm256_cvtepu8_epi16(_mm_set1_epi32(quad(from + r * t.stride)));
        sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(codes, w0));
        sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(codes, w1));
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    int32_t* to = out + r * t.out_stride;
    const __m256i total = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[r][0], sums[r][1]), 0xD8);
    store_ints(t.add ? _mm256_add_epi32(load_ints(to), total) : total, to);
  }
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  const uint8_t* a = t.a + row * t.stride;
  for (int b = 0; b < t.blocks; ++b) {
    const int8_t* w = t.w + b * t.block;
    int32_t* out = t.out + row * t.out_stride + b * lanes;
    if (t.fit > 1) {
      narrow<Rows>(t, a, w, out);
    } else {
      wide<Rows>(t, a, w, out);
      wide<Rows>(t, a, w + 32, out + 8);
    }
  }
}

constexpr int unrolled = 4;

#include "tile_rows.inc"

}  // namespace

const Ops ops_avx2{
    "avx2",   false,  tiles,         depthwise,      depthwise_weights, statistics, requantize,
    pack,     unpack, backward_sums, backward_error, quantize_error,    to_error};

}  // namespace fedmpq

#endif
