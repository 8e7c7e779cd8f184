// Does not compile, on purpose: a model or its blocks that are not wrapped in Sharded<>. What the compiler
// says is the test (tests/CMakeLists.txt).
#include <isograd/isograd.hpp>

struct Block : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
struct Model : torch::nn::Module {
  std::vector<std::shared_ptr<Block>> blocks;
  at::Tensor forward(at::Tensor x) { return x; }
};

void shard(isograd::World& world, const std::shared_ptr<Model>& model) {
  isograd::fully_shard(model, std::vector<isograd::UnitHandle>(), world.group);
  isograd::fully_shard(isograd::Sharded(model), {model->blocks.begin(), model->blocks.end()}, world.group);
}
