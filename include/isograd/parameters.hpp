// Parameters: placement on a grid's axes, the layout of a whole model, flat buckets, bytes of a strategy.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "isograd/grid.hpp"
#include "isograd/world.hpp"

namespace torch::nn {
class Module;
}

namespace isograd {

// A half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// Part of `rank` when `numel` elements are split into `size` contiguous parts at multiples of `alignment`.
Range owned_slice(std::int64_t numel, int rank, int size, std::int64_t alignment = 16);

// One dimension of a parameter, sharded over the ranks along an axis (of the grid, or a factor of a view).
struct Cut {
  std::string axis;
  int dim = 0;
  // Consecutive blocks of the dimension, each sharded separately (e.g. queries, keys, values). Usually one.
  std::vector<std::int64_t> blocks;
  // [block][place along the axis]: rows of a block that a rank has, in the order of ranks; also 0.
  std::vector<std::vector<std::int64_t>> rows;

  bool operator==(const Cut&) const = default;
};

// As even as possible in pieces of `unit` rows; the first ranks along the axis get one more piece.
Cut even_cut(const Grid& grid, const std::string& axis, int dim, std::vector<std::int64_t> blocks,
             std::int64_t unit = 1);

// Where a parameter is on the axes of a grid, and where its gradients are summed. Integer arithmetic only.
struct Placement {
  std::vector<std::int64_t> whole_shape;
  std::vector<Cut> cuts{};
  // Stages whose ranks hold it, ascending; two for an embedding that is tied across stages. Empty: every one.
  std::vector<int> stages{};
  // Axes of copies() whose gradients are summed; along the others every rank computes the same gradient. The
  // stage axis here means the stages that hold the parameter.
  AxisSet summed{};

  bool operator==(const Placement&) const = default;
};

// Parameters share a flat buffer only if these are equal. Axes of one rank are left out.
struct SyncAxes {
  AxisSet summed, copies;
  auto operator<=>(const SyncAxes&) const = default;
};

// A placement summed along the data axes on which it is not sharded, and along `summed`.
Placement placed(const Grid& grid, std::vector<std::int64_t> whole_shape, std::vector<Cut> cuts = {},
                 std::vector<int> stages = {}, const AxisSet& summed = {});

// ConfigError that names parameter and axis: a dimension that does not exist or is sharded twice, an unknown
// axis, blocks or rows that do not add up, stages out of order, a sum along an axis without copies.
void check_placement(const std::string& name, const Placement& placement, const Grid& grid);

// The functions below expect a placement that check_placement() accepts.

// Axes along which ranks hold the same elements; of a view, the factors along which it is not sharded.
AxisSet copies(const Placement& placement, const Grid& grid);

SyncAxes sync_axes(const Placement& placement, const Grid& grid);

bool holds(const Placement& placement, const Grid& grid, int rank);

// Ranks that hold the parameter and differ from `rank` along these axes of copies() alone; ascending.
std::vector<int> holders_along(const Placement& placement, const Grid& grid, const AxisSet& along, int rank);

// Shape of the local tensor of `rank`; {0} where it does not hold the parameter.
std::vector<std::int64_t> local_shape(const Placement& placement, const Grid& grid, int rank);

// A box of elements that a rank holds, with its offset in the whole tensor and in the rank's tensor.
struct Slice {
  std::vector<std::int64_t> whole, local, sizes;
};
// Non-empty slices of the whole tensor that make up the local one: one per block of a sharded dimension.
std::vector<Slice> slices(const Placement& placement, const Grid& grid, int rank);

// The elements of its local tensor that `rank` owns: each element has one owner among the copies.
Range owned_part(const Placement& placement, const Grid& grid, int rank);

// Describes a placement, one line per aspect: name, shape, shards, stages, summed axes.
std::vector<std::string> describe(const std::string& name, const Placement& placement);

// ---- layout: all parameters of a model with their placements on a mesh ----

// A parameter and this rank's part of it.
struct PlacedParameter {
  std::string name;
  Placement placement;
  AxisSet copies;                         // of the placement
  std::vector<std::int64_t> local_shape;  // {0} where this rank does not hold it
  bool held = true;
  Range owned;  // of the local elements
};

// Assembles whole tensors and assigns owners, from placements alone. The
// same on every rank, with all parameters in the model's order. Tensors (values, gradient, state) are local
// ones of any type, in that order, empty where a rank does not hold the parameter.
class Layout {
 public:
  using Named = std::vector<std::pair<std::string, Placement>>;

