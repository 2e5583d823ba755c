// Codes as an entropy code: rANS (Duda, arXiv 1311.2540) with one table a layer and four states in turns.
//
// A state x is at least 2^16. To take up a symbol of frequency f (of 2^12 in all) that starts at c it becomes
// (x / f) * 2^12 + x % f + c, after its lowest 16 bits have gone to the stream if it would outgrow 32 bits; to give the symbol
// back is the reverse, so what was taken up last comes out first. Nothing here depends on the machine: one source serves every
// instruction set.
#include <cstdint>
#include <cstring>

#include "bounds.h"
#include "fedmpq/kernels.h"

namespace fedmpq {
namespace {

constexpr int scale_bits = 12;
constexpr uint32_t scale = 1u << scale_bits;
constexpr uint32_t least_state = 1u << 16;
constexpr int64_t states = 4;
constexpr int most_symbols = 256;
constexpr int64_t most_codes = int64_t{1} << 40;

struct Frequencies {
  uint32_t of[most_symbols];
};

// Counts in parts of `scale`: none that occurs has 0. What rounding leaves over or lacks goes to, or comes from, the most frequent.
void scaled(const int64_t* counts, int symbols, int64_t n, Frequencies& frequencies) {
  uint32_t sum = 0;
  int most = 0;
  for (int s = 0; s < symbols; ++s) {
    const auto share = static_cast<uint32_t>(static_cast<double>(counts[s]) * scale / static_cast<double>(n));
    frequencies.of[s] = counts[s] == 0 ? 0 : share == 0 ? 1 : share;
    sum += frequencies.of[s];
    if (counts[s] > counts[most]) most = s;
  }
  if (sum <= scale) {
    frequencies.of[most] += scale - sum;
    return;
  }
  while (sum > scale) {
    int largest = 0;
    for (int s = 1; s < symbols; ++s)
      if (frequencies.of[s] > frequencies.of[largest]) largest = s;
    --frequencies.of[largest];
    --sum;
  }
}

// The table in half bytes: three bits of a frequency in each, lowest first, the fourth says that more follow.
class HalfBytes {
 public:
  HalfBytes(uint8_t* out, int64_t room) : out_(out), room_(2 * room) {}

  bool put(uint32_t value) {
    do {
      const uint32_t rest = value >> 3;
      if (used_ == room_) return false;
      const auto half = static_cast<uint8_t>((value & 7u) | (rest != 0 ? 8u : 0u));
      uint8_t& byte = out_[used_ / 2];
      byte = static_cast<uint8_t>(used_ % 2 == 0 ? half : byte | half << 4);
      ++used_;
      value = rest;
    } while (value != 0);
    return true;
  }

  int64_t bytes() const { return (used_ + 1) / 2; }

 private:
  uint8_t* out_;
  int64_t room_, used_ = 0;
};

// Reads such a table; -1 if it is none: frequencies that do not add up to `scale`, a number longer than it must be, or bits set
// behind the last.
int64_t read_table(const uint8_t* coded, int64_t length, int symbols, Frequencies& frequencies) {
  int64_t used = 0;
  uint32_t sum = 0;
  const auto half = [coded](int64_t place) { return static_cast<uint32_t>(coded[place / 2] >> (place % 2 * 4)) & 15u; };
  for (int s = 0; s < symbols; ++s) {
    uint32_t value = 0;
    for (int shift = 0;; shift += 3) {
      if (used == 2 * length || shift > scale_bits) return -1;
      const uint32_t read = half(used++);
      value |= (read & 7u) << shift;
      if (read < 8u) {
        if (read == 0 && shift != 0) return -1;
        break;
      }
    }
    if (value > scale) return -1;
    frequencies.of[s] = value;
    sum += value;
  }
  if (used % 2 != 0 && half(used) != 0) return -1;
  return sum == scale ? (used + 1) / 2 : -1;
}

// What takes up a symbol: x / f is the upper half of x * reciprocal, for every x below 2^32, and x * 2^12 / f + x % f + c is
// x + bias + (x / f) * rest. A frequency of 1 has no such reciprocal: with 2^64 - 1 the quotient is one too small, which the bias
// makes up for.
struct Taken {
  uint64_t reciprocal, limit;
  uint32_t bias, rest;
};

Taken taking(uint32_t frequency, uint32_t start) {
  const uint32_t rest = scale - frequency;
  const uint64_t limit = static_cast<uint64_t>(frequency) << (32 - scale_bits);
  if (frequency < 2) return {~uint64_t{0}, limit, start + rest, rest};
  return {~uint64_t{0} / frequency + 1, limit, start, rest};
}

inline uint32_t take(uint32_t state, const Taken& symbol) {
  const auto quotient = static_cast<uint32_t>((static_cast<unsigned __int128>(symbol.reciprocal) * state) >> 64);
  return state + symbol.bias + quotient * symbol.rest;
}

void write32(uint8_t* to, uint32_t value) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}

uint32_t read32(const uint8_t* from) {
  return from[0] | static_cast<uint32_t>(from[1]) << 8 | static_cast<uint32_t>(from[2]) << 16 |
         static_cast<uint32_t>(from[3]) << 24;
}

// Takes up the codes, the last one first, and writes words from `end` down to `least`: where they begin, or null if there is no
// room for them.
const uint8_t* encode(const uint8_t* codes, int64_t n, const Taken* taken, uint32_t* x, uint8_t* least, uint8_t* end) {
  uint8_t* words = end;
  int64_t i = n;
  const auto spill = [&words](uint32_t state, const Taken& symbol) {
    // Without a branch: which symbol needs one is as random as the codes. What is written in vain is written over.
    words[-2] = static_cast<uint8_t>(state);
    words[-1] = static_cast<uint8_t>(state >> 8);
    const bool full = state >= symbol.limit;
    words -= full ? 2 : 0;
    return full ? state >> 16 : state;
  };
  const auto one = [&](uint32_t state, uint8_t code) { return take(spill(state, taken[code]), taken[code]); };
  for (; i % states != 0; --i) {
    if (words - least < 2) return nullptr;
    x[(i - 1) % states] = one(x[(i - 1) % states], codes[i - 1]);
  }
  uint32_t a = x[0], b = x[1], c = x[2], d = x[3];
  for (; i != 0 && words - least >= 2 * states; i -= states) {
    d = one(d, codes[i - 1]);
    c = one(c, codes[i - 2]);
    b = one(b, codes[i - 3]);
    a = one(a, codes[i - 4]);
  }
  x[0] = a, x[1] = b, x[2] = c, x[3] = d;
  return i == 0 ? words : nullptr;
}

struct Given {
  uint16_t frequency, offset;
};

// One symbol out of a state; the state may then need a word of the stream.
inline uint8_t give(uint32_t& state, const Given* slots, const uint8_t* symbols) {
  const uint32_t slot = state & (scale - 1);
  state = slots[slot].frequency * (state >> scale_bits) + slots[slot].offset;
  return symbols[slot];
}

inline uint32_t word_at(const uint8_t* from) { return from[0] | static_cast<uint32_t>(from[1]) << 8; }

bool decode(const uint8_t* words, const uint8_t* end, uint32_t* x, const Given* slots, const uint8_t* symbols, int64_t n,
            uint8_t* codes) {
  int64_t i = 0;
  uint32_t a = x[0], b = x[1], c = x[2], d = x[3];
  const auto refill = [&words](uint32_t& state) {
    // Without a branch: which state needs a word is as random as the codes.
    const uint32_t filled = state << 16 | word_at(words);
    const bool needs = state < least_state;
    state = needs ? filled : state;
    words += needs ? 2 : 0;
  };
  for (; i + states <= n && end - words >= 2 * states; i += states) {
    codes[i] = give(a, slots, symbols);
    codes[i + 1] = give(b, slots, symbols);
    codes[i + 2] = give(c, slots, symbols);
    codes[i + 3] = give(d, slots, symbols);
    refill(a);
    refill(b);
    refill(c);
    refill(d);
  }
  uint32_t last[states] = {a, b, c, d};
  for (; i < n; ++i) {
    uint32_t& state = last[i % states];
    codes[i] = give(state, slots, symbols);
    if (state < least_state) {
      if (end - words < 2) return false;
      state = state << 16 | word_at(words);
      words += 2;
    }
  }
  for (const uint32_t state : last)
    if (state != least_state) return false;
  return words == end;
}

bool are_codes(int64_t n, int32_t bits) { return n >= 1 && n <= most_codes && bits >= 1 && bits <= 8; }

}  // namespace
}  // namespace fedmpq

