#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/cases/step_products.hpp"
#include "bench/cases/strategy.hpp"
#include "bench/exchange.hpp"
#include "bench/rounds.hpp"
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
// Of one rank. What autocast computes in bf16, the others keep in it, with fp32 masters.
const std::vector<Peer> kAlone = {{"eager", "PyTorch eager", "eager"},
                                  {"compiled", "PyTorch compiled", "compiled"},
                                  {"autocast", "PyTorch eager, autocast", "autocast"},
                                  {"autocast-compiled", "PyTorch compiled, autocast", "autocast-compiled"}};
const std::vector<Peer> kCompiledPeers = {
    {"ddp-compiled", "DDP over compiled blocks", "ddp-compiled"},
    {"single-compiled", "one compiled PyTorch process", "compiled", true}};

std::vector<Peer> peers_of(int ranks, const BenchStepOptions& options) {
  std::vector<Peer> peers;
  if (ranks == 1) {
    const auto wanted = [&](const Peer& peer) {
      if (!options.peers.empty()) return std::ranges::count(options.peers, peer.name) > 0;
      if (peer.mode.ends_with("compiled") && !options.compiled) return false;
      return !peer.mode.starts_with("autocast") || options.dtype == "bfloat16";
    };
    std::ranges::copy_if(kAlone, std::back_inserter(peers), wanted);
    return peers;
  }
  peers = kPeers;
  if (options.compiled) peers.insert(peers.end(), kCompiledPeers.begin(), kCompiledPeers.end());
  return peers;
}

std::vector<Strategy> strategies_of(int ranks, const BenchStepOptions& options) {
  if (ranks == 1) return {find_strategy("stage-0")};
  std::vector<Strategy> chosen;
  const auto possible = [&](const Strategy& strategy) {  // parameters on a GPU cannot lie in host memory
    return options.device == "cpu" || !strategy.options.share_parameters;
  };
  for (const std::string& name : options.strategies) chosen.push_back(find_strategy(name));
  if (chosen.empty())
    std::copy_if(strategies().begin(), strategies().end(), std::back_inserter(chosen),
                 [&](const Strategy& strategy) { return strategy.standard && possible(strategy); });
  return chosen;
}

struct Run {
  std::string name;
  int ranks = 1;
  std::int64_t tokens = 0;  // of a rank's step
  std::vector<SideResult> ours{}, peers{};
  std::vector<Agreement> agreements{};  // of ours, then of the peers
  std::vector<Peer> described{};        // the peers
  double products = 0;                  // seconds of a rank's matrix products alone; 0: not timed
  double flops = 0;                     // of the model in a rank's step
  StepSetting setting{};

  // bf16 has 8 bits: one rounding of the first loss, eight of what follows.
  bool good(const Agreement& each) const {
    constexpr double kRounding = 1.0 / 256;
    if (setting.dtype == "float32") return each.good();
    return each.first_loss <= kRounding && each.losses <= 8 * kRounding && each.norm <= 8 * kRounding;
  }
  bool comparable() const {
    return std::ranges::all_of(agreements, [this](const Agreement& each) { return good(each); });
  }
};

