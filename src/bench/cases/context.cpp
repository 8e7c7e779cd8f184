// `isograd bench context`: one batch on several context ranks, compared with the same batch on one rank
// alone: time by turns, memory by length.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <ctime>
#include <random>

#include "base/refuse.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/runner.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/model.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "layout/cost/meter.hpp"
#include "model/attention/attention.hpp"

namespace isograd {
namespace {

constexpr const char* kWhole = "one rank on the whole batch";
constexpr const char* kRingPeer = "PyTorch's ring attention over Gloo";
enum : std::size_t { kCpu, kPeak };  // parts of a turn: seconds of the busiest rank's processor, bytes

struct ContextCase {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the documents
  DecoderConfig model{};
  bool attention_alone = false;  // one layer's attention, nothing else
  bool standard = true;
  bool turns = true;  // false: memory alone
};

std::vector<std::int64_t> drawn_pack(std::int64_t tokens) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> draw(6, 1.2);
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back())
    lengths.push_back(std::min(left, 1 + static_cast<std::int64_t>(draw(random))));
  return lengths;
}

const std::vector<ContextCase>& context_cases() {
  static const std::vector<ContextCase> all = [] {
    DecoderConfig model;  // 256 wide, four layers
    model.max_positions = 1 << 17;
    DecoderConfig tiny = model, narrow = model;
    tiny.hidden = 32, tiny.layers = 1, tiny.head_dim = 8, tiny.feed_forward = 48;
    narrow.hidden = 64, narrow.layers = 2, narrow.heads = narrow.key_value_heads = 2, narrow.head_dim = 32;
    narrow.feed_forward = 176;
    std::vector<ContextCase> made = {
        {"tiny", {100, 20}, tiny, false, false},
        {"tiny one", {128}, tiny, false, false},
        {"tiny pack 2", {64, 64}, tiny, true, false},
        {"tiny pack 3", {64, 32, 32}, tiny, true, false},
        {"attention 8k", {8192}, model, true},
        {"model 8k", {8192}, model},
        {"packed 16k", drawn_pack(16384), model},
        // The same number of tokens and different sums of squares.
        {"pack 2 x 8k", {8192, 8192}, model, true},
        {"pack halving", {8192, 4096, 2048, 1024, 512, 512}, model, true},
        {"pack 4 x 4k", std::vector<std::int64_t>(4, 4096), model, true},
        {"pack drawn", drawn_pack(16384), model, true},
        {"pack 16 x 1k", std::vector<std::int64_t>(16, 1024), model, true},
    };
    for (const std::int64_t k : {4, 8, 16, 32, 64})
      made.push_back({fmt::format("memory {}k", k), {k << 10}, narrow, false, true, false});
    return made;
  }();
  return all;
}

Batch make_batch(const ContextCase& of) {
  Batch batch;
  std::vector<at::Tensor> positions;
  for (std::size_t d = 0; d < of.lengths.size(); ++d) {
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + of.lengths[d]);
    batch.sample_ids.push_back(static_cast<std::int64_t>(d));
    positions.push_back(at::arange(of.lengths[d]));
  }
  const std::int64_t tokens = batch.num_tokens();
  batch.tokens = (at::arange(tokens) * 7919 + 13) % of.model.vocabulary;
  batch.targets = (batch.tokens * 31 + 1) % of.model.vocabulary;
  batch.positions = at::cat(positions);
  for (std::size_t d = 0; d < of.lengths.size(); ++d) {
    batch.targets[batch.cu_seqlens[d + 1] - 1] = kIgnoreIndex;
    batch.sample_targets.push_back(of.lengths[d] - 1);
  }
  return batch;
}

CutOptions cut_options(const ContextCase& of, int ranks, int ulysses) {
  return {.ring = ranks / ulysses,
          .ulysses = ulysses,
          .token_cost = of.attention_alone ? 0 : 6 * of.model.hidden};
}

// A step of a model, or one layer's attention, of several ranks or of one.
class ContextRunner {
 public:
  ContextRunner(const ContextCase& of, const World& world, int ulysses) : of_(of), group_(world.group) {
    const Mesh mesh(world, data_grid(world.size, {.cp_ring = world.size / ulysses, .cp_ulysses = ulysses}));
    const Batch whole = make_batch(of);
    batch_ = world.size == 1
                 ? whole
                 : cut_batch(whole, cut_documents(whole.cu_seqlens, cut_options(of, world.size, ulysses)),
                             world.rank);
    if (of.attention_alone) {
      if (world.size > 1) attention_ = ContextAttention(mesh);
      // By document and position, so that every rank's part has the same values.
      for (const auto& [heads, phase] : {std::pair{of.model.heads, 0.0},
                                         {of.model.key_value_heads, 1.0},
                                         {of.model.key_value_heads, 2.0}}) {
        const at::Tensor place = (batch_.positions.to(at::kFloat) + phase).view({-1, 1, 1});
        const at::Tensor channel = at::arange(heads * of.model.head_dim, at::kFloat).view({1, heads, -1});
        qkv_.push_back(at::sin(place * 0.37 + channel * 1.7).requires_grad_());
      }
      return;
    }
    model_ = std::make_shared<DecoderLM>(of.model, at::kFloat, 1);
    if (world.size > 1) model_->set_attention(ContextAttention(mesh));
    layout_ = bucketed(trainable_parameters(model_->named()), mesh);
    step_ = std::make_unique<Step>(
        [model = model_](const Batch& part) -> LossTerms {
          return {{"cross_entropy", cross_entropy_sum(model->logits(part), part.targets)}};
        },
        *layout_, mean_, *optimizer_, StepOptions{});
  }

