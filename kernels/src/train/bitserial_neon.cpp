// A register holds a word of two outputs; ones are counted byte by byte and added as bytes while they surely fit.
#include "bitserial.h"

#ifdef FEDMPQ_NEON

#include <arm_neon.h>

namespace fedmpq {
namespace {

constexpr int pairs = 4;        // of outputs at a time
constexpr int bytes_hold = 31;  // counts of up to eight that add up within a byte

inline uint8x16_t spread(const uint8_t* from) {
  uint64_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return vreinterpretq_u8_u64(vdupq_n_u64(word));
}

// Counts of one plane of the weights with the four of the codes, for 2 * pairs outputs.
struct Counts {
  uint8x16_t bytes[pairs][code_planes];
  uint32x4_t total[pairs];  // two numbers an output

  void clear() {
    for (auto& pair : bytes)
      for (auto& plane : pair) plane = vdupq_n_u8(0);
  }

  void add(const uint8_t* a, ptrdiff_t plane, const uint64_t* w) {
    uint8x16_t codes[code_planes];
    for (int j = 0; j < code_planes; ++j) codes[j] = spread(a + j * plane);
#pragma GCC unroll 4
    for (int p = 0; p < pairs; ++p) {
      const uint8x16_t weights = vreinterpretq_u8_u64(vld1q_u64(w + 2 * p));
#pragma GCC unroll 4
      for (int j = 0; j < code_planes; ++j)
        bytes[p][j] = vaddq_u8(bytes[p][j], vcntq_u8(vandq_u8(codes[j], weights)));
    }
  }

  void flush() {
    for (int p = 0; p < pairs; ++p) {
      uint16x8_t weighed = vpaddlq_u8(bytes[p][code_planes - 1]);
      for (int j = code_planes - 2; j >= 0; --j) weighed = vpadalq_u8(vshlq_n_u16(weighed, 1), bytes[p][j]);
      total[p] = vpadalq_u16(total[p], weighed);
    }
    clear();
  }
};

// Outputs `first` and the seven after it.
void eight(const BitTile& t, const uint8_t* a, int first, int32_t sum, int32_t* out) {
  Counts counts;
  for (auto& pair : counts.total) pair = vdupq_n_u32(0);
  const int64_t plane = int64_t{t.segments} * t.words * 16;
  for (int i = t.bits - 1; i >= 0; --i) {
    for (auto& pair : counts.total) pair = vshlq_n_u32(pair, 1);
    counts.clear();
    const uint64_t* w = t.w + i * plane + first;
    int held = 0;
    for (int s = 0; s < t.segments; ++s)
      for (int k = 0; k < t.words; ++k, w += 16) {
        counts.add(a + t.segment[s] + 8 * k, t.plane, w);
        if (++held < bytes_hold) continue;
        counts.flush();
        held = 0;
      }
    counts.flush();
  }
  const int32x4_t offset = vdupq_n_s32(((1 << t.bits) - 1) * sum);
  for (int h = 0; h < 2; ++h) {
    const uint32x4_t both = vpaddq_u32(counts.total[2 * h], counts.total[2 * h + 1]);
    const int32x4_t result = vsubq_s32(vreinterpretq_s32_u32(vshlq_n_u32(both, 1)), offset);
    vst1q_s32(out + 4 * h, t.add ? vaddq_s32(vld1q_s32(out + 4 * h), result) : result);
  }
}

void product(const BitTile& t, const int32_t* sums) {
  for (int r = 0; r < t.rows; ++r)
    for (int first = 0; first < 16; first += 2 * pairs)
      eight(t, t.a + r * t.stride, first, sums[r], t.out + r * t.out_stride + first);
}

void sum(const BitTile& t, int32_t* sums) {
  for (int r = 0; r < t.rows; ++r) {
    int32_t total = 0;
    for (int s = 0; s < t.segments; ++s)
      for (int k = 0; k < t.words; ++k) {
        const uint64_t mask = k + 1 == t.words ? t.last_mask : ~uint64_t{0};
        for (int j = 0; j < code_planes; ++j) {
          uint64_t word;
          __builtin_memcpy(&word, t.a + j * t.plane + r * t.stride + t.segment[s] + 8 * k, sizeof word);
          total += static_cast<int32_t>(vaddv_u8(vcnt_u8(vcreate_u8(word & mask)))) << j;
        }
      }
    sums[r] = total;
  }
}

}  // namespace

const BitSerial bit_serial_neon{sum, product};

}  // namespace fedmpq

#endif
