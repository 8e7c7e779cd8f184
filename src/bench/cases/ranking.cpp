// `isograd bench ranking`: SmoothAP compared with the package imbalanced-losses, thresholds with one sort, a
// large pool on two ranks, and what a forward and backward sends.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "base/files.hpp"
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

// The loss and the norm of its gradient.
std::vector<double> differentiate(RankingLoss& loss, const Rows& rows) {
  rows.scores.mutable_grad().reset();
  const at::Tensor value = loss.forward(rows.scores, rows.targets);
  value.backward();
  return {value.item<double>(), rows.scores.grad().norm().item<double>()};
}

std::string heading(const RankingCase& of, std::size_t rounds) {
  return fmt::format("{} ({} rows, {} positives, fp32, one thread, forward and backward; {} rounds)", of.name,
                     of.rows, of.positives, rounds);
}

void smooth_ap(Bench& bench, const RankingCase& of) {
  const ExchangeFolder exchange;
  const Rows rows = make_rows(of.rows, of.positives);
  write_case(exchange.path(), {{"rows", of.rows}, {"temperature", RankingOptions().temperature}});
  for (const auto& [name, values] :
       {std::pair{"scores.f32", rows.scores.detach()}, {"labels.u8", rows.targets.to(at::kByte)}})
    write_file(exchange.path() / name,
               std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
  SmoothAPLoss loss(no_queue<RankingOptions>());
  differentiate(loss, make_rows(2000, 100));  // code and scratch memory of the libraries
  std::vector<double> values;
  const double memory = peak_growth("ranking", [&] { values = differentiate(loss, rows); });
  Contestant peer(peer_side(bench.options.python, "ranking_losses.py", "peer", kPackage, 1), exchange.path());
  const Turn first = peer.turn();
  const auto seconds = race({[&] { return seconds_of([&] { differentiate(loss, rows); }); },
                             [&] { return peer.turn().seconds.at(0); }},
                            until(bench.options.seconds));
  bench.end();
  const double ours = median(seconds[0]), theirs = median(seconds[1]), peer_memory = first.parts.at(0);
  bench.say(
      {{heading(of, seconds[0].size()), "s", "spread", "MiB", "times ours"},
       {"isograd", fixed(ours, 4), spread(seconds[0]), fixed(memory / kMiB, 1)},
       {kPackage, fixed(theirs, 4), spread(seconds[1]), fixed(peer_memory / kMiB, 1), fixed(theirs / ours)}});
  bench.record_less(of.name, ours, theirs, kPackage, "s");
  bench.record_less(of.name, memory / kMiB, peer_memory / kMiB, kPackage, "MiB");
  // fp32 sums of 10^5 terms on their side.
  const double off = relative_difference(values, {first.losses.at(0), first.norms.at(0)});
  if (off > 1e-4)
    bench.refuse_comparison(fmt::format("loss or gradient norm differ by {:.2g} (1e-4 allowed)", off));
}

void thresholds(Bench& bench, const RankingCase& of) {
  const Rows rows = make_rows(of.rows, of.positives);
  RecallAtQuantileLoss recall(no_queue<RecallOptions>());
  PAUCAtBudgetLoss pauc(no_queue<PAUCOptions>());
  const Names names = {"RecallAtQuantileLoss", "PAUCAtBudgetLoss, trapezoid",
                       "one sort (at::sort of the scores)"};
  const std::vector<std::function<double()>> sides = {
      [&] { return seconds_of([&] { differentiate(recall, rows); }); },
      [&] { return seconds_of([&] { differentiate(pauc, rows); }); },
      [&] { return seconds_of([&] { at::sort(rows.scores.detach().squeeze(1)); }); }};
  race(sides, [](std::size_t round) { return round == 0; });
  const auto seconds = race(sides, until(bench.options.seconds / 3, 5));
  bench.end();
  TextRows table{{heading(of, seconds[0].size()), "s", "spread", "sorts"}};
  const double sort = median(seconds.back());
  for (std::size_t i = 0; i < names.size(); ++i) {
    const double own = median(seconds[i]);
    table.push_back({names[i], fixed(own, 4), spread(seconds[i]), fixed(own / sort)});
    if (i + 1 < names.size()) bench.record_less(of.name + ", " + names[i], own, sort, "one sort", "s");
  }
  bench.say(table);
}

void large(Bench& bench, const RankingCase& of) {
  const Rows rows = make_rows(of.rows, of.positives);
  double seconds = 0, value = 0, moved = 0;
  const double memory = peak_growth("ranking", [&] {
    run_ranks(2, [&](World& world) {
      const std::int64_t half = of.rows / 2;
      const auto own = [&](const at::Tensor& all) {
        return all.detach().narrow(0, half * world.rank, half).clone();
      };
      const Rows mine{own(rows.scores).requires_grad_(true), own(rows.targets)};
      SmoothAPLoss loss(no_queue<RankingOptions>(), world.group);
      world.group.barrier();
      const std::int64_t before = world.group.traffic().bytes();
      double result = 0;
      const double took = seconds_of([&] { result = differentiate(loss, mine).front(); });
      if (world.rank == 0)
        seconds = took, value = result, moved = static_cast<double>(world.group.traffic().bytes() - before);
    });
  });
  bench.end();
  const double pairs = 5.0 * static_cast<double>(of.rows) * static_cast<double>(of.positives);
  bench.say(fmt::format(
      "{} ({} rows, {} positives, fp32, 2 ranks of one thread, forward and backward, once)\n"
      "  SmoothAPLoss {:.2f} s, loss {:.6f}; peak memory of both ranks together {:.0f} MiB, where 5 bytes a pair\n"
      "  would be {:.0f} MiB; each rank sends {:.1f} MiB\n",
      of.name, of.rows, of.positives, seconds, value, memory / kMiB, pairs / kMiB, moved / kMiB));
  bench.record_less(of.name, memory / kMiB, pairs / kMiB, "5 bytes a pair, computed", "MiB");
}

// Traffic of one forward and backward, next to what docs/ranking.md says is the least.
void say_traffic(Bench& bench) {
  static constexpr int kRanks = 2;
  static constexpr std::int64_t kRows = 1000;
  bench.say(fmt::format(
      "collectives of a forward and backward, 2 ranks, {} rows, fp32, one class, as a ring sends them\n",
      kRows));
  run_ranks(kRanks, [&](World& world) {
    auto recall = no_queue<RecallOptions>(), selected_recall = recall;
    auto trapezoid = no_queue<PAUCOptions>(), pairwise = trapezoid, selected_trapezoid = trapezoid;
    pairwise.surrogate = PAUCOptions::Surrogate::kPairwise, pairwise.beta = 0.1;
    selected_trapezoid.thresholds = selected_recall.thresholds = Thresholds::kSelect;
    const auto part = [](std::int64_t whole) { return whole * (kRanks - 1) / kRanks; };
    const std::int64_t gathered = part(88 * kRanks) + part(5 * kRows),
                       divided = gathered + part(4 * (kRows + 3 * kRanks));
    // Statistics that agree in their first digits share counts.
    const auto selected = [&](std::int64_t statistics) {
      return part(88 * kRanks) + part(2 * 4 * 2049) + part(2 * 4 * 2048 * statistics) +
             part(2 * 4 * 1024 * statistics) + part(2 * 8 * 7);
    };
    struct Kind {
      std::shared_ptr<RankingLoss> loss;
      const char* how;
      int calls;
      std::int64_t bytes;
      const char* bound = "least";
    };
    const Kind kinds[] = {
        {std::make_shared<SmoothAPLoss>(no_queue<RankingOptions>(), world.group), "work divided", 3, divided},
        {std::make_shared<RecallAtQuantileLoss>(recall, world.group), "gathered", 2, gathered},
        {std::make_shared<RecallAtQuantileLoss>(selected_recall, world.group), "thresholds selected", 5,
         selected(1)},
        {std::make_shared<PAUCAtBudgetLoss>(trapezoid, world.group), "gathered", 2, gathered},
        {std::make_shared<PAUCAtBudgetLoss>(selected_trapezoid, world.group), "thresholds selected", 5,
         selected(4), "most"},
        {std::make_shared<PAUCAtBudgetLoss>(pairwise, world.group), "work divided", 3, divided}};
    TextRows table{{"", "collectives", "bytes", "documented", "of them", ""}};
    for (const auto& [loss, how, calls, bytes, bound] : kinds) {
      const Rows rows{at::randn({kRows / kRanks, 1}).requires_grad_(true),
                      at::arange(kRows / kRanks).remainder(10).eq(0).to(at::kLong)};
      const auto all_calls = [&] {
        std::int64_t sum = 0;
        for (const auto& [name, operation] : world.group.traffic().operations) sum += operation.calls;
        return sum;
      };
      const std::int64_t calls_before = all_calls(), bytes_before = world.group.traffic().bytes();
      differentiate(*loss, rows);
      table.push_back({fmt::format("{} ({})", loss->name(), how), std::to_string(all_calls() - calls_before),
                       std::to_string(world.group.traffic().bytes() - bytes_before), std::to_string(calls),
                       std::to_string(bytes), bound});
    }
    if (world.rank == 0) bench.say(table);
  });
}

const std::vector<RankingCase> kRankingCases = {{"tiny", 2000, 100, smooth_ap, false, true},
                                                {"smooth_ap", 100000, 1000, smooth_ap, true, true},
                                                {"thresholds", 1000000, 5000, thresholds},
                                                {"large", 1000000, 5000, large}};

void bench_ranking(Bench& bench) {
  at::set_num_threads(1);
  const auto cases = chosen(kRankingCases, bench.options.cases);
  if (std::ranges::any_of(cases, &RankingCase::has_peer))
    require_packages("ranking", bench.options.python, {"torch", "imbalanced_losses"});
  bench.expect(std::ssize(cases), bench.options.seconds);
  for (const RankingCase& of : cases) {
    bench.begin(of.name);
    of.run(bench, of);
  }
  say_traffic(bench);
}

}  // namespace

BenchVerb ranking_verb() {
  return verb("ranking", "Ranking losses, compared with the package imbalanced-losses and with a sort",
              kSpeedOrMemory + status("the losses or gradients"), {.seconds = 24}, {}, bench_ranking,
              {cases("case to measure", names_of(kRankingCases))}, "", "imbalanced-losses");
}

}  // namespace isograd
