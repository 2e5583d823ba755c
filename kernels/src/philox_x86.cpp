// Philox on 64-bit lanes, one block a lane, each word in its lane's low half. The widening multiply reads only low
// halves and yields both halves of the product in place, so words never move between lanes until they are written; what
// gathers in the high halves is never read. GCC's own vectorisation of the scalar twin moves them every round and takes
// two to three times as long.
#include "philox.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

#define FEDMPQ_AVX2 __attribute__((target("avx2")))
#define FEDMPQ_AVX512 __attribute__((target("avx512f")))

namespace fedmpq {
namespace {

FEDMPQ_AVX2 inline void write(__m256i words, uint32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), words);
}

FEDMPQ_AVX2 inline void write(__m256i words, float* out) {
  const __m256 top = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8));
  _mm256_storeu_ps(out, _mm256_mul_ps(top, _mm256_set1_ps(0x1p-24f)));
}

FEDMPQ_AVX512 inline void write(__m512i words, uint32_t* out) { _mm512_storeu_si512(out, words); }

FEDMPQ_AVX512 inline void write(__m512i words, float* out) {
  const __m512 top = _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 8));
  _mm512_storeu_ps(out, _mm512_mul_ps(top, _mm512_set1_ps(0x1p-24f)));
}

template <class Number>
FEDMPQ_AVX2 void draw_avx2(const PhiloxStream& stream, uint32_t first, int64_t n, Number* out) {
  const __m256i m0 = _mm256_set1_epi64x(philox_m0), m1 = _mm256_set1_epi64x(philox_m1);
  const __m256i c1 = _mm256_set1_epi64x(stream.c1), c2 = _mm256_set1_epi64x(stream.c2);
  const __m256i c3 = _mm256_set1_epi64x(stream.c3);
  // In this order the 64-bit unpacks below leave blocks 0, 1 and blocks 2, 3 together.
  __m256i block = _mm256_add_epi32(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 2, 1, 3));
  __m256i k0[philox_rounds], k1[philox_rounds];
  for (uint32_t r = 0; r < philox_rounds; ++r) {
    k0[r] = _mm256_set1_epi64x(stream.k0 + r * philox_w0);
    k1[r] = _mm256_set1_epi64x(stream.k1 + r * philox_w1);
  }
  const int64_t whole = n - n % 16;
  for (int64_t done = 0; done < whole; done += 16) {
    __m256i x0 = block, x1 = c1, x2 = c2, x3 = c3;
#pragma GCC unroll 10
    for (int r = 0; r < philox_rounds; ++r) {
      const __m256i p0 = _mm256_mul_epu32(x0, m0), p1 = _mm256_mul_epu32(x2, m1);
      x0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(x1, k0[r]));
      x2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(x3, k1[r]));
      x1 = p1;
      x3 = p0;
    }
    const __m256i x01 = _mm256_blend_epi32(x0, _mm256_slli_epi64(x1, 32), 0xAA);
    const __m256i x23 = _mm256_blend_epi32(x2, _mm256_slli_epi64(x3, 32), 0xAA);
    write(_mm256_unpacklo_epi64(x01, x23), out + done);
    write(_mm256_unpackhi_epi64(x01, x23), out + done + 8);
    block = _mm256_add_epi32(block, _mm256_set1_epi64x(4));
  }
  philox_scalar(stream, first + static_cast<uint32_t>(whole / 4), n - whole, out + whole);
}

// What the first three rounds of every block of a stream have in common: their counters differ in the first word alone, which
// reaches the second half of a block in one round, and the first half in two.
struct Start {
  __m512i x2, x0, x3, last;  // what words of rounds 1, 2, 2 and 3 are combined with

