#include "isograd/verify.hpp"

#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "isograd/error.hpp"
#include "verify/compare.hpp"
#include "verify/digest.hpp"
#include "verify/oracle.hpp"
#include "verify/statements.hpp"
#include "verify/turns.hpp"

namespace isograd {
namespace {

// Takes the step's gradient and clip coefficient as they reach an optimizer, and moves nothing: the next step
// starts from the same parameters.
class Witness : public Optimizer {
 public:
  void update(std::vector<Bucket>&, double gradient_scale) override { gradient_scale_ = gradient_scale; }
  void set_learning_rate(double) override {}
  double learning_rate() const override { return 0; }
  std::int64_t updates() const override { return 0; }
  OptimizerState state(const std::vector<Bucket>&) override { return {}; }
  void set_updates(std::int64_t) override {}
  double gradient_scale() const { return gradient_scale_; }

 private:
  double gradient_scale_ = 1;
};

// The parameters that every run starts from, in the run's precision.
struct Initial {
  std::vector<std::string> names;
  std::vector<at::Tensor> values;
  std::vector<bool> trainable;

  explicit Initial(const VerifyModel& model) {
    for (const auto& [name, tensor] : model.named) {
      names.push_back(name);
      values.push_back(tensor.detach().clone());
      trainable.push_back(tensor.requires_grad());
    }
  }

  VerifyModel model(const VerifyProblem& problem, at::ScalarType dtype) const {
    VerifyModel made = problem.make_model(dtype);
    at::NoGradGuard no_grad;
    ISOGRAD_INVARIANT(made.named.size() == values.size(),
                      "another number of parameters in another precision");
    for (std::size_t i = 0; i < values.size(); ++i) made.named[i].second.copy_(values[i]);
    return made;
  }
};

// A layout's step on this rank's part of the batch.
struct Made {
  StepFigures figures;
  std::vector<std::string> names;
  std::vector<at::Tensor> gradients;  // copies, as the step left them
};

std::unique_ptr<Normalizer> declared_normalizer(const DeclaredLoss& loss, int ranks) {
  const NormalizerOptions options{.replicas = loss.replicas ? ranks : 1};
  switch (loss.mean) {
    case Mean::kSamples:
      return std::make_unique<SampleMean>(options);
    case Mean::kWeights:
      return std::make_unique<WeightedMean>(options);
    case Mean::kFixed:
      return std::make_unique<FixedDenominator>(loss.denominator, options);
    case Mean::kNone:
      return std::make_unique<NoDenominator>(options);
    default:
      return std::make_unique<TokenMean>(options);
  }
}

class LayoutRun {
 public:
  LayoutRun(const VerifyProblem& problem, const LayoutUnderTest& layout, VerifyModel model, Group& group)
      : problem_(problem),
        model_(std::move(model)),
        normalizer_(problem.make_normalizer ? problem.make_normalizer()
                                            : declared_normalizer(problem.loss, group.size())),
        layout_(layout.make_from_model ? layout.make_from_model(model_, group)
                                       : layout.make(trainable_parameters(model_.named), group)),
        step_(model_.loss_terms, *layout_, *normalizer_, witness_, problem.step) {}

  Made step() {
    const StepReport report = step_(problem_.local);
    Made made;
    made.figures = {report.loss, report.census.targets, report.census.tokens, report.norm,
                    report.updated ? witness_.gradient_scale() : report.clip_coefficient};
    for (const auto& view : layout_->views()) {
      made.names.push_back(view.name);
      made.gradients.push_back(view.gradient.detach().clone());
    }
    return made;
  }

