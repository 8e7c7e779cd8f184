// What the exhibits share: the museum's model and data, and layouts to wrap.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "museum/museum.hpp"
#include "planted.hpp"
#include "toy.hpp"

namespace isograd::museum {

// The toy model, with what some exhibits need.
struct RoomModel {
  // Of the logits: dropout keyed by what this gives for a sample and a place in its fragment; none if not
  // given.
  using Noise = std::function<double(std::int64_t sample, std::int64_t position)>;

  toy::Model toy;
  at::Tensor router;
  bool with_router = false;
  bool leaks = false;  // attention takes a whole pack for one document
  Noise noise{};
  bool quiet = false;

  explicit RoomModel(at::ScalarType type);
  at::Tensor logits(const Batch& batch) const;
  at::Tensor balance(const Batch& batch) const;  // the router's own term, a sum over tokens
};

// For verify, and for exhibits that change what stands in it before.
VerifyModel as_verify_model(std::shared_ptr<RoomModel> model, double router_factor = 1);
void with_model(VerifyProblem& problem, const std::function<void(RoomModel&)>& change);

constexpr std::int64_t kBucketBytes = 256;  // several buckets

// Every gradient in buckets that nothing reduces before the end: what exhibits lay hands on.
std::unique_ptr<DataParallel> plain_layout(std::vector<NamedParameter> parameters, const Mesh& mesh);
double plain_traffic(std::int64_t numel, int ranks, at::ScalarType dtype);

// The loss becomes average precision over the rows of all ranks, each of which brings one micro-batch.
void rank_all_rows(VerifyProblem& problem, World& world);

// A small decoder instead, whose documents are cut over context ranks.
void cut_over_context(VerifyProblem& problem, World& world);

// Or a small decoder whose matrices are cut over all ranks, which see the same packs.
void cut_over_tensor(VerifyProblem& problem, World& world);

// Or a small decoder whose experts are dealt to ranks that see different packs.
void deal_over_experts(VerifyProblem& problem, World& world);

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

}  // namespace isograd::museum
