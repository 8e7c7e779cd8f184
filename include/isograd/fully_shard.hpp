// ZeRO-3 for C++ modules: parameters are gathered only while they are used.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"

namespace isograd {

class UnitHandle;

namespace sharded_call {

// The types of a block or model before it is wrapped: a torch::nn module, a pointer to one, or its holder.
template <typename T>
concept BareModule = !std::is_base_of_v<UnitHandle, T> &&
                     (std::is_base_of_v<torch::nn::Module, T> || requires(const T& pointer) {
                       requires std::is_base_of_v<torch::nn::Module, std::decay_t<decltype(*pointer)>>;
                     });

}  // namespace sharded_call

// A part of a model, usually a block, that is gathered, reduced and freed together. Copies are the same unit.
class UnitHandle {
 public:
  using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

  // fully_shard() calls `parameters` to learn which ones belong to the unit.
  explicit UnitHandle(std::function<std::vector<at::Tensor>()> parameters);
  template <sharded_call::BareModule T>
  UnitHandle(const T&) {  // NOLINT: only for the message below
    static_assert(misused<T>,
                  "fully_shard() takes blocks as isograd::Sharded<Block>: keep the shared_ptr in one, "
                  "isograd::Sharded<Block> block(register_module(...)), and call block(x)");
  }

  // body(inputs) with whole parameters. ConfigError: a tensor with gradient that is no input and no
  // parameter.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const Body& body) const;
  bool bound() const;
  bool plain() const;  // no layout and no output dtype: run() is body(inputs)

  // These override fully_shard()'s options for this unit. Call them before fully_shard().
  void set_checkpoint(bool checkpoint) const;
  void set_reshard_after_forward(bool reshard) const;
  // Keeps and reduces gradients of bf16 parameters in fp32 (true) or in bf16.
  void set_fp32_gradients(bool fp32) const;
  // Casts floating-point tensors that the unit returns, sharded or not. May be called at any time.
  void set_output_dtype(std::optional<at::ScalarType> dtype) const;

  struct Binding;
  const std::shared_ptr<Binding>& binding() const { return binding_; }

 private:
  std::shared_ptr<Binding> binding_;
};

namespace sharded_call {

template <typename T>
inline constexpr bool is_sequence = false;
template <typename T>
inline constexpr bool is_sequence<std::vector<T>> = true;
template <typename T>
inline constexpr bool is_sequence<std::optional<T>> = true;
template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

// True where the type can hold tensors.
template <typename T>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return true;
  } else if constexpr (is_sequence<T>) {
    return holds_tensors<typename T::value_type>();
  } else if constexpr (TupleLike<T>) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (... || holds_tensors<std::tuple_element_t<I, T>>());
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

// Calls `visit` with each tensor of an argument or result, in order; everything else is left as it is.
template <typename T, typename Visit>
void for_tensors(T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (!holds_tensors<T>()) {
  } else if constexpr (requires { value.has_value(); }) {
    if (value) for_tensors(*value, visit);
  } else if constexpr (is_sequence<T>) {
    for (auto& part : value) for_tensors(part, visit);
  } else {
    std::apply([&](auto&... parts) { (for_tensors(parts, visit), ...); }, value);
  }
}
template <typename T>
void take_tensors(T& value, std::vector<at::Tensor>& out) {
  for_tensors(value, [&](at::Tensor& tensor) { out.push_back(std::exchange(tensor, at::Tensor())); });
}
template <typename T>
void put_tensors(T& value, const std::vector<at::Tensor>& in) {
  std::size_t next = 0;
  for_tensors(value, [&](at::Tensor& tensor) { tensor = in.at(next++); });
}

}  // namespace sharded_call

// A module as a unit: `block(x)` calls block->forward(x). Parameters keep their names:
//
//  std::vector<isograd::Sharded<Block>> blocks;                                  // in the model
//  blocks.emplace_back(register_module("block0", std::make_shared<Block>()));    // one line per block
//  for (auto& block : blocks) x = block(x);                                      // in its forward
//
// Tensors in arguments and result (also in std::optional, vector, tuple, pair) get gradients; the rest is
// copied.
template <typename Module>
class Sharded : public UnitHandle {
  static_assert(!ModuleHolder<Module>,
                "isograd::Sharded<> takes the class of the module, not the holder of its TORCH_MODULE: "
                "isograd::Sharded<BlockImpl>, which a Block converts to");

