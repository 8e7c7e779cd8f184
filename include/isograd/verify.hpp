// What one training step says of itself, whoever made it: the currency of comparison and diagnosis.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/grid.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "isograd/trainer.hpp"
#include "isograd/world.hpp"

namespace isograd {

// What a step says of itself, in addition to the gradient.
struct StepFigures {
  double loss = 0;
  std::int64_t targets = 0;
  std::int64_t tokens = 0;
  double norm = 0;  // of the whole gradient, before clipping
  double clip_coefficient = 1;
  // Of a step that clips groups apart, whose gradient and `norm` are those after the clip: the norm before.
  double unclipped_norm = std::numeric_limits<double>::quiet_NaN();
};

inline constexpr std::int64_t kNotRecorded = -1;  // a count that its writer left out

// What a diagnosis says.
struct Finding {
  std::string id;        // class of the diagnosis: "averaged_over_axis", "mean_of_rank_means", ..., "unknown"
  std::string sentence;  // in words: "all parameters scaled by 1/4: averaged over dp_shard (4)"
  std::vector<std::string> evidence{};  // what was run, and the numbers
};

// One optimizer step. A field that its writer did not record is empty, NaN or, for a count, kNotRecorded;
// what needs it is then not claimed. Lists by parameter have the order of `gradients`.
struct StepDump {
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  // Whole (not sharded), summed over ranks and micro-batches as the optimizer would see them, before
  // clipping.
  Named gradients;
  StepFigures figures;
  std::vector<std::int64_t>
      samples;  // ids of the samples seen, sorted; an id once for each time it was counted
  std::vector<std::vector<std::int64_t>> counts;  // [rank][micro-batch] targets that carry loss
  // [rank][micro-batch] what the declared mean counts there, if that is not targets: "samples" (a part of one
  // counts as that part of its targets), "weights". Not written to files.
  std::vector<std::vector<double>> amounts{};
  std::string counted{};
  std::vector<Axis> axes;  // {"dp_shard", 4}, ..., outermost first
  std::string precision;   // "fp64", "fp32", "bf16"

  std::vector<std::pair<std::string, double>> terms;  // of the loss, each by itself, without its weight
  // Figures that were recorded and are no number, by their keys in step.json ("loss", "norm",
  // "clip_coefficient", "terms.NAME", "scales.NAME", "ranks.0.norm"): NaN anywhere else means not recorded.
  std::vector<std::string> not_numbers{};
  // Factors of the trainer's own that a gradient may have been multiplied by: {"learning_rate", 0.1}, ...
  std::vector<std::pair<std::string, double>> scales{};
  // By how much one update of plain SGD with learning rate 1 lowers each parameter: the gradient as it was
  // applied, after clipping.
  Named applied;
  // By parameter, on how many ranks an element counts in norms: least and most over its elements. 1 and 1
  // where each has one owner.
  std::vector<std::pair<std::int64_t, std::int64_t>> owners;

  // By parameter, of a reference: how far its gradient moves where the parameters move by no more than
  // rounding in the precision of the run is worth, the largest ‖g64(p + Δp) − g64(p)‖ of several Δp. Of a
  // loss whose derivative jumps (ReLU) that is far more than the rounding of sums: no run in that precision
  // can tell these gradients apart, so that it may be off by as much. Empty: it is held to what gradients
  // without jumps are.
  std::vector<double> moves{};
  // By parameter, of one process in a lower precision: the largest distance of several runs from the same
  // step in fp64.
  std::vector<double> rounding{};

  // What a rank says for itself.
  struct RankView {
    // xxHash of the bits of each parameter before the step, and of each gradient as this rank has it.
    std::vector<std::uint64_t> initial, gradients;
    double spread = 0;  // largest ‖g − g of rank 0‖ / ‖g of rank 0‖ over the parameters
    double owned_norm = std::numeric_limits<double>::quiet_NaN();   // of the elements that this rank counts
    double norm = std::numeric_limits<double>::quiet_NaN();         // of the whole gradient, as it has it
    double bytes_moved = std::numeric_limits<double>::quiet_NaN();  // to make the step
  };
  std::vector<RankView> ranks;

  // Of parameters whose copies differ between ranks that see the same batch: their sum over these ranks, and
  // the axes that they lie along.
  struct PeerSum {
    std::string name, axes;
    at::Tensor sum;
  };
  std::vector<PeerSum> peer_sums{};
  // Parameters that ranks have parts of, and the axis that each is cut along. Not written to files.
  struct CutParameter {
    std::string name;
    Axis axis;
  };
  std::vector<CutParameter> cut{};

