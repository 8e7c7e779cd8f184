// isograd schedule: the schedule of a pipeline, without starting ranks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>

#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "report/report.hpp"
#include "train/presenter.hpp"

namespace isograd {
namespace {

struct ScheduleFlags {
  std::string kind = "1f1b", load, svg, json;
  int stages = 4, stages_of_rank = 0, micro_batches = 8;
  std::vector<double> times{1, 1, 1};
  double transfer = 0, between_halves = 1;
  bool transfers = false;
};

PipelineTable table_of(const ScheduleFlags& flags) {
  if (!flags.load.empty()) return pipeline_from_json(read_file(flags.load), flags.load);
  const int each = flags.stages_of_rank > 0                              ? flags.stages_of_rank
                   : flags.kind == "interleaved" || flags.kind == "zb-v" ? 2
                                                                         : 1;
  if (flags.stages % each != 0)
    refuse("--stages", fmt::format("{} stages, {} on each rank", flags.stages, each),
           fmt::format("a multiple of {}", each), "Change --stages or --per-rank");
  return make_pipeline(flags.kind, flags.stages / each, each, flags.micro_batches);
}

template <typename Number>
std::string range_of(const std::vector<Number>& all) {
  const auto [least, most] = std::minmax_element(all.begin(), all.end());
  return *least == *most ? fmt::format("{:.4g}", double(*most))
                         : fmt::format("{:.4g} to {:.4g}", double(*least), double(*most));
}

std::string summary(const PipelineTable& table, const PipelineTimeline& timeline) {
  const std::string live = range_of(timeline.most_live), kept = range_of(timeline.most_kept);
  return fmt::format(
      "{}: {} stages on {} ranks, {} micro-batches; takes {:.6g}, of which ranks wait {:.1f} % (bubble)\n"
      "activations: a rank keeps those of {} micro-batches of a stage at a time{}\n",
      printable(table.name), table.stages, table.ranks.size(), table.micro_batches, timeline.length,
      100 * timeline.bubble(), live, live == kept ? "" : fmt::format(", the memory of {}", kept));
}

int show(const ScheduleFlags& flags) {
  for (const auto& [option, file] : {std::pair("--svg", flags.svg), {"--json", flags.json}})
    check_no_input(option, file, {flags.load});
  PipelineTable table = table_of(flags);
  if (flags.transfers) table = with_transfers(table);
  if (!flags.json.empty()) write_output(flags.json, to_json(table));
  if (flags.json == kStandardOutput) return 0;
  const PipelineTimeline timeline = simulate(
      table, uniform_times(table.stages, flags.times[0], flags.times[1], flags.times[2], flags.transfer),
      flags.between_halves);
  if (!flags.svg.empty()) {
    Lanes lanes = stage_lanes(table, timeline, 0, "time, in the unit of --times");
    lanes.titled = true;
    write_file(flags.svg, svg_file(svg(lanes)));
  }
  print(stdout, to_picture(table, timeline) + summary(table, timeline));
  if (!flags.svg.empty()) print(stdout, fmt::format("drawn in {}\n", printable(flags.svg)));
  return 0;
}

}  // namespace

Verb schedule_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("schedule", "Draw a pipeline schedule without running it");
  auto flags = std::make_shared<ScheduleFlags>();
  offers(add_option(*verb, "--kind", flags->kind,
                    fmt::format("schedule: {}", fmt::join(pipeline_schedules(), ", ")), "NAME"),
         pipeline_schedules());
  add_option(*verb, "--stages", flags->stages, "number of stages of the model", "N", 1, 4096);
  add_option(*verb, "--per-rank", flags->stages_of_rank,
             "stages on each rank; default: 2 for interleaved and zb-v, else 1", "N", 1, 4096);
  add_option(*verb, "--micro-batches", flags->micro_batches, "micro-batches in a step", "N", 1, 100000);
  verb->add_option(
          "--times", flags->times,
          "times of a stage's forward, of its backward for inputs and of its backward for weights, in any unit")
      ->type_name("F,I,W")
      ->delimiter(',')
      ->expected(3)
      ->capture_default_str();
  add_option(*verb, "--transfer", flags->transfer,
             "time of a transfer from rank to rank, during which both compute", "T")
      ->capture_default_str();
  add_option(
      *verb, "--between-halves", flags->between_halves,
      "memory kept between the two halves of a backward, as a fraction of the memory that the forward keeps",
      "FRACTION", 0.0, 100.0);
  add_option(*verb, "--load", flags->load, "check and draw your own table, in the format that --json writes",
             "FILE");
  add_option(*verb, "--svg", flags->svg, "write the picture as SVG to this file", "FILE");
  add_json(*verb, flags->json, "the table");
  verb->add_flag("--transfers", flags->transfers, "show sends and receives too");
  verb->footer(
      "Prints a line for each stage: F is a forward and B a backward; I and W are the halves of a backward,\n"
      "for inputs and for weights. The number is the micro-batch, and a dot means that the rank waits.\n\n"
      "  isograd schedule --kind zb-h1 --stages 4 --micro-batches 8\n\n"
      "Exit status: 0 done; 2 bad input; 4 a defect of isograd.");
  return {verb, [flags] { return show(*flags); }, true};
}

}  // namespace isograd
