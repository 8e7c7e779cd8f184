// Where a graph is cut in two. Nodes that lead to the ends of the first half are early: it runs them, for the
// gradients of early nodes alone. An early node with others below it is at the border: what arrives there is
// kept, and from there the second half goes down to the parameters, through nodes that are all late. Each
// edge of the graph is followed in one of the halves.
#include "parallel/pipeline/split_backward.hpp"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/torch_versions.hpp"
#include "comm/autograd.hpp"

namespace isograd {
namespace {

namespace autograd = torch::autograd;
using autograd::Edge;
using autograd::edge_list;
using autograd::Node;
using autograd::variable_list;

bool is_leaf(Node* node) { return dynamic_cast<autograd::AccumulateGrad*>(node) != nullptr; }

// The leaf of what other ranks take part in (comm/autograd.hpp).
bool is_anchor(Node* node) {
  const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node);
  return leaf && leaf->variable.unsafeGetTensorImpl() == differentiable::anchor().unsafeGetTensorImpl();
}

// A graph, and in which half each of its nodes runs.
class Halves {
 public:
  explicit Halves(Node* root) {
    find(root);
    for (std::size_t at = 0; at < places_.size(); ++at)  // grows meanwhile
      for (const Edge& edge : places_[at].node->next_edges())
        if (edge.is_valid()) {
          const std::size_t child = find(edge.function.get());
          places_[child].parents.push_back(at);
          places_[at].children.push_back(child);
        }
    go_to(ends());
  }

  bool is_early(Node* node) const { return places_[at_.at(node)].early; }
  bool runs_early(Node* node) const { return places_[at_.at(node)].runs_early; }

  // Nodes where the first half leaves gradients: its ends, and the border.
  std::vector<Node*> reached() const {
    return those(
        [](const Place& one, bool at_border) { return one.early && (!one.runs_early || at_border); });
  }
  std::vector<Node*> border() const {
    return those([](const Place& one, bool at_border) { return one.runs_early && at_border; });
  }
  std::vector<Node*> done_early() const {
    return those([](const Place& one, bool at_border) { return one.runs_early && !at_border; });
  }

 private:
  struct Place {
    Node* node;
    std::vector<std::size_t> parents{}, children{};
    bool early = false, runs_early = false;
  };

  std::size_t find(Node* node) {
    const auto [found, is_new] = at_.try_emplace(node, places_.size());
    if (is_new) places_.push_back({.node = node});
    return found->second;
  }

  // The nodes below one that must not run in both halves, which therefore runs in the first. Among these is
  // the node of what came from another rank, with nothing but the anchor below it; a graph without one ends
  // at what was computed first.
  std::vector<std::size_t> ends() const {
    std::vector<std::size_t> result;
    bool from_elsewhere = false;
    std::size_t first = 0;
    for (std::size_t at = 0; at < places_.size(); ++at) {
      const Place& one = places_[at];
      if (is_leaf(one.node)) continue;
      if (one.node->sequence_nr() < places_[first].node->sequence_nr()) first = at;
      if (differentiable::is_separable(*one.node)) continue;
      result.insert(result.end(), one.children.begin(), one.children.end());
      from_elsewhere |= std::all_of(one.children.begin(), one.children.end(),
                                    [&](std::size_t child) { return is_anchor(places_[child].node); });
    }
    if (!from_elsewhere) result.push_back(first);
    return result;
  }

  void go_to(std::vector<std::size_t> open) {
    for (const std::size_t end : open) places_[end].early = true;
    while (!open.empty()) {
      const Place& one = places_[open.back()];
      open.pop_back();
      for (const std::size_t parent : one.parents) {
        places_[parent].runs_early = true;
        if (!std::exchange(places_[parent].early, true)) open.push_back(parent);
      }
    }
  }

  template <typename Wanted>
  std::vector<Node*> those(Wanted&& wanted) const {
    std::vector<Node*> result;
    for (const Place& one : places_) {
      const bool at_border = std::any_of(one.children.begin(), one.children.end(),
                                         [&](std::size_t child) { return !places_[child].early; });
      if (wanted(one, at_border)) result.push_back(one.node);
    }
    return result;
  }

  std::vector<Place> places_{};
  std::unordered_map<Node*, std::size_t> at_{};
};

// Goes on from nodes with gradients that have come there before, also with those that are undefined.
class Resumed final : public Node {
 public:
  Resumed(edge_list to, variable_list gradients) : Node(std::move(to)), gradients_(std::move(gradients)) {
    add_input_metadata(start());
    // As the engine's own root has it: these say which device and stream the gradients are on.
    for (const at::Tensor& gradient : gradients_)
      if (gradient.defined()) add_input_metadata(gradient);
  }
  static at::Tensor start() { return at::zeros({}); }
  variable_list apply(variable_list&&) override { return std::exchange(gradients_, {}); }
  std::string name() const override { return "isograd::Resumed"; }

