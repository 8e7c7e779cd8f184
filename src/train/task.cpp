#include "train/task.hpp"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <sstream>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"
#include "train/checkpoint_files.hpp"
#include "train/config_table.hpp"
#include "train/rank_zero.hpp"

namespace isograd {

std::unique_ptr<Task> make_task(const RunConfig& config, Group& group) {
  // Once, before anybody reads of them.
  if (!config.model.load.empty()) on_rank_zero(group, [&] { verify_model_files(config.model.load); });
  auto task = kind_of(config).make(config, group);
  check_same_data(task->facts(), group);
  return task;
}

std::shared_ptr<TaskModel> model_without_values(const RunConfig& config) {
  const TaskKind& kind = kind_of(config);
  if (kind.model_without_values) return kind.model_without_values(config);
  Group alone = Group::solo();
  return kind.make(config, alone)->shape_model({}, scalar_type(config.train.dtype));
}

ModelToLayOut Task::to_fill(const fs::path& directory, at::ScalarType dtype) const {
  const fs::path from = directory.empty() ? fs::path(config_.model.load) : directory;
  ModelToLayOut made;
  if (!from.empty()) made.fill = open_weights(from, dtype);
  made.model = shape_model(directory, dtype);
  if (from.empty())
    made.fill = [model = made.model](const std::string& name, at::Tensor& values) {
      model->initialize(name, values);
    };
  else
    made.check_values = [model = made.model, fill = made.fill, dtype] {
      for (const auto& [name, parameter] : model->named()) {
        at::Tensor values = at::empty(parameter.sizes(), dtype);
        fill(name, values);
      }
    };
  return made;
}

ModelToLayOut Task::make_model_to_lay_out(const fs::path& directory) const {
  return to_fill(directory, scalar_type(config_.train.dtype));
}

std::shared_ptr<TaskModel> Task::make_model(at::ScalarType dtype) const {
  const ModelToLayOut made = to_fill({}, dtype);
  give_values(made.model->named(), made.fill, nullptr, at::kCPU);
  return made.model;
}

std::shared_ptr<TaskModel> Task::make_blank_model(at::ScalarType dtype) const {
  auto model = shape_model({}, dtype);
  give_values(
      model->named(), [](const std::string&, at::Tensor&) {}, nullptr, at::kCPU);
  return model;
}

std::string Task::describe_step(std::int64_t step, int ranks) const {
  const auto loader = make_loader(0, ranks);
  const LoaderPosition at = position_of_step(*loader, step);
  return fmt::format("step {}: step {} of {} of epoch {}\n", step, at.step + 1, loader->steps_per_epoch(),
                     at.epoch + 1) +
         describe(*loader, at, ranks);
}

std::string Task::describe(const BatchLoader&, LoaderPosition at, int ranks) const {
  std::string text;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto loader = make_loader(rank, ranks);
    loader->seek(at);
    text += describe_rank(loader->next(), rank);
  }
  return text;
}

RunConfig Task::micro_sized(int ranks, std::int64_t step) const {
  constexpr std::int64_t kPack = 64;  // tokens
  RunConfig micro = config_;
  const TaskKind& kind = kind_of(micro);
  micro.batch.*kind.per_step = ranks + 1;
  if (kind.per_micro_batch) micro.batch.*kind.per_micro_batch = 1;
  micro.data.pack_length = std::min(micro.data.pack_length, kPack);  // of text
  micro.run.seed += step;
  return micro;
}

ShapeKeys values_of(const RunConfig& config, const std::string& keys) {
  ShapeKeys values;
  std::istringstream names(keys);
  for (std::string name; names >> name;) {
    const auto key = std::ranges::find(config_keys(), name, &ConfigKey::name);
    ISOGRAD_INVARIANT(key != config_keys().end(), "no key " + name);
    values.emplace_back(
        name, std::visit([](const auto& value) { return fmt::format("{}", value); }, key->get(config)));
  }
  return values;
}

const std::vector<const TaskKind*>& task_kinds() {
  static const std::vector<const TaskKind*> kinds{&text_kind(), &scorer_kind(), &video_kind()};
  return kinds;
}

