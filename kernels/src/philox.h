// Philox4x32-10, one function per instruction set. fedmpq/kernels.h states the mapping.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fedmpq {

constexpr uint32_t philox_m0 = 0xD2511F53u, philox_m1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t philox_w0 = 0x9E3779B9u, philox_w1 = 0xBB67AE85u;  // what the key grows by each round
constexpr int philox_rounds = 10;

// What all blocks of one draw share: the counter's upper three words and the key.
struct PhiloxStream {
  uint32_t c1, c2, c3, k0, k1;
};

// Each writes n numbers, starting at block `first`: uniform ones if they are floats, the words themselves if not.
void philox_scalar(const PhiloxStream& stream, uint32_t first, int64_t n, float* out);
void philox_scalar(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out);
#ifdef FEDMPQ_X86
void philox_avx2(const PhiloxStream& stream, uint32_t first, int64_t n, float* out);
void philox_avx2(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out);
void philox_avx512(const PhiloxStream& stream, uint32_t first, int64_t n, float* out);
void philox_avx512(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out);
#endif
#ifdef FEDMPQ_NEON
void philox_neon(const PhiloxStream& stream, uint32_t first, int64_t n, float* out);
void philox_neon(const PhiloxStream& stream, uint32_t first, int64_t n, uint32_t* out);
#endif

// By the active instruction set: n uniform numbers, and the words of `blocks` blocks.
void philox_uniform(const PhiloxStream& stream, uint32_t first, int64_t n, float* out);
void philox_words(const PhiloxStream& stream, uint32_t first, int64_t blocks, uint32_t* out);

}  // namespace fedmpq
