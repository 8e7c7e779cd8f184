// `isograd bench optim`: from each rank's gradients to updated parameters, compared with PyTorch's
// clip_grad_norm_ and fused AdamW, and with a triad on the same cores. Both sides make shapes and values by
// one formula.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "base/files.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/runner.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

const char* const kPyTorchUpdate = "PyTorch clip_grad_norm_ + fused AdamW";
constexpr std::int64_t kUpdatesPerTurn = 5;
// A power of two makes whole numbers parameters or gradients: all that is summed before the norm is exact.
constexpr double kParameterUnit = 0x1p-14, kGradientUnit = 0x1p-20;

using Shapes = std::vector<std::vector<std::int64_t>>;

std::int64_t numel_of(const Shapes& shapes) {
  std::int64_t sum = 0;
  for (const auto& shape : shapes) sum += c10::multiply_integers(shape);
  return sum;
}

// The parameters of two models of `bench step`. "tiny" shows that it works.
std::vector<StepCase> optim_cases() {
  auto all = chosen(step_cases("step"), {"communication", "tiny"});
  for (StepCase& of : all) of.standard = of.name != "tiny";
  return all;
}

// [numel] whole numbers in [-509, 509], a function of the element's place among all parameters and of `salt`
// (0: parameters, 1 + rank: that rank's gradient).
at::Tensor pattern(std::int64_t offset, std::int64_t numel, std::int64_t salt) {
  const at::Tensor place = at::arange(offset, offset + numel, at::kLong);
  return place.mul_(40503).add_(salt * 7919).remainder_(1019).sub_(509).to(at::kFloat);
}
double gradient_factor(std::int64_t update) {
  return static_cast<double>(1 + update % 5) * (update % 3 == 1 ? -1 : 1);
}

// How far two runs of `ours.size()` fp32 AdamW updates may be apart whose gradients are equal and whose
// clipping norms are `ours` and `theirs`. With u = 2⁻²⁴ and equal gradients, the clipped gradients of update
// t differ by a relative δ: that of the two norms, and a few roundings. So m differs by at most (δ + (t +
// 4)u) Σ wᵢ|gᵢ|, √v by a relative δ + (t + 4)u, where wᵢ are AdamW's weights of past gradients in m and zᵢ
// those in v, both corrected for bias. By Cauchy and Schwarz Σ wᵢ|gᵢ| ≤ √(Σ wᵢ² / zᵢ) · √v. A parameter is
// also rounded a few times.
double allowed_difference(const std::vector<double>& ours, const std::vector<double>& theirs,
                          double largest_parameter) {
  const AdamWOptions options = bench_adamw();
  constexpr double kRounding = 0x1p-24;
  double delta = 4 * kRounding, sum = 0;
  for (std::size_t step = 0; step < ours.size(); ++step) {
    delta = std::max(delta, relative_difference(ours[step], theirs.at(step)) + 4 * kRounding);
    const auto t = static_cast<double>(step + 1);
    double reach = 0;  // Σ wᵢ² / zᵢ
    for (double age = 0; age < t; ++age) {
      const double w = (1 - options.beta1) * std::pow(options.beta1, age) / (1 - std::pow(options.beta1, t));
      const double z = (1 - options.beta2) * std::pow(options.beta2, age) / (1 - std::pow(options.beta2, t));
      reach += w * w / z;
    }
    sum += options.learning_rate * std::sqrt(reach) * (2 * delta + 2 * (t + 4) * kRounding) +
           4 * kRounding * largest_parameter;
  }
  return sum;
}

// Why the parameters after the first turn differ by more than they may; empty where they do not.
std::string difference_of_parameters(const fs::path& exchange, const SideResult& ours,
                                     const SideResult& peer) {
  const auto read = [&](const SideResult& side) {
    const MappedFile file(exchange / (side.side.name + ".parameters"));
    return at::from_blob(const_cast<std::uint8_t*>(file.data()), static_cast<std::int64_t>(file.size()) / 4,
                         at::kFloat)
        .to(at::kDouble);
  };
  const at::Tensor a = read(ours), b = read(peer);
  if (a.numel() != b.numel()) return fmt::format("{} parameters, and {}", a.numel(), b.numel());
  const double found = (a - b).abs().max().item<double>(),
               norms = relative_difference(ours.first.norms, peer.first.norms);
  // A norm in fp32 is off by √numel roundings (they are as often up as down); more is another norm.
  const double allowed =
      norms <= std::sqrt(static_cast<double>(a.numel())) * 0x1p-24
          ? allowed_difference(ours.first.norms, peer.first.norms, b.abs().max().item<double>())
          : 0;
  if (found <= allowed) return "";
  return fmt::format("parameters differ by {:.2g}, {:.2g} allowed; norms by {:.2g}", found, allowed, norms);
}