  // Collective over mesh.all(), before a model is changed. ConfigError on every rank: a placement that
  // check_placement() refuses, a name used twice, placements that differ between ranks.
  Layout(Mesh mesh, Named placements);

  const Mesh& mesh() const { return mesh_; }
  const std::vector<PlacedParameter>& parameters() const { return parameters_; }
  Named placements() const;                                         // in the order of parameters()
  const PlacedParameter& parameter(const std::string& name) const;  // ConfigError: no such parameter

  // Copies this rank's part of a whole tensor.
  at::Tensor local(const std::string& name, const at::Tensor& whole) const;

  // The whole tensor from its shards and the first stage that holds it. Collective over mesh.all().
  at::Tensor whole(const std::string& name, const at::Tensor& local) const;

 private:
  void check_local(const PlacedParameter& parameter, const at::Tensor& tensor) const;

  Mesh mesh_;
  std::vector<PlacedParameter> parameters_;
};

// Placements of parameters that every rank has whole.
Layout::Named whole_placements(const std::vector<std::pair<std::string, at::Tensor>>& named,
                               const Grid& grid);

// ---- a module as an argument ----

[[noreturn]] void refuse_empty_module(const std::source_location& call);

// For overloads that exist only for the compiler's message: they refuse every type.
template <typename...>
inline constexpr bool misused = false;

template <typename T>
concept ModuleHolder = requires {  // what TORCH_MODULE(Name) makes of NameImpl
  typename T::ContainedType;
};

// A module as an argument: the module itself, a std::shared_ptr to it, the holder of its TORCH_MODULE, or a
// Sharded. ConfigError with the call's file and line: an empty pointer or holder.
class ModuleRef {
 public:
  ModuleRef(const torch::nn::Module& module) : module_(&module) {}  // NOLINT: stands for the module
  template <typename Pointer>
  requires requires(const Pointer& pointer) {
    requires std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<decltype(*pointer)>>;
  }
  ModuleRef(const Pointer& pointer,  // NOLINT: stands for the module
            const std::source_location& call = std::source_location::current()) {
    if constexpr (requires { static_cast<bool>(pointer); }) {
      if (!static_cast<bool>(pointer)) refuse_empty_module(call);
    } else if constexpr (requires { pointer.ptr() == nullptr; }) {
      if (pointer.ptr() == nullptr) refuse_empty_module(call);
    }
    module_ = &*pointer;
  }

  const torch::nn::Module& operator*() const { return *module_; }
  const torch::nn::Module* operator->() const { return module_; }

 private:
  const torch::nn::Module* module_ = nullptr;
};

// ---- buckets: flat storage, slots, owned elements; the only code that computes offsets and slices ----

// A trainable parameter as the model names it. Tied weights appear once.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;   // leaf that requires a gradient
  bool decays = true;  // weight decay applies (matrices; not norms and biases)
  SyncAxes sync{};     // set by place_parameters()
};

// The parameters that are trained, and what a layout needs to know in addition.
struct TrainableParameters : std::vector<NamedParameter> {
  using std::vector<NamedParameter>::vector;
  TrainableParameters() = default;
  TrainableParameters(std::vector<NamedParameter> list)  // NOLINT: implicit
      : std::vector<NamedParameter>(std::move(list)) {}

  // Placements by name of parameters that are not plain copies. The tensor is then this rank's part.
  std::vector<std::pair<std::string, Placement>> placements{};
  // Frozen now. One that is unfrozen later joins the layout.
  std::vector<NamedParameter> frozen{};
  // Called when a layout is made and before each of its steps. ConfigError where the gradient would be wrong.
  std::function<void()> check{};
};

// In registration order: frozen ones separately, tied ones once (first name). decays = dim() >= 2.
TrainableParameters trainable_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named);
template <std::same_as<std::vector<at::Tensor>> Tensors>
TrainableParameters trainable_parameters(const Tensors& /*parameters*/) {
  static_assert(misused<Tensors>,
                "trainable_parameters() takes the module, not module->parameters(), which has no names: "
                "trainable_parameters(model)");
  return {};
}

// Sets each parameter's axes from its placement (default: a copy on every rank). ConfigError: what
// check_placement() refuses, a tensor that is not of the local shape, a placement without parameter, a
// parameter on several but not all stages.
void place_parameters(TrainableParameters& parameters, const Grid& grid, int rank);

// The place of one parameter in a bucket, in elements.
struct Slot {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::vector<std::int64_t> shape;
  bool decays = true;
  std::size_t index = 0;  // into the list given at construction, then parameters that joined later
  // False while the parameter is frozen: optimizers change neither it nor its state.
  bool trained = true;
};

