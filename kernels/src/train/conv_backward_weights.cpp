// Gradients of a convolution's weights: the images channel by channel; a tile's rows are input channels, its segments image
// rows, and what it reads as weights are the errors, four neighbouring pixels together.
#include <atomic>
#include <cstring>
#include <new>

#include "buffer.h"
#include "correlate.h"
#include "fedmpq/training.h"
#include "shuffle.h"

namespace fedmpq {
namespace {

// Codes of a few images channel by channel, columns of one phase of the stride side by side:
// plane[phase][channel][image][y][x].
struct Planes {
  int phases, images, rows, row, channels;  // row: bytes of one row of one plane
  int64_t image() const { return int64_t{rows} * row; }
  int64_t plane() const { return images * image(); }
  int64_t size() const { return int64_t{phases} * channels * plane() + slack; }
};

// The columns of an image that belong to one phase: from the first on, every stride-th; `count` of them go to `to` and on.
struct Columns {
  int first, to, count;
  Columns(const FedmpqConv& c, const Planes& planes, int phase)
      // Columns x with (x + pad) % stride == phase go to (x + pad) / stride.
      : first((phase - c.pad_w % c.stride_w + c.stride_w) % c.stride_w),
        to((first + c.pad_w) / c.stride_w),
        count(first < c.width ? (c.width - 1 - first) / c.stride_w + 1 : 0) {
    if (count > planes.row - to) count = planes.row - to;
  }
};

// One row of one phase, pixels `step` bytes apart, to the planes of its channels.
void to_lines(const uint8_t* from, int64_t step, int columns, int channels, uint8_t* line, int64_t plane) {
  for (int channel = 0; channel < channels && channels < lanes; ++channel)
    for (int x = 0; x < columns; ++x) line[channel * plane + x] = from[x * step + channel];
  for (int channel = 0; channel < channels && channels >= lanes; channel += lanes) {
    // The last ones, if they are fewer, again together with those before them.
    const int own = channel + lanes <= channels ? channel : channels - lanes;
    for (int x = 0; x < columns; x += lanes)
      shuffle::transpose(from + x * step + own, step, columns - x < lanes ? columns - x : lanes,
                         line + own * plane + x, plane);
  }
}

// The planes' part of one image, which starts at `out`.
void to_planes(const FedmpqConv& c, const Planes& planes, const uint8_t* bytes, int first_channel, uint8_t* out) {
  const int rows = c.height < planes.rows - c.pad_h ? c.height : planes.rows - c.pad_h;
  for (int phase = 0; phase < planes.phases; ++phase) {
    const Columns columns(c, planes, phase);
    const uint8_t* from = bytes + int64_t{columns.first} * c.channels + first_channel;
    uint8_t* line = out + int64_t{phase} * planes.channels * planes.plane() + int64_t{c.pad_h} * planes.row + columns.to;
    for (int y = 0; y < rows; ++y, from += int64_t{c.width} * c.channels, line += planes.row)
      to_lines(from, int64_t{c.stride_w} * c.channels, columns.count, planes.channels, line, planes.plane());
  }
}

// Up to four pixels' errors of up to 16 outputs beside each other. What lies beyond the real ones is left alone.
void to_quad(const int8_t* pixel, int64_t stride, int pixels, int outputs, int8_t* to) {
  for (int i = 0; i < pixels; ++i)
    for (int o = 0; o < outputs; ++o) to[4 * o + i] = pixel[i * stride + o];
}

// Errors of one image as a tile reads weights: quads[block][y][x / 4][lane][x % 4], blocks `block` bytes apart. Lanes
// beyond the real outputs may hold anything: nobody reads their sums. No byte is read from `end` on.
void to_quads(const FedmpqConv& c, const int8_t* errors, int outputs, int64_t block, const int8_t* end, int8_t* out) {
  const int64_t stride = c.out_channels;
  for (int o = 0; o < outputs; o += lanes, out += block) {
    const int own = outputs - o < lanes ? outputs - o : lanes;
    const int8_t* pixel = errors + o;
    int8_t* to = out;
    for (int y = 0; y < c.out_height; ++y)
      for (int x = 0; x < c.out_width; x += 4, to += lanes * 4) {
        const int pixels = c.out_width - x < 4 ? c.out_width - x : 4;
        if (pixels == 4 && (own == lanes || end - pixel >= 3 * stride + lanes))
          shuffle::interleave(reinterpret_cast<const uint8_t*>(pixel), stride, reinterpret_cast<uint8_t*>(to));
        else
          to_quad(pixel, stride, pixels, own, to);
        pixel += pixels * stride;
      }
  }
}

// sums[l] += the errors of 16 outputs over the pixels, of which there are so few that 16 bits hold their sums.
void sum_lanes(const int8_t* errors, int64_t stride, int64_t pixels, int64_t* sums) {
  using shuffle::V16, shuffle::S8;
  S8 part[2] = {};
  for (int64_t p = 0; p < pixels; ++p, errors += stride) {
    const V16 bytes = shuffle::load(reinterpret_cast<const uint8_t*>(errors));
    // A byte twice is a 16-bit number of which the upper half is the error.
    part[0] += reinterpret_cast<S8>(shuffle::low(bytes, bytes)) >> 8;
    part[1] += reinterpret_cast<S8>(shuffle::high(bytes, bytes)) >> 8;
  }
  for (int l = 0; l < lanes; ++l) sums[l] += part[l / 8][l % 8];
}

// sums[o] += the errors of each output over all pixels.
void sum_errors(const int8_t* errors, int64_t pixels, int channels, int64_t* sums) {
  constexpr int64_t few = 32767 / 128;
  const int whole = channels / lanes * lanes;
  for (int64_t first = 0; first < pixels; first += few)
    for (int o = 0; o < whole; o += lanes)
      sum_lanes(errors + first * channels + o, channels, pixels - first < few ? pixels - first : few, sums + o);
  for (int o = whole; o < channels; ++o)
    for (int64_t p = 0; p < pixels; ++p) sums[o] += errors[p * channels + o];
}

// What one thread gathers over its images: sums of as many of them as 32 bits hold, and of all if those are more. Until there
// are some, `part` holds nothing: with few images, zeros for all weights would take as long as their sums.
struct Gathered {
  Buffer<uint8_t> bytes, planes;
  Buffer<int8_t> quads;
  Buffer<int32_t> part;
  Buffer<int64_t> whole, errors;
  int64_t sums;
  bool empty = true, flushed = false;
  Gathered(int64_t raw, int64_t planar, int64_t quad, int64_t sum_count, int64_t outputs, bool more)
      : bytes(raw + slack), planes(planar), quads(quad), part(sum_count), whole(more ? sum_count : 0), errors(outputs),
        sums(sum_count) {
    if (!*this) return;
    if (more) std::memset(whole.data(), 0, static_cast<size_t>(sum_count) * sizeof(int64_t));
    std::memset(errors.data(), 0, static_cast<size_t>(outputs) * sizeof(int64_t));
  }
  explicit operator bool() const { return bytes && planes && quads && part && whole && errors; }
  void flush() {
    for (int64_t i = 0; i < sums; ++i) whole.data()[i] += part.data()[i];
    empty = flushed = true;
  }
  void clear() {
    std::memset(part.data(), 0, static_cast<size_t>(sums) * sizeof(int32_t));
    empty = false;
  }
  int64_t sum(int64_t i) const { return part.data()[i] + (flushed ? whole.data()[i] : 0); }
};

// The sums of one group, [tap][input][width], where gradients are [output][input][tap].
template <class Sum>
struct Sums {
  const Sum* data;
  int taps, inputs, width;
  // Those of all outputs for the weight at `place` of each output's.
  const Sum* at(int64_t place) const { return data + (place % taps * inputs + place / taps) * width; }
  int64_t places() const { return int64_t{inputs} * taps; }
};

// Gradients of the outputs from `first` up to `last` at the places from `place` on.
template <class Sum>
void write_places(const Sums<Sum>& sums, int64_t place, int first, int last, const int64_t* taken_off, const float* scale,
                  float* gradient) {
  for (; place < sums.places(); ++place) {
    const Sum* from = sums.at(place);
    float* to = gradient + place;
    for (int o = first; o < last; ++o) to[o * sums.places()] = static_cast<float>(from[o] - taken_off[o]) * scale[o];
  }
}

// The outputs of a block at four places at a time; how many places. 32 bits hold a sum less what is taken off, as that is
// the sum for codes whose zero is 0, which are no greater.
int64_t write_fours(const Sums<int32_t>& sums, int first, const int64_t* taken_off, const float* scale, float* gradient) {
  using shuffle::F4, shuffle::I4;
  constexpr int fours = lanes / 4;
  I4 off[fours];
  F4 scales[fours];
  for (int l = 0; l < lanes; ++l) off[l / 4][l % 4] = static_cast<int32_t>(taken_off[first + l]);
  std::memcpy(scales, scale + first, sizeof scales);
  int64_t place = 0;
  const int64_t row = sums.places();
  for (; place + 4 <= row; place += 4) {
    const int32_t* from[4];
    for (int i = 0; i < 4; ++i) from[i] = sums.at(place + i) + first;
#pragma GCC unroll 4
    for (int f = 0; f < fours; ++f) {
      F4 rows[4];
      for (int i = 0; i < 4; ++i) {
        I4 own;
        std::memcpy(&own, from[i] + 4 * f, sizeof own);
        rows[i] = __builtin_convertvector(own - off[f], F4) * scales[f];
      }
      shuffle::transpose(rows, gradient + (first + 4 * f) * row + place, row);
    }
  }
  return place;
}

int64_t write_fours(const Sums<int64_t>&, int, const int64_t*, const float*, float*) { return 0; }

// Gradients of the outputs from `begin` up to `end` from sums, a few at a time: they lie far apart.
template <class Sum>
void write_gradient(const Sums<Sum>& sums, int begin, int end, const int64_t* taken_off, const float* scale,
                    float* gradient) {
  for (int first = begin; first < end; first += lanes) {
    const int last = end - first < lanes ? end : first + lanes;
    const int64_t done = last - first == lanes ? write_fours(sums, first, taken_off, scale, gradient) : 0;
    write_places(sums, done, first, last, taken_off, scale, gradient);
  }
}

template <class Number>
Number at_least_one(Number value) {
  return value > 1 ? value : 1;
}

class WeightGradient {
 public:
  WeightGradient(const FedmpqConv& c, const uint8_t* codes, bool pairs, int zero, const int8_t* errors, int threads)
      : c_(c),
        errors_(errors),
        taps_(c.kernel_h * c.kernel_w),
        deep_(is_depthwise(c)),
        flip_(!deep_ && ops().signed_bytes && !pairs),
        zero_(flip_ ? zero - 128 : zero),
        source_(source_of(codes, pairs, int64_t{c.height} * c.width * c.channels, flip_ ? 128 : 0)),
        layout_(forward_layout(c, static_cast<uint8_t>(zero_))),
        inputs_(c.channels / c.groups),
        outputs_(c.out_channels / c.groups),
        quads_(up(c.out_width, 4) / 4),
        blocks_(up(outputs_, lanes) / lanes),
        threads_(threads),
        slots_(slots(c, deep_, threads)),
        fit_(products_that_fit(deep_ ? 1 : 2, pairs ? 15 : (flip_ ? 128 : 255), 127)),
        holds_(((int64_t{1} << 31) - 1) / at_least_one(int64_t{128} * (pairs ? 15 : 255) * c.out_height * c.out_width)),
        planes_(planes()),
        block_(int64_t{planes_.images} * c.out_height * quads_ * lanes * 4),
        rows_(int64_t{planes_.images} * c.out_height),
        at_(deep_ && small_enough(), layout_, c.kernel_h, c.kernel_w, c.dilation_h, c.dilation_w) {
    if (!rows_ || !small_enough()) return;
    for (int i = 0; i < planes_.images * c.out_height; ++i)
      rows_.data()[i] = (i / c.out_height * planes_.rows + i % c.out_height * c.stride_h) * planes_.row;
  }
  ~WeightGradient() {
    for (Gathered* own : gathered_) delete own;
  }
  WeightGradient(const WeightGradient&) = delete;
  WeightGradient& operator=(const WeightGradient&) = delete;

