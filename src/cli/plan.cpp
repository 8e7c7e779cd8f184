// isograd plan: which layout to train a model with, how much memory and time it takes, and what limits it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

#include "base/files.hpp"
#include "base/output.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/waiting.hpp"
#include "bench/runner.hpp"
#include "cli/verbs.hpp"
#include "plan/inputs.hpp"
#include "plan/pages.hpp"
#include "plan/problem.hpp"

namespace isograd::planner {
namespace {

constexpr const char* kSizes[] = {
    "layers",       "hidden",     "heads",   "key_value_heads",   "head_dim",
    "feed_forward", "vocabulary", "experts", "experts_per_token", "expert_feed_forward"};

constexpr std::int64_t kMostScaling = 131072;

struct PlanFlags {
  std::string model, cluster, tokens, dtype, strategy, svg, html, write, rows, json;
  std::vector<std::string> sizes = std::vector<std::string>(std::size(kSizes));
  std::optional<std::int64_t> sequence, gpus;
  std::size_t top = 5, tries = 0;
  bool scaling = false;
};

std::size_t index_in(const auto& names, const std::string& name) {
  return static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
}

ModelShape model_of(const PlanFlags& flags) {
  std::vector<std::string> numbers;
  for (std::size_t i = 0; i < flags.sizes.size(); ++i)
    if (!flags.sizes[i].empty()) numbers.push_back(fmt::format("{}={}", kSizes[i], flags.sizes[i]));
  if (numbers.empty() == flags.model.empty())
    refuse("isograd plan", flags.model.empty() ? "no model" : "MODEL and sizes of another one",
           "a configuration, a Hugging Face directory, or sizes",
           "Name one of them, or give --layers, --hidden and --heads");
  if (!numbers.empty()) return parse_model(fmt::format("{}", fmt::join(numbers, ",")), "the model's sizes");
  const bool sizes = flags.model.find('=') != std::string::npos && !fs::exists(flags.model);
  return sizes ? parse_model(flags.model, "MODEL") : read_model(flags.model);
}

Work asked_work(const PlanFlags& flags, const ModelShape& model) {
  const bool run = model.file.extension() == ".toml";
  Work work = run ? planner::work_of(load_config(model.file)) : Work{};
  if (run) work.documents = documents_of(model.file);
  if (!run && flags.tokens.empty())
    refuse("--tokens", "nothing", "the tokens of a batch", "Add them, as in --tokens 4M");
  if (!flags.tokens.empty()) work.tokens = parse_tokens(flags.tokens, "--tokens");
  if (flags.sequence) work.sequence = *flags.sequence;
  if (!flags.dtype.empty()) work.precision = static_cast<Precision>(index_in(kPrecisionNames, flags.dtype));
  return work;
}

int show_errors(const PlanFlags& flags) {
  const std::vector<PublishedRow> rows = read_rows(flags.rows);
  const TextRows errors = errors_table(rows);
  if (errors.size() == 1)
    refuse(flags.rows, fmt::format("{} rows, none of which can be predicted", rows.size()),
           "rows of tier A on devices of the table",
           "Add rows: docs/planning_reference.md names the columns");
  print(stdout, text_table(errors));
  if (!flags.html.empty()) page(rows).write(flags.html);
  return 0;
}

Trials trials_of(const Plan& plan, std::size_t count) {
  ::setenv("OMP_NUM_THREADS", "1", /*overwrite=*/0);  // as launch_ranks() does for several ranks
  const ExchangeFolder folder;
  Waiting waiting("trial", 0);
  const RunProgram run = [&](const std::vector<std::string>& arguments, double most_seconds,
                             double most_bytes) {
    waiting.begin(arguments.front());
    std::vector<std::string> command = {bench_self()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run_program(command, most_seconds, most_bytes);
  };
  return {.layouts = try_layouts(plan, count, run, folder.path()),
          .largest = largest_micro_batch(plan, run, folder.path())};
}

void draw(const Plan& plan, const std::vector<Span>& timeline, const fs::path& folder) {
  make_folders(folder);
  write_file(folder / "memory.svg", svg_file(memory_bars(plan)));
  if (!timeline.empty()) {
    write_file(folder / "timeline.svg", svg_file(timeline_svg(timeline, plan.top[0].seconds.value)));
    write_file(folder / "timeline.json", chrome_trace(timeline));
  }
  write_file(folder / "front.svg", svg_sheet("Layouts that no other beats", {front_chart(plan)}));
  if (plan.scaling.empty()) return;
  write_file(folder / "scaling.svg", svg_sheet("Scaling", {scaling_chart(plan)}));
  write_file(folder / "step.svg", svg_file(step_bars(plan)));
}

int show_plan(const PlanFlags& flags) {
  if (!flags.rows.empty()) return show_errors(flags);
  if (flags.cluster.empty())
    refuse("--cluster", "nothing",
           fmt::format("here, a TOML file, or one of {}", fmt::join(built_in_clusters(), ", ")),
           "Name one of them");
  const ModelShape model = model_of(flags);
  for (const auto& [option, output] :
       {std::pair{"--write", flags.write}, {"--html", flags.html}, {"--json", flags.json}})
    check_no_input(option, output, {model.file, flags.cluster});
  const Work work = asked_work(flags, model);
  Cluster cluster = read_cluster(flags.cluster, flags.gpus);
  const Calibration calibration = read_calibration(flags.cluster);
  Options options{.top = std::max(flags.top, flags.tries)};
  if (!flags.strategy.empty())
    options.only_strategy = static_cast<Strategy>(index_in(kStrategyNames, flags.strategy));
  if (flags.scaling && cluster.per_host <= kMostScaling) {
    // `here` is one host, of which as many ranks were measured as the file has devices.
    const bool here = flags.cluster == "here";
    const std::int64_t last = here ? read_cluster(flags.cluster).devices : kMostScaling;
    for (std::int64_t devices = here ? 1 : cluster.per_host; devices <= last; devices *= here ? 2 : 4)
      options.scaling.push_back(devices);
    const std::int64_t planned = cluster.devices, most = std::max(planned, options.scaling.back());
    cluster = read_cluster(flags.cluster, most);  // with the links of all sizes
    cluster.devices = planned;
  }
  const Plan plan = planner::plan(model, cluster, calibration, work, options);
  std::vector<Span> timeline;
  if (!plan.top.empty() && !(flags.svg.empty() && flags.html.empty()))
    timeline = timeline_of(plan.model, plan.cluster, calibration, plan.work, plan.top[0].candidate);
  if (!flags.svg.empty()) draw(plan, timeline, flags.svg);
  if (!flags.html.empty()) page(plan, timeline).write(flags.html);
  if (!flags.write.empty() && !plan.top.empty()) write_file(flags.write, to_toml(plan, plan.top[0]));
  std::optional<Trials> trials;
  if (flags.tries > 0 && !plan.top.empty()) trials = trials_of(plan, flags.tries);
  if (flags.json != kStandardOutput) print(stdout, to_text(plan) + (trials ? to_text(*trials) : ""));
  if (!flags.json.empty()) write_output(flags.json, to_json(plan, trials ? &*trials : nullptr));
  const auto ran = [](const Tried& tried) { return tried.run.has_value(); };
  return plan.top.empty() || (trials && std::ranges::none_of(trials->layouts, ran)) ? 1 : 0;
}

}  // namespace
}  // namespace isograd::planner

namespace isograd {

Verb plan_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "plan", "Find the fastest layout that fits in memory, for training a model on a cluster");
  auto flags = std::make_shared<planner::PlanFlags>();
  add_option(*verb, "MODEL", flags->model,
             "TOML file of a run, Hugging Face directory, or sizes as in layers=32,hidden=4096,...");
  for (std::size_t i = 0; i < std::size(planner::kSizes); ++i) {
    std::string name = std::string("--") + planner::kSizes[i];
    std::ranges::replace(name, '_', '-');
    if (name == "--key-value-heads") name += ",--key-heads";  // its name until 0.1.0
    add_option(*verb, name, flags->sizes[i], "size of the model, in place of MODEL", "N");
  }
  std::vector<std::string> clusters = planner::built_in_clusters();
  clusters.insert(clusters.end(), {"here", "<files>"});
  offers(add_option(
             *verb, "--cluster", flags->cluster,
             "TOML file, name of a known cluster (h100, ...), or here: the measurements of isograd calibrate",
             "CLUSTER"),
         clusters);
  add_option(*verb, "--tokens", flags->tokens,
             "tokens per step over all ranks, as in 4M; default: as in the TOML file", "N");
  add_option(*verb, "--seq", flags->sequence, "tokens per sequence; default: as in the TOML file, else 4096",
             "N");
  add_option(*verb, "--gpus", flags->gpus, "number of devices of the cluster", "N");
  is_one_of(add_option(*verb, "--dtype", flags->dtype,
                       "data type of training; default: as in the TOML file, else bfloat16", "NAME"),
            {std::begin(planner::kPrecisionNames), std::end(planner::kPrecisionNames)});
  names_strategy(
      is_one_of(add_option(*verb, "--strategy", flags->strategy, "consider this strategy only", "NAME"),
                {std::begin(planner::kStrategyNames), std::end(planner::kStrategyNames)}));
  add_option(*verb, "--top", flags->top, "number of layouts to show", "N", 1, 1000);
  verb->add_flag(
      "--scaling", flags->scaling,
      "plan for more devices too, up to 131072; with --cluster here, up to the ranks that were measured");
  add_json(*verb, flags->json, "all figures (docs/planning_reference.md)");
  add_option(*verb, "--svg", flags->svg,
             "write pictures to this folder: memory, timeline, speed over memory, scaling", "DIR");
  add_option(*verb, "--html", flags->html, "write the plan as a page to this file", "FILE.html");
  add_option(*verb, "--write", flags->write,
             "write the best layout to this file, as a configuration of isograd train", "FILE.toml");
  add_option(*verb, "--try", flags->tries,
             "train with the best N layouts that this machine can run, and with the largest micro-batch", "N",
             0, 1000);
  add_option(*verb, "--validate", flags->rows,
             "print the errors of the predictions for a table of published runs, instead of a plan",
             "ROWS.csv");
  verb->footer(
      "Prints the fastest layouts that fit in memory, their predicted time and memory, and their limits.\n"
      "Each prediction has its uncertainty, and each input names its source. Only --try starts ranks.\n\n"
      "  isograd plan examples/first_light.toml --cluster here --write best.toml\n"
      "  isograd plan models/Llama-3-8B --cluster h100 --gpus 512 --tokens 4M\n\n"
      "Exit status: 0 done; 1 no layout fits, or none could be tried; 2 bad input; 4 a defect of isograd.");
  return {verb, [flags] { return planner::show_plan(*flags); }};
}

}  // namespace isograd
