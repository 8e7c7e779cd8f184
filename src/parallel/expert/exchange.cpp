#include "parallel/expert/exchange.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>

#include "comm/anchor.hpp"

namespace isograd {

// Of both directions, one after the other.
struct Exchange::State final : torch::CustomClassHolder {
  State(Group group_, Group::Rows out, Group::Rows in)
      : group(std::move(group_)), output_rows(std::move(out)), input_rows(std::move(in)) {}

  void start(const at::Tensor& rows, const Group::Rows& out, const Group::Rows& in) {
    std::vector<std::int64_t> sizes = rows.sizes().vec();
    sizes.at(0) = std::accumulate(out.begin(), out.end(), std::int64_t{0});
    result = at::empty(sizes, rows.options());
    pending = group.all_to_all_async(result, rows, out, in);
  }
  at::Tensor take() {
    pending.wait();
    pending = {};
    return std::exchange(result, {});
  }

  Group group;
  Group::Rows output_rows, input_rows;
  at::Tensor result{};
  Pending pending{};
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using State = Exchange::State;

State& of(AutogradContext* context) {
  return *static_cast<State*>(context->saved_data["state"].toCapsule().get());
}

struct Start final : torch::autograd::Function<Start> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<State>& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    state->start(rows, state->output_rows, state->input_rows);
    return at::empty({0}, rows.options());
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    return {of(context).take(), {}, {}};
  }
};

struct Finish final : torch::autograd::Function<Finish> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*token*/,
                            const c10::intrusive_ptr<State>& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return state->take();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    State& state = of(context);
    state.start(gradients[0], state.input_rows, state.output_rows);
    return {at::zeros({0}, gradients[0].options()), {}};
  }
};

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
    exchange.state_->start(rows.detach(), exchange.state_->output_rows, exchange.state_->input_rows);
  return exchange;
}

at::Tensor Exchange::finish() {
  return token_.defined() ? Finish::apply(token_, state_) : state_->take();
}

}  // namespace isograd
