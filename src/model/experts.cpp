#include "model/experts.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "kernels/matmul/product.hpp"
#include "loss/checks.hpp"
#include "model/fused.hpp"

namespace isograd {
namespace {

class CopyToExperts : public torch::autograd::Function<CopyToExperts> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& token,
                            const at::Tensor& row) {
    ctx->save_for_backward({row});
    ctx->saved_data["tokens"] = x.size(0);
    return x.index_select(0, token);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor& dy = gradients[0];
    const std::int64_t tokens = ctx->saved_data["tokens"].toInt();
    const at::Tensor row = ctx->get_saved_variables()[0];
    if (tokens == 0) return {dy.new_zeros({0, dy.size(1)}), at::Tensor(), at::Tensor()};
    const at::Tensor copies = dy.index_select(0, row).view({tokens, -1, dy.size(1)});
    return {copies.sum(1, false, computing_type(dy.scalar_type())).to(dy.scalar_type()), at::Tensor(),
            at::Tensor()};
  }
};

class AddByWeight : public torch::autograd::Function<AddByWeight> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weights,
                            const at::Tensor& token, const at::Tensor& choice, const at::Tensor& row) {
    ctx->save_for_backward({rows, weights, token, choice, row});
    const std::int64_t tokens = weights.size(0), each = weights.size(1), hidden = rows.size(1);
    at::Tensor sum = at::zeros({tokens, hidden}, rows.options().dtype(weights.scalar_type()));
    const at::Tensor by_choice = row.view({tokens, each});
    for (std::int64_t j = 0; j < each; ++j)
      sum.addcmul_(rows.index_select(0, by_choice.select(1, j)).to(weights.scalar_type()),
                   weights.select(1, j).unsqueeze(1));
    return sum.to(rows.scalar_type());
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &rows = saved[0], &weights = saved[1], &token = saved[2], &choice = saved[3],
                     &row = saved[4];
    const at::Tensor dy = gradients[0].index_select(0, token).to(weights.scalar_type());
    at::Tensor drows, dweights;
    if (ctx->needs_input_grad(1)) dweights = (dy * rows).sum(1).index_select(0, row).view(weights.sizes());
    if (ctx->needs_input_grad(0))
      drows = (dy * weights.flatten().index_select(0, choice).unsqueeze(1)).to(rows.scalar_type());
    return {drows, dweights, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class GroupedLinears : public torch::autograd::Function<GroupedLinears> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList weights,
                               const std::vector<std::int64_t>& begin) {
    variable_list saved{x}, results;
    for (const at::Tensor& weight : weights) {
      at::Tensor y = at::empty({x.size(0), weight.size(1)}, x.options());
      for_groups(begin, [&](std::int64_t group, std::int64_t first, std::int64_t rows) {
        multiply_into(y.narrow(0, first, rows), x.narrow(0, first, rows), weight[group]);
      });
      results.push_back(std::move(y));
      saved.push_back(weight);
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data["begin"] = begin;
    return results;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto begin = ctx->saved_data["begin"].toIntVector();
    const at::Tensor& x = saved[0];
    variable_list results(2 + gradients.size());  // x, weights, begin
    at::Tensor dx;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& weight = saved[1 + i];
      if (!gradients[i].defined()) continue;
      const at::Tensor dy = gradients[i].contiguous();
      const bool first_use = !dx.defined();
      if (ctx->needs_input_grad(0) && first_use) dx = at::empty(x.sizes(), x.options());
      differentiable::GradientPlace::Taken place;
      if (ctx->needs_input_grad(1 + i))
        place = differentiable::take_gradient_place(weight, weight.scalar_type());
      at::Tensor dweight = place.memory;
      if (ctx->needs_input_grad(1 + i) && !dweight.defined())
        dweight = at::empty(weight.sizes(), weight.options());
      for_groups(begin, [&](std::int64_t group, std::int64_t first, std::int64_t rows) {
        const at::Tensor own = dy.narrow(0, first, rows);
        if (dx.defined()) multiply_into(dx.narrow(0, first, rows), own, weight[group].t(), !first_use);
        if (dweight.defined())
          multiply_into(dweight[group], own.t(), x.narrow(0, first, rows).t(), place.adds);
      });
      // An expert without tokens has a gradient of zero, as on one process.
      for (std::size_t group = 0; dweight.defined() && !place.adds && group + 1 < begin.size(); ++group)
        if (begin[group] == begin[group + 1]) dweight[static_cast<std::int64_t>(group)].zero_();
      results[1 + i] = dweight;
    }
    results[0] = dx;
    return results;
  }

 private:
  template <class Work>
  static void for_groups(const std::vector<std::int64_t>& begin, const Work& work) {
    for (std::size_t group = 0; group + 1 < begin.size(); ++group)
      if (const std::int64_t rows = begin[group + 1] - begin[group]; rows > 0)
        work(static_cast<std::int64_t>(group), begin[group], rows);
  }
};

