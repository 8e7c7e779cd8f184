// SentencePiece models through libsentencepiece.
#include <sentencepiece_processor.h>
#include <utf8.h>

#include <iterator>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "data/companions.hpp"
#include "data/sentencepiece_check.hpp"
#include "isograd/data.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::filesystem::path& path)
      : path_(path), companions_(path.parent_path(), {"tokenizer_config.json"}) {
    const MappedFile file(path);
    const std::string_view model(reinterpret_cast<const char*>(file.data()), file.size());
    if (const std::string problem = load(model); !problem.empty())
      refuse("SentencePiece model " + path.string(), problem, "a model written by spm_train",
             "Check data.tokenizer");
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

  void write(const std::filesystem::path& directory) const override {
    write_file(directory / "tokenizer.model", read_file(path_));
    companions_.write(directory);
  }

 private:
  // Loads the model. Returns the problem; empty: none.
  std::string load(std::string_view model) {
    if (model.empty()) return "an empty file";  // LoadFromSerializedProto() calls it a model without pieces
    const CheckedModel checked = check_sentencepiece(model);
    if (!checked.problem.empty()) return checked.problem;
    try {
      const auto status = processor_.LoadFromSerializedProto(checked.bytes);
      if (!status.ok()) return status.ToString();
    } catch (const std::exception& error) {  // thrown by Darts-clone
      return error.what();
    }
    return processor_.GetPieceSize() == 0 ? "a model without pieces" : std::string();
  }

  void check(const sentencepiece::util::Status& status, const char* operation) const {
    if (!status.ok())
      refuse(std::string(operation) + " with " + name_, status.ToString(), "success",
             "Check that the SentencePiece model is whole");
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::filesystem::path path_;
  Companions companions_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::filesystem::path& model) {
  return std::make_unique<SentencePieceTokenizer>(model);
}

}  // namespace isograd
