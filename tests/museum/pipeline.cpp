// Mistakes on the pipeline axis: B5, B6, B8, B9, B10, B16, B18 and B26. A small decoder whose layers lie in
// stages, beside data ranks where there are ranks for both.
#include <cmath>

#include "isograd/pipeline_parallel.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

using planted::Wrapped;
using SharedCount = std::shared_ptr<const CountedStep>;

// What an exhibit puts in place of the right thing.
struct Wrong {
  // What the last stage differentiates and logs, of a micro-batch's cross entropy.
  std::function<at::Tensor(const at::Tensor& cross_entropy, const CountedStep&)> loss{};
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, SharedCount)> layout{};
  std::function<OwnClipping(const Mesh&)> clipping{};
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
  if (wrong.clipping) problem.clipping = wrong.clipping(mesh);
  return problem;
}

std::function<void(VerifyProblem&, World&)> plants(Wrong wrong) {
  return [wrong = std::move(wrong)](VerifyProblem& problem, World& world) {
    const auto counted = std::make_shared<CountedStep>();
    problem = pipeline_problem(world, wrong, counted);
    count_into(counted, problem);
  };
}

// B18ap: each stage that has a copy owns all of it, dealt to its data ranks alone.
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

}  // namespace

void lay_in_stages(VerifyProblem& problem, World& world) {
  plants({.noise = keyed_by(0)})(problem, world);
}

void lay_in_stages_tied(VerifyProblem& problem, World& world) {
  plants({.tied = true})(problem, world);
}

