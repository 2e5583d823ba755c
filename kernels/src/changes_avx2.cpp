// AVX2: eight weights at a time, their sums over all boards in registers.
#include "changes.h"

#ifdef FEDMPQ_X86

#include <immintrin.h>

#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

#include "changes.inc"

inline __m256i eight(int32_t value) { return _mm256_set1_epi32(value); }

// Eight places, what the codes that were sent are at and half a cell more, and where cells end, as seen from the places.
struct Eight {
  __m256i place, sent, below, above;
};

struct Bounds {
  __m256i lowest, highest;
};

inline __m256i clamped(__m256i x, const Bounds& bounds) {
  const __m256i whole = _mm256_and_si256(x, eight(-cell));
  return _mm256_min_epi32(_mm256_max_epi32(whole, bounds.lowest), bounds.highest);
}

inline Eight seen_from(const int32_t* places, const Bounds& bounds) {
  const __m256i place = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places)), part = eight(half);
  const __m256i sent = clamped(_mm256_add_epi32(place, part), bounds);
  return {place, _mm256_add_epi32(sent, part), _mm256_add_epi32(place, part), _mm256_sub_epi32(place, part)};
}

// The changes of eight weights. A code and a scale fit 16 bits, so one product of pairs, of which the upper is 0, will do.
template <bool within>
inline __m256i change(const BoardCodes& board, int64_t at, const Eight& from, const Bounds& bounds) {
  const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(board.codes + at)));
  const __m256i moved = _mm256_add_epi32(_mm256_madd_epi16(codes, eight(board.scale)), eight(board.offset));
  if constexpr (!within) return _mm256_sub_epi32(moved, from.place);
  const __m256i ended = clamped(_mm256_add_epi32(from.sent, moved), bounds);
  const __m256i low = _mm256_blendv_epi8(eight(-nowhere), _mm256_sub_epi32(ended, from.below),
                                         _mm256_cmpgt_epi32(ended, bounds.lowest));
  const __m256i high = _mm256_blendv_epi8(eight(nowhere), _mm256_sub_epi32(ended, from.above),
                                          _mm256_cmpgt_epi32(bounds.highest, ended));
  return _mm256_min_epi32(_mm256_max_epi32(moved, low), high);
}

inline void add_to(int64_t* sums, __m256i values) {
  __m256i* to = reinterpret_cast<__m256i*>(sums);
  _mm256_storeu_si256(to, _mm256_add_epi64(_mm256_loadu_si256(to), values));
}

template <bool within>
void add_eights(const BoardCodes* boards, int64_t count, const int32_t* places, int64_t n, const CodeCells& cells,
                int64_t* sums) {
  const Bounds bounds = {eight(times(cells.low, cell)), eight(times(cells.high, cell))};
  for (int64_t i = 0; i < n; i += 8) {
    const Eight from = seen_from(places + i, bounds);
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (const BoardCodes* board = boards; board < boards + count; ++board) {
      const __m256i value = change<within>(*board, i, from, bounds), weight = eight(board->weight);
      even = _mm256_add_epi64(even, _mm256_mul_epi32(value, weight));
      odd = _mm256_add_epi64(odd, _mm256_mul_epi32(_mm256_srli_epi64(value, 32), weight));
    }
    const __m256i low = _mm256_unpacklo_epi64(even, odd), high = _mm256_unpackhi_epi64(even, odd);
    add_to(sums + i, _mm256_permute2x128_si256(low, high, 0x20));
    add_to(sums + i + 4, _mm256_permute2x128_si256(low, high, 0x31));
  }
}

void add_wide(const BoardCodes* boards, int64_t count, const int32_t* places, int64_t n, const CodeCells& cells,
              int64_t* sums) {
  const int64_t whole = n - n % 8;
  (cells.low > cells.high ? add_eights<false> : add_eights<true>)(boards, count, places, whole, cells, sums);
  if (whole == n) return;
  for (const BoardCodes* board = boards; board < boards + count; ++board) {
    BoardCodes rest = *board;
    rest.codes += whole;
    add(&rest, 1, places + whole, n - whole, cells, sums + whole);
  }
}

}  // namespace

const ChangeKernels changes_avx2 = {changes<double>, add_wide, places};

}  // namespace fedmpq

#endif
