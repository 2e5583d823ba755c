#include "winograd.h"

#include <atomic>
#include <cstring>

#include "fedmpq/training.h"
#include "shuffle.h"

namespace fedmpq {
namespace {

std::atomic<int> forced{-1};

// The most bytes of v, which has twice as many as an image's copy: each is read three times, from the second cache.
constexpr int64_t most_bytes = int64_t{1} << 20;

// Few inputs make short products, and what is done before and after them takes what they save; few outputs do not make up for
// what is done to the weights.
bool is_wanted(const FedmpqConv& c) {
  const int asked = forced.load(std::memory_order_relaxed);
  const int least = ops().pair_channels;
  const bool pays = least > 0 && c.channels >= least && int64_t{c.images} * c.out_height * c.out_width >= 512;
  return asked < 0 ? pays : asked > 0;
}

// u of `count` weights of each of three neighbouring taps, which lie one run behind the other. Whether bytes hold it.
bool turn_weights(const int8_t* __restrict g, int64_t count, int8_t* __restrict more, int8_t* __restrict less) {
  int lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int outer = g[i] + g[i + 2 * count], sum = outer + g[i + count], difference = outer - g[i + count];
    more[i] = static_cast<int8_t>(sum);
    less[i] = static_cast<int8_t>(difference);
    lost |= (sum ^ more[i]) | (difference ^ less[i]);
  }
  return lost == 0;
}

bool is_possible(const FedmpqConv& c, const Layout& layout, const Source& source) {
  const bool plain = c.groups == 1 && c.stride_h * c.stride_w == 1 && c.dilation_h * c.dilation_w == 1;
  return plain && source.pairs && layout.fill == 0 && c.kernel_w == 3 && c.out_width % 2 == 0 && c.channels % lanes == 0;
}

// v of one row for 16 channels: of each pair of outputs four runs, `depth` bytes apart.
void turn_row(const uint8_t* from, int pairs, int depth, uint8_t offset, uint8_t* to) {
  using shuffle::V16;
  V16 d0 = shuffle::load(from), d1 = shuffle::load(from + depth);
  for (int x = 0; x < pairs; ++x, to += 4 * depth) {
    from += 2 * depth;
    const V16 d2 = shuffle::load(from), d3 = shuffle::load(from + depth);
    const V16 middle = d2 + offset, v[4] = {d0 + offset - d2, middle + d1, middle - d1, d1 + offset - d3};
    for (int k = 0; k < 4; ++k) std::memcpy(to + k * depth, &v[k], sizeof(V16));
    d0 = d2, d1 = d3;
  }
}

}  // namespace

Winograd::Winograd(const FedmpqConv& c, const Layout& layout, const int8_t* packed, const Source& source, bool wanted)
    : used_(wanted && is_wanted(c) && is_possible(c, layout, source) && 2 * layout.size() <= most_bytes &&
            sums_fit(int64_t{c.kernel_h} * c.channels, 2 * greatest, 128)),
      depth_(layout.depth),
      pairs_(c.out_width / 2),
      rows_(layout.padded_height),
      product_{c.kernel_h, 1, 1, 1, 1, 1, c.out_height, pairs_, c.out_channels},
      packed_(used_ ? parts * product_.packed_size(depth_) : 0),
      segments_(c.kernel_h),
      start_(product_, depth_, parts, packed_.data(), used_ && packed_ && pack(packed) ? offset : 0) {
  for (int r = 0; r < c.kernel_h && segments_; ++r) segments_.data()[r] = static_cast<int32_t>(r * row());
}

bool Winograd::pack(const int8_t* weights) {
  const int64_t run = int64_t{depth_} * lanes, runs = int64_t{product_.blocks()} * product_.kernel_h, all = runs * run;
  int8_t* to = packed_.data();
  for (int64_t i = 0; i < runs && used_; ++i, weights += 3 * run, to += run) {
    used_ = turn_weights(weights, run, to + all, to + 2 * all);
    std::memcpy(to, weights, static_cast<size_t>(run));
    std::memcpy(to + 3 * all, weights + 2 * run, static_cast<size_t>(run));
  }
  return used_;
}

void Winograd::turn(const uint8_t* padded, const Rows& piece, uint8_t* turned) const {
  const int64_t line = (2 * int64_t{pairs_} + 2) * depth_;
  for (int64_t y = piece.first; y < piece.last + product_.kernel_h - 1; ++y)
    for (int c = 0; c < depth_; c += lanes)
      turn_row(padded + y * line + c, pairs_, depth_, offset, turned + y * row() + c);
}

void Winograd::multiply(const uint8_t* turned, int y, int rows, int32_t* sums) const {
  const int blocks = product_.blocks(), taps = product_.kernel_h, all = rows * pairs_;
  const ptrdiff_t block = ptrdiff_t{taps} * depth_ * lanes, pixel = ptrdiff_t{blocks} * lanes;
  PairTile tile{nullptr, depth_, 0, segments_.data(), taps, nullptr, product_.packed_size(depth_), block, 0, nullptr, pixel,
                nullptr, pixel, products_that_fit(2, greatest, 128)};
  for (int b = 0; b < blocks; b += 2) {
    tile.w = packed_.data() + b * block;
    tile.blocks = blocks - b < 2 ? 1 : 2;
    tile.start = start_.of(0) + b * lanes;
    for (int x = 0; x < all; x += max_rows) {
      tile.a = turned + y * row() + int64_t{x} * parts * depth_;
      tile.pairs = all - x < max_rows ? all - x : max_rows;
      tile.out = sums + 2 * x * pixel + b * lanes;
      ops().pair_tile(tile);
    }
  }
}

}  // namespace fedmpq

void fedmpq_force_winograd(int32_t how) { fedmpq::forced.store(how, std::memory_order_relaxed); }
