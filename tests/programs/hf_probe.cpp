// Gives tests/test_hf.py the C++ side: logits of a Hugging Face directory, and directories with random
// weights. One process for all requests, since to load LibTorch takes longer than to answer: a line of words
// between tabs on standard input each, answered by a line of status and length, then so many bytes of error.
//   logits DIRECTORY TOKENS OUTPUT [DTYPE]   tokens [F, L] int64 as safetensors "tokens"; writes "logits"
//                                            [F, L, V]; F fragments of one batch
//   create CONFIG DIRECTORY SEED             CONFIG is a config.json
//   loss DIRECTORY TOKENS OUTPUT             mean next-token cross entropy and its gradients, by name
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "model/hf.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

Batch batch_of(const at::Tensor& tokens) {
  const std::int64_t fragments = tokens.size(0), length = tokens.size(1);
  Batch batch;
  batch.tokens = tokens.reshape({-1}).clone();
  batch.positions = at::arange(length, at::kLong).repeat({fragments});
  for (std::int64_t f = 0; f < fragments; ++f) {
    batch.cu_seqlens.push_back((f + 1) * length);
    batch.sample_ids.push_back(f);
  }
  return batch;
}

void run(const std::vector<std::string>& arguments) {
  const std::string verb = arguments.at(0);
  if (verb == "create") {
    DecoderLM model(parse_hf_config(read_file(arguments.at(1)), arguments.at(1)), at::kFloat,
                    std::strtoull(arguments.at(3).c_str(), nullptr, 10));
    const std::int64_t file_bytes =
        arguments.size() > 4 ? std::strtoll(arguments[4].c_str(), nullptr, 10) : kHfFileBytes;
    write_hf(arguments.at(2), model.config(), stream_of(model.named()), file_bytes);
    return;
  }
  const auto type = arguments.size() > 4 && arguments[4] == "float64" ? at::kDouble : at::kFloat;
  const auto model = read_hf(arguments.at(1), type);
  const at::Tensor tokens = read_safetensors(arguments.at(2)).at("tokens");
  const at::Tensor logits = model->logits(batch_of(tokens)).view({tokens.size(0), tokens.size(1), -1});
  std::vector<std::pair<std::string, at::Tensor>> results{{"logits", logits}};
  if (verb == "loss") {
    const std::int64_t last = tokens.size(1) - 1;
    const at::Tensor loss = at::cross_entropy_loss(logits.narrow(1, 0, last).reshape({-1, logits.size(2)}),
                                                   tokens.narrow(1, 1, last).reshape({-1}));
    loss.backward();
    results.emplace_back("loss", loss);
    for (const auto& [name, parameter] : model->named())
      if (parameter.requires_grad()) results.emplace_back("gradient " + name, parameter.grad());
  }
  write_safetensors(arguments.at(3), results);
}

}  // namespace
}  // namespace isograd

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<std::string> arguments;
    for (std::string word; std::getline(words, word, '\t');) arguments.push_back(word);
    int status = 0;
    std::string trouble;
    try {
      isograd::run(arguments);
    } catch (const std::exception& error) {
      status = isograd::exit_status(error), trouble = error.what();
    }
    std::printf("%d %zu\n%s", status, trouble.size(), trouble.c_str());
    std::fflush(stdout);
  }
}
