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
#include "update.inc"

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

constexpr int chunk = 256;  // quads that are widened at a time

// The next quads of each row as 16-bit numbers, one after the other; how many.
template <int Rows>
struct Widened {
  int16_t codes[Rows][4 * chunk + 16];
  int segment = 0, quad = 0;  // where the next ones are

  int next(const Tile& t, const uint8_t* a) {
    int filled = 0;
    while (segment < t.segments && filled < chunk) {
      const int left = t.quads - quad, count = left < chunk - filled ? left : chunk - filled;
      for (int r = 0; r < Rows; ++r)
        widen(a + r * t.stride + t.segment[segment] + 4 * quad, 4 * count, codes[r] + 4 * filled);
      filled += count;
      quad = count < left ? quad + count : 0;
      segment += count < left ? 0 : 1;
    }
    return filled;
  }

  static void widen(const uint8_t* from, int count, int16_t* to) {
    for (int i = 0; i < count; i += 16) store(load_factors<16>(from + i), to + i);
  }
};

// Rows x 8 outputs, two sums each of two products, as 32-bit numbers.
template <int Rows>
inline void wide(const Tile& t, const int16_t (&codes)[Rows][4 * chunk + 16], int quads, const int8_t* w, bool add,
                 int32_t* out) {
  __m256i sums[Rows][2];
  for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
  for (int q = 0; q < quads; ++q, w += 64) {
    const __m256i w0 = same_bits<__m256i>(load_factors<16>(w)), w1 = same_bits<__m256i>(load_factors<16>(w + 16));
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      int64_t four;
      __builtin_memcpy(&four, codes[r] + 4 * q, sizeof four);
      const __m256i factors = _mm256_set1_epi64x(four);
      sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(factors, w0));
      sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(factors, w1));
    }
  }
  for (int r = 0; r < Rows; ++r) {
    int32_t* to = out + r * t.out_stride;
    const __m256i total = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[r][0], sums[r][1]), 0xD8);
    store_ints(add ? _mm256_add_epi32(load_ints(to), total) : total, to);
  }
}

template <int Rows>
inline void all_wide(const Tile& t, const uint8_t* a, int32_t* out) {
  Widened<Rows> widened;
  const int8_t* w = t.w;
  bool add = t.add;
  while (const int quads = widened.next(t, a)) {
    for (int b = 0; b < t.blocks; ++b)
      for (int half = 0; half < 2; ++half)
        wide<Rows>(t, widened.codes, quads, w + b * t.block + 32 * half, add, out + b * lanes + 8 * half);
    w += 64 * quads;
    add = true;
  }
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  const uint8_t* a = t.a + row * t.stride;
  int32_t* out = t.out + row * t.out_stride;
  if (t.fit < 2) return all_wide<Rows>(t, a, out);
  for (int b = 0; b < t.blocks; ++b) narrow<Rows>(t, a, t.w + b * t.block, out + b * lanes);
}

constexpr int unrolled = 4;

#include "tile_rows.inc"

}  // namespace

const Ops ops_avx2{
    "avx2",   false,  tiles,         depthwise,      depthwise_weights, statistics, requantize,
    pack,     unpack, backward_sums, backward_error, quantize_error,    to_error,
    add_codes, pass_error, decay, push_momentum, move_rounded, move_paper};

}  // namespace fedmpq

#endif
