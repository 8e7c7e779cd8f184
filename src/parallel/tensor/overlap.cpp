#include "parallel/tensor/overlap.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "base/refuse.hpp"
#include "comm/linear_map.hpp"
#include "isograd/error.hpp"
#include "kernels/matmul/product.hpp"
#include "model/weight_gradient.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Span {
  std::int64_t begin, count;
  at::Tensor of(const at::Tensor& whole) const { return whole.narrow(0, begin, count); }
};

// What a product exchanges with the other ranks.
struct Seam final : torch::CustomClassHolder {
  Seam(Group group, Group::Rows of_ranks, TensorOverlap how)
      : tp(std::move(group)), rows(std::move(of_ranks)), overlap(how) {}

  std::int64_t tokens() const { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }
  Span own() const {
    const auto place = static_cast<std::size_t>(tp.rank());
    return {std::accumulate(rows.begin(), rows.begin() + tp.rank(), std::int64_t{0}), rows[place]};
  }
  // All tokens but this rank's.
  std::vector<Span> others() const {
    const auto [begin, count] = own();
    std::vector<Span> spans;
    for (const Span span : {Span{0, begin}, Span{begin + count, tokens() - begin - count}})
      if (span.count > 0) spans.push_back(span);
    return spans;
  }
  at::Tensor empty(std::int64_t count, const at::Tensor& like) const {
    return at::empty({count, like.size(1)}, like.options());
  }

  Group tp;
  Group::Rows rows;  // of the tokens, by rank; none: every rank has all
  TensorOverlap overlap;
};

Seam& seam_of(AutogradContext* context) {
  return *static_cast<Seam*>(context->saved_data["seam"].toCapsule().get());
}

void refuse_second_derivative() {
  ISOGRAD_INVARIANT(!at::GradMode::is_enabled(), "a second derivative of the model, which is not supported");
}

// `biases` holds those there are, in order.
struct EnterLinears final : torch::autograd::Function<EnterLinears> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& /*anchor*/,
                               at::TensorList weights, at::TensorList biases,
                               const std::vector<std::int64_t>& has_bias,
                               const c10::intrusive_ptr<Seam>& seam) {
    const at::Tensor whole = seam->rows.empty() ? x : seam->empty(seam->tokens(), x);
    variable_list saved{whole}, results;
    std::size_t bias = 0;
    Pending pending;
    if (!seam->rows.empty()) pending = seam->tp.all_gather_rows_async(whole, x, seam->rows);
    const bool by_tokens = seam->overlap == TensorOverlap::kTokens;
    if (!by_tokens) pending.wait();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor row = has_bias[i] != 0 ? biases[bias++] : at::Tensor();
      if (by_tokens) {
        results.push_back(at::empty({whole.size(0), weights[i].size(0)}, whole.options()));
        seam->own().of(results[i]).copy_(product(x, weights[i], {}, row));
        pending.progress();
      } else {
        results.push_back(product(whole, weights[i], {}, row));
      }
      saved.push_back(weights[i]);
    }
    pending.wait();
    if (by_tokens) {
      bias = 0;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const at::Tensor row = has_bias[i] != 0 ? biases[bias++] : at::Tensor();
        for (const Span& span : seam->others())
          span.of(results[i]).copy_(product(span.of(whole), weights[i], {}, row));
      }
    }
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["has_bias"] = has_bias;
    context->saved_data["seam"] = c10::IValue::make_capsule(seam);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative();
    Seam& seam = seam_of(context);
    const auto saved = context->get_saved_variables();
    const auto has_bias = context->saved_data["has_bias"].toIntVector();
    const at::Tensor& whole = saved[0];
    const std::size_t n = gradients.size();
    constexpr std::size_t kFirst = 2;  // of the weights, behind x and the anchor
    variable_list results(kFirst + n), dy(n);
    // The gradient of x first: others wait for their part of it, whatever is asked for here.
    at::Tensor sum;
    for (std::size_t i = 0; i < n; ++i)
      if (gradients[i].defined()) {
        dy[i] = gradients[i].contiguous();
        sum = product(dy[i], saved[1 + i].t(), sum);
      }
    if (!sum.defined()) sum = at::zeros_like(whole);
    Pending pending;
    if (seam.rows.empty()) {
      results[0] = sum;
      pending = seam.tp.all_reduce_async(sum);
    } else {
      results[0] = seam.empty(seam.own().count, sum);
      pending = seam.tp.reduce_scatter_async(results[0], sum, ReduceOp::kSum, seam.rows);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (dy[i].defined() && context->needs_input_grad(kFirst + i))
        results[kFirst + i] = weight_gradient(dy[i], whole, saved[1 + i]);
      if (has_bias[i] != 0) {
        const bool wanted = dy[i].defined() && context->needs_input_grad(results.size());
        results.push_back(wanted ? dy[i].sum(0) : at::Tensor());
      }
      pending.progress();
    }
    pending.wait();
    results.resize(results.size() + 2);  // has_bias and the seam
    return results;
  }
};