struct BucketPlan {
  std::int64_t numel = 0;             // padded
  at::ScalarType dtype = at::kFloat;  // of its parameters
  at::Device device = at::kCPU;       // of its parameters; for the meta device, the CPU
  SyncAxes sync{};                    // of its parameters
  std::vector<Slot> slots;
};

// Packs parameters in *reverse* order (backward makes the last gradients first), or in `order`, which has
// every index once. A bucket has one dtype and SyncAxes and at most `bucket_bytes` of gradients unless one
// parameter is larger; the first of each kind `first_bucket_bytes`, to communicate early (0: like the
// others).
std::vector<BucketPlan> plan_buckets(const std::vector<NamedParameter>& parameters, std::int64_t bucket_bytes,
                                     std::int64_t first_bucket_bytes = 0,
                                     const std::vector<std::size_t>& order = {});

// A rank's flat part of a bucket, all or a shard. Norms, optimizers and checkpoints use nothing else.
struct Bucket {
  BucketPlan plan;
  Range owned;        // elements of the bucket that this rank counts in norms: each element has one owner
  AxisSet sharded{};  // axes along which the other parts are, in the order of ranks; empty: all held here
  Range held;         // elements whose master, optimizer state and summed gradient are here; contains `owned`
  at::Tensor parameters;  // [held.size()] in the parameters' dtype; updates write here
  at::Tensor master;      // [held.size()] fp32 for bf16 parameters, otherwise the same memory as `parameters`
  at::Tensor gradients;   // [held.size()] in the parameters' dtype; for bf16 in fp32 by default

  bool whole() const { return held.size() == plan.numel; }
};

// ---- plans: bytes of a strategy, from formulas alone ----

// Bytes per parameter element.
struct ElementBytes {
  int parameter = 2;  // the value that the model computes with
  int gradient = 2;   // summed over ranks and read by the optimizer
  int master = 4;     // the copy that is updated; 0 where that is the parameter itself
  int state = 8;      // optimizer state: two moments of AdamW in fp32

  // k of the ZeRO paper: what stage 1 shards.
  int optimizer() const { return master + state; }
  int all() const { return parameter + gradient + optimizer(); }
};

struct DataParallelPlan {
  // Trainable parameters, with the padding of their flat storage, that equally many ranks share.
  struct Elements {
    std::int64_t numel = 0;  // Ψ
    std::int64_t whole = 0;  // Ψw: of these, what stage 3 keeps whole from forward to the end of backward
    int shards = 1;          // N ranks have one copy between them, sharded from stage 1 on
    int replicas = 1;        // R such copies
  };
  // First those that every rank copies; with expert parallelism then a rank's experts, whose N and R are
  // those of the ranks with the same experts (Ψe, Ψew, Ne in formulas).
  std::vector<Elements> elements = std::vector<Elements>(1);
  ElementBytes bytes{};
  int stage = 0;                   // ZeRO: 0 to 3
  bool share_parameters = false;   // one copy for all ranks of a shard group; at least states are sharded
  bool reduce_once = false;        // stages 2 and 3 keep whole gradients until the last micro-batch
  std::int64_t micro_batches = 1;  // G, of a step
};

// Bytes that a rank keeps between steps. Each rank counts its part of shared memory.
struct PersistentBytes {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t master = 0;
  std::int64_t state = 0;

  std::int64_t total() const { return parameters + gradients + master + state; }
  PersistentBytes& operator+=(const PersistentBytes& more);
};

// Formulas of Rajbhandari et al. 2020 ("ZeRO"), docs/memory.md. ConfigError on contradictory numbers.
PersistentBytes persistent_bytes(const DataParallelPlan& plan);

// Bytes that a rank sends in a step where a reduce-scatter or all-gather of n bytes sends n(N − 1)/N.
struct TrafficBytes {
  double reduce = 0;     // gradients, within the shard group (stage 0: to all of it and back)
  double gather = 0;     // parameters, within the shard group
  double replicate = 0;  // sums of a shard's gradients over the replicas, once a step

  double total() const { return reduce + gather + replicate; }
  TrafficBytes& operator+=(const TrafficBytes& more);
};

// By micro-batches, stage and replicas (docs/memory.md), without the exchange of tokens with experts.
TrafficBytes traffic_bytes(const DataParallelPlan& plan);

// As text: "2Ψ + 14Ψ/N", "(2Ψ + 2Ψ)(N - 1)/N"; Ψe, Ψew and Ne are for experts.
std::string persistent_formula(const DataParallelPlan& plan);
std::string traffic_formula(const DataParallelPlan& plan);

}  // namespace isograd
