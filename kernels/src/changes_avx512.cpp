// AVX-512: 64 weights at a time in 16 bits, where changes surely fit, else 16 in 32 bits; sums over all boards stay in
// registers.
//
// Seen from the code c0 that a weight was sent, with f = place - 2^12 c0, x = d + 2^11, K = 2^12 floor(x / 2^12), and the ends
// of the codes less 2^12 c0 as lowest and highest, the change plus 2^11 is
//   f >= 0:  min(x, max(K, lowest) + 2^12 - f) if K < highest, else x,
//   f < 0:   max(x, min(K, highest) - f)       if K > lowest,  else x,
// since the other bound of a cell is never met. With ~x = -x - 1 for x the second line is of the form of the first:
//   ~max(x, min(K, highest) - f) = min(~x, max(~K, -2^12 - highest) + 2^12 - 1 + f),  ~K = 2^12 floor(~x / 2^12) = -2^12 - K,
// if ~K < -2^12 - lowest. The 2^11 are taken from the sums as a whole. Weights of boards are split into 2^11 high + low, so
// that the products of two boards at a time fit sums of 32 bits.
#include "changes.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

#include <algorithm>

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

#include "changes.inc"

constexpr int64_t block = 64;
constexpr int weight_bits = 11, low_bits = (1 << weight_bits) - 1;
// What 16 bits hold of |d| + |f| and what a cell and the rounding may add; f itself is at least allowed a cell.
constexpr int32_t most_small = 32767 - cell - half, most_small_move = most_small - cell;
constexpr int32_t most_small_weight = 1 << (2 * weight_bits);

inline __m512i all(int32_t value) { return _mm512_set1_epi32(value); }
// Both halves of a lane of 32 bits.
inline int32_t twice(int32_t value) { return static_cast<int32_t>(static_cast<uint32_t>(value & 0xffff) * 0x10001u); }
inline int32_t beside(int32_t low, int32_t high) {
  return (low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16);
}

// What is different in lanes of 16 and of 32 bits.
struct Small {
  static __m512i constant(int32_t value) { return all(twice(value)); }
  static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
  // Within 16 bits: an end of the codes that is far away stays so.
  static __m512i less(__m512i a, __m512i b) { return _mm512_subs_epi16(a, b); }
  static __m512i larger(__m512i a, __m512i b) { return _mm512_max_epi16(a, b); }
  static __mmask32 negative(__m512i a) { return _mm512_movepi16_mask(a); }
  static __m512i chosen(__mmask32 which, __m512i a, __m512i otherwise) { return _mm512_mask_blend_epi16(which, otherwise, a); }
  // The smaller of a and bound where x < y, else a.
  static __m512i smaller_if(__m512i x, __m512i y, __m512i a, __m512i bound) {
    return _mm512_mask_min_epi16(a, _mm512_cmplt_epi16_mask(x, y), a, bound);
  }
};

struct Large {
  static __m512i constant(int32_t value) { return all(value); }
  static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i less(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
  static __m512i larger(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  static __mmask16 negative(__m512i a) { return _mm512_movepi32_mask(a); }
  static __m512i chosen(__mmask16 which, __m512i a, __m512i otherwise) { return _mm512_mask_blend_epi32(which, otherwise, a); }
  static __m512i smaller_if(__m512i x, __m512i y, __m512i a, __m512i bound) {
    return _mm512_mask_min_epi32(a, _mm512_cmplt_epi32_mask(x, y), a, bound);
  }
};

// Where weights and the ends of the codes lie, seen from the codes that were sent.
struct Seen {
  __m512i place, lowest, highest;
};

inline Seen seen_from_codes(__m512i place, const CodeCells& cells) {
  const __m512i lowest = all(times(cells.low, cell)), highest = all(times(cells.high, cell));
  const __m512i whole = _mm512_and_si512(_mm512_add_epi32(place, all(half)), all(-cell));
  const __m512i sent = _mm512_min_epi32(_mm512_max_epi32(whole, lowest), highest);
  return {Large::less(place, sent), Large::less(lowest, sent), Large::less(highest, sent)};
}

// The 16 bits of 32 weights lie in four quarters, each of four weights of the first 16 and four of the second: so packing
// them and taking them apart again, which instructions do by quarters, needs no other order. What is beyond 16 bits becomes
// the nearest that is not: an end of the codes so far away is met by no small change.
inline Seen packed(const Seen& first, const Seen& second) {
  return {_mm512_packs_epi32(first.place, second.place), _mm512_packs_epi32(first.lowest, second.lowest),
          _mm512_packs_epi32(first.highest, second.highest)};
}

// The bound of a cell that can be met, of weights or, where `turned` is -1, of what is opposite to them.
struct Bound {
  __m512i turned, lowest, highest, room;
};

template <class Lanes>
inline Bound bound_of(const Seen& from) {
  const auto below = Lanes::negative(from.place);
  const __m512i away = Lanes::constant(-cell), room = Lanes::less(Lanes::constant(cell), from.place);
  const __m512i room_below = Lanes::plus(from.place, Lanes::constant(cell - 1));
  return {Lanes::chosen(below, all(-1), all(0)), Lanes::chosen(below, Lanes::less(away, from.highest), from.lowest),
          Lanes::chosen(below, Lanes::less(away, from.lowest), from.highest), Lanes::chosen(below, room_below, room)};
}

// change + half, of a move and half.
template <class Lanes>
inline __m512i bounded(__m512i moved, const Bound& bound) {
  const __m512i x = _mm512_xor_si512(moved, bound.turned), code = _mm512_and_si512(x, Lanes::constant(-cell));
  const __m512i most = Lanes::plus(Lanes::larger(code, bound.lowest), bound.room);
  return _mm512_xor_si512(Lanes::smaller_if(code, bound.highest, x, most), bound.turned);
}

inline __m512i loaded(const void* numbers) { return _mm512_loadu_si512(numbers); }

inline void add_to(int64_t* sums, __m512i values) { _mm512_storeu_si512(sums, _mm512_add_epi64(loaded(sums), values)); }

// The sums of 16 weights, even ones and odd ones.
inline void add_by_turns(int64_t* sums, __m512i even, __m512i odd) {
  const __m512i low = _mm512_unpacklo_epi64(even, odd), high = _mm512_unpackhi_epi64(even, odd);
  add_to(sums, _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high));
  add_to(sums + 8, _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high));
}

