// Memory for the training kernels. No exceptions here, so it says itself when there is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace fedmpq {

constexpr size_t cache_line = 64;

// Room for a few elements, such as a layer has for each tap or tile, where whoever needs them lies itself: a step on one image
// would take longer to allocate them than to fill them.
struct Few {
#ifdef FEDMPQ_SANITIZED
  static constexpr size_t bytes = 0;  // all that is used is watched
#else
  static constexpr size_t bytes = 2 * cache_line;
#endif
  unsigned char room[bytes + cache_line];
};

// Memory that starts on a cache line and has more than so many bytes, in `few` if it has them; null if there is none.
void* memory_of(size_t bytes, Few& few);
void release(void* memory, const Few& few);

// An array that lives for one call; it starts on a cache line, as no vector that is read from it shall lie on two.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(memory_of(static_cast<size_t>(count) * sizeof(T), few_))) {}
  ~Buffer() { release(data_, few_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  T* data_;
  mutable Few few_;
};

// A number of sums for each image, and their totals in the order of the images, whichever thread made them.
template <class T>
class InOrder {
 public:
  InOrder(int images, int64_t count)
      : images_(images),
        count_(count),
        parts_(static_cast<T*>(std::calloc(static_cast<size_t>(images * count + 1), sizeof(T)))) {}
  ~InOrder() { std::free(parts_); }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
  explicit operator bool() const { return parts_ != nullptr; }
  T* operator[](int image) const { return parts_ + image * count_; }
  void total(double* sums) const {
    for (int64_t i = 0; i < count_; ++i) sums[i] = 0.0;
    for (int image = 0; image < images_; ++image)
      for (int64_t i = 0; i < count_; ++i) sums[i] += static_cast<double>((*this)[image][i]);
  }

 private:
  int images_;
  int64_t count_;
  T* parts_;
};

}  // namespace fedmpq
