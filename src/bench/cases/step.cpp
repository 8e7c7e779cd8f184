// `isograd bench step`, `tensor`, `expert` and `pipeline`: sides that take turns over whole training steps.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/refuse.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/cases/verbs.hpp"
#include "bench/runner.hpp"
#include "train/utilisation.hpp"

namespace isograd {
namespace {

struct Peer {
  std::string name, title, mode;
  bool alone = false;  // one process, with the tokens of one rank
};
const std::vector<Peer> kPeers = {{"ddp", "PyTorch DDP over Gloo", "ddp"},
                                  {"fsdp2", "PyTorch FSDP2 over Gloo", "fsdp2"},
                                  {"single", "one PyTorch process", "eager", true}};
const std::vector<Peer> kCompiledPeers = {
    {"ddp-compiled", "DDP over compiled blocks", "ddp-compiled"},
    {"single-compiled", "one compiled PyTorch process", "compiled", true}};
// Peers of one rank. Autocast computes in bf16 what the others keep in it, with fp32 masters.
const std::vector<Peer> kAlone = {{"eager", "PyTorch eager", "eager"},
                                  {"compiled", "PyTorch compiled", "compiled"},
                                  {"autocast", "PyTorch eager, autocast", "autocast"},
                                  {"autocast-compiled", "PyTorch compiled, autocast", "autocast-compiled"}};

// Sides that compute the same step.
struct Compared {
  std::string name, text;  // of records; printed after it
  const StepCase& step_case;
  int ranks;  // whose tokens there are
  std::vector<Side> sides;
  std::size_t ours;       // this number of first sides have rows with ratios
  std::size_t peers;      // from this one on they are compared with
  std::size_t reference;  // the side whose losses and norms are the right ones
  bool rates = false;     // in tokens a second, with what ours waited for
  bool with_products = false;
  StepSetting setting{};
};

nlohmann::ordered_json profile_of(const SideResult& result) {
  return result.profile.empty() ? nlohmann::ordered_json::object()
                                : nlohmann::ordered_json::parse(result.profile);
}

// Prints what the device did in a step of each side.
void print_device(const std::vector<SideResult>& results, double flops) {
  fmt::print("  {:<40} {:>8} {:>7} {:>9} {:>8} {:>8} {:>9}\n", "", "TFLOP/s", "kernels", "waits", "to host",
             "idle", "peak MiB");
  for (const SideResult& result : results) {
    const auto found = profile_of(result);
    const auto number = [&](const char* key) { return found.value(key, 0.0); };
    fmt::print("  {:<40} {:>8.1f} {:>7.0f} {:>9.1f} {:>8.1f} {:>6.1f} % {:>9.0f} {}\n", result.side.title,
               flops * result.side.ranks / result.median() / 1e12, number("kernels"), number("waits"),
               number("copies_to_host"), 100 * number("idle"), number("peak_bytes") / (1 << 20),
               found.value("problem", ""));
  }
}

void compare_steps(Bench& bench, const Compared& compared) {
  const StepCase& of = compared.step_case;
  bench.begin(compared.name);
  const ExchangeFolder exchange;
  write_step(exchange.path(), of, compared.ranks, compared.setting);
  const bool on_gpu = compared.setting.device == "cuda";
  const auto results = take_turns(compared.sides, exchange.path(), bench.options.seconds, on_gpu);
  // Now that all sides are gone.
  const double products =
      compared.with_products ? fastest_products(of, compared.rates ? 1 : compared.ranks) : 0;
  bench.end();

  const auto length = static_cast<double>(of.length),
             sequences = static_cast<double>(of.micro_batches * of.sequences);
  const double flops = decoder_flops(of.shape, sequences * length, sequences * length * (length + 1) / 2);
  const auto rate = [&](const SideResult& result, int ranks) {
    return static_cast<double>(of.tokens() * ranks) / result.median();
  };
  fmt::print("{}{}\n  {:<40} {:>9} {:>7}", compared.name, compared.text, "", "ms", "spread");
  if (compared.rates) fmt::print(" {:>9} {:>8}", "tokens/s", "waits");
  for (std::size_t i = compared.peers; i < results.size(); ++i)
    fmt::print("  {:>20}", "x " + results[i].side.name);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const SideResult& mine = results[i];
    const double exposed = mine.exposed.empty() ? 0 : median(mine.exposed) * 1e3;
    fmt::print("\n  {:<40} {:>9.2f} {:>6.1f}%", mine.side.title, mine.median() * 1e3,
               100 * spread(mine.seconds));
    if (compared.rates)
      fmt::print(" {:>9.0f} {:>8}", rate(mine, mine.side.ranks),
                 mine.exposed.empty() ? "" : fmt::format("{:.2f}", exposed));
    for (std::size_t other = compared.peers; i < compared.ours && other < results.size(); ++other) {
      if (other == i) {
        fmt::print("  {:>20}", "");
        continue;
      }
      const SideResult& peer = results[other];
      const Ratio ratio = faster(mine, peer);
      fmt::print("  {:>20}",
                 fmt::format("{:.2f} ({:.2f} .. {:.2f})", ratio.median, ratio.lowest, ratio.highest));
      const std::string name =
          mine.side.title == "isograd" ? compared.name : compared.name + ", " + mine.side.title;
      // A process alone has fewer tokens in a step: the time of the step is what counts.
      auto& record = compared.rates && !peer.side.other_tokens
                         ? bench.record(name, rate(mine, mine.side.ranks), rate(peer, mine.side.ranks),
                                        peer.side.title, "tokens/s", ratio.median)
                         : bench.record(name, mine.median() * 1e3, peer.median() * 1e3, peer.side.title, "ms",
                                        ratio.median);
      if (compared.rates && products > 0) record["products_ms"] = products * 1e3;
      if (on_gpu) {
        record["device"] = "cuda";
        record["dtype"] = compared.setting.dtype;
        record["ours_ms"] = mine.median() * 1e3, record["peer_ms"] = peer.median() * 1e3;
        record["flops"] = flops * mine.side.ranks;
        record["ours_device"] = profile_of(mine);
        record["peer_device"] = profile_of(peer);
      }
      if (compared.rates && !mine.exposed.empty()) record["exposed_ms"] = exposed;
    }
  }
  fmt::print("\n");
  if (products > 0)
    fmt::print("  {:<40} {:>9.2f}  {:.0f} % of the step of {}\n", "a rank's products alone", products * 1e3,
               100 * products / results.front().median(), results.front().side.title);
  if (on_gpu) print_device(results, flops);
  // bf16 has 8 bits: one rounding of the first loss, eight of what follows.
  constexpr double kRounding = 1.0 / 256;
  const Agreement allowed =
      compared.setting.dtype == "float32" ? Agreement{} : Agreement{kRounding, 8 * kRounding, 8 * kRounding};
  for (const SideResult& result : results)
    if (!result.side.other_tokens)
      if (const auto why = disagreement(result, results[compared.reference], allowed); !why.empty())
        bench.refuse_comparison(why);
  std::fflush(stdout);
}

std::vector<Peer> peers_of(int ranks, const BenchOptions& options) {
  std::vector<Peer> peers;
  if (ranks == 1) {
    std::ranges::copy_if(kAlone, std::back_inserter(peers), [&](const Peer& peer) {
      if (!options.peers.empty()) return std::ranges::count(options.peers, peer.name) > 0;
      if (peer.mode.ends_with("compiled") && !options.compiled) return false;
      return !peer.mode.starts_with("autocast") || options.dtype == "bfloat16";
    });
    return peers;
  }
  peers = kPeers;
  if (options.compiled) peers.insert(peers.end(), kCompiledPeers.begin(), kCompiledPeers.end());
  return peers;
}

std::vector<Strategy> strategies_of(int ranks, const BenchOptions& options) {
  if (ranks == 1) return {find_strategy("stage-0")};
  auto all = chosen(strategies(), options.strategies);
  // Parameters on a GPU cannot be in host memory.
  if (options.strategies.empty() && options.device == "cuda")
    std::erase_if(all, [](const Strategy& strategy) { return strategy.options.share_parameters; });
  return all;
}

// Cases of one model that ranks compute together.
struct TogetherCase {
  std::string name, step_case, text;
  bool standard = true;
};
const std::string kTinyText = "to see that the comparison works";
std::vector<TogetherCase> sizes_of(const std::string& verb) {
  const std::string text = "one batch for all ranks";
  return {{"communication", verb + "-64", text},
          {"middle", verb + "-512", text},
          {"compute", verb + "-2048", text},
          {"tiny", verb + "-tiny", kTinyText, false}};
}
const std::vector<TogetherCase> kTensorCases = sizes_of("tensor"), kPipelineCases = sizes_of("pipeline");
const std::vector<TogetherCase> kTensorOverlapCases = {
    {"overlap-communication", "tensor-64", "one batch for all ranks"},
    {"overlap-middle", "tensor-512", "one batch for all ranks"},
    {"overlap-compute", "tensor-2048", "one batch for all ranks"}};
const std::vector<TogetherCase> kExpertCases = {
    {"even", "expert-even", "each rank's; they go where an untrained router sends them"},
    {"uneven", "expert-uneven", "each rank's; a quarter of the experts computes all"},
    {"tiny", "expert-tiny", kTinyText, false}};
const std::vector<TogetherCase> kExpertOverlapCases = {
    {"shared", "expert-shared", "each rank's; in addition to the others an expert computes all"},
    {"shared-tiny", "expert-shared-tiny", kTinyText, false}};

std::vector<std::string> names_of_both(const std::vector<TogetherCase>& cases,
                                       const std::vector<TogetherCase>& more) {
  std::vector<std::string> names = names_of(cases);
  std::ranges::copy(names_of(more), std::back_inserter(names));
  return names;
}

Side ours(const std::string& strategy, int ranks, const std::string& title = "") {
  return our_side("step-ours", strategy, title.empty() ? find_strategy(strategy).title : title, ranks);
}
Side alone() {
  return ours("stage-0", 1, "isograd, one rank");
}

struct Together {
  std::vector<TogetherCase> cases;
  std::vector<int> rank_counts;
  bool own_batches;  // of each rank; otherwise all see one
  std::function<std::vector<Side>(int ranks)> sides;
  std::size_t ours = 0, peers = 0;  // as Compared's; `ours` 0: isograd's, but not the last
};

void compare_all(Bench& bench, const std::string& of, const std::vector<Together>& all) {
  fmt::print(
      "whole training steps of {}, fp32, one thread a rank: median, quartile spread, and how much\nfaster "
      "than each other "
      "side (lowest .. highest of single rounds)\n",
      of);
  std::fflush(stdout);
  std::ptrdiff_t parts = 0;
  for (const Together& one : all)
    parts += std::ssize(chosen(one.cases, bench.options.cases)) * std::ssize(one.rank_counts);
  bench.expect(parts, bench.options.seconds);
  for (const Together& one : all)
    for (const TogetherCase& each : chosen(one.cases, bench.options.cases))
      for (const int ranks : one.rank_counts) {
        const StepCase& step_case = find_step_case(each.step_case);
        std::vector<Side> sides = one.sides(ranks);
        const auto isograds = static_cast<std::size_t>(std::ranges::count_if(sides, &Side::is_ours));
        const std::size_t last = sides.size() - 1;
        const std::string tokens =
            step_case.micro_batches == 1
                ? fmt::format("{} tokens", step_case.tokens())
                : fmt::format("{} micro-batches of {} tokens", step_case.micro_batches, step_case.tokens());
        compare_steps(bench, {.name = each.name + ", " + ranks_text(ranks),
                              .text = fmt::format(", {}: {}", tokens, each.text),
                              .step_case = step_case,
                              .ranks = one.own_batches ? ranks : 1,
                              .sides = std::move(sides),
                              .ours = one.ours > 0 ? one.ours : std::min(isograds, last),
                              .peers = one.peers,
                              .reference = last,
                              .with_products = one.own_batches});
      }
}

}  // namespace