  // The recorder saw these by itself to be wrong or not proven, apart from all that is compared: a parameter
  // that no optimizer holds. Ids are those of a diagnosis; without evidence.
  std::vector<Finding> findings{};

  // [rank][micro-batch] the part of `gradients` that its tokens made, so that all of them add up to it. With
  // it, wrong weights can be told where the step cannot be made again. Empty where there are no tokens.
  std::vector<std::vector<Named>> shares{};
};

// A dump as a directory: gradients.safetensors and step.json, with applied.safetensors and
// share-RANK-MICROBATCH.safetensors where there is any (docs/verify.md). Written under another name and renamed: whole or
// not at all. An earlier dump of that name is replaced, any other directory is refused (ConfigError).
void write_dump(const StepDump& dump, const std::filesystem::path& directory);

// Tensors come back in fp64, in the order that was recorded, else by name. The files are not trusted:
// ConfigError names the file and the key on anything that is not a dump.
StepDump read_dump(const std::filesystem::path& directory);

// verify: prove that a layout's gradient is the gradient that one process has on the whole batch.

// A further term of the loss as the oracle adds it up: weight · Σ over the step of `sum` / what `mean`
// counts.
struct OracleTerm {
  std::string name;
  std::function<at::Tensor(const Batch&)> sum;  // scalar, differentiable
  Mean mean = Mean::kTargets;                   // kTargets, kTokens or kNone
  double weight = 1;
  // Given the whole step before its first sum(), with the parameters as they are. Not given: needs nothing.
  std::function<void(const MicroBatches& whole)> prepare{};
};

// A model as verify sees it: the outside oracle differentiates `logits` (or whatever the model's outputs are,
// DeclaredLoss::per_token) with a loss of its own, the product's
// step differentiates `loss_terms`. The closures keep the model alive.
struct VerifyModel {
  std::vector<std::pair<std::string, at::Tensor>> named;  // parameters; tied ones by the first name
  std::function<at::Tensor(const Batch&)> logits;         // [T, V]
  ForwardLossTerms loss_terms;
  // For layouts that shard parameters: loss_terms runs inside units->root, its blocks inside theirs.
  std::optional<ModelUnits> units{};
  std::vector<OracleTerm> more_terms{};   // in addition to the cross entropy of `logits`
  std::function<void()> without_noise{};  // switches dropout off, where there is any
  // What forward may change in addition to the parameters; ranks must do so alike.
  std::vector<std::pair<std::string, at::Tensor>> buffers{};
  // For a model that ranks with the same batch hold together: puts this rank's parts in place of parameters,
  // as isograd::cut() does, and lets forward communicate. Of layouts under test; the oracle's stays whole.
  std::function<Layout(const Mesh&)> cut{};
  std::shared_ptr<const Layout> placed{};  // what `cut` gave, before a layout under test is made
  // Of a model in stages, after `cut`: the options of steps that go through them. Not given: as they are.
  std::function<StepOptions(StepOptions options)> through{};
  // StepOptions::look_ahead of steps that differentiate this forward, which is loss_terms. Not given: none.
  std::function<LookAhead(const ForwardLossTerms& forward)> look_ahead{};
  // For a model that sends tokens to experts (DecoderLM::set_choice_of_experts). Rounding may turn a near tie
  // between experts: in the run's precision the oracle's choices are replayed, and each must be one that
  // rounding explains. Such a model's products round by how many tokens share an expert, too, so that
  // documents in a pack are held apart to E1's bound and not to the bit.
  std::function<void(const DecoderLM::ChooseExperts& choose)> choose_experts{};
};

using MakeVerifyModel = std::function<VerifyModel(at::ScalarType)>;
using MakeNormalizer = std::function<std::unique_ptr<Normalizer>()>;
using MakeDataParallel = std::function<std::unique_ptr<DataParallel>(std::vector<NamedParameter>, Group)>;

struct VerifyProblem;

struct LayoutUnderTest {
  std::string name;
  MakeDataParallel make;
  // Instead of `make`, for layouts that need more than the trainable parameters.
  std::function<std::unique_ptr<DataParallel>(const VerifyModel&, Group)> make_from_model{};
  std::vector<Axis> axes{};  // {"dp_replicate", 2}, ...; not given: one of all ranks
  // Bytes that this rank should send for gradients and parameters in a step of so many rounds of
  // micro-batches in the given precision, of the layout that was made: with the padding of its flat storage,
  // and without, as not every layout sends that. {0, 0} or not given: not claimed.
  std::function<std::pair<double, double>(DataParallel& layout, std::int64_t rounds, at::ScalarType dtype)>
      traffic{};
  // The same step with all ranks along this axis and the others of size 1, this layout being the only one,
  // for experiments; null where that is impossible. Called on every rank, with the same answer.
  std::function<std::shared_ptr<VerifyProblem>(const std::string& axis)> along{};
};

// Where ranks share samples (context parallelism): this rank's part comes from a cut.
struct SharedSamples {
  MicroBatches whole;  // the micro-batches that this rank shares, before the cut
  int data_rank = 0;   // whose they are: ranks with the same one share them
  std::function<MicroBatches(const MicroBatches& whole)> cut;  // this rank's part of any such
};

// A loop that takes norms and clips by itself, in place of the step's own norm and clip.
struct OwnClipping {
  std::function<double(std::vector<Bucket>& buckets, Group& group)> norm;
  // What each bucket's gradient is multiplied by; not given: min(1, max_norm / (norm + 1e-6)).
  std::function<std::vector<double>(std::vector<Bucket>& buckets, double norm, double max_norm)>
      coefficients{};
};

using OptimizerOptions = std::variant<SgdOptions, AdamWOptions>;

// The loss that the run declares, as the oracle computes it: by its own plain code.
struct DeclaredLoss {
  Mean mean = Mean::kTargets;  // kTargets, kSamples, kWeights, kFixed or kNone
  double denominator = 1;      // kFixed
  // Means of replicas: the whole step as the replicas see it, for the oracle; called on rank 0. The loss is
  // the mean of their own means, over those that have anything to count. Not given: one mean over `whole`.
  std::function<std::vector<MicroBatches>()> replicas;