const TaskKind& kind_of(const RunConfig& config) {
  std::string names;
  for (const TaskKind* kind : task_kinds()) {
    if (config.model.kind == kind->name) return *kind;
    names += (names.empty() ? "" : ", ") + std::string(kind->name);
  }
  refuse("model.kind", config.model.kind, names, "Choose one of them");
}

LoaderPosition position_of_step(const BatchLoader& loader, std::int64_t step) {
  if (step < 1)
    refuse("step", std::to_string(step), "1 or more: steps are counted from 1",
           "Name the step as the run's progress does");
  const std::int64_t epoch_steps = loader.steps_per_epoch();
  return {(step - 1) / epoch_steps, (step - 1) % epoch_steps};
}

// ---- files of models that no other library knows ----

namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kExpected[] = {"a whole number", "a number", "true or false"};  // by ShapeField::value

}  // namespace

bool is_own_model(const fs::path& directory, const OwnFamily& family) {
  if (!fs::exists(directory / kConfigFile)) return false;
  const auto [json, problem] = parse_json(read_file(directory / kConfigFile));
  return problem.empty() && json.value("model_type", nlohmann::json()) == family.type;
}

void read_own_shape(const fs::path& directory, const OwnFamily& family, const ShapeFields& shape) {
  const fs::path file = directory / kConfigFile;
  const auto bad = [&](const std::string& key, const std::string& found, const std::string& expected) {
    refuse(file.string() + ": " + key, found, expected, fmt::format("Name a checkpoint of {}", family.run));
  };
  const auto [json, problem] = parse_json(read_file(file));
  if (!problem.empty()) bad("the whole file", problem, "the shape of a model");
  const auto type = json.value("model_type", nlohmann::json("nothing"));
  if (type != family.type) bad("model_type", type.dump(), family.type);
  for (const ShapeField& field : shape) {
    const std::size_t kind = field.value.index();
    if (!json.contains(field.key)) bad(field.key, "no such key", kExpected[kind]);
    const nlohmann::json& found = json[field.key];
    if (!(kind == 0 ? found.is_number_integer() : kind == 1 ? found.is_number() : found.is_boolean()))
      bad(field.key, found.dump(), kExpected[kind]);
    std::visit([&](auto* value) { found.get_to(*value); }, field.value);
  }
}

void write_own_model(const fs::path& directory, const OwnFamily& family, const ShapeFields& shape,
                     const TensorStream& weights) {
  fs::create_directories(directory);
  nlohmann::ordered_json json{{"model_type", family.type}};
  for (const ShapeField& field : shape)
    std::visit([&](const auto* value) { json[field.key] = *value; }, field.value);
  write_file(directory / kConfigFile, json.dump(2) + "\n");
  write_safetensors(directory / kWeightsFile, weights);
}

FillValues open_own_weights(const fs::path& directory, std::int64_t layers,
                            const std::function<NamedTensors()>& describe) {
  const fs::path file = directory / kWeightsFile;
  const auto saved = read_safetensors(file);
  const auto bad = [&](const std::string& name, const std::string& found, const std::string& expected) {
    refuse(file.string() + ": " + name, found, expected, "Use the weights that belong to this config.json");
  };
  const std::string count = fmt::format("{} tensors", saved.size());
  if (static_cast<std::uint64_t>(layers) > saved.size())
    bad("the whole file", count, fmt::format("those of {} layers", layers));
  const NamedTensors described = describe();
  for (const auto& [name, tensor] : described) {
    const auto found = saved.find(name);
    if (found == saved.end()) bad(name, "no such tensor", c10::str(tensor.sizes()));
    if (found->second.sizes() != tensor.sizes())
      bad(name, c10::str(found->second.sizes()), c10::str(tensor.sizes()));
  }
  if (saved.size() != described.size())
    bad("the whole file", count, fmt::format("{}, those of the model", described.size()));
  return [file, saved](const std::string& name, at::Tensor& values) {
    const at::NoGradGuard no_grad;
    values.copy_(saved.at(name));
    check_finite(file, name, values);
  };
}

}  // namespace isograd
