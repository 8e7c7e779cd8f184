#include "fuzz/mutate.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace isograd::fuzz {
namespace {

// The ends of types, their neighbours, and products that overflow.
constexpr std::uint64_t kEnds[] = {0,          1,          2,          127,        128,        255,
                                   256,        32767,      32768,      65535,      65536,      0x7FFFFFFF,
                                   0x80000000, 0xFFFFFFFF, 1ull << 32, 1ull << 40, 1ull << 53, 1ull << 60,
                                   1ull << 61, 1ull << 62, 1ull << 63, ~0ull,      ~0ull - 7};
constexpr const char* kNumbers[] = {"0",
                                    "-1",
                                    "1e400",
                                    "-0.0",
                                    "1e-400",
                                    "4294967296",
                                    "9007199254740993",
                                    "1152921504606846976",
                                    "9223372036854775807",
                                    "9223372036854775808",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "99999999999999999999999999",
                                    "nan",
                                    "inf",
                                    "1.5",
                                    "null",
                                    "true",
                                    "\"\"",
                                    "[]",
                                    "{}"};

// Headers decide, and they stand at the beginning.
std::size_t place(const std::string& text, Random& random) {
  const std::size_t size = text.size() + 1;
  return random.one_in(2) ? random.below(size) : random.below(std::min<std::size_t>(size, 512));
}

std::size_t length(const std::string& text, std::size_t at, Random& random) {
  const std::size_t most = random.one_in(4) ? text.size() : 16;
  return std::min(text.size() - at, 1 + random.below(most));
}

void put_number(std::string& text, std::size_t at, Random& random) {
  std::uint64_t value = kEnds[random.below(std::size(kEnds))];
  if (random.one_in(3)) value = text.size() + random.below(5) - 2;
  const std::size_t bytes = std::min<std::size_t>(std::size_t{1} << random.below(4), text.size() - at);
  const bool big_endian = random.one_in(3);
  for (std::size_t i = 0; i < bytes; ++i)
    text[at + i] = static_cast<char>(value >> (8 * (big_endian ? bytes - 1 - i : i)));
}

// A decimal number in the text becomes another.
bool replace_number(std::string& text, Random& random) {
  const std::size_t from = place(text, random);
  const std::size_t at = text.find_first_of("0123456789", from);
  if (at == std::string::npos) return false;
  std::size_t end = at;
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) ++end;
  text.replace(at, end - at, kNumbers[random.below(std::size(kNumbers))]);
  return true;
}

void change(std::string& text, const std::string& other, const std::vector<std::string>& words,
            Random& random) {
  const std::size_t at = std::min(place(text, random), text.size());
  const std::size_t count = text.empty() ? 0 : length(text, at, random);
  const auto word = [&] { return words.empty() ? std::string("\0", 1) : words[random.below(words.size())]; };
  switch (random.below(15)) {
    case 0:
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
      break;
    case 2:
      if (at < text.size()) text[at] = static_cast<char>(random.bits());
      break;
    case 3: {
      std::string noise(1 + random.below(16), '\0');
      for (char& c : noise) c = static_cast<char>(random.bits());
      text.insert(at, noise);
      break;
    }
    case 4:
      text.erase(at, count);
      break;
    case 5:
      text.insert(place(text, random), text.substr(at, count));
      break;
    case 6:
      if (at < text.size()) put_number(text, at, random);
      break;
    case 7:
    case 8:
      if (!replace_number(text, random)) text.insert(at, word());
      break;
    case 9:
      text.insert(at, word());
      break;
    case 10:
      text.replace(at, count, word());
      break;
    case 11:
      text.resize(at);
      break;
    case 12: {  // the end of another file of the kind
      const std::size_t from = std::min(place(other, random), other.size());
      text = text.substr(0, at) + other.substr(from);
      break;
    }
    case 13: {  // a part or a word many times: nesting, long names, long lists
      const std::string part = random.one_in(2) ? word() : text.substr(at, std::min<std::size_t>(count, 64));
      std::string many;
      for (std::size_t i = 1 + random.below(random.one_in(4) ? 20'000 : 200);
           i > 0 && many.size() < kLargestInput; --i)
        many += part;
      text.insert(at, many);
      break;
    }
    default:
      std::fill_n(text.begin() + static_cast<std::ptrdiff_t>(at), count, random.one_in(2) ? '\0' : '\xff');
  }
}

}  // namespace

// SplitMix64 (Steele, Lea and Flood 2014).
std::uint64_t Random::bits() {
  std::uint64_t z = state_ += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

std::string mutated(const std::string& sound, const std::string& other, const std::vector<std::string>& words,
                    Random& random) {
  std::string text = sound;
  for (std::size_t changes = random.one_in(3) ? 1 : 1 + random.below(8); changes > 0; --changes)
    change(text, other, words, random);
  if (text.size() > kLargestInput) text.resize(kLargestInput);
  return text;
}

}  // namespace isograd::fuzz
