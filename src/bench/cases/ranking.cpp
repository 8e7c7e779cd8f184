// Ranking losses: SmoothAP beside the package imbalanced-losses, thresholds beside one sort, and a large pool
// on two ranks.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/exchange.hpp"
#include "bench/process_memory.hpp"
#include "bench/rounds.hpp"
#include "isograd/error.hpp"
#include "isograd/ranking.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

constexpr double kMiB = 1 << 20;
constexpr const char* kPackage = "imbalanced-losses SmoothAPLoss";

struct RankingCase {
  std::string name;
  enum class Kind { kSmoothAP, kSort, kLarge } kind;
  std::int64_t rows, positives;
  bool standard = true;
};
const std::vector<RankingCase>& ranking_cases() {
  using enum RankingCase::Kind;
  static const std::vector<RankingCase> cases = {
      {.name = "tiny", .kind = kSmoothAP, .rows = 2000, .positives = 100, .standard = false},
      {.name = "smooth_ap", .kind = kSmoothAP, .rows = 100000, .positives = 1000},
      {.name = "thresholds", .kind = kSort, .rows = 1000000, .positives = 5000},
      {.name = "large", .kind = kLarge, .rows = 1000000, .positives = 5000}};
  return cases;
}

struct Rows {
  at::Tensor scores, targets;  // [N, 1] fp32, [N] int64
};

// Positives are spread over the rows and score higher on average.
Rows make_rows(const RankingCase& of) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Rows rows{.scores = at::randn({of.rows, 1}, generator, at::TensorOptions(at::kFloat)),
            .targets = at::zeros({of.rows}, at::kLong)};
  const at::Tensor places = at::arange(of.positives) * (of.rows / of.positives);
  rows.targets.index_fill_(0, places, 1);
  rows.scores += rows.targets.unsqueeze(1).to(at::kFloat) * 1.5;
  return rows;
}

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Growth of the resident set at its peak, the gradients included.
double peak_bytes_of(const std::function<void()>& run) {
  std::ofstream("/proc/self/clear_refs") << "5";
  const double before = status_bytes("bench ranking", "VmRSS");
  run();
  return status_bytes("bench ranking", "VmHWM") - before;
}

