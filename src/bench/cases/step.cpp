// `isograd bench step`, `tensor`, `expert` and `pipeline`: sides that take turns over whole training steps.
#include <algorithm>
#include <map>
#include <set>

#include "base/refuse.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/runner.hpp"
#include "train/memory.hpp"

namespace isograd {
namespace {

// Peers of one rank. Autocast computes in bf16 what the others keep in it, with fp32 masters.
struct Peer {
  std::string name, title;
};
const std::vector<Peer> kAlone = {{"eager", "PyTorch eager"},
                                  {"compiled", "PyTorch compiled"},
                                  {"autocast", "PyTorch eager, autocast"},
                                  {"autocast-compiled", "PyTorch compiled, autocast"}};

// Sides that compute the same step.
struct Compared {
  std::string name, text;  // of records; printed after it
  std::string verb;        // whose case it is
  const StepCase& step_case;
  int ranks;  // whose tokens there are
  std::vector<Side> sides;
  std::size_t peers;   // from this one on they are compared with
  bool rates = false;  // in tokens a second, with what ours waited for
  bool with_products = false;
  StepSetting setting{};
};

// Figures of one step, of what a side recorded under a profiler (profile_steps() of step_side.cpp and of
// bench/peers/llama_step.py): {"kernels", "waits" (calls in which the host waits for the device),
// "copies_to_host", "busy_ms" (some kernel or copy runs), "step_ms" (from the first kernel on), "idle" (share
// of the step in which none does), "gaps": the four a step that are longest, {"ms", "before", "after"},
// "top": the 15 kernels that take longest, {"name", "count", "ms"}, "peak_bytes"}, or {"problem"}.
nlohmann::ordered_json device_figures(const nlohmann::json& profile) {
  nlohmann::ordered_json found = nlohmann::ordered_json::object();
  if (profile.empty()) return found;
  found["peak_bytes"] = profile.value("peak_bytes", 0.0);
  if (profile.contains("problem")) return found["problem"] = profile["problem"], found;
  struct Event {
    std::string name;
    double begin = 0, end = 0;
  };
  std::vector<Event> busy;
  std::map<std::string, std::pair<double, double>> kernels;  // how often, ns
  double waits = 0, copies = 0, count = 0;
  const double steps = profile.at("steps");
  const auto issued = profile.at("issued").get<std::int64_t>();  // ns since then
  double end = 0;
  for (const auto& [on_host, name, from, to] :
       profile.at("events").get<std::vector<std::tuple<bool, std::string, std::int64_t, std::int64_t>>>()) {
    const auto begins = static_cast<double>(from - issued), ends = static_cast<double>(to - issued);
    // Calls of the runtime that return when the device has done something.
    static const std::set<std::string> kWaits = {"cudaStreamSynchronize", "cudaDeviceSynchronize",
                                                 "cudaEventSynchronize",  "cudaMemcpy",
                                                 "cuStreamSynchronize",   "cuCtxSynchronize"};
    if (on_host) {
      waits += kWaits.contains(name) && begins < 1e6;
      continue;
    }
    busy.push_back({name, begins, ends});
    end = std::max(end, ends);
    kernels[name].first += 1, kernels[name].second += ends - begins;
    copies += name.starts_with("Memcpy DtoH"), count += !name.starts_with("Mem");
  }
  std::ranges::sort(busy, {}, &Event::begin);
  std::vector<std::tuple<double, std::string, std::string>> gaps;
  // Before the first kernel the profiler starts, which takes milliseconds.
  const double start = busy.empty() ? 0 : busy.front().begin, length = end - start;
  double covered = 0, until = start;
  std::string last;
  for (const Event& each : busy) {
    if (each.begin > until) gaps.emplace_back(each.begin - until, last, each.name);
    covered += std::max(0.0, each.end - std::max(each.begin, until));
    if (each.end > until) until = each.end, last = each.name;
  }
  found["kernels"] = count / steps, found["waits"] = waits / steps, found["copies_to_host"] = copies / steps;
  found["busy_ms"] = covered / steps / 1e6, found["step_ms"] = length / steps / 1e6;
  found["idle"] = length > 0 ? 1 - covered / length : 1;
  std::ranges::sort(gaps, std::greater());
  gaps.resize(std::min(gaps.size(), 4 * static_cast<std::size_t>(steps)));
  found["gaps"] = found["top"] = nlohmann::ordered_json::array();
  for (const auto& [ns, before, after] : gaps)
    found["gaps"].push_back(
        {{"ms", ns / 1e6}, {"before", before.substr(0, 60)}, {"after", after.substr(0, 60)}});
  std::vector<std::pair<std::string, std::pair<double, double>>> longest(kernels.begin(), kernels.end());
  std::ranges::sort(longest, std::greater(), [](const auto& kernel) { return kernel.second.second; });
  longest.resize(std::min<std::size_t>(longest.size(), 15));
  for (const auto& [name, each] : longest)
    found["top"].push_back(
        {{"name", name}, {"count", each.first / steps}, {"ms", each.second / steps / 1e6}});
  return found;
}

void compare_steps(Bench& bench, const Compared& compared) {
  const StepCase& of = compared.step_case;
  bench.begin(compared.name);
  const ExchangeFolder exchange;
  write_step(exchange.path(), compared.verb, of, compared.ranks, compared.setting);
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
  // A side with a row is ours and not the last; the first that is not ours computes what is right.
  const auto theirs = std::ranges::find_if_not(compared.sides, &Side::is_ours);
  const auto isograds = static_cast<std::size_t>(std::ranges::count_if(compared.sides, &Side::is_ours));
  const SideResult& reference =
      results[std::min(static_cast<std::size_t>(theirs - compared.sides.begin()), results.size() - 1)];
  TextRows rows{{compared.name + compared.text, "ms", "spread"}};
  if (compared.rates) rows[0].insert(rows[0].end(), {"tokens/s", "waits"});
  for (std::size_t i = compared.peers; i < results.size(); ++i)
    rows[0].push_back("x " + results[i].side.name);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const SideResult& mine = results[i];
    const double exposed = mine.exposed.empty() ? 0 : median(mine.exposed) * 1e3;
    rows.push_back({mine.side.title, fixed(mine.median() * 1e3), spread(mine.seconds)});
    if (compared.rates)
      rows.back().insert(rows.back().end(),
                         {fixed(rate(mine, mine.side.ranks), 0), mine.exposed.empty() ? "" : fixed(exposed)});
    const std::string name =
        mine.side.title == "isograd" ? compared.name : compared.name + ", " + mine.side.title;
    for (std::size_t other = compared.peers;
         i < std::min(isograds, results.size() - 1) && other < results.size(); ++other) {
      const SideResult& peer = results[other];
      const Ratio ratio = faster(mine, peer);
      rows.back().push_back(other == i ? "" : ratio.text());
      if (other == i) continue;
      // A process alone has fewer tokens in a step: the time of the step is what counts.
      auto& record = compared.rates && !peer.side.other_tokens
                         ? bench.record(name, rate(mine, mine.side.ranks), rate(peer, mine.side.ranks),
                                        peer.side.title, "tokens/s", ratio.median)
                         : bench.record(name, mine.median() * 1e3, peer.median() * 1e3, peer.side.title, "ms",
                                        ratio.median);
      if (compared.rates && products > 0) record["products_ms"] = products * 1e3;
      if (on_gpu)
        record.update({{"device", "cuda"},
                       {"dtype", compared.setting.dtype},
                       {"ours_ms", mine.median() * 1e3},
                       {"peer_ms", peer.median() * 1e3},
                       {"flops", flops * mine.side.ranks},
                       {"ours_device", device_figures(mine.profile)},
                       {"peer_device", device_figures(peer.profile)}});
      if (compared.rates && !mine.exposed.empty()) record["exposed_ms"] = exposed;
    }
  }
  bench.say(rows);
  if (products > 0)
    bench.say(fmt::format("  a rank's products alone: {:.2f} ms, {:.0f} % of the step of {}\n",
                          products * 1e3, 100 * products / results.front().median(),
                          results.front().side.title));
  if (on_gpu) {
    TextRows device{{"", "TFLOP/s", "kernels", "waits", "to host", "idle", "peak MiB", ""}};
    for (const SideResult& result : results) {
      const auto found = device_figures(result.profile);
      const auto figure = [&](const char* key, double factor, int digits) {
        return fixed(factor * found.value(key, 0.0), digits);
      };
      device.push_back({result.side.title, fixed(flops * result.side.ranks / result.median() / 1e12, 1),
                        figure("kernels", 1, 0), figure("waits", 1, 1), figure("copies_to_host", 1, 1),
                        figure("idle", 100, 1) + " %", figure("peak_bytes", 1 / kMiB, 0),
                        found.value("problem", "")});
    }
    bench.say(device);
  }
  // bf16 has 8 bits: one rounding of the first loss, eight of what follows.
  constexpr double kRounding = 1.0 / 256;
  const Agreement allowed =
      compared.setting.dtype == "float32" ? Agreement{} : Agreement{kRounding, 8 * kRounding, 8 * kRounding};
  for (const SideResult& result : results)
    if (!result.side.other_tokens)
      if (const auto why = disagreement(result, reference, allowed); !why.empty())
        bench.refuse_comparison(why);
}

Side ours(const std::string& strategy, int ranks, const std::string& title = "") {
  return our_side("step-ours", strategy, title.empty() ? find_strategy(strategy).title : title, ranks);
}
Side alone() { return ours("bucketed", 1, "isograd, one rank"); }

std::vector<Side> sides_of_step(const BenchOptions& options, int ranks) {
  std::vector<Side> sides;
  if (ranks == 1) sides.push_back(ours("bucketed", 1, "isograd"));
  for (const Strategy& strategy : chosen(strategies(), options.strategies)) {
    if (ranks == 1 || strategy.parallel != Strategy::Parallel::kData) continue;
    // Parameters on a GPU cannot be in host memory.
    if (options.strategies.empty() && options.device == "cuda" && strategy.share_parameters) continue;
    sides.push_back(ours(strategy.name, ranks));
  }
  const auto add = [&](const std::string& name, const std::string& title, int processes,
                       const std::string& mode) {
    sides.push_back(peer_side(options.python, "llama_step.py", name, title, processes, {mode}));
    sides.back().other_tokens = processes != ranks;
  };
  if (ranks == 1) {
    for (const auto& [name, title] : kAlone)
      if (options.peers.empty() ? (options.compiled || !name.ends_with("compiled")) &&
                                      (options.dtype == "bfloat16" || !name.starts_with("autocast"))
                                : std::ranges::count(options.peers, name) > 0)
        add(name, title, 1, name);
    return sides;
  }
  add("ddp", "PyTorch DDP over Gloo", ranks, "ddp");
  add("fsdp2", "PyTorch FSDP2 over Gloo", ranks, "fsdp2");
  add("single", "one PyTorch process", 1, "eager");
  if (options.compiled) {
    add("ddp-compiled", "DDP over compiled blocks", ranks, "ddp-compiled");
    add("single-compiled", "one compiled PyTorch process", 1, "compiled");
  }
  return sides;
}

void bench_step(Bench& bench) {
  const BenchOptions& options = bench.options;
  const bool one_thread = options.threads == 1, in_bf16 = options.dtype == "bfloat16";
  bench.say(fmt::format(
      "whole training steps, {}, {} thread{} a rank: median, quartile spread, ms of it that a rank waited for\n"
      "communication, and how much faster than each peer (lowest .. highest of single rounds)\n",
      in_bf16 ? "bf16 with fp32 masters" : "fp32", options.threads, one_thread ? "" : "s"));
  const auto cases = chosen(step_cases("step"), options.cases);
  bench.expect(std::ssize(cases) * std::ssize(options.rank_counts), options.seconds);
  for (const StepCase& step_case : cases)
    for (const int ranks : options.rank_counts) {
      const std::vector<Side> sides = sides_of_step(options, ranks);
      const std::string threads = one_thread ? "" : fmt::format(" of {} threads", options.threads);
      compare_steps(
          bench, {.name = fmt::format("{}, {}{}{}", step_case.name, ranks_text(ranks), threads,
                                      in_bf16 ? ", bf16" : ""),
                  .text = fmt::format(", {} tokens a step", step_case.tokens() * ranks),
                  .verb = "step",
                  .step_case = step_case,
                  .ranks = ranks,
                  .sides = sides,
                  .peers = static_cast<std::size_t>(std::ranges::count_if(sides, &Side::is_ours)),
                  .rates = true,
                  .with_products = options.device == "cpu" && one_thread && !in_bf16,
                  .setting = {.device = options.device, .dtype = options.dtype, .threads = options.threads}});
    }
}

// One model on several ranks. `sides` of a case on that many ranks (none: it is not compared on them), and
// the first that others are compared with. `own_batches`: of each rank; otherwise all see one.
struct Together {
  std::vector<Side> sides{};
  std::size_t peers = 0;
};
void compare_together(Bench& bench, const std::string& what, const std::vector<int>& rank_counts,
                      bool own_batches,
                      const std::function<Together(const StepCase& of, int ranks)>& together) {
  bench.say(fmt::format(
      "whole training steps of {}, fp32, one thread a rank: median, quartile spread, and how much\nfaster than each "
      "other side (lowest .. highest of single rounds)\n",
      what));
  std::vector<Compared> all;
  const auto cases = chosen(step_cases(bench.name), bench.options.cases);
  for (const StepCase& of : cases)
    for (const int ranks : rank_counts)
      if (auto [sides, peers] = together(of, ranks); !sides.empty())
        all.push_back({.name = of.name + ", " + ranks_text(ranks),
                       .text = fmt::format(
                           ", {}{} tokens: {}",
                           of.micro_batches == 1 ? "" : fmt::format("{} micro-batches of ", of.micro_batches),
                           of.tokens(), of.text),
                       .verb = bench.name,
                       .step_case = of,
                       .ranks = own_batches ? ranks : 1,
                       .sides = std::move(sides),
                       .peers = peers,
                       .with_products = own_batches});
  bench.expect(std::ssize(all), bench.options.seconds);
  for (const Compared& compared : all) compare_steps(bench, compared);
}

Side theirs(const Bench& bench, const char* script, const std::string& mode, const std::string& title,
            int ranks) {
  return peer_side(bench.options.python, script, mode, title, ranks, {mode});
}

void bench_tensor(Bench& bench) {
  compare_together(
      bench, "one model on one batch", {bench.options.ranks}, false,
      [&](const StepCase& of, int ranks) -> Together {
        if (!of.name.starts_with("overlap"))
          return {{ours("tensor", ranks), ours("tensor-whole", ranks), alone(),
                   theirs(bench, "llama_step.py", "tp", "PyTorch tensor parallel over Gloo", ranks),
                   theirs(bench, "llama_step.py", "eager", "one PyTorch process", 1)},
                  2};
        // Without a peer: what an overlap gains, or costs.
        Together sides{.peers = 3};
        for (const char* strategy :
             {"tensor-weights", "tensor-tokens", "tensor-whole-weights", "tensor", "tensor-whole"})
          sides.sides.push_back(ours(strategy, ranks));
        return sides;
      });
}

void bench_expert(Bench& bench) {
  if (step_cases("expert")[0].shape.experts.count % bench.options.ranks != 0)
    refuse("isograd bench expert --ranks", std::to_string(bench.options.ranks),
           "2, 4 or 8: the PyTorch peer assigns its 8 experts evenly", "Choose one of them");
  compare_together(
      bench, "a mixture of 8 experts, 2 to a token", {1, bench.options.ranks}, true,
      [&](const StepCase& of, int ranks) -> Together {
        if (of.name.starts_with("shared"))  // without a peer: what an overlap gains, or costs
          return ranks == 1 ? Together{}
                            : Together{{ours("expert-shared", ranks), ours("expert-halves", ranks),
                                        ours("expert", ranks)},
                                       1};
        if (ranks == 1)
          return {{alone(),
                   theirs(bench, "experts_step.py", "transformers-loop", "transformers' Mixtral, looping", 1),
                   theirs(bench, "experts_step.py", "transformers", "transformers' Mixtral", 1)},
                  1};
        return {{ours("expert", ranks), ours("expert-halves", ranks),
                 ours("bucketed", ranks, "isograd, all experts on each rank"),
                 theirs(bench, "experts_step.py", "ep", "PyTorch, all-to-all over Gloo, FSDP2", ranks)},
                1};
      });
}

void bench_pipeline(Bench& bench) {
  compare_together(
      bench, "one model in stages", {bench.options.ranks}, false,
      [&](const StepCase&, int ranks) -> Together {
        return {{ours("pipeline-1f1b", ranks), ours("pipeline-zb-h1", ranks), alone(),
                 theirs(bench, "pipeline_step.py", "1f1b", "PyTorch pipelining, 1F1B over Gloo", ranks),
                 theirs(bench, "pipeline_step.py", "eager", "one PyTorch process", 1)},
                2};
      });
}

BenchVerb model_parallel(const std::string& name, const std::string& about, const std::string& axis,
                         Names packages, void (*run)(Bench&)) {
  return verb(
      name, about, kSpeed + status("losses or norms"), {}, std::move(packages), run,
      {ranks("number of ranks along " + axis, 2, 8), cases("case to measure", names_of(step_cases(name)))},
      ", for each case");
}

}  // namespace

