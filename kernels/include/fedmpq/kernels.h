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

// Name of the instruction set that dispatch uses now: "avx512", "avx512_vnni", "avx_vnni", "avx2", "sve",
// "neon_i8mm", "neon_dot", "neon" or "scalar". At first it is the best this CPU has.
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

// For the rows i and j <= i of numbers [rows, columns], whole ones of at most 2^26 in magnitude:
//   2^26 upper[i * rows + j] + lower[i * rows + j] += sum over k of numbers[i, k] * numbers[j, k],
// exactly; of every 2^53 / (greatest number)^2 columns the lower 26 bits go to `lower`. Places of j > i stay as they are.
FEDMPQ_API int32_t fedmpq_whole_products(const double* numbers, int64_t rows, int64_t columns, int64_t* upper,
                                         int64_t* lower);

// What a layer of m = rows * row weights has changed by, coded on a grid of its own for each row. A weight has moved by
// d = 256 (trained - sent) + fraction; with o = 1 at odd places of its row and 0 at even ones, and z = 2^bits - 1, at 8 bits
// 256, a step s codes it as
//   code = floor((d + 2^(bits-1) s - o) / s), at 8 bits floor((2 d + s) / (2 s)) + 128,
// clamped to 0..2^bits - 1, at 8 bits to 1..255, and keeps s (2 code - z) / 2 of it. steps[r] is the whole step with the least
// sum of squared differences of those that are tried: three series of 12 steps that grow by equal factors, rounded, beside the
// best so far; the first from 1 to the step that spans the row's changes, then between the neighbours of the best.
FEDMPQ_API int32_t fedmpq_code_changes(const uint8_t* sent, const uint8_t* trained, const int8_t* fractions, int64_t rows,
                                       int64_t row, int32_t bits, int32_t* steps, uint8_t* codes);

// places[m] of weights[m] that were quantized to codes[m] with steps[rows], each positive and finite:
//   place = rint(2^12 * (weight / step)) + 2^12 * zero_point, the quotient and its multiple being rounded to float,
// within the cell of the code: in 2^12 * code - 2^11 .. 2^12 * code + 2^11 - 1. Where the code is the lowest or the highest
// in use, there are 2^20 more places on that side.
FEDMPQ_API int32_t fedmpq_places(const float* weights, const uint8_t* codes, const float* steps, int64_t rows, int64_t row,
                                 int32_t bits, int32_t* places);

// noise[r] = sum over j of (w - t*s)^2, w = rows[r, j], s = steps[r] and t = clip(rint(w/s + z), low, high) - z, with
// high = 2^bits - 1, and z = high/2 and low = 0 below 8 bits, z = 128 and low = 1 at 8. The difference is in single precision,
// squares and sum in double.
FEDMPQ_API int32_t fedmpq_grid_noise(const float* rows, int64_t count, int64_t length, const float* steps, int32_t bits,
                                     double* noise);

// The steps with the least sum of (w - t*s)^2 for many grids at once, on so many threads, and the noise of each. Grid g has
// bits[g] bits and is for the rows [counts[g], lengths[g]] at weights + starts[g], of `size` weights in all; its steps and
// their noise go to steps + firsts[g] and noise + firsts[g], of `room` each. A step is the best as far as a search finds it:
// three geometric series of 16 steps, each finer; then three times s = sum w*t / sum t^2 on the whole row. Never a step with a
// larger error than the one that spans the row, 2*max|w| / high, nor one below 2^-30. All in single precision; sums are taken
// in the order in which NumPy takes those of a contiguous row, so both give the same bits. The series are tried on a sample
// where a row has twice `searched` weights or more: every k-th, k the least number from length / searched on that has no
// factor in common with the length, or the sample could hold a single tap of every kernel.
FEDMPQ_API int32_t fedmpq_least_error_grids(const float* weights, int64_t size, const int64_t* starts, const int64_t* counts,
                                            const int64_t* lengths, const int32_t* bits, int64_t grids, int64_t searched,
                                            int32_t threads, const int64_t* firsts, int64_t room, float* steps,
                                            double* noise);

// coded = codes[n] of `bits` bits, 1..8, as an entropy code: the frequency of every code in parts of 4096, then four states of
// 32 bits, then words of 16 bits, all little-endian. Returns the length, or 0 if it would exceed `room`; the same codes give the
// same bytes everywhere. A code of more bits, or n < 1, is refused.
FEDMPQ_API int64_t fedmpq_encode_codes(const uint8_t* codes, int64_t n, int32_t bits, uint8_t* coded, int64_t room);

// codes[n] = those of which `coded` is the code; -4 if it is the code of no n codes of `bits` bits. Trusts nothing in it: it reads
// no byte beyond `length` and writes none beyond n.
FEDMPQ_API int32_t fedmpq_decode_codes(const uint8_t* coded, int64_t length, int64_t n, int32_t bits, uint8_t* codes);

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