struct Spread {
  double median, quartiles;
};
Spread spread_of(const std::vector<double>& seconds) {
  const double median = quantile(seconds, 0.5);
  return {median, (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / median};
}

RankingOptions without_queue() {
  RankingOptions options;
  options.queue_size = 0;
  return options;
}

bool smooth_ap(const RankingCase& of, const BenchRankingOptions& options, Waiting& waiting,
               nlohmann::ordered_json& records) {
  const ExchangeFolder exchange;
  Rows rows = make_rows(of);
  const double temperature = RankingOptions().temperature;
  write_file(exchange.path() / "case.json",
             nlohmann::json({{"rows", of.rows}, {"temperature", temperature}, {"runs", 1}}).dump());
  const auto bytes = [](const at::Tensor& t) {
    return std::string(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  };
  write_file(exchange.path() / "scores.f32", bytes(rows.scores));
  write_file(exchange.path() / "labels.u8", bytes(rows.targets.to(at::kByte)));
  rows.scores.requires_grad_(true);
  SmoothAPLoss loss(without_queue());
  double value = 0, norm = 0;
  const auto run = [&](const Rows& on) {
    on.scores.mutable_grad().reset();
    const at::Tensor result = loss.forward(on.scores, on.targets);
    result.backward();
    value = result.item<double>(), norm = on.scores.grad().norm().item<double>();
  };
  Rows small = make_rows(ranking_cases().front());
  small.scores.requires_grad_(true);
  run(small);  // code and scratch memory of the libraries
  const double memory = peak_bytes_of([&] { run(rows); });

  Contestant peer("peer",
                  {find_python(options.python), "-W", "ignore", find_peer("ranking_losses.py").string(),
                   exchange.path().string(), "peer"},
                  exchange.path(), 1);
  const Turn first = peer.turn(600);
  std::vector<double> ours, theirs;
  const auto turn_of_ours = [&] { ours.push_back(seconds_of([&] { run(rows); })); };
  const auto turn_of_peer = [&] { theirs.push_back(peer.turn(600).seconds.at(0)); };
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (int round = 0; round < 3 || elapsed() < options.seconds; ++round) {
    if (round % 2 == 0)
      turn_of_ours(), turn_of_peer();
    else
      turn_of_peer(), turn_of_ours();
  }
  waiting.end();
  const Spread mine = spread_of(ours), other = spread_of(theirs);
  const double peer_memory = first.parts.at(0);
  fmt::print("{} ({} rows, {} positives, fp32, one thread, forward and backward; {} rounds)\n", of.name,
             of.rows, of.positives, ours.size());
  fmt::print("  {:<34} {:>9.4f} s {:>5.1f}%  {:>9.1f} MiB\n", "isograd", mine.median, 100 * mine.quartiles,
             memory / kMiB);
  fmt::print("  {:<34} {:>9.4f} s {:>5.1f}%  {:>9.1f} MiB   {:.2f} times ours\n", kPackage, other.median,
             100 * other.quartiles, peer_memory / kMiB, other.median / mine.median);
  records.push_back(
      bench_record("ranking", of.name, mine.median, other.median, kPackage, "s", other.median / mine.median));
  records.push_back(bench_record("ranking", of.name, memory / kMiB, peer_memory / kMiB, kPackage, "MiB",
                                 peer_memory / memory));
  // fp32 sums of 10^5 terms on their side.
  const double off =
      std::max(relative_difference(value, first.losses.at(0)), relative_difference(norm, first.norms.at(0)));
  if (off > 1e-4)
    fmt::print("  NOT COMPARABLE: loss or gradient norm differ by {:.2g} (1e-4 allowed)\n", off);
  return off <= 1e-4;
}

void thresholds(const RankingCase& of, const BenchRankingOptions& options, Waiting& waiting,
                nlohmann::ordered_json& records) {
  Rows rows = make_rows(of);
  rows.scores.requires_grad_(true);
  RecallOptions recall_options;
  recall_options.queue_size = 0;
  PAUCOptions pauc_options;
  pauc_options.queue_size = 0;
  RecallAtQuantileLoss recall(recall_options);
  PAUCAtBudgetLoss pauc(pauc_options);
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
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (std::size_t round = 0; round < 5 || elapsed() < options.seconds / 3; ++round)
    for (std::size_t i = 0; i < sides.size(); ++i) {
      const std::size_t side = round % 2 == 0 ? i : sides.size() - 1 - i;
      seconds[side].push_back(seconds_of(sides[side].second));
    }
  waiting.end();
  fmt::print("{} ({} rows, {} positives, fp32, one thread, forward and backward; {} rounds)\n", of.name,
             of.rows, of.positives, seconds[0].size());
  const Spread sort = spread_of(seconds.back());
  for (std::size_t i = 0; i < sides.size(); ++i) {
    const Spread found = spread_of(seconds[i]);
    fmt::print("  {:<34} {:>9.4f} s {:>5.1f}%   {:.2f} sorts\n", sides[i].first, found.median,
               100 * found.quartiles, found.median / sort.median);
    if (i + 1 < sides.size())
      records.push_back(bench_record("ranking", of.name + ", " + sides[i].first, found.median, sort.median,
                                     "one sort", "s", sort.median / found.median));
  }
}

void large(const RankingCase& of, Waiting& waiting, nlohmann::ordered_json& records) {
  const Rows rows = make_rows(of);
  double seconds = 0, value = 0, memory = 0;
  std::int64_t moved = 0;
  memory = peak_bytes_of([&] {
    run_ranks(2, [&](World& world) {
      const std::int64_t half = of.rows / 2;
      const at::Tensor scores = rows.scores.narrow(0, half * world.rank, half).clone().requires_grad_(true);
      const at::Tensor targets = rows.targets.narrow(0, half * world.rank, half);
      SmoothAPLoss loss(without_queue(), world.group);
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
  waiting.end();
  const double pairs = 5.0 * static_cast<double>(of.rows) * static_cast<double>(of.positives);
  fmt::print("{} ({} rows, {} positives, fp32, 2 ranks of one thread, forward and backward, once)\n", of.name,
             of.rows, of.positives);
  fmt::print(
      "  SmoothAPLoss {:.2f} s, loss {:.6f}; peak memory of both ranks together {:.0f} MiB, where 5 bytes a "
      "pair\n"
      "  would be {:.0f} MiB; each rank sends {:.1f} MiB\n",
      seconds, value, memory / kMiB, pairs / kMiB, static_cast<double>(moved) / kMiB);
  records.push_back(bench_record("ranking", of.name, memory / kMiB, pairs / kMiB, "5 bytes a pair, computed",
                                 "MiB", pairs / memory));
}

// Traffic of one forward and backward, beside what docs/ranking.md says is the least.
void traffic() {
  static constexpr int kRanks = 2;
  static constexpr std::int64_t kRows = 1000;
  fmt::print(
      "collectives of a forward and backward, 2 ranks, {} rows, fp32, one class, as a ring sends them\n",
      kRows);
  run_ranks(kRanks, [&](World& world) {
    PAUCOptions pairwise;
    pairwise.queue_size = 0, pairwise.surrogate = PAUCOptions::Surrogate::kPairwise, pairwise.beta = 0.1;
    PAUCOptions trapezoid;
    trapezoid.queue_size = 0;
    RecallOptions recall;
    recall.queue_size = 0;
    auto selected_trapezoid = trapezoid;
    auto selected_recall = recall;
    selected_trapezoid.thresholds = selected_recall.thresholds = Thresholds::kSelect;
    struct Kind {
      std::shared_ptr<RankingLoss> loss;
      bool dealt = false;
      std::int64_t statistics = 0;  // that thresholds are selected by; 0: rows are gathered
    };
    const std::vector<Kind> losses = {
        {std::make_shared<SmoothAPLoss>(without_queue(), world.group), true},
        {std::make_shared<RecallAtQuantileLoss>(recall, world.group)},
        {std::make_shared<RecallAtQuantileLoss>(selected_recall, world.group), false, 1},
        {std::make_shared<PAUCAtBudgetLoss>(trapezoid, world.group)},
        {std::make_shared<PAUCAtBudgetLoss>(selected_trapezoid, world.group), false, 4},
        {std::make_shared<PAUCAtBudgetLoss>(pairwise, world.group), true}};
    for (const auto& [loss, dealt, statistics] : losses) {
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
      const auto part = [](std::int64_t whole) { return whole * (kRanks - 1) / kRanks; };
      std::int64_t least = part(88 * kRanks);
      if (statistics == 0) least += part(5 * kRows);
      if (dealt) least += part(4 * (kRows + 3 * kRanks));
      if (statistics > 0)  // statistics that agree in their first digits share counts
        least += part(2 * 4 * 2049) + part(2 * 4 * 2048 * statistics) + part(2 * 4 * 1024 * statistics) +
                 part(2 * 8 * 7);
      const char* how = dealt            ? " (work dealt out)"
                        : statistics > 0 ? " (thresholds selected)"
                                         : " (gathered)";
      if (world.rank == 0)
        fmt::print("  {:<48} {} collectives, {} bytes; the documented {}: {}, {}\n", loss->name() + how,
                   calls, after.bytes() - before.bytes(), statistics > 1 ? "most" : "least",
                   statistics > 0 ? 5
                   : dealt        ? 3
                                  : 2,
                   least);
    }
  });
}

}  // namespace

std::vector<std::string> bench_ranking_cases() {
  std::vector<std::string> names;
  for (const auto& of : ranking_cases()) names.push_back(of.name);
  return names;
}

int bench_ranking(const BenchRankingOptions& options) {
  at::set_num_threads(1);
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  std::vector<RankingCase> cases;
  for (const auto& of : ranking_cases())
    if (options.cases.empty()
            ? of.standard
            : std::find(options.cases.begin(), options.cases.end(), of.name) != options.cases.end())
      cases.push_back(of);
  if (std::ranges::any_of(cases, [](const auto& of) { return of.kind == RankingCase::Kind::kSmoothAP; }))
    require_packages("ranking", options.python, {"torch", "imbalanced_losses"});
  Waiting waiting("case", std::ssize(cases), options.seconds);
  for (const auto& of : cases) {
    waiting.begin(of.name);
    if (of.kind == RankingCase::Kind::kSmoothAP)
      comparable = smooth_ap(of, options, waiting, records) && comparable;
    if (of.kind == RankingCase::Kind::kSort) thresholds(of, options, waiting, records);
    if (of.kind == RankingCase::Kind::kLarge) large(of, waiting, records);
    std::fflush(stdout);
  }
  traffic();
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
