// What a decoder with experts adds to its loss so that its routers share tokens out, and what is known of
// their load (docs/experts.md).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/trainer.hpp"
#include "train/config.hpp"
#include "train/task.hpp"

namespace isograd {

inline constexpr const char *kBalanceTerm = "balance", *kRouterZTerm = "router_z";

class RouterLosses {
 public:
  RouterLosses(const RunConfig& config, const DecoderConfig& shape);

  // Whether the routing of the whole step must be known before its first term: loss.balance over the step.
  bool looks_ahead() const { return weight_ != 0 && scope_ == Scope::kStep; }
  // Over which ranks router statistics are summed: those that see different data, and of a model in stages
  // those that have other layers, which no look_ahead() takes back. Over stages only where looks_ahead():
  // stages compute different micro-batches at a time.
  void sum_over(const Group& data);
  void sum_over_stages(const Group& data_and_stages);

  // The terms of a micro-batch, of what its routers say in the layers that this forward was of. While
  // collecting: counts choices, and there are none. A layer whose logits are not finite is remembered.
  void add_terms(const DecoderOutputs& outputs, LossTerms& terms);

  // Runs `forward` on each micro-batch without gradient. Collective.
  void look_ahead(const MicroBatches& micro_batches, const Group& data, const ForwardLossTerms& forward);
  bool collecting() const { return collecting_; }

  // From now on add_terms() counts choices, except while collecting. take_choices(): those of this rank since
  // the last call, by layer and expert; loads_of(): what such counts of all ranks, added up, say; nothing
  // where all are 0.
  void count_choices();
  std::vector<double> take_choices();
  std::vector<ExpertLoad> loads_of(const std::vector<double>& counts) const;

  // "the router logits of layer 3"; empty: all were finite since the last call.
  std::string take_not_finite();

 private:
  std::vector<std::int64_t> layers_{};  // that have experts
  ExpertsShape shape_;
  double weight_, z_weight_;
  Scope scope_;
  BalanceLossOptions balance_options_{};
  std::optional<BalanceLoss> balance_{};
  std::optional<Group> stages_{};
  bool collecting_ = false;
  at::Tensor choices_{};  // [layers, E] int64; undefined: not counted
  std::int64_t not_finite_ = -1;
};

// The losses of routers by plain code (router_plain.cpp), for the oracle: it uses nothing of RouterLosses or
// BalanceLoss. Those that the configuration asks for, in the order in which RouterLosses adds them.
std::vector<PlainTerm> plain_router_terms(const RunConfig& config, const DecoderConfig& shape,
                                          std::function<DecoderLM&(TaskModel&)> decoder);

}  // namespace isograd
