#include "isograd/checkpoint.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "model/safetensors.hpp"
#include "train/checkpoint_files.hpp"
#include "train/rank_zero.hpp"
#include "train/whole_tensors.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "state.json";

std::string described(at::ScalarType type, at::IntArrayRef sizes) {
  return c10::str(type, " ", sizes);
}

std::string dtypes_of(DataParallel& layout) {
  std::set<std::string> names;
  for (const Bucket& bucket : layout.buckets())
    names.insert(bucket.plan.dtype == at::kDouble     ? "float64"
                 : bucket.plan.dtype == at::kBFloat16 ? "bfloat16"
                                                      : "float32");
  return fmt::format("{}", fmt::join(names, ", "));
}

// The optimizer's state: a name and, for each bucket, this rank's part. "master" is included if the
// parameters have one.
OptimizerState sharded_state(DataParallel& layout, Optimizer& optimizer) {
  OptimizerState state = optimizer.state(layout.buckets());
  std::vector<at::Tensor> masters;
  bool any = false;
  for (Bucket& bucket : layout.buckets()) {
    const bool own = bucket.master.scalar_type() != bucket.parameters.scalar_type();
    masters.push_back(own ? bucket.master : at::Tensor());
    any = any || own;
  }
  if (any) state["master"] = std::move(masters);
  return state;
}

// One state tensor of one parameter and its place in a bucket.
struct Place {
  const Bucket& bucket;
  const Slot& slot;
  at::Tensor flat;  // [held.size()] of the bucket
};

// State tensors by their names in the file. Names are per parameter, not per bucket or shard, so another
// layout can load them.
std::map<std::string, Place> places(DataParallel& layout, const OptimizerState& state) {
  std::map<std::string, Place> places;
  for (const auto& [key, flats] : state)
    for (std::size_t b = 0; b < flats.size(); ++b)
      if (flats[b].defined())
        for (const Slot& slot : layout.buckets()[b].plan.slots)
          places.emplace(slot.name + "." + key, Place{layout.buckets()[b], slot, flats[b]});
  return places;
}

// ConfigError for the first parameter, of those that this rank has a part of, that its master does not
// round to.
void check_masters(const fs::path& file, DataParallel& layout) {
  for (const Bucket& bucket : layout.buckets()) {
    if (bucket.master.scalar_type() == bucket.parameters.scalar_type()) continue;
    for (const Slot& slot : bucket.plan.slots) {
      const std::int64_t begin = std::max(bucket.held.begin, slot.offset);
      const std::int64_t end = std::min(bucket.held.end, slot.offset + slot.numel);
      if (begin >= end) continue;
      const at::Tensor parameter = bucket.parameters.narrow(0, begin - bucket.held.begin, end - begin);
      const at::Tensor rounded =
          bucket.master.narrow(0, begin - bucket.held.begin, end - begin).to(parameter.scalar_type());
      if (rounded.eq(parameter)
              .logical_or_(rounded.isnan().logical_and_(parameter.isnan()))
              .all()
              .item<bool>())
        continue;
      refuse(file.string() + ": " + slot.name + ".master", "values that do not round to the parameter's",
             "masters of these very weights: the first update would bring the masters' back",
             "Read the weights from the same checkpoint before making the layout; where its own files "
             "differ, start anew from its weights with model.load");
    }
  }
}

}  // namespace

fs::path save_checkpoint(const SaveOptions& options, const TrainingState& state,
                         const WriteModel& write_model, DataParallel& layout, Optimizer& optimizer) {
  const fs::path directory = checkpoint_path(options.root, state.step);
  Group everyone = layout.mesh().all();
  on_every_rank(everyone, [&] { layout.take_over_writes({}); });
  layout.compare_writes();
  TrainingState whole_state = state;
  whole_state.updates = optimizer.updates();
  whole_state.missed_updates = optimizer.missed_updates();
  if (whole_state.bucket_order.empty()) whole_state.bucket_order = layout.bucket_order();
  if (whole_state.optimizer.empty()) whole_state.optimizer = optimizer.kind();
  if (whole_state.dtype.empty()) whole_state.dtype = dtypes_of(layout);
  WholeTensors weights = WholeTensors::parameters(layout, options.placed);
  WholeTensors states(layout, sharded_state(layout, optimizer), options.placed);
  Group all = layout.mesh().all();
  if (all.rank() != 0) weights.drain(), states.drain();
  on_rank_zero(all, [&] {
    std::exception_ptr problem;
    try {
      if (options.makes_folders) make_folders(options.root);
      publish_directory(directory, [&](const fs::path& folder) {
        write_model(folder, weights.stream());
        weights.drain();
        write_safetensors(folder / kOptimizerFile, states.stream());
        write_file(folder / kStateFile, to_json(whole_state));
      });
      prune_checkpoints(options.root, state.step, options.keep);
    } catch (...) {
      problem = std::current_exception();
    }
    weights.drain(), states.drain();  // the other ranks take part to the end, whatever happens to the files
    if (problem) std::rethrow_exception(problem);
  });
  return directory;
}

