// Our side of `bench optim`: from local gradients to updated parameters, timed. And the triad beside it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "bench/bench.hpp"
#include "bench/cases/optim_case.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/cases/strategy.hpp"
#include "bench/cases/triad.hpp"
#include "bench/exchange.hpp"
#include "bench/pipes.hpp"
#include "bench/rounds.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

// One rank's parameters under a strategy, and the gradients that it will be given.
class Problem {
 public:
  Problem(const OptimCase& of, const std::string& strategy, World& world) : group_(world.group) {
    std::int64_t offset = 0;
    for (const auto& shape : of.shapes) {
      const std::int64_t numel = c10::multiply_integers(shape);
      auto parameter = pattern(offset, numel, 0).mul_(kParameterUnit).view(shape).requires_grad_(true);
      parameters_.push_back({"p" + std::to_string(parameters_.size()), parameter, parameter.dim() >= 2});
      bases_.push_back(pattern(offset, numel, 1 + world.rank).mul_(kGradientUnit).view(shape));
      offset += numel;
    }
    layout_ = bucketed(parameters_, world.group, find_strategy(strategy).options);
  }

  void draw_gradients(std::int64_t update) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
      at::mul_out(gradient, bases_[i], at::scalar_tensor(gradient_factor(update)));
    }
  }

  // The norm of the summed gradient. `parts`: seconds of sum with the squares, norm, update and publication.
  double update(std::vector<std::vector<double>>& parts) {
    auto last = Clock::now();
    const auto lap = [&](std::size_t part) {
      const auto now = Clock::now();
      parts[part].push_back(std::chrono::duration<double>(now - last).count());
      last = now;
    };
    OwnedSquares squares;
    layout_->finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
      taken ? squares.add(*taken) : squares.add(bucket);
    });
    lap(0);
    std::vector<double> no_loss = {0};
    const GlobalNorm global = global_norm(squares.value(), no_loss, group_);
    lap(1);
    optimizer_->update(layout_->buckets(), clip_coefficient(global.norm, kBenchMaxNorm));
    lap(2);
    layout_->publish_parameters();
    lap(3);
    return global.norm;
  }

  void write_parameters(const std::filesystem::path& path) const {
    AtomicFile file(path);
    for (const NamedParameter& parameter : parameters_)
      file.write(parameter.tensor.const_data_ptr<float>(), parameter.tensor.nbytes());
    file.commit();
  }

 private:
  Group group_;
  std::vector<NamedParameter> parameters_;
  std::vector<at::Tensor> bases_;
  std::unique_ptr<DataParallel> layout_;
  std::unique_ptr<Optimizer> optimizer_ = adamw(bench_adamw());
};

template <typename Action>
double timed(Group& group, Action&& action) {
  group.barrier();
  const auto start = Clock::now();
  action();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void run_optim_rank(const std::filesystem::path& exchange, const std::string& name) {
  at::set_num_threads(1);
  World world = join();
  const auto description = parse_json(read_file(exchange / "case.json")).value;
  const OptimCase& of = find_optim_case(description.at("name").get<std::string>());
  std::unique_ptr<Problem> problem;
  std::vector<at::Tensor> abc;  // of the triad, which is as long in all as the parameters
  if (name == "triad")
    for (int i = 0; i < 3; ++i) abc.push_back(at::ones({split_rows(of.numel(), world.size)[world.rank]}));
  else
    problem = std::make_unique<Problem>(of, name, world);

  TurnPipes pipes(exchange, name, world.rank);
  std::int64_t update = 0;
  for (bool first = true; pipes.wait(); first = false) {
    std::vector<double> seconds, norms, medians;
    std::vector<std::vector<double>> parts(4);
    for (std::int64_t i = 0; i < of.updates_per_turn; ++i, ++update) {
      if (!problem) {
        seconds.push_back(timed(world.group, [&] {
          triad(abc[0].mutable_data_ptr<float>(), abc[1].const_data_ptr<float>(),
                abc[2].const_data_ptr<float>(), 3, abc[0].numel());
        }));
        continue;
      }
      problem->draw_gradients(update);
      seconds.push_back(timed(world.group, [&] { norms.push_back(problem->update(parts)); }));
    }
    at::Tensor slowest = at::tensor(seconds, at::kDouble);
    world.group.all_reduce(slowest, ReduceOp::kMax);
    std::copy_n(slowest.const_data_ptr<double>(), seconds.size(), seconds.begin());
    if (first && problem && world.rank == 0) problem->write_parameters(exchange / (name + ".parameters"));
    if (problem)
      for (const auto& part : parts) medians.push_back(quantile(part, 0.5));
    pipes.answer(
        {{"seconds", seconds}, {"losses", nlohmann::json::array()}, {"norms", norms}, {"parts", medians}});
  }
}

}  // namespace

int bench_optim_ours(const std::filesystem::path& exchange, int ranks, const std::string& name) {
  if (ranks > 1 && !std::getenv("RANK"))
    return launch_ranks({bench_self(), "bench", "optim-ours", exchange.string(), std::to_string(ranks), name},
                        {.ranks = ranks});
  run_optim_rank(exchange, name);
  return 0;
}

}  // namespace isograd
