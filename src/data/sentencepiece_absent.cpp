// SentencePiece in a build without libsentencepiece: it refuses.
#include "base/refuse.hpp"
#include "isograd/data.hpp"

namespace isograd {

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const fs::path& model) {
  refuse("SentencePiece model " + model.string(), "a build of isograd without SentencePiece",
         "one that was made with libsentencepiece",
         "Install libsentencepiece with its headers and build again with "
         "-DISOGRAD_SENTENCEPIECE=ON, or name a tokenizer.json");
}

}  // namespace isograd
