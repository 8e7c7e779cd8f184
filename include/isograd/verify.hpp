// verify: proves that a layout's gradient is the one that one process computes on the whole batch.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
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

// Figures of a step, in addition to the gradient.
struct StepFigures {
  double loss = 0;
  std::int64_t targets = 0;
  std::int64_t tokens = 0;
  double norm = 0;  // of the whole gradient, before clipping
  double clip_coefficient = 1;
  // The norm before groups are clipped separately; `norm` and gradient are then those after it.
  double unclipped_norm = std::numeric_limits<double>::quiet_NaN();
};

inline constexpr std::int64_t kNotRecorded = -1;  // a count that was not recorded

// A diagnosis.
struct Finding {
  std::string id;                       // kind: "averaged_over_axis", "mean_of_rank_means", ..., "unknown"
  std::string sentence;                 // e.g. "all parameters scaled by 1/4: averaged over dp_shard (4)"
  std::vector<std::string> evidence{};  // what was run, and the numbers
  std::string which{};                  // of several causes under one id, which have changes of their own
};

// One optimizer step of any trainer. What was not recorded is empty, NaN or kNotRecorded, and nothing that
// needs it is claimed. Lists by parameter have the order of `gradients`.
struct StepDump {
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  // Whole (not sharded), summed over ranks and micro-batches, before clipping.
  Named gradients;
  StepFigures figures;
  std::vector<std::int64_t> samples;  // sorted ids of the samples; an id occurs as often as it was counted
  std::vector<std::vector<std::int64_t>> counts;  // [rank][micro-batch] targets that carry loss
  // [rank][micro-batch] what another mean counts: "samples" (also in fractions), "weights". Not in files.
  std::vector<std::vector<double>> amounts{};
  std::string counted{};
  std::vector<Axis> axes;  // {"dp_shard", 4}, ..., outermost first
  std::string precision;   // "fp64", "fp32", "bf16"

  std::vector<std::pair<std::string, double>> terms;  // each term of the loss, without its weight
  // Keys in step.json ("ranks.0.norm") of recorded figures that are NaN: any other NaN means not recorded.
  std::vector<std::string> not_numbers{};
  // The trainer's own factors that a gradient may have been multiplied by: {"learning_rate", 0.1}, ...
  std::vector<std::pair<std::string, double>> scales{};
  // The decrease of each parameter in one update of plain SGD with learning rate 1, after clipping.
  Named applied;
  // By parameter, on how many ranks an element counts in norms, at least and at most. Correct: 1 and 1.
  std::vector<std::pair<std::int64_t, std::int64_t>> owners;

  // By parameter, for a reference: the largest ‖g64(p + Δp) − g64(p)‖ of several Δp of the size of rounding,
  // which is allowed: large where the derivative of a loss jumps (ReLU). Empty: only the usual bound.
  std::vector<double> moves{};
  // By parameter, for one process in a lower precision: the largest distance of several runs from fp64.
  std::vector<double> rounding{};
  // The same two of the scale of the whole gradient, which a badly conditioned number may multiply: how far
  // <g, g64> / <g64, g64> is from 1. 0: not recorded.
  double scale_moves = 0, scale_rounding = 0;

  struct RankView {
    // xxHash of the bits of each parameter before the step, and of each gradient, on this rank.
    std::vector<std::uint64_t> initial, gradients;
    double spread = 0;  // largest ‖g − g of rank 0‖ / ‖g of rank 0‖ over the parameters
    double owned_norm = std::numeric_limits<double>::quiet_NaN();   // of the elements that this rank owns
    double norm = std::numeric_limits<double>::quiet_NaN();         // of the whole gradient, on this rank
    double bytes_moved = std::numeric_limits<double>::quiet_NaN();  // for the step
  };
  std::vector<RankView> ranks;

  // Parameters whose copies differ on ranks with the same batch: the sum over the ranks along `axes`.
  struct PeerSum {
    std::string name, axes;
    at::Tensor sum;
  };
  std::vector<PeerSum> peer_sums{};
  // Sharded parameters and their axis. Not written to files.
  struct CutParameter {
    std::string name;
    Axis axis;
  };
  std::vector<CutParameter> cut{};

  // Findings of the recorder itself, without evidence, e.g. a parameter that no optimizer holds.
  std::vector<Finding> findings{};

  // [rank][micro-batch] the part of `gradients` from these tokens, with which wrong weights are named.
  std::vector<std::vector<Named>> shares{};
};

// Writes a directory (docs/dump.md). Replaces an earlier dump; ConfigError for any other directory.
void write_dump(const StepDump& dump, const std::filesystem::path& directory);

