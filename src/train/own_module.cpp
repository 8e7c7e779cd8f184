// Weights and checkpoints of a torch::nn module of the user's own: only its names and shapes are known.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "layout/flat.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"
#include "parallel/data/same_parameters.hpp"
#include "train/checkpoint_files.hpp"
#include "train/rank_zero.hpp"
#include "train/whole_tensors.hpp"

namespace isograd {
namespace {

constexpr const char* kOtherModel =
    "Make the module as it was when these weights were written, or name the folder of its weights";

// A parameter or buffer of a module.
struct OwnTensor {
  std::vector<std::string> names;  // several: tied
  at::Tensor tensor;
  bool is_parameter = true;
  std::string in_layout{};  // its name there; empty: the module alone has it, as buffers are
  std::vector<std::int64_t> whole_shape{};

  const std::string& name() const { return names.front(); }
};

std::vector<OwnTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<OwnTensor> all;
  std::map<const c10::TensorImpl*, std::size_t> known;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!tensor.defined()) return;
    const auto [place, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), all.size());
    if (is_new)
      all.push_back({.names = {name},
                     .tensor = tensor,
                     .is_parameter = is_parameter,
                     .whole_shape = tensor.sizes().vec()});
    else
      all[place->second].names.push_back(name);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value(), true);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value(), false);
  return all;
}

std::set<std::string> axes_with_parts(const Bucket& bucket, const Mesh& mesh) {
  std::set<std::string> axes;
  for (const std::string& axis : mesh.grid().names())
    if (mesh.size({axis}) > 1 && !bucket.plan.sync.copies.contains(axis)) axes.insert(axis);
  return axes;
}

// The tensors of a module under a layout. ConfigError where they do not belong together.
std::vector<OwnTensor> tensors_of(const torch::nn::Module& module, DataParallel& layout,
                                  const Layout* placed) {
  std::set<std::string> kept;
  const auto add = [&](const Bucket& bucket) {
    for (const Slot& slot : bucket.plan.slots) {
      kept.insert(slot.name);
      if (const auto axes = axes_with_parts(bucket, layout.mesh()); !placed && !axes.empty())
        refuse(fmt::format("parameter '{}'", slot.name),
               fmt::format("parts of it on the ranks along {}", fmt::join(axes, ", ")),
               "the Layout that knows its whole shape", "Pass what cut() returned: &placed");
    }
  };
  const HeldValues::Frozen frozen = layout.frozen();
  for (const Bucket& bucket : layout.buckets()) add(bucket);
  for (const Bucket* bucket : frozen.buckets) add(*bucket);
  for (const NamedParameter& parameter : frozen.tensors) kept.insert(parameter.name);

  std::vector<OwnTensor> all = tensors_of(module);
  for (OwnTensor& own : all)
    for (const std::string& name : own.names)
      if (own.in_layout.empty() && kept.erase(name) > 0) own.in_layout = name;
  if (!kept.empty())
    refuse(fmt::format("parameter '{}' of the layout", *kept.begin()), "no such parameter in the module",
           "the module of which the layout was made",
           "Pass the module whose trainable_parameters() the layout was given");
  if (placed)
    for (OwnTensor& own : all)
      if (!own.in_layout.empty()) own.whole_shape = placed->parameter(own.in_layout).placement.whole_shape;
  return all;
}

// The parameters of a model in stages, undefined where another rank has them. ConfigError: it has buffers.
std::vector<OwnTensor> tensors_of(const PipelineModel& model, const Layout& placed) {
  for (const auto& item : model.modules().named_buffers())
    if (item.value().defined())
      refuse(fmt::format("buffer '{}' of a PipelineModel", item.key()), "a buffer, which its stage alone has",
             "a model without buffers",
             "On one rank of each stage call write_weights(\"stage-0\", model.modules()), a folder for each");
  const std::map<std::string, at::Tensor> held(model.named().begin(), model.named().end());
  std::vector<OwnTensor> all;
  for (const PlacedParameter& parameter : placed.parameters()) {
    const auto found = held.find(parameter.name);
    all.push_back({.names = {parameter.name},
                   .tensor = found == held.end() ? at::Tensor() : found->second,
                   .in_layout = parameter.name,
                   .whole_shape = parameter.placement.whole_shape});
  }
  return all;
}