  // The loss of each token [T] from the model's outputs [T, ...], by plain code of the oracle's own, in place
  // of the cross entropy of logits. Tokens without target are left out afterwards. `name` is for people.
  std::function<at::Tensor(const Batch& batch, const at::Tensor& outputs)> per_token{};

  // A loss over the rows of all ranks, which is no sum over tokens: the oracle's own plain code for it, from
  // the logits and targets of one global micro-batch. The step's loss is the mean over these. `name` is for
  // people.
  std::function<at::Tensor(const at::Tensor& logits, const at::Tensor& targets)> global{};
  std::string name{};

  std::string text() const;  // "token mean", "mean of per-replica sample means", ...
};

// Takes the dump of "oracle" and of each layout by name, made in fp64, and of "alone" and "NAME, fp32" in the
// run's precision. Called on rank 0.
using TakeDump = std::function<void(const std::string& name, const StepDump& dump)>;

// One step, as every rank would make it. Each rank fills in its own.
struct VerifyProblem {
  // A fresh model in the given dtype. Values of `dtype` (below) are then copied into the fp64 models, so that
  // all runs have the same initial parameters to the last bit.
  MakeVerifyModel make_model;
  MicroBatches local;  // this rank's part of the step; may be empty
  std::optional<SharedSamples>
      shared_samples{};                 // how `local` was cut; without it what is cut is only run as it is
  std::function<MicroBatches()> whole;  // the whole step, for the oracle; called on rank 0
  std::function<MicroBatches()> alone;  // the whole step in the micro-batches one process would make of it;
                                        // called on the last rank. Not given: `whole`
  at::ScalarType dtype = at::kFloat;    // the run's precision
  StepOptions step;
  // Clipped apart; step.max_norm is the limit of the others. The gradients compared are then those after the
  // clip, of which each parameter's tells its group's norm.
  std::vector<ClipGroup> clip_groups{};
  std::vector<LayoutUnderTest> layouts;
  DeclaredLoss loss;
  // The denominators of the step under test; not given: TokenMean, SampleMean, ... of `loss`.
  MakeNormalizer make_normalizer;

  std::optional<OwnClipping> clipping{};
  // Parameters are compared after so many updates in fp64, of plain SGD and of `optimizer`: what goes wrong
  // with the first update shows in the second. 0: not compared.
  int updates = 2;
  OptimizerOptions optimizer = AdamWOptions{};
  // Around the optimizers of the run under test.
  std::function<std::unique_ptr<Optimizer>(std::unique_ptr<Optimizer>)> wrap_optimizer{};

