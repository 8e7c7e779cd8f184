// The fastest layouts of all that fit. Meshes go by the least time that they can take, so that good layouts
// are found early and leave out most others before these are timed.
#include "plan/search.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "plan/inputs.hpp"
#include "train/memory.hpp"

namespace isograd::planner {
namespace {

// A layout that takes a tenth longer than the fastest is on no front: few pay more for head-room.
constexpr double kFrontSlower = 1.1;

struct Mesh {
  Candidate axes{};
  std::int64_t order = 0;
  double seconds = 0;  // at least
};

struct Found {
  Candidate candidate{};
  double seconds = 0, bytes = 0;
  std::pair<std::int64_t, std::int64_t> order{};  // of the mesh, on it: breaks ties

  auto by_time() const { return std::tuple(seconds, order); }
  auto by_bytes() const { return std::tuple(bytes, order); }
  bool dominates(const Found& other) const {
    return seconds <= other.seconds && bytes <= other.bytes &&
           (seconds < other.seconds || bytes < other.bytes || order < other.order);
  }
};

// Layouts that a user would measure as one: of their schedules, micro-batches and flags the fastest counts.
bool are_alike(const Candidate& one, const Candidate& other) {
  const auto axes = [](const Candidate& c) {
    return std::tuple(c.ranks, c.replicas, c.shards, c.cp_ring, c.cp_ulysses, c.tp, c.ep, c.pp, c.strategy);
  };
  return axes(one) == axes(other);
}

class Search {
 public:
  Search(Models& models, std::int64_t devices, const Options& options, bool with_front)
      : models_(models),
        problem_(models.problem),
        wanted_(std::max<std::size_t>(1, options.top)),
        with_front_(with_front),
        space_(space_of(problem_, devices)),
        numbers_of_model_(model_numbers(decoder_of(problem_.model))),
        capacity_(problem_.cluster.device.memory) {
    if (options.only_strategy) space_.strategies = {*options.only_strategy};
  }

  Searched run() {
    std::vector<Mesh> meshes = timed_meshes();
    std::ranges::sort(meshes, {}, [](const Mesh& mesh) { return std::tuple(mesh.seconds, mesh.order); });
    for (const Mesh& mesh : meshes) {
      if (mesh.seconds > slowest()) break;
      const double bytes = least_bytes(mesh.axes);
      if (bytes <= capacity_ && !is_dominated(mesh.seconds, bytes)) visit(mesh, bytes);
    }
    Searched searched{.candidates = candidates_, .fitting = fitting_};
    if (top_.empty()) {
      searched.nearest = nearest(meshes);
      return searched;
    }
    std::erase_if(front_, [&](const Found& one) { return one.seconds > kFrontSlower * top_[0].seconds; });
    for (const Found& found : top_) searched.top.push_back(planned(models_, found.candidate));
    for (const Found& found : front_) searched.front.push_back(planned(models_, found.candidate));
    return searched;
  }

 private:
  std::vector<std::int64_t> sizes_on(const Candidate& axes) const {
    return micro_batches_of(numbers_of(axes, problem_.work).most_samples());
  }

  std::vector<Mesh> timed_meshes() {
    std::vector<Mesh> meshes;
    for_each_mesh(problem_, space_, [&](const Candidate& axes) {
      Mesh mesh{.axes = axes, .order = std::int64_t(meshes.size()), .seconds = kNone};
      Candidate quickest = axes;
      for (const std::int64_t size : sizes_on(axes)) {
        quickest.micro_batch = size;
        quickest.micro_batches = numbers_of(quickest, problem_.work).micro_batches();
        mesh.seconds = std::min(mesh.seconds, models_.step.least_of_mesh(quickest));
      }
      meshes.push_back(mesh);
    });
    return meshes;
  }

  double least_bytes(const Candidate& axes) {
    double bytes = kNone;
    Candidate least = axes;
    least.share_parameters = space_.share_parameters;
    for (const Strategy strategy : space_.strategies) {
      least.strategy = strategy, least.checkpoint = strategy == Strategy::kZero3;
      bytes = std::min(bytes, models_.memory.least(least));
    }
    return bytes;
  }