Run run_case(const StepCase& step_case, int ranks, const BenchStepOptions& options) {
  const ExchangeFolder exchange;
  const StepSetting setting{.device = options.device, .dtype = options.dtype, .threads = options.threads};
  write_exchange(exchange.path(), step_case, ranks, setting);
  std::vector<Side> sides;
  for (const Strategy& strategy : strategies_of(ranks, options))
    sides.push_back({.name = strategy.name,
                     .title = ranks == 1 ? "isograd" : strategy.title,
                     .command = {bench_self(), "bench", "step-ours", exchange.path().string(),
                                 std::to_string(ranks), strategy.name},
                     .ranks = ranks});
  const std::size_t count = sides.size();
  const std::string threads = options.threads == 1 ? "" : fmt::format(" of {} threads", options.threads);
  Run run{.name = fmt::format("{}, {} rank{}{}", step_case.name, ranks, ranks == 1 ? "" : "s", threads),
          .ranks = ranks,
          .tokens = step_case.tokens(),
          .described = peers_of(ranks, options),
          .setting = setting};
  const auto length = static_cast<double>(step_case.length);
  const auto sequences = static_cast<double>(step_case.micro_batches * step_case.sequences);
  run.flops = decoder_flops(step_case.shape, sequences * length, sequences * length * (length + 1) / 2);
  if (setting.dtype == "bfloat16") run.name += ", bf16";
  for (const Peer& peer : run.described)
    sides.push_back(
        {.name = peer.name,
         .title = peer.title,
         .command = {find_python(options.python), "-W", "ignore", find_peer("llama_step.py").string(),
                     exchange.path().string(), std::to_string(peer.alone ? 1 : ranks), peer.name, peer.mode},
         .ranks = peer.alone ? 1 : ranks});
  auto results = take_turns(sides, exchange.path(), options.seconds, options.device == "cuda");
  const Turn reference = results[count].first;  // the first peer's
  for (std::size_t i = 0; i < results.size(); ++i) {
    const bool other_tokens = i >= count && run.described[i - count].alone;
    run.agreements.push_back(other_tokens ? Agreement{} : compare(results[i].first, reference));
    (i < count ? run.ours : run.peers).push_back(std::move(results[i]));
  }
  if (options.device == "cpu" && options.threads == 1 && options.dtype == "float32")
    run.products = fastest_products(step_case);  // now that all sides are gone
  return run;
}

nlohmann::ordered_json profile_of(const SideResult& result) {
  return result.profile.empty() ? nlohmann::ordered_json::object()
                                : nlohmann::ordered_json::parse(result.profile);
}

// What the device did in a step of each side.
void print_device(const Run& run) {
  fmt::print("  {:<26} {:>8} {:>7} {:>9} {:>8} {:>8} {:>9}\n", "", "TFLOP/s", "kernels", "waits", "to host",
             "idle", "peak MiB");
  const auto line = [&](const SideResult& result) {
    const auto found = profile_of(result);
    const auto number = [&](const char* key) { return found.value(key, 0.0); };
    fmt::print("  {:<26} {:>8.1f} {:>7.0f} {:>9.1f} {:>8.1f} {:>6.1f} % {:>9.0f} {}\n", result.side.title,
               run.flops * result.side.ranks / result.median() / 1e12, number("kernels"), number("waits"),
               number("copies_to_host"), 100 * number("idle"), number("peak_bytes") / (1 << 20),
               found.value("problem", ""));
  };
  for (const SideResult& result : run.ours) line(result);
  for (const SideResult& result : run.peers) line(result);
}

void print(const Run& run) {
  fmt::print("{}, {} tokens a step\n", run.name, run.tokens * run.ranks);
  std::string head = fmt::format("  {:<26} {:>8} {:>7} {:>9} {:>8}", "", "ms", "spread", "tokens/s", "waits");
  for (const Peer& peer : run.described) head += fmt::format("  {:>20}", "x " + peer.name);
  fmt::print("{}\n", head);
  const auto line = [&](const SideResult& result, bool is_ours) {
    const auto tokens = static_cast<double>(run.tokens * result.side.ranks);
    fmt::print("  {:<26} {:>8.2f} {:>6.1f}% {:>9.0f} {:>8}", result.side.title, result.median() * 1e3,
               100 * result.spread(), tokens / result.median(),
               result.exposed.empty() ? "" : fmt::format("{:.2f}", quantile(result.exposed, 0.5) * 1e3));
    if (is_ours)
      for (const SideResult& peer : run.peers) {
        const Ratio ratio = faster(result, peer);
        fmt::print("  {:>20}",
                   fmt::format("{:.2f} ({:.2f} .. {:.2f})", ratio.median, ratio.lowest, ratio.highest));
      }
    fmt::print("\n");
  };
  for (const SideResult& result : run.ours) line(result, true);
  for (const SideResult& result : run.peers) line(result, false);
  if (run.products > 0)
    fmt::print("  {:<26} {:>8.2f} {}\n", "a rank's products alone", run.products * 1e3,
               fmt::format(" {:.0f} % of the step of {}", 100 * run.products / run.ours.front().median(),
                           run.ours.front().side.title));
  if (run.setting.device == "cuda") print_device(run);
  for (std::size_t i = 0; i < run.agreements.size(); ++i) {
    const Agreement& found = run.agreements[i];
    if (run.good(found)) continue;
    const auto& side = i < run.ours.size() ? run.ours[i].side : run.peers[i - run.ours.size()].side;
    fmt::print("  NOT COMPARABLE: {}\n", found.text(side.title, run.peers.front().side.title));
  }
  std::fflush(stdout);
}

