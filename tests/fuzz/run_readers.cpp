// Files of runs, configurations, dumps of steps.
#include <ATen/ATen.h>

#include <cmath>
#include <stdexcept>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/pattern.hpp"
#include "fuzz/readers.hpp"
#include "isograd/error.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "train/build.hpp"
#include "train/checkpoint_files.hpp"
#include "train/config.hpp"
#include "train/metrics.hpp"
#include "train/presenter.hpp"
#include "verify/diagnosis.hpp"
#include "verify/present.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;

void prepare_states(const fs::path& folder) {
  TrainingState state;
  state.optimizer = "adamw", state.dtype = "float32", state.tokenizer = "bytes", state.config = "[run]\n";
  state.bucket_order = {"a", "b"}, state.order = {{"video.patch_height", "8"}};
  put(folder / "state.json", to_json(state));
}

void prepare_listings(const fs::path& folder) {
  publish_directory(folder / "step-00000007", [](const fs::path& to) {
    put(to / "model.safetensors", "weights");
    put(to / "config.json", "{}");
    put(to / "state.json", "{\"format\": 1}");
  });
}

std::string right_listing(std::string text) {
  auto [listing, problem] = parse_json(text);
  if (!problem.empty() || !listing.contains("files")) return text;
  const std::string files = listing["files"].dump();
  listing["xxh3_of_files"] = checksum(files.data(), files.size());
  return listing.dump(1);
}

void prepare_metrics(const fs::path& folder) {
  std::string text;
  for (int step = 1; step < 4; ++step)
    text += to_json_line(
        {.step = step,
         .loss = 0.5 * step,
         .tokens = 7,
         .updated = true,
         .expert_loads = {{.layer = 1, .choices = {4, 0, 10}}, {.layer = 3, .choices = {7, 7, 0}}},
         .dead = {.steps = step, .by_layer = {{1}, {2}}}});
  put(folder / "metrics.jsonl",
      text + to_json_line({.step = 3, .validation_loss = 2.0, .validation_targets = 5}));
}

void prepare_configurations(const fs::path& folder) {
  put(folder / "defaults.toml", to_toml(RunConfig{}));
  put(folder / "some.toml",
      "# a run\n[run]\ndirectory = 'runs/x'\nseed = 0x10\n[data]\ntext = [\"a*.txt\", 'b']\n[train]\nsteps = "
      "1_000\n"
      "[optimizer]\nkind = \"sgd\"\n[parallel]\nstrategy = \"zero3\"\n[loss]\nkind = 'sample_mean'\n");
}

void read_configuration(const fs::path& file) {
  const std::string text = read_file(file);
  const RunConfig config = parse_config(text, file.string());
  if (to_toml(parse_config(to_toml(config), "again")) != to_toml(config))
    throw std::runtime_error("a configuration that is not read back as it was written");
}

// The file's lines as the command line's --set.
void read_overrides(const fs::path& file) { parse_config("", "", lines_of(file, 100)); }

StepDump a_dump(double factor) {
  StepDump dump;
  for (const char* name : {"a.weight", "a.bias", "b"})
    dump.gradients.emplace_back(name, at::arange(1, 7).to(at::kDouble) * factor);
  dump.figures = {.loss = 2.5, .targets = 12, .tokens = 16, .norm = 3, .clip_coefficient = 0.5};
  dump.samples = {1, 2, 3, 3};
  dump.counts = {{3, 4}, {5}};
  dump.axes = {{"dp_replicate", 1}, {"dp_shard", 2}};
  dump.precision = "fp64";
  dump.terms = {{"cross_entropy", 2.5}, {"z", NAN}};
  for (const auto& [name, gradient] : dump.gradients) dump.applied.emplace_back(name, gradient * 0.5);
  dump.owners = {{1, 1}, {1, 1}, {1, 2}};
  StepDump::RankView rank;
  rank.initial = rank.gradients = {1, 2, 3};
  rank.norm = 3;
  dump.ranks = {rank, rank};
  dump.shares = {{dump.gradients, dump.gradients}, {dump.gradients}};
  return dump;
}

void prepare_dumps(const fs::path& folder) { write_dump(a_dump(1), folder / "found"); }

