#include "verify/reference.hpp"

#include <algorithm>

#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "verify/bad_input.hpp"
#include "verify/compare.hpp"
#include "verify/experiments.hpp"
#include "verify/heartbeat.hpp"
#include "verify/resolution.hpp"

namespace isograd {
namespace {

std::vector<MicroBatches> parts(const VerifyProblem& problem, const MicroBatches& whole) {
  if (problem.loss.replicas) return problem.loss.replicas();
  return {whole};
}

// Batches that rank 0 can make forwards of by itself: its own, or what they were cut from (a cut takes all
// ranks; diagnose_leak() does that).
MicroBatches uncut(const VerifyProblem& problem, const MicroBatches& whole) {
  if (problem.shared_samples) return problem.shared_samples->whole;
  const bool parts = !problem.local.empty() && problem.local.front().cut;
  if (parts && problem.alone) return problem.alone();
  return parts || problem.local.empty() ? whole : problem.local;
}

// The same samples in another order, in at most `pieces` micro-batches; another assignment each `turn`.
// Fragments stay whole.
MicroBatches cut_anew(const MicroBatches& whole, std::int64_t pieces, std::uint64_t turn) {
  std::vector<std::pair<const Batch*, std::int64_t>> fragments;
  for (const Batch& batch : whole)
    for (std::int64_t f = 0; f < batch.num_fragments(); ++f) fragments.emplace_back(&batch, f);
  const auto count = static_cast<std::int64_t>(fragments.size());
  const auto order = random_permutation(count, {.sample = turn, .layer = hash_name("cut")});
  pieces = std::clamp<std::int64_t>(pieces, 1, std::max<std::int64_t>(1, count));
  MicroBatches cut;
  std::size_t next = 0;
  for (const std::int64_t share : split_rows(count, static_cast<int>(pieces))) {
    MicroBatches piece;
    for (std::int64_t i = 0; i < share; ++i) {
      const auto& [batch, f] = fragments[static_cast<std::size_t>(order[next++])];
      piece.push_back(fragments_of(*batch, f, f + 1));
    }
    if (!piece.empty()) cut.push_back(joined(piece));
  }
  return cut;
}

// Rank 0's places, on every rank.
std::vector<std::size_t> share(const std::vector<std::size_t>& own, Group& group) {
  at::Tensor count = at::full({1}, static_cast<std::int64_t>(own.size()), at::kLong);
  group.broadcast(count, 0);
  at::Tensor places = at::empty({count.item<std::int64_t>()}, at::kLong);
  if (group.rank() == 0)
    for (std::size_t i = 0; i < own.size(); ++i)
      places[static_cast<std::int64_t>(i)] = static_cast<std::int64_t>(own[i]);
  if (places.numel() > 0) group.broadcast(places, 0);
  return {places.data_ptr<std::int64_t>(), places.data_ptr<std::int64_t>() + places.numel()};
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

  Tensors expected, off;
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
        expected.push_back(reference.oracle.gradients[next]);
        off.push_back(gradient.to(at::kDouble) - expected.back());
        error = relative_error(gradient.to(at::kDouble), expected.back(), reference.scales[next]);
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
    reference.alone_scale = along(off, expected, expected, bounds_for(problem.dtype, 1, 1).unit).share;
  return reference;
}

std::vector<double> measure_rounding(const VerifyProblem& problem, const Initial& initial,
                                     const std::vector<double>& scales, const Retry& retry, Group& group) {
  const auto places = share(retry.places, group);
  if (places.empty()) return {};
  at::Tensor pieces = at::full({1}, static_cast<std::int64_t>(problem.local.size()), at::kLong);
  group.all_reduce(pieces);
  const int last = group.size() - 1;
  std::vector<MicroBatches> parts;
  if (group.rank() == last) {
    if (problem.loss.replicas)
      parts = problem.loss.replicas();
    else
      parts = {problem.alone ? problem.alone() : problem.whole()};
  }
  std::vector<double> errors(places.size(), 0.0);
  at::Tensor again = at::ones({1}, at::kLong);
  for (std::uint64_t draw = 0; draw < kMostDraws && again.item<std::int64_t>() != 0; ++draw) {
    at::Tensor differences = at::zeros({static_cast<std::int64_t>(places.size())}, at::kDouble);
    Heartbeat heartbeat(group, problem.stop);
    if (group.rank() == last) {
      std::vector<MicroBatches> cut = parts;
      // A loss over the rows of all ranks has its rows in one global micro-batch.
      if (!problem.loss.global)
        for (MicroBatches& part : cut)
          part = cut_anew(part, split_rows(pieces.item<std::int64_t>(), static_cast<int>(parts.size()))[0],
                          draw);
      const Initial nudged = initial.nudged(draw);
      const auto gradients = [&](const VerifyModel& model) {
        return oracle_step(model, cut, problem.loss, clip_of(problem), [&heartbeat] { heartbeat.tick(); })
            .gradients;
      };
      const auto exact = gradients(nudged.oracle(problem)),
                 rounded = gradients(nudged.model(problem, problem.dtype));
      for (std::size_t d = 0; d < places.size(); ++d)
        differences[static_cast<std::int64_t>(d)] =
            (rounded[places[d]].to(at::kDouble) - exact[places[d]]).norm();
    }
    heartbeat.finish();
    group.broadcast(differences, last);
    again.zero_();
    for (std::size_t d = 0; group.rank() == 0 && d < places.size(); ++d) {
      const double difference = differences[static_cast<std::int64_t>(d)].item<double>();
      errors[d] = std::fmax(errors[d], difference == 0 ? 0 : difference / scales[places[d]]);
      if (!(errors[d] >= retry.enough[d])) again.fill_(1);
    }
    group.broadcast(again, 0);
  }
  return errors;
}

}  // namespace isograd