// Reads tensors as fp64, in the recorded order, else by name. ConfigError names the file and the key.
StepDump read_dump(const std::filesystem::path& directory);

// ---- the problem ----

// A further term of the loss for the oracle: weight · Σ over the step of `sum` / what `mean` counts.
struct OracleTerm {
  std::string name;
  std::function<at::Tensor(const Batch&)> sum;  // scalar, differentiable
  Mean mean = Mean::kTargets;                   // kTargets, kTokens or kNone
  double weight = 1;
  // Called with the whole step before the first sum(), with the current parameters. Not given: not needed.
  std::function<void(const MicroBatches& whole)> prepare{};
};

// The oracle differentiates `logits`, the step under test `loss_terms`; both keep the model alive.
struct VerifyModel {
  std::vector<std::pair<std::string, at::Tensor>> named;  // parameters; tied ones by the first name
  std::function<at::Tensor(const Batch&)> logits;         // [T, V]
  ForwardLossTerms loss_terms;
  // For layouts that shard parameters: loss_terms runs inside units->root, its blocks inside their units.
  std::optional<ModelUnits> units{};
  std::vector<OracleTerm> more_terms{};   // in addition to the cross entropy of `logits`
  std::function<void()> without_noise{};  // turns dropout off, if there is any
  // Buffers that forward may change; ranks must change them equally.
  std::vector<std::pair<std::string, at::Tensor>> buffers{};
  // For layouts of model parallelism: replaces parameters by this rank's shards, as isograd::cut() does.
  std::function<Layout(const Mesh&)> cut{};
  std::shared_ptr<const Layout> placed{};  // result of `cut`; set before a layout under test is made
  // For pipelines, after `cut`: returns options of steps that go through the stages. Not given: unchanged.
  std::function<StepOptions(StepOptions options)> through{};
  // Returns StepOptions::look_ahead of steps that differentiate this forward. Not given: none.
  std::function<LookAhead(const ForwardLossTerms& forward)> look_ahead{};
  // For models with experts (DecoderLM::set_choice_of_experts): in the run's precision the oracle's choices
  // are replayed, because rounding may decide a near tie, and documents in a pack are compared within E1's
  // bound.
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
  // Bytes that this rank should send in a step of `rounds` micro-batches, with and without padding of flat
  // storage. {0, 0} or not given: not claimed.
  std::function<std::pair<double, double>(DataParallel& layout, std::int64_t rounds, at::ScalarType dtype)>
      traffic{};
  // The same step with all ranks along this axis and only this layout; null if impossible, on every rank.
  std::function<std::shared_ptr<VerifyProblem>(const std::string& axis)> along{};
};

// For context parallelism: this rank's part of shared micro-batches.
struct SharedSamples {
  MicroBatches whole;  // the micro-batches that this rank shares, before the split
  int data_rank = 0;   // ranks with the same number share them
  std::function<MicroBatches(const MicroBatches& whole)> cut;  // returns this rank's part of any such batches
};

// A loop that computes norms and clips by itself, instead of the step.
struct OwnClipping {
  std::function<double(std::vector<Bucket>& buckets, Group& group)> norm;
  // Factor of each bucket's gradient; not given: min(1, max_norm / (norm + 1e-6)).
  std::function<std::vector<double>(std::vector<Bucket>& buckets, double norm, double max_norm)>
      coefficients{};
};

using OptimizerOptions = std::variant<SgdOptions, AdamWOptions>;

// The declared loss of the run, as the oracle computes it with its own plain code.
struct DeclaredLoss {
  Mean mean = Mean::kTargets;  // kTargets, kSamples, kWeights, kFixed or kNone
  double denominator = 1;      // kFixed
  // For means of replicas' means: the step as the replicas see it. Rank 0. Not given: one mean over `whole`.
  std::function<std::vector<MicroBatches>()> replicas;

  // Terms of the cross entropy of logits [T, V], as in CrossEntropyOptions. Smoothing is that of
  // torch.nn.functional.cross_entropy.
  double label_smoothing = 0, z_loss = 0;

  // Plain loss of each token [T] from the model's outputs [T, ...], instead of the cross entropy of logits.
  std::function<at::Tensor(const Batch& batch, const at::Tensor& outputs)> per_token{};

  // Plain loss over the rows of one global micro-batch that is no sum over tokens; the step's is their mean.
  std::function<at::Tensor(const at::Tensor& logits, const at::Tensor& targets)> global{};
  std::string name{};  // human-readable, of per_token or global

