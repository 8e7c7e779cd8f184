// Random correct configurations: none of them may be called wrong.
#include <algorithm>

#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "model/safetensors.hpp"
#include "museum/room.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "verify/compare.hpp"

namespace isograd::museum {
namespace {

class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t configuration) : key_{.seed = seed, .sample = configuration} {}
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_bits(key_, next_++) % static_cast<std::uint64_t>(n));
  }
  template <typename T>
  T one_of(const std::vector<T>& from) {
    return from[static_cast<std::size_t>(below(static_cast<std::int64_t>(from.size())))];
  }

 private:
  RandomKey key_;
  std::uint64_t next_ = 0;
};

// A language model of random width and depth: tied or not, with a gain of one element and a bias.
struct RandomModel {
  std::int64_t vocabulary, hidden, layers;
  bool tied;
  std::vector<std::pair<std::string, at::Tensor>> named;

  RandomModel(Dice dice, at::ScalarType type)
      : vocabulary(5 + dice.below(30)),
        hidden(3 + dice.below(14)),
        layers(dice.below(4)),
        tied(dice.below(2) == 0) {
    auto generator =
        at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(dice.below(1 << 20)));
    const auto add = [&](const std::string& name, at::IntArrayRef shape) {
      named.emplace_back(
          name,
          (at::randn(shape, generator, at::TensorOptions(at::kDouble)) * 0.4).to(type).requires_grad_(true));
    };
    add("embedding", {vocabulary, hidden});
    for (std::int64_t i = 0; i < layers; ++i) {
      add(fmt::format("layers.{}.weight", i), {hidden, hidden});
      add(fmt::format("layers.{}.bias", i), {hidden});
    }
    add("gain", {1});
    if (!tied) add("output", {vocabulary, hidden});
  }

  at::Tensor logits(const Batch& batch) const {
    at::Tensor mix = at::zeros({batch.num_tokens(), batch.num_tokens()}, at::kDouble);
    for (std::int64_t f = 0; f < batch.num_fragments(); ++f)
      for (std::int64_t i = batch.cu_seqlens[f]; i < batch.cu_seqlens[f + 1]; ++i) {
        const std::int64_t begin = batch.cu_seqlens[f], seen = i + 1 - begin;
        mix[i].narrow(0, begin, seen).fill_(1.0 / static_cast<double>(seen));
      }
    std::size_t next = 0;
    const at::Tensor& embedding = named[next++].second;
    at::Tensor x = at::embedding(embedding, batch.tokens.remainder(vocabulary));
    x = x + at::matmul(mix.to(x.scalar_type()), x);
    for (std::int64_t i = 0; i < layers; ++i, next += 2)
      x = x + at::tanh(at::linear(x, named[next].second, named[next + 1].second));
    x = x * named[next++].second;
    return at::linear(x, tied ? embedding : named[next].second);
  }
};

// Documents of random lengths, assigned to random ranks and micro-batches: some of those get none.
std::vector<MicroBatches> random_step(Dice dice, int ranks) {
  const std::int64_t accumulation = 1 + dice.below(4);
  std::vector<MicroBatches> by_rank(static_cast<std::size_t>(ranks));
  std::int64_t sample = 0;
  for (auto& batches : by_rank) {
    const std::int64_t own = dice.below(5) == 0 ? dice.below(2) : accumulation;
    for (std::int64_t j = 0; j < own; ++j) {
      std::vector<std::int64_t> lengths;
      for (std::int64_t d = dice.below(4); d >= 0; --d) lengths.push_back(2 + dice.below(12));
      if (dice.below(12) == 0) lengths.clear();
      batches.push_back(toy::make_batch(lengths, sample, dice.below(15) == 0));
      sample += static_cast<std::int64_t>(lengths.size());
    }
  }
  by_rank[0].push_back(toy::make_batch({7, 3}, sample));  // at least one target
  return by_rank;
}

// Targets become ones that the model has words for.
void fit_vocabulary(std::vector<MicroBatches>& by_rank, std::int64_t vocabulary) {
  for (auto& batches : by_rank)
    for (Batch& batch : batches)
      batch.targets =
          at::where(batch.targets.eq(kIgnoreIndex), batch.targets, batch.targets.remainder(vocabulary));
}

}  // namespace

std::vector<std::string> false_alarms(int configurations, std::uint64_t seed,
                                      const std::function<void(const std::string&)>& each) {
  std::vector<std::string> alarms;
  for (int i = 0; i < configurations; ++i) {
    Dice dice(seed, static_cast<std::uint64_t>(i));
    const int ranks = dice.one_of<int>({1, 2, 3, 4, 5, 8});
    const auto dtype = dice.one_of<at::ScalarType>({at::kFloat, at::kBFloat16, at::kDouble});
    const auto strategy = dice.one_of(testing::strategies());
    const Mean mean = dice.one_of<Mean>({Mean::kTargets, Mean::kTargets, Mean::kSamples, Mean::kFixed});
    const int replicas =
        strategy.stage > 0 ? testing::replicas_for(ranks, 1 + static_cast<int>(dice.below(4))) : 1;
    const auto bucket_bytes = dice.one_of<std::int64_t>({1, 256, 4096, 1 << 20});
    const bool overlap = dice.below(2) == 0;
    const double max_norm = dice.one_of<double>({0, 0.05, 1000});
    auto by_rank = random_step(Dice(seed + 1, static_cast<std::uint64_t>(i)), ranks);
    const Dice model_dice(seed + 2, static_cast<std::uint64_t>(i));
    fit_vocabulary(by_rank, RandomModel(model_dice, at::kDouble).vocabulary);
    const auto name = fmt::format("{}: {} ranks ({} replicas), {}, {}, {}, buckets of {} bytes{}, limit {}",
                                  i, ranks, replicas, float_type(dtype).precision, strategy.name,
                                  name_of(mean), bucket_bytes, overlap ? ", overlapped" : "", max_norm);
    Verdict verdict;
    run_ranks(ranks, [&](World& world) {
      VerifyProblem problem;
      problem.make_model = [&](at::ScalarType type) {
        auto model = std::make_shared<RandomModel>(model_dice, type);
        VerifyModel made;
        made.named = model->named;
        made.logits = [model](const Batch& batch) { return model->logits(batch); };
        made.loss_terms = [model](const Batch& batch) -> LossTerms {
          return {{"cross_entropy",
                   cross_entropy_sum(model->logits(batch), batch.targets, {.weights = batch.weights})}};
        };
        return made;
      };
      problem.local = by_rank[static_cast<std::size_t>(world.rank)];
      problem.whole = [&] { return MicroBatches{toy::concatenate(by_rank)}; };
      problem.dtype = dtype;
      problem.step = {.max_norm = max_norm};
      problem.loss.mean = mean;
      problem.loss.denominator = 17;
      problem.updates = 2;
      problem.optimizer = AdamWOptions{.learning_rate = 1e-2};
      problem.layouts = {{.name = strategy.name,
                          .make =
                              [&](auto parameters, const Group&) {
                                return strategy.make(
                                    std::move(parameters),
                                    Mesh(world, data_grid(world.size, {.dp_replicate = replicas})),
                                    {.bucket_bytes = bucket_bytes, .overlap = overlap});
                              },
                          .axes = {{"dp_replicate", replicas}, {"dp_shard", ranks / replicas}}}};
      Verdict own = verify(problem, world.group);
      if (world.rank == 0) verdict = std::move(own);
    });
    if (each) each(name);
    if (verdict.passed && verdict.findings.empty()) continue;
    alarms.push_back(name + ": " + to_text(verdict, 4));
  }
  return alarms;
}

}  // namespace isograd::museum
