#include "parallel/expert/dispatch.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "isograd/error.hpp"

namespace isograd {

// One direction of an exchange.
struct Exchange::State final : torch::CustomClassHolder {
  State(Group group_, Group::Rows out, Group::Rows in)
      : group(std::move(group_)), output_rows(std::move(out)), input_rows(std::move(in)) {}

  void start(const at::Tensor& rows) {
    std::vector<std::int64_t> sizes = rows.sizes().vec();
    sizes.at(0) = std::accumulate(output_rows.begin(), output_rows.end(), std::int64_t{0});
    result = at::empty(sizes, rows.options());
    pending = group.all_to_all_async(result, rows, output_rows, input_rows);
  }
  at::Tensor take() {
    std::exchange(pending, {}).wait();
    return std::exchange(result, {});
  }

  Group group;
  Group::Rows output_rows, input_rows;
  at::Tensor result{};
  Pending pending{};
  c10::intrusive_ptr<State> way_back{};  // of the gradients
};

namespace {

using State = Exchange::State;

State& of(AutogradContext* context) {
  return *static_cast<State*>(context->saved_data["state"].toCapsule().get());
}

// The backward of each half is the other half of the way back, so that backwards can be differentiated too.
struct Finish;
struct Start final : torch::autograd::Function<Start> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<State>& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    state->start(rows);
    return at::empty({0}, rows.options());
  }
  static variable_list backward(AutogradContext* context, const variable_list& token);
};

struct Finish final : torch::autograd::Function<Finish> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*token*/,
                            const c10::intrusive_ptr<State>& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return state->take();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    State& there = of(context);
    there.way_back = c10::make_intrusive<State>(there.group, there.input_rows, there.output_rows);
    return {Start::apply(gradients[0], differentiable::anchor(), there.way_back), {}};
  }
};

variable_list Start::backward(AutogradContext* context, const variable_list& token) {
  return {Finish::apply(token[0], std::exchange(of(context).way_back, {})), {}, {}};
}

// Rows in another order; their gradients take the order back.
at::Tensor reordered(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& back) {
  const auto by = [device = rows.device()](const at::Tensor& places) {  // which are counted on the host
    return [places = places.to(device)](const at::Tensor& x) { return x.index_select(0, places); };
  };
  return apply_map(rows, by(order), by(back));
}

}  // namespace

Exchange::Exchange() = default;
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&&) noexcept = default;
Exchange::~Exchange() = default;

Exchange Exchange::start(Group group, const at::Tensor& rows, Group::Rows output_rows,
                         Group::Rows input_rows) {
  Exchange exchange;
  exchange.state_ =
      c10::make_intrusive<State>(std::move(group), std::move(output_rows), std::move(input_rows));
  // Other ranks need this one in the backward even if nobody here asks for a gradient.
  if (at::GradMode::is_enabled() && at::isFloatingType(rows.scalar_type()))
    exchange.token_ = Start::apply(rows, differentiable::anchor(), exchange.state_);
  else
    exchange.state_->start(rows.detach());
  return exchange;
}

at::Tensor Exchange::finish() { return token_.defined() ? Finish::apply(token_, state_) : state_->take(); }

ExpertDispatch::ExpertDispatch(Group ep, std::int64_t experts)
    : ep_(std::move(ep)), own_(split_rows(experts, ep_.size())) {
  if (experts < ep_.size())
    refuse("parallel.ep", fmt::format("{} ranks for {} experts", ep_.size(), experts),
           "at least one expert for each rank", "Lower parallel.ep");
  first_ = std::accumulate(own_.begin(), own_.begin() + ep_.rank(), std::int64_t{0});
}

std::vector<DispatchPlan> ExpertDispatch::plan(const std::vector<std::vector<std::int64_t>>& begins) const {
  const std::int64_t experts = std::accumulate(own_.begin(), own_.end(), std::int64_t{0});
  const auto parts = static_cast<std::int64_t>(begins.size());
  at::Tensor own = at::empty({parts, experts}, at::kLong);
  auto* count = own.mutable_data_ptr<std::int64_t>();
  for (const auto& begin : begins) {
    ISOGRAD_INVARIANT(static_cast<std::int64_t>(begin.size()) == experts + 1,
                      fmt::format("{} groups of rows for {} experts", begin.size() - 1, experts));
    for (std::size_t e = 0; e + 1 < begin.size(); ++e) *count++ = begin[e + 1] - begin[e];
  }
  const at::Tensor counts = Group(ep_).all_gather(own);  // [ranks, parts, experts]
  std::vector<DispatchPlan> plans;
  for (std::int64_t part = 0; part < parts; ++part)
    plans.push_back(plan_of(begins[static_cast<std::size_t>(part)], counts.select(1, part)));
  return plans;
}

DispatchPlan ExpertDispatch::plan_of(const std::vector<std::int64_t>& begin, const at::Tensor& counts) const {
  const auto count = counts.accessor<std::int64_t, 2>();
  DispatchPlan plan;
  std::int64_t expert = 0;
  for (const std::int64_t of_rank : own_) {
    const auto first = static_cast<std::size_t>(expert), last = static_cast<std::size_t>(expert + of_rank);
    plan.sent.push_back(begin[last] - begin[first]);
    expert += of_rank;
  }
  // Received rows are by rank and, within a rank, by expert. Where each group begins:
  std::vector<std::vector<std::int64_t>> group_begin(static_cast<std::size_t>(ep_.size()));
  std::int64_t rows = 0;
  for (int rank = 0; rank < ep_.size(); ++rank) {
    const std::int64_t before = rows;
    for (std::int64_t e = 0; e < own_experts(); ++e) {
      group_begin[static_cast<std::size_t>(rank)].push_back(rows);
      rows += count[rank][first_ + e];
    }
    plan.received.push_back(rows - before);
  }
  plan.by_expert = at::empty({rows}, at::kLong), plan.place = at::empty({rows}, at::kLong);
  auto *by_expert = plan.by_expert.mutable_data_ptr<std::int64_t>(),
       *place = plan.place.mutable_data_ptr<std::int64_t>();
  std::int64_t next = 0;
  for (std::int64_t e = 0; e < own_experts(); ++e) {
    plan.begin.push_back(next);
    for (int rank = 0; rank < ep_.size(); ++rank)
      for (std::int64_t i = 0; i < count[rank][first_ + e]; ++i, ++next) {
        const std::int64_t from =
            group_begin[static_cast<std::size_t>(rank)][static_cast<std::size_t>(e)] + i;
        by_expert[next] = from, place[from] = next;
      }
  }
  plan.begin.push_back(next);
  return plan;
}

Exchange ExpertDispatch::start_dispatch(const at::Tensor& rows, const DispatchPlan& plan) const {
  return Exchange::start(ep_, rows, plan.received, plan.sent);
}

at::Tensor ExpertDispatch::finish_dispatch(Exchange& exchange, const DispatchPlan& plan) const {
  return reordered(exchange.finish(), plan.by_expert, plan.place);
}

Exchange ExpertDispatch::start_combine(const at::Tensor& rows, const DispatchPlan& plan) const {
  return Exchange::start(ep_, reordered(rows, plan.place, plan.by_expert), plan.sent, plan.received);
}

}  // namespace isograd