std::vector<std::string> bench_step_peers() {
  return names_of(kAlone);
}
std::vector<std::string> bench_step_strategies() {
  std::vector<std::string> names;
  for (const Strategy& strategy : strategies())
    if (strategy.parallel == Strategy::Parallel::kData) names.push_back(strategy.name);
  return names;
}
std::vector<std::string> bench_tensor_cases() {
  return names_of_both(kTensorCases, kTensorOverlapCases);
}
std::vector<std::string> bench_expert_cases() {
  return names_of_both(kExpertCases, kExpertOverlapCases);
}
std::vector<std::string> bench_pipeline_cases() {
  return names_of(kPipelineCases);
}

void bench_step(Bench& bench) {
  const BenchOptions& options = bench.options;
  const bool one_thread = options.threads == 1, in_bf16 = options.dtype == "bfloat16";
  fmt::print(
      "whole training steps, {}, {} thread{} a rank: median, quartile spread, ms of it that a rank waited "
      "for\n"
      "communication, and how much faster than each peer (lowest .. highest of single rounds)\n",
      in_bf16 ? "bf16 with fp32 masters" : "fp32", options.threads, one_thread ? "" : "s");
  std::fflush(stdout);
  const auto cases = chosen(step_cases(), options.cases);
  bench.expect(std::ssize(cases) * std::ssize(options.rank_counts), options.seconds);
  for (const StepCase& step_case : cases)
    for (const int ranks : options.rank_counts) {
      std::vector<Side> sides;
      for (const Strategy& strategy : strategies_of(ranks, options))
        sides.push_back(ours(strategy.name, ranks, ranks == 1 ? "isograd" : strategy.title));
      const std::size_t count = sides.size();
      for (const Peer& peer : peers_of(ranks, options)) {
        sides.push_back(peer_side(options.python, "llama_step.py", peer.name, peer.title,
                                  peer.alone ? 1 : ranks, {peer.mode}));
        sides.back().other_tokens = peer.alone;
      }
      const std::string threads = one_thread ? "" : fmt::format(" of {} threads", options.threads);
      compare_steps(
          bench, {.name = fmt::format("{}, {}{}{}", step_case.name, ranks_text(ranks), threads,
                                      in_bf16 ? ", bf16" : ""),
                  .text = fmt::format(", {} tokens a step", step_case.tokens() * ranks),
                  .step_case = step_case,
                  .ranks = ranks,
                  .sides = std::move(sides),
                  .ours = count,
                  .peers = count,
                  .reference = count,
                  .rates = true,
                  .with_products = options.device == "cpu" && one_thread && !in_bf16,
                  .setting = {.device = options.device, .dtype = options.dtype, .threads = options.threads}});
    }
}

