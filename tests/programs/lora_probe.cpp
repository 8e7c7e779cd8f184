// Gives tests/test_lora.py the C++ side, one request a process, in fp64:
//   logits MODEL ADAPTER TOKENS OUTPUT   of a Hugging Face directory with an adapter of PEFT's; "tokens" [F,
//   L] merged MODEL ADAPTER TOKENS OUTPUT   the same after merge() create MODEL DIRECTORY RANK ALPHA MODULES
//   an adapter whose b is not zero; MODULES: "q_proj,lm_head"
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "isograd/error.hpp"
#include "isograd/lora.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

void run(const std::vector<std::string>& arguments) {
  const std::string& verb = arguments.at(0);
  const auto model = read_hf(arguments.at(1), at::kDouble);
  const at::NoGradGuard no_grad;
  if (verb == "create") {
    LoraConfig config{.rank = std::atoll(arguments.at(3).c_str()),
                      .alpha = std::atof(arguments.at(4).c_str())};
    std::istringstream names(arguments.at(5));
    for (std::string name; std::getline(names, name, ',');) config.modules.push_back(name);
    const LoraAdapter adapter(model->config(), config, at::kDouble, /*seed=*/3);
    for (auto [name, tensor] : adapter.named())
      if (name.ends_with("lora_B.weight")) fill_normal(tensor, 0.2, 4, name);
    return write_peft(arguments.at(2), adapter, model->config(), arguments.at(1));
  }
  const auto adapter = read_peft(arguments.at(2), model->config(), at::kDouble);
  if (verb == "merged")
    merge(*model, *adapter);
  else
    model->set_adapter(adapter.get());
  const at::Tensor tokens = read_safetensors(arguments.at(3)).at("tokens");
  const std::int64_t fragments = tokens.size(0), length = tokens.size(1);
  Batch batch;
  batch.tokens = tokens.reshape({-1}).clone();
  batch.positions = at::arange(length, at::kLong).repeat({fragments});
  for (std::int64_t f = 0; f < fragments; ++f) {
    batch.cu_seqlens.push_back((f + 1) * length);
    batch.sample_ids.push_back(f);
  }
  write_safetensors(arguments.at(4),
                    NamedTensors{{"logits", model->logits(batch).view({fragments, length, -1})}});
}

}  // namespace
}  // namespace isograd

int main(int count, char** words) {
  try {
    isograd::run({words + 1, words + count});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return isograd::exit_status(error);
  }
}