  // `bytes`: at least, on this mesh.
  void visit(const Mesh& mesh, double bytes) {
    std::int64_t at = 0;
    // The length of a pipeline, at least, by schedule, checkpointing and micro-batch: the same for all
    // strategies.
    constexpr std::size_t kKinds = 12;
    const std::vector<std::int64_t> sizes = sizes_on(mesh.axes);
    std::vector<double> lengths(kKinds * sizes.size(), 0);
    double shortest = kNone;
    for (std::size_t size = 0; size < sizes.size(); ++size)
      for (const Schedule schedule : mesh.axes.pp > 1 ? space_.schedules : std::vector{Schedule::kNone}) {
        Candidate plain = mesh.axes;
        plain.schedule = schedule, plain.micro_batch = sizes[size];
        const LayoutNumbers numbers = numbers_of(plain, problem_.work);
        if (broken_rule(numbers, numbers_of_model_, LayoutRule::kStagesOfRank, LayoutRule::kStagesOfRank))
          continue;
        plain.micro_batches = numbers.micro_batches();
        const double length = models_.step.least_length(plain);
        lengths[kKinds * size + 2 * std::size_t(schedule)] = length;
        shortest = std::min(shortest, length);
      }
    if (shortest > slowest() || is_dominated(shortest, bytes)) return;
    Candidate last;  // kind: candidates that differ in their micro-batches alone
    double kept = 0;
    for_each_candidate(problem_, space_, mesh.axes, [&](const Candidate& candidate) {
      ++candidates_, ++at;
      const auto size = std::size_t(std::ranges::lower_bound(sizes, candidate.micro_batch) - sizes.begin());
      double& length =
          lengths[kKinds * size + 2 * std::size_t(candidate.schedule) + (candidate.checkpoint ? 1 : 0)];
      if (length == 0) length = models_.step.least_length(candidate);
      if (length > slowest()) return true;
      Candidate kind = candidate;
      kind.micro_batch = kind.micro_batches = 0;
      if (kind != last) last = kind, kept = models_.memory.kept(candidate);
      const double least = kept + models_.memory.least_beyond_kept(candidate);
      if (least > capacity_) return false;
      if (is_dominated(length, least)) return true;
      const double seconds = models_.step.least(candidate);
      if (seconds > slowest() || is_dominated(seconds, least)) return true;
      Found found{.candidate = candidate, .order = {mesh.order, at}};
      if (!fit(found)) return true;
      ++fitting_;
      found.seconds = models_.step.of(found.candidate).total();
      keep(found);
      return true;
    });
  }

  // With the best buckets that fit.
  bool fit(Found& found) {
    std::int64_t most = space_.bucket_bytes.back();
    while (most >= space_.bucket_bytes.front()) {
      found.candidate.bucket_bytes = models_.step.best_bucket_bytes(found.candidate, most);
      found.bytes = models_.memory.of(found.candidate).total();
      if (found.bytes <= capacity_) return true;
      // Memory of the other strategies does not depend on it.
      if (found.candidate.strategy != Strategy::kZero2 || found.candidate.bucket_bytes > most) return false;
      most = found.candidate.bucket_bytes / 2;
    }
    return false;
  }

  // Layouts that take longer are of no use.
  double slowest() const {
    if (top_.size() < wanted_) return kNone;
    return std::max(top_.back().seconds, front_.empty() ? 0 : kFrontSlower * top_[0].seconds);
  }

  bool is_dominated(double seconds, double bytes) const {
    if (seconds <= (top_.size() < wanted_ ? kNone : top_.back().seconds)) return false;
    return std::ranges::any_of(front_,
                               [&](const Found& one) { return one.seconds < seconds && one.bytes < bytes; });
  }

