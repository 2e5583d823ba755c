// The same product in the encoding of AVX-512, for CPUs that have it in this one alone.
#include "ops.h"

#ifdef FEDMPQ_AVX_VNNI_TWIN

#include <immintrin.h>

namespace fedmpq {
namespace {

inline __m256i multiply_add(__m256i sums, __m256i codes, __m256i weights) {
  return _mm256_dpbusd_epi32(sums, codes, weights);
}

#include "ops_avx_vnni.inc"

#include "pair_tile.inc"

}  // namespace

const Ops ops_avx_vnni_evex{
    "avx_vnni", false, tiles, pair_tiles<tiles>, 32,
    depthwise, depthwise_weights, statistics, requantize, pack, unpack, narrow, backward_sums,
    narrow_backward_sums, backward_error, quantize_error, to_error, add_codes, join_codes, pass_error, lookup, lookup_error,
    multiply, multiply_error, decay, greatest_bits, push_momentum, move_paper, move_carried, move_lasso};

}  // namespace fedmpq

#endif
