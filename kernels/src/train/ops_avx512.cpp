// AVX-512 with VNNI: one instruction multiplies 64 pairs of bytes and adds them to 16 sums.
#include "ops.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

namespace fedmpq {
namespace {

constexpr int width = 16, product_lanes = 32, small_lanes = 32, byte_registers = 1;

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

// One permutation where widening and a shift would be two turns: number i goes to the upper half of lane i.
template <>
inline Words<16> load_upper<16>(const uint16_t* from) {
  const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  // Lane i of this has i in its upper half; the lower ones are zeroed.
  const __m512i order = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
  return same_bits<Words<16>>(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, order, halves));
}

// The upper half of lane i is number i.
template <>
inline void store_upper<16>(Words<16> bits, uint16_t* to) {
  const __m512i order = _mm512_castsi256_si512(_mm256_setr_epi16(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
  const __m512i halves = _mm512_permutexvar_epi16(order, same_bits<__m512i>(bits));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(halves));
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
inline void add_products<32>(Products<32> products, const int32_t* start, int32_t* to) {
  const __m512i both = same_bits<__m512i>(products);
  const auto low = same_bits<Ints<16>>(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(both)));
  const auto high = same_bits<Ints<16>>(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(both, 1)));
  store(start == nullptr ? low : load<16>(start) + low, to);
  store(start == nullptr ? high : load<16>(start + 16) + high, to + 16);
}

template <>
struct PairSums<32> {
  __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();

  struct Pair {
    __m512i low, high;
  };
  static Pair pair(Products<32> first, Products<32> second) {
    const __m512i a = same_bits<__m512i>(first), b = same_bits<__m512i>(second);
    return {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
  }
  void add(const Pair& a, const Pair& b) {
    low = _mm512_dpwssd_epi32(low, a.low, b.low);
    high = _mm512_dpwssd_epi32(high, a.high, b.high);
  }
  void store(int32_t* to) const {
    _mm512_storeu_si512(to, quarters(0));
    _mm512_storeu_si512(to + 16, quarters(4));
  }
  void add_to(int32_t* to) const {
    _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(to), quarters(0)));
    _mm512_storeu_si512(to + 16, _mm512_add_epi32(_mm512_loadu_si512(to + 16), quarters(4)));
  }

 private:
  // The first or second half of the sums: quarters of `low` and `high` by turns, two 64-bit numbers each.
  __m512i quarters(int64_t first) const {
    const __m512i order = _mm512_add_epi64(_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_set1_epi64(first));
    return _mm512_permutex2var_epi64(low, order, high);
  }
};

template <>
inline Floats<16> entries<16>(const float* table, const uint8_t* codes) {
  return same_bits<Floats<16>>(_mm512_i32gather_ps(same_bits<__m512i>(load_bytes<16>(codes)), table, 4));
}

template <int Entries>
struct FloatTable<16, Entries> {
  const float* table;

  explicit FloatTable(const float* entries) : table(entries) {}
  Floats<16> operator()(Ints<16> at) const {
    return same_bits<Floats<16>>(_mm512_i32gather_ps(same_bits<__m512i>(at), table, 4));
  }
};

template <>
struct FloatTable<16, 16> {
  __m512 table;

  explicit FloatTable(const float* entries) : table(_mm512_loadu_ps(entries)) {}
  Floats<16> operator()(Ints<16> at) const {
    return same_bits<Floats<16>>(_mm512_permutexvar_ps(same_bits<__m512i>(at), table));
  }
};

// The sixth bit of a place picks one of two pairs of registers.
template <>
struct FloatTable<16, 64> {
  __m512 part[4];

  explicit FloatTable(const float* entries) {
    for (int k = 0; k < 4; ++k) part[k] = _mm512_loadu_ps(entries + 16 * k);
  }
  Floats<16> operator()(Ints<16> at) const {
    const auto places = same_bits<__m512i>(at);
    const __m512 low = _mm512_permutex2var_ps(part[0], places, part[1]);
    const __m512 high = _mm512_permutex2var_ps(part[2], places, part[3]);
    const __mmask16 upper = _mm512_test_epi32_mask(places, _mm512_set1_epi32(32));
    return same_bits<Floats<16>>(_mm512_mask_blend_ps(upper, low, high));
  }
};