  void keep(const Found& found) {
    const auto like = std::ranges::find_if(
        top_, [&](const Found& one) { return are_alike(one.candidate, found.candidate); });
    if (like == top_.end())
      top_.push_back(found);
    else if (found.by_time() < like->by_time())
      *like = found;
    std::ranges::sort(top_, {}, &Found::by_time);
    if (top_.size() > wanted_) top_.pop_back();

    if (!with_front_ || std::ranges::any_of(front_, [&](const Found& one) { return one.dominates(found); }))
      return;
    std::erase_if(front_, [&](const Found& one) { return found.dominates(one); });
    front_.insert(std::ranges::upper_bound(front_, found.by_time(), {}, &Found::by_time), found);
  }

  // The one that lacks the fewest bytes.
  std::optional<Planned> nearest(const std::vector<Mesh>& meshes) {
    std::vector<std::pair<double, const Mesh*>> by_bytes;
    for (const Mesh& mesh : meshes) by_bytes.emplace_back(least_bytes(mesh.axes), &mesh);
    std::ranges::sort(by_bytes, {}, [](const auto& one) { return std::tuple(one.first, one.second->order); });
    Found least{.bytes = kNone};
    for (const auto& [bytes, at_mesh] : by_bytes) {
      const Mesh& mesh = *at_mesh;
      if (bytes > least.bytes) break;
      std::int64_t at = 0;
      for_each_candidate(problem_, space_, mesh.axes, [&](const Candidate& candidate) {
        ++candidates_;
        Found found{.candidate = candidate, .order = {mesh.order, ++at}};
        if (models_.memory.least(candidate) > least.bytes) return false;
        found.bytes = models_.memory.of(candidate).total();
        if (found.by_bytes() < least.by_bytes()) least = found;
        return true;
      });
    }
    return least.bytes < kNone ? std::optional(planned(models_, least.candidate)) : std::nullopt;
  }

