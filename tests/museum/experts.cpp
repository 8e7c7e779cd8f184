// Mistakes on the expert axis: B13, B18, B22 and B26. A small decoder whose experts are assigned to ranks
// with tokens of their own.
#include <cmath>

#include "isograd/expert_parallel.hpp"
#include "isograd/model.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

// The parts that an exhibit replaces.
struct Wrong {
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, const Grid&)> layout{};
  double term_factor = 1;  // of the routers' term, on every rank
  bool with_term = true;
  std::int64_t experts = 6;  // uneven along ep 4 and 5
  Noise noise{};
};

DecoderConfig shape(std::int64_t experts) {
  DecoderConfig config = small_shape();
  config.family = "qwen3_moe";
  config.query_key_norm = true;
  config.hidden = 16, config.layers = 2, config.heads = 2, config.key_value_heads = 1, config.head_dim = 8;
  config.experts = {.count = experts, .per_token = 2, .feed_forward = 12, .normalise = false};
  return config;
}

// With copies of each expert on two ranks, where that is possible.
Grid grid_of(int ranks) {
  const int copies = ranks > 2 && ranks % 2 == 0 ? 2 : 1;
  return Grid({{"dp_shard", ranks}}).viewed({"dp_shard"}, {{"edp", copies}, {kExpertAxis, ranks / copies}});
}

// The routers' z-loss (Zoph et al. 2022, arXiv 2202.08906, eq. 5), of tokens with a target.
at::Tensor router_z(DecoderLM&, const DecoderOutputs& outputs, const Batch& batch) {
  const at::Tensor counted = batch.targets.ne(kIgnoreIndex);
  at::Tensor sum = at::zeros({}, outputs.hidden.options());
  for (const at::Tensor& logits : outputs.router_logits)
    sum = sum + (logits.logsumexp(1).square() * counted).sum();
  return sum;
}

VerifyProblem expert_problem(World& world, const Wrong& wrong) {
  HeldTogether how{.name = "experts assigned",
                   .grid = grid_of(world.size),
                   .shape = shape(wrong.experts),
                   .noise = wrong.noise};
  how.complete = [](VerifyModel& made, const std::shared_ptr<DecoderLM>& model) {
    made.cut = [model](const Mesh& mesh) { return shard_experts(*model, mesh); };
    made.choose_experts = [model](const DecoderLM::ChooseExperts& choose) {
      model->set_choice_of_experts(choose);
    };
  };
  if (wrong.with_term) how.term = HeldTogether::Term{"router_z", router_z, wrong.term_factor};
  if (wrong.layout)
    how.wrap = [wrong, grid = how.grid](auto right) { return wrong.layout(std::move(right), grid); };
  return problem_of(world, std::move(how));
}

Plant plants(Wrong wrong) {
  return [wrong = std::move(wrong)](VerifyProblem& problem, World& world) {
    problem = expert_problem(world, wrong);
  };
}

// The gradients of parameters whose names contain `part` are multiplied after their sum.
struct Multiplies : planted::Wrapped {
  std::string part;
  double factor;
  Multiplies(std::unique_ptr<DataParallel> inner_, std::string part_, double factor_)
      : Wrapped(std::move(inner_)), part(std::move(part_)), factor(factor_) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets())
      for (const Slot& slot : bucket.plan.slots)
        if (slot.name.find(part) != std::string::npos)
          bucket.gradients.narrow(0, slot.offset, slot.numel).mul_(factor);
  }
};

// All experts' gradients are multiplied by what `factor` gives for the grid.
Wrong multiplied(double (*factor)(const Grid&)) {
  return {.layout = [factor](auto right, const Grid& grid) -> std::unique_ptr<DataParallel> {
    return std::make_unique<Multiplies>(std::move(right), ".experts.", factor(grid));
  }};
}

// The most micro-batches of a rank in right_problem().
double micro_batches(const Grid& grid) {
  std::size_t most = 0;
  for (const MicroBatches& own : toy::make_step(grid.ranks(), 3)) most = std::max(most, own.size());
  return static_cast<double>(most);
}

bool of_experts(const Bucket& bucket) {
  return !bucket.plan.slots.empty() && bucket.plan.slots[0].name.find(".experts.") != std::string::npos;
}

