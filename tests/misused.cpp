// Does not compile, on purpose: each line is natural to who knows LibTorch or PyTorch, and wrong here. The
// compiler's messages are the test (tests/CMakeLists.txt).
#include <isograd/isograd.hpp>

namespace isograd {

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
TORCH_MODULE(Block);
struct ModelImpl : torch::nn::Module {
  std::vector<std::shared_ptr<BlockImpl>> blocks;
  at::Tensor forward(at::Tensor x) { return x; }
};
TORCH_MODULE(Model);

using OfHolder = Sharded<Block>::Body;

void misuse(World& world, Model& model, std::unique_ptr<DataParallel>& layout, std::unique_ptr<AdamW>& adam) {
  Sharded<BlockImpl> of_value(*Block());
  Sharded of_value_too(*Block());
  fully_shard(model, {model->blocks.begin(), model->blocks.end()}, world.group);
  fully_shard(Sharded(model), {model->blocks.begin(), model->blocks.end()}, world.group);
  bucketed(model->parameters(), world);
  trainable_parameters(model->parameters());
  adamw(model->parameters());
  const auto number = [](const Batch&) { return 1.0; };
  Step step(number, layout, TokenMean(), adam, {.max_norm = 1.0});
  step(at::Tensor(), at::Tensor());
  PipelineModel stages({});
  write_weights("weights", stages, *layout);
  verify_model(model, [](const Batch& batch) { return batch.tokens; });
}

}  // namespace isograd