  static constexpr double kNone = std::numeric_limits<double>::infinity();
  Models& models_;
  const Problem& problem_;
  const std::size_t wanted_;
  const bool with_front_;
  Space space_;
  ModelNumbers numbers_of_model_;
  double capacity_;
  std::vector<Found> top_{}, front_{};
  std::int64_t candidates_ = 0, fitting_ = 0;
};

double flops_of_step(const Problem& problem) {
  const ModelShape& model = problem.model;
  const double samples = double(problem.work.samples()), tokens = samples * double(problem.work.sequence);
  const double all =
      decoder_flops(decoder_of(model), tokens, samples * packs_of(pairs_by_sequence(problem.work)).pairs);
  // That counts three matrices of a feed-forward network.
  const double third = double(model.layers * model.hidden * model.feed_forward);
  return model.gated ? all : all - 6 * tokens * third;
}

Estimate estimate_of(double value, double width, const std::vector<Planned::Part>& parts) {
  Origin worst = Origin::kExact;
  for (const Planned::Part& part : parts) worst = std::max(worst, part.number.origin);
  return within(value, width, worst);
}

}  // namespace

Models::Models(const Problem& of)
    : problem(of), memory(problem, pipelines), step(problem, pipelines, memory) {}

Searched search(Models& models, std::int64_t devices, const Options& options, bool with_front) {
  return Search(models, devices, options, with_front).run();
}

Planned planned(Models& models, const Candidate& candidate) {
  const Problem& problem = models.problem;
  Planned made{.candidate = candidate,
               .memory = models.memory.of(candidate),
               .step = models.step.of(candidate),
               .proved = is_proved(candidate)};
  made.memory_parts = models.memory.explain(candidate, made.memory);
  made.step_parts = models.step.explain(candidate, made.step);
  const Widths widths =
      widths_of(problem.program, models.step.rates().origin(), problem.model.experts.count > 0);
  made.seconds = estimate_of(made.step.total(), widths.seconds, made.step_parts);
  made.bytes = estimate_of(made.memory.total(), widths.memory, made.memory_parts);
  const double tokens = double(problem.work.samples()) * double(problem.work.sequence);
  const Estimate& seconds = made.seconds;
  made.tokens_per_second = {tokens / seconds.value, tokens / seconds.high, tokens / seconds.low,
                            seconds.origin};
  const double peak = problem.cluster.device.peak[std::size_t(problem.work.precision)];
  if (peak > 0) made.mfu = flops_of_step(problem) / (made.seconds.value * peak * candidate.ranks);
  made.head_room = problem.cluster.device.memory - made.memory.total();
  return made;
}

// ---- where nothing fits ----

std::string missing_text(Models& models, const Planned& nearest) {
  const Problem& problem = models.problem;
  const double needs = nearest.memory.total();
  std::string text = fmt::format("lacks {:.1f} GiB at {}", gibibytes(needs - problem.cluster.device.memory),
                                 to_text(nearest.candidate));
  const auto largest =
      std::ranges::max_element(nearest.memory_parts, {}, [](const auto& part) { return part.number.value; });
  if (largest != nearest.memory_parts.end())
    text += fmt::format(", most of it {}, {:.1f} GiB", largest->name, gibibytes(largest->number.value));
  constexpr std::int64_t kMostTimes = 64;
  for (std::int64_t times = 2; times <= kMostTimes && problem.cluster.devices * times <= kMostDevices;
       times *= 2) {
    const Cluster cluster = on_devices(problem.cluster, problem.cluster.devices * times);
    if (cluster.links.empty() || cluster.links.back().ranks < cluster.devices) break;
    const Problem more = with(problem, cluster, problem.work);
    Models others(more);
    const Searched found = search(others, usable_devices(more, cluster.devices), {.top = 1}, false);
    if (found.top.empty()) continue;
    text += fmt::format("; fits on {} of these devices", cluster.devices);
    break;
  }
  text += fmt::format("; or on as many devices of {:.0f} GiB", std::ceil(gibibytes(needs)));
  const Cluster* smallest = nullptr;
  for (const std::string& name : built_in_clusters())
    if (const Cluster* other = built_in(name);
        other->device.memory >= needs && (!smallest || other->device.memory < smallest->device.memory))
      smallest = other;
  return smallest ? text + fmt::format(", such as {}", smallest->name) : text;
}

// ---- neighbours of the best ----

namespace {

// The best layout with one key changed, and those that follow from it.
std::vector<std::pair<std::string, Candidate>> changes_of(const Problem& problem, const Candidate& best) {
  std::vector<std::pair<std::string, Candidate>> all;
  const auto add = [&](std::string change, Candidate changed) {
    const std::int64_t inner = std::int64_t{changed.pp} * changed.tp * changed.cp_ring * changed.cp_ulysses;
    const std::int64_t data = std::max<std::int64_t>(1, changed.ranks / inner);
    if (changed.strategy == Strategy::kBucketed) changed.replicas = std::int32_t(data);
    changed.shards = std::int32_t(std::max<std::int64_t>(1, data / changed.replicas));
    if (changed.pp == 1) changed.schedule = Schedule::kNone, changed.stages_per_rank = 1;
    if (changed.pp > 1 && changed.schedule == Schedule::kNone) changed.schedule = Schedule::kOneFOneB;
    if (inner <= changed.ranks) {
      const std::int64_t most = numbers_of(changed, problem.work).most_samples();
      if (changed.micro_batch > most && best.micro_batch <= most) return;  // the batch has no more
      changed.micro_batch = std::min(changed.micro_batch, most);
      changed.micro_batches = numbers_of(changed, problem.work).micro_batches();
      if (changed.micro_batches == 1) changed.reduce_once = false;
    }
    if (changed != best) all.emplace_back(std::move(change), changed);
  };
  const auto halved_and_doubled = [&](const char* name, auto Candidate::*key) {
    for (const auto size : {best.*key / 2, best.*key * 2}) {
      Candidate changed = best;
      changed.*key = size;
      if (size > 0) add(fmt::format("{} {}", name, size), changed);
    }
  };
  halved_and_doubled("tp", &Candidate::tp), halved_and_doubled("pp", &Candidate::pp);
  halved_and_doubled("cp_ring", &Candidate::cp_ring),
      halved_and_doubled("cp_ulysses", &Candidate::cp_ulysses);
  if (problem.model.experts.count > 0) halved_and_doubled("ep", &Candidate::ep);
  if (best.strategy != Strategy::kBucketed) halved_and_doubled("replicas", &Candidate::replicas);
  for (const Strategy strategy : kStrategies) {
    Candidate changed = best;
    changed.strategy = strategy;
    changed.checkpoint = changed.reduce_once = false, changed.reshard = true;
    if (best.strategy == Strategy::kBucketed) changed.replicas = 1;
    if (strategy != best.strategy) add(std::string(name_of(strategy)), changed);
  }
  for (const Schedule schedule : kSchedules) {
    if (best.pp == 1 || schedule == best.schedule) continue;
    Candidate changed = best;
    changed.schedule = schedule;
    const bool several = schedule == Schedule::kInterleaved || schedule == Schedule::kZeroBubbleV;
    changed.stages_per_rank = several ? 2 : 1;
    add(std::string(name_of(schedule)), changed);
  }
  halved_and_doubled("micro-batch", &Candidate::micro_batch);
  if (best.strategy == Strategy::kZero3) {
    Candidate changed = best;
    changed.checkpoint = !best.checkpoint;
    add(changed.checkpoint ? "checkpointing" : "no checkpointing", changed);
    changed = best, changed.reshard = !best.reshard;
    add(changed.reshard ? "blocks freed after forward" : "blocks kept after forward", changed);
  }
  return all;
}

// The part of a step that grows most, in words.
std::string grown(const StepParts& from, const StepParts& to) {
  const std::pair<const char*, double> parts[] = {
      {"products, of smaller matrices", to.products - from.products},
      {"attention", to.attention - from.attention},
      {"operators without products", to.memory_bound - from.memory_bound},
      {"calls of operators", to.overhead - from.overhead},
      {"exchanges along tp", to.tp - from.tp},
      {"exchanges along cp", to.cp - from.cp},
      {"tokens to experts and back", to.ep - from.ep},
      {"the bubble", to.bubble - from.bubble},
      {"gathers that nothing hides", to.gather - from.gather},
      {"sums of gradients that nothing hides", to.reduce - from.reduce},
      {"norm and optimizer", to.norm + to.optimizer - from.norm - from.optimizer},
      {"gathering the parameters at the end", to.publish - from.publish},
      {"uneven packs", to.uneven - from.uneven}};
  return std::ranges::max_element(parts, {}, [](const auto& part) { return part.second; })->first;
}

}  // namespace

std::vector<Neighbour> neighbours_of(Models& models, const Planned& best) {
  const Problem& problem = models.problem;
  std::vector<Neighbour> neighbours;
  for (auto& [change, candidate] : changes_of(problem, best.candidate)) {
    Neighbour one{.change = change};
    if (const auto text = refusal(problem.model, problem.cluster, problem.work, candidate)) {
      one.reason = fmt::format("refused: {}, {}", text->where, text->found);
    } else {
      candidate.bucket_bytes = models.step.best_bucket_bytes(candidate);
      const double lacks = models.memory.of(candidate).total() - problem.cluster.device.memory;
      const StepParts step = models.step.of(candidate);
      one.seconds = step.total();
      const double more = 100 * (*one.seconds / best.seconds.value - 1);
      if (lacks > 0)
        one.reason = fmt::format("lacks {:.1f} GiB", gibibytes(lacks));
      else if (more < 0.05)
        one.reason = "takes as long";
      else
        one.reason = fmt::format("{}: +{:.{}f} %", grown(best.step, step), more, more < 10 ? 1 : 0);
    }
    neighbours.push_back(std::move(one));
  }
  return neighbours;
}

}  // namespace isograd::planner
