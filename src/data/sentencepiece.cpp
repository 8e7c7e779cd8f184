// SentencePiece models through libsentencepiece.
#include <sentencepiece_processor.h>
#include <utf8.h>

#include <iterator>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/text_data.hpp"

namespace isograd {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::filesystem::path& path) {
    const MappedFile file(path);
    const std::string_view model(reinterpret_cast<const char*>(file.data()), file.size());
    // Load() takes an empty file for a model without pieces and calls it well.
    const auto status = model.empty() ? sentencepiece::util::Status(
                                            sentencepiece::util::StatusCode::kDataLoss, "the file is empty")
                                      : processor_.LoadFromSerializedProto(model);
    if (!status.ok() || processor_.GetPieceSize() == 0)
      throw ConfigError({.where = "SentencePiece model " + path.string(),
                         .found = status.ok() ? "a model without pieces" : status.ToString(),
                         .expected = "a model written by spm_train",
                         .action = "Check data.tokenizer"});
    name_ = "sentencepiece:" + checksum(file.data(), file.size());
  }

  std::string name() const override { return name_; }
  std::int64_t vocabulary() const override { return processor_.GetPieceSize(); }
  std::int64_t bos() const override { return processor_.bos_id(); }
  std::int64_t eos() const override { return processor_.eos_id(); }

  std::vector<std::uint32_t> encode(std::string_view text) const override {
    std::vector<int> pieces;
    check(processor_.Encode(text, &pieces), "encode");
    std::vector<std::uint32_t> tokens;
    tokens.reserve(pieces.size() + 2);
    if (bos() >= 0) tokens.push_back(static_cast<std::uint32_t>(bos()));
    for (int piece : pieces) tokens.push_back(static_cast<std::uint32_t>(piece));
    if (eos() >= 0) tokens.push_back(static_cast<std::uint32_t>(eos()));
    return tokens;
  }

  std::string decode(std::span<const std::uint32_t> tokens) const override {
    std::vector<int> pieces;
    for (std::uint32_t token : tokens) {
      if (token >= static_cast<std::uint64_t>(vocabulary())) continue;
      const int piece = static_cast<int>(token);
      if (!processor_.IsControl(piece)) pieces.push_back(piece);
    }
    std::string bytes, text;
    check(processor_.Decode(pieces, &bytes), "decode");
    utf8::replace_invalid(bytes.begin(), bytes.end(), std::back_inserter(text));
    return text;
  }

 private:
  void check(const sentencepiece::util::Status& status, const char* operation) const {
    if (!status.ok())
      throw ConfigError({.where = std::string(operation) + " with " + name_,
                         .found = status.ToString(),
                         .expected = "success",
                         .action = "Check that the SentencePiece model is whole"});
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::filesystem::path& model) {
  return std::make_unique<SentencePieceTokenizer>(model);
}

}  // namespace isograd
