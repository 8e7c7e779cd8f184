#include "parallel/data/unit_node.hpp"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;
using autograd::variable_list;

[[noreturn]] void refuse_call(const UnitCall& call, std::string found, std::string expected,
                              std::string action) {
  refuse(fmt::format("sharded unit '{}'", call.host->unit_name(call.unit)), std::move(found),
         std::move(expected), std::move(action));
}

thread_local bool computes_again = false;

// State that a recomputation must find as the forward found it: autocast and the like, and the random numbers
// of the default generators, the CPU's and those of the devices that the inputs are on.
class RecomputeState {
 public:
  explicit RecomputeState(const variable_list& inputs) {
    std::vector<at::Device> devices = {at::kCPU};
    for (const Tensor& input : inputs)
      if (input.defined() && !input.is_meta() &&
          std::find(devices.begin(), devices.end(), input.device()) == devices.end())
        devices.push_back(input.device());
    for (const at::Device device : devices)
      random_.push_back({at::globalContext().defaultGenerator(device), {}});
    for (Random& one : random_) one.state = one.exchange({});
  }

  // A generator that the forward has left alone is left alone by its recomputation: others may be drawing.
  void forward_is_done() {
    std::erase_if(random_, [](Random& one) { return at::equal(one.exchange({}), one.state); });
  }

  template <typename Action>
  void during(Action&& action) const {
    const at::ThreadLocalStateGuard locals(locals_);
    const at::AutoGradMode with_graph(true);
    std::vector<Random> random = random_;
    const auto exchange = [&random] {
      for (Random& one : random) one.state = one.exchange(one.state);
    };
    exchange();
    const auto put_back = c10::make_scope_exit(exchange);
    const Recomputing mark;
    action();
  }

 private:
  struct Random {
    at::Generator generator;
    Tensor state;

    // The state that the generator had; `next`, unless undefined, is the one that it gets.
    Tensor exchange(const Tensor& next) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      const Tensor had = generator.get_state();
      if (next.defined()) generator.set_state(next);
      return had;
    }
  };

  at::ThreadLocalState locals_;
  std::vector<Random> random_;
};

// The graph that the body recorded between detached inputs and its outputs.
struct InnerGraph {
  variable_list inputs;   // leaves; undefined where the caller's are
  variable_list outputs;  // with history inside
  variable_list parameters;
  bool anchored = false;  // another node or a collective is inside
};

// Finds the parameters that the outputs depend on, wherever they belong.
void find_leaves(InnerGraph& graph, std::uint64_t first_inside, const UnitCall& call) {
  std::unordered_set<const c10::TensorImpl*> inputs;
  for (const Tensor& input : graph.inputs)
    if (input.defined()) inputs.insert(input.unsafeGetTensorImpl());
  std::vector<autograd::Node*> open;
  std::unordered_set<autograd::Node*> seen;
  const auto visit = [&](autograd::Node* node) {
    if (node && seen.insert(node).second) open.push_back(node);
  };
  for (const Tensor& output : graph.outputs)
    if (output.defined() && output.requires_grad())
      visit(autograd::impl::gradient_edge(output).function.get());
  const char* expected = "only tensors among the unit's arguments and parameters of the model";
  while (!open.empty()) {
    autograd::Node* node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node)) {
      const c10::TensorImpl* tensor = leaf->variable.unsafeGetTensorImpl();
      if (inputs.contains(tensor)) continue;
      if (tensor == differentiable::anchor().unsafeGetTensorImpl())
        graph.anchored = true;
      else if (call.host->is_trained(tensor))
        graph.parameters.push_back(leaf->variable);
      else if (call.host->is_frozen(tensor) ||
               call.host->is_freed_memory(leaf->variable.storage().unsafeGetStorageImpl()))
        refuse_call(call,
                    fmt::format("a frozen parameter {} that needs a gradient in mid-step",
                                c10::str(leaf->variable.sizes())),
                    "parameters unfrozen between steps",
                    "Set requires_grad before zero_gradients() of the layout");
      else
        refuse_call(call,
                    fmt::format("a leaf {} that needs a gradient and is neither an argument nor a parameter",
                                c10::str(leaf->variable.sizes())),
                    expected,
                    "Pass it as an argument of the forward, or register it as a parameter of the model");
      continue;
    }
    if (node->sequence_nr() < first_inside)
      refuse_call(call,
                  fmt::format("a tensor computed outside ({}) that is not an argument and needs a gradient",
                              node->name()),
                  expected, "Pass it as an argument of the forward, or detach it");
    for (const autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
}

