
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/refuse.hpp"
#include "model/safetensors.hpp"
#include "train/rank_zero.hpp"
#include "verify/experiments.hpp"
#include "verify/present.hpp"
#include "verify/reference.hpp"
#include "verify/replayed_choices.hpp"

namespace isograd {

const char* VerifyStopped::what() const noexcept {
  return "the proof was stopped before its end: nothing is proved";
}

namespace {

bool has(const LayoutVerdict& layout, const std::string& id) {
  return std::ranges::any_of(layout.findings, [&](const Finding& finding) { return finding.id == id; });
}

// Rank 0. A step in fp64 and, unless there are none, its gradients in the run's precision.
void take(const VerifyProblem& problem, const std::string& name, const StepDump& exact,
          const std::string& rounded_name, StepDump::Named rounded, const StepFigures& figures) {
  if (!problem.take_dump) return;
  problem.take_dump(name, exact);
  if (rounded.empty()) return;
  StepDump dump;  // with what is the same in any precision
  dump.samples = exact.samples;
  dump.counts = exact.counts;
  dump.axes = exact.axes;
  dump.precision = float_type(problem.dtype).precision;
  dump.figures = figures;
  dump.gradients = std::move(rounded);
  problem.take_dump(rounded_name, dump);
}

std::string text_of(const OtherFigure& other) {
  return fmt::format("{} {:.9g}, expected {:.9g} ({:.2g} allowed)", other.name, other.found, other.expected,
                     other.allowed);
}

// Adds figures that are off in the run's precision alone; a wrong norm makes a wrong coefficient: said once.
void add_other_figures(LayoutVerdict& layout, const std::string& precision) {
  for (const OtherFigure& other : layout.rounded_off) {
    const std::string id = other.name == "loss"               ? finding_id::loss_differs
                           : other.name.ends_with("norm")     ? finding_id::norm_differs
                           : other.name == "clip_coefficient" ? finding_id::clip_differs
                                                              : finding_id::other_targets;
    if (has(layout, id) || (id == finding_id::clip_differs && has(layout, finding_id::norm_differs)))
      continue;
    layout.findings.push_back(
        {id, fmt::format("right in fp64, but in {} another one is reported: {}", precision, text_of(other))});
  }
}

// Adds bits that differ from run to run or over ranks, rounding and updates where no finding says it already.
void add_plain_findings(LayoutVerdict& layout, const std::string& precision, bool from_live_run) {
  std::vector<std::string> rounding, replicas, repeats;
  for (const auto& parameter : layout.parameters) {
    if (parameter.exact.passed && layout.e2.state == Grade::State::kFailed && !parameter.rounded.passed)
      rounding.push_back(parameter.name);
    if (!parameter.replicas_agree) replicas.push_back(parameter.name);
    if (!parameter.repeats) repeats.push_back(parameter.name);
  }
  if (!repeats.empty() && !has(layout, finding_id::not_repeatable))
    layout.findings.insert(layout.findings.begin(),
                           {finding_id::not_repeatable,
                            "the same step made twice gives different bits: " + list_names(repeats),
                            {"in " + precision}});
  if (has(layout, finding_id::not_repeatable)) return;
  if (!replicas.empty() && layout.findings.empty())
    layout.findings.push_back({finding_id::replicas_differ,
                               "the ranks hold different gradients: " + list_names(replicas),
                               {"in " + precision}});
  const bool right_in_fp64 = layout.e1.state == Grade::State::kPassed;
  const bool off = !rounding.empty() || !layout.e2.scale.passed;
  if (from_live_run && right_in_fp64 && (off || !layout.rounded_off.empty())) {
    std::vector<std::string> others;
    for (const OtherFigure& other : layout.rounded_off) others.push_back(text_of(other));
    layout.findings.insert(
        layout.findings.begin(),
        {finding_id::living_layout_differs,
         off ? fmt::format(
                   "a fresh layout has the right gradient, the run's own does not: {}; something went "
                   "wrong in it since the start",
                   rounding.empty() ? "its scale" : list_names(rounding))
             : "the gradient is right, but the run's own step reports other figures than a fresh layout: " +
                   list_names(others)});
    return;
  }
  if (!rounding.empty())
    layout.findings.push_back(
        {finding_id::rounding,
         "right in fp64, outside the rounding bound in the run's precision: " + list_names(rounding)});
  const WholeScale& scale = layout.e2.scale;
  if (rounding.empty() && !scale.passed && right_in_fp64)
    layout.findings.push_back(
        {finding_id::rounding,
         fmt::format("right in fp64, but the scale of the whole gradient is off by {:.3g} in {}, {:.3g} "
                     "allowed: rounding takes it in all parameters alike",
                     scale.error, precision, scale.allowed)});
  if (right_in_fp64 && !off) add_other_figures(layout, precision);
  std::vector<std::string> paths;  // evidence for a wrong update: an optimizer without state and one with it
  for (const auto& trajectory : layout.trajectories)
    paths.push_back(fmt::format("{}: {}", updates_of(trajectory), trajectory.passed ? "right" : "wrong"));
  for (const auto& trajectory : layout.trajectories)
    if (!trajectory.passed && layout.findings.empty())
      layout.findings.push_back(
          {finding_id::optimizer_differs,
           fmt::format(
               "the gradient is right, parameters after {} are not: {} is off by {:.3g} of its way, {:.3g} "
               "allowed",
               updates_of(trajectory), trajectory.worst, trajectory.error, trajectory.allowed),
           paths});
}

void stop_if_told(const VerifyProblem& problem, Group& group) {
  if (problem.stop) Heartbeat(group, problem.stop).tick();
}

// Parameters after some updates, on rank 0; `applied`: the gradient as plain SGD applied it. Collective.
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
      const OracleUpdates& expected = reference.updates[index];
      double share = -1;
      for (std::size_t p = 0; p < std::min(found.size(), expected.parameters.size()); ++p) {
        const double moved = expected.moved[p], allowed = expected.allowed[p];
        const double error = (found[p] - expected.parameters[p]).norm().item<double>();
        // The parameter itself is only known to its last bit.
        const double rounding = updates * 0x1p-52 * expected.parameters[p].norm().item<double>();
        constexpr double kLeast = 1e-300;  // where nothing is allowed and nothing is off, nothing is used
        const double used = error / (allowed + rounding + kLeast);
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
  const bool exact_run = problem.dtype == at::kDouble, reports = group.rank() == 0;
  const std::string precision = float_type(problem.dtype).precision;
  LayoutVerdict result;
  result.name = layout.name;
  at::Tensor most = at::full({1}, static_cast<std::int64_t>(problem.local.size()), at::kLong);
  group.all_reduce(most, ReduceOp::kMax);
  const Bounds bounds = bounds_for(problem.dtype, group.size(), most.item<std::int64_t>());

  const auto run_in = [&](at::ScalarType dtype) {
    return problem.live_run && dtype == problem.dtype
               ? std::make_unique<LayoutRun>(problem, group)
               : std::make_unique<LayoutRun>(problem, layout, initial.model(problem, dtype), group);
  };
  const auto exact = run_in(at::kDouble);
  const auto needed = [&]() -> std::pair<double, double> {
    if (!layout.traffic) return {0, 0};
    return layout.traffic(exact->layout(), most.item<std::int64_t>(), at::kDouble);
  };
  const double before = needed().first;  // a step may end with other buckets than it began with
  const auto step_of = [&](LayoutRun& run) {
    stop_if_told(problem, group);
    return run.step(problem.local);
  };
  const LayoutRun::RecordedStep in_fp64 = step_of(*exact);
  Investigation investigation(problem, layout, initial, *exact, group);
  investigation.describe(in_fp64, found);
  result.bytes_moved = in_fp64.bytes_moved;
  const auto [padded, least] = needed();
  result.bytes_needed = std::clamp(result.bytes_moved, least, std::max(before, padded));

  LayoutRun::RecordedStep first = in_fp64;
  at::Tensor bits, repeats;
  {
    // In fp64 the same layout is asked twice; otherwise the run's own precision is.
    const auto rounded = exact_run ? nullptr : run_in(problem.dtype);
    LayoutRun& repeated = exact_run ? *exact : *rounded;
    const bool replays = initial.choices && !exact_run;
    const auto choose_in_live_run = [&](const DecoderLM::ChooseExperts& choose) {
      if (problem.live_run && problem.live_run->choose_experts) problem.live_run->choose_experts(choose);
    };
    if (replays) {
      choose_in_live_run(initial.choices->replay());
      initial.choices->take(problem.counting(group));
    }
    if (!exact_run) first = step_of(repeated);
    bits = digest(first.gradients);
    repeats = bits.eq(digest(step_of(repeated).gradients)).to(at::kLong);
    if (replays) {
      result.choices = initial.choices->take(problem.counting(group));
      choose_in_live_run({});
    }
  }
  std::vector<std::size_t> differing = differing_over_ranks(bits, group);
  for (auto i : differing_over_ranks(digest(in_fp64.gradients), group)) differing.push_back(i);
  group.all_reduce(repeats, ReduceOp::kMin);
  result.exact = in_fp64.figures;
  result.rounded = first.figures;
  if (reports)
    take(problem, layout.name, found, layout.name + ", " + precision,
         exact_run ? StepDump::Named{} : first.named(), first.figures);
  const auto differing_buffers = exact->differing_buffers();
  result.trajectories = follow(problem, layout, initial, reference, group, found.applied);

  StepDump expected;
  if (reports)
    expected = dump_of(reference.oracle, initial, found, samples_of(reference.whole), result.bytes_needed);
  if (reports && layout.name == problem.layouts[0].name) {
    StepDump whole = expected;
    whole.ranks[0].bytes_moved = NAN;  // what the first layout needs says nothing of the others
    StepFigures counts = {
        .loss = NAN, .targets = expected.figures.targets, .tokens = expected.figures.tokens, .norm = NAN};
    counts.clip_coefficient = NAN;
    take(problem, "oracle", whole, "alone", reference.alone, counts);
  }
  // Rank 0 compares: E1 as any two dumps in fp64, E2 by what one process is off by.
  const OracleStep& oracle = reference.oracle;
  std::optional<ComparedStep> compared;
  Retry retry;
  std::vector<std::size_t> retried;  // places in result.parameters
  Tensors rounded, right;            // of the parameters that can be compared
  const auto hold = [&](std::size_t i, double alone_error) {
    ParameterVerdict& parameter = result.parameters[i];
    parameter.alone_error = std::fmax(parameter.alone_error, alone_error);
    parameter.rounded =
        compare(rounded[i], right[i], compared->parameters()[i].scale, bounds.rounded(parameter.alone_error));
  };
  if (reports) {
    const auto place_in = [](const std::vector<std::string>& names, const std::string& name) {
      return static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
    };
    compared.emplace(RunPair{.found = std::move(found), .expected = std::move(expected)});
    result.parameters = verdicts_of(*compared);
    for (std::size_t i = 0; i < result.parameters.size(); ++i) {
      ParameterVerdict& parameter = result.parameters[i];
      const std::size_t own = place_in(in_fp64.names, parameter.name),
                        place = place_in(oracle.names, parameter.name);
      const auto row = static_cast<std::int64_t>(own);
      rounded.push_back(first.gradients[own].to(at::kDouble));
      right.push_back(oracle.gradients[place]);
      parameter.alone_error = reference.alone_error[place];  // a NaN stays, and bounds nothing
      hold(i, parameter.alone_error);
      if (!exact_run && parameter.exact.passed && !parameter.rounded.passed) {
        retry.places.push_back(place);
        retry.enough.push_back(bounds.alone_that_allows(parameter.rounded.error));
        retried.push_back(i);
      }
      parameter.replicas_agree = std::ranges::find(differing, own) == differing.end();
      parameter.repeats = repeats[row].item<std::int64_t>() != 0;
      parameter.checksum = static_cast<std::uint64_t>(bits[row].item<std::int64_t>());
      const auto& owners = compared->found().owners;
      if (own < owners.size()) std::tie(parameter.owners_least, parameter.owners_most) = owners[own];
    }
  }
  const auto measured = measure_rounding(problem, initial, reference.scales, retry, group);
  for (std::size_t d = 0; d < retried.size() && d < measured.size(); ++d) hold(retried[d], measured[d]);
  if (reports) {
    WholeScale scale;
    if (!exact_run) {
      // E1 holds the scale to 1e-10, so that all of one process's error may count here.
      constexpr double kAny = std::numeric_limits<double>::infinity();
      scale = test_scale(rounded, right, bounds.unit, {.alone = reference.alone_scale, .most = kAny});
      result.rounded_off = figures_off(first.figures, oracle.figures, bounds, &reference.alone_figures);
    }
    const std::string bound = fmt::format(
        "{}: |g - g64| <= 4 |g1 - g64| + {:.3g} s, g1 one process in {}, u sqrt(W G) = {:.3g}; where fp64 is "
        "right and one g1 does not do, the worst of up to {}, each from parameters an ulp away; scale of the "
        "whole gradient within 4 (u + its standard error + one process's own), u = {:.2g}; counts equal, "
        "loss, norm and clip coefficient to {:g} of themselves or 4 times what one process is off by",
        precision, bounds.sums(), precision, bounds.sums(), kMostDraws, bounds.unit, bounds.figures);
    grade(result, oracle.figures, bound, exact_run, bounds, scale);
    result.passed = result.passed && !result.parameters.empty() && in_fp64.names == oracle.names &&
                    std::ranges::all_of(result.parameters,
                                        [](const ParameterVerdict& one) {
                                          return one.owners_least == 1 && one.owners_most == 1;
                                        }) &&
                    std::ranges::all_of(result.trajectories, &Trajectory::passed);
  }

  // Rank 0 diagnoses; a failure is run again in other circumstances, by all.
  result.findings = investigation.diagnose(compared, !result.passed);
  if (reports) {
    if (!result.passed) add_plain_findings(result, precision, problem.live_run.has_value());
    if (problem.loss.global)
      for (Finding& finding : result.findings)
        if (finding.id == finding_id::averaged_over_axis)
          finding.sentence += fmt::format(
              ". A loss over the rows of all ranks under an average of {} ranks' gradients, which must be "
              "summed (or the loss told so: grad_reduction = mean)",
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
    for (const OtherFigure& other : figures_off(result.exact, oracle.figures, bounds))
      if (other.name == "unclipped_norm" && result.findings.empty())
        result.findings.push_back(
            {finding_id::norm_differs,
             fmt::format(
                 "the gradient is right, the norm before the clip of groups is {:.9g}, expected {:.9g}",
                 other.found, other.expected)});
    if (!result.passed && result.findings.empty())
      result.findings.push_back(
          {finding_id::unknown, "the step is not the expected one, in no way that has a name"});
    if (result.choices.wrong > 0)
      result.findings.push_back(
          {finding_id::other_experts,
           fmt::format(
               "in the run's precision {} of {} choices of experts are others than the oracle's, first "
               "in layer {}, although their logits are farther apart than rounding explains",
               result.choices.wrong, result.choices.tokens, result.choices.layer)});
    if (!differing_buffers.empty())
      result.findings.push_back({finding_id::buffers_differ,
                                 "forward changes buffers by each rank's own rows, so that the ranks' models "
                                 "differ: " +
                                     list_names(differing_buffers),
                                 {"after two steps, in fp64 or the run's precision"}});
    result.passed = result.passed && result.findings.empty();
  }
  return result;
}

void check(const VerifyProblem& problem, const Initial& initial, Group& group) {
  if (problem.layouts.empty())
    refuse("verify", "no layout", "at least one", "Name a layout to compare with one process");
  if (std::ranges::find(initial.trainable, true) == initial.trainable.end())
    refuse("verify", "a model without trainable parameters", "at least one",
           "Unfreeze what is to be trained");
  at::Tensor targets = at::zeros({1}, at::kLong);
  for (const auto& batch : problem.local) targets += batch.num_targets();
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
  std::string more;
  if (label_smoothing != 0) more += fmt::format(", label smoothing {:g}", label_smoothing);
  if (z_loss != 0) more += fmt::format(", z-loss {:g}", z_loss);
  return (replicas ? "mean of per-replica " + kind + "s, which depends on the layout" : kind) + more;
}

Verdict verify(const VerifyProblem& problem, Group& group) {
  const auto start = std::chrono::steady_clock::now();
  Verdict verdict;
  verdict.ranks = group.size();
  verdict.precision = float_type(problem.dtype).precision;
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
    return ends({finding_id::initial_parameters_differ,
                 fmt::format("{} of {} parameters differ over the ranks before the step, first {}: "
                             "nothing else was compared",
                             differing.size(), initial.names.size(), initial.names[differing[0]]),
                 {"initialisation depends on the rank or the layout"}});

  initial.choices = record_choices(problem, initial, group);
  const Reference reference = make_reference(problem, initial, group);
  if (of_rank_zero(group, !reference.random.empty()))
    return ends(
        {finding_id::random_model,
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
      verdict.findings.push_back({finding_id::documents_leak, "documents leak: " + reference.leak->text()});
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
    verdict.findings.push_back({finding_id::other_batch,
                                "the ranks together did not see every token of the whole step exactly once"});
  for (const auto& finding : verdict.findings) verdict.diagnosis.push_back(finding.sentence);
  verdict.passed = of_rank_zero(group, passed);
  verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return verdict;
}

}  // namespace isograd
