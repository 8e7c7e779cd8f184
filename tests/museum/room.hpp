// Shared by the exhibits: the museum's model and data, and layouts to wrap.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "museum/museum.hpp"
#include "planted.hpp"
#include "toy.hpp"

namespace isograd::museum {

// Dropout keyed by what this gives for a sample and a position in it; none if not given.
using Noise = std::function<double(std::int64_t sample, std::int64_t position)>;
// [T_local, 1]: what each token is multiplied by, 0 for a quarter of them.
at::Tensor kept_tokens(const Batch& batch, const Noise& noise);
// Keyed as it should be (the rank 0), or by a rank too.
Noise keyed_by(std::uint64_t rank);

// The toy model, with what some exhibits need.
struct RoomModel {
  toy::Model toy;
  at::Tensor router;
  bool with_router = false;
  bool leaks = false;  // attention takes a whole pack for one document
  Noise noise{};       // of the logits
  bool quiet = false;

  explicit RoomModel(at::ScalarType type);
  at::Tensor logits(const Batch& batch) const;
  at::Tensor balance(const Batch& batch) const;  // the router's own term, a sum over tokens
};

// For verify, and for exhibits that change what stands in it before.
VerifyModel as_verify_model(std::shared_ptr<RoomModel> model, double router_factor = 1);
void with_model(VerifyProblem& problem, const std::function<void(RoomModel&)>& change);

// B6: the loss that is logged is multiplied, what is differentiated is not.
void multiply_log(VerifyProblem& problem, int factor);

constexpr std::int64_t kBucketBytes = 256;  // several buckets

// Every gradient in buckets that nothing reduces before the end: what exhibits lay hands on.
std::unique_ptr<DataParallel> plain_layout(TrainableParameters parameters, const Mesh& mesh);
double plain_traffic(std::int64_t numel, int ranks, at::ScalarType dtype);

// The loss becomes average precision over the rows of all ranks, each of which brings one micro-batch.
void rank_all_rows(VerifyProblem& problem, World& world);

// A small decoder instead, whose documents are cut over context ranks.
void cut_over_context(VerifyProblem& problem, World& world);

// Or one whose matrices are cut over all ranks, which see the same packs.
void cut_over_tensor(VerifyProblem& problem, World& world);

// Or one whose experts are assigned to ranks that see different packs.
void shard_over_experts(VerifyProblem& problem, World& world);

// Or one whose layers lie in stages; with a tied embedding two stages on each rank, and its ends on two ranks
// wherever their number is even.
void lay_in_stages(VerifyProblem& problem, World& world);
void lay_in_stages_tied(VerifyProblem& problem, World& world);

// The decoder of all of these, of one layer; its heads and its width are to be said.
DecoderConfig small_shape();

// A small decoder that ranks hold together on a mesh, and what an exhibit puts into it.
struct HeldTogether {
  std::string name;  // of the layout
  Grid grid;
  DecoderConfig shape;
  // Gives it what its axis needs: VerifyModel::cut, and more.
  std::function<void(VerifyModel& made, const std::shared_ptr<DecoderLM>& model)> complete{};
  // A second term, of tokens with a target and the weight 0.5; steps multiply it by a
  // factor that the oracle does not know.
  struct Term {
    std::string name;
    std::function<at::Tensor(DecoderLM&, const DecoderOutputs&, const Batch&)> sum;
    double factor = 1;
  };
  std::optional<Term> term{};
  std::function<at::Tensor(const at::Tensor& cross_entropy)> change_loss{};
  Noise noise{};  // of what comes out of the last norm, all of it on every rank
  std::function<void(Layout::Named&)> change_placements{};
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)> wrap{};
};
// The right problem with it. Collective over the world.
VerifyProblem problem_of(World& world, HeldTogether how);

// A rank's counts of a step, which mistakes use.
struct CountedStep {
  StepCounts step_counts;
  double denominator = 0;            // of the declared mean
  double own_micro_batches() const;  // at least 1
};
// The declared mean writes what it counts there, too. `problem` is the one that is run.
void count_into(std::shared_ptr<CountedStep> counted, VerifyProblem& problem);

// B18a: every copy of a gradient has an owner of its own.
struct OwnedOnEveryRank : planted::Wrapped {
  explicit OwnedOnEveryRank(std::unique_ptr<DataParallel> inner_) : Wrapped(std::move(inner_)) {
    for (Bucket& bucket : buckets()) bucket.owned = {0, bucket.plan.numel};
  }
};
// B23: what has been accumulated is summed along these axes before each further micro-batch, wherever its
// gradients are parts along them.
struct SumsAgain : planted::Wrapped {
  AxisSet axes;
  bool first = true;
  SumsAgain(std::unique_ptr<DataParallel> inner_, AxisSet axes_)
      : Wrapped(std::move(inner_)), axes(std::move(axes_)) {}
  void zero_gradients() override;
  void begin_backward(bool last) override;
};
// B18b: of what this rank owns.
double norm_of_own(const std::vector<Bucket>& buckets);
// B18c: the mean of what ranks call their norm.
double mean_over(Group group, double norm);
// B18f: the largest of them.
double largest_over(Group group, double norm);

// Replicas of a hybrid of replicas and shards: two, where that leaves shards.
int replicas_of(int ranks);

// Loops that clip by a norm of their own making: of what a rank owns, the mean of these, the largest of them.
using NormOf = std::function<double(std::vector<Bucket>&, Group&)>;
Plant clips_by(NormOf norm);
double whole_norm(std::vector<Bucket>& buckets, Group& group);  // the right one
double own_norm(std::vector<Bucket>& buckets, Group& group);
double mean_of_own_norms(std::vector<Bucket>& buckets, Group& group);
double largest_of_own_norms(std::vector<Bucket>& buckets, Group& group);

Plant then(Plant first, Plant second);

// The layout `Wrong`, around the plain one.
template <class Wrong, class... Arguments>
void with_layout(VerifyProblem& problem, Arguments... arguments) {
  problem.layouts[0].make = [=](std::vector<NamedParameter> parameters,
                                Group group) -> std::unique_ptr<DataParallel> {
    return std::make_unique<Wrong>(plain_layout(std::move(parameters), group), arguments...);
  };
}
template <class Wrong>
void with_normalizer(VerifyProblem& problem) {
  problem.make_normalizer = [] { return std::make_unique<Wrong>(); };
}
template <class Wrong>
Plant layout() {
  return [](VerifyProblem& problem, World&) { with_layout<Wrong>(problem); };
}
template <class Wrong>
Plant normalizer() {
  return [](VerifyProblem& problem, World&) { with_normalizer<Wrong>(problem); };
}

}  // namespace isograd::museum