void add_pipeline(std::vector<Exhibit>& list) {
  list.push_back(
      {.id = "B5p",
       .title = "tokens counted in every stage",
       .mistake =
           "The token count is summed over all ranks, those of other stages too, through which the same "
           "micro-batches go: each stage has counted them.",
       .who = "Trainers that split a model into stages under a count over the world.",
       .number = "Loss and every gradient are 1/pp, the token count in the log is pp times too large.",
       .diagnosis = "counted_on_peers",
       .plant = [](VerifyProblem& problem, World& world) {
         problem = pipeline_problem(world, {}, nullptr);
         problem.make_normalizer = [stages = grid_of(world.size).size({kStageAxis})] {
           return std::make_unique<planted::CountsPeers>(stages);
         };
       }});
  list.push_back(
      {.id = "B6p",
       .title = "the loss in the log multiplied by pp",
       .mistake = "Every stage is told the loss of the last one for its log, and all are summed. The "
                  "gradient is right.",
       .who = "Trainers that send the loss to all stages, under a log that is reduced over the world.",
       .number = "Loss ratio pp, gradient ratio 1.",
       .diagnosis = "loss_scaled",
       .plant = [](VerifyProblem& problem, World& world) {
         lay_in_stages(problem, world);
         multiply_log(problem, problem.mesh->size({kStageAxis}));
       }});
  list.push_back(
      {.id = "B8p",
       .title = "a pipeline's gradient multiplied, its log right",
       .mistake = "The last stage divides the losses that it collects for the log by the token count; each "
                  "micro-batch's backward begins with the undivided sum.",
       .who = "Schedules that call backward on what the loss function returns, under a loss that is a sum.",
       .number = "Loss ratio 1, gradient ratio N, in every stage.",
       .diagnosis = "gradient_scaled_by_count",
       .plant = plants({.loss = [](const at::Tensor& sum, const CountedStep& counted) {
         return sum + (sum - sum.detach()) * (counted.denominator - 1);
       }})});
  list.push_back(
      {.id = "B9p",
       .title = "a stage rescales what it has accumulated",
       .mistake = "1/G is applied to a stage's gradients after each of its backwards instead of to the last "
                  "stage's loss, so that what earlier micro-batches left there is divided again.",
       .who = "Schedules that scale gradients instead of losses, more than once in a step.",
       .number = "Weights of micro-batches fall geometrically from the last back, in every stage alike.",
       .diagnosis = "accumulation_rescaled",
       .plant =
           plants({.layout = [](auto right, const SharedCount& counted) -> std::unique_ptr<DataParallel> {
             return std::make_unique<planted::RescalesTheBuffer>(
                 std::move(right), [counted] { return counted->own_micro_batches(); });
           }})});
  list.push_back(
      {.id = "B10",
       .title = "micro-batches of a pipeline summed",
       .mistake = "The last stage divides each micro-batch's loss by as many tokens as a micro-batch has on "
                  "average, and the schedule adds their gradients up without dividing by their number.",
       .who = "Pipeline schedules whose scaling is switched off, or left to a loss that does not know how "
              "many micro-batches there are.",
       .number = "Every parameter has the ratio G, the number of micro-batches.",
       .diagnosis = "summed_over_micro_batches",
       .plant = plants({.loss = [](const at::Tensor& sum, const CountedStep& counted) {
         return sum * static_cast<double>(counted.census.global_micro_batches);
       }})});
  list.push_back(
      {.id = "B16p",
       .title = "ends of a tied embedding not summed",
       .mistake = "The first stage has the gradient of a tied embedding as an input, the last one that of it "
                  "as an output, and each applies its own to its copy.",
       .who = "Pipelines of models with tied weights that leave out the sum between the two stages.",
       .number =
           "A part of the embedding's gradient in each of the two stages, whose copies drift apart; all "
           "others are right.",
       .diagnosis = "not_summed_over_axis",
       .plant = plants({.ends_summed = false, .tied = true})});
  list.push_back(
      {.id = "B18ap",
       .title = "the norm counts a tied embedding twice",
       .mistake = "Squares are summed over each stage and then over the stages, those of a tied embedding "
                  "too, of which the first and the last stage have a copy.",
       .who = "Norms that are added up over stages as if these never shared a parameter.",
       .number = "A norm that is too large by the embedding's share; gradients agree, clipped parameters do "
                 "not.",
       .diagnosis = "norm_counts_replicas",
       .plant = plants({.layout = [](auto right, const SharedCount&) -> std::unique_ptr<DataParallel> {
                          return std::make_unique<OwnedInEachStage>(std::move(right));
                        },
                        .tied = true})});
  list.push_back({.id = "B18bp",
                  .title = "the norm of the own stage",
                  .mistake = "Each stage takes the norm of its own layers and clips by that.",
                  .who = "clip_grad_norm called on the module of a stage: a clip local to it.",
                  .number = "A norm that is too small, and another one in every stage.",
                  .diagnosis = "norm_of_own_shard",
                  .plant = plants({.clipping = [](const Mesh& mesh) {
                    return OwnClipping{.norm = [mesh](std::vector<Bucket>& buckets, Group&) {
                      return norm_of_stage(mesh, buckets);
                    }};
                  }})});
  list.push_back({.id = "B18cp",
                  .title = "norms of stages averaged",
                  .mistake = "The norms of the stages are averaged over them; the squares should be summed.",
                  .who = "An all-reduce with AVG over the pipeline's ranks put behind the norm of a stage.",
                  .number = "A norm that is too small, the same on all ranks, with no constant factor.",
                  .diagnosis = "norms_averaged",
                  .plant = plants({.clipping = [](const Mesh& mesh) {
                    return OwnClipping{.norm = [mesh](std::vector<Bucket>& buckets, Group&) {
                      return mean_over(mesh.along({kStageAxis}), norm_of_stage(mesh, buckets));
                    }};
                  }})});
  list.push_back({.id = "B18fp",
                  .title = "the maximum over stages",
                  .mistake = "Each stage has its own norm, and the largest of them is taken for that of the "
                             "model; the squares should be summed.",
                  .who = "An all-reduce with MAX over the pipeline's ranks, so that all stages clip alike.",
                  .number = "A norm that is too small, the same on all ranks, with no constant factor.",
                  .diagnosis = "norm_of_largest_part",
                  .plant = plants({.clipping = [](const Mesh& mesh) {
                    return OwnClipping{.norm = [mesh](std::vector<Bucket>& buckets, Group&) {
                      return largest_over(mesh.along({kStageAxis}), norm_of_stage(mesh, buckets));
                    }};
                  }})});
  list.push_back(
      {.id = "B18ep",
       .title = "stages clipped by coefficients of their own",
       .mistake = "The norm of the whole model is logged, and each stage's optimizer clips by that of its "
                  "stage.",
       .who = "One optimizer for each stage that clips for itself.",
       .number = "The applied gradient's ratio differs between stages.",
       .diagnosis = "groups_clipped_apart",
       .plant = plants({.clipping = [](const Mesh& mesh) {
         return OwnClipping{.norm = [](std::vector<Bucket>& buckets,
                                       Group& group) { return global_norm(buckets, 0, group).norm; },
                            .coefficients =
                                [mesh](std::vector<Bucket>& buckets, double, double limit) {
                                  return std::vector<double>(
                                      buckets.size(), clip_coefficient(norm_of_stage(mesh, buckets), limit));
                                }};
       }})});
  list.push_back({.id = "B26bp",
                  .title = "dropout keyed by the stage",
                  .mistake =
                      "Random numbers are keyed by the rank, and so by the stage that computes a layer: "
                      "in a model that lies otherwise the same layer draws others.",
                  .who = "Generators seeded with the rank, in pipelines.",
                  .number = "Gradients differ, each run is reproducible, and without dropout all is well.",
                  .diagnosis = "noise_depends_on_layout",
                  .plant = [](VerifyProblem& problem, World& world) {
                    plants({.noise = keyed_by(static_cast<std::uint64_t>(world.rank) + 1)})(problem, world);
                  }});
}

}  // namespace isograd::museum