  FEDMPQ_AVX512 explicit Start(const PhiloxStream& s) {
    const uint64_t p1 = uint64_t{philox_m1} * s.c2;
    const uint32_t first = static_cast<uint32_t>(p1 >> 32) ^ s.c1 ^ s.k0;
    const uint64_t p0 = uint64_t{philox_m0} * first;
    x2 = _mm512_set1_epi64(s.c3 ^ s.k1);
    x0 = _mm512_set1_epi64(static_cast<uint32_t>(p1) ^ (s.k0 + philox_w0));
    x3 = _mm512_set1_epi64(static_cast<uint32_t>(p0 >> 32) ^ (s.k1 + philox_w1));
    last = _mm512_set1_epi64(static_cast<uint32_t>(p0) ^ (s.k1 + 2 * philox_w1));
  }
};

// Eights of blocks side by side: one alone would wait for its products half of the time.
constexpr int eights = 4;

template <class Number>
FEDMPQ_AVX512 void draw_avx512(const PhiloxStream& stream, uint32_t first, int64_t n, Number* out) {
  const __m512i m0 = _mm512_set1_epi64(philox_m0), m1 = _mm512_set1_epi64(philox_m1);
  const Start start(stream);
  // In this order the 64-bit unpacks below leave four neighbouring blocks together.
  __m512i block = _mm512_add_epi32(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  __m512i k0[philox_rounds], k1[philox_rounds];
  for (uint32_t r = 0; r < philox_rounds; ++r) {
    k0[r] = _mm512_set1_epi64(stream.k0 + r * philox_w0);
    k1[r] = _mm512_set1_epi64(stream.k1 + r * philox_w1);
  }
  constexpr int64_t wide = 32 * eights;
  const int64_t whole = n - n % wide;
  for (int64_t done = 0; done < whole; done += wide) {
    __m512i x0[eights], x1[eights], x2[eights], x3[eights];
#pragma GCC unroll 4
    for (int e = 0; e < eights; ++e) {
      const __m512i p = _mm512_mul_epu32(block, m0);
      block = _mm512_add_epi32(block, _mm512_set1_epi64(8));
      const __m512i q = _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(p, 32), start.x2), m1);
      const __m512i p0 = _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(q, 32), start.x0), m0);
      const __m512i p1 = _mm512_mul_epu32(_mm512_xor_si512(p, start.x3), m1);
      x0[e] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), _mm512_xor_si512(q, k0[2]));
      x2[e] = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), start.last);
      x1[e] = p1;
      x3[e] = p0;
    }
#pragma GCC unroll 10
    for (int r = 3; r < philox_rounds; ++r) {
#pragma GCC unroll 4
      for (int e = 0; e < eights; ++e) {
        const __m512i p0 = _mm512_mul_epu32(x0[e], m0), p1 = _mm512_mul_epu32(x2[e], m1);
        x0[e] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), _mm512_xor_si512(x1[e], k0[r]));
        x2[e] = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), _mm512_xor_si512(x3[e], k1[r]));
        x1[e] = p1;
        x3[e] = p0;
      }
    }
#pragma GCC unroll 4
    for (int e = 0; e < eights; ++e) {
      const __m512i x01 = _mm512_mask_mov_epi32(x0[e], 0xAAAA, _mm512_slli_epi64(x1[e], 32));
      const __m512i x23 = _mm512_mask_mov_epi32(x2[e], 0xAAAA, _mm512_slli_epi64(x3[e], 32));
      write(_mm512_unpacklo_epi64(x01, x23), out + done + 32 * e);
      write(_mm512_unpackhi_epi64(x01, x23), out + done + 32 * e + 16);
    }
  }
  philox_scalar(stream, first + static_cast<uint32_t>(whole / 4), n - whole, out + whole);
}

}  // namespace

FEDMPQ_AVX2 void philox_avx2(const PhiloxStream& stream, uint32_t first, int64_t n, float* out) {
  draw_avx2(stream, first, n, out);
}

FEDMPQ_AVX2 void philox_avx2(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out) {
  draw_avx2(stream, first, n, out);
}

FEDMPQ_AVX512 void philox_avx512(const PhiloxStream& stream, uint32_t first, int64_t n, float* out) {
  draw_avx512(stream, first, n, out);
}

FEDMPQ_AVX512 void philox_avx512(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out) {
  draw_avx512(stream, first, n, out);
}

}  // namespace fedmpq

#endif
