// Mutated entropy codes through the decoder, under the sanitizers. With clang, `-fsanitize=fuzzer -DFEDMPQ_LIBFUZZER` makes it a
// target of libFuzzer; by itself it mutates codes of its own making until it has tried `inputs` of them or `seconds` are over, and
// prints how many it tried and how many of them were taken for codes.
//
// Every input is a copy of its own length on the heap, and so is what it is decoded to: a byte read or written beyond either ends
// the program. What decodes is encoded again and must come out the same.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fedmpq/kernels.h"

namespace {

struct Input {
  int32_t bits;
  int64_t count;
  std::vector<uint8_t> coded;
};

bool decodes(const Input& input) {
  std::vector<uint8_t> codes(static_cast<size_t>(input.count));
  const auto length = static_cast<int64_t>(input.coded.size());
  const uint8_t nothing = 0;
  const uint8_t* from = input.coded.empty() ? &nothing : input.coded.data();
  if (fedmpq_decode_codes(from, length, input.count, input.bits, codes.data()) != 0) return false;
  std::vector<uint8_t> again(input.coded.size() + 4096 + codes.size() * 2);
  const int64_t room = static_cast<int64_t>(again.size());
  const int64_t made = fedmpq_encode_codes(codes.data(), input.count, input.bits, again.data(), room);
  std::vector<uint8_t> twice(codes.size());
  if (made <= 0 || fedmpq_decode_codes(again.data(), made, input.count, input.bits, twice.data()) != 0 || twice != codes)
    std::abort();
  return true;
}

}  // namespace

#ifdef FEDMPQ_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const Input input{1 + data[0] % 8, 1 + data[1] + 256 * (data[2] % 16), std::vector<uint8_t>(data + 3, data + size)};
  decodes(input);
  return 0;
}

#else

namespace {

// xorshift64*: the same inputs for the same seed everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

  uint64_t below(uint64_t limit) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return (state_ * 0x2545F4914F6CDD1DULL >> 16) % limit;
  }

 private:
  uint64_t state_;
};

// The code of random codes: all alike, evenly spread, or most of them near the middle.
Input made(Random& random) {
  Input input{static_cast<int32_t>(1 + random.below(8)), static_cast<int64_t>(1 + random.below(200)), {}};
  const uint64_t symbols = uint64_t{1} << input.bits, kind = random.below(3);
  std::vector<uint8_t> codes(static_cast<size_t>(input.count));
  for (uint8_t& code : codes) {
    const uint64_t even = random.below(symbols);
    code = static_cast<uint8_t>(kind == 0 ? 0 : kind == 1 ? even : (even + random.below(symbols) + symbols / 2) / 3);
  }
  input.coded.resize(1024);
  const int64_t length = fedmpq_encode_codes(codes.data(), input.count, input.bits, input.coded.data(), 1024);
  if (length <= 0) std::abort();
  input.coded.resize(static_cast<size_t>(length));
  if (!decodes(input)) std::abort();
  return input;
}

void mutate(Input& input, Random& random) {
  auto& coded = input.coded;
  for (uint64_t left = 1 + random.below(3); left != 0; --left) {
    const uint64_t place = coded.empty() ? 0 : random.below(coded.size());
    const auto at = coded.begin() + static_cast<std::ptrdiff_t>(place);
    switch (random.below(7)) {
      case 0:
        if (!coded.empty()) *at = static_cast<uint8_t>(*at ^ (1u << random.below(8)));
        break;
      case 1:
        if (!coded.empty()) *at = static_cast<uint8_t>(random.below(256));
        break;
      case 2:
        coded.resize(place);
        break;
      case 3:
        coded.insert(at, static_cast<uint8_t>(random.below(256)));
        break;
      case 4:
        if (!coded.empty()) coded.erase(at);
        break;
      case 5:
        input.count = static_cast<int64_t>(1 + random.below(400));
        break;
      default:
        input.bits = static_cast<int32_t>(1 + random.below(8));
    }
  }
}

}  // namespace

int main(int arguments, char** given) {
  if (arguments != 4) {
    std::fprintf(stderr, "usage: %s INPUTS SECONDS SEED\n", given[0]);
    return 2;
  }
  const long long inputs = std::atoll(given[1]);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoll(given[2]));
  Random random(static_cast<uint64_t>(std::atoll(given[3])));
  long long tried = 0, taken = 0;
  while (tried < inputs && std::chrono::steady_clock::now() < end) {
    const Input good = made(random);
    for (int i = 0; i < 64 && tried < inputs; ++i, ++tried) {
      Input input = good;
      mutate(input, random);
      taken += decodes(input);
    }
  }
  std::printf("%lld tried, %lld taken\n", tried, taken);
  return 0;
}

#endif
