// Placement: where one parameter lives on the axes of a grid, and whose gradients add up. Integer arithmetic
// alone. Who holds which slice, who owns which element, and which ranks hold copies follow from it.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/grid.hpp"
#include "isograd/world.hpp"

namespace isograd {

// A half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// Rank `rank`'s part of `numel` elements split into `size` contiguous parts whose boundaries are multiples of
// `alignment` elements: disjoint, complete, possibly empty. The owner of an element is the rank whose slice
// has it.
Range owned_slice(std::int64_t numel, int rank, int size, std::int64_t alignment = 16);

// One dimension of a parameter, dealt to the ranks along an axis (of the grid, or a factor of a view).
struct Cut {
  std::string axis;
  int dim = 0;
  // The dimension consists of these, one after another, and each is cut by itself: the rows of query, key and
  // value heads in one tensor. One block as a rule.
  std::vector<std::int64_t> blocks;
  // [block][place along the axis]: how many of a block's rows a rank holds, in the order of the ranks. Ranks
  // may hold different numbers of rows, and none.
  std::vector<std::vector<std::int64_t>> rows;

  bool operator==(const Cut&) const = default;
};

// As even as possible in pieces of `unit` rows, which stay together (the rows of a head); the first ranks
// along the axis get one piece more.
Cut even_cut(const Grid& grid, const std::string& axis, int dim, std::vector<std::int64_t> blocks,
             std::int64_t unit = 1);

struct Placement {
  std::vector<std::int64_t> whole_shape;
  std::vector<Cut> cuts{};
  // Coordinates along the stage axis whose ranks hold the parameter, ascending: one as a rule, two for an
  // embedding whose ends lie in different stages. Empty: every stage.
  std::vector<int> stages{};
  // Axes along which ranks hold copies and each rank's gradient is a part of the whole: a part of copies().
  // Along the other axes of copies() every rank computes the same gradient already. The stage axis here means
  // the stages that hold the parameter.
  AxisSet summed{};

  bool operator==(const Placement&) const = default;
};

// What parameters must have in common to share a flat buffer: along which axes their gradients are summed,
// and along which ranks hold copies, among which elements are dealt to owners. Axes of one rank are left out,
// so that what amounts to the same is equal.
struct SyncAxes {
  AxisSet summed, copies;
  auto operator<=>(const SyncAxes&) const = default;
};

// A placement whose gradient is summed along the data axes on which it is not cut, and along `summed` beside
// them.
Placement placed(const Grid& grid, std::vector<std::int64_t> whole_shape, std::vector<Cut> cuts = {},
                 std::vector<int> stages = {}, const AxisSet& summed = {});

// ConfigError that names the parameter, and the axis where one is concerned: a cut of a dimension that does
// not exist, two cuts of one dimension or along the same ranks, an axis that does not exist, blocks that do
// not add up to the dimension, rows that do not add up to their block, stages out of order or outside the
// grid, a sum along an axis on which there are no copies.
void check_placement(const std::string& name, const Placement& placement, const Grid& grid);

// What follows from a placement that check_placement() accepts.

// The axes along which ranks hold the same elements: those of the grid on which the parameter is neither cut
// nor absent. Where it is cut along a factor of a view, the other factors stand for the axes of that view.
AxisSet copies(const Placement& placement, const Grid& grid);

SyncAxes sync_axes(const Placement& placement, const Grid& grid);

bool holds(const Placement& placement, const Grid& grid, int rank);

// The ranks that hold the parameter and differ from `rank` along these axes of copies() alone, ascending.
// `rank` holds the parameter.
std::vector<int> holders_along(const Placement& placement, const Grid& grid, const AxisSet& along, int rank);

// What `rank` holds: the shape of its local tensor, {0} where it does not hold the parameter.
std::vector<std::int64_t> local_shape(const Placement& placement, const Grid& grid, int rank);

// A box of elements that a rank holds, of `sizes`, and where it begins in the whole tensor and in the rank's.
struct Slice {
  std::vector<std::int64_t> whole, local, sizes;
};
// The slices of the whole tensor that make up the local one: one as a rule, one more for each further block
// of a cut dimension; none that is empty.
std::vector<Slice> slices(const Placement& placement, const Grid& grid, int rank);

// Of the elements of the rank's local tensor, in their order, those that `rank` owns: its slice over the
// ranks that hold copies. Every element has one owner among all ranks. Empty where the rank holds nothing.
Range owned_part(const Placement& placement, const Grid& grid, int rank);

// The placement in words, by aspect: name, shape, cuts, stages, summed axes.
std::vector<std::string> describe(const std::string& name, const Placement& placement);

// Layout: the parameters of a whole model, each with its placement on a mesh, and everything that follows
// from that: gradients are summed, whole tensors assembled, copies compared and elements owned by it and by
// nothing else.

// A parameter, and what of it is this rank's.
struct PlacedParameter {
  std::string name;
  Placement placement;
  AxisSet copies;                         // of the placement
  std::vector<std::int64_t> local_shape;  // {0} where this rank does not hold it
  bool held = true;
  Range owned;  // of the local elements
};

// The same catalogue on every rank: all parameters in the whole model's order, those of other stages too.
//
// Tensors of a parameter (its values, gradient, optimizer state) are given and returned as local ones, of
// local_shape and any type, and lists of them in the order of parameters(). Where a rank does not hold the
// parameter its tensor is an empty one of that type.
class Layout {
 public:
  using Named = std::vector<std::pair<std::string, Placement>>;

