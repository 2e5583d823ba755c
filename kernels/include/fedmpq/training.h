// The C ABI of integer training: products of codes, the passes between them, and the update of a layer's codes.
//
// Activations are NHWC, one image after the other. A tensor of codes holds bytes `code + zero` (zero >= 0 makes them
// unsigned), or, if `pairs`, two 4-bit ones a byte, low half first, every image starting on a byte of its own.
// Accumulators are int32. Errors, the gradients of real activations, are bfloat16 between layers and int8 with one scale
// for a tensor inside a product. Weights are int8 in the order (output, input / groups, row, column); products take them as
// they are, or, if `bits` is not 0, as the codes of so many bits that stand for them: 2 * code - (2^bits - 1) below 8 bits,
// code - 128 at 8. Weights and int8 errors lie within ±127.
//
// Functions return 0 or a status that kernels.h lists, unless they say otherwise. `threads` share the images, or the weights
// of an update; fewer do where there are no more. The result does not depend on their number, nor on the instruction set. A
// batch may be empty.
//
// kernels/prototypes.py is generated from the headers (`python -m tools.c_interface`).
#ifndef FEDMPQ_TRAINING_H
#define FEDMPQ_TRAINING_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// A convolution. A linear layer is one whose images, kernel and outputs are one pixel each. No side is above 65536, no image,
// output or weight above 2^28 elements, no padded image above 2^30 bytes.
typedef struct {
  int32_t images, height, width, channels;
  int32_t out_height, out_width, out_channels;
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int32_t groups;
} FedmpqConv;

// A batch of stored codes, as described above.
typedef struct {
  const uint8_t* data;
  int32_t pairs, zero;
} FedmpqCodes;

// The extent of a batch of accumulators or errors: images * pixels * channels elements.
typedef struct {
  int32_t images;
  int64_t pixels;
  int32_t channels;
} FedmpqExtent;

// A pool: window (y, x) covers rows rows[2y] to rows[2y + 1] - 1 and columns columns[2x] to columns[2x + 1] - 1, at least one
// of each. Sides and elements are as few as a convolution's.
typedef struct {
  int32_t images, height, width, channels, out_height, out_width;
  const int32_t *rows, *columns;
} FedmpqPool;

// From accumulators to codes, by channel: t = acc * scale + shift, code = clamp(rint(t), low, high).
typedef struct {
  const float *scale, *shift;
  float low, high;
} FedmpqRescale;

// From accumulators to what BatchNorm normalizes, by channel: acc * norm + bias.
typedef struct {
  const float *norm, *bias;
} FedmpqNormalize;

// acc = sum of code * weight; padding has code 0. If sums is not null: sums[0][o] = sum of acc, sums[1][o] = sum of acc^2.
// Without groups, or with as many as channels, acc may be null, here and in fedmpq_conv_backward_sums: where a product takes
// less time than memory does, accumulators are computed again whenever they are needed, by fedmpq_conv_requantize and
// fedmpq_conv_backward_error too.
FEDMPQ_API int32_t fedmpq_conv_forward(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights,
                                       uint32_t bits, int32_t threads, int32_t* acc, double* sums);

// Makes fedmpq_conv_forward use the bit-serial form (AND and popcount on bit-planes) for 4-bit codes with weights of up to
// so many bits, at most 7, or, if negative, where it is faster, which is the default. For tests and measurements.
FEDMPQ_API void fedmpq_force_bit_serial(int32_t most_bits);

// Makes it multiply by Winograd's form for two neighbouring outputs wherever that is exact, nowhere if 0, or, if negative,
// where it is faster, which is the default. For tests and measurements.
FEDMPQ_API void fedmpq_force_winograd(int32_t how);

// The accumulators again and, with t of the rescaling and g = error where low < t < high, else 0:
// sums[0][o] = sum of g, sums[1][o] = sum of g * (acc * norm + bias), sums[2][o] = sum of errors with t >= high,
// sums[3][o] = sum of errors with t <= low. Accumulators that were kept, and fit, take the place of products; both `kept` and
// `fit` may be null.
FEDMPQ_API int32_t fedmpq_conv_backward_sums(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights,
                                             uint32_t bits, const int16_t* kept, const int32_t* fit, const uint16_t* error,
                                             const FedmpqRescale* rescale, const FedmpqNormalize* normalize,
                                             int32_t threads, int32_t* acc, double* sums);

// Accumulators as 16-bit numbers for the backward pass. *fit = 1, or 0 if some are too large for that: what is in `kept` then
// means nothing.
FEDMPQ_API int32_t fedmpq_keep(const int32_t* acc, int32_t images, int64_t count, int32_t threads, int16_t* kept,
                               int32_t* fit);