  std::string text() const;  // "token mean", "mean of per-replica sample means", ...
};

// Receives rank 0's dumps: "oracle" and each layout in fp64, "alone" and "NAME, fp32" in lower precision.
using TakeDump = std::function<void(const std::string& name, const StepDump& dump)>;

// One step to prove. Each rank fills in its own.
struct VerifyProblem {
  // Makes a fresh model. Values of `dtype` are copied into fp64 models, so that all begin alike.
  MakeVerifyModel make_model;
  MicroBatches local;  // this rank's part of the step; may be empty
  std::optional<SharedSamples>
      shared_samples{};                 // how `local` was split; without it, only the given split is run
  std::function<MicroBatches()> whole;  // the whole step, for the oracle; called on rank 0
  std::function<MicroBatches()> alone;  // in one process's micro-batches; last rank; not given: `whole`
  at::ScalarType dtype = at::kFloat;    // the run's precision
  StepOptions step;
  // Groups to clip separately; step.max_norm is the limit of the others. Gradients are compared after that.
  std::vector<ClipGroup> clip_groups{};
  std::vector<LayoutUnderTest> layouts;
  DeclaredLoss loss;
  // Normaliser of the step under test; not given: the one that `loss` names.
  MakeNormalizer make_normalizer;

  std::optional<OwnClipping> clipping{};
  // Updates in fp64, of plain SGD and of `optimizer`, after which parameters are compared. 0: they are not.
  int updates = 2;
  OptimizerOptions optimizer = AdamWOptions{};
  // Wraps the optimizers of the run under test.
  std::function<std::unique_ptr<Optimizer>(std::unique_ptr<Optimizer>)> wrap_optimizer{};

  std::int64_t memory_bytes = 0;  // limit of the oracle; 0: the machine's free memory
  bool probe_documents = true;    // looks for leaks between documents in rank 0's first pack of several
  bool experiments = true;        // repeats a failed step in other circumstances to find the cause
  std::function<MicroBatches()> uninterrupted{};  // `local` of a run that was not resumed
  TakeDump take_dump{};
  // Called between micro-batches, on all ranks or none. True on any: verify() throws VerifyStopped on all.
  std::function<bool()> stop{};
  // Called on rank 0 with the name of each layout that begins.
  std::function<void(const std::string& layout)> progress{};
  // For a live run: its own layout and forward make the step in the run's precision; nothing is updated.
  struct LiveRun {
    DataParallel* layout;
    ForwardLossTerms forward;
    const Layout* placed = nullptr;                           // for model parallelism
    LookAhead look_ahead{};                                   // of the run's steps
    std::vector<std::pair<std::string, at::Tensor>> named{};  // with pipeline stages: this rank's parameters
    std::function<void(const DecoderLM::ChooseExperts& choose)> choose_experts{};  // of its model
    std::function<StepOptions(StepOptions options)> through{};                     // VerifyModel::through
  };
  std::optional<LiveRun> live_run{};
  // Needed where ranks along some axes hold the same batch. Not given: every rank has different data.
  std::optional<Mesh> mesh{};
  Group counting(const Group& all) const { return mesh ? mesh->counting() : all; }
  // Makes the group of these ranks, for experiments on fewer; collective over them.
  std::function<Group(const std::vector<int>&)> subgroup{};
};

// g and the reference g64 of one parameter. s = max(‖g64‖, 1e-3 · RMS · √numel), RMS over all parameters.
struct Comparison {
  double ratio = 0;     // ρ = ⟨g, g64⟩ / ⟨g64, g64⟩; NaN where g64 is exactly zero
  double cosine = 0;    // NaN where either is exactly zero
  double error = 0;     // ‖g − g64‖ / s
  double allowed = 0;   // in the same unit
  double residual = 0;  // ‖g − ρ g64‖ / s: not explained by a scale
  // Smallest error of this parameter's scale that would not pass; from 1 on, a lost gradient would pass.
  double scale_found = 0;
  bool passed = false;
};

// Scale of a whole gradient, from a fit over all parameters in which rounding averages out.
struct WholeScale {
  bool tested = false;
  double error = 0;       // 0: equal to the reference
  double allowed = 0;     // 4 (u + the fit's standard error), or more by what one process is off; u is the
                          // unit round-off of the run's precision
  double found_from = 0;  // smallest scale error common to all parameters that would not pass
  bool passed = true;
};