  // Collective over mesh.all(), before a model is touched. ConfigError on a placement that check_placement()
  // refuses, on a name used twice, and, on every rank, on the first parameter whose placement differs between
  // ranks.
  Layout(Mesh mesh, Named placements);

  const Mesh& mesh() const { return mesh_; }
  const std::vector<PlacedParameter>& parameters() const { return parameters_; }
  Named placements() const;                                         // in the order of parameters()
  const PlacedParameter& parameter(const std::string& name) const;  // ConfigError: no such parameter

  // The rank's part of a whole tensor: a copy.
  at::Tensor local(const std::string& name, const at::Tensor& whole) const;

  // The whole tensor, assembled along the cuts and fetched from the first stage that holds it. Collective
  // over mesh.all(); every rank gets it.
  at::Tensor whole(const std::string& name, const at::Tensor& local) const;

  // Adds up each gradient over the ranks along `summed`, in place. What comes out is the rank's part of the
  // whole gradient. Collective over mesh.all().
  void sum_gradients(const std::vector<at::Tensor>& gradients) const;

  // PeerError, on every rank, that names the first parameter of whose copies some differ in a bit, and those
  // ranks. `what` the tensors are ("gradient") stands in it. Collective over mesh.all().
  void check_copies(const std::vector<at::Tensor>& tensors, const std::string& what) const;

 private:
  void check_local(const PlacedParameter& parameter, const at::Tensor& tensor) const;

  Mesh mesh_;
  std::vector<PlacedParameter> parameters_;
};

// Of parameters that every rank has whole.
Layout::Named whole_placements(const std::vector<std::pair<std::string, at::Tensor>>& named,
                               const Grid& grid);

// Where each parameter lives: flat storage in buckets, slots, and who owns which elements.
// The only code that computes offsets and slices.

// A trainable parameter as the model names it. Tied weights appear once.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;   // leaf that requires a gradient
  bool decays = true;  // weight decay applies (matrices; not norms and biases)
  SyncAxes sync{};     // as place_parameters() finds them; none before
};

// The parameters that a layout is made for: a list of those that are trained, and what it looks after beside
// them.
struct TrainableParameters : std::vector<NamedParameter> {
  using std::vector<NamedParameter>::vector;
  TrainableParameters() = default;
  TrainableParameters(std::vector<NamedParameter> list)  // NOLINT: a list is the usual case
      : std::vector<NamedParameter>(std::move(list)) {}

