// Mistakes on the pipeline axis: B5, B6, B8, B9, B10, B16, B18 and B26. A small decoder whose layers lie in
// stages, and data ranks where there are ranks for both.
#include <cmath>

#include "isograd/pipeline_parallel.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

using planted::Wrapped;
using SharedCount = std::shared_ptr<const CountedStep>;

// The parts that an exhibit replaces.
struct Wrong {
  // The last stage's loss, of a micro-batch's cross entropy.
  std::function<at::Tensor(const at::Tensor& cross_entropy, const CountedStep&)> loss{};
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, SharedCount)> layout{};
  bool ends_summed = true;  // of a tied embedding, where they lie on two ranks
  bool tied = false;        // then two stages on each rank
  Noise noise{};
};

Grid grid_of(int ranks) {
  const int stages = ranks > 2 && ranks % 2 == 0 ? ranks / 2 : ranks;
  return Grid({{kStageAxis, stages}, {"dp_shard", ranks / stages}});
}

DecoderConfig shape(std::int64_t stages, bool tied) {
  DecoderConfig config = small_shape();
  config.hidden = 16, config.layers = stages, config.heads = 2, config.key_value_heads = 1;
  config.head_dim = 8, config.tied_output = tied;
  return config;
}

// Micro-batches of many sizes, one of them without a target and one empty.
MicroBatches packs() {
  MicroBatches all;
  for (std::int64_t pack = 0; pack < 7; ++pack)  // no number of ranks in a test
    all.push_back(toy::make_batch({3 + pack, 9 - pack, 5}, 3 * pack, /*silent=*/pack == 2));
  all[5] = toy::make_batch({}, 0);
  return all;
}

VerifyProblem pipeline_problem(World& world, const Wrong& wrong, const SharedCount& counted) {
  const Grid grid = grid_of(world.size);
  const int ranks = grid.size({kStageAxis}), stages_of_rank = wrong.tied ? 2 : 1;
  HeldTogether how{.name = "pipeline parallel",
                   .grid = grid,
                   .shape = shape(std::int64_t{ranks} * stages_of_rank, wrong.tied),
                   .noise = wrong.noise};
  how.complete = [stages_of_rank](VerifyModel& made, const std::shared_ptr<DecoderLM>& model) {
    const auto pipeline = std::make_shared<std::shared_ptr<Pipeline>>();
    made.cut = [model, pipeline, stages_of_rank](const Mesh& mesh) {
      *pipeline = std::make_shared<Pipeline>(
          mesh, PipelineOptions{.schedule = stages_of_rank > 1 ? "interleaved" : "1f1b",
                                .stages_of_rank = stages_of_rank});
      return split_decoder(*model, mesh, *pipeline);
    };
    made.through = [pipeline](StepOptions options) { return through(**pipeline, std::move(options)); };
  };
  if (wrong.loss)
    how.change_loss = [wrong, counted](const at::Tensor& sum) { return wrong.loss(sum, *counted); };
  if (!wrong.ends_summed)
    how.change_placements = [](Layout::Named& placements) {
      for (auto& [name, placement] : placements) placement.summed.erase(kStageAxis);
    };
  if (wrong.layout)
    how.wrap = [wrong, counted](auto right) { return wrong.layout(std::move(right), counted); };
  VerifyProblem problem = problem_of(world, std::move(how));
  const MicroBatches all = packs();
  const Mesh& mesh = *problem.mesh;
  problem.local.clear();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (static_cast<int>(i) % mesh.size(mesh.data()) == mesh.place(mesh.data()))
      problem.local.push_back(all[i]);
  problem.whole = packs;
  return problem;
}

Plant plants(Wrong wrong) {
  return [wrong = std::move(wrong)](VerifyProblem& problem, World& world) {
    const auto counted = std::make_shared<CountedStep>();
    problem = pipeline_problem(world, wrong, counted);
    count_into(counted, problem);
  };
}

// B18ap: each stage that has a copy owns all of it, assigned to its data ranks alone.
struct OwnedInEachStage : Wrapped {
  explicit OwnedInEachStage(std::unique_ptr<DataParallel> inner_) : Wrapped(std::move(inner_)) {
    for (Bucket& bucket : buckets()) {
      AxisSet of_stage;
      for (const std::string& axis : bucket.plan.sync.copies)
        if (mesh().grid().axes_of(axis) != AxisSet{kStageAxis}) of_stage.insert(axis);
      if (of_stage != bucket.plan.sync.copies)
        bucket.owned = owned_slice(bucket.plan.numel, mesh().place(of_stage), mesh().size(of_stage));
    }
  }
};