 public:
  Sharded(std::shared_ptr<Module> module,  // NOLINT: stands for the module
          const std::source_location& call = std::source_location::current())
      : UnitHandle([module, call] { return checked(module, call)->parameters(); }),
        module_(std::move(module)),
        call_(call) {}
  Sharded(torch::nn::ModuleHolder<Module> holder,  // NOLINT
          const std::source_location& call = std::source_location::current())
      : Sharded(holder.is_empty() ? (refuse_empty_module(call), nullptr) : holder.ptr(), call) {}
  template <std::derived_from<torch::nn::Module> Value>
  Sharded(const Value&) : UnitHandle(std::function<std::vector<at::Tensor>()>()) {  // NOLINT: for its message
    static_assert(misused<Value>,
                  "isograd::Sharded takes a std::shared_ptr to the module, or its holder, not the module "
                  "itself: isograd::Sharded block(register_module(name, "
                  "std::make_shared<Block>()))");
  }

  Module* operator->() const { return checked(module_, call_); }
  Module& operator*() const { return *checked(module_, call_); }
  const std::shared_ptr<Module>& ptr() const { return module_; }

  template <typename... Arguments>
  requires requires(Module& module, Arguments&&... arguments) {
    module.forward(std::forward<Arguments>(arguments)...);
  }
  auto operator()(Arguments&&... arguments) const {
    using Result = std::decay_t<decltype(module_->forward(std::forward<Arguments>(arguments)...))>;
    static_assert(sharded_call::holds_tensors<Result>(),
                  "forward of a sharded module returns tensors, alone or in vector, optional, tuple or pair");
    if (plain()) return Result((**this).forward(std::forward<Arguments>(arguments)...));
    std::tuple<std::decay_t<Arguments>...> values(std::forward<Arguments>(arguments)...);
    std::vector<at::Tensor> inputs;
    sharded_call::take_tensors(values, inputs);
    auto result = std::make_shared<std::optional<Result>>();  // its structure, without its tensors
    const auto outputs = run(inputs, [module = module_, values, result](const std::vector<at::Tensor>& in) {
      auto whole = values;
      sharded_call::put_tensors(whole, in);
      Result returned = std::apply([&](auto&... value) { return module->forward(value...); }, whole);
      std::vector<at::Tensor> out;
      sharded_call::take_tensors(returned, out);
      *result = std::move(returned);
      return out;
    });
    sharded_call::put_tensors(**result, outputs);
    return std::move(**result);
  }

 private:
  static Module* checked(const std::shared_ptr<Module>& module, const std::source_location& call) {
    return module ? module.get() : (refuse_empty_module(call), nullptr);
  }

  std::shared_ptr<Module> module_;
  std::source_location call_;
};

template <typename Module>
Sharded(std::shared_ptr<Module>) -> Sharded<Module>;
template <std::derived_from<torch::nn::Module> Module>
Sharded(const Module&) -> Sharded<Module>;  // for the message above

// A model as units: the whole model, and its blocks in the order in which its forward calls them.
struct ModelUnits {
  UnitHandle root;
  std::vector<UnitHandle> blocks;
  std::function<void(const std::string& name, at::Tensor& values)> initialize{};  // of FullyShardOptions
  std::function<std::vector<UnitHandle>()> blocks_of_pass{};                      // of FullyShardOptions
};

struct FullyShardOptions {
  // Behaviour. No option changes the gradient.
  bool check_parameters = true;  // refuse ranks whose models differ, naming the first difference
  // Frees blocks after forward and gathers them again: 3 Psi of communication, not 2. The root stays whole.
  bool reshard_after_forward = true;
  bool reshard_root = false;
  // Blocks keep only their inputs and compute forward again in backward, with the same random numbers: the
  // default generators are rewound. Ranks that are threads share these: a block with dropout then needs a
  // generator of its own, or one process per rank.
  bool checkpoint = false;
  bool reduce_once = false;        // keeps whole gradients until the last micro-batch: one reduction a step
  bool fp32_gradients = true;      // as in DataParallelOptions
  AxisSet sharded = kShardedAxes;  // as in DataParallelOptions
  std::vector<std::pair<std::string, Placement>> placements{};  // TrainableParameters::placements
  // The ranks along `sharded` share one copy; nothing is gathered (ConfigError: no such memory).
  bool share_parameters = false;
  bool offload = false;  // as in DataParallelOptions
  // For pipelines: the blocks of the current stage, neighbours in the list. Not given: all.
  std::function<std::vector<UnitHandle>()> blocks_of_pass{};
  std::int64_t gather_limit_bytes =
      0;  // of whole parameters (ConfigError: a unit that does not fit); 0: none
  // Writes into zero-filled `values` for parameters on the meta device; must not depend on the rank.
  std::function<void(const std::string& name, at::Tensor& values)> initialize{};
  std::function<void()> check{};  // TrainableParameters::check; empty: module_check(*root) of a module
  at::Device device = at::kCPU;   // where parameters from the meta device are made
  // Speed
  bool prefetch = true;  // gathers the next block while this one computes, if the limit allows it
};