// ConfigError for values that cannot be read or written where they are.
void check_memory(const std::string& where, const OwnTensor& own, const std::string& action) {
  std::string found;
  try {
    if (own.tensor.is_meta())
      found = "a tensor on the meta device, without values";
    else if (own.tensor.numel() > 0)
      (void)own.tensor.const_data_ptr();
  } catch (const c10::Error&) {
    found = "a parameter of which this rank keeps a shard";
  }
  if (!found.empty()) refuse(fmt::format("{}: '{}'", where, own.name()), found, "a whole tensor", action);
}

// ---- writing ----

// `weights`, and after them the tensors that the module alone has.
TensorStream with_others(const TensorStream& weights, const std::vector<OwnTensor>& all) {
  NamedTensors others;
  for (const OwnTensor& own : all)
    if (own.in_layout.empty()) others.emplace_back(own.name(), own.tensor.detach());
  const TensorStream more = stream_of(std::move(others));
  TensorStream both{.entries = weights.entries, .each = {}};
  both.entries.insert(both.entries.end(), more.entries.begin(), more.entries.end());
  both.each = [first = weights.each, second = more.each](const TensorStream::Take& take) {
    if (first) first(take);
    second(take);
  };
  return both;
}

// The same on every rank: rank 0's are written. Collective.
void check_others(const std::vector<OwnTensor>& all, const Mesh& mesh) {
  std::vector<NamedParameter> others;
  for (const OwnTensor& own : all)
    if (own.in_layout.empty()) others.push_back({own.name(), own.tensor});
  try {
    check_same_parameters(others, mesh.all());
  } catch (const ConfigError& error) {
    refuse("the module's buffers", error.text().found, "the same buffers on every rank, to be written once",
           "Update them alike on all ranks (SyncBatchNorm), or copy rank 0's with Group::broadcast() first");
  }
}

// Files that another write_weights() may replace.
bool is_of_weights(const std::string& name) {
  return name == kListing || name == "model.safetensors.index.json" ||
         (name.starts_with("model") && name.ends_with(".safetensors"));
}

// Keeps a second write of the folder out: ranks that each call write_weights() as if they were alone.
class WriteLock {
 public:
  explicit WriteLock(const fs::path& directory)
      : path_(directory.parent_path() / ("." + directory.filename().string() + ".lock")), lock_(path_) {
    if (lock_.problem() == EWOULDBLOCK)  // where a file system does not lock, it goes on
      refuse(directory.string(), "another write of it at this moment", "one",
             "On ranks call write_weights(directory, module, *layout), of which one rank writes");
  }
  ~WriteLock() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  WriteLock(const WriteLock&) = delete;
  WriteLock& operator=(const WriteLock&) = delete;

 private:
  fs::path path_;
  FileLock lock_;
};

void write_files(const fs::path& directory, const TensorStream& weights, std::int64_t file_bytes) {
  if (directory.empty()) refuse("write_weights()", "an empty name", "a folder's name", "Name one");
  fs::path target = fs::absolute(directory).lexically_normal();
  if (target.filename().empty()) target = target.parent_path();  // a/b/
  const auto bad = [&](const std::string& found) {
    refuse(directory.string(), found, "no such folder, an empty one, or one that write_weights() has written",
           "Give the weights a folder of their own");
  };
  make_folders(target.parent_path());
  const WriteLock lock(target);
  if (fs::exists(target) && !fs::is_directory(target)) bad("a file");
  if (fs::is_directory(target) && !fs::is_empty(target)) {
    for (const auto& entry : fs::directory_iterator(target))
      if (const std::string name = entry.path().filename().string(); !is_of_weights(name))
        bad(fmt::format("{} in it, which would be removed", name));
    if (!fs::exists(target / kListing)) bad(fmt::format("weights of another program, without {}", kListing));
  }
  publish_directory(target, [&](const fs::path& folder) { write_tensor_files(folder, weights, file_bytes); });
}

// ---- reading ----

struct Values {
  const OwnTensor* own;
  at::Tensor source;  // whole
};