  // The loss and the norm of the gradient, of the whole batch.
  std::vector<double> run() {
    if (step_) {
      const StepReport report = (*step_)({batch_});
      return {report.loss, report.norm};
    }
    const at::Tensor out = attention_ ? (*attention_)(batch_, qkv_[0], qkv_[1], qkv_[2]) : alone();
    const at::Tensor loss = out.square().sum();
    loss.backward();
    at::Tensor sums = at::zeros({2}, at::kDouble);
    sums[0] = loss.detach();
    for (at::Tensor& x : qkv_) {
      sums[1] += x.grad().square().sum();
      x.mutable_grad().reset();  // not of the next run's memory
    }
    if (group_.size() > 1) group_.all_reduce(sums);
    return {sums[0].item<double>(), std::sqrt(sums[1].item<double>())};
  }

 private:
  at::Tensor alone() const {
    if (of_.lengths.size() > 1)
      return variable_length_attention(qkv_[0], qkv_[1], qkv_[2], batch_.cu_seqlens);
    const auto heads_first = [&](std::size_t i) { return qkv_[i].transpose(0, 1).unsqueeze(0); };
    return at::scaled_dot_product_attention(heads_first(0), heads_first(1), heads_first(2), {}, 0, true)
        .squeeze(0)
        .transpose(0, 1);
  }

  const ContextCase of_;
  Batch batch_;
  Group group_;
  std::optional<ContextAttention> attention_;
  std::vector<at::Tensor> qkv_;
  std::shared_ptr<DecoderLM> model_;
  std::unique_ptr<DataParallel> layout_;
  TokenMean mean_;
  std::unique_ptr<Optimizer> optimizer_ = sgd({.learning_rate = 0});
  std::unique_ptr<Step> step_;
};

// Two sides and their records.
void compare_times(Bench& bench, const ContextCase& of, const std::vector<double>& ours,
                   const std::vector<double>& theirs, const std::string& name) {
  const double mine = 1e3 * median(ours), other = 1e3 * median(theirs),
               mine_least = 1e3 * std::ranges::min(ours), other_least = 1e3 * std::ranges::min(theirs);
  // In turns that followed each other both had the same clock.
  std::vector<double> pairs;
  for (std::size_t i = 0; i < ours.size(); ++i) pairs.push_back(ours[i] / theirs.at(i));
  bench.say(fmt::format(
      "  compared with {}: median {:.1f} and {:.1f} ms, {:.3f}x; least {:.1f} and {:.1f}, {:.3f}x; median of "
      "{} pairs {:.3f}x\n",
      name, mine, other, mine / other, mine_least, other_least, mine_least / other_least, ours.size(),
      median(pairs)));
  bench.record_less(of.name, mine, other, name, "ms");
  bench.record_less(of.name + ", least", mine_least, other_least, name, "ms");
}

// Attention's time follows the sum of squares, and the best cut divides all of it evenly.
void compare_pack(Bench& bench, const ContextCase& of, double ours, double alone) {
  double row = 0, squares = 0;
  for (const std::int64_t length : of.lengths) {
    row += static_cast<double>(length);
    squares += static_cast<double>(length) * static_cast<double>(length);
  }
  const double best = alone / bench.options.ranks;
  bench.say(fmt::format(
      "  sum len^2 {:.4f} of one document's; {:.3f} ns for each of it, {:.3f} on one rank; {:.3f}x the best "
      "cut, one rank's time / {}\n",
      squares / (row * row), 1e9 * ours / squares, 1e9 * alone / squares, ours / best, bench.options.ranks));
  bench.record_less(of.name + ", best cut", 1e3 * ours, 1e3 * best, "one rank's time over the ranks", "ms");
}