struct Boards {
  const BoardCodes* first;
  int64_t count;
};

// A block of weights of all boards, 32 at a time.
template <bool within>
void add_large(const Boards& boards, int64_t at, const int32_t* places, const CodeCells cells, int64_t* sums) {
  constexpr int32_t more = within ? half : 0;
  int64_t added = 0;
  for (int64_t i = 0; i < boards.count; ++i) added += int64_t{more} * boards.first[i].weight;
  for (const int64_t end = at + block; at < end; at += 32) {
    __m512i place[2], even[2], odd[2];
    Bound bounds[2];
    for (int i = 0; i < 2; ++i) {
      place[i] = loaded(places + at + 16 * i);
      bounds[i] = bound_of<Large>(seen_from_codes(place[i], cells));
      even[i] = odd[i] = _mm512_set1_epi64(-added);
    }
    for (const BoardCodes* board = boards.first; board < boards.first + boards.count; ++board) {
      const __m512i scale = all(board->scale), offset = all(plus(board->offset, more)), weight = all(board->weight);
      for (int i = 0; i < 2; ++i) {
        const auto* codes = reinterpret_cast<const __m128i*>(board->codes + at + 16 * i);
        // A code and a scale fit 16 bits, so one product of pairs, of which the upper is 0, will do.
        const __m512i scaled = _mm512_madd_epi16(_mm512_cvtepu8_epi32(_mm_loadu_si128(codes)), scale);
        const __m512i moved = Large::plus(scaled, offset);
        const __m512i value = within ? bounded<Large>(moved, bounds[i]) : Large::less(moved, place[i]);
        even[i] = _mm512_add_epi64(even[i], _mm512_mul_epi32(value, weight));
        odd[i] = _mm512_add_epi64(odd[i], _mm512_mul_epi32(_mm512_srli_epi64(value, 32), weight));
      }
    }
    for (int i = 0; i < 2; ++i) add_by_turns(sums + at + 16 * i, even[i], odd[i]);
  }
}

// Two boards as the products of pairs want them, each number twice or beside the other board's.
struct Pair {
  const uint8_t* codes[2];
  int32_t scale[2], offset[2], low, high;
};

Pair pair_of(const BoardCodes& one, const BoardCodes& other, int32_t other_weight) {
  return {{one.codes, other.codes},
          {twice(one.scale), twice(other.scale)},
          {twice(one.offset + half), twice(other.offset + half)},
          beside(one.weight & low_bits, other_weight & low_bits),
          beside(one.weight >> weight_bits, other_weight >> weight_bits)};
}

struct Pairs {
  Pair pair[change_boards / 2];
  int64_t count;
  // What the added halves of all boards come to, and how far from its code a weight may lie.
  int32_t low, high, most_place;
};

Pairs pairs_of(const Boards& boards, int32_t most_move) {
  Pairs found = {{}, (boards.count + 1) / 2, 0, 0, most_small - most_move};
  for (int64_t i = 0; i < boards.count; ++i) {
    const BoardCodes& board = boards.first[i];
    found.low -= half * (board.weight & low_bits), found.high -= half * (board.weight >> weight_bits);
    // Who is alone is beside itself, without weight.
    const bool alone = i + 1 == boards.count;
    const BoardCodes& next = boards.first[alone ? i : i + 1];
    if (i % 2 == 0) found.pair[i / 2] = pair_of(board, next, alone ? 0 : next.weight);
  }
  return found;
}

