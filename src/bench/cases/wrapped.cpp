// `isograd bench wrapped`: PyTorch's DDP and FSDP2 over isograd and over Gloo.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>

#include "bench/cases/verbs.hpp"
#include "bench/runner.hpp"

namespace isograd {
namespace {

// Empty where the losses of all steps are equal. A sum of two is the same in any order; of more, the losses
// are close.
std::string difference_of_losses(const std::vector<double>& ours, const std::vector<double>& theirs,
                                 int ranks) {
  if (ours.empty() || ours.size() != theirs.size())
    return fmt::format("one side reports {} losses, the other {}", ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i)
    if (!(std::abs(ours[i] - theirs[i]) <= (ranks == 2 ? 0 : 1e-4 * std::abs(theirs[i]))))
      return "the losses differ";
  return "";
}

}  // namespace

void bench_wrapped(Bench& bench) {
  const BenchOptions& options = bench.options;
  const std::string module = find_module();
  fmt::print(
      "ms of a training step of PyTorch (median), by the name of the backend; one thread a rank\n"
      "(floor: a backend whose collectives do nothing; limit: the ratio that it would have)\n"
      "{:<36} {:>10} {:>10} {:>10}   {:>5}  {:>5}  {}\n",
      "case", "isograd", "gloo", "floor", "ratio", "limit", "single rounds");
  std::fflush(stdout);
  const auto wrappers = options.cases.empty() ? std::vector<std::string>{"ddp", "fsdp2"} : options.cases;
  bench.expect(std::ssize(wrappers), options.seconds);
  for (const std::string& wrapper : wrappers) {
    bench.begin(wrapper);
    const ExchangeFolder exchange;
    const auto side = [&](const std::string& name, const std::string& backend) {
      return peer_side(options.python, "wrapped_step.py", name, name, options.ranks,
                       {backend, wrapper, options.size, module});
    };
    const auto results = take_turns({side("ours", "isograd"), side("peer", "gloo"), side("floor", "fake")},
                                    exchange.path(), options.seconds);
    bench.end();
    const SideResult &ours = results[0], &peer = results[1], &floor = results[2];
    const Ratio ratio = faster(ours, peer);
    const std::string name = fmt::format("{}, {}, {} ranks", wrapper, options.size, options.ranks);
    fmt::print("{:<36} {:>10.1f} {:>10.1f} {:>10.1f}   {:>5.2f}  {:>5.2f}  {:.2f} .. {:.2f} in {}\n", name,
               ours.median() * 1e3, peer.median() * 1e3, floor.median() * 1e3, ratio.median,
               peer.median() / floor.median(), ratio.lowest, ratio.highest, ours.rounds.size());
    std::string why = difference_of_losses(ours.first.losses, peer.first.losses, options.ranks);
    if (why.empty()) why = difference_of_losses(ours.losses, peer.losses, options.ranks);
    if (!why.empty()) bench.refuse_comparison(why);
    std::fflush(stdout);
    bench.record(name, ours.median() * 1e3, peer.median() * 1e3, "Gloo", "ms", ratio.median)["floor"] =
        floor.median() * 1e3;
  }
}

}  // namespace isograd
