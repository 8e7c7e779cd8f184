// `isograd bench ranking`: SmoothAP compared with the package imbalanced-losses, thresholds with one sort, a
// large pool on two ranks, and what a forward and backward sends.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "bench/cases/verbs.hpp"
#include "bench/runner.hpp"
#include "isograd/ranking.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

constexpr const char* kPackage = "imbalanced-losses SmoothAPLoss";

struct RankingCase {
  std::string name;
  std::int64_t rows, positives;
  void (*run)(Bench& bench, const RankingCase& of);
  bool standard = true;
  bool has_peer = false;
};

// Without a queue, as all cases have it.
template <typename Options>
Options no_queue(Options options = {}) {
  options.queue_size = 0;
  return options;
}

struct Rows {
  at::Tensor scores, targets;  // [N, 1] fp32, [N] int64
};
// Positives are spread over the rows and score higher on average.
Rows make_rows(std::int64_t count, std::int64_t positives) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Rows rows{.scores = at::randn({count, 1}, generator, at::TensorOptions(at::kFloat)),
            .targets = at::zeros({count}, at::kLong)};
  rows.targets.index_fill_(0, at::arange(positives) * (count / positives), 1);
  rows.scores += rows.targets.unsqueeze(1).to(at::kFloat) * 1.5;
  rows.scores.requires_grad_(true);
  return rows;
}

void print_ranking_case(const RankingCase& of, const std::string& how) {
  fmt::print("{} ({} rows, {} positives, fp32, {})\n", of.name, of.rows, of.positives, how);
}
void print_time(const std::string& name, const std::vector<double>& seconds, const std::string& more) {
  fmt::print("  {:<34} {:>9.4f} s {:>5.1f}%  {}\n", name, median(seconds), 100 * spread(seconds), more);
}