 private:
  variable_list gradients_;
};

// As the engine releases them where it keeps no graph: at once.
struct ReleaseSaved final : autograd::FunctionPostHook {
  explicit ReleaseSaved(Node* of_) : of(of_) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    of->release_variables();
    return outputs;
  }
  Node* of;
};

// The engine calls hooks of a tensor also where it stops at its node, and again where it goes on from there:
// then those that keep a gradient would add it twice, and others change what they have changed already.
class HooksAside {
 public:
  enum Which { kAll, kRetaining };
  HooksAside(std::vector<Node*> nodes, Which which)
      : nodes_(std::move(nodes)), which_(which), hooks_(nodes_.size()) {
    swap();
  }
  ~HooksAside() { swap(); }
  HooksAside(const HooksAside&) = delete;
  HooksAside& operator=(const HooksAside&) = delete;

 private:
  using Hook = std::unique_ptr<autograd::FunctionPreHook>;
  struct Hooks {
    std::vector<Hook> of_tensor{};
    std::unordered_map<std::size_t, Hook> retaining{};
  };
  void swap() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (which_ == kAll) nodes_[i]->tensor_pre_hooks().swap(hooks_[i].of_tensor);
      nodes_[i]->retains_grad_hooks().swap(hooks_[i].retaining);
    }
  }
  std::vector<Node*> nodes_;
  Which which_;
  std::vector<Hooks> hooks_;
};

}  // namespace

struct WeightsBackward::Left {
  edge_list to{};  // each input of a node, all together or none
  variable_list gradients{};
  struct Cut {
    Node* node;  // one of `to`
    std::size_t edge;
  };
  std::vector<Node*> border{};  // those of `to` that the first half has run too
  std::vector<Cut> cuts{};      // their edges that it has followed
};

WeightsBackward::WeightsBackward() = default;
WeightsBackward::WeightsBackward(std::unique_ptr<Left> left) : left_(std::move(left)) {}
WeightsBackward::WeightsBackward(WeightsBackward&&) noexcept = default;
WeightsBackward& WeightsBackward::operator=(WeightsBackward&&) noexcept = default;
WeightsBackward::~WeightsBackward() = default;

void WeightsBackward::run() {
  const std::unique_ptr<Left> left = std::move(left_);
  if (!left || left->to.empty()) return;
  const HooksAside retaining(left->border, HooksAside::kRetaining);
  // The edges that were followed are out of sight while this half runs. Not for good: what comes before a
  // micro-batch's own nodes may belong to several micro-batches.
  edge_list followed(left->cuts.size());
  const auto swap = [&] {
    for (std::size_t i = 0; i < followed.size(); ++i)
      std::swap(left->cuts[i].node->next_edges()[left->cuts[i].edge], followed[i]);
  };
  swap();
  const auto put_back = c10::make_scope_exit(swap);
  const auto root = torch_versions::make_node<Resumed>(left->to, std::move(left->gradients));
  autograd::Engine::get_default_engine().execute({Edge(root, 0)}, {Resumed::start()}, /*keep_graph=*/false,
                                                 /*create_graph=*/false, /*accumulate_grad=*/true);
}

WeightsBackward backward_of_inputs(const at::Tensor& loss) {
  const Edge root = autograd::impl::gradient_edge(loss);
  auto left = std::make_unique<WeightsBackward::Left>();
  const Halves halves(root.function.get());
  if (!halves.runs_early(root.function.get())) {  // the root is an end
    left->to = {root};
    left->gradients = {at::ones_like(loss)};
    return WeightsBackward(std::move(left));
  }
  edge_list reached;
  std::vector<Node*> ends;
  for (Node* node : halves.reached()) {
    if (!halves.runs_early(node) && !is_anchor(node)) ends.push_back(node);
    for (std::uint32_t i = 0; i < node->num_inputs(); ++i) reached.emplace_back(node->getptr(), i);
  }
  left->border = halves.border();
  for (Node* node : left->border)
    for (std::size_t i = 0; i < node->next_edges().size(); ++i)
      if (const Edge& edge = node->next_edges()[i]; edge.is_valid() && halves.is_early(edge.function.get()))
        left->cuts.push_back({node, i});
  for (Node* node : halves.done_early()) node->add_post_hook(std::make_unique<ReleaseSaved>(node));
  const HooksAside later(std::move(ends), HooksAside::kAll);
  variable_list gradients = autograd::Engine::get_default_engine().execute(
      {root}, {at::ones_like(loss)}, /*keep_graph=*/true, /*create_graph=*/false, /*accumulate_grad=*/false,
      reached);
  for (std::size_t i = 0; i < reached.size(); ++i) {
    if (is_anchor(reached[i].function.get())) continue;  // all ranks' threads share it
    left->to.push_back(std::move(reached[i]));
    left->gradients.push_back(std::move(gradients[i]));
  }
  return WeightsBackward(std::move(left));
}

}  // namespace isograd