  // Whether 32 bits hold the sums of one image.
  bool sums_fit() const { return holds_ > 0; }

  // Whether 32 bits hold the offsets in its copies.
  bool small_enough() const {
    return deep_ ? layout_.is_small() : planes_.plane() <= most_copy && planes_.size() <= 4 * most_copy;
  }

  // Whether there was memory.
  bool run(const float* scale, float* gradient) {
    if (!rows_ || !at_) return false;
    std::atomic<bool> enough{true};
    parallel(slots_, threads_, [&](int slot, int) {
      if (!gather(slot)) enough = false;
    });
    return enough && write(scale, gradient);
  }

 private:
  // Two blocks of a group's outputs at a time, and where they end.
  int block_pairs() const { return (blocks_ + 1) / 2; }
  int end_of(int pair) const { return outputs_ < 2 * lanes * (pair + 1) ? outputs_ : 2 * lanes * (pair + 1); }
  int64_t group_sums() const { return int64_t{taps_} * inputs_ * blocks_ * lanes; }
  int64_t all_sums() const { return deep_ ? int64_t{taps_} * c_.channels : group_sums() * c_.groups; }
  const int8_t* errors_of(int image) const {
    return errors_ + int64_t{image} * c_.out_height * c_.out_width * c_.out_channels;
  }

