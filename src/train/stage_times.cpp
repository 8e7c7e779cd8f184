#include "train/stage_times.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "base/files.hpp"
#include "train/rank_zero.hpp"
#include "train/run_folder.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;

// What a stage's forward and backward, or the halves of that, took on average.
PipelineTimes times_of(const Pipeline::Measured& measured) {
  PipelineTimes times = uniform_times(measured.table.stages, 0, 0, 0),
                counts = times;  // how often each was computed
  const auto of_kind = [](PipelineTimes& of, Kind kind) -> std::vector<double>& {
    return kind == Kind::kForward           ? of.forward
           : kind == Kind::kBackwardWeights ? of.backward_weights
                                            : of.backward_inputs;
  };
  for (std::size_t rank = 0; rank < measured.table.ranks.size(); ++rank)
    for (std::size_t i = 0; i < measured.table.ranks[rank].size(); ++i) {
      const PipelineAction& action = measured.table.ranks[rank][i];
      if (action.is_transfer()) continue;
      const auto stage = static_cast<std::size_t>(action.stage);
      const PipelineTimeline::Span span = measured.timeline.spans[rank][i];
      of_kind(times, action.kind)[stage] += span.end - span.begin;
      of_kind(counts, action.kind)[stage] += 1;
    }
  for (const Kind kind : {Kind::kForward, Kind::kBackwardInputs, Kind::kBackwardWeights})
    for (std::size_t stage = 0; stage < times.forward.size(); ++stage)
      if (const double often = of_kind(counts, kind)[stage]; often > 0) of_kind(times, kind)[stage] /= often;
  return times;
}

}  // namespace

std::vector<Showing::Picture> stage_pictures(const Pipeline::Measured& measured) {
  const PipelineTimeline planned = simulate(measured.table, times_of(measured));
  const auto caption = [](const PipelineTimeline& timeline, const char* what) {
    return fmt::format("{} {:.3g} s, of which ranks wait {:.1f} % (bubble).", what, timeline.length,
                       100 * timeline.bubble());
  };
  return {
      {.title = "Stages in the last step, as measured",
       .caption = caption(
           measured.timeline,
           has_halves(measured.table)
               ? "A line for each stage: F forward of a micro-batch, I backward to what the stage was "
                 "given, W to its weights. The step's micro-batches took"
               : "A line for each stage: F forward, B backward of a micro-batch. The step's micro-batches "
                 "took"),
       .html = to_svg(measured.table, measured.timeline),
       .width = kPictureWidth},
      {.title = "The same, as planned",
       .caption = caption(planned,
                          "By the schedule, with what forwards and backwards of each stage took on average:"),
       .html = to_svg(measured.table, planned),
       .width = kPictureWidth}};
}

std::string stage_trace(const std::optional<Pipeline::Measured>& measured, const Mesh& mesh) {
  nlohmann::ordered_json own = nlohmann::ordered_json::array();
  const auto place = static_cast<std::size_t>(mesh.grid().has(kStageAxis) ? mesh.place({kStageAxis}) : 0);
  if (measured) {
    for (std::size_t i = 0; i < measured->table.ranks[place].size(); ++i) {
      const PipelineAction& action = measured->table.ranks[place][i];
      const PipelineTimeline::Span span = measured->timeline.spans[place][i];
      if (action.is_transfer()) continue;
      own.push_back({{"name", to_text(action)},
                     {"cat", action.kind == Kind::kForward ? "forward" : "backward"},
                     {"ph", "X"},
                     {"ts", span.begin * 1e6},
                     {"dur", (span.end - span.begin) * 1e6},
                     {"pid", mesh.rank()},
                     {"tid", action.stage}});
    }
    own.push_back({{"name", "process_name"},
                   {"ph", "M"},
                   {"pid", mesh.rank()},
                   {"args", {{"name", fmt::format("rank {}", mesh.rank())}}}});
  }
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  Group everyone = mesh.all();
  for (int rank = 0; rank < everyone.size(); ++rank)
    for (auto& event : nlohmann::ordered_json::parse(broadcast_text(everyone, own.dump(), rank)))
      all.push_back(std::move(event));
  return nlohmann::ordered_json{{"traceEvents", all}, {"displayTimeUnit", "ms"}}.dump() + "\n";
}

std::vector<Showing::Picture> show_stages(const Pipeline& pipeline, const Mesh& mesh,
                                          const std::filesystem::path& directory) {
  const auto measured = pipeline.measured();
  const std::string trace = stage_trace(measured, mesh);
  Group everyone = mesh.all();
  on_rank_zero(everyone, [&] { write_file(directory / kStageTrace, trace); });
  return measured ? stage_pictures(*measured) : std::vector<Showing::Picture>{};
}

}  // namespace isograd