// change + half of twice 32 weights of a board, given their codes by quarters.
inline void small_changes(__m512i codes, int32_t scale, int32_t offset, const Bound bounds[2], __m512i changes_and_halves[2]) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i wide[2] = {_mm512_unpacklo_epi8(codes, zero), _mm512_unpackhi_epi8(codes, zero)};
  for (int i = 0; i < 2; ++i) {
    const __m512i moved = _mm512_add_epi16(_mm512_mullo_epi16(wide[i], all(scale)), all(offset));
    changes_and_halves[i] = bounded<Small>(moved, bounds[i]);
  }
}

// 64 codes, four of each 16 to a quarter.
inline __m512i codes_by_quarters(const uint8_t* codes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
}

// 2^11 high + low of 16 weights.
inline void add_parts(int64_t* sums, __m512i low, __m512i high) {
  const auto whole = [](__m256i lower, __m256i upper) {
    return _mm512_add_epi64(_mm512_cvtepi32_epi64(lower), _mm512_slli_epi64(_mm512_cvtepi32_epi64(upper), weight_bits));
  };
  add_to(sums, whole(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high)));
  add_to(sums + 8, whole(_mm512_extracti64x4_epi64(low, 1), _mm512_extracti64x4_epi64(high, 1)));
}

inline Seen seen_small(const int32_t* places, const CodeCells& cells) {
  return packed(seen_from_codes(loaded(places), cells), seen_from_codes(loaded(places + 16), cells));
}

inline bool are_far(const Seen from[2], int32_t most) {
  const __m512i farthest = _mm512_max_epu16(_mm512_abs_epi16(from[0].place), _mm512_abs_epi16(from[1].place));
  return _mm512_cmpgt_epu16_mask(farthest, Small::constant(most)) != 0;
}

// From the weight `at` on, `block` at a time, up to those of which some lie too far from their codes; returns where that is.
int64_t add_small(const Pairs& boards, int64_t at, const int32_t* places, int64_t n, const CodeCells cells, int64_t* sums) {
  for (; at < n; at += block) {
    const Seen from[2] = {seen_small(places + at, cells), seen_small(places + at + 32, cells)};
    if (are_far(from, boards.most_place)) break;
    const Bound bounds[2] = {bound_of<Small>(from[0]), bound_of<Small>(from[1])};
    __m512i low[4], high[4];
    for (int part = 0; part < 4; ++part) low[part] = all(boards.low), high[part] = all(boards.high);
    for (const Pair* pair = boards.pair; pair < boards.pair + boards.count; ++pair) {
      __m512i one[2], other[2];
      small_changes(codes_by_quarters(pair->codes[0] + at), pair->scale[0], pair->offset[0], bounds, one);
      small_changes(codes_by_quarters(pair->codes[1] + at), pair->scale[1], pair->offset[1], bounds, other);
      for (int part = 0; part < 4; ++part) {
        const __m512i a = one[part / 2], b = other[part / 2];
        const __m512i both = part % 2 == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b);
        low[part] = _mm512_dpwssd_epi32(low[part], both, all(pair->low));
        high[part] = _mm512_dpwssd_epi32(high[part], both, all(pair->high));
      }
    }
    for (int part = 0; part < 4; ++part) add_parts(sums + at + 16 * part, low[part], high[part]);
  }
  return at;
}

// Whole blocks of weights, n in all.
void add_blocks(const Boards& boards, const int32_t* places, int64_t n, const CodeCells& cells, int64_t* sums) {
  int32_t move = 0, weight = 0;
  for (const BoardCodes* board = boards.first; board < boards.first + boards.count; ++board)
    move = std::max(move, -board->offset), weight = std::max(weight, board->weight);
  const bool within = cells.low <= cells.high;
  const bool small = within && move <= most_small_move && weight <= most_small_weight;
  const Pairs pairs = small ? pairs_of(boards, move) : Pairs{};
  const auto large = within ? add_large<true> : add_large<false>;
  for (int64_t at = 0; at < n;) {
    if (small) at = add_small(pairs, at, places, n, cells, sums);
    if (at >= n) return;
    large(boards, at, places, cells, sums);
    at += block;
  }
}

void add_wide(const BoardCodes* boards, int64_t count, const int32_t* places, int64_t n, const CodeCells& cells,
              int64_t* sums) {
  const int64_t whole = n - n % block;
  add_blocks({boards, count}, places, whole, cells, sums);
  if (whole == n) return;
  // The rest as a block with room of its own; of codes there are some to read beyond the last.
  BoardCodes rest[change_boards];
  std::transform(boards, boards + count, rest, [whole](BoardCodes board) { return board.codes += whole, board; });
  int32_t last_places[block] = {};
  int64_t last_sums[block] = {};
  std::copy(places + whole, places + n, last_places), std::copy(sums + whole, sums + n, last_sums);
  add_blocks({rest, count}, last_places, block, cells, last_sums);
  std::copy(last_sums, last_sums + (n - whole), sums + whole);
}

}  // namespace

const ChangeKernels changes_avx512 = {changes<double>, add_wide, places};

}  // namespace fedmpq

#endif