template <>
inline Ints<16> nearest<16>(Floats<16> value) {
  return same_bits<Ints<16>>(_mm512_cvtps_epi32(same_bits<__m512>(value)));
}

template <>
struct Squares<16> {
  __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();

  void add(Ints<16> value) {
    const __m512i own = same_bits<__m512i>(value), upper = _mm512_srli_epi64(own, 32);
    even = _mm512_add_epi64(even, _mm512_mul_epi32(own, own));
    odd = _mm512_add_epi64(odd, _mm512_mul_epi32(upper, upper));
  }
  void store(int64_t* to) const {
    int64_t each[2][8];
    __builtin_memcpy(each[0], &even, sizeof even);
    __builtin_memcpy(each[1], &odd, sizeof odd);
    for (int l = 0; l < 16; ++l) to[l] = each[l % 2][l / 2];
  }
};

#include "passes.inc"
#include "update.inc"

// The quad at `from`, 16 times. The addresses of a product's rows are few numbers added up in the instruction itself; from
// C++ the compiler makes so many of them that it runs out of registers.
template <int Offset>
inline __m512i spread(const uint8_t* from) {
  __m512i codes;
  __asm__("vpbroadcastd %c2(%1), %0" : "=v"(codes) : "r"(from), "i"(Offset));
  return codes;
}

template <int Offset, int Scale>
inline __m512i spread(const uint8_t* from, ptrdiff_t index) {
  __m512i codes;
  __asm__("vpbroadcastd %c3(%1,%2,%c4), %0" : "=v"(codes) : "r"(from), "r"(index), "i"(Offset), "i"(Scale));
  return codes;
}

// Four rows' addresses: the first, the bytes between two, and those between the first and the last.
struct FourRows {
  const uint8_t* first;
  ptrdiff_t stride, last;
};

template <int Row, int Quad>
inline __m512i spread(const FourRows& rows) {
  if constexpr (Row == 0) return spread<4 * Quad>(rows.first);
  if constexpr (Row == 3) return spread<4 * Quad, 1>(rows.first, rows.last);
  return spread<4 * Quad, Row>(rows.first, rows.stride);
}

template <int Row, int Quad, int Rows, int Blocks>
[[gnu::always_inline]] inline void multiply_rows(const FourRows (&a)[(Rows + 3) / 4], const __m512i (&weights)[Blocks],
                                                 __m512i (&sums)[Rows][Blocks]) {
  if constexpr (Row < Rows) {
    const __m512i codes = spread<Row % 4, Quad>(a[Row / 4]);
    for (int b = 0; b < Blocks; ++b) sums[Row][b] = _mm512_dpbusd_epi32(sums[Row][b], codes, weights[b]);
    multiply_rows<Row + 1, Quad>(a, weights, sums);
  }
}

// `Quads` neighbouring ones of each row.
template <int Quads, int Rows, int Blocks, int Quad = 0>
[[gnu::always_inline]] inline void multiply(const FourRows (&a)[(Rows + 3) / 4], const int8_t* w, ptrdiff_t block,
                                            __m512i (&sums)[Rows][Blocks]) {
  if constexpr (Quad < Quads) {
    __m512i weights[Blocks];
    for (int b = 0; b < Blocks; ++b) weights[b] = _mm512_loadu_si512(w + 64 * Quad + b * block);
    multiply_rows<0, Quad>(a, weights, sums);
    multiply<Quads, Rows, Blocks, Quad + 1>(a, w, block, sums);
  }
}

