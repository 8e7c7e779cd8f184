// Mistakes on the context axes: B3, B5 to B7, B19, B20b, B23, B26b. A small decoder whose documents are cut
// over ranks.
#include "isograd/context_parallel.hpp"
#include "isograd/model.hpp"
#include "model/attention/attention.hpp"
#include "museum/room.hpp"
#include "parallel/context/context_testing.hpp"

namespace isograd::museum {
namespace {

using planted::Wrapped;

constexpr std::int64_t kHeads = 12;

// Every strategy of cutting somewhere: documents cut over all ranks and whole ones, data ranks and
// context ranks.
struct Axes {
  int data = 1, ring = 1, ulysses = 1;
};
Axes axes_for(int ranks) {
  if (ranks == 3) return {.ulysses = 3};
  if (ranks == 4) return {.data = 2, .ring = 2};
  if (ranks == 6) return {.ring = 3, .ulysses = 2};
  if (ranks == 8) return {.data = 2, .ring = 2, .ulysses = 2};
  return {.ring = ranks};
}

// The parts that an exhibit replaces.
struct Wrong {
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, const Mesh&)> layout{};
  std::function<std::unique_ptr<Normalizer>(const Mesh&)> mean{};
  std::function<DecoderLM::Attention(ContextAttention)> attention{};
  bool log_multiplied = false;  // by the context ranks
  Noise noise{};
  bool noise_by_place = false;  // keyed by the place in this rank's piece, not in the document
};

DecoderConfig shape() {
  DecoderConfig config = small_shape();
  config.hidden = 24, config.layers = 1;
  config.heads = config.key_value_heads = kHeads, config.head_dim = 2;
  return config;
}

// Two packs more than ranks, so that some rank accumulates however they are assigned.
MicroBatches packs(int ranks) {
  MicroBatches all;
  std::int64_t sample = 0;
  for (int pack = 0; pack < ranks + 2; ++pack) {
    all.push_back(toy::make_batch({3 + pack % 4, 26 + 3 * pack % 7, 5, 9 - pack % 3}, sample));
    sample += all.back().num_fragments();
  }
  return all;
}

at::Tensor places_in_pieces(const Batch& batch) {
  at::Tensor places = at::arange(batch.num_tokens());
  for (std::int64_t f = 0; f < batch.num_fragments(); ++f)
    places.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).sub_(batch.cu_seqlens[f]);
  return places;
}

VerifyModel model_of(std::shared_ptr<DecoderLM> model, const Mesh& mesh, const Wrong& wrong) {
  if (mesh.size(kContextAxes) > 1) {
    const ContextAttention right(mesh);
    const DecoderLM::Attention over = wrong.attention ? wrong.attention(right) : DecoderLM::Attention(right);
    model->set_attention(
        [over](const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return batch.cut ? over(batch, q, k, v) : variable_length_attention(q, k, v, batch.cu_seqlens);
        });
  }
  VerifyModel made;
  made.named = model->named();
  const auto quiet = std::make_shared<bool>(!wrong.noise);
  if (wrong.noise) made.without_noise = [quiet] { *quiet = true; };
  made.logits = [model, quiet, wrong](const Batch& batch) {
    const at::Tensor logits = model->logits(batch);
    if (*quiet) return logits;
    Batch keys = batch;
    if (wrong.noise_by_place) keys.positions = places_in_pieces(batch);
    return logits * kept_tokens(keys, wrong.noise).to(logits.scalar_type());
  };
  made.loss_terms = [logits = made.logits](const Batch& batch) -> LossTerms {
    return {{"cross_entropy", cross_entropy_sum(logits(batch), batch.targets, {.weights = batch.weights})}};
  };
  return made;
}