  // Threads that gather images of their own; one if there are fewer images than threads, which then share its products.
  static int slots(const FedmpqConv& c, bool deep, int threads) {
    if (c.images >= threads) return at_least_one(threads);
    return deep ? at_least_one(c.images) : 1;
  }

  // Small images go together: reading and writing the sums of all weights takes longer than a few products.
  Planes planes() const {
    Planes made{};
    // A kernel narrower than the stride reaches the columns of some phases alone.
    const int reach = c_.dilation_w * (c_.kernel_w - 1) + 1;
    made.phases = reach < c_.stride_w ? reach : c_.stride_w;
    made.rows = (c_.out_height - 1) * c_.stride_h + c_.dilation_h * (c_.kernel_h - 1) + 1;
    made.row = (c_.dilation_w * (c_.kernel_w - 1)) / c_.stride_w + 4 * quads_;
    made.channels = inputs_;
    constexpr int enough_quads = 64;
    int64_t few = deep_ || c_.groups > 1 ? 1 : enough_quads / at_least_one(c_.out_height * quads_);
    few = few < c_.images / slots_ ? few : c_.images / slots_;
    made.images = 1;
    const int64_t room = most_copy / made.image();
    few = few < room ? few : room;
    made.images = static_cast<int>(at_least_one(few < holds_ ? few : holds_));
    return made;
  }

