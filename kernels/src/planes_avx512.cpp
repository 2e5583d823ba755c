#include "planes.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

#include <cstring>

#define FEDMPQ_AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vpopcntdq,gfni")))

namespace fedmpq {
namespace {

constexpr int64_t block = 64;  // codes in one register

// Byte 8 j + i comes from 8 i + j.
struct ByteOrder {
  uint8_t bytes[block] = {};
  constexpr ByteOrder() {
    for (int i = 0; i < block; ++i) bytes[i] = static_cast<uint8_t>(i % 8 * 8 + i / 8);
  }
};

FEDMPQ_AVX512 __m512i bit_of_code(int i) { return _mm512_set1_epi8(static_cast<char>(1u << i)); }

template <int bits>
FEDMPQ_AVX512 uint8_t pack(const uint8_t* codes, int64_t m, uint8_t* planes, int64_t plane_bytes) {
  const int64_t whole = m - m % block;
  __m512i seen = _mm512_setzero_si512();
  for (int64_t j = 0; j < whole; j += block) {
    const __m512i group = _mm512_loadu_si512(codes + j);
    seen = _mm512_or_si512(seen, group);
    for (int i = 0; i < bits; ++i) {
      const uint64_t mask = _mm512_test_epi8_mask(group, bit_of_code(i));
      std::memcpy(planes + i * plane_bytes + j / 8, &mask, sizeof mask);
    }
  }
  const uint8_t all = or_of_bytes(static_cast<uint64_t>(_mm512_reduce_or_epi64(seen)));
  const uint8_t rest = planes_scalar.pack[bits - 1](codes + whole, m - whole, planes + whole / 8, plane_bytes);
  return static_cast<uint8_t>(all | rest);
}

// 64 codes of planes that lie plane_bytes apart. Bytes of the planes that belong to the same eight codes are brought together,
// the highest bits first; such an 8 x 8 matrix of bits times the unit vectors is its transpose.
template <int bits>
FEDMPQ_AVX512 __m512i transposed(const uint8_t* planes, int64_t plane_bytes) {
  const auto plane = [&](int i) {
    int64_t row = 0;
    if (i < bits) std::memcpy(&row, planes + i * plane_bytes, sizeof row);
    return row;
  };
  alignas(64) static constexpr ByteOrder order;
  const __m512i rows = _mm512_setr_epi64(plane(7), plane(6), plane(5), plane(4), plane(3), plane(2), plane(1), plane(0));
  const __m512i units = _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201u));
  return _mm512_gf2p8affine_epi64_epi8(units, _mm512_permutexvar_epi8(_mm512_load_si512(order.bytes), rows), 0);
}

template <int bits>
FEDMPQ_AVX512 void unpack(const uint8_t* planes, int64_t plane_bytes, int64_t m, uint8_t* codes) {
  const int64_t whole = m - m % block;
  for (int64_t j = 0; j < whole; j += block) _mm512_storeu_si512(codes + j, transposed<bits>(planes + j / 8, plane_bytes));
  planes_scalar.unpack[bits - 1](planes + whole / 8, plane_bytes, m - whole, codes + whole);
}

FEDMPQ_AVX512 int64_t popcount(const uint8_t* bytes, int64_t n) {
  const int64_t whole = n - n % 64;
  __m512i sums = _mm512_setzero_si512();
  for (int64_t j = 0; j < whole; j += 64)
    sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(_mm512_loadu_si512(bytes + j)));
  return _mm512_reduce_add_epi64(sums) + planes_scalar.popcount(bytes + whole, n - whole);
}

}  // namespace

const PlaneKernels planes_avx512 = FEDMPQ_PLANE_KERNELS;

}  // namespace fedmpq

#endif