// B18ge: experts' elements are assigned to all data ranks, as dense ones are, of which each has a copy.
struct OwnedLikeDense : planted::Wrapped {
  explicit OwnedLikeDense(std::unique_ptr<DataParallel> inner_) : Wrapped(std::move(inner_)) {
    for (Bucket& bucket : buckets())
      if (of_experts(bucket))
        bucket.owned = owned_slice(bucket.plan.numel, mesh().all().rank(), mesh().all().size());
  }
};

// B18be: dense squares over all ranks, experts' over the copies of the own ones.
double norm_without_other_experts(const Mesh& mesh, const std::vector<Bucket>& buckets) {
  double dense = 0, experts = 0;
  for (const Bucket& bucket : buckets) (of_experts(bucket) ? experts : dense) += owned_squares(bucket);
  at::Tensor own = at::full({1}, experts, at::kDouble), all = at::full({1}, dense, at::kDouble);
  mesh.along({"edp"}).all_reduce(own);
  mesh.all().all_reduce(all);
  return std::sqrt(own.item<double>() + all.item<double>());
}

// Experts whose gradient is zero stay as they are, where their weights' decay and their moments go on.
struct SkipsIdleExperts : planted::WrappedOptimizer {
  using WrappedOptimizer::WrappedOptimizer;
  void update(std::vector<Bucket>& buckets, double scale) override {
    std::vector<at::Tensor> before;
    for (const Bucket& bucket : buckets) before.push_back(bucket.parameters.clone());
    inner->update(buckets, scale);
    for (std::size_t b = 0; b < buckets.size(); ++b)
      for (const Slot& slot : buckets[b].plan.slots) {
        if (slot.name.find(".experts.") == std::string::npos || slot.numel == 0) continue;
        const auto rows = [&](const at::Tensor& flat) {
          return flat.narrow(0, slot.offset, slot.numel).view({slot.shape[0], -1});
        };
        const at::Tensor idle = rows(buckets[b].gradients).eq(0).all(1);
        rows(buckets[b].parameters).index_put_({idle}, rows(before[b]).index({idle}));
      }
  }
};

}  // namespace

void shard_over_experts(VerifyProblem& problem, World& world) {
  plants({.noise = keyed_by(0)})(problem, world);
}

void add_experts(std::vector<Exhibit>& list) {
  list.push_back({.id = "B13", .plant = plants(multiplied([](const Grid& grid) -> double {
                                 return grid.size({kExpertAxis});
                               }))});
  list.push_back({.id = "B13d", .plant = plants(multiplied([](const Grid& grid) -> double {
                                  return 1.0 / grid.size({kExpertAxis});
                                }))});
  list.push_back(
      {.id = "B13w", .plant = plants(multiplied([](const Grid& grid) -> double { return grid.ranks(); }))});
  list.push_back({.id = "B13g", .plant = plants(multiplied(micro_batches))});
  list.push_back({.id = "B13o", .plant = then(plants({.experts = 48}), [](VerifyProblem& problem, World&) {
                                  problem.wrap_optimizer = [](auto inner) {
                                    return std::make_unique<SkipsIdleExperts>(std::move(inner));
                                  };
                                })});
  list.push_back({.id = "B18be", .plant = then(plants({}), [](VerifyProblem& problem, World&) {
                                   problem.clipping = OwnClipping{
                                       .norm = [mesh = *problem.mesh](std::vector<Bucket>& buckets, Group&) {
                                         return norm_without_other_experts(mesh, buckets);
                                       }};
                                 })});
  list.push_back({.id = "B18ge",
                  .plant = plants({.layout = [](auto right, const Grid&) -> std::unique_ptr<DataParallel> {
                    return std::make_unique<OwnedLikeDense>(std::move(right));
                  }})});
  list.push_back({.id = "B22e", .plant = [](VerifyProblem& problem, World& world) {
                    problem = expert_problem(world, {.term_factor = static_cast<double>(world.size)});
                  }});
  list.push_back({.id = "B22r",
                  .plant = plants({.layout = [](auto right, const Grid&) -> std::unique_ptr<DataParallel> {
                                     return std::make_unique<Multiplies>(std::move(right), ".mlp.gate.", 0);
                                   },
                                   .with_term = false})});
  list.push_back({.id = "B26be", .plant = [](VerifyProblem& problem, World& world) {
                    plants({.noise = keyed_by(static_cast<std::uint64_t>(world.rank) + 1)})(problem, world);
                  }});
}

}  // namespace isograd::museum
