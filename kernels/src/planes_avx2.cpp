#include "planes.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

#include <cstring>

#define FEDMPQ_AVX2 __attribute__((target("avx2,popcnt")))

namespace fedmpq {
namespace {

constexpr int64_t block = 32;  // codes in one register

FEDMPQ_AVX2 uint8_t fold_or(__m256i x) {
  uint64_t words[4];
  std::memcpy(words, &x, sizeof words);
  return or_of_bytes(words[0] | words[1] | words[2] | words[3]);
}

template <int bits>
FEDMPQ_AVX2 uint8_t pack(const uint8_t* codes, int64_t m, uint8_t* planes, int64_t plane_bytes) {
  const int64_t whole = m - m % block;
  __m256i seen = _mm256_setzero_si256();
  for (int64_t j = 0; j < whole; j += block) {
    const __m256i group = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + j));
    seen = _mm256_or_si256(seen, group);
    // movemask reads each byte's top bit. The 16-bit shift spills into the neighbour's low bits only, which never
    // reach its top: at most 8-bits places are shifted here and bits-1 more by the doublings below.
    __m256i shifted = _mm256_slli_epi16(group, 8 - bits);
    for (int i = bits - 1; i >= 0; --i) {
      const int mask = _mm256_movemask_epi8(shifted);
      std::memcpy(planes + i * plane_bytes + j / 8, &mask, sizeof mask);
      shifted = _mm256_add_epi8(shifted, shifted);
    }
  }
  const uint8_t rest = planes_scalar.pack[bits - 1](codes + whole, m - whole, planes + whole / 8, plane_bytes);
  return static_cast<uint8_t>(fold_or(seen) | rest);
}

template <int bits>
FEDMPQ_AVX2 void unpack(const uint8_t* planes, int64_t plane_bytes, int64_t m, uint8_t* codes) {
  const int64_t whole = m - m % block;
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                          2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i own_bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  for (int64_t j = 0; j < whole; j += block) {
    __m256i group = _mm256_setzero_si256();
    for (int i = bits - 1; i >= 0; --i) {
      int mask;
      std::memcpy(&mask, planes + i * plane_bytes + j / 8, sizeof mask);
      const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(mask), spread);
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own_bit), own_bit);
      // 2*group + bit, as the comparison gives -1 for a set bit.
      group = _mm256_sub_epi8(_mm256_add_epi8(group, group), set);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + j), group);
  }
  planes_scalar.unpack[bits - 1](planes + whole / 8, plane_bytes, m - whole, codes + whole);
}

// Counts by table look-up of each half byte (Mula, Kurz, Lemire, "Faster population counts using AVX2 instructions").
FEDMPQ_AVX2 int64_t popcount(const uint8_t* bytes, int64_t n) {
  const int64_t whole = n - n % 32;
  const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  //
                                         0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i low_half = _mm256_set1_epi8(0x0F);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t j = 0; j < whole; j += 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + j));
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, low_half));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), low_half));
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256()));
  }
  int64_t words[4];
  std::memcpy(words, &sums, sizeof words);
  return words[0] + words[1] + words[2] + words[3] + planes_scalar.popcount(bytes + whole, n - whole);
}

}  // namespace

const PlaneKernels planes_avx2 = FEDMPQ_PLANE_KERNELS;

}  // namespace fedmpq

#endif
