// Facts of the planner's plain data, and its public functions, which put the models to work.
#include "isograd/planner.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/inputs.hpp"
#include "plan/search.hpp"

namespace isograd::planner {

double bytes_of(Precision precision) {
  return std::array<double, kPrecisions>{8, 4, 2, 1}[std::size_t(precision)];
}

std::string_view name_of(Precision precision) { return kPrecisionNames[std::size_t(precision)]; }
std::string_view name_of(Origin origin) { return kOriginNames[std::size_t(origin)]; }
std::string_view name_of(Strategy strategy) { return kStrategyNames[std::size_t(strategy)]; }
std::string_view name_of(Schedule schedule) { return kScheduleNames[std::size_t(schedule)]; }

bool ModelShape::has_experts(std::int64_t layer) const {
  return experts.count > 0 && !std::ranges::binary_search(experts.dense_layers, layer);
}

namespace {

// A mixture counts with `experts` of its experts.
double trained_elements(const ModelShape& of, std::int64_t experts) {
  const auto hidden = double(of.hidden);
  double all = hidden * double(of.vocabulary) * (of.tied_output ? 1 : 2) + hidden;  // and the last norm
  for (std::int64_t layer = 0; layer < of.layers; ++layer) {
    const auto [rest, expert] = elements_of(of, of.key_value_heads, 1, of.has_experts(layer));
    all += rest + double(experts) * expert;
  }
  return all;
}

}  // namespace

double ModelShape::parameters() const { return trained_elements(*this, experts.count); }
double ModelShape::active_parameters() const { return trained_elements(*this, experts.per_token); }

std::int64_t Work::samples() const { return sequence > 0 ? std::int64_t(tokens / double(sequence)) : 0; }

double StepParts::total() const {
  return products + attention + memory_bound + overhead + tp + cp + ep + bubble + gather + reduce + norm +
         optimizer + publish + uneven;
}

namespace {

// Copies between a shape of the planner and one of the model room, either way.
template <class From, class To>
void copy_sizes(const From& from, To& to) {
  to.family = from.family, to.vocabulary = from.vocabulary, to.hidden = from.hidden, to.layers = from.layers;
  to.heads = from.heads, to.head_dim = from.head_dim, to.feed_forward = from.feed_forward;
  to.tied_output = from.tied_output, to.attention_bias = from.attention_bias,
  to.output_bias = from.output_bias;
  to.mlp_bias = from.mlp_bias, to.query_key_norm = from.query_key_norm;
  to.experts.count = from.experts.count, to.experts.per_token = from.experts.per_token;
  to.experts.feed_forward = from.experts.feed_forward;
  to.experts.shared_feed_forward = from.experts.shared_feed_forward;
  to.experts.dense_layers = from.experts.dense_layers;
}

}  // namespace

DecoderConfig decoder_of(const ModelShape& model) {
  DecoderConfig config;
  copy_sizes(model, config);
  config.key_value_heads = model.key_value_heads;
  config.experts.sigmoid = model.family == "dots1";
  return config;
}

ModelShape shape_of(const DecoderConfig& config, std::string name) {
  ModelShape shape{.name = std::move(name), .key_value_heads = config.key_value_heads};
  copy_sizes(config, shape);
  return shape;
}

at::ScalarType type_of(Precision precision) {
  return precision == Precision::kFloat64   ? at::kDouble
         : precision == Precision::kFloat32 ? at::kFloat
                                            : at::kBFloat16;
}

namespace {

// A question whose inputs are checked, with isograd's models. Links come in any order.
struct Asked {
  Asked(const ModelShape& of, const Cluster& on, const Calibration& by, const Work& job)
      : model(of), cluster(on), calibration(by), work(job) {
    check(model), check(cluster), check(work);
    std::ranges::sort(cluster.links, {}, &Link::ranks);
    problem.constants = constants_of(problem.program, cluster.device, work.precision);
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  // A layout that `train` accepts.
  Models& of(const Candidate& candidate) {
    if (const auto text = refusal(model, cluster, work, candidate)) throw ConfigError(*text);
    return models;
  }

  ModelShape model;
  Cluster cluster;
  const Calibration& calibration;
  Work work;
  Problem problem{.model = model, .cluster = cluster, .calibration = calibration, .work = work};
  Models models{problem};
};

std::vector<std::string> warnings_of(const Plan& plan, const Calibration& calibration) {
  std::vector<std::string> all;
  const auto add = [&]<class... T>(fmt::format_string<T...> text, T&&... values) {
    all.push_back(fmt::format(text, std::forward<T>(values)...));
  };
  const Cluster& cluster = plan.cluster;
  if (!plan.top.empty()) {
    const Planned& best = plan.top.front();
    const Candidate& layout = best.candidate;
    if (layout.ranks < cluster.devices)
      add("{} of {} devices are idle: no layout that fits uses all of them", cluster.devices - layout.ranks,
          cluster.devices);
    constexpr double kNearlyFull = 0.08;
    if (best.head_room < kNearlyFull * cluster.device.memory)
      add("only {:.1f} % of the memory are left: published runs as full as that ran much slower than their like, "
          "or failed",
          100 * best.head_room / cluster.device.memory);
    if (!best.proved)
      add("no test proves this combination of axes; isograd verify proves it on the ranks that are here");
    if (const std::int64_t rest = plan.work.samples() % layout.data_ranks(); rest != 0)
      add("{} of {} data ranks have one sequence less than the others", layout.data_ranks() - rest,
          layout.data_ranks());
    if (cluster.hosts() > 1 && !cluster.host_memory)
      add("GPUs of several hosts: the configuration has backend = \"shm+mpi\"; the times are those of a direct "
          "network between GPUs, which that backend does not use");
    if (const double part = 100 * best.step.uneven / best.seconds.value;
        part >= 0.05)  // 0.1 % as it is shown
      add("documents are of uneven lengths: the slowest rank attends for {:.1f} % of the step longer", part);
  }
  if (plan.model.experts.count > 0)
    add("tokens are assumed to spread evenly over the experts; nobody publishes how uneven they are");
  if (!plan.model.gated)
    add("isograd trains models with gated feed-forward networks: this plan cannot be written");
  if (calibration.empty())
    add("times follow the data sheet and shares of it that were fitted on other programs' published runs: run "
        "isograd calibrate on a device of this kind");
  std::ranges::copy(calibration.not_measured, std::back_inserter(all));
  return all;
}

// Each number of devices by a search of its own.
std::vector<ScalingPoint> scaling_of(const Plan& plan, const Calibration& calibration,
                                     const Options& options) {
  std::vector<std::int64_t> sizes = options.scaling;
  std::ranges::sort(sizes);
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  std::vector<ScalingPoint> points;
  for (const std::int64_t devices : sizes) {
    Asked asked(plan.model, on_devices(plan.cluster, devices), calibration, plan.work);
    Options one = options;
    one.top = 1;
    Searched found = search(asked.models, usable_devices(asked.problem, devices), one, false);
    if (found.top.empty()) continue;
    ScalingPoint point{.devices = devices, .best = std::move(found.top.front())};
    const auto speed = [](const ScalingPoint& of) {
      return of.best.tokens_per_second.value / double(of.devices);
    };
    point.efficiency = points.empty() ? 1 : speed(point) / speed(points.front());
    if (const auto laws = laws_of(asked.models, point.best); !laws.empty()) point.law = laws.front().name;
    points.push_back(std::move(point));
  }
  return points;
}

}  // namespace

MemoryParts memory_of(const ModelShape& model, const Cluster& cluster, const Work& work,
                      const Candidate& candidate) {
  const Calibration nothing;
  return Asked(model, cluster, nothing, work).of(candidate).memory.of(candidate);
}

StepParts step_of(const ModelShape& model, const Cluster& cluster, const Calibration& calibration,
                  const Work& work, const Candidate& candidate) {
  check_peak(cluster.device, calibration, work.precision);
  return Asked(model, cluster, calibration, work).of(candidate).step.of(candidate);
}

double sent_bytes_of(const ModelShape& model, const Work& work, const Candidate& candidate) {
  check(model), check(work);
  const Cluster cluster;
  const Calibration nothing;
  if (const auto text = refusal(model, cluster, work, candidate)) throw ConfigError(*text);
  const Problem problem{.model = model, .cluster = cluster, .calibration = nothing, .work = work};
  const std::vector<StageShape> stages =
      stage_shapes(problem, candidate.tp, candidate.ep, candidate.pp * candidate.stages_per_rank);
  double most = 0;
  for (int rank = 0; rank < candidate.pp; ++rank)
    most = std::max(most, traffic_bytes(data_parallel_plan(problem, candidate, stages, rank)).total());
  return most;
}

std::vector<Span> timeline_of(const ModelShape& model, const Cluster& cluster, const Calibration& calibration,
                              const Work& work, const Candidate& candidate) {
  check_peak(cluster.device, calibration, work.precision);
  return Asked(model, cluster, calibration, work).of(candidate).step.timeline(candidate);
}

Plan plan(const ModelShape& model, const Cluster& cluster, const Calibration& calibration, const Work& work,
          const Options& options) {
  check_peak(cluster.device, calibration, work.precision);
  Asked asked(model, cluster, calibration, work);
  Models& models = asked.models;
  Searched found = search(models, usable_devices(asked.problem, cluster.devices), options);
  Plan made{.model = asked.model,
            .cluster = asked.cluster,
            .work = work,
            .top = std::move(found.top),
            .front = std::move(found.front),
            .nearest = std::move(found.nearest),
            .candidates = found.candidates,
            .fitting = found.fitting};
  if (made.nearest) made.missing = missing_text(models, *made.nearest);
  if (!made.top.empty()) {
    const Planned& best = made.top.front();
    made.neighbours = neighbours_of(models, best);
    made.laws = laws_of(models, best);
    made.recipe = recipe_of(models, best);
  }
  made.ways_out = ways_out_of(models, options);
  made.scaling = scaling_of(made, calibration, options);
  made.warnings = warnings_of(made, calibration);
  return made;
}

}  // namespace isograd::planner
