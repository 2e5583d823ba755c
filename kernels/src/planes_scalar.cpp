#include "planes.h"

namespace fedmpq {
namespace {

// Eight bytes as an 8x8 bit matrix, transposed: bit j of byte i goes to bit i of byte j. It is its own inverse.
uint64_t transpose8x8(uint64_t x) {
  uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull;
  x ^= t ^ (t << 7);
  t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull;
  x ^= t ^ (t << 14);
  t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull;
  return x ^ t ^ (t << 28);
}

uint64_t load_bytes(const uint8_t* bytes, int n) {
  uint64_t x = 0;
  for (int i = 0; i < n; ++i) x |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return x;
}

void store_bytes(uint64_t x, uint8_t* bytes, int n) {
  for (int i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(x >> (8 * i));
}

template <int bits>
void pack_group(uint64_t group, uint8_t* planes, int64_t plane_bytes) {
  const uint64_t rows = transpose8x8(group);
  for (int i = 0; i < bits; ++i) planes[i * plane_bytes] = static_cast<uint8_t>(rows >> (8 * i));
}

template <int bits>
uint64_t unpack_group(const uint8_t* planes, int64_t plane_bytes) {
  uint64_t rows = 0;
  for (int i = 0; i < bits; ++i) rows |= static_cast<uint64_t>(planes[i * plane_bytes]) << (8 * i);
  return transpose8x8(rows);
}

template <int bits>
uint8_t pack(const uint8_t* codes, int64_t m, uint8_t* planes, int64_t plane_bytes) {
  uint64_t seen = 0;
  for (int64_t g = 0; g < m / 8; ++g) {
    const uint64_t group = load_bytes(codes + 8 * g, 8);
    seen |= group;
    pack_group<bits>(group, planes + g, plane_bytes);
  }
  if (m % 8 != 0) {
    const uint64_t group = load_bytes(codes + m - m % 8, static_cast<int>(m % 8));
    seen |= group;
    pack_group<bits>(group, planes + m / 8, plane_bytes);
  }
  return or_of_bytes(seen);
}

template <int bits>
void unpack(const uint8_t* planes, int64_t plane_bytes, int64_t m, uint8_t* codes) {
  for (int64_t g = 0; g < m / 8; ++g) store_bytes(unpack_group<bits>(planes + g, plane_bytes), codes + 8 * g, 8);
  if (m % 8 != 0)
    store_bytes(unpack_group<bits>(planes + m / 8, plane_bytes), codes + m - m % 8, static_cast<int>(m % 8));
}

int64_t popcount(const uint8_t* bytes, int64_t n) {
  int64_t count = 0;
  for (int64_t j = 0; j < n / 8; ++j) count += __builtin_popcountll(load_bytes(bytes + 8 * j, 8));
  return count + __builtin_popcountll(load_bytes(bytes + n - n % 8, static_cast<int>(n % 8)));
}

}  // namespace

const PlaneKernels planes_scalar = FEDMPQ_PLANE_KERNELS;

}  // namespace fedmpq
