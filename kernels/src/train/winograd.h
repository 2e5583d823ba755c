// Two neighbouring outputs of a row together, by Winograd's F(2, 3): four products where there were six.
//
// With codes d0..d3 side by side under the outputs and weights g0..g2 of a kernel's row:
//   v = (d0 - d2, d1 + d2, d2 - d1, d1 - d3)         u = (g0, g0 + g1 + g2, g0 - g1 + g2, g2)
//   m[k] = sum over inputs and the kernel's rows of v[k] * u[k]
//   out[2x] = m[0] + (m[1] + m[2]) / 2               out[2x + 1] = (m[1] - m[2]) / 2 - m[3]
// Both halves are of even numbers, so all of it is exact. A byte holds v of 4-bit codes, and u of weights of up to 5 bits, or
// of greater ones that happen to fit. The four products are like those of tiles: the pairs of outputs are their rows, and
// those of a whole image are equally far apart.
#pragma once

#include "correlate.h"

namespace fedmpq {

class Winograd {
 public:
  // From weights as tiles read them. Not used where it cannot be or would save nothing, or if something else is faster still.
  Winograd(const FedmpqConv& c, const Layout& layout, const int8_t* packed, const Source& source, bool wanted);
  bool used() const { return used_; }
  explicit operator bool() const { return !used_ || (packed_ && segments_ && start_); }

  // Bytes of an image's v.
  int64_t room() const { return used_ ? rows_ * row() : 0; }
  // What the outputs of a piece read.
  void turn(const uint8_t* padded, const Rows& piece, uint8_t* turned) const;

  // The sums of output rows from y on, out_width x 16*blocks each.
  void multiply(const uint8_t* turned, int y, int rows, int32_t* sums) const;

 private:
  static constexpr int parts = 4;    // of v and u
  static constexpr int offset = 15;  // in every v, which makes it unsigned
  static constexpr int greatest = 3 * offset;

  int64_t row() const { return int64_t{pairs_} * parts * depth_; }
  bool pack(const int8_t* weights);  // whether bytes hold them

  bool used_;
  int depth_, pairs_;  // bytes of a pixel; pairs of outputs in a row
  int64_t rows_;       // of the padded copy
  Product product_;    // one of the four
  Buffer<int8_t> packed_;
  Buffer<int32_t> segments_;
  Start start_;
};

// Some rows of the output a band at a time, as `correlate` of tiles has them.
template <class Target, class Done>
void correlate(const Winograd& winograd, const Product& product, const uint8_t* turned, const Rows& piece, Target target,
               Done done) {
  for (int y = piece.first; y < piece.last; y += product.band()) {
    const int rows = piece.last - y < product.band() ? piece.last - y : product.band();
    int32_t* sums = target(y);
    winograd.multiply(turned, y, rows, sums);
    done(y, rows, sums);
  }
}

}  // namespace fedmpq
