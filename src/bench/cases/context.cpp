// `isograd bench context`: one batch on several context ranks, compared with the same batch on one rank
// alone: time by turns, memory by length.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>

#include "base/refuse.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/cases/verbs.hpp"
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

std::vector<ContextCase> make_context_cases() {
  DecoderConfig model;  // 256 wide, four layers
  model.max_positions = 1 << 17;
  DecoderConfig tiny = model, narrow = model;
  tiny.hidden = 32, tiny.layers = 1, tiny.head_dim = 8, tiny.feed_forward = 48;
  narrow.hidden = 64, narrow.layers = 2, narrow.heads = narrow.key_value_heads = 2, narrow.head_dim = 32;
  narrow.feed_forward = 176;
  std::vector<ContextCase> cases = {
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
    cases.push_back({fmt::format("memory {}k", k), {k << 10}, narrow, false, true, false});
  return cases;
}
const std::vector<ContextCase>& context_cases() {
  static const std::vector<ContextCase> cases = make_context_cases();
  return cases;
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

// Writes case.json and the model for bench/peers/context_parallel.py.
void write_context_case(const std::filesystem::path& exchange, const ContextCase& of) {
  nlohmann::ordered_json description = {{"tokens", of.lengths.front()}, {"attention", of.attention_alone}};
  description.update(model_description(of.model));
  write_case(exchange, description);
  if (of.attention_alone) return;
  DecoderLM written(of.model, at::kFloat, 1);
  write_hf(exchange / "model", written);
}

struct ContextRun {
  double loss = 0, norm = 0;  // of the whole batch
};

// A step of a model, or one layer's attention, of several ranks or of one.
class ContextRunner {
 public:
  ContextRunner(const ContextCase& of, Group group, const Mesh* mesh, const Batch& batch)
      : of_(of), batch_(batch), group_(std::move(group)) {
    if (of.attention_alone) {
      if (mesh) attention_ = ContextAttention(*mesh);
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
    if (mesh) model_->set_attention(ContextAttention(*mesh));
    layout_ = bucketed(trainable_parameters(model_->named()), mesh ? *mesh : Mesh(group_));
    step_ = std::make_unique<Step>(
        [model = model_](const Batch& part) -> LossTerms {
          return {{"cross_entropy", cross_entropy_sum(model->logits(part), part.targets)}};
        },
        *layout_, mean_, *optimizer_, StepOptions{});
  }

  ContextRun run() {
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

  const ContextCase& of_;
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

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct ContextSide {
  std::vector<double> seconds{};
  std::vector<double> cpu{};  // of the busiest rank's processor: other programs do not count
  ContextRun run{};
  double bytes = 0;  // peak of a rank beyond its model, the most of any
};
// By turns: one rank works while the others wait, all ranks work, and the peer, if any. Collective; rank 0
// knows results.
enum : std::size_t { kAloneSide, kTogether, kPeerSide };
struct ContextResult {
  ContextSide sides[3];
  std::string cut;
};

void measure_context(const ContextCase& of, const BenchOptions& options, Contestant* peer, World& world,
                     ContextResult& result) {
  const int ring = options.ranks / options.ulysses;
  const Mesh mesh(world, data_grid(world.size, {.cp_ring = ring, .cp_ulysses = options.ulysses}));
  const Batch whole = make_batch(of);
  const CutOptions cut_options{
      .ring = ring, .ulysses = options.ulysses, .token_cost = of.attention_alone ? 0 : 6 * of.model.hidden};
  const ContextCut cut = cut_documents(whole.cu_seqlens, cut_options);
  const bool first = world.rank == 0;
  std::optional<ContextRunner> alone;
  if (first)
    alone.emplace(of, Group::solo(), nullptr, whole), result.cut = describe(cost_of(cut, cut_options));
  ContextRunner together(of, world.group, &mesh, cut_batch(whole, cut, world.rank));
  const auto take_turn = [&](std::size_t which) {
    ContextSide side;
    if (which == kPeerSide) {
      if (first) {
        const Turn turn = peer->turn(600);
        side = {.seconds = turn.seconds, .run = {turn.losses.at(0), turn.norms.at(0)}};
      }
      world.group.barrier();  // the others sleep in it
    } else {
      world.group.barrier();
      const double started = processor_seconds();
      side.seconds = {seconds_of([&] {
        if (which == kTogether)
          side.run = together.run();
        else if (alone)
          side.run = alone->run();
        at::Tensor busiest = at::full({1}, processor_seconds() - started, at::kDouble);
        world.group.all_reduce(busiest, ReduceOp::kMax);
        side.cpu = {busiest.item<double>()};
      })};
    }
    if (!first) return;
    ContextSide& all = result.sides[which];
    all.run = side.run;
    all.seconds.insert(all.seconds.end(), side.seconds.begin(), side.seconds.end());
    all.cpu.insert(all.cpu.end(), side.cpu.begin(), side.cpu.end());
  };
  at::Tensor peaks = at::zeros({2}, at::kDouble);
  for (const std::size_t which : {kAloneSide, kTogether}) {
    MemoryMeter meter;
    take_turn(which);  // warms up
    const double before = static_cast<double>(meter.alive());
    meter.restart_peak();
    take_turn(which);
    peaks[static_cast<std::int64_t>(which)] = static_cast<double>(meter.peak()) - before;
  }
  world.group.all_reduce(peaks, ReduceOp::kMax);
  if (peer) take_turn(kPeerSide);  // warms up
  for (ContextSide& side : result.sides)
    if (first) side.seconds.clear();
  for (const std::size_t which : {kAloneSide, kTogether})
    if (first) result.sides[which].bytes = peaks[static_cast<std::int64_t>(which)].item<double>();
  const auto more = until(options.seconds);
  if (of.turns)
    by_turns(
        peer ? 3 : 2,
        [&](std::size_t round) {  // rank 0 decides
          at::Tensor go_on = at::full({1}, more(round) ? 1 : 0, at::kLong);
          world.group.broadcast(go_on, 0);
          return go_on.item<std::int64_t>() > 0;
        },
        take_turn);
}

// Two sides and their records.
void compare_times(Bench& bench, const ContextCase& of, const std::vector<double>& ours,
                   const std::vector<double>& theirs, const std::string& name) {
  const double mine = 1e3 * median(ours), other = 1e3 * median(theirs),
               mine_least = 1e3 * std::ranges::min(ours), other_least = 1e3 * std::ranges::min(theirs);
  // In turns that followed each other both had the same clock.
  std::vector<double> pairs;
  for (std::size_t i = 0; i < ours.size(); ++i) pairs.push_back(ours[i] / theirs.at(i));
  fmt::print(
      "  compared with {}: median {:.1f} and {:.1f} ms, {:.3f}x; least {:.1f} and {:.1f}, {:.3f}x; median of "
      "{} pairs "
      "{:.3f}x\n",
      name, mine, other, mine / other, mine_least, other_least, mine_least / other_least, ours.size(),
      median(pairs));
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
  fmt::print(
      "  sum len^2 {:.4f} of one document's; {:.3f} ns for each of it, {:.3f} on one rank; {:.3f}x the best "
      "cut, one "
      "rank's time / {}\n",
      squares / (row * row), 1e9 * ours / squares, 1e9 * alone / squares, ours / best, bench.options.ranks);
  bench.record_less(of.name + ", best cut", 1e3 * ours, 1e3 * best, "one rank's time over the ranks", "ms");
}

void compare_context(Bench& bench, const ContextCase& of) {
  const BenchOptions& options = bench.options;
  bench.begin(of.name);
  ContextResult result;
  const ExchangeFolder exchange;
  std::unique_ptr<Contestant> peer;
  if (options.peer && of.turns && of.lengths.size() == 1) {
    if (of.lengths.front() % (2 * options.ranks) != 0 || options.ulysses > 1 || options.ranks == 1)
      refuse("bench context --peer",
             fmt::format("{} tokens, {} ranks, of them {} Ulysses", of.lengths.front(), options.ranks,
                         options.ulysses),
             "a ring of 2 ranks or more, twice which divides the tokens", "Set --ranks and --ulysses");
    write_context_case(exchange.path(), of);
    peer = start(peer_side(options.python, "context_parallel.py", "peer", kRingPeer, options.ranks),
                 exchange.path());
  }
  run_ranks(options.ranks, [&](World& world) { measure_context(of, options, peer.get(), world, result); },
            {.timeout = std::chrono::minutes(10)});
  bench.end();
  const auto& [alone, together, theirs] = result.sides;
  const double ours = of.turns ? median(together.seconds) : 0, single = of.turns ? median(alone.seconds) : 0,
               our_cpu = median(together.cpu), single_cpu = median(alone.cpu);
  fmt::print(
      "{:<14} {:>7.1f} ms {:>6.1f}% {:>7.1f} ms {:>6.1f}%  {:>6.3f}x {:>8.3f}x   {:>10.1f} {:>10.1f} "
      "{:>5.3f}x\n",
      of.name, 1e3 * ours, 100 * spread(together.seconds), 1e3 * single, 100 * spread(alone.seconds),
      single > 0 ? ours / single : 0, our_cpu / single_cpu, together.bytes / kMiB, alone.bytes / kMiB,
      together.bytes / alone.bytes);
  if (of.lengths.size() > 1) fmt::print("  {}\n", result.cut);
  std::fflush(stdout);
  const auto expect_same = [&](const ContextRun& other, const char* whose) {
    const ContextRun& mine = together.run;
    if (!(relative_difference({mine.loss, mine.norm}, {other.loss, other.norm}) <= 1e-4))
      bench.refuse_comparison(fmt::format("losses {} and {}, gradient norms {} and {} ({})", mine.loss,
                                          other.loss, mine.norm, other.norm, whose));
  };
  expect_same(alone.run, "one rank");
  if (peer) expect_same(theirs.run, kRingPeer);
  bench.record_less(of.name, 1e3 * our_cpu, 1e3 * single_cpu, kWhole, "ms of the busiest processor");
  if (of.turns) compare_times(bench, of, together.seconds, alone.seconds, kWhole);
  if (peer) compare_times(bench, of, together.seconds, theirs.seconds, kRingPeer);
  if (of.attention_alone && of.lengths.size() > 1) compare_pack(bench, of, ours, single);
  bench.record_less(of.name, together.bytes / kMiB, alone.bytes / kMiB, kWhole, "MiB");
}

}  // namespace

std::vector<std::string> bench_context_cases() {
  return names_of(context_cases());
}

void bench_context(Bench& bench) {
  const BenchOptions& options = bench.options;
  MemoryMeter::install();
  if (options.peer) require_packages("context", options.python, {"torch"});
  fmt::print(
      "one batch on {} context ranks (ring {} x Ulysses {}) compared with one rank on the whole batch, "
      "forward and "
      "backward, fp32, one thread a rank\n{:<14} {:>10} {:>7} {:>10} {:>7}  {:>7} {:>9}   {:>10} {:>10} "
      "{:>6}\n",
      options.ranks, options.ranks / options.ulysses, options.ulysses, "case", "ranks", "spread", "alone",
      "spread", "of it", "CPU of it", "MiB a rank", "MiB alone", "of it");
  const auto cases = chosen(context_cases(), options.cases);
  bench.expect(std::ssize(cases), options.seconds);
  for (const ContextCase& of : cases) compare_context(bench, of);
}

}  // namespace isograd