  // Where those live that are not merely copied, by name. The tensor is then what this rank holds.
  std::vector<std::pair<std::string, Placement>> placements{};
  // Frozen now. One that is unfrozen later joins the layout.
  std::vector<NamedParameter> frozen{};
  // Called when a layout is made and before each of its steps: ConfigError on what would break the law.
  std::function<void()> check{};
};

// Parameters of a module in registration order: frozen ones apart, tied ones once (first name).
// decays = dim() >= 2.
TrainableParameters trainable_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named);

// Takes the axes of each parameter from its placement, or from one that every rank has a copy of and that is
// summed along the data axes. ConfigError: what check_placement() refuses, a tensor that is not of the rank's
// local shape, a placement of no parameter, one on several stages but not on all (their group is no axis).
void place_parameters(TrainableParameters& parameters, const Grid& grid, int rank);

// Place of one parameter in a bucket, in elements.
struct Slot {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::vector<std::int64_t> shape;
  bool decays = true;
  std::size_t index = 0;  // into the list given at construction, and what has joined it since
  // Off while the parameter is frozen: optimizers leave it and its state as they are.
  bool trained = true;
};

struct BucketPlan {
  std::int64_t numel = 0;             // padded
  at::ScalarType dtype = at::kFloat;  // of the parameters in it
  at::Device device = at::kCPU;       // of them too; where values are still to come (meta), the host
  SyncAxes sync{};                    // and so are these
  std::vector<Slot> slots;
};

// Packs parameters into buckets in *reverse* order (backward makes the last gradients first), of one dtype
// and the same SyncAxes, each at most `bucket_bytes` of gradients unless a single parameter is larger; the
// first one of each kind at most `first_bucket_bytes`, so that communication begins early (0: like the
// others). Pure. `order`, if not empty, is every index into `parameters` once: packed in this order instead.
std::vector<BucketPlan> plan_buckets(const std::vector<NamedParameter>& parameters, std::int64_t bucket_bytes,
                                     std::int64_t first_bucket_bytes = 0,
                                     const std::vector<std::size_t>& order = {});

// What a rank keeps of one bucket, flat. A layout that replicates holds all of it; one that shards holds the
// elements that this rank updates. Norms, optimizers and checkpoints see nothing else.
struct Bucket {
  BucketPlan plan;
  Range owned;        // elements of the bucket that this rank counts, in norms: each element has one owner
  AxisSet sharded{};  // where not held whole: the axes along which the other parts lie, in the ranks' order
  Range held;  // elements whose master, optimizer state and summed gradient are here; `owned` is a part
  at::Tensor parameters;  // [held.size()] in the parameters' dtype: what an update writes
  at::Tensor master;      // [held.size()] fp32 for bf16 parameters, otherwise the same memory as `parameters`
  at::Tensor
      gradients;  // [held.size()] in the parameters' dtype; of bf16 ones in fp32 unless asked otherwise

  bool whole() const { return held.size() == plan.numel; }
};

// Plans: what a strategy costs in bytes, computed from formulas without running anything.

// Bytes of one parameter, by what they hold.
struct ElementBytes {
  int parameter = 2;  // what the model computes with
  int gradient = 2;   // what is summed over ranks and read by the optimizer
  int master = 4;     // the copy that is updated; 0 where that is the parameter itself
  int state = 8;      // of the optimizer: two moments of AdamW in fp32

  // kΨ of the ZeRO paper: what stage 1 shards.
  int optimizer() const { return master + state; }
  int all() const { return parameter + gradient + optimizer(); }
};