// Bytes of a parameter (read or written, 4 at a time) that all ranks move together.
double bytes_per_parameter(const std::string& side, int ranks) {
  constexpr double kNorm = 4, kUpdate = 28;  // gradient; gradient, and parameter, m, v to and fro
  const double w = ranks;
  if (side == "triad") return 12;
  if (side == "peer") return w * (kNorm + 8 + kUpdate);  // clip_grad_norm_ writes the clipped gradient back
  if (ranks == 1) return kNorm + kUpdate;
  const double sum = 4 * w;  // every rank's gradient is read once
  if (side == "bucketed") return sum + 4 * w + kNorm + w * kUpdate;
  // Squares are taken of what was just summed, in the cache.
  if (side == "shared") return sum + 4 + kUpdate;
  return sum + 4 + kUpdate + 8 * (w - 1);  // ZeRO-1: updated parameters are copied
}

void compare_updates(Bench& bench, const StepCase& of, int ranks) {
  const std::string of_ranks = of.name + ", " + ranks_text(ranks);
  bench.begin(of_ranks);
  const ExchangeFolder exchange;
  Shapes shapes;
  DecoderLM model(of.shape, at::kFloat, 1);
  for (const auto& [name, tensor] : model.named()) shapes.push_back(tensor.sizes().vec());
  nlohmann::ordered_json description = {
      {"ranks", ranks}, {"shapes", shapes}, {"updates_per_turn", kUpdatesPerTurn}};
  description.update(update_description());
  write_case(exchange.path(), description);
  std::vector<Side> sides;
  const auto add = [&](const char* name, const std::string& title) {
    sides.push_back(our_side("optim-ours", name, title, ranks));
  };
  if (ranks == 1) add("bucketed", "one rank");
  for (const char* name : {"shared", "zero1", "bucketed"})
    if (ranks > 1) add(name, find_strategy(name).title);
  sides.push_back(peer_side(bench.options.python, "optim_step.py", "peer", kPyTorchUpdate, ranks));
  add("triad", "triad a = b + s c");
  const auto results = take_turns(sides, exchange.path(), bench.options.seconds);
  bench.end();
  const SideResult &memory = results.back(), &peer = results[results.size() - 2];
  const auto millions = static_cast<double>(numel_of(shapes)) / 1e6;
  const auto gigabytes = [&](const SideResult& result) {
    return bytes_per_parameter(result.side.name, ranks) * millions / 1e3 / result.median();
  };
  TextRows rows{{fmt::format("{}, {:.1f} M parameters", of_ranks, millions), "ms", "spread", "GB/s", "ratio",
                 "sum", "norm", "update", "publication"}};
  std::vector<std::string> problems;
  for (const SideResult& result : results) {
    rows.push_back({result.side.title, fixed(result.median() * 1e3), spread(result.seconds),
                    fixed(gigabytes(result), 1)});
    if (&result == &peer || &result == &memory) continue;
    const Ratio ratio = faster(result, peer);
    rows.back().push_back(ratio.text());
    for (const auto& part : result.parts) rows.back().push_back(fixed(median(part) * 1e3));
    if (auto why = difference_of_parameters(exchange.path(), result, peer); !why.empty())
      problems.push_back(why);
    const std::string name = of_ranks + ", " + result.side.title;
    bench.record(name, result.median() * 1e3, peer.median() * 1e3, kPyTorchUpdate, "ms", ratio.median);
    bench.record(name, gigabytes(result), gigabytes(memory), "triad", "GB/s",
                 gigabytes(result) / gigabytes(memory));
  }
  bench.say(rows);
  for (const std::string& why : problems) bench.refuse_comparison(why);
}

// One rank's parameters under a strategy, and the gradients that it will be given.
class Problem {
 public:
  Problem(const Shapes& shapes, const std::string& strategy, World& world) : group_(world.group) {
    std::int64_t offset = 0;
    for (const auto& shape : shapes) {
      const std::int64_t numel = c10::multiply_integers(shape);
      auto parameter = pattern(offset, numel, 0).mul_(kParameterUnit).view(shape).requires_grad_(true);
      parameters_.push_back({"p" + std::to_string(parameters_.size()), parameter, parameter.dim() >= 2});
      bases_.push_back(pattern(offset, numel, 1 + world.rank).mul_(kGradientUnit).view(shape));
      offset += numel;
    }
    const Strategy& of = find_strategy(strategy);
    layout_ = bucketed(parameters_, world.group,
                       {.stage = of.setting == "zero1" ? 1 : 0, .share_parameters = of.share_parameters});
  }