  std::int64_t memory_bytes = 0;  // what the oracle may take; 0: what the machine has free
  bool probe_documents = true;    // on rank 0's first micro-batch with several documents (bad_input.hpp)
  bool experiments = true;        // a failure is run again in other circumstances, to name it
  std::function<MicroBatches()> uninterrupted{};  // `local` of a run that was not resumed
  TakeDump take_dump{};
  // Asked on every rank between pieces of the work, each of a micro-batch or a step: where any rank says
  // true, verify() throws VerifyStopped on all. Given on all ranks or on none.
  std::function<bool()> stop{};
  // Told on rank 0, by name, of each layout that begins.
  std::function<void(const std::string& layout)> progress{};
  // A run under way: its own layout and forward make the step in the run's precision, in place of fresh ones;
  // nothing is updated.
  struct LiveRun {
    DataParallel* layout;
    ForwardLossTerms forward;
    const Layout* placed = nullptr;                           // of a model that ranks hold together
    LookAhead look_ahead{};                                   // of its steps
    std::vector<std::pair<std::string, at::Tensor>> named{};  // this rank's parts, where there are stages
    std::function<void(const DecoderLM::ChooseExperts& choose)> choose_experts{};  // of its model
    std::function<StepOptions(StepOptions options)> through{};                     // VerifyModel::through
  };
  std::optional<LiveRun> live_run{};
  // Where ranks along some axes hold the same batch: those of it see different data along the data axes
  // alone. Not given: every rank sees other data.
  std::optional<Mesh> mesh{};
  Group counting(const Group& all) const { return mesh ? mesh->counting() : all; }
  // The group of these ranks, for experiments on fewer; collective over them.
  std::function<Group(const std::vector<int>&)> subgroup{};
};

// g against the reference g64 for one parameter. Scale s = max(‖g64‖, 1e-3 · RMS · √numel), RMS the root mean
// square over all elements of the whole gradient.
struct Comparison {
  double ratio = 0;     // ρ = ⟨g, g64⟩ / ⟨g64, g64⟩; NaN where g64 is exactly zero
  double cosine = 0;    // NaN where either is exactly zero
  double error = 0;     // ‖g − g64‖ / s
  double allowed = 0;   // the same unit
  double residual = 0;  // ‖g − ρ g64‖ / s: what no scale explains
  // The smallest error of this parameter's scale that would not pass; from 1 on it could be lost altogether
  // (or, from 2, have its sign flipped) and pass.
  double scale_found = 0;
  bool passed = false;
};

// The scale of a whole gradient, as a fit over all parameters in which rounding averages out.
struct WholeScale {
  bool tested = false;
  double error = 0;       // 0: that of the reference
  double allowed = 0;     // 4 (u + the fit's standard error), u the unit round-off of the run's precision
  double found_from = 0;  // the smallest error of scale, of all parameters alike, that would not pass
  bool passed = true;
};

struct ParameterVerdict {
  std::string name;
  std::int64_t elements = 0;
  double norm = 0;             // ‖g64‖
  bool by_floor = false;       // s is not this norm but the floor of 1e-3 · RMS · √numel
  double alone_error = 0;      // ‖g32 − g64‖ / s: what one process has in the run's precision
  Comparison exact;            // E1: the layout in fp64
  Comparison rounded;          // E2: the layout in the run's precision
  bool replicas_agree = true;  // same bits on every rank, in both precisions
  bool repeats = true;         // E3: same bits when the step is made again
  // In fp64: over the parameter's elements, on how many ranks one counts in norms; 1 and 1 is right.
  std::int64_t owners_least = 1, owners_most = 1;
  std::uint64_t checksum = 0;  // xxHash of rank 0's gradient in the run's precision
};

// Parameters after some updates in fp64, against the oracle's.
struct Trajectory {
  std::string optimizer;  // "SGD", "AdamW"
  int updates = 0;
  std::string worst;  // parameter with the largest share of its allowed error used
  double error = 0;   // ‖p − p64‖ / ‖p64 − p0‖
  double allowed = 0;
  bool passed = true;
};

struct Grade {
  enum class State { kPassed, kFailed, kNotClaimed } state = State::kNotClaimed;
  std::string bound;              // in words, with where it comes from
  std::string worst;              // parameter with the largest share of its allowed error used
  double error = 0, allowed = 0;  // of that parameter
  std::int64_t failed = 0;        // parameters outside their bound
  WholeScale scale{};             // E2; E1 finds there what it finds in single parameters
  // What it finds, of parameters whose own norm they were held to: an error of scale of all of them, of any
  // single one (that which shows least by name).
  double uniform_found = 0, single_found = 0;
  std::string single_least{};
  // Parameters held to the floor of s because their gradient is smaller; of these, such as could be lost
  // altogether unseen.
  std::vector<std::string> by_floor{}, unseen{};
};

// One of StepFigures that is another one than the oracle's.
struct OtherFigure {
  std::string name;  // "loss", "norm", "unclipped_norm", "clip_coefficient", "targets", "tokens"
  double found = 0, expected = 0;
  double allowed = 0;  // of |found - expected|
};

struct LayoutVerdict {
  std::string name;
  std::vector<ParameterVerdict> parameters;  // in the model's order
  StepFigures exact, rounded;
  std::vector<OtherFigure> rounded_off{};  // E2: what of `rounded` is further off than rounding explains
  bool figures_agree = false;  // fp64: counts equal, loss, norm and clip coefficient to 1e-10 relative
  Grade e1, e2, e3;
  std::vector<Trajectory> trajectories;
  double bytes_moved = 0;   // by rank 0 in the fp64 step, for gradients and parameters
  double bytes_needed = 0;  // 0: not claimed
  // Of the experts chosen for tokens in the run's precision, over all ranks and layers.
  struct Choices {
    std::int64_t tokens = 0;   // times layers; 0: no experts, or a run in fp64
    std::int64_t flipped = 0;  // where the run would choose others than the oracle, which were replayed
    std::int64_t wrong = 0;    // of these, where rounding does not explain it
    std::int64_t layer = -1;   // the first with a wrong one
    double margin = 0;         // the largest difference of logits that rounding decided, of what is allowed
  } choices;
  std::vector<Finding> findings;  // what is wrong, most telling first
  bool passed = false;
};

// Which meshes of these ranks are proved for this model and batch (`isograd verify --layout all`).
struct MeshesTried {
  struct One {
    std::string name;        // "tp 2 x dp_shard 2"
    std::vector<Axis> axes;  // of more than one rank
    std::int64_t layouts = 0, failed = 0;
    std::string finding{};  // of the first layout that failed: its diagnosis, and what it says
  };
  std::vector<One> tried;
  std::int64_t admissible = 0;  // meshes that the configuration and the model allow on these ranks
  std::vector<std::string>
      left{};  // of these, the ones that were not run, because `tried` covers their pairs
  std::vector<std::string> refused{};  // what is not admissible, and why, each reason once
  // The axis along which, or the axes together on which, it goes wrong, in sentences; none: none failed.
  std::vector<std::string> guilty{};
};

// VerifyProblem::stop ended verify(), on every rank: there is no verdict.
struct VerifyStopped : std::exception {
  const char* what() const noexcept override;
};

struct Verdict {
  bool passed = false;
  int ranks = 1;
  std::string precision;  // "fp32", ...
  std::string loss;       // what was compared with: DeclaredLoss::text()
  StepFigures oracle;
  bool parameters_agree = false;      // initial values, over ranks
  bool batch_agrees = false;          // the ranks together saw every token of the whole step exactly once
  std::vector<std::int64_t> samples;  // ids seen, sorted, once for each fragment; each should be seen once
  bool documents_apart = true;        // no document in a pack changes another one's logits or gradient
  std::vector<LayoutVerdict> layouts;
  MeshesTried meshes{};           // nothing tried: they were not asked for
  std::vector<Finding> findings;  // of the run and of all layouts, with their evidence
  std::vector<std::string>
      diagnosis;  // plain statements that follow from the numbers; empty when all is well
  double seconds = 0;
};

// Collective over `group`. Runs (a) the oracle: a plain-LibTorch step on rank 0 in fp64 that shares no
// normaliser, reducer, norm or cross-entropy code with the product (it does share the model's forward);
// (b) the same in the run's precision; (c) each layout in fp64, and twice in the run's precision.
// Rank 0's verdict is complete; the other ranks' has `passed`, `ranks` and `precision`. While one rank works
// alone the others wait in short collectives, so only a single micro-batch has to fit in the group's timeout.
// Throws ConfigError when the model has no trainable parameter or the step no target.
Verdict verify(const VerifyProblem& problem, Group& group);

const char* state_name(Grade::State state);  // "pass", "fail", "not claimed"
// {"verdict": "pass"|"fail", "grades": {...}, "parameters": [...], "diagnosis": [...], ...}
std::string to_json(const Verdict& verdict);
// "parity PASS: 2 ranks = 1 device; largest error 3.1e-13 of 1e-10 allowed (fp64, <parameter>); ..."
std::string parity_line(const Verdict& verdict);
// Worst first; parameters that pass are summarised beyond the first `rows`.
std::string to_text(const Verdict& verdict, std::size_t rows = 8);
// For a run's report; the summary is the parity line.
ReportTable to_table(const Verdict& verdict);

// verify for a model of one's own, on ranks that are threads of this process.

struct VerifyOptions {
  int ranks = 2;
  // The ranks' axes, the outermost first: {{"dp_shard", 2}, {"tp", 2}}, as many ranks as they make. Batches
  // are dealt along the data axes, and VerifyModel::cut gets the mesh. Not given: `ranks` that see different
  // data.
  std::vector<Axis> axes{};
  at::ScalarType dtype = at::kFloat;  // the run's precision
  StepOptions step{};
  DeclaredLoss loss{};
  MakeNormalizer make_normalizer{};  // of the loop under test; not given: the one of `loss`
  // Parameters are compared after so many updates of plain SGD and of `optimizer`. 0: only the first step's
  // gradient is seen.
  int updates = 2;
  OptimizerOptions optimizer = AdamWOptions{};
};

// A model under token cross entropy: named parameters, and a function of the batch that gives logits [T, V].
// `units`: what ZeRO-3 shards apart, the root being the whole model; not given: all parameters are one unit.
VerifyModel verify_model(std::vector<std::pair<std::string, at::Tensor>> named,
                         std::function<at::Tensor(const Batch&)> logits,
                         std::optional<ModelUnits> units = {});

// A module whose `logits(*module, batch)` gives them. Parameters may be drawn from any generator: all ranks
// take rank 0's. Under zero3 the whole module is one unit, also where members of it are Sharded: their own
// gathering is proven by the overload with blocks.
template <typename Module, typename Logits>
VerifyModel verify_model(std::shared_ptr<Module> module, Logits logits) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  VerifyModel model =
      verify_model(std::move(named), [module, logits](const Batch& batch) { return logits(*module, batch); });
  for (auto& item : module->named_buffers()) model.buffers.emplace_back(item.key(), item.value());
  return model;
}