int64_t fedmpq_encode_codes(const uint8_t* codes, int64_t n, int32_t bits, uint8_t* coded, int64_t room) {
  using namespace fedmpq;
  if (!are_codes(n, bits) || room < 0 || room > most_codes || !given(codes, coded)) return not_valid;
  const int symbols = 1 << bits;
  int64_t counts[4][most_symbols] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int lane = 0; lane < 4; ++lane) ++counts[lane][codes[i + lane]];
  for (; i < n; ++i) ++counts[0][codes[i]];
  for (int s = 0; s < most_symbols; ++s) {
    counts[0][s] += counts[1][s] + counts[2][s] + counts[3][s];
    if (s >= symbols && counts[0][s] != 0) return not_valid;
  }
  Frequencies frequencies;
  scaled(counts[0], symbols, n, frequencies);
  HalfBytes table(coded, room);
  Taken taken[most_symbols];
  uint32_t start = 0;
  for (int s = 0; s < symbols; ++s) {
    if (!table.put(frequencies.of[s])) return 0;
    taken[s] = taking(frequencies.of[s], start);
    start += frequencies.of[s];
  }
  const int64_t head = table.bytes() + 4 * states;
  if (head > room) return 0;
  uint32_t x[states] = {least_state, least_state, least_state, least_state};
  const uint8_t* words = encode(codes, n, taken, x, coded + head, coded + room);
  if (words == nullptr) return 0;
  const int64_t length = coded + room - words;
  for (int64_t s = 0; s < states; ++s) write32(coded + table.bytes() + 4 * s, x[s]);
  std::memmove(coded + head, words, static_cast<size_t>(length));
  return head + length;
}

int32_t fedmpq_decode_codes(const uint8_t* coded, int64_t length, int64_t n, int32_t bits, uint8_t* codes) {
  using namespace fedmpq;
  if (!are_codes(n, bits) || length < 0 || length > most_codes || !given(coded, codes)) return not_valid;
  const int symbols = 1 << bits;
  Frequencies frequencies;
  const int64_t table = read_table(coded, length, symbols, frequencies);
  if (table < 0 || length - table < 4 * states) return not_valid;
  Given slots[scale];
  uint8_t symbol_of[scale];
  uint32_t start = 0;
  for (int s = 0; s < symbols; ++s)
    for (uint32_t k = 0; k < frequencies.of[s]; ++k, ++start) {
      slots[start] = {static_cast<uint16_t>(frequencies.of[s]), static_cast<uint16_t>(k)};
      symbol_of[start] = static_cast<uint8_t>(s);
    }
  uint32_t x[states];
  for (int64_t s = 0; s < states; ++s) {
    x[s] = read32(coded + table + 4 * s);
    if (x[s] < least_state) return not_valid;
  }
  return decode(coded + table + 4 * states, coded + length, x, slots, symbol_of, n, codes) ? 0 : not_valid;
}