// A parameter that leaves the unit outlives its memory only as a copy.
variable_list outputs_of(const UnitCall& call, const variable_list& inputs, const UnitBody& body) {
  variable_list outputs = body(inputs);
  for (Tensor& output : outputs)
    if (output.defined() && call.host->is_freed_memory(output.storage().unsafeGetStorageImpl()))
      output = output.clone();
  return outputs;
}

// Runs the body with the graph on. `inputs` are leaves.
InnerGraph record(const UnitCall& call, variable_list inputs, const UnitBody& body) {
  InnerGraph graph;
  graph.inputs = std::move(inputs);
  const std::uint64_t first_inside = at::sequence_number::peek();
  graph.outputs = outputs_of(call, graph.inputs, body);
  find_leaves(graph, first_inside, call);
  return graph;
}

variable_list as_leaves(const variable_list& inputs) {
  variable_list leaves;
  for (const Tensor& input : inputs)
    leaves.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad()) : input);
  return leaves;
}

// Hands its input no gradient. Nodes below hand "none" on uncomputed, where zeros would become 0 / 0 in a
// mean over nothing; those that exchange something with other ranks still do.
struct NoGradient final : autograd::Function<NoGradient> {
  static Tensor forward(autograd::AutogradContext*, const Tensor&) { return at::zeros({}); }
  static variable_list backward(autograd::AutogradContext*, variable_list) { return {Tensor()}; }
};

class UnitNode final : public autograd::Node {
 public:
  // `graph` without outputs: they are made again from its inputs in backward.
  UnitNode(UnitCall call, std::size_t use, UnitBody body, const variable_list& inputs)
      : call_(std::move(call)), use_(use), body_(std::move(body)) {
    autograd::edge_list edges;
    for (const Tensor& input : inputs)
      edges.push_back(input.defined() && input.requires_grad() ? autograd::impl::gradient_edge(input)
                                                               : autograd::Edge());
    // Backward reaches a block none of whose inputs needs a gradient.
    edges.push_back(autograd::impl::gradient_edge(differentiable::anchor()));
    set_next_edges(std::move(edges));
    if (call_.checkpoint) recompute_state_ = std::make_unique<RecomputeState>(inputs);
  }

  void keep(InnerGraph graph) {
    graph_ = std::move(graph);
    if (recompute_state_) recompute_state_->forward_is_done();
  }
  void keep_place(std::size_t output) { outputs_.push_back(output); }
  std::string name() const override {
    return fmt::format("isograd::Unit({})", call_.host->unit_name(call_.unit));
  }
  variable_list apply(variable_list&& gradients) override;
  void release_variables() override {
    released_ = true;
    graph_ = {};
    body_ = nullptr;
  }

 private:
  InnerGraph again() const {
    InnerGraph graph;
    recompute_state_->during([&] { graph = record(call_, as_leaves(graph_.inputs), body_); });
    return graph;
  }

  UnitCall call_;
  std::size_t use_;
  UnitBody body_;
  InnerGraph graph_;
  std::unique_ptr<RecomputeState> recompute_state_;
  std::vector<std::size_t> outputs_;  // which outputs of the body have this history
  bool released_ = false;
};

variable_list UnitNode::apply(variable_list&& gradients) {
  if (at::GradMode::is_enabled())
    refuse_call(call_, "a backward with create_graph", "one that is not differentiated again",
                "Run backward without create_graph");
  if (released_)
    refuse_call(call_, "a second backward through a graph that is freed", "one backward",
                "Pass keep_graph = true to the first backward");
  const bool keep_graph = autograd::get_current_graph_task_keep_graph();
  const std::size_t num_inputs = graph_.inputs.size();
  const bool for_parameters = task_should_compute_output(num_inputs);
  UnitHost& host = *call_.host;
  auto unless_done = c10::make_scope_exit([&host] { host.abandon(); });
  host.enter_backward(use_);

  const InnerGraph graph = call_.checkpoint ? again() : graph_;
  variable_list outputs, upstream, wanted;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const Tensor& output = graph.outputs.at(outputs_[i]);
    if (!output.requires_grad()) continue;
    if (gradients[i].defined()) {
      outputs.push_back(output);
      upstream.push_back(gradients[i]);
    } else if (graph.anchored) {  // what the unit exchanges in its backward, other ranks wait for
      const at::AutoGradMode with_graph(true);
      outputs.push_back(NoGradient::apply(output));
      upstream.push_back(at::zeros({}));
    }
  }
  std::vector<std::size_t> places;  // of the inputs among `wanted`
  for (std::size_t i = 0; i < num_inputs; ++i)
    if (graph.inputs[i].defined() && graph.inputs[i].requires_grad() && task_should_compute_output(i)) {
      wanted.push_back(graph.inputs[i]);
      places.push_back(i);
    }
  if (for_parameters) {
    wanted.insert(wanted.end(), graph.parameters.begin(), graph.parameters.end());
    if (graph.anchored) wanted.push_back(differentiable::anchor());
  }

  variable_list results(num_inputs + 1);
  if (!outputs.empty() && !wanted.empty()) {
    const differentiable::PlacesOfReturnedGradients places_of_gradients(
        [&host](const Tensor& parameter, at::ScalarType type) {
          return host.place_of_gradient(parameter, type);
        });
    variable_list found = autograd::grad(outputs, wanted, upstream, keep_graph && !call_.checkpoint,
                                         /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < places.size(); ++i) results[places[i]] = found[i];
    if (for_parameters)
      for (std::size_t i = 0; i < graph.parameters.size(); ++i)
        if (Tensor& gradient = found[places.size() + i]; gradient.defined())
          host.take_gradient(graph.parameters[i], std::move(gradient));
  }
  host.leave_backward(use_);
  unless_done.release();
  return results;
}