  // The images of one thread, which it has in other kernels too.
  bool gather(int slot) {
    const int first = share_of(slot, slots_, c_.images), own_images = share_of(slot + 1, slots_, c_.images) - first;
    const int64_t raw = int64_t{c_.height} * c_.width * c_.channels;
    auto* own = new (std::nothrow) Gathered(raw, deep_ ? layout_.size() : planes_.size(), deep_ ? 1 : blocks_ * block_,
                                            all_sums(), c_.out_channels, own_images > holds_);
    gathered_[slot] = own;
    if (own == nullptr || !*own) return false;
    if (!deep_) clear_borders(*own);
    int64_t held = 0;
    for (int done = 0; done < own_images; done += planes_.images) {
      const int count = own_images - done < planes_.images ? own_images - done : planes_.images;
      if (held + count > holds_) {
        own->flush();
        held = 0;
      }
      held += count;
      if (deep_ && own->empty) own->clear();
      if (deep_) deep_image(first + done, *own);
      for (int g = 0; g < c_.groups && !deep_; ++g) few_images(first + done, count, first + own_images, g, *own);
      own->empty = false;
    }
    if (own->empty) own->clear();  // there are no images
    return true;
  }

  // What lies between and behind the pixels of images is the same for all of them.
  void clear_borders(Gathered& own) const {
    std::memset(own.planes.data(), zero_, static_cast<size_t>(planes_.size()));
    if (c_.out_width % 4 != 0) std::memset(own.quads.data(), 0, static_cast<size_t>(blocks_ * block_));
  }

  void deep_image(int image, Gathered& own) const {
    pad(layout_, source_, image, 0, own.bytes.data(), own.planes.data());
    const int64_t line = int64_t{c_.stride_h} * layout_.padded_width * c_.channels;
    for (int y = 0; y < c_.out_height; ++y)
      ops().depthwise_weights({own.planes.data() + y * line, c_.stride_w * c_.channels, c_.out_width, c_.channels, taps_,
                               zero_, c_.dilation_w == c_.stride_w ? c_.kernel_w : 1, source_.pairs, fit_,
                               at_.offsets.data(), nullptr, nullptr},
                              errors_of(image) + int64_t{y} * c_.out_width * c_.channels, own.part.data());
  }

  // One group of `count` images from `first` on; the thread's own ones go up to `last`.
  void few_images(int first, int count, int last, int g, Gathered& own) const {
    for (int i = 0; i < count; ++i) {
      const int image = first + i;
      if (zero_ != 0 && g == 0)
        sum_errors(errors_of(image), int64_t{c_.out_height} * c_.out_width, c_.out_channels, own.errors.data());
      const uint8_t* bytes = bytes_of(source_, image, int64_t{c_.height} * c_.width * c_.channels, own.bytes.data());
      to_planes(c_, planes_, bytes, g * inputs_, own.planes.data() + i * planes_.image());
    }
    for (int i = 0; i < count && g == 0; ++i)
      if (const int next = first + count + i; next < last) fetch_ahead(source_, next);
    parallel(block_pairs(), slots_ == 1 ? threads_ : 1, [&](int pair, int) {
      const int b = 2 * pair;
      for (int i = 0; i < count; ++i)
        to_quads(c_, errors_of(first + i) + g * outputs_ + b * lanes, end_of(pair) - b * lanes, block_,
                 errors_of(c_.images), own.quads.data() + b * block_ + int64_t{i} * c_.out_height * quads_ * lanes * 4);
      for (int tap = 0; tap < taps_; ++tap) multiply(count, tap, b, g, own);
    });
  }

