// One element at a time: stored codes as bytes, rounding, and errors to and from bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#include "fedmpq/training.h"
#include "ops.h"

namespace fedmpq {

// The codes of one image, a byte each: where they lie, or unpacked into `scratch`, which holds `count` bytes.
inline const uint8_t* as_bytes(const FedmpqCodes& codes, int image, int64_t count, uint8_t* scratch) {
  if (codes.pairs == 0) return codes.data + image * count;
  ops().unpack(codes.data + image * ((count + 1) / 2), count, scratch);
  return scratch;
}

inline float clamped(float value, float low, float high) {
  const float raised = value < low ? low : value;
  return raised > high ? high : raised;
}

// To the nearest whole number, half to even, of magnitudes below 2^22.
inline float rounded(float value) { return (value + 12582912.0f) - 12582912.0f; }

inline float widened(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t halved(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace fedmpq
