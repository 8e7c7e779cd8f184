#include "parallel/pipeline/agreement.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/refuse.hpp"

namespace isograd {
namespace {

std::int64_t digest_of(const PipelineTable& table) {
  std::uint64_t sum = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&](int number) { sum = (sum ^ static_cast<std::uint32_t>(number)) * 0x100000001b3; };
  add(table.stages), add(table.micro_batches);
  for (const int rank : table.rank_of_stage) add(rank);
  for (const auto& actions : table.ranks) {
    add(static_cast<int>(actions.size()));
    for (const auto& [kind, stage, micro_batch] : actions)
      add(static_cast<int>(kind)), add(stage), add(micro_batch);
  }
  return static_cast<std::int64_t>(sum >> 1);
}

std::string text_of(at::IntArrayRef sizes) {
  std::vector<std::string> texts;
  for (const std::int64_t size : sizes) texts.push_back(size < 0 ? "any" : std::to_string(size));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}

}  // namespace

void check_same_table(const PipelineTable& table, Group ranks) {
  for (int rank = 0; rank < ranks.size(); ++rank)
    if (std::ranges::find(table.rank_of_stage, rank) == table.rank_of_stage.end())
      refuse(fmt::format("the schedule '{}'", table.name), fmt::format("no stage on rank {} along pp", rank),
             "one on each rank at least", "Deal the stages to all ranks, or start fewer along pp");
  if (ranks.size() == 1) return;
  const at::Tensor all = ranks.all_gather(at::full({1}, digest_of(table), at::kLong));  // [ranks, 1]
  for (int rank = 1; rank < ranks.size(); ++rank)
    if (!all[rank].equal(all[0]))
      refuse("the schedule of a pipeline",
             fmt::format("another table on rank {} along pp than on rank 0", rank),
             "the same one on all of them", "Give every rank the same PipelineOptions");
}

void check_sizes(const at::Tensor& given, const std::vector<std::int64_t>& sizes, int stage,
                 std::int64_t micro_batch) {
  const at::IntArrayRef found = given.sizes();
  const bool fits =
      std::equal(found.begin(), found.end(), sizes.begin(), sizes.end(),
                 [](std::int64_t own, std::int64_t wanted) { return wanted < 0 || own == wanted; });
  if (fits) return;
  refuse(fmt::format("stage {} of a pipeline", stage),
         fmt::format("{} from stage {}, {}", text_of(found), stage - 1,
                     micro_batch < 0 ? "outside of a step" : fmt::format("of micro-batch {}", micro_batch)),
         text_of(sizes), "Make the two stages agree on what goes between them");
}

void check_exchanged(bool received, bool passed_on, int stage, int stages, std::int64_t micro_batch) {
  const auto refuse_forward = [&](const char* call, int other) {
    refuse(
        fmt::format("stage {} of a pipeline", stage),
        fmt::format("a forward of micro-batch {} without a call of {}", micro_batch, call),
        fmt::format("one, because stage {} {}", other, other < stage ? "has passed something on" : "waits"),
        "Call it in every forward of the stage, whatever the micro-batch holds");
  };
  if (stage > 0 && !received) refuse_forward("receive()", stage - 1);
  if (stage + 1 < stages && !passed_on) refuse_forward("pass_on()", stage + 1);
}

}  // namespace isograd