// The same of a module whose blocks are Sharded: under zero3 they are gathered and freed one at a time, as in
// training. `blocks` in the order in which its forward calls them.
//
//   verify_model(isograd::Sharded<Model>(module), {module->blocks.begin(), module->blocks.end()}, logits)
template <typename Module, typename Logits>
VerifyModel verify_model(const Sharded<Module>& module, std::vector<UnitHandle> blocks, Logits logits) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  const auto whole = module.ptr();
  VerifyModel model = verify_model(
      std::move(named), [whole, logits](const Batch& batch) { return logits(*whole, batch); },
      ModelUnits{.root = module, .blocks = std::move(blocks)});
  for (auto& item : module->named_buffers()) model.buffers.emplace_back(item.key(), item.value());
  return model;
}

// A model in stages: a list of modules whose last one gives logits [T, V], made with all of them for the
// oracle and split over the ranks along pp (VerifyOptions::axes) for the layouts. Of the dtype that
// PipelineModelOptions say.
VerifyModel verify_model(PipelineModel model, const PipelineOptions& options);

// isograd's own strategies: naive, overlapped, bucketed, zero1, zero2, zero3. ConfigError on another name.
LayoutUnderTest verify_layout(const std::string& strategy);
std::vector<LayoutUnderTest> verify_layouts(const std::vector<std::string>& strategies);

// One step over `batches`, the whole of it: data rank r of W has batches r, r + W, ...; it may have none.
// Fill in sample_ids and sample_targets where the loss needs them. `make_model` is called on every rank, one
// at a time, and gets rank 0's parameters.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options = {});

// The same on ranks that are there already; collective over `world`. options.ranks is not looked at.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options, World& world);

}  // namespace isograd