void smooth_ap(Bench& bench, const RankingCase& of) {
  const ExchangeFolder exchange;
  const Rows rows = make_rows(of.rows, of.positives);
  write_case(exchange.path(), {{"rows", of.rows}, {"temperature", RankingOptions().temperature}});
  const auto write = [&](const char* name, const at::Tensor& values) {
    write_file(exchange.path() / name,
               std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
  };
  write("scores.f32", rows.scores.detach()), write("labels.u8", rows.targets.to(at::kByte));
  SmoothAPLoss loss(no_queue<RankingOptions>());
  double value = 0, norm = 0;
  const auto run = [&](const Rows& on) {
    on.scores.mutable_grad().reset();
    const at::Tensor result = loss.forward(on.scores, on.targets);
    result.backward();
    value = result.item<double>(), norm = on.scores.grad().norm().item<double>();
  };
  run(make_rows(2000, 100));  // code and scratch memory of the libraries
  const double memory = peak_growth("ranking", [&] { run(rows); });

  const auto peer =
      start(peer_side(bench.options.python, "ranking_losses.py", "peer", kPackage, 1), exchange.path());
  const Turn first = peer->turn(600);
  std::vector<double> ours, theirs;
  by_turns(2, until(bench.options.seconds), [&](std::size_t i) {
    if (i == 0)
      ours.push_back(seconds_of([&] { run(rows); }));
    else
      theirs.push_back(peer->turn(600).seconds.at(0));
  });
  bench.end();
  const double peer_memory = first.parts.at(0);
  print_ranking_case(of, fmt::format("one thread, forward and backward; {} rounds", ours.size()));
  print_time("isograd", ours, fmt::format("{:>9.1f} MiB", memory / kMiB));
  print_time(
      kPackage, theirs,
      fmt::format("{:>9.1f} MiB   {:.2f} times ours", peer_memory / kMiB, median(theirs) / median(ours)));
  bench.record_less(of.name, median(ours), median(theirs), kPackage, "s");
  bench.record_less(of.name, memory / kMiB, peer_memory / kMiB, kPackage, "MiB");
  // fp32 sums of 10^5 terms on their side.
  const double off = relative_difference({value, norm}, {first.losses.at(0), first.norms.at(0)});
  if (off > 1e-4)
    bench.refuse_comparison(fmt::format("loss or gradient norm differ by {:.2g} (1e-4 allowed)", off));
}

void thresholds(Bench& bench, const RankingCase& of) {
  const Rows rows = make_rows(of.rows, of.positives);
  RecallAtQuantileLoss recall(no_queue<RecallOptions>());
  PAUCAtBudgetLoss pauc(no_queue<PAUCOptions>());
  const auto differentiate = [&](RankingLoss& loss) {
    rows.scores.mutable_grad().reset();
    loss.forward(rows.scores, rows.targets).backward();
  };
  const std::vector<std::pair<std::string, std::function<void()>>> sides = {
      {"RecallAtQuantileLoss", [&] { differentiate(recall); }},
      {"PAUCAtBudgetLoss, trapezoid", [&] { differentiate(pauc); }},
      {"one sort (at::sort of the scores)", [&] { at::sort(rows.scores.detach().squeeze(1)); }}};
  std::vector<std::vector<double>> seconds(sides.size());
  for (const auto& [name, run] : sides) run();
  by_turns(sides.size(), until(bench.options.seconds / 3, 5),
           [&](std::size_t side) { seconds[side].push_back(seconds_of(sides[side].second)); });
  bench.end();
  print_ranking_case(of, fmt::format("one thread, forward and backward; {} rounds", seconds[0].size()));
  const double sort = median(seconds.back());
  for (std::size_t i = 0; i < sides.size(); ++i) {
    print_time(sides[i].first, seconds[i], fmt::format(" {:.2f} sorts", median(seconds[i]) / sort));
    if (i + 1 < sides.size())
      bench.record_less(of.name + ", " + sides[i].first, median(seconds[i]), sort, "one sort", "s");
  }
}

void large(Bench& bench, const RankingCase& of) {
  const Rows rows = make_rows(of.rows, of.positives);
  double seconds = 0, value = 0;
  std::int64_t moved = 0;
  const double memory = peak_growth("ranking", [&] {
    run_ranks(2, [&](World& world) {
      const std::int64_t half = of.rows / 2;
      const at::Tensor scores =
          rows.scores.detach().narrow(0, half * world.rank, half).clone().requires_grad_(true);
      const at::Tensor targets = rows.targets.narrow(0, half * world.rank, half);
      SmoothAPLoss loss(no_queue<RankingOptions>(), world.group);
      world.group.barrier();
      const std::int64_t before = world.group.traffic().bytes();
      const double own = seconds_of([&] {
        const at::Tensor result = loss.forward(scores, targets);
        result.backward();
        if (world.rank == 0) value = result.item<double>();
      });
      if (world.rank == 0) seconds = own, moved = world.group.traffic().bytes() - before;
    });
  });
  bench.end();
  const double pairs = 5.0 * static_cast<double>(of.rows) * static_cast<double>(of.positives);
  print_ranking_case(of, "2 ranks of one thread, forward and backward, once");
  fmt::print(
      "  SmoothAPLoss {:.2f} s, loss {:.6f}; peak memory of both ranks together {:.0f} MiB, where 5 bytes a "
      "pair\n"
      "  would be {:.0f} MiB; each rank sends {:.1f} MiB\n",
      seconds, value, memory / kMiB, pairs / kMiB, static_cast<double>(moved) / kMiB);
  bench.record_less(of.name, memory / kMiB, pairs / kMiB, "5 bytes a pair, computed", "MiB");
}

// Traffic of one forward and backward, next to what docs/ranking.md says is the least.
void print_traffic() {
  static constexpr int kRanks = 2;
  static constexpr std::int64_t kRows = 1000;
  fmt::print(
      "collectives of a forward and backward, 2 ranks, {} rows, fp32, one class, as a ring sends them\n",
      kRows);
  run_ranks(kRanks, [&](World& world) {
    auto recall = no_queue<RecallOptions>();
    auto trapezoid = no_queue<PAUCOptions>(), pairwise = trapezoid;
    pairwise.surrogate = PAUCOptions::Surrogate::kPairwise, pairwise.beta = 0.1;
    auto selected_trapezoid = trapezoid;
    auto selected_recall = recall;
    selected_trapezoid.thresholds = selected_recall.thresholds = Thresholds::kSelect;
    struct Kind {
      std::shared_ptr<RankingLoss> loss;
      bool divided = false;         // each rank computes a part of the pairs
      std::int64_t statistics = 0;  // that thresholds are selected by; 0: rows are gathered
    };
    const std::vector<Kind> losses = {
        {std::make_shared<SmoothAPLoss>(no_queue<RankingOptions>(), world.group), true},
        {std::make_shared<RecallAtQuantileLoss>(recall, world.group)},
        {std::make_shared<RecallAtQuantileLoss>(selected_recall, world.group), false, 1},
        {std::make_shared<PAUCAtBudgetLoss>(trapezoid, world.group)},
        {std::make_shared<PAUCAtBudgetLoss>(selected_trapezoid, world.group), false, 4},
        {std::make_shared<PAUCAtBudgetLoss>(pairwise, world.group), true}};
    for (const auto& [loss, divided, statistics] : losses) {
      const at::Tensor scores = at::randn({kRows / kRanks, 1}).requires_grad_(true);
      const at::Tensor targets = at::arange(kRows / kRanks).remainder(10).eq(0).to(at::kLong);
      const Traffic before = world.group.traffic();
      loss->forward(scores, targets).backward();
      const Traffic after = world.group.traffic();
      std::int64_t calls = 0;
      for (const auto& [name, operation] : after.operations) {
        const auto was = before.operations.find(name);
        calls += operation.calls - (was == before.operations.end() ? 0 : was->second.calls);
      }
      if (world.rank != 0) continue;
      const auto part = [](std::int64_t whole) { return whole * (kRanks - 1) / kRanks; };
      std::int64_t least = part(88 * kRanks);
      if (statistics == 0) least += part(5 * kRows);
      if (divided) least += part(4 * (kRows + 3 * kRanks));
      if (statistics > 0)  // statistics that agree in their first digits share counts
        least += part(2 * 4 * 2049) + part(2 * 4 * 2048 * statistics) + part(2 * 4 * 1024 * statistics) +
                 part(2 * 8 * 7);
      fmt::print("  {:<48} {} collectives, {} bytes; the documented {}: {}, {}\n",
                 loss->name() + (divided          ? " (work dealt out)"
                                 : statistics > 0 ? " (thresholds selected)"
                                                  : " (gathered)"),
                 calls, after.bytes() - before.bytes(), statistics > 1 ? "most" : "least",
                 statistics > 0 ? 5
                 : divided      ? 3
                                : 2,
                 least);
    }
  });
}

const std::vector<RankingCase> kRankingCases = {{"tiny", 2000, 100, smooth_ap, false, true},
                                                {"smooth_ap", 100000, 1000, smooth_ap, true, true},
                                                {"thresholds", 1000000, 5000, thresholds},
                                                {"large", 1000000, 5000, large}};

}  // namespace

std::vector<std::string> bench_ranking_cases() {
  return names_of(kRankingCases);
}

void bench_ranking(Bench& bench) {
  at::set_num_threads(1);
  const auto cases = chosen(kRankingCases, bench.options.cases);
  if (std::ranges::any_of(cases, &RankingCase::has_peer))
    require_packages("ranking", bench.options.python, {"torch", "imbalanced_losses"});
  bench.expect(std::ssize(cases), bench.options.seconds);
  for (const RankingCase& of : cases) {
    bench.begin(of.name);
    of.run(bench, of);
    std::fflush(stdout);
  }
  print_traffic();
}

}  // namespace isograd
