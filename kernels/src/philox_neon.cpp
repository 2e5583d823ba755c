// Philox with NEON, four blocks side by side, word by word. The compiler's own vectorisation of the scalar twin widens the
// words to 64 bits and takes more than twice the instructions.
#include "philox.h"

#ifdef FEDMPQ_NEON

#include <arm_neon.h>

namespace fedmpq {
namespace {

struct Words {
  uint32x4_t low, high;
};

inline Words product(uint32x4_t words, uint32x4_t factor) {
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(words), vget_low_u32(factor)));
  const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(words, factor));
  return {vuzp1q_u32(first, second), vuzp2q_u32(first, second)};
}

// The four words of four blocks, block by block.
inline void write(const uint32x4x4_t& words, uint32_t* out) { vst4q_u32(out, words); }

// A conversion that takes 24 bits for the fraction is exact: it is the twin's product with 2^-24.
inline void write(const uint32x4x4_t& words, float* out) {
  float32x4x4_t numbers;
  for (int i = 0; i < 4; ++i)
    numbers.val[i] = vcvtq_n_f32_s32(vreinterpretq_s32_u32(vshrq_n_u32(words.val[i], 8)), 24);
  vst4q_f32(out, numbers);
}

template <class Number>
void draw(const PhiloxStream& stream, uint32_t first, int64_t n, Number* out) {
  const uint32x4_t m0 = vdupq_n_u32(philox_m0), m1 = vdupq_n_u32(philox_m1);
  const uint32x4_t c1 = vdupq_n_u32(stream.c1), c2 = vdupq_n_u32(stream.c2), c3 = vdupq_n_u32(stream.c3);
  constexpr uint32_t numbers[4] = {0, 1, 2, 3};
  uint32x4_t block = vaddq_u32(vdupq_n_u32(first), vld1q_u32(numbers));
  uint32x4_t k0[philox_rounds], k1[philox_rounds];
  for (uint32_t r = 0; r < philox_rounds; ++r) {
    k0[r] = vdupq_n_u32(stream.k0 + r * philox_w0);
    k1[r] = vdupq_n_u32(stream.k1 + r * philox_w1);
  }
  const int64_t whole = n - n % 16;
  for (int64_t done = 0; done < whole; done += 16) {
    uint32x4_t x0 = block, x1 = c1, x2 = c2, x3 = c3;
#pragma GCC unroll 10
    for (int r = 0; r < philox_rounds; ++r) {
      const Words p0 = product(x0, m0), p1 = product(x2, m1);
      x0 = veorq_u32(p1.high, veorq_u32(x1, k0[r]));
      x2 = veorq_u32(p0.high, veorq_u32(x3, k1[r]));
      x1 = p1.low;
      x3 = p0.low;
    }
    write({{x0, x1, x2, x3}}, out + done);
    block = vaddq_u32(block, vdupq_n_u32(4));
  }
  philox_scalar(stream, first + static_cast<uint32_t>(whole / 4), n - whole, out + whole);
}

}  // namespace

void philox_neon(const PhiloxStream& stream, uint32_t first, int64_t n, float* out) { draw(stream, first, n, out); }

void philox_neon(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out) { draw(stream, first, n, out); }

}  // namespace fedmpq

#endif