  void draw_gradients(std::int64_t update) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
      at::mul_out(gradient, bases_[i], at::scalar_tensor(gradient_factor(update)));
    }
  }

  // The norm of the summed gradient. Adds to parts() the seconds of sum with the squares, norm, update and
  // publication.
  double update() {
    OwnedSquares squares;
    GlobalNorm global;
    const std::function<void()> work[] = {
        [&] {
          layout_->finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
            taken ? squares.add(*taken) : squares.add(bucket);
          });
        },
        [&] {
          std::vector<double> no_loss = {0};
          global = global_norm(squares.value(), no_loss, group_);
        },
        [&] { optimizer_->update(layout_->buckets(), clip_coefficient(global.norm, kBenchMaxNorm)); },
        [&] { layout_->publish_parameters(); }};
    for (std::size_t part = 0; part < parts_.size(); ++part) parts_[part].push_back(seconds_of(work[part]));
    return global.norm;
  }
  std::vector<double> median_parts() {  // since the last call
    std::vector<double> medians;
    for (auto& part : parts_) medians.push_back(median(std::exchange(part, {})));
    return medians;
  }

  void write_parameters(const fs::path& path) const {
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
  std::vector<std::vector<double>> parts_ = std::vector<std::vector<double>>(4);
};

void bench_optim(Bench& bench) {
  bench.say(
      "ms from gradients to updated parameters, fp32, one thread a rank; median, quartile spread, bytes that all\n"
      "ranks read and write by that time, how much faster than PyTorch, whose processes sum nothing (lowest ..\n"
      "highest of single rounds), and the ms of the parts\n");
  const auto cases = chosen(optim_cases(), bench.options.cases);
  bench.expect(std::ssize(cases) * std::ssize(bench.options.rank_counts), bench.options.seconds);
  for (const StepCase& of : cases)
    for (const int ranks : bench.options.rank_counts) compare_updates(bench, of, ranks);
}

}  // namespace

BenchVerb optim_verb() {
  return verb("optim",
              "Sum, norm, clip and AdamW, compared with PyTorch's fused AdamW and with memory bandwidth",
              "A ratio above 1 means that isograd is faster, or nearer to the memory bandwidth.\n" +
                  status("the parameters of the two"),
              {.seconds = 30}, {"torch"}, bench_optim,
              {rank_counts("number of ranks; default: 1 and 2", 1, 64),
               cases("size to measure", names_of(optim_cases()))},
              ", for each case and number of ranks");
}

void run_optim_rank(const fs::path& exchange, const std::string& name) {
  at::set_num_threads(1);
  World world = join();
  const auto shapes = read_case(exchange).at("shapes").get<Shapes>();
  std::unique_ptr<Problem> problem;
  // The triad a = b + s c, as long in all as the parameters, shows what memory gives to a core that does
  // little else (McCalpin's STREAM).
  std::vector<at::Tensor> abc;
  if (name == "triad")
    for (int i = 0; i < 3; ++i)
      abc.push_back(at::ones({split_rows(numel_of(shapes), world.size)[world.rank]}));
  else
    problem = std::make_unique<Problem>(shapes, name, world);

  TurnPipes pipes(exchange, name, world.rank);
  std::int64_t update = 0;
  for (bool first = true; pipes.wait(); first = false) {
    std::vector<double> seconds, norms;
    for (std::int64_t i = 0; i < kUpdatesPerTurn; ++i, ++update) {
      if (problem) problem->draw_gradients(update);
      world.group.barrier();
      seconds.push_back(seconds_of([&] {
        if (problem)
          norms.push_back(problem->update());
        else
          at::add_out(abc[0], abc[1], abc[2], 3);
      }));
    }
    at::Tensor slowest = at::tensor(seconds, at::kDouble);
    world.group.all_reduce(slowest, ReduceOp::kMax);
    std::copy_n(slowest.const_data_ptr<double>(), seconds.size(), seconds.begin());
    if (first && problem && world.rank == 0) problem->write_parameters(exchange / (name + ".parameters"));
    pipes.answer({.seconds = seconds,
                  .norms = norms,
                  .parts = problem ? problem->median_parts() : std::vector<double>{}});
  }
}

}  // namespace isograd