// Data parallelism over `shards` × `replicas` ranks (dp_shard × dp_replicate).
struct DataParallelPlan {
  std::int64_t numel = 0;  // Ψ: elements of all trainable parameters, with the padding of their flat storage
  ElementBytes bytes{};
  int stage = 0;  // ZeRO: 0 to 3
  int shards = 1;
  int replicas = 1;
  bool share_parameters = false;   // one copy between the ranks of a shard group; states sharded at least
  bool reduce_once = false;        // stages 2 and 3 keep whole gradients until the last micro-batch
  std::int64_t micro_batches = 1;  // G, of a step
  // Stage 3: elements (of numel) that stay whole from forward to the end of backward, gathered once for both.
  std::int64_t whole = 0;
  // Experts that are dealt to ranks: elements, of numel and of whole, of which `dealt_copies` ranks have the
  // same. These sum them and, from stage 1 on, keep shards of them, whatever shards and replicas there are of
  // the rest.
  std::int64_t dealt = 0, dealt_whole = 0;
  int dealt_copies = 1;
};

// Bytes that a rank keeps from step to step. Of memory that ranks share each counts its part.
struct PersistentBytes {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t master = 0;
  std::int64_t state = 0;

  std::int64_t total() const { return parameters + gradients + master + state; }
  PersistentBytes& operator+=(const PersistentBytes& more);
};

// Rajbhandari et al. 2020 ("ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"), with Ψ
// elements, N shards and bytes p, g, k = master + state of each:
//   stage 0   (p + g + k)Ψ        16Ψ for bf16 with fp32 masters and moments
//   stage 1   (p + g)Ψ + kΨ/N     4Ψ + 12Ψ/N
//   stage 2   pΨ + (g + k)Ψ/N     2Ψ + 14Ψ/N
//   stage 3   (p + g + k)Ψ/N      16Ψ/N
//   shared    gΨ + (p + k)Ψ/N     one copy of the parameters between N ranks; (p + g + k)Ψ/N with stages 2
//   and 3
// With reduce_once gradients are whole: gΨ. Of dealt elements the same with N = dealt_copies. ConfigError on
// numbers that make no plan.
PersistentBytes persistent_bytes(const DataParallelPlan& plan);

// Bytes that a rank sends in a step, by what for. An algorithm that moves the least is assumed, as the paper
// does: a reduce-scatter or all-gather of n bytes over N ranks sends n(N − 1)/N, an all-reduce twice that.
struct TrafficBytes {
  double reduce = 0;     // gradients, within the shard group (stage 0: to all of it and back)
  double gather = 0;     // parameters, within the shard group
  double replicate = 0;  // sums of a shard's gradients over the replicas, once a step

  double total() const { return reduce + gather + replicate; }
  TrafficBytes& operator+=(const TrafficBytes& more);
};

// With G micro-batches, in elements times (N − 1)/N:
//   stage 0   2Ψ         gradients, once a step
//   stage 1   Ψ + Ψ      gradients there, parameters back
//   stage 2   GΨ + Ψ     each micro-batch's gradients are reduced; reduce_once: Ψ + Ψ
//   stage 3   GΨ + 2GΨ   parameters are gathered for forward and for backward; reduce_once: Ψ + 2GΨ; of what
//                        stays whole in between (`whole`) one gather less in each micro-batch
//   shared    Ψ          parameters need not go anywhere; GΨ with stages 2 and 3
// over R replicas in addition 2Ψ/N · (R − 1)/R, stage 0 over all N·R ranks at once. Of dealt elements the
// same with N = dealt_copies and R = 1; what the exchange of tokens with the experts' ranks sends is not in
// it.
TrafficBytes traffic_bytes(const DataParallelPlan& plan);

// "2Ψ + 14Ψ/N" for the plan's bytes, and for its traffic "(2Ψ + 2Ψ)(N - 1)/N"; Ψw: plan.whole. With dealt
// elements Ψ, Ψw and N are those of the rest, and Ψe, Ψew and Ne those of the dealt ones.
std::string persistent_formula(const DataParallelPlan& plan);
std::string traffic_formula(const DataParallelPlan& plan);

}  // namespace isograd