void bench_tensor(Bench& bench) {
  const auto theirs = [&](const std::string& mode, const std::string& title, int ranks) {
    return peer_side(bench.options.python, "llama_step.py", mode, title, ranks, {mode});
  };
  compare_all(bench, "one model on one batch",
              {{.cases = kTensorCases,
                .rank_counts = {bench.options.ranks},
                .own_batches = false,
                .sides =
                    [&](int ranks) {
                      return std::vector<Side>{ours("tensor", ranks), ours("tensor-whole", ranks), alone(),
                                               theirs("tp", "PyTorch tensor parallel over Gloo", ranks),
                                               theirs("eager", "one PyTorch process", 1)};
                    },
                .ours = 3,
                .peers = 2},
               // Without a peer: what an overlap gains, or costs.
               {.cases = kTensorOverlapCases,
                .rank_counts = {bench.options.ranks},
                .own_batches = false,
                .sides =
                    [](int ranks) {
                      std::vector<Side> sides;
                      for (const char* strategy : {"tensor-weights", "tensor-tokens", "tensor-whole-weights",
                                                   "tensor", "tensor-whole"})
                        sides.push_back(ours(strategy, ranks));
                      return sides;
                    },
                .ours = 5,
                .peers = 3}});
}

void bench_expert(Bench& bench) {
  if (find_step_case(kExpertCases[0].step_case).shape.experts.count % bench.options.ranks != 0)
    refuse("isograd bench expert --ranks", std::to_string(bench.options.ranks),
           "2, 4 or 8: the PyTorch peer assigns its 8 experts evenly", "Choose one of them");
  const auto theirs = [&](const std::string& mode, const std::string& title, int ranks) {
    return peer_side(bench.options.python, "experts_step.py", mode, title, ranks, {mode});
  };
  compare_all(bench, "a mixture of 8 experts, 2 to a token",
              {{.cases = kExpertCases,
                .rank_counts = {1, bench.options.ranks},
                .own_batches = true,
                .sides =
                    [&](int ranks) {
                      if (ranks == 1)
                        return std::vector<Side>{
                            alone(), theirs("transformers-loop", "transformers' Mixtral, looping", 1),
                            theirs("transformers", "transformers' Mixtral", 1)};
                      return std::vector<Side>{ours("expert", ranks), ours("expert-halves", ranks),
                                               ours("stage-0", ranks, "isograd, all experts on each rank"),
                                               theirs("ep", "PyTorch, all-to-all over Gloo, FSDP2", ranks)};
                    },
                .peers = 1},
               // Without a peer: what an overlap gains, or costs.
               {.cases = kExpertOverlapCases,
                .rank_counts = {bench.options.ranks},
                .own_batches = true,
                .sides = [](int ranks) -> std::vector<Side> {
                  return {ours("expert-shared", ranks), ours("expert-halves", ranks), ours("expert", ranks)};
                }}});
}

void bench_pipeline(Bench& bench) {
  const auto theirs = [&](const std::string& mode, const std::string& title, int ranks) {
    return peer_side(bench.options.python, "pipeline_step.py", mode, title, ranks, {mode});
  };
  compare_all(bench, "one model in stages",
              {{.cases = kPipelineCases,
                .rank_counts = {bench.options.ranks},
                .own_batches = false,
                .sides =
                    [&](int ranks) {
                      return std::vector<Side>{ours("pipeline-1f1b", ranks), ours("pipeline-zb-h1", ranks),
                                               alone(),
                                               theirs("1f1b", "PyTorch pipelining, 1F1B over Gloo", ranks),
                                               theirs("eager", "one PyTorch process", 1)};
                    },
                .ours = 3,
                .peers = 2}});
}

}  // namespace isograd
