#include "planes.h"

#include <algorithm>

#include "bounds.h"
#include "fedmpq/kernels.h"

namespace fedmpq {

const PlaneKernels& active_planes() {
  switch (active_isa()) {
#ifdef FEDMPQ_X86
    case Isa::avx512:
      return planes_avx512;
    case Isa::avx512_vnni:
    case Isa::avx_vnni:
    case Isa::avx2:
      return planes_avx2;
#endif
#ifdef FEDMPQ_NEON
    case Isa::sve:
    case Isa::neon_i8mm:
    case Isa::neon_dot:
    case Isa::neon:
      return planes_neon;
#endif
    default:
      return planes_scalar;
  }
}

namespace {

bool is_codes(int64_t m, int32_t bits) { return m >= 0 && bits >= 1 && bits <= 8; }

int64_t first_too_large(const uint8_t* codes, int64_t m, int bits) {
  const uint8_t* found = std::find_if(codes, codes + m, [bits](uint8_t code) { return code >> bits != 0; });
  return found == codes + m ? -1 : found - codes;
}

}  // namespace
}  // namespace fedmpq

using fedmpq::active_planes;
using fedmpq::given;
using fedmpq::is_codes;
using fedmpq::not_valid;

int64_t fedmpq_pack_planes(const uint8_t* codes, int64_t m, int32_t bits, uint8_t* planes) {
  if (!is_codes(m, bits) || !given(codes, planes)) return not_valid;
  const uint8_t seen = active_planes().pack[bits - 1](codes, m, planes, (m + 7) / 8);
  return seen >> bits == 0 ? -1 : fedmpq::first_too_large(codes, m, bits);
}

int32_t fedmpq_unpack_planes(const uint8_t* planes, int64_t m, int32_t bits, uint8_t* codes) {
  if (!is_codes(m, bits) || !given(planes, codes)) return not_valid;
  const int64_t plane_bytes = (m + 7) / 8;
  if (m % 8 != 0)
    for (int32_t i = 0; i < bits; ++i)
      if (planes[(i + 1) * plane_bytes - 1] >> (m % 8) != 0) return i;
  active_planes().unpack[bits - 1](planes, plane_bytes, m, codes);
  return -1;
}

int32_t fedmpq_popcount_planes(const uint8_t* planes, int64_t plane_bytes, int32_t bits, int64_t* counts) {
  if (!is_codes(plane_bytes, bits) || !given(planes, counts)) return not_valid;
  for (int32_t i = 0; i < bits; ++i) counts[i] = active_planes().popcount(planes + i * plane_bytes, plane_bytes);
  return 0;
}

// Below the top bit, the magnitude is the code's bits where the top bit is set and their complement where it is not:
// bit i of k is 1 exactly where bit i of the code equals its top bit. Codes are packed in tiles that stay in the first
// cache.
int64_t fedmpq_magnitude_counts(const uint8_t* codes, int64_t m, int32_t bits, int64_t* counts) {
  if (!is_codes(m, bits) || !given(codes, counts)) return not_valid;
  constexpr int64_t tile_codes = 4096;
  constexpr int64_t tile_bytes = tile_codes / 8;
  uint8_t planes[8 * tile_bytes];
  uint8_t seen = 0;
  std::fill_n(counts, bits - 1, m);
  for (int64_t j = 0; j < m; j += tile_codes) {
    const int64_t n = std::min(tile_codes, m - j);
    seen |= active_planes().pack[bits - 1](codes + j, n, planes, tile_bytes);
    const uint8_t* top = planes + (bits - 1) * tile_bytes;
    for (int32_t i = 0; i < bits - 1; ++i) {
      uint8_t* differs = planes + i * tile_bytes;
      for (int64_t byte = 0; byte < (n + 7) / 8; ++byte) differs[byte] ^= top[byte];
      counts[i] -= active_planes().popcount(differs, (n + 7) / 8);
    }
  }
  return seen >> bits == 0 ? -1 : fedmpq::first_too_large(codes, m, bits);
}
