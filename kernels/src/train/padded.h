// Images in the form that products read: channels of one group, with their padding, as bytes.
#pragma once

#include "bounds.h"
#include "fedmpq/training.h"
#include "ops.h"

namespace fedmpq {

constexpr int slack = 64;  // bytes that a tile's last quad or a last vector may read beyond an image

inline int up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// One image: where its bytes come from and what they mean.
struct Source {
  const uint8_t* data;
  bool pairs;    // two 4-bit codes a byte
  int64_t bytes;  // of one image
  uint8_t flip;  // what every byte is xored with: 128 turns codes into signed bytes and errors into unsigned ones
};

// The padded copy of one group's channels of an image, and the sums of products over it.
struct Layout {
  int height, width, channels;       // of the source
  int padded_height, padded_width;   // of the copy
  int top, left, spread_h, spread_w; // source pixel (y, x) goes to (top + y * spread_h, left + x * spread_w)
  int group_channels, depth;         // channels a group has; those of the copy, `depth_of` them
  uint8_t fill;
  int64_t size() const { return int64_t{padded_height} * padded_width * depth + slack; }
  // Whether 32 bits hold the copy's offsets. Both sides are at most three times the longest side of an image.
  bool is_small() const { return int64_t{padded_height} * padded_width <= most_copy && size() <= most_copy; }
};

// Bytes of a pixel in the copy. Where a tile reads each pixel by itself, they are whole quads.
inline int depth_of(int group_channels, bool joined) { return joined ? group_channels : up(group_channels, 4); }

inline Source source_of(const uint8_t* data, bool pairs, int64_t count, uint8_t flip) {
  return {data, pairs, pairs ? (count + 1) / 2 : count, flip};
}

inline bool is_depthwise(const FedmpqConv& c) { return c.groups == c.channels && c.out_channels == c.channels; }

// A convolution of single pixels with a few images side by side as one row, so that small images fill the tiles too; any
// other one as it is. As many at a time as divide the batch and leave something for each thread.
FedmpqConv side_by_side(const FedmpqConv& c, bool pairs, int threads);

// The copy under a convolution's windows.
Layout forward_layout(const FedmpqConv& c, uint8_t fill);

// One image's bytes, in `scratch` unless they are there as they are.
const uint8_t* bytes_of(const Source& source, int image, int64_t count, uint8_t* scratch);

// Asks for an image's bytes before its turn comes: they arrive while the products of the one before are computed.
void fetch_ahead(const Source& source, int image);

// The padded copy of one group of an image.
void pad(const Layout& layout, const Source& source, int image, int group, uint8_t* scratch, uint8_t* out);

}  // namespace fedmpq