variable_list call_with_graph(const UnitCall& call, std::size_t use, const variable_list& inputs,
                              const UnitBody& body) {
  auto node = torch_versions::make_node<UnitNode>(call, use, call.checkpoint ? body : UnitBody(), inputs);
  InnerGraph graph;
  if (call.checkpoint) {
    graph.inputs = as_leaves(inputs);
    const at::NoGradGuard no_grad;
    graph.outputs = outputs_of(call, graph.inputs, body);
  } else {
    graph = record(call, as_leaves(inputs), body);
    if (graph.anchored) call.host->exchanges(call.unit);
  }
  variable_list results = graph.outputs;
  for (std::size_t i = 0; i < results.size(); ++i) {
    Tensor& result = results[i];
    if (!result.defined() || !autograd::isDifferentiableType(result.scalar_type())) continue;
    // The root's outputs always lead to its node: on a rank whose loss is a constant backward comes by all
    // the same, as it does on the others.
    if (!result.requires_grad() && !call.checkpoint && call.unit != kRootUnit) continue;
    result = result.detach();
    autograd::set_history(result, node);
    node->keep_place(i);
  }
  if (call.checkpoint) graph.outputs.clear();
  node->keep(std::move(graph));
  return results;
}

}  // namespace

bool recomputing() { return computes_again; }
Recomputing::Recomputing() : before_(std::exchange(computes_again, true)) {}
Recomputing::~Recomputing() { computes_again = before_; }

std::vector<Tensor> call_unit(const UnitCall& call, const std::vector<Tensor>& inputs, const UnitBody& body) {
  if (!at::GradMode::is_enabled() && call.host->everything_is_held()) return body(inputs);
  auto unless_done = c10::make_scope_exit([&call] { call.host->abandon(); });
  const std::size_t use = call.host->enter_forward(call.unit);
  variable_list outputs =
      at::GradMode::is_enabled() ? call_with_graph(call, use, inputs, body) : outputs_of(call, inputs, body);
  call.host->leave_forward(use);
  unless_done.release();
  return outputs;
}

UnitHandle::UnitHandle(std::function<std::vector<at::Tensor>()> parameters)
    : binding_(std::make_shared<Binding>()) {
  binding_->parameters = std::move(parameters);
}

std::vector<at::Tensor> UnitHandle::run(const std::vector<at::Tensor>& inputs, const Body& body) const {
  const auto compute = binding_->output_dtype ? Body([body, dtype = *binding_->output_dtype](const auto& in) {
    auto outputs = body(in);
    for (at::Tensor& output : outputs)
      if (output.defined() && output.is_floating_point()) output = output.to(dtype);
    return outputs;
  })
                                              : body;
  if (!bound()) return compute(inputs);
  return call_unit(binding_->call, inputs, compute);
}

void UnitHandle::set_checkpoint(bool checkpoint) const { binding_->checkpoint = checkpoint; }

void UnitHandle::set_reshard_after_forward(bool reshard) const { binding_->reshard = reshard; }

void UnitHandle::set_fp32_gradients(bool fp32) const { binding_->fp32_gradients = fp32; }

void UnitHandle::set_output_dtype(std::optional<at::ScalarType> dtype) const {
  binding_->output_dtype = dtype;
}

bool UnitHandle::plain() const { return !bound() && !binding_->output_dtype; }

bool UnitHandle::bound() const { return binding_->call.host != nullptr; }

}  // namespace isograd
