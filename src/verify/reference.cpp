#include "verify/reference.hpp"

#include <algorithm>

#include "isograd/error.hpp"
#include "verify/bad_input.hpp"
#include "verify/compare.hpp"
#include "verify/heartbeat.hpp"
#include "verify/resolution.hpp"
#include "verify/rounding.hpp"

namespace isograd {
namespace {

std::vector<MicroBatches> parts(const VerifyProblem& problem, const MicroBatches& whole) {
  if (problem.loss.replicas) return problem.loss.replicas();
  return {whole};
}

// Batches that rank 0 can make forwards of by itself: its own, or what they were cut from (a cut takes all
// ranks; diagnose_leak() does that).
MicroBatches uncut(const VerifyProblem& problem, const MicroBatches& whole) {
  if (problem.dealing) return problem.dealing->whole;
  const bool parts = !problem.local.empty() && problem.local.front().cut;
  if (parts && problem.alone) return problem.alone();
  return parts || problem.local.empty() ? whole : problem.local;
}

}  // namespace

std::vector<Path> paths(const VerifyProblem& problem) {
  if (problem.updates <= 0) return {};
  constexpr std::size_t kManyLayouts = 5;
  return {{kPlainSgd, problem.layouts.size() < kManyLayouts ? problem.updates : 1},
          {problem.optimizer, problem.updates}};
}

Reference make_reference(const VerifyProblem& problem, const Initial& initial, Group& group) {
  Reference reference;
  Heartbeat heartbeat(group, problem.stop);
  const auto tick = [&heartbeat] { heartbeat.tick(); };
  const int last = group.size() - 1;
  const bool rounds = problem.dtype != at::kDouble;
  OracleStep alone;
  if (group.rank() == 0) {
    reference.whole = problem.whole();
    const VerifyModel model = initial.oracle(problem);
    refuse_without_fp64(model, initial.model(problem, problem.dtype), reference.whole);
    tick();
    reference.random = difference_of_two_runs(model, reference.whole);
    tick();
    const auto pieces = parts(problem, reference.whole);
    reference.oracle = oracle_step(model, pieces, problem.loss, clip_of(problem), tick);
    reference.scales = error_scales(reference.oracle.gradients);
    if (problem.probe_documents && !problem.loss.global && reference.random.empty())
      for (const Batch& batch : uncut(problem, reference.whole))
        if (batch.num_fragments() > 1) {
          reference.leak = probe_documents(model, batch, problem.loss);
          tick();
          break;
        }
    for (const auto& [options, updates] : paths(problem))
      reference.updates.push_back(oracle_updates(initial.oracle(problem), pieces, problem.loss,
                                                 clip_of(problem), options, updates, tick));
  }
  if (group.rank() == last && rounds)
    alone = oracle_step(initial.model(problem, problem.dtype),
                        parts(problem, problem.alone ? problem.alone() : problem.whole()), problem.loss,
                        clip_of(problem), tick);
  heartbeat.finish();

  Tensors wanted, off;
  for (std::size_t i = 0, next = 0; i < initial.values.size(); ++i) {
    if (!initial.trainable[i]) continue;
    double error = 0;
    if (rounds) {
      at::Tensor gradient =
          group.rank() == last ? alone.gradients[next] : at::empty(initial.values[i].sizes(), at::kFloat);
      group.broadcast(gradient, last);
      if (group.rank() == 0 && problem.take_dump)
        reference.alone.emplace_back(reference.oracle.names[next], gradient);
      if (group.rank() == 0) {
        wanted.push_back(reference.oracle.gradients[next]);
        off.push_back(gradient.to(at::kDouble) - wanted.back());
        error = relative_error(gradient.to(at::kDouble), wanted.back(), reference.scales[next]);
      }
    }
    reference.alone_error.push_back(error);
    ++next;
  }
  reference.alone_figures = reference.oracle.figures;
  if (rounds) {
    const StepFigures& own = alone.figures;
    at::Tensor numbers = at::tensor(
        std::vector<double>{own.loss, own.norm, own.clip_coefficient, own.unclipped_norm}, at::kDouble);
    group.broadcast(numbers, last);
    reference.alone_figures.loss = numbers[0].item<double>();
    reference.alone_figures.norm = numbers[1].item<double>();
    reference.alone_figures.clip_coefficient = numbers[2].item<double>();
    reference.alone_figures.unclipped_norm = numbers[3].item<double>();
  }
  if (!off.empty())
    reference.alone_scale = along(off, wanted, wanted, bounds_for(problem.dtype, 1, 1).unit).share;
  return reference;
}

}  // namespace isograd
