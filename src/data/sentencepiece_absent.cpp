// A build without libsentencepiece.
#include "isograd/error.hpp"
#include "isograd/text_data.hpp"

namespace isograd {

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::filesystem::path& model) {
  throw ConfigError({.where = "SentencePiece model " + model.string(),
                     .found = "a build of isograd without SentencePiece",
                     .expected = "one that was made with libsentencepiece",
                     .action = "Install libsentencepiece with its headers and build again with "
                               "-DISOGRAD_SENTENCEPIECE=ON, or name a tokenizer.json"});
}

}  // namespace isograd