struct LinearLeaveCut final : torch::autograd::Function<LinearLeaveCut> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& /*anchor*/,
                            const at::Tensor& weight, const c10::intrusive_ptr<Seam>& seam) {
    context->save_for_backward({x, weight});
    context->saved_data["seam"] = c10::IValue::make_capsule(seam);
    const auto ranks = static_cast<std::size_t>(seam->tp.size());
    const auto place = static_cast<std::size_t>(seam->tp.rank());
    const Span own = seam->own();
    std::vector<at::Tensor> parts;
    for (const Span& span : seam->others()) parts.push_back(product(span.of(x), weight));
    const at::Tensor sent = parts.size() == 1  ? parts[0]
                            : parts.size() > 1 ? at::cat(parts)
                                               : at::empty({0, weight.size(0)}, x.options());
    Group::Rows there = seam->rows, here(ranks, own.count);
    there[place] = here[place] = 0;
    const at::Tensor came = at::empty({own.count * (seam->tp.size() - 1), weight.size(0)}, x.options());
    Pending pending = seam->tp.all_to_all_async(came, sent, here, there);
    const at::Tensor mine = product(own.of(x), weight);
    pending.wait();
    // By rank, and rounded once, as a reduce-scatter does it.
    const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor sum;
    std::int64_t next = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      const at::Tensor part = r == place ? mine : came.narrow(0, own.count * next++, own.count);
      sum = r == 0 ? part.to(type) : r == 1 ? sum + part : sum.add_(part);
    }
    return sum.to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative();
    Seam& seam = seam_of(context);
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor own = gradients[0].contiguous(), dy = seam.empty(seam.tokens(), own);
    Pending pending = seam.tp.all_gather_rows_async(dy, own, seam.rows);
    variable_list results(4);
    const bool wanted = context->needs_input_grad(2);
    if (wanted) results[2] = weight_gradient(own, seam.own().of(x), weight);
    pending.wait();
    if (wanted)
      for (const Span& span : seam.others())
        multiply_into(results[2], span.of(dy).t(), span.of(x).t(), /*adds=*/true);
    if (context->needs_input_grad(0)) results[0] = product(dy, weight.t());
    return results;
  }
};

}  // namespace

TensorOverlap tensor_overlap_named(const std::string& name) {
  if (name == "weights") return TensorOverlap::kWeights;
  if (name == "tokens") return TensorOverlap::kTokens;
  if (name != "none")
    refuse("what is computed while tokens travel along tp", name, "none, weights, tokens",
           "Choose one of them");
  return TensorOverlap::kNone;
}

std::vector<at::Tensor> enter_linears(Group tp, const at::Tensor& x, const Group::Rows& rows,
                                      const std::vector<at::Tensor>& weights,
                                      const std::vector<at::Tensor>& biases, TensorOverlap overlap) {
  ISOGRAD_INVARIANT(weights.size() == biases.size(), "a bias (or none) for each weight");
  std::vector<at::Tensor> present;
  std::vector<std::int64_t> has_bias;
  for (const at::Tensor& bias : biases) {
    has_bias.push_back(bias.defined());
    if (bias.defined()) present.push_back(bias);
  }
  // Other ranks need this one in the backward even if nobody here asks for a gradient.
  return EnterLinears::apply(x.contiguous(), differentiable::anchor(), at::TensorList(weights),
                             at::TensorList(present), has_bias,
                             c10::make_intrusive<Seam>(std::move(tp), rows, overlap));
}

at::Tensor linear_leave_cut(Group tp, const at::Tensor& x, const at::Tensor& weight,
                            const Group::Rows& rows) {
  return LinearLeaveCut::apply(x.contiguous(), differentiable::anchor(), weight,
                               c10::make_intrusive<Seam>(std::move(tp), rows, TensorOverlap::kTokens));
}

}  // namespace isograd
