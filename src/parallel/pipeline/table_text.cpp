// Tables as text and back, and timelines in the terminal.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "base/json.hpp"
#include "base/number_ranges.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;

struct Look {
  Kind kind;
  const char* letters;
};
constexpr Look kLooks[] = {{Kind::kForward, "F"},           {Kind::kBackward, "B"},
                           {Kind::kBackwardInputs, "I"},    {Kind::kBackwardWeights, "W"},
                           {Kind::kSendOutput, "SEND_F"},   {Kind::kReceiveInput, "RECV_F"},
                           {Kind::kSendGradient, "SEND_B"}, {Kind::kReceiveGradient, "RECV_B"}};

const Look& look_of(const PipelineAction& action) {
  return *std::ranges::find(kLooks, action.kind, &Look::kind);
}

std::optional<PipelineAction> action_of(const std::string& text) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto begin = std::find_if_not(text.begin(), text.end(), is_digit);
  const auto end = std::find_if(begin, text.end(), is_digit);
  const std::string letters(begin, end);
  const auto look = std::ranges::find_if(kLooks, [&](const Look& one) { return letters == one.letters; });
  if (look == std::end(kLooks)) return std::nullopt;
  const auto stage = number_in<int>({text.begin(), begin}), micro_batch = number_in<int>({end, text.end()});
  if (!stage || !micro_batch) return std::nullopt;
  return PipelineAction{.kind = look->kind, .stage = *stage, .micro_batch = *micro_batch};
}

std::string label_of(const PipelineAction& action) {
  return fmt::format("{}{}", look_of(action).letters, action.micro_batch);
}

// The computing actions of each rank by stage, ascending.
using Computed = std::vector<std::pair<PipelineAction, PipelineTimeline::Span>>;
std::vector<std::map<int, Computed>> by_stage(const PipelineTable& table, const PipelineTimeline& timeline) {
  std::vector<std::map<int, Computed>> ranks(table.ranks.size());
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
    for (std::size_t i = 0; i < table.ranks[rank].size(); ++i)
      if (const PipelineAction& action = table.ranks[rank][i]; !action.is_transfer())
        ranks[rank][action.stage].emplace_back(action, timeline.spans[rank][i]);
  return ranks;
}

}  // namespace

std::string to_text(const PipelineAction& action) {
  return fmt::format("{}{}{}", action.stage, look_of(action).letters, action.micro_batch);
}

std::string to_json(const PipelineTable& table) {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  for (const auto& actions : table.ranks) {
    std::vector<std::string> texts;
    for (const PipelineAction& action : actions) texts.push_back(to_text(action));
    ranks.push_back(texts);
  }
  const nlohmann::ordered_json document = {{"name", table.name},
                                           {"stages", table.stages},
                                           {"micro_batches", table.micro_batches},
                                           {"ranks", ranks}};
  return json_text(document, 1) + "\n";
}

PipelineTable pipeline_from_json(const std::string& text, const std::string& where) {
  const auto bad = [&](std::string found, std::string expected) {
    refuse(where, std::move(found), std::move(expected),
           "Write it as `isograd schedule --json` writes its tables");
  };
  const auto parsed = parse_json<>(text);
  if (!parsed.problem.empty()) bad(parsed.problem, "a JSON object");
  PipelineTable table{.name = where};
  const auto& document = parsed.value;
  const std::vector<std::string> keys = {"name", "stages", "micro_batches", "ranks"};
  for (const auto& [key, value] : document.items())
    if (std::ranges::find(keys, key) == keys.end())
      bad(fmt::format("a key '{}'", key), fmt::format("{}", fmt::join(keys, ", ")));
  if (const auto name = document.find("name"); name != document.end()) {
    if (!name->is_string()) bad("a name that is no text", "a text");
    table.name = name->get<std::string>();
  }
  constexpr std::int64_t kMost = 1 << 20;
  const auto number = [&](const char* key) {
    const auto value = document.find(key);
    const bool sound =
        value != document.end() && value->is_number_integer() && *value >= 1 && *value <= kMost;
    if (!sound)
      bad(value == document.end() ? fmt::format("no {}", key) : fmt::format("{} {}", key, value->dump()),
          fmt::format("a number from 1 to {}", kMost));
    return static_cast<int>(value->get<std::int64_t>());
  };
  table.stages = number("stages");
  table.micro_batches = number("micro_batches");
  const auto ranks = document.find("ranks");
  if (ranks == document.end() || !ranks->is_array() || ranks->empty())
    bad("no ranks", "a list of actions for each rank");
  table.rank_of_stage.assign(static_cast<std::size_t>(table.stages), -1);
  for (const auto& actions : *ranks) {
    auto& own = table.ranks.emplace_back();
    const int rank = static_cast<int>(table.ranks.size()) - 1;
    if (!actions.is_array()) bad(fmt::format("rank {} without a list", rank), "a list of actions");
    for (const auto& entry : actions) {
      const auto action = entry.is_string() ? action_of(entry.get<std::string>()) : std::nullopt;
      if (!action)
        bad(fmt::format("{} of rank {}", json_text(entry, -1, true), rank),
            "stage, F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B, micro-batch: \"2F0\"");
      own.push_back(*action);
      if (action->stage >= table.stages) continue;  // check_pipeline() names it
      int& home = table.rank_of_stage[static_cast<std::size_t>(action->stage)];
      if (home < 0) home = rank;
    }
  }
  for (int stage = 0; stage < table.stages; ++stage)
    if (table.rank_of_stage[static_cast<std::size_t>(stage)] < 0)
      bad(fmt::format("no action of stage {}", stage), "every stage on a rank");
  std::size_t actions = 0;
  for (const auto& own : table.ranks) actions += own.size();
  // Nothing large is allocated for what the numbers alone claim; check_pipeline() names the first that is
  // missing.
  const std::size_t places =
      static_cast<std::size_t>(table.stages) * static_cast<std::size_t>(table.micro_batches);
  if (actions < 2 * places && places > 100'000)
    bad(fmt::format("{} actions for {} stages and {} micro-batches", actions, table.stages,
                    table.micro_batches),
        "a forward and a backward of each micro-batch in each stage");
  check_pipeline(table);
  return table;
}

std::string to_picture(const PipelineTable& table, const PipelineTimeline& timeline) {
  constexpr double kMostColumns = 160;
  const auto ranks = by_stage(table, timeline);
  double scale = 0;  // columns of a unit of time: every label fits with a space, if there are enough for that
  for (const auto& stages : ranks)
    for (const auto& [stage, computed] : stages)
      for (const auto& [action, span] : computed)
        if (const double length = span.end - span.begin; length > 0)
          scale = std::max(scale, static_cast<double>(label_of(action).size() + 1) / length);
  scale = timeline.length > 0 ? std::min(scale, kMostColumns / timeline.length) : 0;
  const auto column = [&](double time) { return static_cast<std::size_t>(std::lround(time * scale)); };
  std::string text;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    std::string of_rank(column(timeline.length), '.');  // it waits
    for (const auto& [stage, computed] : ranks[rank])
      for (const auto& [action, span] : computed) {
        const std::size_t begin = column(span.begin), end = column(span.end);
        of_rank.replace(begin, end - begin, end - begin, ' ');
      }
    for (const auto& [stage, computed] : ranks[rank]) {
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

}  // namespace isograd