// Tensors for all of `all`, in that order, checked.
std::vector<Values> values_for(const fs::path& directory, const std::vector<OwnTensor>& all,
                               const std::string& cut_advice) {
  if (!fs::is_directory(directory))
    refuse(directory.string(), fs::exists(directory) ? "a file" : "no such folder", "a folder of weights",
           fs::exists(directory) ? "Name the folder that it is in" : missing_path_action(directory));
  const std::map<std::string, FoundTensor> stored = read_tensor_files(directory, kOtherModel);
  const auto bad = [&](const fs::path& file, const std::string& name, const std::string& found,
                       const std::string& expected, const std::string& more = {}) {
    refuse(fmt::format("{}: {}", file.string(), name), found, expected, kOtherModel + more);
  };

  std::set<std::string> further;
  for (const auto& [name, found] : stored) further.insert(name);
  std::vector<Values> values;
  const OwnTensor* missing = nullptr;
  for (const OwnTensor& own : all) {
    const FoundTensor* first = nullptr;
    for (const std::string& name : own.names) {
      const auto found = stored.find(name);
      if (found == stored.end()) continue;
      further.erase(name);
      const auto& [tensor, file] = found->second;
      if (tensor.sizes() != at::IntArrayRef(own.whole_shape))
        bad(file, name, c10::str("shape ", tensor.sizes()),
            c10::str("shape ", at::IntArrayRef(own.whole_shape)), cut_advice);
      const at::ScalarType type = tensor.scalar_type(),
                           wanted = own.tensor.defined() ? own.tensor.scalar_type() : type;
      if (type != wanted && !(c10::isFloatingType(type) && c10::isFloatingType(wanted)))
        bad(file, name, c10::toString(type), c10::toString(wanted));
      if (own.is_parameter && c10::isFloatingType(type)) check_finite(file, name, tensor);
      if (first && !first->tensor.equal(tensor))
        bad(file, name, fmt::format("other values than of {}", own.name()),
            "the same values: the module ties them");
      if (!first) values.push_back({&own, tensor});
      first = &found->second;
    }
    if (!first && !missing) missing = &own;
  }
  const auto some = [&] {
    std::vector<std::string> few(
        further.begin(), std::next(further.begin(), std::min<std::ptrdiff_t>(3, std::ssize(further))));
    return fmt::format("{}{}", fmt::join(few, ", "), further.size() > few.size() ? ", ..." : "");
  };
  if (missing && values.empty() && !stored.empty())
    refuse(directory.string(), fmt::format("weights of another model: {}", some()),
           fmt::format("those of this module: {}, ...", missing->name()), kOtherModel);
  if (missing)
    bad(directory, missing->name(),
        further.empty() ? "no such tensor"
                        : fmt::format("no such tensor, and others that the module lacks: {}", some()),
        c10::str("a tensor of shape ", at::IntArrayRef(missing->whole_shape)));
  if (!further.empty())
    bad(stored.at(*further.begin()).file, *further.begin(), "a tensor that this module has no place for",
        "its parameters and buffers alone");
  return values;
}

// Into the tensors that the module alone has.
void write_others(const std::vector<Values>& values) {
  const at::NoGradGuard no_grad;
  for (const auto& [own, source] : values)
    if (own->in_layout.empty()) at::Tensor(own->tensor).copy_(source);
}

// Collective. `directory` has been checked against its checksums.
void read_into(const fs::path& directory, const torch::nn::Module& module, DataParallel& layout,
               const Layout* placed) {
  Group all = layout.mesh().all();
  std::vector<OwnTensor> tensors;
  std::vector<Values> values;
  NamedTensors of_layout;
  on_every_rank(all, [&] {
    tensors = tensors_of(module, layout, placed);
    values = values_for(directory, tensors, "");
    for (const auto& [own, source] : values)
      if (!own->in_layout.empty())
        of_layout.emplace_back(own->in_layout, placed ? placed->local(own->in_layout, source) : source);
  });
  layout.write(of_layout);
  write_others(values);
}

}  // namespace

void write_weights(const fs::path& directory, const ModuleRef& module, std::int64_t file_bytes) {
  const std::vector<OwnTensor> all = tensors_of(*module);
  for (const OwnTensor& own : all)
    check_memory("write_weights()", own, "Call write_weights(directory, module, *layout) on every rank");
  write_files(directory, with_others({}, all), file_bytes);
}

void write_weights(const fs::path& directory, const ModuleRef& module, DataParallel& layout,
                   const Layout* placed, std::int64_t file_bytes) {
  Group all = layout.mesh().all();
  std::vector<OwnTensor> tensors;
  on_every_rank(all, [&] {
    tensors = tensors_of(*module, layout, placed);
    layout.take_over_writes({});
  });
  layout.compare_writes();
  check_others(tensors, layout.mesh());
  WholeTensors weights = WholeTensors::parameters(layout, placed);
  on_rank_zero_with(all, {&weights},
                    [&] { write_files(directory, with_others(weights.stream(), tensors), file_bytes); });
}