BenchVerb step_verb() {
  Names names;
  for (const Strategy& strategy : strategies())
    if (strategy.parallel == Strategy::Parallel::kData) names.push_back(strategy.name);
  BenchOption strategy =
      choice("--strategy", &BenchOptions::strategies,
             "strategy for several ranks; default: bucketed, zero1, zero2, zero3, shared, zero3-shared and "
             "bucketed-late. Names that end in -late are without overlap: also zero1-late, zero2-late, "
             "zero3-late and shared-late",
             std::move(names));
  strategy.lists_choices = false;
  return verb(
      "step", "Whole training steps by each strategy of isograd, by PyTorch alone, and by its DDP and FSDP2",
      kSpeed + status("losses or norms"), {}, {"torch"}, bench_step,
      {rank_counts("number of ranks; default: 1 and 2", 1, 256),
       cases("size of the model to measure", names_of(step_cases("step"))), strategy,
       flag("--compiled", &BenchOptions::compiled,
            "compare with torch.compile too: on one process, and under DDP with compiled blocks"),
       choice(
           "--peer", &BenchOptions::peers,
           "how PyTorch runs on one rank; default: eager, compiled with --compiled, and autocast for bfloat16",
           names_of(kAlone)),
       choice("--dtype", &BenchOptions::dtype, "data type; bfloat16 has fp32 master weights",
              {"float32", "bfloat16"}),
       number("--threads", &BenchOptions::threads, "threads of each rank, and of PyTorch's", 1, 1024),
       choice("--device", &BenchOptions::device,
              "device of a rank; cuda takes a GPU for each rank, over NCCL", {"cpu", "cuda"})},
      ", for each case and number of ranks");
}
BenchVerb tensor_verb() {
  return model_parallel(
      "tensor", "One model on several ranks, compared with PyTorch's parallelize_module and one process",
      "tp", {"torch"}, bench_tensor);
}
BenchVerb expert_verb() {
  return model_parallel(
      "expert", "A mixture of experts, compared with transformers' own and PyTorch's all-to-all over Gloo",
      "ep", {"torch", "transformers"}, bench_expert);
}
BenchVerb pipeline_verb() {
  // torch.distributed.pipelining imports numpy.
  return model_parallel(
      "pipeline", "A model in stages, compared with torch.distributed.pipelining over Gloo and one process",
      "pp", {"torch", "numpy"}, bench_pipeline);
}

}  // namespace isograd