 private:
  const VerifyProblem& problem_;
  VerifyModel model_;
  std::unique_ptr<Normalizer> normalizer_;
  std::unique_ptr<DataParallel> layout_;
  Witness witness_;
  Step step_;
};

// What rank 0 compares with; empty on the other ranks.
struct Reference {
  OracleStep oracle;                // fp64
  std::vector<double> scales;       // s of each parameter
  std::vector<double> alone_error;  // ‖g32 − g64‖ / s of one process in the run's precision
  std::uint64_t whole_digest = 0;
};

std::vector<MicroBatches> parts(const VerifyProblem& problem, MicroBatches whole) {
  if (problem.loss.replicas) return problem.loss.replicas();
  return {std::move(whole)};
}

// Rank 0 makes the oracle's step while the last rank makes the one in the run's precision.
Reference make_reference(const VerifyProblem& problem, const Initial& initial, Group& group) {
  Reference reference;
  Turns turns(group);
  const auto tick = [&turns] { turns.tick(); };
  const int last = group.size() - 1;
  const bool rounds = problem.dtype != at::kDouble;
  OracleStep alone;
  if (group.rank() == 0) {
    const MicroBatches whole = problem.whole();
    reference.whole_digest = digest(whole);
    reference.oracle = oracle_step(initial.model(problem, at::kDouble), parts(problem, whole), problem.loss,
                                   problem.step.max_norm, tick);
    reference.scales = error_scales(reference.oracle.gradients);
  }
  if (group.rank() == last && rounds)
    alone = oracle_step(initial.model(problem, problem.dtype),
                        parts(problem, problem.alone ? problem.alone() : problem.whole()), problem.loss,
                        problem.step.max_norm, tick);
  turns.finish();

  for (std::size_t i = 0, next = 0; i < initial.values.size(); ++i) {
    if (!initial.trainable[i]) continue;
    double error = 0;
    if (rounds) {
      at::Tensor gradient =
          group.rank() == last ? alone.gradients[next] : at::empty(initial.values[i].sizes(), at::kFloat);
      group.broadcast(gradient, last);
      if (group.rank() == 0)
        error = relative_error(gradient.to(at::kDouble), reference.oracle.gradients[next],
                               reference.scales[next]);
    }
    reference.alone_error.push_back(error);
    ++next;
  }
  return reference;
}

bool names_agree(const Made& made, const OracleStep& oracle, const std::string& layout,
                 std::vector<std::string>& diagnosis) {
  if (made.names == oracle.names) return true;
  for (std::size_t i = 0; i < std::max(made.names.size(), oracle.names.size()); ++i) {
    const std::string found = i < made.names.size() ? made.names[i] : "nothing";
    const std::string expected = i < oracle.names.size() ? oracle.names[i] : "nothing";
    if (found == expected) continue;
    diagnosis.push_back(
        fmt::format("{}: the layout's parameter {} is {}, the model's is {}", layout, i, found, expected));
    break;
  }
  return false;
}

LayoutVerdict try_layout(const VerifyProblem& problem, const LayoutUnderTest& layout, const Initial& initial,
                         const Reference& reference, Group& group, Verdict& verdict) {
  const bool exact_run = problem.dtype == at::kDouble;
  const bool reports = group.rank() == 0;
  LayoutVerdict result;
  result.name = layout.name;
  at::Tensor most = at::full({1}, static_cast<std::int64_t>(problem.local.size()), at::kLong);
  group.all_reduce(most, ReduceOp::kMax);
  const Bounds bounds = bounds_for(problem.dtype, group.size(), most.item<std::int64_t>());

  LayoutRun exact(problem, layout, initial.model(problem, at::kDouble), group);
  const Made in_fp64 = exact.step();
  // In fp64 the same layout is asked twice; otherwise the run's own precision is.
  std::optional<LayoutRun> run;
  if (!exact_run) run.emplace(problem, layout, initial.model(problem, problem.dtype), group);
  LayoutRun& repeated = exact_run ? exact : *run;
  const Made first = exact_run ? in_fp64 : repeated.step();
  const at::Tensor bits = digest(first.gradients);
  const Made second = repeated.step();
  const at::Tensor again = digest(second.gradients);

  std::vector<std::size_t> torn = differing_over_ranks(bits, group);
  for (auto i : differing_over_ranks(digest(in_fp64.gradients), group)) torn.push_back(i);
  at::Tensor repeats = bits.eq(again).to(at::kLong);
  group.all_reduce(repeats, ReduceOp::kMin);
  if (!reports) return result;

  if (names_agree(in_fp64, reference.oracle, layout.name, verdict.diagnosis)) {
    for (std::size_t i = 0; i < in_fp64.names.size(); ++i) {
      const at::Tensor& wanted = reference.oracle.gradients[i];
      ParameterVerdict parameter;
      parameter.name = in_fp64.names[i];
      parameter.elements = wanted.numel();
      parameter.norm = wanted.norm().item<double>();
      parameter.alone_error = reference.alone_error[i];
      parameter.exact = compare_exact(in_fp64.gradients[i], wanted, reference.scales[i], bounds);
      parameter.rounded = compare_rounded(first.gradients[i].to(at::kDouble), wanted, reference.scales[i],
                                          reference.alone_error[i], bounds);
      parameter.replicas_agree = std::find(torn.begin(), torn.end(), i) == torn.end();
      parameter.repeats = repeats[static_cast<std::int64_t>(i)].item<std::int64_t>() != 0;
      result.parameters.push_back(std::move(parameter));
    }
  }
  result.exact = in_fp64.figures;
  result.rounded = first.figures;
  grade(result, reference.oracle.figures, precision_name(problem.dtype), exact_run, bounds);
  result.passed = result.passed && !result.parameters.empty();
  for (auto& statement : diagnose(result, reference.oracle.figures, group.size()))
    verdict.diagnosis.push_back(problem.layouts.size() > 1 ? layout.name + ": " + statement : statement);
  return result;
}

void check(const VerifyProblem& problem, const Initial& initial, Group& group) {
  const auto refuse = [](const char* where, std::string found, const char* expected, const char* action) {
    throw ConfigError({.where = where, .found = std::move(found), .expected = expected, .action = action});
  };
  if (problem.layouts.empty())
    refuse("verify", "no layout", "at least one", "Name a layout to compare with one process");
  if (std::find(initial.trainable.begin(), initial.trainable.end(), true) == initial.trainable.end())
    refuse("verify", "a model without trainable parameters", "at least one",
           "Unfreeze what is to be trained");
  std::int64_t local = 0;
  for (const auto& batch : problem.local) local += batch.num_targets();
  at::Tensor targets = at::full({1}, local, at::kLong);
  group.all_reduce(targets);
  if (targets.item<std::int64_t>() == 0)
    refuse("verify", "a step without a valid target on any rank", "at least one",
           "Choose another step to verify");
}

}  // namespace

std::string DeclaredLoss::text() const {
  const std::string kind = mean == Mean::kSamples   ? "sample mean"
                           : mean == Mean::kWeights ? "weighted mean"
                           : mean == Mean::kFixed   ? fmt::format("sum divided by {:g}", denominator)
                           : mean == Mean::kNone    ? "sum"
                                                    : "token mean";
  return replicas ? "mean of per-replica " + kind + "s, which depends on the layout" : kind;
}

Verdict verify(const VerifyProblem& problem, Group& group) {
  const auto start = std::chrono::steady_clock::now();
  Verdict verdict;
  verdict.ranks = group.size();
  verdict.precision = precision_name(problem.dtype);
  verdict.loss = problem.loss.text();
  const Initial initial(problem.make_model(problem.dtype));
  check(problem, initial, group);

  // A layout would refuse unequal ranks; said here first, it becomes part of the verdict.
  const auto differing = differing_over_ranks(digest(initial.values), group);
  verdict.parameters_agree = differing.empty();
  if (!differing.empty()) {
    verdict.diagnosis.push_back(
        fmt::format("{} of {} parameters differ over the ranks before the step, first {}: "
                    "nothing else was compared",
                    differing.size(), initial.names.size(), initial.names[differing[0]]));
    return verdict;
  }

  const Reference reference = make_reference(problem, initial, group);
  const std::uint64_t seen = digest_over_ranks(problem.local, group);
  if (group.rank() == 0) {
    verdict.oracle = reference.oracle.figures;
    verdict.batch_agrees = seen == reference.whole_digest;
    if (!verdict.batch_agrees)
      verdict.diagnosis.push_back(
          "the ranks together did not see every token of the whole step exactly once");
  }
  bool passed = verdict.batch_agrees;
  for (const auto& layout : problem.layouts) {
    verdict.layouts.push_back(try_layout(problem, layout, initial, reference, group, verdict));
    passed = passed && verdict.layouts.back().passed;
  }
  at::Tensor answer = at::full({1}, passed ? 1 : 0, at::kLong);
  group.broadcast(answer, 0);
  verdict.passed = answer.item<std::int64_t>() != 0;
  verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return verdict;
}

}  // namespace isograd
