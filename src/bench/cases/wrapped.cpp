// `isograd bench wrapped`: PyTorch's DDP and FSDP2 over isograd and over Gloo.

#include "bench/cases/step_case.hpp"
#include "bench/runner.hpp"

namespace isograd {
namespace {

// Empty where the losses of all steps are equal. A sum of two is the same in any order; of more, the losses
// are close.
std::string difference_of_losses(const std::vector<double>& ours, const std::vector<double>& theirs,
                                 int ranks) {
  if (ours.empty() || ours.size() != theirs.size())
    return fmt::format("one side reports {} losses, the other {}", ours.size(), theirs.size());
  return relative_difference(ours, theirs) <= (ranks == 2 ? 0 : 1e-4) ? "" : "the losses differ";
}

void bench_wrapped(Bench& bench) {
  const BenchOptions& options = bench.options;
  const std::string module = find_module();
  bench.say(
      "ms of a training step of PyTorch (median), by the name of the backend; one thread a rank\n"
      "(floor: a backend whose collectives do nothing; limit: the ratio that it would have)\n");
  const auto wrappers = options.cases.empty() ? Names{"ddp", "fsdp2"} : options.cases;
  bench.expect(std::ssize(wrappers), options.seconds);
  for (const std::string& wrapper : wrappers) {
    bench.begin(wrapper);
    const ExchangeFolder exchange;
    write_step(exchange.path(), "step", find_step_case("step", options.size), options.ranks, {});
    const auto side = [&](const std::string& name, const std::string& backend) {
      return peer_side(options.python, "llama_step.py", name, name, options.ranks,
                       {wrapper, backend, module});
    };
    const auto results = take_turns({side("ours", "isograd"), side("peer", "gloo"), side("floor", "fake")},
                                    exchange.path(), options.seconds);
    bench.end();
    const SideResult &ours = results[0], &peer = results[1], &floor = results[2];
    const Ratio ratio = faster(ours, peer);
    const std::string name = fmt::format("{}, {}, {} ranks", wrapper, options.size, options.ranks);
    bench.say({{"case", "isograd", "gloo", "floor", "ratio", "limit"},
               {name, fixed(ours.median() * 1e3, 1), fixed(peer.median() * 1e3, 1),
                fixed(floor.median() * 1e3, 1), ratio.text(), fixed(peer.median() / floor.median())}});
    std::string why = difference_of_losses(ours.first.losses, peer.first.losses, options.ranks);
    if (why.empty()) why = difference_of_losses(ours.losses, peer.losses, options.ranks);
    if (!why.empty()) bench.refuse_comparison(why);
    bench.record(name, ours.median() * 1e3, peer.median() * 1e3, "Gloo", "ms", ratio.median)["floor"] =
        floor.median() * 1e3;
  }
}

}  // namespace

BenchVerb wrapped_verb() {
  return verb("wrapped", "PyTorch's DDP and FSDP2, with isograd and with Gloo as the backend",
              "Exit status: 0 compared; 1 the losses of the two differ; 2 bad input.", {.seconds = 24},
              {"torch"}, bench_wrapped,
              {choice("--case", &BenchOptions::cases, "wrapper to measure; default: both", {"ddp", "fsdp2"}),
               ranks("number of ranks", 2, 64),
               choice("--size", &BenchOptions::size, "size of the model and the batch",
                      {"tiny", "communication", "medium", "compute"})},
              ", for each case");
}

}  // namespace isograd
