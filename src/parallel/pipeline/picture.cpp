// Timelines for people: in the terminal, and as SVG.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/markup.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;

char letter_of(Kind kind) {
  return kind == Kind::kForward          ? 'F'
         : kind == Kind::kBackward       ? 'B'
         : kind == Kind::kBackwardInputs ? 'I'
                                         : 'W';
}

std::string label_of(const PipelineAction& action) {
  return fmt::format("{}{}", letter_of(action.kind), action.micro_batch);
}

using Computed = std::vector<std::pair<PipelineAction, PipelineTimeline::Span>>;

// What each rank computes in each of its stages, ascending.
std::vector<std::map<int, Computed>> by_stage(const PipelineTable& table, const PipelineTimeline& timeline) {
  std::vector<std::map<int, Computed>> ranks(table.ranks.size());
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
    for (std::size_t i = 0; i < table.ranks[rank].size(); ++i)
      if (const PipelineAction& action = table.ranks[rank][i]; !action.is_transfer())
        ranks[rank][action.stage].emplace_back(action, timeline.spans[rank][i]);
  return ranks;
}

template <typename F>
void for_computed(const PipelineTable& table, const PipelineTimeline& timeline, std::size_t rank, F&& with) {
  for (std::size_t i = 0; i < table.ranks[rank].size(); ++i)
    if (!table.ranks[rank][i].is_transfer()) with(table.ranks[rank][i], timeline.spans[rank][i]);
}

// Columns of a unit of time: so many that every label fits with a space, if there are enough for that.
double scale_of(const PipelineTable& table, const PipelineTimeline& timeline) {
  constexpr double kMostColumns = 160;
  double wanted = 0;
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
    for_computed(table, timeline, rank, [&](const PipelineAction& action, PipelineTimeline::Span span) {
      const double length = span.end - span.begin;
      if (length > 0) wanted = std::max(wanted, static_cast<double>(label_of(action).size() + 1) / length);
    });
  return timeline.length > 0 ? std::min(wanted, kMostColumns / timeline.length) : 0;
}

}  // namespace

std::string to_picture(const PipelineTable& table, const PipelineTimeline& timeline) {
  const double scale = scale_of(table, timeline);
  const auto column = [&](double time) { return static_cast<std::size_t>(std::lround(time * scale)); };
  const std::size_t width = column(timeline.length);
  std::string text;
  const auto stages = by_stage(table, timeline);
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank) {
    std::string of_rank(width, '.');  // it waits
    for_computed(table, timeline, rank, [&](const PipelineAction&, PipelineTimeline::Span span) {
      const std::size_t begin = column(span.begin), end = column(span.end);
      of_rank.replace(begin, end - begin, end - begin, ' ');
    });
    for (const auto& [stage, computed] : stages[rank]) {
      std::string row = of_rank;
      for (const auto& [action, span] : computed) {
        const std::size_t begin = column(span.begin), end = column(span.end);
        const std::string label = label_of(action).substr(0, end - begin);
        row.replace(begin, label.size(), label);
      }
      text += fmt::format("rank {:<3} stage {:<3} {}\n", rank, stage, row);
    }
  }
  return text;
}

std::string to_svg(const PipelineTable& table, const PipelineTimeline& timeline) {
  constexpr double kLeft = 120, kWidth = kPictureWidth - 140, kRow = 24, kTop = 40;
  const double unit = timeline.length > 0 ? kWidth / timeline.length : 0;
  const auto colour = [](Kind kind) {
    return kind == Kind::kForward          ? "#7aa6d8"
           : kind == Kind::kBackward       ? "#6fb98f"
           : kind == Kind::kBackwardInputs ? "#8fcfac"
                                           : "#e0b36a";
  };
  std::string body;
  double y = kTop;
  const auto text = [&](double x, double at, const char* anchor, const std::string& what) {
    body +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, at, anchor, what);
  };
  const auto stages = by_stage(table, timeline);
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank) {
    for (const auto& [stage, computed] : stages[rank]) {
      text(kLeft - 8, y + 16, "end", fmt::format("rank {}, stage {}", rank, stage));
      body += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#f1f1ee\"/>\n", kLeft, y,
                          kWidth, kRow - 2);
      for (const auto& [action, span] : computed) {
        const double x = kLeft + span.begin * unit, wide = (span.end - span.begin) * unit;
        body += fmt::format(
            "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" "
            "stroke=\"#fff\"><title>{}: {:.4g} to {:.4g}</title></rect>\n",
            x, y, wide, kRow - 2, colour(action.kind), to_text(action), span.begin, span.end);
        const std::string label = label_of(action);
        if (wide >= 7.0 * static_cast<double>(label.size())) text(x + wide / 2, y + 15, "middle", label);
      }
      y += kRow;
    }
    y += 4;
  }
  const double height = y + 24;
  std::string head = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 "
      "{0} {1}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" "
      "height=\"100%\" fill=\"#fff\"/>\n",
      kPictureWidth, height);
  head += fmt::format(
      "<text x=\"{}\" y=\"22\" font-size=\"14\">{}: {} stages, {} micro-batches, bubble {:.1f} "
      "%</text>\n",
      kLeft, escape_html(table.name), table.stages, table.micro_batches, 100 * timeline.bubble());
  text(kLeft, y + 14, "start", "0");
  text(kLeft + kWidth, y + 14, "end", fmt::format("{:.4g}", timeline.length));
  return head + body + "</svg>\n";
}

}  // namespace isograd
