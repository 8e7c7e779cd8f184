#include "verify/rounding.hpp"

#include <algorithm>

#include "isograd/random.hpp"
#include "verify/compare.hpp"
#include "verify/experiments.hpp"
#include "verify/turns.hpp"

namespace isograd {

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

namespace {

constexpr double kOrderShows = 1e-10;  // E1: what fp64 rounding may do, relative to a parameter's gradient

// Rank 0's, on every rank.
Doubtful share(const Doubtful& own, Group& group) {
  at::Tensor head = at::tensor({static_cast<std::int64_t>(own.places.size()), own.runs}, at::kLong);
  group.broadcast(head, 0);
  at::Tensor places = at::empty({head[0].item<std::int64_t>()}, at::kLong);
  if (group.rank() == 0)
    for (std::size_t i = 0; i < own.places.size(); ++i)
      places[static_cast<std::int64_t>(i)] = static_cast<std::int64_t>(own.places[i]);
  if (places.numel() > 0) group.broadcast(places, 0);
  Doubtful all{.places = {}, .runs = head[1].item<std::int64_t>()};
  for (std::int64_t i = 0; i < places.numel(); ++i)
    all.places.push_back(static_cast<std::size_t>(places[i].item<std::int64_t>()));
  return all;
}

// The samples of each micro-batch in another order: what a loss over the rows of all ranks allows.
MicroBatches reordered(const MicroBatches& whole, std::uint64_t turn) {
  MicroBatches result;
  for (const Batch& batch : whole)
    for (Batch& other : cut_anew({batch}, 1, turn)) result.push_back(std::move(other));
  return result;
}

// A loss that draws rows by their place is another one in another order; in fp64 the order must not show.
// Collective; the last rank has `parts`.
bool knows_no_order(const VerifyProblem& problem, const Initial& initial,
                    const std::vector<MicroBatches>& parts, Group& group) {
  const int last = group.size() - 1;
  at::Tensor same = at::ones({1}, at::kLong);
  Turns turns(group);
  if (group.rank() == last) {
    std::vector<MicroBatches> others;
    for (const MicroBatches& part : parts) others.push_back(reordered(part, 0));
    const auto exact = [&](const std::vector<MicroBatches>& of) {
      return oracle_step(initial.model(problem, at::kDouble), of, problem.loss, problem.step.max_norm,
                         [&turns] { turns.tick(); });
    };
    const OracleStep one = exact(parts), other = exact(others);
    for (std::size_t i = 0; i < one.gradients.size(); ++i) {
      const double scale = one.gradients[i].norm().item<double>();
      if ((one.gradients[i] - other.gradients[i]).norm().item<double>() > kOrderShows * scale) same.zero_();
    }
  }
  turns.finish();
  group.broadcast(same, last);
  return same.item<std::int64_t>() != 0;
}

}  // namespace

std::vector<double> measure_rounding(const VerifyProblem& problem, const Initial& initial,
                                     const OracleStep& oracle, const std::vector<double>& scales,
                                     Doubtful doubtful, Group& group) {
  doubtful = share(doubtful, group);
  if (doubtful.places.empty()) return {};
  at::Tensor pieces = at::full({1}, static_cast<std::int64_t>(problem.local.size()), at::kLong);
  group.all_reduce(pieces);
  const int last = group.size() - 1;
  std::vector<at::Tensor> trained;  // shapes
  for (std::size_t i = 0; i < initial.values.size(); ++i)
    if (initial.trainable[i]) trained.push_back(initial.values[i]);
  std::vector<double> errors(doubtful.places.size(), 0.0);
  std::vector<MicroBatches> parts;
  if (group.rank() == last) {
    if (problem.loss.replicas)
      parts = problem.loss.replicas();
    else
      parts = {problem.alone ? problem.alone() : problem.whole()};
  }
  if (problem.loss.global && !knows_no_order(problem, initial, parts, group)) return {};
  for (std::int64_t run = 0; run < doubtful.runs; ++run) {
    OracleStep alone;
    Turns turns(group);
    if (group.rank() == last) {
      const auto each = split_rows(pieces.item<std::int64_t>(), static_cast<int>(parts.size()))[0];
      std::vector<MicroBatches> cut;
      for (const MicroBatches& part : parts)
        cut.push_back(problem.loss.global ? reordered(part, static_cast<std::uint64_t>(run))
                                          : cut_anew(part, each, static_cast<std::uint64_t>(run)));
      alone = oracle_step(initial.model(problem, problem.dtype), cut, problem.loss, problem.step.max_norm,
                          [&turns] { turns.tick(); });
    }
    turns.finish();
    for (std::size_t d = 0; d < errors.size(); ++d) {
      const std::size_t place = doubtful.places[d];
      at::Tensor gradient =
          group.rank() == last ? alone.gradients[place] : at::empty(trained[place].sizes(), at::kFloat);
      group.broadcast(gradient, last);
      if (group.rank() == 0)
        errors[d] = std::fmax(
            errors[d], relative_error(gradient.to(at::kDouble), oracle.gradients[place], scales[place]));
    }
  }
  return errors;
}

}  // namespace isograd