struct ParameterVerdict {
  std::string name;
  std::int64_t elements = 0;
  double norm = 0;             // ‖g64‖
  bool by_floor = false;       // s is the floor 1e-3 · RMS · √numel, not this norm
  double alone_error = 0;      // ‖g32 − g64‖ / s of one process in the run's precision
  Comparison exact;            // E1: the layout in fp64
  Comparison rounded;          // E2: the layout in the run's precision
  bool replicas_agree = true;  // same bits on every rank, in both precisions
  bool repeats = true;         // E3: same bits when the step is repeated
  // In fp64, how many ranks count an element in norms, at least and at most. Correct: 1 and 1.
  std::int64_t owners_least = 1, owners_most = 1;
  std::uint64_t checksum = 0;  // xxHash of rank 0's gradient in the run's precision
};

// Parameters after some updates in fp64, compared with the oracle's.
struct Trajectory {
  std::string optimizer;  // "SGD", "AdamW"
  int updates = 0;
  std::string worst;  // parameter with the largest error / allowed error
  double error = 0;   // ‖p − p64‖ / ‖p64 − p0‖
  double allowed = 0;
  bool passed = true;
};

struct Grade {
  enum class State { kPassed, kFailed, kNotClaimed } state = State::kNotClaimed;
  std::string bound;              // in words, with its source
  std::string worst;              // parameter with the largest error / allowed error
  double error = 0, allowed = 0;  // of that parameter
  std::int64_t failed = 0;        // parameters outside their bound
  WholeScale scale{};             // E2 only
  // Smallest errors of scale that would be found: in all parameters together, in any single one (and which).
  double uniform_found = 0, single_found = 0;
  std::string single_least{};
  // Parameters whose gradient is below the floor of s; those of them whose complete loss would not be seen.
  std::vector<std::string> by_floor{}, unseen{};
};

// A figure that differs from the oracle's.
struct OtherFigure {
  std::string name;  // "loss", "norm", "unclipped_norm", "clip_coefficient", "targets", "tokens"
  double found = 0, expected = 0;
  double allowed = 0;  // of |found - expected|
};

struct LayoutVerdict {
  std::string name;
  std::vector<ParameterVerdict> parameters;  // in the model's order
  StepFigures exact, rounded;
  std::vector<OtherFigure> rounded_off{};  // E2: figures of `rounded` that rounding does not explain
  bool figures_agree = false;  // fp64: counts equal, loss, norm and clip coefficient to 1e-10 relative
  Grade e1, e2, e3;
  std::vector<Trajectory> trajectories;
  double bytes_moved = 0;   // by rank 0 in the fp64 step, for gradients and parameters
  double bytes_needed = 0;  // 0: not claimed
  // Choices of experts for tokens in the run's precision, over all ranks and layers.
  struct Choices {
    std::int64_t tokens = 0;   // times layers; 0: no experts, or a run in fp64
    std::int64_t flipped = 0;  // the run chose differently from the oracle, whose choices were replayed
    std::int64_t wrong = 0;    // of these, not explained by rounding
    std::int64_t layer = -1;   // first layer with a wrong one
    double margin = 0;  // largest difference of logits that rounding decided, relative to the allowed one
  } choices;
  std::vector<Finding> findings;  // most informative first
  bool passed = false;
};

// Meshes of these ranks that were proved for this model and batch (`isograd verify --layout all`).
struct MeshesTried {
  struct One {
    std::string name;        // "tp 2 x dp_shard 2"
    std::vector<Axis> axes;  // of more than one rank
    std::int64_t layouts = 0, failed = 0;
    std::string finding{};  // diagnosis of the first layout that failed
  };
  std::vector<One> tried;
  std::int64_t admissible = 0;      // meshes that the configuration and the model allow on these ranks
  std::vector<std::string> left{};  // admissible ones that were not run: `tried` covers their pairs of axes
  std::vector<std::string> refused{};  // reasons why others are not admissible, each once
  // Sentences that name the axis, or the combination of axes, that fails. Empty: none.
  std::vector<std::string> guilty{};
};

// VerifyProblem::stop ended verify() on every rank: there is no verdict.
struct VerifyStopped : std::exception {
  const char* what() const noexcept override;
};

struct Verdict {
  bool passed = false;
  int ranks = 1;
  std::string precision;  // "fp32", ...
  std::string loss;       // the declared loss: DeclaredLoss::text()
  StepFigures oracle;
  bool parameters_agree = false;      // initial values are equal on all ranks
  bool batch_agrees = false;          // the ranks together saw every token of the whole step exactly once
  std::vector<std::int64_t> samples;  // sorted ids, once per fragment; each should be seen once
  bool documents_apart = true;        // no document in a pack changes another one's logits or gradient
  std::vector<LayoutVerdict> layouts;
  MeshesTried meshes{};                // empty: not requested
  std::vector<Finding> findings;       // of the run and of all layouts, with their evidence
  std::vector<std::string> diagnosis;  // statements that follow from the numbers; empty: no problem
  double seconds = 0;
};

