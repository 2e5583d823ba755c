// SVE with products of matrices of bytes, in registers of any length: in each 128 bits one instruction multiplies two rows of
// eight by two columns and adds them to four sums. A register takes as many neighbouring columns as it has room for, so that
// registers twice as long need half as many instructions. Everything but the tile is NEON's.
#include "ops.h"

#ifdef FEDMPQ_SVE

#include <arm_sve.h>

namespace fedmpq {
namespace {

// Registers without a size would otherwise be parameters in memory.
#define FEDMPQ_INLINE [[gnu::always_inline]] inline
#define FEDMPQ_INLINE_LAMBDA __attribute__((always_inline))

constexpr int most_rows = 8;  // whose sums with two groups of columns are 16 registers

// One quad of each column.
FEDMPQ_INLINE svint32_t quads(svbool_t columns, const int8_t* w) {
  return svld1(columns, reinterpret_cast<const int32_t*>(w));
}

// The same 16 bytes of a row in all 128-bit parts of a register, with zeros for those that are left out.
FEDMPQ_INLINE svint64_t codes(svbool_t some, const int8_t* from) { return svreinterpret_s64(svld1rq(some, from)); }

FEDMPQ_INLINE void multiply(svint64_t rows, svint32_t weights, svint32_t& sums) {
  sums = svmmla(sums, svreinterpret_s8(rows), svreinterpret_s8(weights));
}

// Some rows of a tile, of which an odd last one is its own neighbour, times two groups of neighbouring columns, or one. Letters
// are pairs of rows (registers without a size go into no array), 0 and 1 the lower and upper half of the left group of columns,
// 2 and 3 of the right one.
template <int Pairs, bool Two>
class Product {
 public:
  FEDMPQ_INLINE Product(const Tile& tile, int first, int rows) : t(tile), even(rows % 2 == 0), top(first) {
    const int8_t* from = reinterpret_cast<const int8_t*>(t.a) + first * t.stride;
    for (int r = 0; r < 2 * Pairs; ++r, from += t.stride) row[r] = from;
    if (!even) row[2 * Pairs - 1] = row[2 * Pairs - 2];
  }

