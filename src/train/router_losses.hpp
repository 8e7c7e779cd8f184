// Router losses, which balance tokens over experts, and counts of the load (docs/experts.md).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/trainer.hpp"
#include "train/config.hpp"
#include "train/task.hpp"

namespace isograd {

class RouterLosses {
 public:
  RouterLosses(const RunConfig& config, const DecoderConfig& shape);

  // Whether the first term needs the routing of the whole step: loss.balance over the step.
  bool looks_ahead() const { return options_.weight != 0 && options_.scope == Scope::kStep; }
  // The ranks over which statistics are summed: those with different data, with pipeline stages also those
  // with other layers. Stages only if looks_ahead(), as they compute different micro-batches at a time.
  void sum_over(const Group& data);
  void sum_over_stages(const Group& data_and_stages);

  // Adds a micro-batch's terms; while collecting only counts choices. Remembers layers with non-finite
  // logits.
  void add_terms(const DecoderOutputs& outputs, LossTerms& terms);

  // Runs `forward` on each micro-batch without gradient. Collective.
  void look_ahead(const MicroBatches& micro_batches, const Group& data, const ForwardLossTerms& forward);
  bool collecting() const { return collecting_; }

  // From count_choices() on add_terms() counts choices, except while collecting. take_choices(): this rank's
  // since the last call, by layer and expert. loads_of(): of such counts summed over ranks; empty if all are
  // 0.
  void count_choices();
  std::vector<double> take_choices();
  std::vector<ExpertLoad> loads_of(const std::vector<double>& counts) const;

  // "the router logits of layer 3"; empty: all were finite since the last call.
  std::string take_not_finite();

 private:
  std::vector<std::int64_t> layers_{};  // that have experts
  ExpertsShape shape_;
  double z_weight_;
  BalanceLossOptions options_{};
  std::optional<BalanceLoss> balance_{};
  std::optional<Group> stages_{};
  bool collecting_ = false;
  at::Tensor choices_{};  // [layers, E] int64; undefined: not counted
  std::int64_t not_finite_ = -1;
};

// TaskModel::plain_terms() of `model`, which must outlive them: shares nothing with the above.
std::vector<PlainTerm> plain_router_terms(const RunConfig& config, DecoderLM& model);

}  // namespace isograd
