// Meshes and candidates by asking the rules of `train`, axis after axis.
#include "plan/search.hpp"

#include <algorithm>
#include <array>
#include <numeric>

namespace isograd::planner {
namespace {

const ScheduleFacts* facts_of(Schedule schedule) {
  static const auto kFacts = [] {
    std::array<const ScheduleFacts*, 6> facts{};
    for (std::size_t i = 0; i < facts.size(); ++i)
      facts[i] = find_schedule(name_of(static_cast<Schedule>(i)));  // null: none
    return facts;
  }();
  return kFacts[std::size_t(schedule)];
}

// Axes are chosen from the outermost to the innermost of the order. A rule of the axes that is broken by some
// of them stays broken whatever the others are; only that of the samples does not.
class Meshes {
 public:
  using Visit = std::function<bool(const Candidate& mesh)>;  // false: no more

  Meshes(const Problem& problem, const Space& space, const Visit& visit)
      : work_(problem.work), space_(space), visit_(visit), model_(model_numbers(decoder_of(problem.model))) {
    mesh_.ranks = std::int32_t(space.devices);
    mesh_.strategy = Strategy::kZero1;  // one that has replicas
    choose(0);
  }

 private:
  static constexpr std::array kAxes = {&Candidate::pp,      &Candidate::stages_per_rank, &Candidate::tp,
                                       &Candidate::cp_ring, &Candidate::cp_ulysses,      &Candidate::ep,
                                       &Candidate::replicas};

  bool choose(std::size_t axis) {
    if (axis == kAxes.size()) return finish();
    std::int32_t& value = mesh_.*kAxes[axis];
    const bool of_stages = kAxes[axis] == &Candidate::stages_per_rank;
    for (const std::int64_t size : of_stages ? space_.stages_per_rank : space_.sizes) {
      value = std::int32_t(size);
      const bool possible =
          !broken_rule(numbers_of(mesh_, work_), model_, kFirstRule, LayoutRule::kTokenOverlap);
      if (possible && !choose(axis + 1)) return false;
      if (of_stages && mesh_.pp == 1) break;
    }
    value = 1;
    return true;
  }

  bool finish() {
    LayoutNumbers numbers = numbers_of(mesh_, work_);
    if (broken_rule(numbers, model_)) return true;
    numbers.shards_along_ring = numbers.shards_along_ulysses = false;
    mesh_.shards = std::int32_t(numbers.shard_ranks());
    return visit_(mesh_);
  }