  // The sums of one tap for all inputs and up to two blocks of outputs.
  void multiply(int count, int tap, int b, int g, Gathered& own) const {
    // Rows that lie one after the other in the planes are one run; so are images.
    const bool joined = planes_.row == 4 * quads_ && planes_.rows == c_.out_height && c_.stride_h == 1;
    const int segments = joined ? 1 : count * c_.out_height, length = joined ? count * c_.out_height * quads_ : quads_;
    const int r = tap / c_.kernel_w, column = (tap % c_.kernel_w) * c_.dilation_w, width = blocks_ * lanes;
    const uint8_t* from = own.planes.data() + int64_t{column % c_.stride_w} * inputs_ * planes_.plane() +
                          int64_t{r} * c_.dilation_h * planes_.row + column / c_.stride_w;
    int32_t* sums = own.part.data() + g * group_sums() + int64_t{tap} * inputs_ * width + b * lanes;
    const int32_t* start = own.empty ? nullptr : sums;
    for (int i = 0; i < inputs_; i += max_rows)
      ops().tile({from + i * planes_.plane(), static_cast<ptrdiff_t>(planes_.plane()),
                  inputs_ - i < max_rows ? inputs_ - i : max_rows, rows_.data(), segments, length,
                  own.quads.data() + b * block_, static_cast<ptrdiff_t>(block_), blocks_ - b < 2 ? 1 : 2,
                  sums + int64_t{i} * width, width, start == nullptr ? nullptr : start + int64_t{i} * width, width, fit_});
  }

  bool write(const float* scale, float* gradient) {
    for (int slot = 1; slot < slots_; ++slot)
      for (int o = 0; o < c_.out_channels; ++o) gathered_[0]->errors.data()[o] += gathered_[slot]->errors.data()[o];
    for (int o = 0; o < c_.out_channels; ++o) gathered_[0]->errors.data()[o] *= zero_;
    if (slots_ == 1 && !gathered_[0]->flushed) {
      write_groups(gathered_[0]->part.data(), scale, gradient);
      return true;
    }
    Buffer<int64_t> total(all_sums());
    if (!total) return false;
    for (int slot = 0; slot < slots_; ++slot)
      for (int64_t i = 0; i < all_sums(); ++i)
        total.data()[i] = (slot > 0 ? total.data()[i] : 0) + gathered_[slot]->sum(i);
    write_groups(total.data(), scale, gradient);
    return true;
  }

  template <class Sum>
  void write_groups(const Sum* sums, const float* scale, float* gradient) const {
    const int64_t* taken_off = gathered_[0]->errors.data();
    if (deep_) return write_gradient<Sum>({sums, taps_, 1, c_.channels}, 0, c_.channels, taken_off, scale, gradient);
    for (int g = 0; g < c_.groups; ++g)
      parallel(block_pairs(), threads_, [&](int pair, int) {
        write_gradient<Sum>({sums + g * group_sums(), taps_, inputs_, blocks_ * lanes}, 2 * lanes * pair, end_of(pair),
                            taken_off + g * outputs_, scale + g * outputs_,
                            gradient + int64_t{g} * outputs_ * inputs_ * taps_);
      });
  }

  const FedmpqConv& c_;
  const int8_t* errors_;
  int taps_;
  bool deep_, flip_;
  int zero_;  // in every byte, as tiles read it
  Source source_;
  Layout layout_;
  int inputs_, outputs_, quads_, blocks_, threads_, slots_, fit_;
  int64_t holds_;  // images of the greatest possible products whose sums 32 bits hold
  Planes planes_;
  int64_t block_;
  Buffer<int32_t> rows_;
  Taps at_;
  Gathered* gathered_[max_threads] = {};
};

}  // namespace
}  // namespace fedmpq

using namespace fedmpq;

int32_t fedmpq_conv_backward_weights(const FedmpqConv* conv, const FedmpqCodes* codes, const int8_t* errors,
                                     const float* scale, int32_t threads, float* gradient) {
  if (!is_valid(conv) || !is_valid(codes) || !given(errors, scale, gradient)) return not_valid;
  threads = threads_of(threads);
  const FedmpqConv row = side_by_side(shortest_stride(*conv), codes->pairs != 0, threads);
  WeightGradient product(row, codes->data, codes->pairs != 0, codes->zero, errors, threads);
  if (!product.sums_fit()) return sums_too_large;
  if (!product.small_enough()) return not_valid;
  return product.run(scale, gradient) ? 0 : no_memory;
}