void compare_context(Bench& bench, const ContextCase& of) {
  const BenchOptions& options = bench.options;
  bench.begin(of.name);
  const ExchangeFolder exchange;
  nlohmann::ordered_json description = {{"name", of.name},
                                        {"ulysses", options.ulysses},
                                        {"tokens", of.lengths.front()},
                                        {"attention", of.attention_alone}};
  description.update(model_description(of.model));
  write_case(exchange.path(), description);
  std::vector<Side> sides{
      our_side("context-ours", "ranks", fmt::format("{} ranks", options.ranks), options.ranks),
      our_side("context-ours", "alone", kWhole, 1)};
  const bool with_peer = options.peer && of.turns && of.lengths.size() == 1;
  if (with_peer) {
    if (of.lengths.front() % (2 * options.ranks) != 0 || options.ulysses > 1 || options.ranks == 1)
      refuse("bench context --peer",
             fmt::format("{} tokens, {} ranks, of them {} Ulysses", of.lengths.front(), options.ranks,
                         options.ulysses),
             "a ring of 2 ranks or more, twice which divides the tokens", "Set --ranks and --ulysses");
    DecoderLM model(of.model, at::kFloat, 1);
    write_hf(exchange.path() / "model", model);
    sides.push_back(peer_side(options.python, "context_parallel.py", "peer", kRingPeer, options.ranks));
  }
  const auto results = of.turns ? take_turns(sides, exchange.path(), options.seconds)
                                : take_turns(sides, exchange.path(), 0, false, 1);
  bench.end();
  const SideResult &together = results[0], &alone = results[1];
  TextRows rows{{of.name, "ms", "spread", "processor", "MiB a rank"}};
  for (const SideResult* side : {&together, &alone})
    rows.push_back({side->side.title, fixed(1e3 * side->median(), 1), spread(side->seconds),
                    fixed(1e3 * median(side->parts[kCpu]), 1), fixed(median(side->parts[kPeak]) / kMiB, 1)});
  const auto of_alone = [&](std::size_t part) {
    return median(together.parts[part]) / median(alone.parts[part]);
  };
  rows.push_back({"of it", fixed(together.median() / alone.median(), 3), "", fixed(of_alone(kCpu), 3),
                  fixed(of_alone(kPeak), 3)});
  bench.say(rows);
  if (of.lengths.size() > 1) {
    const CutOptions cut = cut_options(of, options.ranks, options.ulysses);
    bench.say(fmt::format("  {}\n", describe(cost_of(cut_documents(make_batch(of).cu_seqlens, cut), cut))));
  }
  for (std::size_t other = 1; other < results.size(); ++other)
    if (const auto why = disagreement(together, results[other], {1e-4, 1e-4, 1e-4}); !why.empty())
      bench.refuse_comparison(why);
  bench.record_less(of.name, 1e3 * median(together.parts[kCpu]), 1e3 * median(alone.parts[kCpu]), kWhole,
                    "ms of the busiest processor");
  for (std::size_t other = 1; of.turns && other < results.size(); ++other)
    compare_times(bench, of, together.seconds, results[other].seconds, results[other].side.title);
  if (of.attention_alone && of.lengths.size() > 1) compare_pack(bench, of, together.median(), alone.median());
  bench.record_less(of.name, median(together.parts[kPeak]) / kMiB, median(alone.parts[kPeak]) / kMiB, kWhole,
                    "MiB");
}

void bench_context(Bench& bench) {
  const BenchOptions& options = bench.options;
  if (options.peer) require_packages("context", options.python, {"torch"});
  bench.say(fmt::format(
      "one batch on {} context ranks (ring {} x Ulysses {}) compared with one rank on the whole batch, forward and\n"
      "backward, fp32, one thread a rank: wall clock, the busiest rank's processor, memory beyond the model\n",
      options.ranks, options.ranks / options.ulysses, options.ulysses));
  const auto cases = chosen(context_cases(), options.cases);
  bench.expect(std::ssize(cases), options.seconds);
  for (const ContextCase& of : cases) compare_context(bench, of);
}

}  // namespace

void run_context_rank(const fs::path& exchange, const std::string& name) {
  at::set_num_threads(1);
  MemoryMeter::install();
  World world = join();
  const nlohmann::json description = read_case(exchange);
  ContextRunner runner(chosen(context_cases(), {description.at("name").get<std::string>()}).at(0), world,
                       world.size == 1 ? 1 : description.at("ulysses").get<int>());
  TurnPipes pipes(exchange, name, world.rank);
  while (pipes.wait()) {
    const MemoryMeter meter;  // beyond the model, and what the first turn leaves
    world.group.barrier();
    const std::clock_t started = std::clock();
    std::vector<double> values;
    const double seconds = seconds_of([&] { values = runner.run(); });
    at::Tensor most = at::tensor({seconds, static_cast<double>(std::clock() - started) / CLOCKS_PER_SEC,
                                  static_cast<double>(meter.peak())},
                                 at::kDouble);
    world.group.all_reduce(most, ReduceOp::kMax);
    pipes.answer({.seconds = {most[0].item<double>()},
                  .losses = {values[0]},
                  .norms = {values[1]},
                  .parts = {most[1].item<double>(), most[2].item<double>()}});
  }
}

BenchVerb context_verb() {
  return verb("context", "Time and memory of one batch split over context ranks, compared with one rank",
              status("losses or gradients"), {.seconds = 20}, {}, bench_context,
              {cases("case to measure", names_of(context_cases())),
               ranks("number of ranks that share the batch", 1, 64),
               number("--ulysses", &BenchOptions::ulysses,
                      "number of them that exchange tokens for heads; the others form a ring", 1, 64),
               flag("--peer", &BenchOptions::peer,
                    "compare with PyTorch's ring attention over Gloo too, on one causal document")},
              ", for each case");
}

}  // namespace isograd
