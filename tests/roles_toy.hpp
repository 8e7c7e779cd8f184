// A model whose parameters have every kind of placement, its pass on a rank of any grid, and the reference:
// one process, whole tensors, the whole batch. The reference shares no code with what is tested.
//
//   stage 0        h0 = x * tied; u = heads(h0 up) * head_norm; h1 = h0 + tanh(u) down + bias
//   a middle stage h2 = h1 + tanh(h1 middle)
//   the last one   h3 = h2 + tanh(h2 experts[of the token]); out = h3 * tied
//   loss           the mean over valid tokens of |out - target|^2
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd::roles {

inline constexpr std::int64_t kHidden = 6, kHeads = 5, kHead = 3, kFeatures = kHeads * kHead, kExperts = 5;

using Tensors = std::map<std::string, at::Tensor>;

inline at::Tensor random(at::IntArrayRef shape, std::uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), at::TensorOptions(at::kDouble));
}

// In the whole model's order.
inline std::vector<std::pair<std::string, at::Tensor>> whole_model() {
  return {{"tied", random({kHidden}, 1) + 1},
          {"up", random({kFeatures, kHidden}, 2) * 0.4},
          {"head_norm", random({kHead}, 3) + 1},
          {"down", random({kHidden, kFeatures}, 4) * 0.4},
          {"bias", random({kHidden}, 5)},
          {"middle", random({kHidden, kHidden}, 6) * 0.4},
          {"experts", random({kExperts, kHidden, kHidden}, 7) * 0.4}};
}

// The data of ranks at one place along the data axes: uneven, and nothing at the second of three or more.
struct Tokens {
  at::Tensor x, target, expert, valid;
};
inline Tokens tokens_of(int place, int places) {
  const std::int64_t count = places >= 3 && place == 1 ? 0 : 3 + 7 * place % 6;
  const auto seed = static_cast<std::uint64_t>(100 + place);
  return {.x = random({count, kHidden}, seed),
          .target = random({count, kHidden}, seed + 1000),
          .expert = (at::arange(count) * 3 + place).remainder(kExperts),
          .valid = at::arange(count).remainder(4).ne(1).to(at::kDouble).unsqueeze(1)};
}

struct Reference {
  double loss = 0, targets = 0;
  Tensors gradients{};
};
inline Reference reference(int places) {
  Tensors p;
  std::vector<at::Tensor> leaves;
  for (auto& [name, value] : whole_model()) leaves.push_back(p[name] = value.requires_grad_());
  std::vector<at::Tensor> xs, targets, experts, valids;
  for (int place = 0; place < places; ++place) {
    const Tokens tokens = tokens_of(place, places);
    xs.push_back(tokens.x);
    targets.push_back(tokens.target);
    experts.push_back(tokens.expert);
    valids.push_back(tokens.valid);
  }
  const at::Tensor valid = at::cat(valids);
  const at::Tensor h0 = at::cat(xs) * p["tied"];
  const at::Tensor u = at::einsum("th,fh->tf", {h0, p["up"]}) * p["head_norm"].repeat({kHeads});
  const at::Tensor h1 = h0 + at::einsum("tf,hf->th", {at::tanh(u), p["down"]}) + p["bias"];
  const at::Tensor h2 = h1 + at::tanh(at::einsum("th,gh->tg", {h1, p["middle"]}));
  const at::Tensor chosen = p["experts"].index_select(0, at::cat(experts));  // [T, H, H]
  const at::Tensor h3 = h2 + at::tanh(at::einsum("th,tgh->tg", {h2, chosen}));
  const at::Tensor loss = ((h3 * p["tied"] - at::cat(targets)).square() * valid).sum() / valid.sum();
  loss.backward();
  Reference result{.loss = loss.item<double>(), .targets = valid.sum().item<double>()};
  for (auto& [name, tensor] : p) result.gradients[name] = tensor.grad();
  return result;
}

struct Sizes {
  int pp = 1, dp_replicate = 1, dp_shard = 1, ep = 1, tp = 1;
  int ranks() const { return pp * dp_replicate * dp_shard * tp; }
};
// ep is a factor of dp_shard.
inline Grid grid_of(const Sizes& sizes) {
  return Grid({{"pp", sizes.pp},
               {"dp_replicate", sizes.dp_replicate},
               {"dp_shard", sizes.dp_shard},
               {"tp", sizes.tp}})
      .viewed({"dp_shard"}, {{"edp", sizes.dp_shard / sizes.ep}, {"ep", sizes.ep}});
}

inline Layout::Named placements(const Grid& grid) {
  const int stages = grid.size({"pp"}), last = stages - 1;
  const auto heads = [&](int dim) {  // a head is not divided
    return even_cut(grid, "tp", dim, {kFeatures}, kHead);
  };
  std::vector<int> ends{0};
  if (last > 0) ends.push_back(last);
  return {
      {"tied", placed(grid, {kHidden}, {}, ends, last > 0 ? AxisSet{"pp"} : AxisSet{})},
      {"up", placed(grid, {kFeatures, kHidden}, {heads(0)}, {0})},
      {"head_norm", placed(grid, {kHead}, {}, {0}, {"tp"})},  // each rank's heads give a part
      {"down", placed(grid, {kHidden, kFeatures}, {heads(1)}, {0})},
      {"bias", placed(grid, {kHidden}, {}, {0})},  // works on what is the same along tp
      {"middle", placed(grid, {kHidden, kHidden}, {}, {stages / 2})},
      {"experts", placed(grid, {kExperts, kHidden, kHidden}, {even_cut(grid, "ep", 0, {kExperts})}, {last})}};
}