const differentiable::Separable<GroupedLinears> kExpertsAreSeparable;

// The best of each row; of equal ones the lower index comes first, on every rank and device.
at::Tensor best(const at::Tensor& values, std::int64_t count) {
  return std::get<1>(values.sort(/*stable=*/true, -1, /*descending=*/true)).narrow(-1, 0, count).contiguous();
}

// [T, E]: -inf where an expert's group is not among its token's.
at::Tensor of_best_groups(const ExpertScores& scores) {
  const std::int64_t tokens = scores.values.size(0), experts = scores.values.size(1);
  const at::Tensor grouped = scores.values.view({tokens, scores.groups, experts / scores.groups});
  const at::Tensor of_group =
      std::get<0>(grouped.sort(/*stable=*/true, 2, /*descending=*/true)).narrow(2, 0, 2).sum(2);
  const at::Tensor left_out = at::ones(of_group.sizes(), of_group.options().dtype(at::kBool))
                                  .scatter_(1, best(of_group, scores.groups_per_token), false);
  return grouped.masked_fill(left_out.unsqueeze(2), -std::numeric_limits<double>::infinity())
      .view({tokens, experts});
}

}  // namespace

Routing route(const at::Tensor& logits, const ExpertsShape& shape, const at::Tensor& bias,
              const Choose& choose) {
  const std::int64_t experts = logits.size(1), each = shape.per_token;
  if (each < 1 || each > experts)
    refuse("model.experts_per_token", std::to_string(each), fmt::format("1 to {}, the experts", experts),
           "Choose fewer experts for each token, or have more");
  Routing routing;
  routing.scores = shape.sigmoid ? at::sigmoid(logits.to(computing_type(logits.scalar_type())))
                                 : at::softmax(logits, 1, computing_type(logits.scalar_type()));
  ExpertScores by{
      .values = routing.scores.detach(), .groups = shape.groups, .groups_per_token = shape.groups_per_token};
  if (bias.defined()) by.values = by.values + bias.detach();
  routing.chosen = best(by.groups > 1 ? of_best_groups(by) : by.values, each);
  if (!shape.sigmoid) by.values = logits.detach();
  if (choose) routing.chosen = choose(by, routing.chosen);
  routing.weights = routing.scores.gather(1, routing.chosen);
  constexpr double kTiny = 1e-20;  // of transformers, where all sigmoids are 0
  if (shape.normalise) {
    const at::Tensor sum = routing.weights.sum(1, /*keepdim=*/true);
    routing.weights = routing.weights / (shape.sigmoid ? sum + kTiny : sum);
  }
  if (shape.scale != 1) routing.weights = routing.weights * shape.scale;
  return routing;
}

at::Tensor router_probabilities(const at::Tensor& logits, const ExpertsShape& shape) {
  const at::Tensor exact = logits.to(at::kDouble);
  if (!shape.sigmoid) return at::softmax(exact, 1);
  // By logarithms, so that tiny sigmoids have a sum too.
  return at::softmax(at::log_sigmoid(exact), 1);
}

