// The byte tokenizer: it needs no training and no download, and it can encode any text.
#include <utf8.h>

#include <iterator>

#include "isograd/data.hpp"

namespace isograd {
namespace {

constexpr std::uint32_t kBos = 256, kEos = 257;

class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  std::int64_t vocabulary() const override { return 258; }
  std::int64_t bos() const override { return kBos; }
  std::int64_t eos() const override { return kEos; }

  std::vector<std::uint32_t> encode(std::string_view text) const override {
    std::vector<std::uint32_t> tokens;
    tokens.reserve(text.size() + 2);
    tokens.push_back(kBos);
    for (unsigned char byte : text) tokens.push_back(byte);
    tokens.push_back(kEos);
    return tokens;
  }

  std::string decode(std::span<const std::uint32_t> tokens) const override {
    std::string bytes, text;
    for (std::uint32_t token : tokens)
      if (token < 256) bytes.push_back(static_cast<char>(token));
    utf8::replace_invalid(bytes.begin(), bytes.end(), std::back_inserter(text));
    return text;
  }
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

}  // namespace isograd