  // Columns from `first` of block `b` on, `size` of them in each group but for what is no longer in the block.
  FEDMPQ_INLINE void compute(int b, int first, int size) const {
    const svbool_t left = svwhilelt_b32(0, size), right = size < lanes ? svwhilelt_b32(first + size, lanes) : left;
    svint32_t a0 = svdup_s32(0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    svint32_t c0 = a0, c1 = a0, c2 = a0, c3 = a0, d0 = a0, d1 = a0, d2 = a0, d3 = a0;
    const auto each_pair = [&](const auto& body) FEDMPQ_INLINE_LAMBDA {
      body(0, a0, a1, a2, a3);
      if constexpr (Pairs > 1) body(2, b0, b1, b2, b3);
      if constexpr (Pairs > 2) body(4, c0, c1, c2, c3);
      if constexpr (Pairs > 3) body(6, d0, d1, d2, d3);
    };
    const int8_t* w = t.w + b * t.block + 4 * first;
    const ptrdiff_t other = !Two ? 0 : size < lanes ? 4 * size : t.block;
    ptrdiff_t at = t.segment[0];
    // One loop over segments and quads: with one in the other compilers copy all sums from register to register in between.
    for (int s = 0, q = t.quads;;) {
      if (q >= 4) {
        four_quads(at, w, w + other, left, right, each_pair);
        w += 256, at += 16, q -= 4;
      } else {
        const int count = q > 1 ? 2 : 1;
        last_quads(count, at, w, w + other, left, right, each_pair);
        w += 64 * count, at += 4 * count, q -= count;
      }
      if (q > 0) continue;
      if (++s == t.segments) break;
      at = t.segment[s], q = t.quads;
    }
    int32_t* out = t.out + top * t.out_stride + b * lanes + first;
    if (t.start == nullptr)
      write<false>(nullptr, out, size, left, right, each_pair);
    else
      write<true>(t.start_of(top, b) + first, out, size, left, right, each_pair);
  }

 private:
  const Tile& t;
  bool even;
  int top;
  const int8_t* row[2 * Pairs];

  // Of two quads side by side for each column: those of the lower half of the columns, `low`, and of the upper one.
  template <class EachPair>
  FEDMPQ_INLINE void four_quads(ptrdiff_t at, const int8_t* w, const int8_t* v, svbool_t left, svbool_t right,
                                const EachPair& each_pair) const {
    const svint32_t w0 = quads(left, w), w1 = quads(left, w + 64), w2 = quads(left, w + 128), w3 = quads(left, w + 192);
    const svint32_t v0 = quads(right, v), v1 = quads(right, v + 64), v2 = quads(right, v + 128), v3 = quads(right, v + 192);
    const svint32_t low = svzip1(w0, w1), high = svzip2(w0, w1), next_low = svzip1(w2, w3), next_high = svzip2(w2, w3);
    const svint32_t other_low = svzip1(v0, v1), other_high = svzip2(v0, v1);
    const svint32_t next_other_low = svzip1(v2, v3), next_other_high = svzip2(v2, v3);
    each_pair([&](int r, svint32_t& s0, svint32_t& s1, svint32_t& s2, svint32_t& s3) FEDMPQ_INLINE_LAMBDA {
      const svint64_t one = codes(svptrue_b8(), row[r] + at), below = codes(svptrue_b8(), row[r + 1] + at);
      const svint64_t both = svtrn1(one, below), next = svtrn2(one, below);
      multiply(both, low, s0), multiply(both, high, s1);
      if constexpr (Two) multiply(both, other_low, s2), multiply(both, other_high, s3);
      multiply(next, next_low, s0), multiply(next, next_high, s1);
      if constexpr (Two) multiply(next, next_other_low, s2), multiply(next, next_other_high, s3);
    });
  }

  // One quad or two; beside a single one are zeros, whatever their weights.
  template <class EachPair>
  FEDMPQ_INLINE void last_quads(int count, ptrdiff_t at, const int8_t* w, const int8_t* v, svbool_t left, svbool_t right,
                                const EachPair& each_pair) const {
    const svbool_t some = svwhilelt_b8(0, 4 * count);
    const ptrdiff_t next = 64 * (count - 1);
    const svint32_t w0 = quads(left, w), w1 = quads(left, w + next), v0 = quads(right, v), v1 = quads(right, v + next);
    const svint32_t low = svzip1(w0, w1), high = svzip2(w0, w1), other_low = svzip1(v0, v1), other_high = svzip2(v0, v1);
    each_pair([&](int r, svint32_t& s0, svint32_t& s1, svint32_t& s2, svint32_t& s3) FEDMPQ_INLINE_LAMBDA {
      const svint64_t both = svtrn1(codes(some, row[r] + at), codes(some, row[r + 1] + at));
      multiply(both, low, s0), multiply(both, high, s1);
      if constexpr (Two) multiply(both, other_low, s2), multiply(both, other_high, s3);
    });
  }

  // Of an odd last row but once: sums may be added to where they start.
  template <bool Started, class EachPair>
  FEDMPQ_INLINE void write(const int32_t* start, int32_t* out, int size, svbool_t left, svbool_t right,
                           const EachPair& each_pair) const {
    const ptrdiff_t stride = t.out_stride, start_stride = t.start_stride;
    const auto put = [&](svbool_t columns, svint64_t sums, ptrdiff_t from, ptrdiff_t to) FEDMPQ_INLINE_LAMBDA {
      svint32_t own = svreinterpret_s32(sums);
      if constexpr (Started) own = svadd_x(columns, own, svld1(columns, start + from));
      svst1(columns, out + to, own);
    };
    each_pair([&](int r, svint32_t& s0, svint32_t& s1, svint32_t& s2, svint32_t& s3) FEDMPQ_INLINE_LAMBDA {
      const bool last = r + 2 == 2 * Pairs && !even;
      const svint64_t low = svreinterpret_s64(s0), high = svreinterpret_s64(s1);
      put(left, svuzp1(low, high), 0, 0);
      if (!last) put(left, svuzp2(low, high), start_stride, stride);
      if constexpr (Two) {
        const svint64_t other_low = svreinterpret_s64(s2), other_high = svreinterpret_s64(s3);
        put(right, svuzp1(other_low, other_high), size, size);
        if (!last) put(right, svuzp2(other_low, other_high), start_stride + size, stride + size);
      }
      out += 2 * stride;
      if constexpr (Started) start += 2 * start_stride;
    });
  }
};

// Not inlined into the loop over columns: the zeros that sums begin with would stay in a register, of which none is left.
template <int Pairs, bool Two>
[[gnu::noinline]] void product(const Tile& t, int row, int rows, int b, int first, int size) {
  Product<Pairs, Two>(t, row, rows).compute(b, first, size);
}

template <bool Two>
void product(const Tile& t, int row, int b, int first, int size) {
  const int rows = t.rows - row < most_rows ? t.rows - row : most_rows;
  if (rows > 6) return product<4, Two>(t, row, rows, b, first, size);
  if (rows > 4) return product<3, Two>(t, row, rows, b, first, size);
  if (rows > 2) return product<2, Two>(t, row, rows, b, first, size);
  product<1, Two>(t, row, rows, b, first, size);
}

void tiles(const Tile& t) {
  const int words = static_cast<int>(svcntw()), size = words < lanes ? words : lanes;
  for (int row = 0; row < t.rows; row += most_rows) {
    if (size == lanes && t.blocks == 1) product<false>(t, row, 0, 0, size);
    if (size == lanes && t.blocks == 2) product<true>(t, row, 0, 0, size);
    for (int b = 0; b < t.blocks && size < lanes; ++b)
      for (int first = 0; first < lanes; first += 2 * size) product<true>(t, row, b, first, size);
  }
}

}  // namespace

int sve_bits() { return static_cast<int>(8 * svcntb()); }

// Made where it is used first: on other CPUs nothing of this file may run, not even when the library is loaded.
const Ops& ops_sve() {
  static const Ops own = [] {
    Ops made = ops_neon_i8mm;
    made.name = "sve", made.tile = tiles;
    return made;
  }();
  return own;
}

}  // namespace fedmpq

#endif