template <int Rows, int Blocks>
FEDMPQ_OWN_REGISTERS void product(const Tile& t, int row) {
  __m512i sums[Rows][Blocks];
  if (t.start == nullptr) {
#pragma GCC unroll 16
    for (auto& own : sums)
      for (auto& sum : own) sum = _mm512_setzero_si512();
  } else {
    const int32_t* start = t.start_of(row, 0);
#pragma GCC unroll 16
    for (auto& own : sums) {
      for (int b = 0; b < Blocks; ++b) own[b] = _mm512_loadu_si512(start + b * lanes);
      start += t.start_stride;
    }
  }
  const ptrdiff_t stride = t.stride, last = 3 * stride;
  const uint8_t* rows = t.a + row * stride;
  const int8_t* w = t.w;
  const unsigned fours = static_cast<unsigned>(t.quads) / 4, rest = static_cast<unsigned>(t.quads) % 4;
  for (const int32_t *segment = t.segment, *end = segment + t.segments; segment != end; ++segment) {
    FourRows a[(Rows + 3) / 4];
    for (int g = 0; 4 * g < Rows; ++g) a[g] = {rows + *segment + 4 * g * stride, stride, last};
    // Moving the pointers on takes turns from the products, so it is done once for four quads.
    for (unsigned left = fours; left > 0; --left, w += 256) {
      multiply<4>(a, w, t.block, sums);
      for (auto& four : a) four.first += 16;
    }
    for (unsigned left = rest; left > 0; --left, w += 64) {
      multiply<1>(a, w, t.block, sums);
      for (auto& four : a) four.first += 4;
    }
  }
  int32_t* out = t.out + row * t.out_stride;
#pragma GCC unroll 16
  for (const auto& own : sums) {
    for (int b = 0; b < Blocks; ++b) _mm512_storeu_si512(out + b * lanes, own[b]);
    out += t.out_stride;
  }
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

// Rows by turns of the four parts of a pair: row r is multiplied by the weights of part r % 4.
template <int Row, int Quad, int Rows>
[[gnu::always_inline]] inline void multiply_parts(const FourRows (&a)[Rows / 4], const __m512i (&weights)[4],
                                                  __m512i (&sums)[Rows]) {
  if constexpr (Row < Rows) {
    sums[Row] = _mm512_dpbusd_epi32(sums[Row], spread<Row % 4, Quad>(a[Row / 4]), weights[Row % 4]);
    multiply_parts<Row + 1, Quad>(a, weights, sums);
  }
}

template <int Rows, int Quad = 0>
[[gnu::always_inline]] inline void multiply_quads(const FourRows (&a)[Rows / 4], const int8_t* w, ptrdiff_t part,
                                                  __m512i (&sums)[Rows]) {
  if constexpr (Quad < 4) {
    __m512i weights[4];
    for (int k = 0; k < 4; ++k) weights[k] = _mm512_loadu_si512(w + 64 * Quad + k * part);
    multiply_parts<0, Quad>(a, weights, sums);
    multiply_quads<Rows, Quad + 1>(a, w, part, sums);
  }
}

// All four parts of a few pairs for 16 outputs, joined in their registers.
template <int Pairs>
FEDMPQ_OWN_REGISTERS void few_pairs(const PairTile& t, int first, int b) {
  constexpr int rows = 4 * Pairs;
  __m512i sums[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sums[r] = _mm512_loadu_si512(t.start + r % 4 * t.start_part + b * lanes);
  const ptrdiff_t depth = t.depth;
  const int8_t* w = t.w + b * t.block;
  for (int s = 0; s < t.segments; ++s) {
    FourRows a[Pairs];
    for (int p = 0; p < Pairs; ++p) a[p] = {t.a + 4 * (first + p) * depth + t.segment[s], depth, 3 * depth};
    for (int left = t.depth / 16; left > 0; --left, w += 256) {
      multiply_quads<rows>(a, w, t.part, sums);
      for (auto& four : a) four.first += 16;
    }
  }
  int32_t* out = t.out + 2 * first * t.stride + b * lanes;
#pragma GCC unroll 4
  for (int p = 0; p < Pairs; ++p, out += 2 * t.stride) {
    const __m512i plus = sums[4 * p + 1], minus = sums[4 * p + 2];
    const __m512i even = _mm512_srai_epi32(_mm512_add_epi32(plus, minus), 1);
    const __m512i odd = _mm512_srai_epi32(_mm512_sub_epi32(plus, minus), 1);
    _mm512_storeu_si512(out, _mm512_add_epi32(sums[4 * p], even));
    _mm512_storeu_si512(out + t.stride, _mm512_sub_epi32(odd, sums[4 * p + 3]));
  }
}

void pair_tiles(const PairTile& t) {
  for (int b = 0; b < t.blocks; ++b) {
    int first = 0;
    for (; first + 4 <= t.pairs; first += 4) few_pairs<4>(t, first, b);
    for (; first < t.pairs; ++first) few_pairs<1>(t, first, b);
  }
}

}  // namespace

const Ops ops_avx512{
    "avx512", false, tiles, pair_tiles, 16,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq

#endif
