// Memory for the training kernels. No exceptions here, so it says itself when there is none.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace fedmpq {

// An array that lives for one call; it starts on a cache line, as no vector that is read from it shall lie on two.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(std::aligned_alloc(line, (static_cast<size_t>(count) * sizeof(T) / line + 1) * line))) {}
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr size_t line = 64;
  T* data_;
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