void add_records(const Run& run, nlohmann::ordered_json& records) {
  const auto tokens = static_cast<double>(run.tokens * run.ranks);
  for (const SideResult& ours : run.ours)
    for (std::size_t i = 0; i < run.peers.size(); ++i) {
      const SideResult& peer = run.peers[i];
      const double ratio = peer.median() / ours.median();
      const std::string name = run.ranks == 1 ? run.name : run.name + ", " + ours.side.title;
      // A process alone has fewer tokens in a step: the time of the step is what counts.
      auto record = run.described[i].alone
                        ? bench_record("step", name, ours.median() * 1e3, peer.median() * 1e3,
                                       peer.side.title, "ms", ratio)
                        : bench_record("step", name, tokens / ours.median(), tokens / peer.median(),
                                       peer.side.title, "tokens/s", ratio);
      if (run.products > 0) record["products_ms"] = run.products * 1e3;
      if (run.setting.device == "cuda") {
        record["device"] = "cuda";
        record["dtype"] = run.setting.dtype;
        record["ours_ms"] = ours.median() * 1e3, record["peer_ms"] = peer.median() * 1e3;
        record["flops"] = run.flops * run.ranks;
        record["ours_device"] = profile_of(ours);
        record["peer_device"] = profile_of(peer);
      }
      if (!ours.exposed.empty()) record["exposed_ms"] = quantile(ours.exposed, 0.5) * 1e3;
      records.push_back(std::move(record));
    }
}

}  // namespace

std::vector<std::string> bench_step_cases() {
  std::vector<std::string> names;
  for (const auto& step_case : step_cases()) names.push_back(step_case.name);
  return names;
}

std::vector<std::string> bench_step_peers() {
  std::vector<std::string> names;
  for (const Peer& peer : kAlone) names.push_back(peer.name);
  return names;
}

std::vector<std::string> bench_strategies() {
  std::vector<std::string> names;
  for (const auto& strategy : strategies())
    if (strategy.together == Strategy::Together::kNothing) names.push_back(strategy.name);
  return names;
}

int bench_step(const BenchStepOptions& options) {
  std::vector<StepCase> cases;
  for (const auto& name : options.cases) cases.push_back(find_step_case(name));
  if (cases.empty())
    std::copy_if(step_cases().begin(), step_cases().end(), std::back_inserter(cases),
                 [](const StepCase& step_case) { return step_case.standard; });
  require_packages("step", options.python, {"torch"});
  fmt::print(
      "whole training steps, {}, {} thread{} a rank: median, quartile spread, ms of it that a rank waited "
      "for\n"
      "communication, and how much faster than each peer (lowest .. highest of single rounds)\n",
      options.dtype == "bfloat16" ? "bf16 with fp32 masters" : "fp32", options.threads,
      options.threads == 1 ? "" : "s");
  std::fflush(stdout);
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  Waiting waiting("case", std::ssize(cases) * std::ssize(options.ranks), options.seconds);
  for (const auto& step_case : cases)
    for (int ranks : options.ranks) {
      waiting.begin(fmt::format("{}, {} rank{}", step_case.name, ranks, ranks == 1 ? "" : "s"));
      const Run run = run_case(step_case, ranks, options);
      waiting.end();
      print(run);
      comparable = comparable && run.comparable();
      add_records(run, records);
    }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
