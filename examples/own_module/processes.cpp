// Ranks as processes, each with its own memory, under ZeRO-3. `processes 3` starts three of itself;
// `isograd launch -n 3 -- processes`, torchrun --no-python and mpirun do so too.
#include <torch/nn/modules/linear.h>
#include <isograd/isograd.hpp>

#include <cstdio>

constexpr std::int64_t kInputs = 6, kHidden = 32;

// A sum of waves, to be learnt from points: rows first to first + count - 1, as a micro-batch of samples.
isograd::Batch make_batch(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = first; i < first + count; ++i) numbers.push_back(i);
  const at::Tensor steps = at::tensor(numbers, at::kDouble).unsqueeze(1);
  const at::Tensor x = (steps * (at::arange(kInputs) + 1.618)).sin().to(at::kFloat);  // [F, kInputs]
  return isograd::batch_of_samples({x, (2 * x).tanh().sum(1)}, at::zeros({count}, at::kLong), numbers);
}

struct NetImpl : torch::nn::Module {
  std::vector<isograd::Sharded<torch::nn::LinearImpl>> layers;  // gathered one at a time under ZeRO-3
  NetImpl() {
    const std::vector<std::int64_t> widths = {kInputs, kHidden, kHidden, 1};
    for (std::size_t i = 0; i + 1 < widths.size(); ++i)
      layers.emplace_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(widths[i], widths[i + 1])));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = &layer == &layers[0] ? layer(x) : layer(at::relu(x));
    return x.squeeze(1);
  }
};
TORCH_MODULE(Net);

void train(isograd::World& world) {
  const Net net;
  isograd::prepare_module(net, world.group);  // rank 0's values on every rank
  isograd::Sharded<NetImpl> model(net);
  auto layout = isograd::fully_shard(model, {net->layers.begin(), net->layers.end()}, world.group);
  auto adamw = isograd::adamw({});
  isograd::TokenMean mean;
  const auto loss_sum = [&](const isograd::Batch& batch) {
    if (batch.inputs.empty()) return model(at::zeros({0, kInputs})).sum();  // a batch that fills up a round
    return (model(batch.inputs[0]) - batch.inputs[1]).square().sum();
  };
  const isograd::ForwardLossTerms forward = isograd::one_term(loss_sum, "squares");
  isograd::Step step(forward, *layout, mean, *adamw);
  const isograd::Schedule schedule{.peak = 0.01, .warmup = 10, .total = 200};
  const auto unseen = [&] { return isograd::evaluate(forward, mean, *layout, {make_batch(1'000'000, 50)}); };
  const double before = unseen().loss;
  for (std::int64_t i = 0; i < schedule.total; ++i) {
    adamw->set_learning_rate(schedule.at(i));
    step(make_batch(100 * i + 20 * world.rank, 4 + 6 * world.rank));  // uneven: 4, 10, 16 rows
  }
  const double after = unseen().loss;
  if (world.rank == 0)
    std::printf("%d processes on %s: squared error of unseen points %.3f, then %.4f\n", world.size,
                world.host.c_str(), before, after);
  if (after > 0.1 * before) throw std::runtime_error("the net has not learnt");
}

int main(int argc, char** argv) {
  try {
    if (argc > 1) return isograd::launch_ranks({argv[0]}, {.ranks = std::stoi(argv[1])});
    isograd::World world = isograd::join({.timeout = std::chrono::minutes(2)});
    train(world);
  } catch (const std::exception& error) {  // the others then stop waiting for this rank, and say so
    std::fprintf(stderr, "%s\n", error.what());
    return isograd::exit_status(error);
  }
}
