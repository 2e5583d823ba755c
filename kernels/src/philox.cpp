#include "philox.h"

#include <algorithm>

#include "bounds.h"
#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

struct Block {
  uint32_t x0, x1, x2, x3;
};

// Unrolled by force: only straight-line code lets the compiler run several blocks side by side.
__attribute__((always_inline)) inline Block philox(uint32_t c0, const PhiloxStream& s) {
  uint32_t x0 = c0, x1 = s.c1, x2 = s.c2, x3 = s.c3, k0 = s.k0, k1 = s.k1;
#pragma GCC unroll 10
  for (int round = 0; round < philox_rounds; ++round) {
    const uint64_t p0 = uint64_t{philox_m0} * x0;
    const uint64_t p1 = uint64_t{philox_m1} * x2;
    x0 = static_cast<uint32_t>(p1 >> 32) ^ x1 ^ k0;
    x1 = static_cast<uint32_t>(p1);
    x2 = static_cast<uint32_t>(p0 >> 32) ^ x3 ^ k1;
    x3 = static_cast<uint32_t>(p0);
    k0 += philox_w0;
    k1 += philox_w1;
  }
  return {x0, x1, x2, x3};
}

void put(uint32_t x, uint32_t& out) { out = x; }

// The top 24 bits: exactly the integers a float holds, so the largest result is 1 - 2^-24. Signed, because only
// that conversion has an instruction everywhere.
void put(uint32_t x, float& out) { out = static_cast<float>(static_cast<int32_t>(x >> 8)) * 0x1p-24f; }

template <class Number>
void write(const Block& block, Number* out) {
  put(block.x0, out[0]);
  put(block.x1, out[1]);
  put(block.x2, out[2]);
  put(block.x3, out[3]);
}

template <class Number>
void draw_scalar(const PhiloxStream& stream, uint32_t first, int64_t n, Number* out) {
  const PhiloxStream s = stream;  // a copy that `out` cannot alias
  // Tiles keep the inner loop's counter 32 bits wide, the width of the lanes.
  constexpr int64_t tile = 1 << 20;
  for (int64_t done = 0; done < n / 4; done += tile) {
    const uint32_t base = first + static_cast<uint32_t>(done);
    const int32_t count = static_cast<int32_t>(std::min(tile, n / 4 - done));
    for (int32_t b = 0; b < count; ++b) write(philox(base + static_cast<uint32_t>(b), s), out + 4 * (done + b));
  }
  if (n % 4 != 0) {
    Number last[4];
    write(philox(first + static_cast<uint32_t>(n / 4), s), last);
    std::copy_n(last, n % 4, out + n - n % 4);
  }
}

template <class Number>
void draw(const PhiloxStream& stream, uint32_t first, int64_t n, Number* out) {
  switch (active_isa()) {
#ifdef FEDMPQ_X86
    case Isa::avx512:
    case Isa::avx512_vnni:
      return philox_avx512(stream, first, n, out);
    case Isa::avx_vnni:
    case Isa::avx2:
      return philox_avx2(stream, first, n, out);
#endif
#ifdef FEDMPQ_NEON
    case Isa::sve:
    case Isa::neon_i8mm:
    case Isa::neon_dot:
    case Isa::neon:
      return philox_neon(stream, first, n, out);
#endif
    default:
      return philox_scalar(stream, first, n, out);
  }
}

}  // namespace

void philox_scalar(const PhiloxStream& stream, uint32_t first, int64_t n, float* out) {
  draw_scalar(stream, first, n, out);
}

void philox_scalar(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out) {
  draw_scalar(stream, first, n, out);
}

void philox_uniform(const PhiloxStream& stream, uint32_t first, int64_t n, float* out) { draw(stream, first, n, out); }

void philox_words(const PhiloxStream& stream, uint32_t first, int64_t blocks, uint32_t* out) {
  draw(stream, first, 4 * blocks, out);
}

}  // namespace fedmpq

int32_t fedmpq_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  if (!fedmpq::given(counter, key, out)) return fedmpq::not_valid;
  fedmpq::write(fedmpq::philox(counter[0], {counter[1], counter[2], counter[3], key[0], key[1]}), out);
  return 0;
}

int32_t fedmpq_philox_uniform(int64_t n, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, float* out) {
  if (n < 0 || n > int64_t{1} << 34 || !fedmpq::given(out)) return fedmpq::not_valid;
  fedmpq::philox_uniform({c1, c2, c3, k0, k1}, 0, n, out);
  return 0;
}
