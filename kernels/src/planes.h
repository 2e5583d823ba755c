// Bit-plane kernels, one table per instruction set. The stored format is described in fedmpq/kernels.h.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fedmpq {

// Packs m codes into planes that lie plane_bytes apart. Returns the bitwise OR of all codes: it is at least 2^bits
// exactly when some code is, so the hot loop needs no comparison.
using Pack = uint8_t(const uint8_t* codes, int64_t m, uint8_t* planes, int64_t plane_bytes);
using Unpack = void(const uint8_t* planes, int64_t plane_bytes, int64_t m, uint8_t* codes);
using Popcount = int64_t(const uint8_t* bytes, int64_t n);

// pack[b - 1] and unpack[b - 1] are for b bits: the width is a compile-time constant of the inner loop.
struct PlaneKernels {
  Pack* pack[8];
  Unpack* unpack[8];
  Popcount* popcount;
};

// The table of a file's function templates pack<bits> and unpack<bits>.
#define FEDMPQ_PLANE_KERNELS                                                                       \
  {{pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>},                       \
   {unpack<1>, unpack<2>, unpack<3>, unpack<4>, unpack<5>, unpack<6>, unpack<7>, unpack<8>},       \
   popcount}

inline uint8_t or_of_bytes(uint64_t x) {
  x |= x >> 32;
  x |= x >> 16;
  return static_cast<uint8_t>(x | (x >> 8));
}

extern const PlaneKernels planes_scalar;
#ifdef FEDMPQ_X86
extern const PlaneKernels planes_avx2;
extern const PlaneKernels planes_avx512;
#endif
#ifdef FEDMPQ_NEON
extern const PlaneKernels planes_neon;
#endif

// The table of the instruction set in use.
const PlaneKernels& active_planes();

}  // namespace fedmpq