double norm_of_stage(const Mesh& mesh, const std::vector<Bucket>& buckets) {
  const double own = norm_of_own(buckets);
  at::Tensor squares = at::full({1}, own * own, at::kDouble);
  mesh.along(mesh.data()).all_reduce(squares);
  return std::sqrt(squares.item<double>());
}

// The clip of stages by a norm of their own.
Plant clips_stages(double (*norm)(const Mesh&, const std::vector<Bucket>&)) {
  return then(plants({}), [norm](VerifyProblem& problem, World&) {
    problem.clipping =
        OwnClipping{.norm = [mesh = *problem.mesh, norm](std::vector<Bucket>& buckets, Group&) {
          return norm(mesh, buckets);
        }};
  });
}

}  // namespace

void lay_in_stages(VerifyProblem& problem, World& world) { plants({.noise = keyed_by(0)})(problem, world); }

void lay_in_stages_tied(VerifyProblem& problem, World& world) { plants({.tied = true})(problem, world); }

void add_pipeline(std::vector<Exhibit>& list) {
  list.push_back({.id = "B5p", .plant = [](VerifyProblem& problem, World& world) {
                    problem = pipeline_problem(world, {}, nullptr);
                    problem.make_normalizer = [stages = problem.mesh->size({kStageAxis})] {
                      return std::make_unique<planted::CountsPeers>(stages);
                    };
                  }});
  list.push_back({.id = "B6p", .plant = [](VerifyProblem& problem, World& world) {
                    lay_in_stages(problem, world);
                    multiply_log(problem, problem.mesh->size({kStageAxis}));
                  }});
  list.push_back(
      {.id = "B8p", .plant = plants({.loss = [](const at::Tensor& sum, const CountedStep& counted) {
                      return sum + (sum - sum.detach()) * (counted.denominator - 1);
                    }})});
  list.push_back({.id = "B9p",
                  .plant = plants(
                      {.layout = [](auto right, const SharedCount& counted) -> std::unique_ptr<DataParallel> {
                        return std::make_unique<planted::RescalesTheBuffer>(
                            std::move(right), [counted] { return counted->own_micro_batches(); });
                      }})});
  list.push_back(
      {.id = "B10", .plant = plants({.loss = [](const at::Tensor& sum, const CountedStep& counted) {
                      return sum * static_cast<double>(counted.step_counts.global_micro_batches);
                    }})});
  list.push_back({.id = "B16p", .plant = plants({.ends_summed = false, .tied = true})});
  list.push_back(
      {.id = "B18ap",
       .plant = plants({.layout = [](auto right, const SharedCount&) -> std::unique_ptr<DataParallel> {
                          return std::make_unique<OwnedInEachStage>(std::move(right));
                        },
                        .tied = true})});
  list.push_back({.id = "B18bp", .plant = clips_stages(norm_of_stage)});
  list.push_back(
      {.id = "B18cp", .plant = clips_stages([](const Mesh& mesh, const std::vector<Bucket>& buckets) {
                        return mean_over(mesh.along({kStageAxis}), norm_of_stage(mesh, buckets));
                      })});
  list.push_back(
      {.id = "B18fp", .plant = clips_stages([](const Mesh& mesh, const std::vector<Bucket>& buckets) {
                        return largest_over(mesh.along({kStageAxis}), norm_of_stage(mesh, buckets));
                      })});
  list.push_back(
      {.id = "B18ep",
       .plant = then(plants({}), [](VerifyProblem& problem, World&) {
         const auto own = [mesh = *problem.mesh](std::vector<Bucket>& buckets, double, double limit) {
           return std::vector<double>(buckets.size(), clip_coefficient(norm_of_stage(mesh, buckets), limit));
         };
         problem.clipping = OwnClipping{whole_norm, own};
       })});
  list.push_back({.id = "B26bp", .plant = [](VerifyProblem& problem, World& world) {
                    plants({.noise = keyed_by(static_cast<std::uint64_t>(world.rank) + 1)})(problem, world);
                  }});
}

}  // namespace isograd::museum
