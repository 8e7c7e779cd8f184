// One batch on several context ranks, beside the same batch on one rank alone: time by turns, memory by
// length.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/cases/context_cases.hpp"
#include "bench/contestant.hpp"
#include "bench/exchange.hpp"
#include "bench/rounds.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "layout/cost/meter.hpp"
#include "model/attention/attention.hpp"

namespace isograd {
namespace {

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

struct Ran {
  double loss = 0, norm = 0;  // of the whole batch
};

// A step of a model, or one layer's attention, of `ranks` ranks or of one.
class Runner {
 public:
  Runner(const ContextCase& of, Group group, const Mesh* mesh, const Batch& batch)
      : of_(of), batch_(batch), group_(std::move(group)) {
    if (of.attention_alone) {
      if (mesh) attention_ = ContextAttention(*mesh);
      const auto draw = [&](std::int64_t heads, double phase) {
        // By document and position, so that every cut has the same.
        const at::Tensor place = (batch_.positions.to(at::kFloat) + phase).view({-1, 1, 1});
        const at::Tensor channel = at::arange(heads * of.model.head_dim, at::kFloat).view({1, heads, -1});
        return at::sin(place * 0.37 + channel * 1.7).requires_grad_();
      };
      q_ = draw(of.model.heads, 0), k_ = draw(of.model.key_value_heads, 1),
      v_ = draw(of.model.key_value_heads, 2);
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

  Ran run() {
    if (step_) {
      const StepReport report = (*step_)({batch_});
      return {report.loss, report.norm};
    }
    const at::Tensor out = attention_ ? (*attention_)(batch_, q_, k_, v_) : alone();
    const at::Tensor loss = out.square().sum();
    loss.backward();
    at::Tensor sums = at::zeros({2}, at::kDouble);
    sums[0] = loss.detach();
    for (at::Tensor* x : {&q_, &k_, &v_}) {
      sums[1] += x->grad().square().sum();
      x->mutable_grad().reset();  // not of the next run's memory
    }
    if (group_.size() > 1) group_.all_reduce(sums);
    return {sums[0].item<double>(), std::sqrt(sums[1].item<double>())};
  }

 private:
  at::Tensor alone() const {
    if (of_.lengths.size() > 1) return variable_length_attention(q_, k_, v_, batch_.cu_seqlens);
    const auto heads_first = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
    return at::scaled_dot_product_attention(heads_first(q_), heads_first(k_), heads_first(v_), {}, 0, true)
        .squeeze(0)
        .transpose(0, 1);
  }

  const ContextCase& of_;
  Batch batch_;
  Group group_;
  std::optional<ContextAttention> attention_;
  at::Tensor q_, k_, v_;
  std::shared_ptr<DecoderLM> model_;
  std::unique_ptr<DataParallel> layout_;
  TokenMean mean_;
  std::unique_ptr<Optimizer> optimizer_ = sgd({.learning_rate = 0});
  std::unique_ptr<Step> step_;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double now_on_processor() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Measured {
  std::vector<double> alone, together;  // seconds
  std::vector<double> alone_cpu,
      together_cpu;  // of the busiest rank's processor: other programs do not count
  std::vector<double> peer;
  Ran of_alone{}, of_together{}, of_peer{};
  double alone_bytes = 0, together_bytes = 0;  // peak of a rank beyond its model, the most of any
  std::string cut;
};

// One rank works while the others wait, then all work, then the peer, if any; and the other way round.
void measure(const ContextCase& of, const BenchContextOptions& options, Contestant* peer, World& world,
             Measured& result) {
  const Mesh mesh(world, data_grid(world.size, {.cp_ring = options.ranks / options.ulysses,
                                                .cp_ulysses = options.ulysses}));
  const Batch whole = make_batch(of);
  const CutOptions cut_options{.ring = options.ranks / options.ulysses,
                               .ulysses = options.ulysses,
                               .token_cost = of.attention_alone ? 0 : 6 * of.model.hidden};
  const ContextCut cut = cut_documents(whole.cu_seqlens, cut_options);
  std::optional<Runner> alone;
  if (world.rank == 0) alone.emplace(of, Group::solo(), nullptr, whole);
  Runner together(of, world.group, &mesh, cut_batch(whole, cut, world.rank));
  const auto timed = [&](bool all) {
    world.group.barrier();
    const double start = now(), started = now_on_processor();
    Ran ran;
    if (all)
      ran = together.run();
    else if (alone)
      ran = alone->run();
    at::Tensor busiest = at::full({1}, now_on_processor() - started, at::kDouble);
    world.group.all_reduce(busiest, ReduceOp::kMax);
    const double seconds = now() - start;
    if (world.rank == 0) {
      (all ? result.of_together : result.of_alone) = ran;
      (all ? result.together_cpu : result.alone_cpu).push_back(busiest.item<double>());
    }
    return seconds;
  };
  at::Tensor peaks = at::zeros({2}, at::kDouble);
  for (const bool all : {false, true}) {
    MemoryMeter meter;
    timed(all);  // warms up
    const double before = static_cast<double>(meter.alive());
    meter.restart_peak();
    timed(all);
    peaks[all ? 1 : 0] = static_cast<double>(meter.peak()) - before;
  }
  world.group.all_reduce(peaks, ReduceOp::kMax);
  if (world.rank == 0) {
    result.alone_bytes = peaks[0].item<double>(), result.together_bytes = peaks[1].item<double>();
    result.cut = describe(cost_of(cut, cut_options));
  }
  const auto turn_of_peer = [&] {
    if (world.rank == 0) {
      const Turn turn = peer->turn(600);
      result.peer.push_back(turn.seconds.at(0));
      result.of_peer = {turn.losses.at(0), turn.norms.at(0)};
    }
    world.group.barrier();  // the others sleep in it
  };
  if (peer) turn_of_peer(), result.peer.clear();  // warms up
  constexpr std::size_t kFewest = 3;
  const double start = now();
  at::Tensor more = at::full({1}, of.turns ? 1 : 0, at::kLong);
  for (std::size_t turn = 0; more.item<std::int64_t>() > 0; ++turn) {
    if (peer && turn % 2 != 0) turn_of_peer();
    for (const bool all : {turn % 2 == 0, turn % 2 != 0}) {
      const double seconds = timed(all);
      if (world.rank == 0) (all ? result.together : result.alone).push_back(seconds);
    }
    if (peer && turn % 2 == 0) turn_of_peer();
    more.fill_(turn + 1 < kFewest || now() - start < options.seconds ? 1 : 0);
    world.group.broadcast(more, 0);
  }
}

constexpr const char* kPeer = "PyTorch's ring attention over Gloo";

// What bench/peers/context_parallel.py reads.
void write_case(const std::filesystem::path& folder, const ContextCase& of) {
  const DecoderConfig& model = of.model;
  const nlohmann::ordered_json description = {{"tokens", of.lengths.front()},
                                              {"attention", of.attention_alone},
                                              {"vocabulary", model.vocabulary},
                                              {"hidden", model.hidden},
                                              {"layers", model.layers},
                                              {"heads", model.heads},
                                              {"key_value_heads", model.key_value_heads},
                                              {"head_dim", model.head_dim},
                                              {"feed_forward", model.feed_forward},
                                              {"rope_theta", model.rope_theta},
                                              {"norm_epsilon", model.norm_epsilon},
                                              {"tied_output", model.tied_output}};
  write_file(folder / "case.json", description.dump(2) + "\n");
  if (of.attention_alone) return;
  DecoderLM written(model, at::kFloat, 1);
  write_hf(folder / "model", written);
}

double least(const std::vector<double>& times) {
  return *std::min_element(times.begin(), times.end());
}

// Of ours by theirs in turns that followed each other: both had the same clock.
double of_pairs(const std::vector<double>& ours, const std::vector<double>& theirs) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(ours.size(), theirs.size()); ++i)
    ratios.push_back(ours[i] / theirs[i]);
  return quantile(ratios, 0.5);
}

// Two sides beside each other, and their records.
void compare(const ContextCase& of, const std::vector<double>& ours, const std::vector<double>& theirs,
             const std::string& name, nlohmann::ordered_json& records) {
  const double mine = 1e3 * quantile(ours, 0.5), other = 1e3 * quantile(theirs, 0.5);
  const double mine_least = 1e3 * least(ours), other_least = 1e3 * least(theirs);
  fmt::print(
      "  beside {}: median {:.1f} and {:.1f} ms, {:.3f}x; least {:.1f} and {:.1f}, {:.3f}x; median of {} "
      "pairs "
      "{:.3f}x\n",
      name, mine, other, mine / other, mine_least, other_least, mine_least / other_least, ours.size(),
      of_pairs(ours, theirs));
  records.push_back(bench_record("context", of.name, mine, other, name, "ms", other / mine));
  records.push_back(bench_record("context", of.name + ", least", mine_least, other_least, name, "ms",
                                 other_least / mine_least));
}

// Attention's time follows the sum of squares, and the best cut divides all of it evenly.
void compare_pack(const ContextCase& of, double ours, double alone, int ranks,
                  nlohmann::ordered_json& records) {
  double row = 0, squares = 0;
  for (const std::int64_t length : of.lengths) {
    row += static_cast<double>(length);
    squares += static_cast<double>(length) * static_cast<double>(length);
  }
  const double best = alone / ranks;
  fmt::print(
      "  sum len^2 {:.4f} of one document's; {:.3f} ns for each of it, {:.3f} on one rank; {:.3f}x the best "
      "cut, one rank's time / {}\n",
      squares / (row * row), 1e9 * ours / squares, 1e9 * alone / squares, ours / best, ranks);
  records.push_back(bench_record("context", of.name + ", best cut", 1e3 * ours, 1e3 * best,
                                 "one rank's time over the ranks", "ms", best / ours));
}

}  // namespace

std::vector<std::string> bench_context_cases() {
  std::vector<std::string> names;
  for (const ContextCase& of : context_cases()) names.push_back(of.name);
  return names;
}

int bench_context(const BenchContextOptions& options) {
  MemoryMeter::install();
  if (options.peer) require_packages("context", options.python, {"torch"});
  fmt::print(
      "one batch on {} context ranks (ring {} x Ulysses {}) beside one rank on the whole batch, forward and "
      "backward, fp32, one thread a rank\n{:<14} {:>10} {:>7} {:>10} {:>7}  {:>7} {:>9}   {:>10} {:>10} "
      "{:>6}\n",
      options.ranks, options.ranks / options.ulysses, options.ulysses, "case", "ranks", "spread", "alone",
      "spread", "of it", "CPU of it", "MiB a rank", "MiB alone", "of it");
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  std::vector<ContextCase> cases;
  for (const ContextCase& of : context_cases())
    if (options.cases.empty()
            ? of.standard
            : std::find(options.cases.begin(), options.cases.end(), of.name) != options.cases.end())
      cases.push_back(of);
  Waiting waiting("case", std::ssize(cases), options.seconds);
  for (const ContextCase& of : cases) {
    waiting.begin(of.name);
    Measured result;
    const ExchangeFolder exchange;
    std::optional<Contestant> peer_ranks;
    if (options.peer && of.turns && of.lengths.size() == 1) {
      if (of.lengths.front() % (2 * options.ranks) != 0 || options.ulysses > 1 || options.ranks == 1)
        throw ConfigError({.where = "bench context --peer",
                           .found = fmt::format("{} tokens, {} ranks, of them {} Ulysses", of.lengths.front(),
                                                options.ranks, options.ulysses),
                           .expected = "a ring of 2 ranks or more, twice which divides the tokens",
                           .action = "Set --ranks and --ulysses"});
      write_case(exchange.path(), of);
      peer_ranks.emplace(
          "peer",
          std::vector<std::string>{find_python(options.python), "-W", "ignore",
                                   find_peer("context_parallel.py").string(), exchange.path().string(),
                                   std::to_string(options.ranks), "peer"},
          exchange.path(), options.ranks);
    }
    Contestant* const peer_side = peer_ranks ? &*peer_ranks : nullptr;
    run_ranks(options.ranks, [&](World& world) { measure(of, options, peer_side, world, result); },
              {.timeout = std::chrono::minutes(10)});
    waiting.end();
    constexpr double kMiB = 1 << 20;
    const auto spread = [](const std::vector<double>& times) {
      return times.empty() ? 0 : 100 * (quantile(times, 0.75) - quantile(times, 0.25)) / quantile(times, 0.5);
    };
    const double ours = result.together.empty() ? 0 : quantile(result.together, 0.5),
                 peer = result.alone.empty() ? 0 : quantile(result.alone, 0.5);
    fmt::print(
        "{:<14} {:>7.1f} ms {:>6.1f}% {:>7.1f} ms {:>6.1f}%  {:>6.3f}x {:>8.3f}x   {:>10.1f} {:>10.1f} "
        "{:>5.3f}x\n",
        of.name, 1e3 * ours, spread(result.together), 1e3 * peer, spread(result.alone),
        peer > 0 ? ours / peer : 0, quantile(result.together_cpu, 0.5) / quantile(result.alone_cpu, 0.5),
        result.together_bytes / kMiB, result.alone_bytes / kMiB, result.together_bytes / result.alone_bytes);
    if (of.lengths.size() > 1) fmt::print("  {}\n", result.cut);
    std::fflush(stdout);
    const auto same = [&](const Ran& other, const char* whose) {
      const Ran& mine = result.of_together;
      if (relative_difference(mine.loss, other.loss) <= 1e-4 &&
          relative_difference(mine.norm, other.norm) <= 1e-4)
        return;
      fmt::print("  NOT COMPARABLE: losses {} and {}, gradient norms {} and {} ({})\n", mine.loss, other.loss,
                 mine.norm, other.norm, whose);
      comparable = false;
    };
    same(result.of_alone, "one rank");
    if (peer_side) same(result.of_peer, kPeer);
    const double our_cpu = quantile(result.together_cpu, 0.5), peer_cpu = quantile(result.alone_cpu, 0.5);
    records.push_back(bench_record("context", of.name, 1e3 * our_cpu, 1e3 * peer_cpu,
                                   "one rank on the whole batch", "ms of the busiest processor",
                                   peer_cpu / our_cpu));
    if (peer > 0) compare(of, result.together, result.alone, "one rank on the whole batch", records);
    if (peer_side) compare(of, result.together, result.peer, kPeer, records);
    if (of.attention_alone && of.lengths.size() > 1) compare_pack(of, ours, peer, options.ranks, records);
    records.push_back(bench_record("context", of.name, result.together_bytes / kMiB,
                                   result.alone_bytes / kMiB, "one rank on the whole batch", "MiB",
                                   result.alone_bytes / result.together_bytes));
  }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