// True on this thread in an extra forward (checkpointing): it must not update buffers.
bool recomputing();
// recomputing() is true on this thread while an object of this class exists.
class Recomputing {
 public:
  Recomputing();
  ~Recomputing();
  Recomputing(const Recomputing&) = delete;
  Recomputing& operator=(const Recomputing&) = delete;

 private:
  bool before_;
};

class FullySharded : public DataParallel {
 public:
  virtual std::int64_t gathered_bytes() const = 0;       // of parameters that are whole now
  virtual std::int64_t most_gathered_bytes() const = 0;  // highest value so far
  // Bound: what stays whole until backward ends, and the two largest other units (one without prefetch).
  virtual std::int64_t gather_bound_bytes() const = 0;
  // Elements of trained parameters that stay whole from forward to the end of backward, with padding.
  virtual std::int64_t whole_numel() const = 0;
  // How many of them belong to parameters sharded along data axes: experts along ep.
  virtual std::int64_t whole_expert_numel() const = 0;

 protected:
  // A unit gathers its parameters for a whole backward.
  bool splits_backward() const override { return false; }
};

// ZeRO-3 (Rajbhandari et al. 2020): each rank along `sharded` keeps a shard of parameters, gradients and
// state. Collective. `blocks` are parts of `root` in the order in which its forward calls them (one that is
// called twice is listed twice); a parameter of none or of several belongs to the root. Frozen parameters are
// sharded too, buffers are not. With pipeline stages a rank keeps units of its own stages.
//
// Rules: every rank calls the model equally often (empty batches count); blocks are called inside the root's
// call and do not nest; a tensor that needs a gradient is an argument. Gradients are in buckets() and
// views(), not in .grad. Parameters stay sharded when the layout ends: copy them under whole_parameters().
std::unique_ptr<FullySharded> fully_shard(const UnitHandle& root,
                                          const std::vector<std::pair<std::string, at::Tensor>>& named,
                                          const std::vector<UnitHandle>& blocks, const Mesh& mesh,
                                          FullyShardOptions options = {});

// auto layout = fully_shard(model, model->blocks, world.group);
template <typename Module>
std::unique_ptr<FullySharded> fully_shard(const Sharded<Module>& root, const std::vector<UnitHandle>& blocks,
                                          const Mesh& mesh, FullyShardOptions options = {}) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : root->named_parameters()) named.emplace_back(item.key(), item.value());
  if (!options.check) options.check = module_check(*root);
  return fully_shard(root, named, blocks, mesh, std::move(options));
}

template <typename Module, typename Block>
std::unique_ptr<FullySharded> fully_shard(const Sharded<Module>& root,
                                          const std::vector<Sharded<Block>>& blocks, const Mesh& mesh,
                                          FullyShardOptions options = {}) {
  return fully_shard(root, std::vector<UnitHandle>(blocks.begin(), blocks.end()), mesh, std::move(options));
}

// Only for its message. UnitHandle has the one for blocks.
template <sharded_call::BareModule Root>
std::unique_ptr<FullySharded> fully_shard(const Root&, const std::vector<UnitHandle>&, const Mesh&,
                                          FullyShardOptions = {}) {
  static_assert(misused<Root>,
                "fully_shard() takes the model as isograd::Sharded<Model>: isograd::Sharded<Model> "
                "model(std::make_shared<Model>(...)), and call model(x)");
  return nullptr;
}
template <sharded_call::BareModule Root, typename Block>
std::unique_ptr<FullySharded> fully_shard(const Root& root, const std::vector<Block>& blocks,
                                          const Mesh& mesh, FullyShardOptions options = {}) {
  return fully_shard(root, std::vector<UnitHandle>(blocks.begin(), blocks.end()), mesh, std::move(options));
}

}  // namespace isograd
