// A decoded photo at a model's size, to the bit as training resizes it (fedmpq.data.photo).
//
// Half the size is the mean of 2x2 pixels, (a + b + c + d + 2) >> 2. Any other size is the mean of the pixels
// whose centres lie in the area of the new one, along rows first and then along columns, each time with
// weights rounded to 22 places after the binary point and the sum rounded to a byte.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fedmpq {

/// Rows of pixels, `channels` bytes each: red, green and blue, or grey.
struct Image {
  int height = 0;
  int width = 0;
  int channels = 0;
  std::vector<uint8_t> bytes;

  Image(int height_, int width_, int channels_)
      : height(height_), width(width_), channels(channels_),
        bytes(static_cast<size_t>(height_) * width_ * channels_) {}

  uint8_t& at(int row, int column, int channel) {
    return bytes[(static_cast<size_t>(row) * width + column) * channels + channel];
  }
  uint8_t at(int row, int column, int channel) const {
    return bytes[(static_cast<size_t>(row) * width + column) * channels + channel];
  }
};

/// The pixels [first, first + count) that make a new one, and what each counts, in 2^-22.
struct Area {
  int first;
  std::vector<int32_t> weights;
};

constexpr int kPlaces = 22;

/// The areas of `to` new pixels along a line of `from`.
inline std::vector<Area> areas(int from, int to) {
  const double scale = static_cast<double>(from) / to;
  const double half = 0.5 * std::max(scale, 1.0);
  std::vector<Area> found;
  for (int place = 0; place < to; ++place) {
    const double centre = (place + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(centre - half + 0.5));
    const int last = std::min(from, static_cast<int>(centre + half + 0.5));
    std::vector<bool> within;
    int count = 0;
    for (int pixel = first; pixel < last; ++pixel) {
      const double distance = (pixel - centre + 0.5) * (1.0 / std::max(scale, 1.0));
      within.push_back(distance > -0.5 && distance <= 0.5);
      count += within.back();
    }
    Area area{first, {}};
    for (bool counts : within)
      area.weights.push_back(counts ? static_cast<int32_t>(0.5 + 1.0 / count * (1 << kPlaces)) : 0);
    found.push_back(area);
  }
  return found;
}

inline uint8_t rounded(int64_t sum) {
  return static_cast<uint8_t>(std::clamp<int64_t>((sum + (1 << (kPlaces - 1))) >> kPlaces, 0, 255));
}

inline Image with_width(const Image& image, int width) {
  if (image.width == width) return image;
  const std::vector<Area> parts = areas(image.width, width);
  Image out(image.height, width, image.channels);
  for (int row = 0; row < out.height; ++row)
    for (int column = 0; column < width; ++column)
      for (int channel = 0; channel < out.channels; ++channel) {
        int64_t sum = 0;
        for (size_t i = 0; i < parts[column].weights.size(); ++i)
          sum += int64_t{parts[column].weights[i]} *
                 image.at(row, parts[column].first + static_cast<int>(i), channel);
        out.at(row, column, channel) = rounded(sum);
      }
  return out;
}

inline Image transposed(const Image& image) {
  Image out(image.width, image.height, image.channels);
  for (int row = 0; row < out.height; ++row)
    for (int column = 0; column < out.width; ++column)
      for (int channel = 0; channel < out.channels; ++channel)
        out.at(row, column, channel) = image.at(column, row, channel);
  return out;
}

inline Image halved(const Image& image) {
  Image out(image.height / 2, image.width / 2, image.channels);
  for (int row = 0; row < out.height; ++row)
    for (int column = 0; column < out.width; ++column)
      for (int channel = 0; channel < out.channels; ++channel)
        out.at(row, column, channel) = static_cast<uint8_t>(
            (image.at(2 * row, 2 * column, channel) + image.at(2 * row, 2 * column + 1, channel) +
             image.at(2 * row + 1, 2 * column, channel) + image.at(2 * row + 1, 2 * column + 1, channel) + 2) >>
            2);
  return out;
}

/// The photo at the model's size.
inline Image resized(const Image& image, int height, int width) {
  if (image.height == 2 * height && image.width == 2 * width) return halved(image);
  return transposed(with_width(transposed(with_width(image, width)), height));
}

/// Colours as grey: (19595 R + 38470 G + 7471 B + 32768) >> 16. Do it before resizing.
inline Image grey(const Image& colours) {
  Image out(colours.height, colours.width, 1);
  for (size_t pixel = 0; pixel < out.bytes.size(); ++pixel) {
    const uint8_t* rgb = &colours.bytes[3 * pixel];
    out.bytes[pixel] = static_cast<uint8_t>((19595 * rgb[0] + 38470 * rgb[1] + 7471 * rgb[2] + 32768) >> 16);
  }
  return out;
}

}  // namespace fedmpq
