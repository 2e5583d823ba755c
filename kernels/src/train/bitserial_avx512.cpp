// One instruction counts the ones of eight words: those of eight outputs.
#include "bitserial.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

#define FEDMPQ_AVX512 __attribute__((target("avx512f,avx512vpopcntdq,popcnt")))

namespace fedmpq {
namespace {

FEDMPQ_AVX512 inline __m512i spread(const uint8_t* from) {
  int64_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return _mm512_set1_epi64(word);
}

FEDMPQ_AVX512 void row(const BitTile& t, const uint8_t* a, int32_t sum, int32_t* out) {
  __m512i total[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const uint64_t* w = t.w;
  for (int i = 0; i < t.bits; ++i) {
    __m512i counts[code_planes][2];
    for (auto& plane : counts) plane[0] = plane[1] = _mm512_setzero_si512();
    for (int s = 0; s < t.segments; ++s)
      for (int k = 0; k < t.words; ++k, w += 16) {
        const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 8);
#pragma GCC unroll 4
        for (int j = 0; j < code_planes; ++j) {
          const __m512i bits = spread(a + j * t.plane + t.segment[s] + 8 * k);
          counts[j][0] = _mm512_add_epi64(counts[j][0], _mm512_popcnt_epi64(_mm512_and_si512(bits, w0)));
          counts[j][1] = _mm512_add_epi64(counts[j][1], _mm512_popcnt_epi64(_mm512_and_si512(bits, w1)));
        }
      }
    for (int h = 0; h < 2; ++h) {
      __m512i both = counts[code_planes - 1][h];
      for (int j = code_planes - 2; j >= 0; --j) both = _mm512_add_epi64(_mm512_slli_epi64(both, 1), counts[j][h]);
      total[h] = _mm512_add_epi64(total[h], _mm512_slli_epi64(both, static_cast<unsigned>(i + 1)));
    }
  }
  const __m256i offset = _mm256_set1_epi32(((1 << t.bits) - 1) * sum);
  for (int h = 0; h < 2; ++h) {
    auto* to = reinterpret_cast<__m256i*>(out + 8 * h);
    const __m256i result = _mm256_sub_epi32(_mm512_cvtepi64_epi32(total[h]), offset);
    _mm256_storeu_si256(to, t.add ? _mm256_add_epi32(_mm256_loadu_si256(to), result) : result);
  }
}

FEDMPQ_AVX512 void product(const BitTile& t, const int32_t* sums) {
  for (int r = 0; r < t.rows; ++r) row(t, t.a + r * t.stride, sums[r], t.out + r * t.out_stride);
}

FEDMPQ_AVX512 void sum(const BitTile& t, int32_t* sums) {
  for (int r = 0; r < t.rows; ++r) {
    int64_t total = 0;
    for (int s = 0; s < t.segments; ++s)
      for (int k = 0; k < t.words; ++k) {
        const uint64_t mask = k + 1 == t.words ? t.last_mask : ~uint64_t{0};
        for (int j = 0; j < code_planes; ++j) {
          uint64_t word;
          __builtin_memcpy(&word, t.a + j * t.plane + r * t.stride + t.segment[s] + 8 * k, sizeof word);
          total += static_cast<int64_t>(_mm_popcnt_u64(word & mask)) << j;
        }
      }
    sums[r] = static_cast<int32_t>(total);
  }
}

}  // namespace

const BitSerial bit_serial_avx512{sum, product};

}  // namespace fedmpq

#endif