// The same step on any axes whose product is the number of ranks.
VerifyProblem context_problem(World& world, const Axes& axes, const Wrong& wrong) {
  VerifyProblem problem = right_problem(world);
  const auto mesh = std::make_shared<Mesh>(
      world, data_grid(world.size, {.cp_ring = axes.ring, .cp_ulysses = axes.ulysses}));
  context_groups(*mesh);  // made here by all ranks: later models are made by some
  const auto all = packs(world.size);
  SharedSamples shared{
      .whole = {}, .data_rank = mesh->place(kSampleAxes), .cut = [mesh, axes](const MicroBatches& whole) {
        if (mesh->size(kContextAxes) == 1) return whole;
        return cut_micro_batches(whole, {.ring = axes.ring, .ulysses = axes.ulysses},
                                 mesh->place(kContextAxes));
      }};
  for (std::size_t i = 0; i < all.size(); ++i)
    if (static_cast<int>(i) % mesh->size(kSampleAxes) == mesh->place(kSampleAxes))
      shared.whole.push_back(all[i]);
  problem.local = shared.cut(shared.whole);
  if (mesh->size(kContextAxes) > 1) problem.shared_samples = std::move(shared);
  problem.whole = [all] { return all; };
  problem.make_model = [mesh, wrong](at::ScalarType type) {
    return model_of(std::make_shared<DecoderLM>(shape(), type, 3), *mesh, wrong);
  };
  if (wrong.log_multiplied) multiply_log(problem, mesh->size(kContextAxes));
  if (wrong.mean) problem.make_normalizer = [mesh, wrong] { return wrong.mean(*mesh); };
  LayoutUnderTest& layout = problem.layouts[0];
  layout.make = [mesh, wrong, ranks = world.size](std::vector<NamedParameter> parameters,
                                                  const Group& group) {
    auto right = plain_layout(std::move(parameters), group.size() == ranks ? *mesh : Mesh(group));
    return wrong.layout ? wrong.layout(std::move(right), *mesh) : std::move(right);
  };
  layout.axes = {{"dp_shard", axes.data}, {"cp_ring", axes.ring}, {"cp_ulysses", axes.ulysses}};
  layout.along = [&world, wrong](const std::string& axis) -> std::shared_ptr<VerifyProblem> {
    Axes along;
    if (axis == "cp_ulysses" && kHeads % world.size != 0) return nullptr;
    (axis == "cp_ring" ? along.ring : axis == "cp_ulysses" ? along.ulysses : along.data) = world.size;
    return std::make_shared<VerifyProblem>(context_problem(world, along, wrong));
  };
  return problem;
}

// B3, B7: the count is summed over data ranks and not over context ranks. Under an average over the latter,
// or a sum.
struct CountOfOnePlace : TokenMean {
  const Mesh& mesh;
  bool averaged;
  CountOfOnePlace(const Mesh& mesh_, bool averaged_) : mesh(mesh_), averaged(averaged_) {}
  Denominator denominator(const StepCounts& step_counts) const override {
    const auto& counts = step_counts.targets_by_rank;
    std::vector<int> same_place{step_counts.rank};
    if (static_cast<int>(counts.size()) == mesh.grid().ranks())
      same_place = mesh.grid().ranks_along(kSampleAxes, step_counts.rank);
    std::int64_t own = 0;
    for (const int rank : same_place) own += counts.at(static_cast<std::size_t>(rank));
    return {.value = static_cast<double>(std::max<std::int64_t>(1, own)) *
                     (averaged ? mesh.size(kContextAxes) : 1)};
  }
};

// B19
struct AveragesOverContext : Wrapped {
  int ranks;
  AveragesOverContext(std::unique_ptr<DataParallel> inner_, int ranks_)
      : Wrapped(std::move(inner_)), ranks(ranks_) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.div_(ranks);
  }
};

// B20b
DecoderLM::Attention joins_across_shards(ContextAttention right) {
  return [right](const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    auto wrong = std::make_shared<ContextCut>(*testing::joined_across_shards(*batch.cut));
    wrong->rank = batch.cut->rank;
    Batch leaky = batch;
    leaky.cut = wrong;
    return right(leaky, q, k, v);
  };
}

Plant plants(Wrong wrong) {
  return [wrong = std::move(wrong)](VerifyProblem& problem, World& world) {
    problem = context_problem(world, axes_for(world.size), wrong);
  };
}

}  // namespace

void cut_over_context(VerifyProblem& problem, World& world) {
  plants({.noise = keyed_by(0)})(problem, world);
}

void add_context(std::vector<Exhibit>& list) {
  list.push_back({.id = "B3c", .plant = plants({.mean = [](const Mesh& mesh) {
                                 return std::make_unique<CountOfOnePlace>(mesh, /*averaged=*/false);
                               }})});
  list.push_back({.id = "B5", .plant = plants({.mean = [](const Mesh& mesh) {
                                return std::make_unique<planted::CountsPeers>(mesh.size(kContextAxes));
                              }})});
  list.push_back({.id = "B6c", .plant = plants({.log_multiplied = true})});
  list.push_back({.id = "B7c", .plant = plants({.mean = [](const Mesh& mesh) {
                                 return std::make_unique<CountOfOnePlace>(mesh, /*averaged=*/true);
                               }})});
  list.push_back({.id = "B19", .plant = plants({.layout = [](auto right, const Mesh& mesh) {
                                 return std::make_unique<AveragesOverContext>(std::move(right),
                                                                              mesh.size(kContextAxes));
                               }})});
  list.push_back({.id = "B20b", .plant = plants({.attention = joins_across_shards})});
  list.push_back({.id = "B23", .plant = plants({.layout = [](auto right, const Mesh&) {
                                 return std::make_unique<SumsAgain>(std::move(right), kContextAxes);
                               }})});
  list.push_back({.id = "B26bc", .plant = plants({.noise = keyed_by(0), .noise_by_place = true})});
}

}  // namespace isograd::museum
