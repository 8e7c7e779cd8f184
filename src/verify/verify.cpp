#include "isograd/verify.hpp"

#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "isograd/error.hpp"
#include "verify/bad_input.hpp"
#include "verify/compare.hpp"
#include "verify/compared_step.hpp"
#include "verify/digest.hpp"
#include "verify/heartbeat.hpp"
#include "verify/investigate.hpp"
#include "verify/plain_findings.hpp"
#include "verify/reference.hpp"
#include "verify/replayed_choices.hpp"
#include "verify/resolution.hpp"
#include "verify/rounding.hpp"
#include "verify/take_dumps.hpp"

namespace isograd {

const char* VerifyStopped::what() const noexcept {
  return "the proof was stopped before its end: nothing is proved";
}

namespace {

// Before a step of all ranks.
void stop_if_told(const VerifyProblem& problem, Group& group) {
  if (problem.stop) Heartbeat(group, problem.stop).tick();
}

// Parameters after some updates, against the oracle's. The gradient as the first plain one applied it goes
// into `applied`. Collective; the result is rank 0's.
std::vector<Trajectory> follow(const VerifyProblem& problem, const LayoutUnderTest& layout,
                               const Initial& initial, const Reference& reference, Group& group,
                               StepDump::Named& applied) {
  std::vector<Trajectory> trajectories;
  for (const auto& [options, updates] : paths(problem)) {
    const auto index = trajectories.size();
    const auto* plain = std::get_if<SgdOptions>(&options);
    LayoutRun run(problem, layout, initial.model(problem, at::kDouble), group,
                  plain ? sgd(*plain) : adamw(std::get<AdamWOptions>(options)));
    const auto start = run.parameters();
    Trajectory trajectory{.optimizer = !plain       ? "AdamW"
                                       : index == 0 ? "SGD"
                                                    : "the configured SGD",
                          .updates = updates,
                          .worst = {},
                          .error = 0};
    for (int i = 0; i < updates; ++i) {
      stop_if_told(problem, group);
      const auto made = run.step(problem.local);
      if (i > 0 || index > 0) continue;
      const auto now = run.parameters();
      for (std::size_t p = 0; p < now.size(); ++p)
        applied.emplace_back(made.names[p], (start[p] - now[p]) / kPlainSgd.learning_rate);
    }
    const auto found = run.parameters();
    if (group.rank() == 0) {
      const OracleUpdates& wanted = reference.updates[index];
      double share = -1;
      for (std::size_t p = 0; p < std::min(found.size(), wanted.parameters.size()); ++p) {
        const double moved = wanted.moved[p], allowed = wanted.allowed[p] + 1e-300;
        const double error = (found[p] - wanted.parameters[p]).norm().item<double>();
        // The parameter itself is only known to its last bit.
        const double rounding = updates * 0x1p-52 * wanted.parameters[p].norm().item<double>();
        const double used = error / (allowed + rounding);
        trajectory.passed = trajectory.passed && std::isfinite(error) && used <= 1;  // not for NaN
        if (!(used > share)) continue;
        share = used;
        trajectory.worst = reference.oracle.names[p];
        trajectory.error = moved > 0 ? error / moved : error;
        trajectory.allowed = moved > 0 ? (allowed + rounding) / moved : allowed;
      }
    }
    trajectories.push_back(std::move(trajectory));
  }
  return trajectories;
}

LayoutVerdict try_layout(const VerifyProblem& problem, const LayoutUnderTest& layout, const Initial& initial,
                         const Reference& reference, StepDump found, Group& group) {
  const bool exact_run = problem.dtype == at::kDouble;
  LayoutVerdict result;
  result.name = layout.name;
  at::Tensor most = at::full({1}, static_cast<std::int64_t>(problem.local.size()), at::kLong);
  group.all_reduce(most, ReduceOp::kMax);
  const Bounds bounds = bounds_for(problem.dtype, group.size(), most.item<std::int64_t>());

  const auto run_in = [&](at::ScalarType dtype) {
    return problem.living && dtype == problem.dtype
               ? std::make_unique<LayoutRun>(problem, group)
               : std::make_unique<LayoutRun>(problem, layout, initial.model(problem, dtype), group);
  };
  const auto fp64_run = run_in(at::kDouble);
  LayoutRun& exact = *fp64_run;
  const auto needed = [&]() -> std::pair<double, double> {
    if (!layout.traffic) return {0, 0};
    return layout.traffic(exact.layout(), most.item<std::int64_t>(), at::kDouble);
  };
  const double before = needed().first;  // a step may end with other buckets than it began with
  stop_if_told(problem, group);
  const LayoutRun::RecordedStep in_fp64 = exact.step(problem.local);
  Investigation investigation(problem, layout, initial, exact, group);
  investigation.describe(in_fp64, found);
  result.bytes_moved = in_fp64.bytes_moved;
  const auto [padded, least] = needed();
  result.bytes_needed = std::clamp(result.bytes_moved, least, std::max(before, padded));
  WholeScale whole;
  {
    // In fp64 the same layout is asked twice; otherwise the run's own precision is.
    std::unique_ptr<LayoutRun> run;
    if (!exact_run) run = run_in(problem.dtype);
    const bool replays = initial.choices && !exact_run;
    if (replays) {
      if (problem.living && problem.living->choose_experts)
        problem.living->choose_experts(initial.choices->replay());
      initial.choices->take(problem.counting(group));
    }
    LayoutRun& repeated = exact_run ? exact : *run;
    stop_if_told(problem, group);
    const LayoutRun::RecordedStep first = exact_run ? in_fp64 : repeated.step(problem.local);
    const at::Tensor bits = digest(first.gradients);
    stop_if_told(problem, group);
    const LayoutRun::RecordedStep second = repeated.step(problem.local);
    if (replays) {
      result.choices = initial.choices->take(problem.counting(group));
      if (problem.living && problem.living->choose_experts) problem.living->choose_experts({});
    }
    std::vector<std::size_t> torn = differing_over_ranks(bits, group);
    for (auto i : differing_over_ranks(digest(in_fp64.gradients), group)) torn.push_back(i);
    at::Tensor repeats = bits.eq(digest(second.gradients)).to(at::kLong);
    group.all_reduce(repeats, ReduceOp::kMin);
    result.exact = in_fp64.figures;
    result.rounded = first.figures;
    if (group.rank() == 0) take_layout(problem, layout.name, found, first.gradients, first.figures);
    Doubtful doubtful;
    std::vector<std::pair<std::size_t, std::size_t>>
        doubted;                // places in result.parameters, in first.gradients
    Tensors rounded, expected;  // of the parameters that can be compared
    for (std::size_t i = 0; group.rank() == 0 && i < in_fp64.names.size(); ++i) {
      const auto& names = reference.oracle.names;
      const auto match = std::find(names.begin(), names.end(), in_fp64.names[i]);
      if (match == names.end()) continue;
      const auto place = static_cast<std::size_t>(match - names.begin());
      const at::Tensor& wanted = reference.oracle.gradients[place];
      if (wanted.sizes() != in_fp64.gradients[i].sizes()) continue;
      const double scale = reference.scales[place], alone = reference.alone_error[place];
      ParameterVerdict parameter;
      parameter.name = in_fp64.names[i];
      parameter.elements = wanted.numel();
      parameter.norm = wanted.norm().item<double>();
      parameter.by_floor = held_to_floor(parameter.norm, scale);
      parameter.alone_error = alone;
      rounded.push_back(first.gradients[i].to(at::kDouble));
      expected.push_back(wanted);
      parameter.exact = compare_exact(in_fp64.gradients[i], wanted, scale, bounds);
      parameter.rounded = compare_rounded(rounded.back(), wanted, scale, alone, bounds);
      if (!exact_run && parameter.exact.passed && !parameter.rounded.passed) {
        doubtful.places.push_back(place);
        doubtful.wanted.push_back(error_that_allows(parameter.rounded.error, bounds));
        doubted.emplace_back(result.parameters.size(), i);
      }
      parameter.replicas_agree = std::find(torn.begin(), torn.end(), i) == torn.end();
      parameter.repeats = repeats[static_cast<std::int64_t>(i)].item<std::int64_t>() != 0;
      parameter.checksum =
          static_cast<std::uint64_t>(bits[static_cast<std::int64_t>(i)].item<std::int64_t>());
      if (i < found.owners.size()) std::tie(parameter.owners_least, parameter.owners_most) = found.owners[i];
      result.parameters.push_back(std::move(parameter));
    }
    const auto measured = measure_rounding(problem, initial, reference.scales, doubtful, group);
    for (std::size_t d = 0; d < doubted.size() && d < measured.size(); ++d) {
      ParameterVerdict& parameter = result.parameters[doubted[d].first];
      const std::size_t place = doubtful.places[d];
      parameter.alone_error = std::fmax(parameter.alone_error, measured[d]);
      parameter.rounded = compare_rounded(first.gradients[doubted[d].second].to(at::kDouble),
                                          reference.oracle.gradients[place], reference.scales[place],
                                          parameter.alone_error, bounds);
    }
    if (group.rank() == 0 && !exact_run) {
      whole = test_scale(rounded, expected, bounds.unit, reference.alone_scale);
      result.rounded_off =
          figures_off(first.figures, reference.oracle.figures, reference.alone_figures, bounds);
    }
  }
  const auto torn_buffers = exact.differing_buffers();
  result.trajectories = follow(problem, layout, initial, reference, group, found.applied);
  if (group.rank() == 0) {
    grade(result, reference.oracle.figures, precision_name(problem.dtype), exact_run, bounds, whole);
    result.passed = is_whole(result) && in_fp64.names == reference.oracle.names;
  }

  // Rank 0 diagnoses; a failure is run again in other circumstances, by all.
  StepDump expected;
  if (group.rank() == 0)
    expected = dump_of(reference.oracle, initial, found, samples_of(reference.whole), result.bytes_needed);
  if (group.rank() == 0 && layout.name == problem.layouts[0].name)
    take_reference(problem, expected, reference.alone);
  result.findings = investigation.diagnose({std::move(found), std::move(expected)}, !result.passed);
  if (group.rank() == 0) {
    if (!result.passed) add_plain_findings(result, precision_name(problem.dtype), problem.living.has_value());
    if (problem.loss.global)
      for (Finding& finding : result.findings)
        if (finding.id == "averaged_over_axis")
          finding.sentence += fmt::format(
              ". A loss over the rows of all ranks under an average of {} ranks' gradients, which must be "
              "summed "
              "(or the loss told so: grad_reduction = mean)",
              group.size());
    if (result.passed && result.findings.empty()) {
      // E1 finds small mistakes of the arithmetic; within rounding no gradient may be lost without a sign.
      auto coarse =
          diagnose_resolution(result.parameters, result.e1, true, "Verify a step with a larger gradient");
      if (!coarse && !exact_run)
        coarse = diagnose_resolution(result.parameters, result.e2, false,
                                     "Rounding in the run's precision hides it: verify in fp32 or fp64", 1.0);
      if (coarse) result.findings.push_back(std::move(*coarse));
    }
    const StepFigures& oracle = reference.oracle.figures;
    if (!unclipped_norms_agree(result.exact, oracle, bounds) && result.findings.empty())
      result.findings.push_back(
          {"norm_differs",
           fmt::format("the gradient is right, the norm before the clip of groups is {:.9g}, "
                       "expected {:.9g}",
                       result.exact.unclipped_norm, oracle.unclipped_norm),
           {}});
    if (!result.passed && result.findings.empty())
      result.findings.push_back(
          {"unknown", "the step is not the expected one, in no way that has a name", {}});
    if (result.choices.wrong > 0)
      result.findings.push_back(
          {"other_experts",
           fmt::format(
               "in the run's precision {} of {} choices of experts are others than the oracle's, first "
               "in layer {}, although their logits are farther apart than rounding explains",
               result.choices.wrong, result.choices.tokens, result.choices.layer),
           {}});
    if (!torn_buffers.empty())
      result.findings.push_back({"buffers_differ",
                                 "forward changes buffers by each rank's own rows, so that the ranks' models "
                                 "differ: " +
                                     list_names(torn_buffers),
                                 {"after two steps, in fp64 or the run's precision"}});
    result.passed = result.passed && result.findings.empty();
  }
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
  problem.counting(group).all_reduce(targets);
  if (targets.item<std::int64_t>() == 0)
    refuse("verify", "a step without a valid target on any rank", "at least one",
           "Choose another step to verify");
}

}  // namespace

std::string DeclaredLoss::text() const {
  if (global) return name + " over the rows of all ranks";
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
  Initial initial(problem.make_model(problem.dtype));
  check(problem, initial, group);
  refuse_without_memory(problem, initial, group);
  const auto ends = [&](Finding finding) {
    verdict.diagnosis.push_back(finding.sentence);
    verdict.findings.push_back(std::move(finding));
    verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return verdict;
  };

  // A layout would refuse unequal ranks; said here first, it becomes part of the verdict.
  const auto differing = differing_over_ranks(digest(initial.values), group);
  verdict.parameters_agree = differing.empty();
  if (!differing.empty())
    return ends({"initial_parameters_differ",
                 fmt::format("{} of {} parameters differ over the ranks before the step, first {}: "
                             "nothing else was compared",
                             differing.size(), initial.names.size(), initial.names[differing[0]]),
                 {"initialisation depends on the rank or the layout"}});

  initial.choices = record_choices(problem, initial, group);
  const Reference reference = make_reference(problem, initial, group);
  at::Tensor random = at::full({1}, reference.random.empty() ? 0 : 1, at::kLong);
  group.broadcast(random, 0);
  if (random.item<std::int64_t>() != 0)
    return ends(
        {"random_model",
         "two runs of the model on the same data and parameters differ: nothing else is claimed. Draw "
         "random numbers by isograd::RandomKey (seed, step, sample, layer)",
         {reference.random}});

  Group counting = problem.counting(group);
  const std::uint64_t seen = digest_over_ranks(problem.local, counting);
  StepDump found;
  // Small next to the step: tokens, targets and lengths of all ranks.
  count_as_declared(gather_batches(problem.local, counting), problem.loss, found);
  found.samples = samples_over_ranks(problem.local, counting);
  verdict.samples = found.samples;
  bool passed = true;
  if (group.rank() == 0) {
    verdict.oracle = reference.oracle.figures;
    verdict.batch_agrees = seen == digest(reference.whole);
    passed = verdict.batch_agrees;
    if (reference.leak) {
      verdict.documents_apart = passed = false;
      verdict.findings.push_back({"documents_leak", "documents leak: " + reference.leak->text(), {}});
    }
  }
  for (const auto& layout : problem.layouts) {
    if (problem.progress && group.rank() == 0) problem.progress(layout.name);
    verdict.layouts.push_back(try_layout(problem, layout, initial, reference, found, group));
    passed = passed && verdict.layouts.back().passed;
    for (auto finding : verdict.layouts.back().findings) {
      if (problem.layouts.size() > 1) finding.sentence = layout.name + ": " + finding.sentence;
      verdict.findings.push_back(std::move(finding));
    }
  }
  if (group.rank() == 0 && !verdict.batch_agrees && verdict.findings.empty())
    verdict.findings.push_back(
        {"other_batch", "the ranks together did not see every token of the whole step exactly once", {}});
  for (const auto& finding : verdict.findings) verdict.diagnosis.push_back(finding.sentence);
  at::Tensor answer = at::full({1}, passed ? 1 : 0, at::kLong);
  group.broadcast(answer, 0);
  verdict.passed = answer.item<std::int64_t>() != 0;
  verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return verdict;
}

}  // namespace isograd