void read_dumps(const fs::path& file) {
  StepDump found = read_dump(file.parent_path());
  for (const double factor : {1.0, 2.0}) {
    const StepDump sound = a_dump(factor);
    for (const bool first : {true, false}) {
      const auto compared =
          compare_dumps(first ? found : sound, first ? sound : found, {"found", "expected"});
      Wording wording{.left = "found", .right = "expected", .reference = "expected", .subject = "found"};
      wording.findings = compared.findings;
      wording.notices = compared.notices;
      to_text(compared.verdict, wording);
      to_json(compared.verdict, wording);
    }
  }
}

void read_pipeline(const fs::path& file) {
  const PipelineTable table = pipeline_from_json(read_file(file), file.string());
  if (pipeline_from_json(to_json(table), "again") != table)
    throw std::runtime_error("a schedule that is not read back as it was written");
  const PipelineTimeline timeline = simulate(table, uniform_times(table.stages));
  to_picture(table, timeline);
  svg(stage_lanes(table, timeline));
}

// Its lines as patterns, each against the names of a model, and as groups of a configuration.
void read_patterns(const fs::path& file) {
  RunConfig config;
  const std::vector<std::string> lines = lines_of(file, 20);
  for (const std::string& line : lines)
    (line.find('=') == std::string::npos ? config.train.clip_groups : config.optimizer.groups)
        .push_back(line);
  const std::vector<std::pair<std::string, at::Tensor>> named{
      {"model.layers.0.mlp.up_proj.weight", at::zeros({1}).requires_grad_()},
      {std::string(300, 'a') + "b", at::zeros({1}).requires_grad_()}};
  for (const std::string& line : lines)
    for (const auto& [name, value] : named) matches(line, name);
  check_groups(config, named);
}

}  // namespace

std::vector<Reader> run_readers() {
  return {
      {"state.json", prepare_states,
       [](const fs::path& file) { parse_state(read_file(file), file.string()); }, kJson},
      {"checksums.json", prepare_listings, [](const fs::path& file) { verify_checksums(file.parent_path()); },
       with(kJson, {"../", "\"bytes\":", "\"xxh3\":"}), right_listing},
      {"metrics", prepare_metrics, [](const fs::path& file) { read_metrics(file); },
       with(kJson, {"\n", "\"step\":"})},
      {"TOML",
       prepare_configurations,
       read_configuration,
       {"[", "]",   "[[", "{",     "}",  "=",   "\"",  "\"\"\"",     "'''",   "\\u0000", "\\U00110000", "\n",
        "#", "[a.", "a.", "1e999", "0x", "nan", "inf", "1979-05-27", "[x]\n", "{a=",     "\xff"}},
      {"--set",
       [](const fs::path& folder) {
         put(folder / "lines",
             "train.steps=10\noptimizer.kind=sgd\ndata.text=['a', "
             "'b']\nrun.directory=\"x\"\nschedule.peak=1e-3\n");
       },
       read_overrides,
       {"=", "[", "]", "\"", "'", "{", ".", "\n", "data.text=", "train.steps=", "1e999", "true", "\\u"}},
      {"dump", prepare_dumps, read_dumps,
       with(kJson, {"\"counts\":", "\"owners\":", "\"ranks\":", "\"nan\"", "\"-inf\"",
                    "\"parameters\":", "\"axes\":"})},
      {"patterns",
       [](const fs::path& folder) {
         put(folder / "groups", "*.mlp.*: 0.5\naaa*a*a*: 1e-3\n");
         put(folder / "rates", "*.mlp.*: rate=0.5\naaa*a*b: rate=2 weight_decay=0\n");
         put(folder / "stars", "model.*.weight: 1\n" + std::string(40, '*') + "a*b: 2\n");
       },
       read_patterns,
       {"*", "**", "*a", "a*", ": ", ":", "=", "rate=", "weight_decay=", "1e999", "nan", "-", "\n", "model.",
        std::string(3000, '*')}},
      {"schedule",
       [](const fs::path& folder) {
         put(folder / "zb.json", to_json(make_pipeline("zb-v", 2, 2, 3)));
         put(folder / "sent.json", to_json(with_transfers(make_pipeline("1f1b", 3, 1, 2))));
       },
       read_pipeline,
       with(kJson,
            {"\"0F0\"", "\"1SEND_B0\"", "0W0", "RECV_F", "\"stages\":", "\"micro_batches\":", "1048576"})},
  };
}

}  // namespace isograd::fuzz
