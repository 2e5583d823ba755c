// A layer's weights as a caller has them.
#pragma once

#include <cstdint>

namespace fedmpq {

// Bytes that are the weights, or, with `bits`, the codes of so many bits that stand for them (training.h).
struct Stored {
  const int8_t* data;
  uint32_t bits;

  Stored from(int64_t first) const { return {data + first, bits}; }
  // What bytes are added to themselves under, and what is then taken off; modulo 256.
  uint8_t twice() const { return bits > 0 && bits < 8 ? 255 : 0; }
  uint8_t zero() const { return static_cast<uint8_t>(bits == 0 ? 0 : (bits < 8 ? (1 << bits) - 1 : 128)); }
  // The weights that stand in one byte or in each byte of a vector.
  template <class Bytes>
  Bytes weights(Bytes bytes) const {
    return static_cast<Bytes>(bytes + (bytes & twice()) - zero());
  }
  int8_t operator[](int64_t i) const { return static_cast<int8_t>(weights(static_cast<uint8_t>(data[i]))); }
};

}  // namespace fedmpq
