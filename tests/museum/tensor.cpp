// Mistakes on the tensor axis: B5, B6, B18, B21, B22, B23 and B26. A small decoder whose matrices are cut
// over ranks.
#include "isograd/model.hpp"
#include "isograd/tensor_parallel.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

// What an exhibit puts in place of the right thing.
struct Wrong {
  std::function<bool(const std::string& name)> unsummed{};  // parameters whose sum along tp is left out
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)> layout{};
  double term_factor = 1;  // of the auxiliary term, on every rank
  bool with_term = false, sequence_parallel = true;
  Noise noise{};
};

// Twelve heads that read one key head: every rank has it whole, for its own heads.
DecoderConfig shape() {
  DecoderConfig config = small_shape();
  config.hidden = 24, config.heads = 12, config.key_value_heads = 1, config.head_dim = 2;
  return config;
}

MicroBatches packs() {
  MicroBatches all;
  for (std::int64_t pack = 0; pack < 7; ++pack)  // no number of ranks in a test
    all.push_back(toy::make_batch({3 + pack, 9 - pack, 5}, 3 * pack));
  return all;
}

// A term that the last norm's weight alone has a gradient of, the same on all ranks.
at::Tensor size_of_norm(DecoderLM& model, const DecoderOutputs&, const Batch& batch) {
  for (const auto& [name, tensor] : model.named())
    if (name == "model.norm.weight") return tensor.square().sum() * batch.num_targets();
  return {};
}

VerifyProblem tensor_problem(World& world, const Wrong& wrong) {
  HeldTogether how{.name = "tensor parallel",
                   .grid = Grid({{"tp", world.size}}),
                   .shape = shape(),
                   .noise = wrong.noise,
                   .wrap = wrong.layout};
  how.complete = [wrong](VerifyModel& made, const std::shared_ptr<DecoderLM>& model) {
    made.cut = [model, wrong](const Mesh& mesh) {
      return cut_decoder(*model, mesh, {.sequence_parallel = wrong.sequence_parallel});
    };
  };
  if (wrong.with_term) how.term = HeldTogether::Term{"norm", size_of_norm, wrong.term_factor};
  how.change_placements = [wrong](Layout::Named& placements) {
    for (auto& [name, placement] : placements)
      if (wrong.unsummed && wrong.unsummed(name)) placement.summed.erase("tp");
  };
  VerifyProblem problem = problem_of(world, std::move(how));
  problem.local = packs();
  problem.whole = packs;
  return problem;
}

std::function<void(VerifyProblem&, World&)> plants(Wrong wrong) {
  return [wrong = std::move(wrong)](VerifyProblem& problem, World& world) {
    problem = tensor_problem(world, wrong);
  };
}

}  // namespace

void cut_over_tensor(VerifyProblem& problem, World& world) {
  plants({.with_term = true, .sequence_parallel = false, .noise = keyed_by(0)})(problem, world);
}

