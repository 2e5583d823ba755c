// AVX2: bytes multiplied in pairs, sums of pairs added as 16-bit numbers while they surely fit; where not even one does,
// everything is widened first.
#include "ops.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

namespace fedmpq {
namespace {

constexpr int width = 8, product_lanes = 16, small_lanes = 16, byte_registers = 1;

#include "vectors.inc"
#include "vectors_avx2.inc"
#include "passes.inc"
#include "update.inc"

inline __m256i load_ints(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_ints(__m256i value, int32_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
// What is at `at` of the start, if there is one, and `value`.
inline __m256i plus(const int32_t* start, ptrdiff_t at, __m256i value) {
  return start == nullptr ? value : _mm256_add_epi32(load_ints(start + at), value);
}
inline __m256i load_weights(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

#include "four_rows_avx2.inc"

inline __m256i times(__m256i codes, const int8_t* w) { return _mm256_maddubs_epi16(codes, load_weights(w)); }

// Additions in this order: in another one the compiler would have more numbers under way than there are registers.
inline void add_now(__m256i& sums, __m256i products) {
  sums = _mm256_add_epi16(sums, products);
  __asm__("" : "+x"(sums));
}

// Rows x 16 sums of 16 bits each are half of the registers; the 32-bit ones are few enough accesses to live in memory.
template <int Rows>
struct Narrow16 {
  __m256i part[Rows][2];

  void clear() {
#pragma GCC unroll 4
    for (auto& row : part) row[0] = row[1] = _mm256_setzero_si256();
  }

  template <int Quad, int Row = 0>
  [[gnu::always_inline]] void multiply(const FourRows& a, __m256i w0, __m256i w1) {
    if constexpr (Row < Rows) {
      const __m256i codes = spread<Row, Quad>(a);
      add_now(part[Row][0], _mm256_maddubs_epi16(codes, w0));
      add_now(part[Row][1], _mm256_maddubs_epi16(codes, w1));
      multiply<Quad, Row + 1>(a, w0, w1);
    }
  }

  template <int Quads, int Quad = 0>
  [[gnu::always_inline]] void multiply(const FourRows& a, const int8_t* w) {
    if constexpr (Quad < Quads) {
      multiply<Quad>(a, load_weights(w + 64 * Quad), load_weights(w + 64 * Quad + 32));
      multiply<Quads, Quad + 1>(a, w);
    }
  }

  void multiply(FourRows a, const int8_t* w, int quads) {
    int q = 0;
    for (; q + 4 <= quads; q += 4, a.first += 16, w += 256) multiply<4>(a, w);
    for (; q < quads; ++q, a.first += 4, w += 64) multiply<1>(a, w);
  }

  void flush(const int32_t* start, ptrdiff_t start_stride, int32_t* out, ptrdiff_t out_stride) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
      for (int h = 0; h < 2; ++h) {
        const __m256i total = _mm256_madd_epi16(part[r][h], ones);
        store_ints(plus(start, r * start_stride + 8 * h, total), out + r * out_stride + 8 * h);
      }
    clear();
  }
};

template <int Rows>
FEDMPQ_OWN_REGISTERS void narrow(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  Narrow16<Rows> sums;
  sums.clear();
  const ptrdiff_t stride = t.stride, out_stride = t.out_stride;
  const int quads = t.quads, fit = t.fit;
  int room = fit;
  ptrdiff_t start_stride = t.start_stride;
  for (const int32_t *segment = t.segment, *end = segment + t.segments; segment != end; ++segment)
    for (int q = 0; q < quads;) {
      const int count = quads - q < room ? quads - q : room;
      sums.multiply({a + *segment + 4 * q, stride, 3 * stride}, w, count);
      w += 64 * count;
      q += count;
      room -= count;
      if (room > 0) continue;
      sums.flush(start, start_stride, out, out_stride);
      start = out, start_stride = out_stride;
      room = fit;
    }
  sums.flush(start, start_stride, out, out_stride);
}

// Rows x 16 sums of 32 bits each, to which `Group` quads at a time, added as 16-bit numbers, are added.
template <int Rows>
struct Grouped {
  __m256i sums[Rows][2];

  template <int Group, int Row, int Quad = 0>
  [[gnu::always_inline]] static void products(const FourRows& a, const int8_t* w, __m256i& low, __m256i& high) {
    if constexpr (Quad < Group) {
      const __m256i codes = spread<Row, Quad>(a);
      if constexpr (Quad == 0) {
        low = times(codes, w);
        high = times(codes, w + 32);
      } else {
        add_now(low, times(codes, w + 64 * Quad));
        add_now(high, times(codes, w + 64 * Quad + 32));
      }
      products<Group, Row, Quad + 1>(a, w, low, high);
    }
  }

  template <int Group, int Row = 0>
  [[gnu::always_inline]] void multiply(const FourRows& a, const int8_t* w, __m256i ones) {
    if constexpr (Row < Rows) {
      __m256i low, high;
      products<Group, Row>(a, w, low, high);
      sums[Row][0] = _mm256_add_epi32(sums[Row][0], _mm256_madd_epi16(low, ones));
      sums[Row][1] = _mm256_add_epi32(sums[Row][1], _mm256_madd_epi16(high, ones));
      multiply<Group, Row + 1>(a, w, ones);
    }
  }
};

template <int Rows, int Group>
FEDMPQ_OWN_REGISTERS void grouped(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  Grouped<Rows> grouped;
#pragma GCC unroll 4
  for (auto& row : grouped.sums) row[0] = row[1] = _mm256_setzero_si256();
  const ptrdiff_t stride = t.stride;
  const int quads = t.quads;
  const __m256i ones = _mm256_set1_epi16(1);
  for (const int32_t *segment = t.segment, *end = segment + t.segments; segment != end; ++segment) {
    FourRows rows{a + *segment, stride, 3 * stride};
    int q = 0;
    for (; q + Group <= quads; q += Group, rows.first += 4 * Group, w += 64 * Group)
      grouped.template multiply<Group>(rows, w, ones);
    for (; q < quads && Group > 1; ++q, rows.first += 4, w += 64) grouped.template multiply<1>(rows, w, ones);
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
    for (int h = 0; h < 2; ++h)
      store_ints(plus(start, r * t.start_stride + 8 * h, grouped.sums[r][h]), out + r * t.out_stride + 8 * h);
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
inline void wide(const Tile& t, const int16_t (&codes)[Rows][4 * chunk + 16], int quads, const int8_t* w,
                 const int32_t* start, ptrdiff_t start_stride, int32_t* out) {
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
    const __m256i total = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[r][0], sums[r][1]), 0xD8);
    store_ints(plus(start, r * start_stride, total), out + r * t.out_stride);
  }
}

template <int Rows>
inline void all_wide(const Tile& t, const uint8_t* a, const int32_t* start, int32_t* out) {
  Widened<Rows> widened;
  const int8_t* w = t.w;
  ptrdiff_t start_stride = t.start_stride;
  while (const int quads = widened.next(t, a)) {
    for (int b = 0; b < t.blocks; ++b)
      for (int half = 0; half < 2; ++half) {
        const int at = b * lanes + 8 * half;
        wide<Rows>(t, widened.codes, quads, w + b * t.block + 32 * half, start == nullptr ? nullptr : start + at,
                   start_stride, out + at);
      }
    w += 64 * quads;
    start = out, start_stride = t.out_stride;
  }
}

// One block of outputs, in the way that suits how many products fit in 16 bits: writing sums of few back to memory would
// take longer than to add them up in registers.
template <int Rows>
inline void one_block(const Tile& t, const uint8_t* a, const int8_t* w, const int32_t* start, int32_t* out) {
  if (t.fit >= 16) return narrow<Rows>(t, a, w, start, out);
  if (t.fit >= 4) return grouped<Rows, 4>(t, a, w, start, out);
  if (t.fit >= 2) return grouped<Rows, 2>(t, a, w, start, out);
  grouped<Rows, 1>(t, a, w, start, out);
}

template <int Rows>
inline void tile(const Tile& t, int row) {
  const uint8_t* a = t.a + row * t.stride;
  int32_t* out = t.out + row * t.out_stride;
  if (t.fit < 1) return all_wide<Rows>(t, a, t.start_of(row, 0), out);
  for (int b = 0; b < t.blocks; ++b) one_block<Rows>(t, a, t.w + b * t.block, t.start_of(row, b), out + b * lanes);
}

constexpr int unrolled = 4;

#include "tile_rows.inc"

#include "pair_tile.inc"

}  // namespace

const Ops ops_avx2{
    "avx2", false, tiles, pair_tiles<tiles>, 0,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq

#endif
