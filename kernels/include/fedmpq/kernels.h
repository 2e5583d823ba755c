// The C ABI of libfedmpq_kernels. No function throws or keeps a pointer, and none in this file allocates (those of
// training.h allocate scratch buffers and free them before they return). Every function may be called from many threads at
// once on distinct outputs, but for fedmpq_force_isa and fedmpq_force_bit_serial, which are for tests and start-up.
//
// Every function checks what it relies on, in every build, and touches nothing before. What it cannot check is how much
// memory a pointer points to. A negative status says why it did nothing, or could not finish:
//   -1  not enough memory for scratch buffers
//   -2  sums of so many products might not fit 32 bits
//   -3  numbers that are not finite
//   -4  an argument that cannot be: a null pointer, a size, count or code outside its range, shapes that do not fit one
//       another or that 32-bit offsets cannot reach
// A function that returns an index counts from 0 and has -1 for "none"; it returns -4 as all do.
//
// Stored format, "planes": the m codes of a layer, each in [0, 2^bits - 1] with bits in 1..8, are kept as `bits`
// bit-planes of ceil(m/8) bytes, one after the other. Plane i holds bit i of every code; the bit of weight j is bit
// j % 8 (least significant first) of byte j / 8. The padding bits of a plane's last byte are 0.
#ifndef FEDMPQ_KERNELS_H
#define FEDMPQ_KERNELS_H

#include <stdint.h>

#if defined(__GNUC__)
#define FEDMPQ_API __attribute__((visibility("default")))
#else
#define FEDMPQ_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Name of the instruction set that dispatch uses now: "avx512", "avx2", "neon_dot", "neon" or "scalar". At first it is
// the best this CPU has.
FEDMPQ_API const char* fedmpq_isa(void);

// Makes dispatch use `name`. Returns 0, or -1 (and changes nothing) where the CPU or the build lacks it.
FEDMPQ_API int32_t fedmpq_force_isa(const char* name);

// codes[m] -> planes[bits * ceil(m/8)]. Returns -1, or the index of the first code that is not below 2^bits
// (planes then hold no meaning).
FEDMPQ_API int64_t fedmpq_pack_planes(const uint8_t* codes, int64_t m, int32_t bits, uint8_t* planes);

// planes[bits * ceil(m/8)] -> codes[m]. Returns -1, or the index of the first plane with a padding bit set (codes are
// then untouched).
FEDMPQ_API int32_t fedmpq_unpack_planes(const uint8_t* planes, int64_t m, int32_t bits, uint8_t* codes);

// counts[i] = number of set bits of plane i, planes being bits * plane_bytes bytes.
FEDMPQ_API int32_t fedmpq_popcount_planes(const uint8_t* planes, int64_t plane_bytes, int32_t bits, int64_t* counts);

// counts[i] = number of codes whose magnitude k has bit i set, i in 0..bits-2, where with h = 2^(bits-1)
//   k = c - h  if c >= h,  else  h - 1 - c.
// Returns as fedmpq_pack_planes does.
FEDMPQ_API int64_t fedmpq_magnitude_counts(const uint8_t* codes, int64_t m, int32_t bits, int64_t* counts);

// What boards have changed a layer by, in whole numbers. A layer has m = rows * row weights. Board n gives planes of `bits`
// bits, at planes + n * bits * ceil(m/8), and steps[n * rows + r] for row r, each in 1..16383. Its code c says that a weight
// of the row has moved by
//   d = step * (2c - (2^bits - 1)),  at 8 bits  d = step * (2c - 256).
// places[m] says where the weights lie. If `within` is 0, the change is d - place. Else places and d count 2^-12 of the
// distance between two codes, code c being at 2^12 * c, and with `cell(x)` the code whose cell holds x, which is
// floor((x + 2^11) / 2^12) within 0..2^bits - 1, at 8 bits within 1..255, and e = cell(2^12 * cell(place) + d),
//   change = clamp(place + d, 2^12 * e - 2^11, 2^12 * e + 2^11) - place,
// without the bound on the side where e is the lowest or the highest code. Numbers beyond ±2^28 have no meaning.
// There are at most 2^20 boards and 2^28 weights.
#define FEDMPQ_CHANGE_BITS 12
#define FEDMPQ_MOST_CHANGE_STEP 16383
typedef struct {
  const uint8_t* planes;
  const int32_t *steps, *places;
  int64_t boards, rows, row;
  int32_t bits, within;
} FedmpqChanges;

// sums[m] += sum over boards of weights[n] * change, weights[n] >= 0. Returns -1, or the index of the first board with a
// padding bit set (sums are then untouched).
FEDMPQ_API int64_t fedmpq_add_changes(const FedmpqChanges* changes, const int32_t* weights, int64_t* sums);

// out[boards * count] = the changes of the weights first..first + count - 1, board after board, which doubles hold
// exactly. Returns as fedmpq_add_changes does.
FEDMPQ_API int64_t fedmpq_changes(const FedmpqChanges* changes, int64_t first, int64_t count, double* out);

// places[m] of weights[m] that were quantized to codes[m] with steps[rows], each positive and finite:
//   place = rint(2^12 * (weight / step)) + 2^12 * zero_point, the quotient and its multiple being rounded to float,
// within the cell of the code: in 2^12 * code - 2^11 .. 2^12 * code + 2^11 - 1. Where the code is the lowest or the highest
// in use, there are 2^20 more places on that side.
FEDMPQ_API int32_t fedmpq_places(const float* weights, const uint8_t* codes, const float* steps, int64_t rows, int64_t row,
                                 int32_t bits, int32_t* places);

// errors[r, k] = sum over j of (w - q)^2 for w = rows[r, j] and q = (clip(rint(w / s + z), low, high) - z) * s, where
// s = steps[r, k], high = 2^bits - 1, and z = high/2 and low = 0 below 8 bits, z = 128 and low = 1 at 8. rows is
// [count, length], steps and errors are [count, candidates]. All in single precision; the sum is taken in the order in
// which NumPy takes that of a contiguous row, so both give the same bits.
FEDMPQ_API int32_t fedmpq_grid_errors(const float* rows, int64_t count, int64_t length, const float* steps,
                                      int64_t candidates, int32_t bits, float* errors);

// One block of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
FEDMPQ_API int32_t fedmpq_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

// out[n], uniform in [0, 1): block j = Philox4x32-10(counter = (j, c1, c2, c3), key = (k0, k1)) gives numbers 4j..4j+3,
// each u = (x >> 8) * 2^-24. n is at most 2^34, the length of the counter's first word.
FEDMPQ_API int32_t fedmpq_philox_uniform(int64_t n, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
                                         float* out);

#ifdef __cplusplus
}
#endif

#endif