void add_tensor(std::vector<Exhibit>& list) {
  list.push_back(
      {.id = "B5t",
       .title = "tokens counted on tensor-parallel peers",
       .mistake = "The token count is summed over all ranks, those too that hold parts of one model "
                  "and see the same tokens.",
       .who = "Trainers that add tensor parallelism to a count over the world.",
       .number = "Loss and every gradient are 1/tp, the token count in the log is tp times too large.",
       .diagnosis = "counted_on_peers",
       .plant = [](VerifyProblem& problem, World& world) {
         problem = tensor_problem(world, {});
         problem.make_normalizer = [ranks = world.size] {
           return std::make_unique<planted::CountsPeers>(ranks);
         };
       }});
  list.push_back({.id = "B6t",
                  .title = "the loss in the log multiplied by tp",
                  .mistake =
                      "The loss that is logged is summed over all ranks, those too that hold parts of one "
                      "model and have the same loss. The gradient is right.",
                  .who = "Trainers that add tensor parallelism to a log that is reduced over the world.",
                  .number = "Loss ratio tp, gradient ratio 1.",
                  .diagnosis = "loss_scaled",
                  .plant = [](VerifyProblem& problem, World& world) {
                    problem = tensor_problem(world, {});
                    multiply_log(problem, world.size);
                  }});
  list.push_back({.id = "B18ct",
                  .title = "norms of rows averaged",
                  .mistake = "The norms of the rows and columns that tp gave each rank are averaged over its "
                             "ranks; the squares should be summed.",
                  .who = "An all-reduce with AVG over the ranks that hold a model together.",
                  .number = "A norm that is too small, the same on all ranks, with no constant factor.",
                  .diagnosis = "norms_averaged",
                  .plant = [](VerifyProblem& problem, World& world) {
                    problem = tensor_problem(world, {});
                    problem.clipping = OwnClipping{.norm = [](std::vector<Bucket>& buckets, Group& group) {
                      return mean_over(group, norm_of_own(buckets));
                    }};
                  }});
  list.push_back(
      {.id = "B18at",
       .title = "the norm counts every tensor-parallel copy",
       .mistake =
           "Squares are summed over all ranks, those of norm weights too, of which each has a copy: they "
           "count tp times.",
       .who = "Norms taken over the world when some parameters are cut and others copied.",
       .number = "A norm that is too large by the copies' share; gradients agree, clipped parameters do not.",
       .diagnosis = "norm_counts_replicas",
       .plant = plants({.layout = [](auto right) -> std::unique_ptr<DataParallel> {
         return std::make_unique<OwnedOnEveryRank>(std::move(right));
       }})});
  list.push_back({.id = "B18bt",
                  .title = "the norm of the own rows",
                  .mistake = "Each rank clips by the norm of the rows and columns that tp gave it.",
                  .who = "clip_grad_norm of a single-device library on a model that is cut over ranks.",
                  .number = "A norm that is too small, and another one on every rank.",
                  .diagnosis = "norm_of_own_shard",
                  .plant = [](VerifyProblem& problem, World& world) {
                    problem = tensor_problem(world, {});
                    problem.clipping = OwnClipping{
                        .norm = [](std::vector<Bucket>& buckets, Group&) { return norm_of_own(buckets); }};
                  }});
  list.push_back({.id = "B18ft",
                  .title = "the largest norm of rows",
                  .mistake =
                      "The maximum over tensor-parallel ranks of their own parts' norms is taken for the "
                      "norm of the whole.",
                  .who = "An all-reduce with MAX over the ranks that hold a model together.",
                  .number = "A norm that is too small, the same on all ranks, with no constant factor.",
                  .diagnosis = "norm_of_largest_part",
                  .plant = [](VerifyProblem& problem, World& world) {
                    problem = tensor_problem(world, {});
                    problem.clipping = OwnClipping{.norm = [](std::vector<Bucket>& buckets, Group& group) {
                      return largest_over(group, norm_of_own(buckets));
                    }};
                  }});
  list.push_back(
      {.id = "B21",
       .title = "norm weights not summed over tensor-parallel peers",
       .mistake =
           "With tokens cut between the products each rank's norms see its own tokens: their gradients "
           "are parts, and stay parts.",
       .who = "Sequence parallelism added to tensor parallelism, whose norms had the same gradient on all "
              "ranks.",
       .number = "About 1/tp on those parameters, another part on each rank.",
       .diagnosis = "not_summed_over_axis",
       .plant = plants({.unsummed = [](const std::string& name) {
         return name.find("layernorm") != std::string::npos || name == "model.norm.weight";
       }})});
  list.push_back(
      {.id = "B21k",
       .title = "copied key heads not summed",
       .mistake =
           "Fewer key heads than ranks: each rank has a copy for the query heads that it computes, and "
           "each copy keeps the gradient of its own readers.",
       .who = "Grouped-query models under more tensor-parallel ranks than key heads.",
       .number = "A part of the gradient of keys and values on each rank; all others are right.",
       .diagnosis = "not_summed_over_axis",
       .plant = plants({.unsummed = [](const std::string& name) {
         return name.find("k_proj") != std::string::npos || name.find("v_proj") != std::string::npos;
       }})});
  list.push_back(
      {.id = "B22t",
       .title = "an auxiliary loss multiplied by tp",
       .mistake = "A term that all ranks compute alike is summed over them.",
       .who = "Balance and z-losses under tensor parallelism.",
       .number = "The parameters that it reaches are off by their share of it; the term is tp times "
                 "too large.",
       .diagnosis = "term_scaled",
       .plant = [](VerifyProblem& problem, World& world) {
         problem = tensor_problem(
             world,
             {.term_factor = static_cast<double>(world.size), .with_term = true, .sequence_parallel = false});
       }});
  list.push_back(
      {.id = "B23t",
       .title = "norm weights summed again with every micro-batch",
       .mistake = "With tokens cut between the products the norms' gradients are summed over tp after each "
                  "micro-batch, into the buffer that goes on accumulating.",
       .who = "Sequence parallelism whose sums hang on backward hooks, under gradient accumulation.",
       .number = "Right with one micro-batch; with several the norms' micro-batches have weights that are "
                 "powers of tp.",
       .diagnosis = "reduced_while_accumulating",
       .plant = plants({.layout = [](auto right) -> std::unique_ptr<DataParallel> {
         return std::make_unique<SumsAgain>(std::move(right), AxisSet{"tp"});
       }})});
  list.push_back(
      {.id = "B26bt",
       .title = "dropout that tensor-parallel ranks draw apart",
       .mistake = "Between the products all ranks have the same activations, and each drops other ones of "
                  "them: its generator was seeded with its rank.",
       .who = "Tensor parallelism under a seed for each rank, which is right for activations that are cut.",
       .number = "Gradients differ, those of copied parameters from rank to rank; without dropout all is "
                 "well.",
       .diagnosis = "noise_depends_on_layout",
       .plant = [](VerifyProblem& problem, World& world) {
         problem = tensor_problem(world, {.sequence_parallel = false,
                                          .noise = keyed_by(static_cast<std::uint64_t>(world.rank) + 1)});
       }});
}

}  // namespace isograd::museum