void read_weights(const fs::path& directory, const ModuleRef& module) {
  const std::vector<OwnTensor> all = tensors_of(*module);
  for (const OwnTensor& own : all)
    check_memory("read_weights()", own, "Call read_weights(directory, module, *layout) on every rank");
  const fs::path found = published(directory);
  verify_model_files(found);
  const auto values =
      values_for(found, all, "; of a module that cut() has sharded pass layout and placements too");
  write_others(values);
}

void read_weights(const fs::path& directory, const ModuleRef& module, DataParallel& layout,
                  const Layout* placed) {
  Group all = layout.mesh().all();
  std::string found;
  on_rank_zero(all, [&] {
    found = published(directory).string();
    verify_model_files(found);
  });
  read_into(broadcast_text(all, found), *module, layout, placed);
}

void write_weights(const fs::path& directory, const PipelineModel& model, DataParallel& layout,
                   const Layout& placed, std::int64_t file_bytes) {
  Group all = layout.mesh().all();
  on_every_rank(all, [&] {
    (void)tensors_of(model, placed);
    layout.take_over_writes({});
  });
  layout.compare_writes();
  WholeTensors weights = WholeTensors::parameters(layout, &placed);
  on_rank_zero_with(all, {&weights}, [&] { write_files(directory, weights.stream(), file_bytes); });
}

void read_weights(const fs::path& directory, const PipelineModel& model, const Layout& placed) {
  const std::vector<OwnTensor> all = tensors_of(model, placed);
  for (const OwnTensor& own : all)
    if (own.tensor.defined())
      check_memory("read_weights()", own, "Read them before the layout is made, between split() and it");
  const fs::path found = published(directory);
  verify_model_files(found);
  const at::NoGradGuard no_grad;
  for (const auto& [own, source] : values_for(found, all, ""))
    if (own->tensor.defined()) at::Tensor(own->tensor).copy_(placed.local(own->name(), source));
}

fs::path save_checkpoint(const SaveOptions& options, std::int64_t step, const ModuleRef& module,
                         DataParallel& layout, Optimizer& optimizer) {
  Group all = layout.mesh().all();
  std::vector<OwnTensor> tensors;
  on_every_rank(all, [&] {
    if (step < 0)
      refuse("save_checkpoint()", fmt::format("step {}", step), "0 or more steps", "Count from 0");
    if (fs::exists(options.root / kStateFile))
      refuse(options.root.string(), "a checkpoint", "the folder that checkpoints are saved below",
             "Give the folder above it, in which load_checkpoint() finds the newest one");
    tensors = tensors_of(*module, layout, options.placed);
  });
  check_others(tensors, layout.mesh());
  TrainingState state;
  state.step = step;
  return save_checkpoint(
      options, state,
      [&](const fs::path& folder, const TensorStream& weights) {
        write_tensor_files(folder, with_others(weights, tensors), kHfFileBytes);
      },
      layout, optimizer);
}

std::int64_t load_checkpoint(const fs::path& root, const ModuleRef& module, DataParallel& layout,
                             Optimizer& optimizer, const Layout* placed) {
  Group all = layout.mesh().all();
  std::string found;
  on_rank_zero(all, [&] {
    fs::path checkpoint = root;
    if (!fs::exists(root / kStateFile)) {
      if (fs::exists(root / kListing))
        refuse(root.string(), "weights alone, without the state of a run",
               "a checkpoint of save_checkpoint(), or a folder of some", "Read them with read_weights()");
      const auto some = list_checkpoints(root);
      if (some.empty()) return;
      checkpoint = some.back();
    }
    verify_checksums(checkpoint);
    found = checkpoint.string();
  });
  const fs::path checkpoint = broadcast_text(all, found);
  if (checkpoint.empty()) return 0;
  TrainingState state;
  on_every_rank(all, [&] {
    const fs::path file = checkpoint / kStateFile;
    state = parse_state(read_file(file), file.string());
    if (state.optimizer != optimizer.kind())
      refuse(file.string() + ": optimizer", fmt::format("\"{}\"", state.optimizer),
             fmt::format("\"{}\", the optimizer given", optimizer.kind()),
             "Resume with the optimizer of the checkpoint, or read its weights alone with read_weights()");
  });
  read_into(checkpoint, *module, layout, placed);
  restore_optimizer(checkpoint, state, layout, optimizer, placed);
  return state.step;
}

}  // namespace isograd