// Identity forwards and the sum over the ranks backwards, or the other way round.
struct Along final : torch::CustomClassHolder {
  Along(Group group_, bool forwards_) : group(std::move(group_)), forwards(forwards_) {}
  Group group;
  bool forwards;
};
struct Sum final : torch::autograd::Function<Sum> {
  static at::Tensor summed(const at::Tensor& x, Along& along, bool forwards) {
    at::Tensor result = x.clone(at::MemoryFormat::Contiguous);
    if (along.forwards == forwards && along.group.size() > 1) along.group.all_reduce(result);
    return result;
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<Along>& along) {
    context->saved_data["along"] = c10::IValue::make_capsule(along);
    return summed(x, *along, true);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["along"].toCapsule();
    return {summed(gradients[0], *static_cast<Along*>(capsule.get()), false), {}};
  }
};
inline at::Tensor enter(const at::Tensor& x, const Group& tp) {
  return Sum::apply(x, c10::make_intrusive<Along>(tp, false));
}
inline at::Tensor leave(const at::Tensor& y, const Group& tp) {
  return Sum::apply(y, c10::make_intrusive<Along>(tp, true));
}

// Every token visits the ranks along ep, each of which has some of the experts.
inline at::Tensor through_experts(const at::Tensor& h, const Tokens& tokens, const at::Tensor& experts,
                                  const Layout& layout) {
  Group ep = layout.mesh().along({"ep"}, "experts");
  const at::Tensor counts = ep.all_gather(at::full({1}, h.size(0), at::kLong)).flatten();
  const Group::Rows rows(counts.const_data_ptr<std::int64_t>(),
                         counts.const_data_ptr<std::int64_t>() + ep.size());
  const at::Tensor all = differentiable::all_gather_rows(ep, h, rows), of = ep.all_gather_rows(tokens.expert);
  std::int64_t first = 0;
  const Placement& placement = layout.parameter("experts").placement;
  for (int place = 0; place < ep.rank(); ++place)
    first += placement.cuts[0].rows[0][static_cast<std::size_t>(place)];
  at::Tensor result = all * 0;  // of the graph on ranks without experts, too
  for (std::int64_t i = 0; i < experts.size(0); ++i)
    result = result + of.eq(first + i).unsqueeze(1) * at::tanh(at::linear(all, experts[i]));
  return differentiable::reduce_scatter(ep, result, rows);
}

// One step's gradients, before they are summed. `targets`: by how much the loss is divided.
inline double backward(const Layout& layout, Tensors& p, const Tokens& tokens, double targets) {
  const Mesh& mesh = layout.mesh();
  // Not in order with the reductions that backward launches: groups of their own.
  Group tp = mesh.along({"tp"}, "seams"), pp = mesh.along({"pp"}, "stages");
  const int stage = pp.rank(), last = pp.size() - 1;
  const at::Tensor input = stage == 0 ? tokens.x : at::empty_like(tokens.x);
  if (stage > 0) pp.recv(input, stage - 1);
  input.requires_grad_(stage > 0);
  at::Tensor h = input;
  if (stage == 0) {
    h = h * p["tied"];
    const at::Tensor features = at::linear(enter(h, tp), p["up"]);
    const at::Tensor normed = features.view({h.size(0), features.size(1) / kHead, kHead}) * p["head_norm"];
    h = h + leave(at::linear(at::tanh(normed).flatten(1), p["down"]), tp) + p["bias"];
  }
  if (stage == pp.size() / 2) h = h + at::tanh(at::linear(h, p["middle"]));
  if (stage < last) {
    at::Tensor gradient = at::empty_like(tokens.x);
    pp.send(h.detach(), stage + 1);
    pp.recv(gradient, stage + 1);
    h.backward(gradient);
  }
  double loss = 0;
  if (stage == last) {
    h = (h + through_experts(h, tokens, p["experts"], layout)) * p["tied"];
    const at::Tensor sum = ((h - tokens.target).square() * tokens.valid).sum() / targets;
    sum.backward();
    loss = sum.item<double>();
  }
  if (stage > 0) pp.send(input.grad(), stage - 1);
  return loss;
}

// ‖g - wanted‖ / max(‖wanted‖, 1e-3 · RMS · √numel), RMS over all that is wanted: E1 holds below 1e-10.
inline std::map<std::string, double> errors(const Tensors& gradients, const Tensors& wanted) {
  double squares = 0, count = 0;
  for (const auto& [name, g] : wanted) {
    squares += g.square().sum().item<double>();
    count += static_cast<double>(g.numel());
  }
  std::map<std::string, double> result;
  for (const auto& [name, g] : wanted) {
    const double least = 1e-3 * std::sqrt(squares / count * static_cast<double>(g.numel()));
    result[name] = (gradients.at(name) - g).norm().item<double>() / std::max(g.norm().item<double>(), least);
  }
  return result;
}

}  // namespace isograd::roles