// Collective. Runs (a) the oracle, a plain-LibTorch step on rank 0 in fp64 that shares the model's forward
// and nothing else; (b) the same in the run's precision; (c) each layout in fp64, and twice in the run's
// precision. Rank 0's verdict is complete. One micro-batch of one process must fit in the group's timeout.
// ConfigError when the model has no trainable parameter or the step no target.
Verdict verify(const VerifyProblem& problem, Group& group);

const char* state_name(Grade::State state);  // "pass", "fail", "not claimed"
// {"verdict": "pass"|"fail", "grades": {...}, "parameters": [...], "diagnosis": [...], ...}
std::string to_json(const Verdict& verdict);
// "parity PASS: 2 ranks = 1 device under bucketed, zero3; worst error 3.1e-13 of 1e-10 allowed (fp64, ...)".
// A FAIL names the layouts that failed.
std::string parity_line(const Verdict& verdict);
// Worst parameters first; beyond the first `rows`, parameters that pass are summarised.
std::string to_text(const Verdict& verdict, std::size_t rows = 8);
// Table for a run's report; its summary is the parity line.
ReportTable to_table(const Verdict& verdict);

// ---- models of one's own, on ranks that are threads of this process ----

struct VerifyOptions {
  int ranks = 2;
  // Axes of the ranks, outermost first, {{"dp_shard", 2}, {"tp", 2}}: batches are assigned along the data
  // axes and VerifyModel::cut gets the mesh. Not given: `ranks` with different data.
  std::vector<Axis> axes{};
  at::ScalarType dtype = at::kFloat;  // the run's precision
  StepOptions step{};
  DeclaredLoss loss{};
  MakeNormalizer make_normalizer{};  // of the loop under test; not given: the one that `loss` names
  int updates = 2;                   // VerifyProblem::updates
  OptimizerOptions optimizer = AdamWOptions{};
};

// A model under token cross entropy: named parameters, and a function that returns logits [T, V] of a batch.
// `units`: what ZeRO-3 shards separately; not given: all parameters are one unit.
VerifyModel verify_model(std::vector<std::pair<std::string, at::Tensor>> named,
                         std::function<at::Tensor(const Batch&)> logits,
                         std::optional<ModelUnits> units = {});

// A module; `logits(*module, batch)` returns its logits. All ranks take rank 0's values. One zero3 unit.
template <typename Module, typename Logits>
VerifyModel verify_model(std::shared_ptr<Module> module, Logits logits) {
  static_assert(std::is_invocable_r_v<at::Tensor, const Logits&, Module&, const Batch&>,
                "verify_model()'s argument 2 takes (Module&, const isograd::Batch&) and returns the logits, "
                "an at::Tensor [T, V]");
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  VerifyModel model =
      verify_model(std::move(named), [module, logits](const Batch& batch) { return logits(*module, batch); });
  for (auto& item : module->named_buffers()) model.buffers.emplace_back(item.key(), item.value());
  return model;
}

template <typename Module, typename Logits>
VerifyModel verify_model(const torch::nn::ModuleHolder<Module>& holder, Logits logits,
                         const std::source_location& call = std::source_location::current()) {
  if (holder.is_empty()) refuse_empty_module(call);
  return verify_model(holder.ptr(), std::move(logits));
}

// A module with Sharded blocks: under zero3 they are gathered and freed one at a time, as in training.
// `blocks` are in the order in which its forward calls them.
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

// A model in stages: a list of modules whose last one returns logits [T, V]. The oracle makes all of them;
// layouts split them over the ranks along pp (VerifyOptions::axes). The dtype is PipelineModelOptions'.
VerifyModel verify_model(PipelineModel model, const PipelineOptions& options);

// isograd's own strategies: naive, overlapped, bucketed, zero1, zero2, zero3. ConfigError on another name.
LayoutUnderTest verify_layout(const std::string& strategy);
std::vector<LayoutUnderTest> verify_layouts(const std::vector<std::string>& strategies);

// Proves one step over `batches`: data rank r of W has batches r, r + W, ..., possibly none. `make_model` is
// called on every rank, one at a time; all get rank 0's parameters.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options = {});

// As above on existing ranks; collective over `world`. options.ranks is ignored.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options, World& world);

}  // namespace isograd
