// Bytes turned from one order into another, in vectors of 16 that every machine has.
#pragma once

#include <cstdint>
#include <cstring>

namespace fedmpq {
namespace shuffle {

typedef uint8_t V16 __attribute__((vector_size(16)));
typedef uint16_t W8 __attribute__((vector_size(16)));
typedef int16_t S8 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

// GCC knows this only from version 12 on.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FEDMPQ_SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef FEDMPQ_SHUFFLE
#define FEDMPQ_SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif

inline V16 low(V16 a, V16 b) {
  return FEDMPQ_SHUFFLE(V16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

inline V16 high(V16 a, V16 b) {
  return FEDMPQ_SHUFFLE(V16, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

inline V16 load(const uint8_t* from) {
  V16 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(W8 value, uint8_t* to) { std::memcpy(to, &value, sizeof value); }

// `rows` (1..16) rows of 16 bytes become 16 rows of `rows` bytes. Zipping row i with row i + 8, four times over, is a
// transposition.
inline void transpose(const uint8_t* from, int64_t from_stride, int rows, uint8_t* to, int64_t to_stride) {
  V16 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = i < rows ? load(from + i * from_stride) : V16{};
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 8; ++i) b[2 * i] = low(a[i], a[i + 8]), b[2 * i + 1] = high(a[i], a[i + 8]);
    for (int i = 0; i < 8; ++i) a[2 * i] = low(b[i], b[i + 8]), a[2 * i + 1] = high(b[i], b[i + 8]);
  }
  if (rows == 16)
    for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &a[i], 16);
  else if (rows == 8)
    for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &a[i], 8);
  else
    for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &a[i], static_cast<size_t>(rows));
}

// Four rows of 16 bytes side by side: out[4 l + i] = row i, byte l.
inline void interleave(const uint8_t* from, int64_t stride, uint8_t* to) {
  const V16 r0 = load(from), r1 = load(from + stride), r2 = load(from + 2 * stride), r3 = load(from + 3 * stride);
  const W8 a = reinterpret_cast<W8>(low(r0, r1)), b = reinterpret_cast<W8>(high(r0, r1));
  const W8 c = reinterpret_cast<W8>(low(r2, r3)), d = reinterpret_cast<W8>(high(r2, r3));
  store(FEDMPQ_SHUFFLE(W8, a, c, 0, 8, 1, 9, 2, 10, 3, 11), to);
  store(FEDMPQ_SHUFFLE(W8, a, c, 4, 12, 5, 13, 6, 14, 7, 15), to + 16);
  store(FEDMPQ_SHUFFLE(W8, b, d, 0, 8, 1, 9, 2, 10, 3, 11), to + 32);
  store(FEDMPQ_SHUFFLE(W8, b, d, 4, 12, 5, 13, 6, 14, 7, 15), to + 48);
}

typedef float F4 __attribute__((vector_size(16)));

inline F4 low(F4 a, F4 b) { return FEDMPQ_SHUFFLE(I4, a, b, 0, 4, 1, 5); }
inline F4 high(F4 a, F4 b) { return FEDMPQ_SHUFFLE(I4, a, b, 2, 6, 3, 7); }

// Four rows of four numbers become four columns, `stride` numbers apart.
inline void transpose(const F4 (&rows)[4], float* to, int64_t stride) {
  const F4 a = low(rows[0], rows[2]), b = low(rows[1], rows[3]), c = high(rows[0], rows[2]), d = high(rows[1], rows[3]);
  const F4 columns[4] = {low(a, b), high(a, b), low(c, d), high(c, d)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * stride, &columns[i], sizeof(F4));
}

}  // namespace shuffle
}  // namespace fedmpq