ByExpert sort_by_expert(const at::Tensor& chosen, std::int64_t experts) {
  const at::Tensor flat = chosen.flatten().cpu().contiguous();
  const std::int64_t each = chosen.size(1), copies = flat.numel();
  const auto* of = flat.const_data_ptr<std::int64_t>();
  ByExpert order;
  order.begin.assign(static_cast<std::size_t>(experts) + 1, 0);
  for (std::int64_t i = 0; i < copies; ++i) ++order.begin[static_cast<std::size_t>(of[i]) + 1];
  for (std::size_t e = 1; e < order.begin.size(); ++e) order.begin[e] += order.begin[e - 1];
  std::vector<std::int64_t> next(order.begin.begin(), order.begin.end() - 1);
  order.token = at::empty({copies}, at::kLong);
  order.choice = at::empty({copies}, at::kLong), order.row = at::empty({copies}, at::kLong);
  auto *token = order.token.mutable_data_ptr<std::int64_t>(),
       *choice = order.choice.mutable_data_ptr<std::int64_t>(),
       *row = order.row.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < copies; ++i) {
    const std::int64_t to = next[of[i]]++;
    token[to] = i / each, choice[to] = i, row[i] = to;
  }
  for (at::Tensor* indices : {&order.token, &order.choice, &order.row})
    *indices = indices->to(chosen.device());
  return order;
}

at::Tensor copy_to_experts(const at::Tensor& x, const ByExpert& order) {
  return CopyToExperts::apply(x, order.token, order.row);
}

at::Tensor add_by_weight(const at::Tensor& rows, const at::Tensor& weights, const ByExpert& order) {
  return AddByWeight::apply(rows, weights, order.token, order.choice, order.row);
}

std::vector<at::Tensor> grouped_linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                        const std::vector<std::int64_t>& begin) {
  return GroupedLinears::apply(x.contiguous(), at::TensorList(weights), begin);
}

at::Tensor compute_experts(const at::Tensor& rows, const at::Tensor& gate, const at::Tensor& up,
                           const at::Tensor& down, const std::vector<std::int64_t>& begin,
                           const ExpertUpdates& updates) {
  const auto updated = [&](const at::Tensor& y, const at::Tensor& x, const LowRank* by) {
    return by ? y + grouped_linears(grouped_linears(x, {by->a}, begin)[0] * by->scale, {by->b}, begin)[0] : y;
  };
  const auto products = grouped_linears(rows, {gate, up}, begin);
  const at::Tensor inner =
      swiglu(updated(products[0], rows, updates[0]), updated(products[1], rows, updates[1]));
  return updated(grouped_linears(inner, {down}, begin)[0], inner, updates[2]);
}

namespace naive_twin {

at::Tensor experts(const at::Tensor& x, const Routing& routing, const at::Tensor& gate, const at::Tensor& up,
                   const at::Tensor& down) {
  at::Tensor sum = at::zeros(x.sizes(), x.options());
  for (std::int64_t e = 0; e < gate.size(0); ++e) {
    const at::Tensor places = routing.chosen.eq(e).nonzero();  // [n, 2]: token, place
    const at::Tensor token = places.select(1, 0), own = x.index_select(0, token);
    const at::Tensor y = at::silu(own.matmul(gate[e].t())).mul(own.matmul(up[e].t())).matmul(down[e].t());
    const at::Tensor weight = routing.weights.index({token, places.select(1, 1)}).unsqueeze(1);
    sum = sum.index_add(0, token, (y * weight).to(x.scalar_type()));
  }
  return sum;
}

}  // namespace naive_twin

Mixture create_mixture(const DecoderConfig& config, const std::string& prefix, ParameterMaker& create) {
  const ExpertsShape& shape = config.experts;
  const std::int64_t hidden = config.hidden, shared = shape.shared_feed_forward;
  Mixture mixture;
  const auto trained = [&](const std::string& name, at::IntArrayRef of) { return create(prefix + name, of); };
  mixture.router = trained("gate.weight", {shape.count, hidden});
  if (shape.sigmoid)
    mixture.selection_bias = create(prefix + kSelectionBias, {shape.count}, /*trained=*/false);
  mixture.gate = trained("experts.gate_proj", {shape.count, shape.feed_forward, hidden});
  mixture.up = trained("experts.up_proj", {shape.count, shape.feed_forward, hidden});
  mixture.down = trained("experts.down_proj", {shape.count, hidden, shape.feed_forward});
  if (shared == 0) return mixture;
  const std::string of_all = shared_expert_folder(config);
  mixture.shared_gate.weight = trained(of_all + "gate_proj.weight", {shared, hidden});
  mixture.shared_up.weight = trained(of_all + "up_proj.weight", {shared, hidden});
  mixture.shared_down.weight = trained(of_all + "down_proj.weight", {hidden, shared});
  if (config.family == "qwen2_moe") mixture.shared_switch = trained("shared_expert_gate.weight", {1, hidden});
  return mixture;
}

