#include "bitserial.h"

#include <atomic>
#include <cstring>

#include "fedmpq/training.h"

namespace fedmpq {
namespace {

constexpr int outputs = 16;
constexpr int bytes_hold = 31;  // counts of up to eight that add up within a byte

uint64_t word(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The number of ones of each byte, in that byte.
uint64_t byte_counts(uint64_t x) {
  x -= (x >> 1) & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + ((x >> 2) & 0x3333333333333333u);
  return (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
}

uint64_t sum_of_bytes(uint64_t x) {
  x = (x & 0x00FF00FF00FF00FFu) + ((x >> 8) & 0x00FF00FF00FF00FFu);
  x = (x & 0x0000FFFF0000FFFFu) + ((x >> 16) & 0x0000FFFF0000FFFFu);
  return (x & 0xFFFFFFFFu) + (x >> 32);
}

// The lowest bits of four bytes, side by side: the multiplication brings each to a place of its own.
uint32_t low_bits(uint32_t bytes) { return ((bytes & 0x01010101u) * 0x01020408u >> 24) & 15u; }

uint64_t mask_of(const BitTile& t, int k) { return k + 1 == t.words ? t.last_mask : ~uint64_t{0}; }

void sum(const BitTile& t, int32_t* sums) {
  for (int r = 0; r < t.rows; ++r) {
    uint64_t total = 0;
    for (int j = 0; j < code_planes; ++j)
      for (int s = 0; s < t.segments; ++s)
        for (int k = 0; k < t.words; ++k) {
          const uint64_t a = word(t.a + j * t.plane + r * t.stride + t.segment[s] + 8 * k);
          total += sum_of_bytes(byte_counts(a & mask_of(t, k))) << j;
        }
    sums[r] = static_cast<int32_t>(total);
  }
}

// total[o] += 2^shift * popcount(plane j of a row AND a plane of the weights)
void add_plane(const BitTile& t, const uint8_t* a, const uint64_t* w, int shift, uint64_t (&total)[outputs]) {
  uint64_t counts[outputs] = {};
  int held = 0;
  const auto flush = [&] {
    for (int o = 0; o < outputs; ++o) total[o] += sum_of_bytes(counts[o]) << shift;
    std::memset(counts, 0, sizeof counts);
    held = 0;
  };
  for (int s = 0; s < t.segments; ++s)
    for (int k = 0; k < t.words; ++k, w += outputs) {
      const uint64_t bits = word(a + t.segment[s] + 8 * k);
      for (int o = 0; o < outputs; ++o) counts[o] += byte_counts(bits & w[o]);
      if (++held == bytes_hold) flush();
    }
  flush();
}

void product(const BitTile& t, const int32_t* sums) {
  const int64_t plane = int64_t{t.segments} * t.words * outputs;
  for (int r = 0; r < t.rows; ++r) {
    uint64_t total[outputs] = {};
    for (int i = 0; i < t.bits; ++i)
      for (int j = 0; j < code_planes; ++j)
        add_plane(t, t.a + j * t.plane + r * t.stride, t.w + i * plane, i + j, total);
    int32_t* out = t.out + r * t.out_stride;
    const int32_t offset = ((1 << t.bits) - 1) * sums[r];
    for (int o = 0; o < outputs; ++o) out[o] = (t.add ? out[o] : 0) + 2 * static_cast<int32_t>(total[o]) - offset;
  }
}

std::atomic<int> forced{-1};

// The bits of a weight up to which this form is faster than tiles, given the inputs in a segment: only long ones fill the
// words. bench/bitserial.py measures it. At one bit and 64 channels it takes 0.6 of the portable code's time on x86. NEON
// without dot product executes as many instructions as its tiles do, but none of them are multiplications, of which a
// Cortex-A72 starts one a cycle, and two of everything else here; with two bits they are 1.8 times as many. AVX-512 takes
// twice as long even with one bit.
int faster_to(int inputs) {
  constexpr int full_words = 192;
  switch (active_isa()) {
    case Isa::neon:
#ifdef FEDMPQ_X86
    case Isa::scalar:
#endif
      return inputs >= full_words ? 1 : 0;
    default:
      return 0;
  }
}

}  // namespace

const BitSerial bit_serial_scalar{sum, product};

const BitSerial& bit_serial() {
  switch (active_isa()) {
#ifdef FEDMPQ_X86
    case Isa::avx512:
      return bit_serial_avx512;
#endif
#ifdef FEDMPQ_NEON
    case Isa::sve:
    case Isa::neon_i8mm:
    case Isa::neon_dot:
    case Isa::neon:
      return bit_serial_neon;
#endif
    default:
      return bit_serial_scalar;
  }
}

[[gnu::cold]] int serial_bits(const Stored& weights, int64_t count, int greatest, int inputs) {
  const int asked = forced.load(std::memory_order_relaxed), allowed = asked < 0 ? faster_to(inputs) : asked;
  const int most = allowed < max_serial_bits ? allowed : max_serial_bits;
  int bits = 1;
  while (bits <= most && greatest >> bits != 0) ++bits;
  if (bits > most) return 0;
  if (weights.twice() != 0) return bits;
  int even = 0;  // a code of 8 bits is as even as its weight
  for (int64_t i = 0; i < count; ++i) even |= ~weights.data[i] & 1;
  return even == 0 ? bits : 0;
}

void weight_planes(const int8_t* packed, int blocks, int segments, int quads, int bits, uint64_t* planes) {
  const int words = (quads + 15) / 16;
  const int64_t plane = int64_t{segments} * words * outputs;
  std::memset(planes, 0, static_cast<size_t>(blocks * bits * plane) * sizeof(uint64_t));
  const uint32_t least = 0x01010101u * (128u - ((1u << bits) - 1u));
  for (int b = 0; b < blocks; ++b, planes += bits * plane)
    for (int s = 0; s < segments; ++s)
      for (int q = 0; q < quads; ++q)
        for (int o = 0; o < outputs; ++o, packed += 4) {
          uint32_t four;
          std::memcpy(&four, packed, sizeof four);
          const uint32_t doubled = (four ^ 0x80808080u) - least;  // four times 2 * code, a byte each
          uint64_t* to = planes + (int64_t{s} * words + q / 16) * outputs + o;
          for (int bit = 0; bit < bits; ++bit)
            to[bit * plane] |= uint64_t{low_bits(doubled >> (bit + 1))} << (q % 16 * 4);
        }
}

}  // namespace fedmpq

void fedmpq_force_bit_serial(int32_t most_bits) { fedmpq::forced.store(most_bits, std::memory_order_relaxed); }