// Dropout: a number u in [0, 1) belongs to each element of an image, in the order of its codes, or, if `whole` is not 0, to
// each channel. Codes with u < rate become 0 and so do their errors; other errors are multiplied by factor. The numbers of
// image i, n of them, are those of blocks i * ceil(n/4) and on of Philox4x32-10 with counter (block, c1, c2, c3) and key
// (k0, k1), as fedmpq_philox_uniform makes them.
FEDMPQ_API int32_t fedmpq_drop(const FedmpqCodes* codes, const FedmpqExtent* extent, int32_t whole, float rate, uint32_t c1,
                               uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, int32_t threads, uint8_t* out);
FEDMPQ_API int32_t fedmpq_drop_errors(const FedmpqExtent* extent, int32_t whole, float rate, float factor, uint32_t c1,
                                      uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, int32_t threads, uint16_t* error);

// error of the input (+)= scale * sum of error * weight
FEDMPQ_API int32_t fedmpq_conv_backward_input(const FedmpqConv* conv, const int8_t* errors, const int8_t* weights,
                                              uint32_t bits, float scale, int32_t add, int32_t threads, uint16_t* out);

// gradient[o] = scale[o] * sum of error * code
FEDMPQ_API int32_t fedmpq_conv_backward_weights(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* errors,
                                                const float* scale, int32_t threads, float* gradient);

// The codes of accumulators, stored as code - low.
FEDMPQ_API int32_t fedmpq_requantize(const int32_t* acc, const FedmpqExtent* extent, const FedmpqRescale* rescale,
                                     int32_t pairs, int32_t threads, uint8_t* out);

// With g as above: out = gain * (g - mean_g - (acc * norm + bias) * mean_gx), which may be where error is;
// greatest[image] = the greatest magnitude
FEDMPQ_API int32_t fedmpq_backward_error(const int32_t* acc, const uint16_t* error, const FedmpqExtent* extent,
                                         const FedmpqRescale* rescale, const FedmpqNormalize* normalize,
                                         const float* gain, const float* mean_g, const float* mean_gx, int32_t threads,
                                         uint16_t* out, float* greatest);

// The same as fedmpq_conv_forward with fedmpq_requantize or fedmpq_backward_error of what it gives, which is nowhere stored.
// Pairs of codes have rows of whole bytes, unless there is but one.
FEDMPQ_API int32_t fedmpq_conv_requantize(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights,
                                          uint32_t bits, const FedmpqRescale* rescale, int32_t pairs, int32_t threads,
                                          uint8_t* out);
FEDMPQ_API int32_t fedmpq_conv_backward_error(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* weights,
                                              uint32_t bits, const uint16_t* error, const FedmpqRescale* rescale,
                                              const FedmpqNormalize* normalize, const float* gain, const float* mean_g,
                                              const float* mean_gx, int32_t threads, uint16_t* out, float* greatest);

// How accumulators become codes, by channel. s = scale * source is what an accumulator stands for, mean and var are the
// accumulators' over the batch, from sums[0] of them and sums[1] of their squares, `count` of each:
//   r = 1/sqrt(s^2 var + eps), norm = s r, bias = -mean s r, gain = gamma r unit, all in double precision, rounded once
//   t_scale = gamma norm / target, t_shift = (gamma bias + beta) / target
// statistics[mean_at + o] = mean s + offset, statistics[variance_at + o] = s^2 var count/(count - 1). Without gamma:
// t_scale = s / target, t_shift = offset / target, and nothing else is read or written. The offset may be null.
typedef struct {
  int32_t channels;
  int64_t count;
  double eps;
  const float *scale, *offset, *gamma, *beta, *unit;
  const double* sums;
  double* statistics;
  int64_t mean_at, variance_at;
  float *t_scale, *t_shift, *norm, *bias, *gain;
} FedmpqChannelMap;

// Returns 0, a status, or -3 if t_scale or t_shift is not finite.
FEDMPQ_API int32_t fedmpq_map_channels(const FedmpqChannelMap* map, float source, float target);

// The gradients of side tensors from the sums that fedmpq_conv_backward_sums gives: shift = sums[0], scale = sums[1], if they
// are not null; *clip = the sum of sums[2] over the channels, less that of sums[3] if `below` is not 0, each rounded once.
// mean_g = sums[0]/count and mean_gx = sums[1]/count, or 0 if count is 0. Returns 0, a status, or -3 if a sum is not finite.
FEDMPQ_API int32_t fedmpq_side_gradients(const double* sums, int32_t channels, int64_t count, int32_t below, float* clip,
                                         float* shift, float* scale, float* mean_g, float* mean_gx);