MixtureOutput compute_mixture(const Mixture& mixture, const ExpertsShape& shape, const at::Tensor& stream,
                              std::int64_t tokens, const Choose& choose, const ModelHooks& hooks,
                              const AdaptedMixture& adapted) {
  const TensorHooks& tp = hooks.tensor;
  const at::Tensor x = tp.region_input ? tp.region_input(stream, tokens) : stream;
  const auto of_all_tokens = [&](const at::Tensor& weight) {
    const at::Tensor own = linear(stream, Linear{.weight = weight, .bias = {}});
    return tp.gather_tokens ? tp.gather_tokens(own, tokens) : own;
  };
  const auto used = [&](const at::Tensor& same) { return tp.copy_to_tp ? tp.copy_to_tp(same) : same; };
  const at::Tensor logits = of_all_tokens(mixture.router);
  const Routing routing = route(logits, shape, mixture.selection_bias, choose);
  const auto& runs = adapted.runs;
  const auto compute = [&](std::size_t run) {
    return [&mixture, updates = runs.empty() ? ExpertUpdates{} : runs[run].second](
               const at::Tensor& rows, const std::vector<std::int64_t>& begin) {
      return compute_experts(rows, mixture.gate, mixture.up, mixture.down, begin, updates);
    };
  };
  at::Tensor shared;
  const auto compute_shared = [&] {
    if (!mixture.shared_gate.weight.defined()) return;
    const auto products =
        linears(x, {mixture.shared_gate.weight, mixture.shared_up.weight}, {at::Tensor(), at::Tensor()});
    const at::Tensor inner = swiglu(adapted.shared(products[0], x, Projection::kSharedGate),
                                    adapted.shared(products[1], x, Projection::kSharedUp));
    shared = adapted.shared(linear(inner, mixture.shared_down), inner, Projection::kSharedDown);
    if (mixture.shared_switch.defined())
      shared = used(at::sigmoid(of_all_tokens(mixture.shared_switch))) * shared;
  };

  std::vector<std::int64_t> sizes = split_rows(tokens, hooks.experts.parts);
  if (runs.size() > 1) {
    if (hooks.experts.dispatch)
      refuse("rows of DecoderLM::set_adapters()", "several adapters of experts that are on several ranks",
             "one for all rows", "Compute the rows of each adapter by themselves");
    sizes.clear();
    for (const auto& [rows, updates] : runs) sizes.push_back(rows);
  }
  const auto parts_of = [&](const at::Tensor& of) {
    return sizes.size() == 1 ? std::vector{of} : of.split_with_sizes(sizes);
  };
  std::vector<ByExpert> orders;
  std::vector<ExpertHooks::Copies> copies;
  const auto own = parts_of(x), chosen = parts_of(routing.chosen);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    orders.push_back(sort_by_expert(chosen[i], shape.count));
    copies.push_back({copy_to_experts(own[i], orders[i]), orders[i].begin});
  }
  std::vector<at::Tensor> made;
  if (hooks.experts.dispatch) {
    made = hooks.experts.dispatch(copies, compute(0), compute_shared);
    ISOGRAD_INVARIANT(
        made.size() == copies.size() && shared.defined() == mixture.shared_gate.weight.defined(),
        fmt::format("{} of {} parts of the tokens, shared expert computed: {}", made.size(), copies.size(),
                    shared.defined()));
  } else {
    for (std::size_t i = 0; i < copies.size(); ++i)
      made.push_back(compute(runs.size() > 1 ? i : 0)(copies[i].rows, copies[i].begin));
    compute_shared();
  }
  const auto weights = parts_of(used(routing.weights));
  for (std::size_t i = 0; i < made.size(); ++i) made[i] = add_by_weight(made[i], weights[i], orders[i]);
  at::Tensor sum = made.size() == 1 ? made[0] : at::cat(made);
  if (shared.defined()) sum = sum + shared;
  return {tp.region_output ? tp.region_output(sum) : sum, logits, routing.chosen};
}

}  // namespace isograd
