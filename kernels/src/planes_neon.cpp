#include "planes.h"

#ifdef FEDMPQ_NEON

#include <arm_neon.h>

namespace fedmpq {
namespace {

constexpr int64_t block = 64;  // codes in four registers, eight bytes of a plane

uint8x16_t bit_of_lane() { return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull)); }

// Bit 0 of each of 64 codes -> 8 bytes of a plane: every lane keeps its own bit of the byte, and three pairwise sums
// bring the eight lanes of a byte together.
uint8x8_t gather_bits(const uint8x16_t group[4], uint8x16_t bit) {
  uint8x16_t own[4];
  for (int r = 0; r < 4; ++r) own[r] = vandq_u8(vtstq_u8(group[r], bit), bit_of_lane());
  const uint8x16_t quarter = vpaddq_u8(vpaddq_u8(own[0], own[1]), vpaddq_u8(own[2], own[3]));
  return vget_low_u8(vpaddq_u8(quarter, quarter));
}

uint8_t fold_or(uint8x16_t x) {
  uint64_t all = vgetq_lane_u64(vreinterpretq_u64_u8(x), 0) | vgetq_lane_u64(vreinterpretq_u64_u8(x), 1);
  return or_of_bytes(all);
}

template <int bits>
uint8_t pack(const uint8_t* codes, int64_t m, uint8_t* planes, int64_t plane_bytes) {
  const int64_t whole = m - m % block;
  uint8x16_t seen = vdupq_n_u8(0);
  for (int64_t j = 0; j < whole; j += block) {
    uint8x16_t group[4];
    for (int r = 0; r < 4; ++r) {
      group[r] = vld1q_u8(codes + j + 16 * r);
      seen = vorrq_u8(seen, group[r]);
    }
    for (int i = 0; i < bits; ++i)
      vst1_u8(planes + i * plane_bytes + j / 8, gather_bits(group, vdupq_n_u8(static_cast<uint8_t>(1u << i))));
  }
  const uint8_t rest = planes_scalar.pack[bits - 1](codes + whole, m - whole, planes + whole / 8, plane_bytes);
  return static_cast<uint8_t>(fold_or(seen) | rest);
}

template <int bits>
void unpack(const uint8_t* planes, int64_t plane_bytes, int64_t m, uint8_t* codes) {
  const int64_t whole = m - m % block;
  const uint8x16_t first_pair = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
  for (int64_t j = 0; j < whole; j += block) {
    uint8x16_t group[4] = {vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0)};
    for (int i = bits - 1; i >= 0; --i) {
      const uint8x8_t eight = vld1_u8(planes + i * plane_bytes + j / 8);
      const uint8x16_t bytes = vcombine_u8(eight, eight);
      for (int r = 0; r < 4; ++r) {
        const uint8x16_t pair = vqtbl1q_u8(bytes, vaddq_u8(first_pair, vdupq_n_u8(static_cast<uint8_t>(2 * r))));
        // 2*group + bit, as the test gives -1 for a set bit.
        group[r] = vsubq_u8(vaddq_u8(group[r], group[r]), vtstq_u8(pair, bit_of_lane()));
      }
    }
    for (int r = 0; r < 4; ++r) vst1q_u8(codes + j + 16 * r, group[r]);
  }
  planes_scalar.unpack[bits - 1](planes + whole / 8, plane_bytes, m - whole, codes + whole);
}

int64_t popcount(const uint8_t* bytes, int64_t n) {
  const int64_t whole = n - n % 16;
  uint64x2_t sums = vdupq_n_u64(0);
  for (int64_t j = 0; j < whole; j += 16)
    sums = vpadalq_u32(sums, vpaddlq_u16(vpaddlq_u8(vcntq_u8(vld1q_u8(bytes + j)))));
  return static_cast<int64_t>(vaddvq_u64(sums)) + planes_scalar.popcount(bytes + whole, n - whole);
}

}  // namespace

const PlaneKernels planes_neon = FEDMPQ_PLANE_KERNELS;

}  // namespace fedmpq

#endif