  const Work& work_;
  const Space& space_;
  const Visit& visit_;
  ModelNumbers model_;
  Candidate mesh_{};
};

}  // namespace

Space space_of(const Problem& problem, std::int64_t devices) {
  Space space{.devices = devices,
              .sizes = divisors(devices),
              .strategies = {kStrategies.begin(), kStrategies.end()},
              .schedules = {kSchedules.begin(), kSchedules.end()},
              .share_parameters = problem.cluster.host_memory && devices <= problem.cluster.per_host};
  for (std::int64_t bytes = 1 << 20; bytes <= 1 << 30; bytes *= 2) space.bucket_bytes.push_back(bytes);
  return space;
}

std::vector<std::int64_t> micro_batches_of(std::int64_t samples) {
  std::vector<std::int64_t> all = divisors(samples);
  for (std::int64_t size = 1; size <= samples; size *= 2) all.push_back(size);
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

LayoutNumbers numbers_of(const Candidate& candidate, const Work& work) {
  const bool sharded = candidate.strategy != Strategy::kBucketed;  // else all ranks are replicas anyway
  return {.ranks = candidate.ranks,
          .replicas = sharded ? candidate.replicas : 1,
          .cp_ring = candidate.cp_ring,
          .cp_ulysses = candidate.cp_ulysses,
          .tp = candidate.tp,
          .ep = candidate.ep,
          .pp = candidate.pp,
          .stages_per_rank = candidate.stages_per_rank,
          .stage = int(candidate.strategy),
          .shares_parameters = candidate.share_parameters,
          .asked_to_share = candidate.share_parameters,
          .sequence_parallel = candidate.sequence_parallel,
          .reduce_once = candidate.reduce_once,
          .schedule = facts_of(candidate.schedule),
          .samples = work.samples(),
          .samples_at_a_time = candidate.micro_batch};
}

void for_each_mesh(const Problem& problem, const Space& space, const VisitMesh& visit) {
  Meshes(problem, space, [&](const Candidate& mesh) {
    visit(mesh);
    return true;
  });
}

void for_each_candidate(const Problem& problem, const Space& space, const Candidate& mesh,
                        const VisitCandidate& visit) {
  using enum Strategy;
  const ModelNumbers model = model_numbers(decoder_of(problem.model));
  const std::vector<std::int64_t> micro_batches =
      micro_batches_of(numbers_of(mesh, problem.work).most_samples());
  const std::vector<Schedule> none{Schedule::kNone};
  const auto choices = [](bool both) { return both ? std::vector{false, true} : std::vector{false}; };
  // One kind, by ascending micro-batches, about which one rule is alone.
  const auto visit_kind = [&](Candidate candidate) {
    for (const std::int64_t size : micro_batches) {
      candidate.micro_batch = size;
      const LayoutNumbers numbers = numbers_of(candidate, problem.work);
      candidate.micro_batches = numbers.micro_batches();
      if (candidate.reduce_once && candidate.micro_batches == 1) return;  // the same as without
      if (!broken_rule(numbers, model, LayoutRule::kForwards, LayoutRule::kForwards) && !visit(candidate))
        return;
    }
  };
  Candidate candidate = mesh;
  for (const Strategy strategy : space.strategies) {
    if (strategy == kBucketed && mesh.shards > 1) continue;  // on the mesh whose ranks are all replicas
    candidate.strategy = strategy;
    const bool zero3 = strategy == kZero3;
    for (const Schedule schedule : mesh.pp > 1 ? space.schedules : none)
      for (const bool share : choices(space.share_parameters)) {
        candidate.schedule = schedule, candidate.share_parameters = share;
        candidate.micro_batch = micro_batches.back();  // has the fewest forwards
        if (broken_rule(numbers_of(candidate, problem.work), model)) continue;
        for (const bool checkpoint : choices(zero3))
          for (const bool kept : choices(zero3))
            for (const bool once : choices(zero3 || strategy == kZero2)) {
              candidate.checkpoint = checkpoint, candidate.reshard = !kept, candidate.reduce_once = once;
              visit_kind(candidate);
            }
      }
  }
}

std::optional<ErrorText> refusal(const ModelShape& model, const Cluster&, const Work& work,
                                 const Candidate& candidate) {
  const ModelNumbers of_model = model_numbers(decoder_of(model));
  const LayoutNumbers layout = numbers_of(candidate, work);
  const auto rule = broken_rule(layout, of_model);
  return rule ? std::optional(sentence(*rule, layout, of_model)) : std::nullopt;
}

std::int64_t usable_devices(const Problem& problem, std::int64_t devices) {
  const std::int64_t host = problem.cluster.per_host;
  for (std::int64_t usable = devices; usable > 1;) {
    bool found = false;
    // Ranks along cp without a token of a sequence would have nothing to do.
    Meshes(problem, space_of(problem, usable), [&](const Candidate& mesh) {
      found = mesh.cp_ring * std::int64_t{mesh.cp_ulysses} <= problem.work.sequence;
      return !found;
    });
    if (found) return usable;
    usable = usable > host ? (usable - 1) / host * host : usable - 1;  // below a host, single devices
  }
  return 1;
}

bool is_proved(const Candidate& candidate) {
  const auto has = [](std::int32_t size) { return size > 1 ? 2 : 1; };
  // Two ranks along each axis are as many as a cell has at least; the cells have 8 ranks at most, and one
  // variant of a strategy each.
  const int data = has(candidate.replicas) * has(candidate.shards) * has(candidate.cp_ring) *
                   has(candidate.cp_ulysses),
            ranks = std::lcm(data, has(candidate.ep)) * has(candidate.tp) * has(candidate.pp);
  const int variants = candidate.reduce_once + candidate.checkpoint + !candidate.reshard;
  return ranks <= 8 && variants <= 1;
}

}  // namespace isograd::planner