// How errors of at most the greatest of `greatest` become 8-bit numbers: numbers[0] = that/127, numbers[1] = its inverse, 0
// where that would be of a denormal number; scales[o] = numbers[0] * source / weight_scale[o]. Returns 0, a status, or -3
// if the greatest is not finite.
FEDMPQ_API int32_t fedmpq_error_scales(const float* greatest, int32_t images, float source, const float* weight_scale,
                                       int32_t channels, float* numbers, float* scales);

// floor(clamp(error * inverse + u, -127, 127.5) + 128) - 128 in float32 (the shift may round away what is under 2^-17 below
// a whole number), u = (random byte + 1/2)/256. The bytes of image i are those of blocks
// i * ceil(count/16) and on of Philox4x32-10 with counter (block, c1, c2, c3) and key (k0, k1), least byte first; there are
// 2^32 blocks.
FEDMPQ_API int32_t fedmpq_quantize_error(const uint16_t* error, int32_t images, int64_t count, float inverse, uint32_t c1,
                                         uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, int32_t threads, int8_t* out);

// code = clamp(rint((left * left_scale + right * right_scale) / step), low, high) and, in two bits each, where it fell:
// 0 inside, 1 above, 2 below. Element i of an image's n has bits 2 * (i / q) and up of byte i % q, q = ceil(n/4). Returns 0, a
// status, or -3 if a scale in steps is not finite.
FEDMPQ_API int32_t fedmpq_add(const FedmpqCodes* left, float left_scale, const FedmpqCodes* right, float right_scale,
                              int32_t images, int64_t count, float step, float low, float high, int32_t pairs,
                              int32_t threads, uint8_t* out, uint8_t* states);

// *clip = the gradient of a clip from what was clipped above it, clipped[0], less, if `below` is not 0, what was clipped below.
FEDMPQ_API int32_t fedmpq_clip_gradient(const double* clipped, int32_t below, float* clip);

// Zeroes errors that fell outside; clipped[0] = sum of those above, clipped[1] = below.
FEDMPQ_API int32_t fedmpq_pass_error(const uint8_t* states, int32_t images, int64_t count, int32_t threads, uint16_t* error,
                                     double* clipped);

// code = table[stored code], a table of 256 stored codes.
FEDMPQ_API int32_t fedmpq_lookup(const FedmpqCodes* codes, int32_t images, int64_t count, const uint8_t* table,
                                 int32_t pairs, int32_t threads, uint8_t* out);

// By stored code, 256 of each: error <- error * slope where the state is 0, else 0; clipped[0] = the sum of errors whose state
// is 1 (above), clipped[1] of those whose state is 2 (below).
FEDMPQ_API int32_t fedmpq_lookup_backward(const FedmpqCodes* codes, int32_t images, int64_t count, const float* slopes,
                                          const uint8_t* states, int32_t threads, uint16_t* error, double* clipped);

// t = left * right * multiplier, code = clamp(rint(t), low, high), stored as code - low. With `spread`, right has one code
// for each channel of an image, otherwise one for each element.
FEDMPQ_API int32_t fedmpq_multiply(const FedmpqCodes* left, const FedmpqCodes* right, const FedmpqExtent* extent,
                                   int32_t spread, float multiplier, float low, float high, int32_t pairs,
                                   int32_t threads, uint8_t* out);

// With g = error where low < t < high, else 0: left_error = g * right * right_scale, which may be where error is;
// right_error = g * left * left_scale, with `spread` its sum over the pixels; clipped[0] = sum of errors with t >= high,
// clipped[1] with t <= low.
FEDMPQ_API int32_t fedmpq_multiply_backward(const FedmpqCodes* left, const FedmpqCodes* right,
                                            const FedmpqExtent* extent, int32_t spread, float multiplier, float low,
                                            float high, float left_scale, float right_scale, const uint16_t* error,
                                            int32_t threads, uint16_t* left_error, uint16_t* right_error,
                                            double* clipped);

// error <- error + other
FEDMPQ_API int32_t fedmpq_add_errors(const uint16_t* other, int64_t count, uint16_t* error);

// The greatest code under each window, stored as the codes are.
FEDMPQ_API int32_t fedmpq_max_pool(const FedmpqPool* pool, const FedmpqCodes* codes, int32_t threads, uint8_t* out);
// The first of the greatest under a window takes the error.
FEDMPQ_API int32_t fedmpq_max_pool_backward(const FedmpqPool* pool, const FedmpqCodes* codes, const uint16_t* error,
                                            int32_t threads, uint16_t* out);

