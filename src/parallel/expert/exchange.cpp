#include "parallel/expert/exchange.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>

#include "comm/linear_map.hpp"

namespace isograd {

// Of one direction.
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
  c10::intrusive_ptr<State> way_back{};  // of the gradients, once they are on it
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
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

at::Tensor Exchange::finish() {
  return token_.defined() ? Finish::apply(token_, state_) : state_->take();
}

}  // namespace isograd