TrainingState open_checkpoint(const fs::path& directory) {
  verify_checksums(directory);
  const fs::path file = directory / kStateFile;
  return parse_state(read_file(file), file.string());
}

void restore_optimizer(const fs::path& directory, const TrainingState& state, DataParallel& layout,
                       Optimizer& optimizer, const Layout* placed) {
  const fs::path path = directory / kOptimizerFile;
  const auto bad = [&](const std::string& name, const std::string& found, const std::string& expected) {
    refuse(path.string() + ": " + name, found, expected,
           "Resume with the model, optimizer and dtype that this checkpoint was saved with");
  };
  const auto saved = read_safetensors(path);
  const auto needed = places(layout, sharded_state(layout, optimizer));
  // True if the parameter "a" of "a.key" is in another pipeline stage.
  const auto is_elsewhere = [&](const std::string& name) {
    const std::string parameter = name.substr(0, name.rfind('.'));
    return placed && std::ranges::any_of(placed->parameters(), [&](const PlacedParameter& each) {
             return !each.held && each.name == parameter;
           });
  };
  for (const auto& [name, tensor] : saved)
    if (!needed.contains(name) && !is_elsewhere(name))
      bad(name, "a tensor that this run has no place for", "none");
  for (const auto& [name, place] : needed) {
    const auto& [bucket, slot, flat] = place;
    const std::vector<std::int64_t>& shape =
        placed ? placed->parameter(slot.name).placement.whole_shape : slot.shape;
    const std::string expected = described(flat.scalar_type(), shape);
    const auto found = saved.find(name);
    if (found == saved.end()) bad(name, "no such tensor", expected);
    const at::Tensor& source = found->second;
    if (source.sizes() != at::IntArrayRef(shape) || source.scalar_type() != flat.scalar_type())
      bad(name, described(source.scalar_type(), source.sizes()), expected);
    if (state.updates == 0 && !name.ends_with(".master") && source.count_nonzero().item<std::int64_t>() > 0)
      refuse((directory / kStateFile).string() + ": updates",
             fmt::format("0, with values in {} of {}", name, path.filename().string()),
             "the number of updates that the optimizer had made",
             "The caller of save_checkpoint() left TrainingState::updates at 0. Where the number is "
             "known, set it in the state that you pass; else start anew from the weights");
    write_slot(flat, bucket.held, slot, placed ? placed->local(slot.name, source) : source);
  }
  Group everyone = layout.mesh().all();
  on_every_rank(everyone, [&] { check_masters(path, layout); });
  optimizer.set_updates(state.updates);
  optimizer.set_missed_updates(state.missed_updates);
}

std::unique_ptr<Tokenizer> checkpoint_tokenizer(const fs::path& directory, const TrainingState& state) {
  if (state.tokenizer == "bytes") return byte_tokenizer();
  const bool json = state.tokenizer.starts_with("tokenizer.json:");
  const fs::path file = directory / (json ? "tokenizer.json" : "tokenizer.model");
  if (!fs::exists(file))
    refuse(directory.string(),
           state.tokenizer.empty() ? "a model trained on shards of an unknown tokenizer"
                                   : "tokenizer " + state.tokenizer + " without its file",
           file.filename().string() + "next to the weights",
           "Decode with the tokenizer that packed the shards");
  return open_tokenizer(file.string());
}

}  // namespace isograd