// code = clamp(rint(sum of codes * multiplier), low, high), stored as bytes code - low; a multiplier for each output pixel
FEDMPQ_API int32_t fedmpq_average_pool(const FedmpqPool* pool, const FedmpqCodes* codes, const float* multipliers, float low,
                                       float high, int32_t threads, uint8_t* out);
// Every element under a window takes `share` of its error; a share for each output pixel.
FEDMPQ_API int32_t fedmpq_average_pool_backward(const FedmpqPool* pool, const uint16_t* error, const float* shares,
                                                int32_t threads, uint16_t* out);

// code = clamp(rint(code * multiplier), low, high), stored as bytes code - low: the channels `start` and on of pixels that
// have `channels` in all. The extent is that of what is joined.
FEDMPQ_API int32_t fedmpq_join(const FedmpqCodes* codes, const FedmpqExtent* extent, float multiplier, float low, float high,
                               int32_t start, int32_t channels, int32_t threads, uint8_t* out);
// The errors of what was joined: channels `start` and on of the error, whose pixels have `channels`.
FEDMPQ_API int32_t fedmpq_part_errors(const uint16_t* error, const FedmpqExtent* extent, int32_t start, int32_t channels,
                                      int32_t threads, uint16_t* out);

// Element i of an image's `outs` is element from[i] of its `count`, or code 0 where from[i] is -1; stored as the codes are.
FEDMPQ_API int32_t fedmpq_rearrange(const FedmpqCodes* codes, int32_t images, int64_t count, const int32_t* from,
                                    int64_t outs, int32_t threads, uint8_t* out);
// Each element takes the sum of the errors of those that came from it.
FEDMPQ_API int32_t fedmpq_rearrange_backward(const uint16_t* error, int32_t images, int64_t count, const int32_t* from,
                                             int64_t outs, int32_t threads, uint16_t* out);

// Logits (acc * scale + bias) + shift: gradient = (softmax - one hot)/samples, *loss = mean cross-entropy, of at least one
// sample. Returns how many are right, or a status.
FEDMPQ_API int32_t fedmpq_softmax_loss(const int32_t* acc, int32_t samples, int32_t classes, const float* scale,
                                       const float* bias, const float* shift, const int64_t* labels, float* gradient,
                                       double* loss);

// Logits acc * scale + bias of labels that are each there (target 1) or not (0): gradient = (sigmoid - target)/(samples *
// outputs), *loss = mean over both of -log of what the sigmoid gives the target. Returns how many labels are right, those
// with a logit above 0 being said to be there, or a status.
FEDMPQ_API int32_t fedmpq_sigmoid_loss(const int32_t* acc, int32_t samples, int32_t outputs, const float* scale,
                                       const float* bias, const float* targets, float* gradient, double* loss);
// Values acc * scale + bias: gradient = 2 (value - target)/(samples * outputs), *loss = mean over both of the squared
// difference. Returns 0 or a status.
FEDMPQ_API int32_t fedmpq_squared_loss(const int32_t* acc, int32_t samples, int32_t outputs, const float* scale,
                                       const float* bias, const float* targets, float* gradient, double* loss);

// error = real * gain, *greatest = the greatest magnitude
FEDMPQ_API int32_t fedmpq_halve_errors(const float* real, int64_t rows, int32_t channels, const float* gain, uint16_t* error,
                                       float* greatest);

// One update of a layer's codes (training/update.py states the formulas). `rate` and `step` have one element per output
// channel of `row` weights each, or one in all (row == count). The uniform numbers of the move are those of
// fedmpq_philox_uniform with (step_number, round, layer * 16 + 0) and key (seed, client), those of the Lasso's move with + 1.
typedef struct {
  int32_t bits;
  int64_t count, row;
  const float *step, *rate;
  float weight_decay, momentum;
  int32_t momentum_bits;     // 0, 8 or 32
  void* momentum_codes;      // float[count], or int8[ceil(count/128) * 128]
  float* momentum_scales;    // float[ceil(count/128)] if 8 bits
  int8_t* fractions;         // the carried rule: int8[count], 256ths of a code beside each; null: the paper's rule
  const float* pull;         // the paper's Lasso: codes towards zero for each of 2^(bits-1) magnitudes, or null
  uint32_t round, layer, seed, client;
} FedmpqUpdate;

// Returns 0, a status, or -3 if the gradient holds NaN or infinity (the codes are then untouched) or its sum with the momentum is
// infinite (they then hold no meaning).
FEDMPQ_API int32_t fedmpq_update_codes(const FedmpqUpdate* update, uint32_t step_number, int32_t threads,
                                       const float* gradient, uint8_t* codes);

#ifdef __cplusplus
}
#endif

#endif
