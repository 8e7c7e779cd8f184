// A list of modules made and called, stage after stage.
#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/group.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/random.hpp"
#include "parallel/data/same_parameters.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace {

using Json = nlohmann::json;

// -1: none of them is it.
int place_of(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  const auto found =
      std::ranges::find_if(tensors, [&](const at::Tensor& one) { return one.is_same(tensor); });
  return found == tensors.end() ? -1 : static_cast<int>(found - tensors.begin());
}

// Each once, by the first of its names.
PipelineModel::NamedTensors parameters_of(const torch::nn::Module& module) {
  PipelineModel::NamedTensors all;
  std::vector<at::Tensor> seen;
  for (const auto& item : module.named_parameters()) {
    if (place_of(seen, item.value()) >= 0) continue;
    seen.push_back(item.value());
    all.emplace_back(item.key(), item.value());
  }
  return all;
}

// ---- the parameters of a list of modules of which each rank has made some ----

// A parameter of the whole list, on any rank.
struct ListedParameter {
  std::string name;     // "<module>.<parameter>", of a tied one the first such
  std::vector<int> on;  // ranks along pp that have it, ascending
  std::vector<std::int64_t> shape;
  int given = -1;  // which of the given tensors it is, if any
};

// All ranks' descriptions. `describe` is not collective; its first ConfigError is thrown on all. Collective.
std::vector<Json> described_by_all(Group& group, const std::function<Json()>& describe) {
  std::string own;
  on_every_rank(group, [&] { own = Json{{"modules", describe()}}.dump(); });
  std::vector<Json> all;
  for (int rank = 0; rank < group.size(); ++rank)
    all.push_back(parse_json(broadcast_text(group, own, rank)).value.at("modules"));
  return all;
}

// Where two lists first differ: the place, and the element of each there; null where a list is shorter.
std::tuple<std::size_t, Json, Json> first_difference(const Json& one, const Json& other) {
  std::size_t place = 0;
  while (place < one.size() && place < other.size() && one[place] == other[place]) ++place;
  const auto at = [&](const Json& list) { return place < list.size() ? list[place] : Json(); };
  return {place, at(one), at(other)};
}

// ConfigError if a rank's list differs from rank 0's.
void check_same_lists(const std::vector<Json>& lists) {
  for (std::size_t rank = 1; rank < lists.size(); ++rank) {
    if (lists[rank] == lists[0]) continue;
    const auto [place, first, other] = first_difference(lists[0], lists[rank]);
    const auto said = [](const Json& line) {
      return line.is_null() ? std::string("nothing more") : line.get<std::string>();
    };
    refuse(fmt::format("module {} of a pipeline's list", place),
           fmt::format("{} on rank 0, {} on rank {}", said(first), said(other), rank),
           "the same list on every rank", "Make the list from what all ranks know alike");
  }
}

// `modules`: Impl::described() by rank; `pp`: each rank's place along pp. ConfigError where two ranks differ.
std::vector<ListedParameter> listed_parameters(const std::vector<Json>& modules, const std::vector<int>& pp,
                                               const std::vector<PipelineModule>& list) {
  std::vector<ListedParameter> all;
  for (std::size_t module = 0; module < list.size(); ++module) {
    std::map<int, std::size_t> first_rank;  // by place along pp
    for (std::size_t rank = 0; rank < modules.size(); ++rank) {
      const std::size_t first = first_rank.emplace(pp[rank], rank).first->second;
      const Json &expected = modules[first][module], &found = modules[rank][module];
      if (found == expected) continue;
      const auto [place, one, other] = first_difference(expected, found);
      const auto said = [](const Json& of) {
        if (of.is_null()) return std::string("no such parameter");
        return fmt::format("'{}', {} [{}]{}", of["name"].get<std::string>(), of["dtype"].get<std::string>(),
                           fmt::join(of["shape"].get<std::vector<std::int64_t>>(), ", "),
                           of["trained"].get<bool>() ? "" : ", frozen");
      };
      refuse(fmt::format("module '{}' of a pipeline", list[module].name),
             fmt::format("{} on rank {}, {} on rank {}", said(one), first, said(other), rank),
             "the same parameters on all ranks of its stage",
             "Make it from what all ranks know alike, and freeze the same parameters everywhere");
    }
    for (const auto& [place, rank] : first_rank)
      for (const Json& of : modules[rank][module]) {
        const int given = of["given"];
        const auto tied = std::ranges::find_if(
            all, [&](const ListedParameter& known) { return given >= 0 && known.given == given; });
        if (tied == all.end())
          all.push_back({.name = of["name"], .on = {place}, .shape = of["shape"], .given = given});
        else if (!std::ranges::binary_search(tied->on, place))
          tied->on.insert(std::ranges::upper_bound(tied->on, place), place);
      }
  }
  return all;
}

Layout::Named placements_of(const std::vector<ListedParameter>& parameters, const Grid& grid) {
  const bool stages = grid.has(kStageAxis) && grid.size({kStageAxis}) > 1;
  Layout::Named named;
  for (const ListedParameter& one : parameters) {
    Placement placement = placed(grid, one.shape, {}, stages ? one.on : std::vector<int>{});
    // Ends of a tied parameter on several ranks: each has a part of its gradient.
    if (stages && one.on.size() > 1) placement.summed.insert(kStageAxis);
    named.emplace_back(one.name, std::move(placement));
  }
  return named;
}

}  // namespace

struct PipelineModel::Impl {
  std::vector<PipelineModule> list;
  PipelineModelOptions options;
  std::vector<at::Tensor> given{};     // tensors of the whole list, each once
  std::vector<CallableModule> made{};  // by place in the list; null where this rank has none
  std::shared_ptr<torch::nn::Module> modules = std::make_shared<torch::nn::Module>("model");
  NamedTensors named{};
  Layout::Named placements{};
  std::shared_ptr<Pipeline> pipeline{};
  std::vector<StageLayers> stages{};

  void make(const std::vector<bool>& wanted);
  void make(std::size_t place);
  void drop_others(const std::vector<bool>& own);
  void check_shared() const;
  Json described_list() const;
  Json described() const;
  void name(const std::vector<ListedParameter>& listed);
  at::Tensor call(StageLayers which, at::Tensor x, const Batch& batch) const;
};

PipelineModel::PipelineModel(std::vector<PipelineModule> list, PipelineModelOptions options)
    : impl_(std::make_shared<Impl>(Impl{.list = std::move(list), .options = std::move(options)})) {
  auto& modules = impl_->list;
  if (modules.empty())
    refuse("a pipeline's list of modules", "none", "one for each stage, or more",
           "Give the model's modules in the order of its forward");
  std::set<std::string> names;
  for (std::size_t place = 0; place < modules.size(); ++place) {
    PipelineModule& module = modules[place];
    if (module.name.empty()) module.name = std::to_string(place);
    const std::string where = fmt::format("module '{}' of a pipeline", module.name);
    if (module.name.find_first_of(".\n\t") != std::string::npos)
      refuse(where, "a name with a dot, a tab or a new line", "one without",
             "Rename it; parameters' names follow behind a dot");
    if (!names.insert(module.name).second)
      refuse(where, "two modules of this name", "a name for each, so that each parameter has its own",
             "Rename one of them, or leave names out");
    if (!(module.cost > 0) || !std::isfinite(module.cost))
      refuse(where, fmt::format("a cost of {}", module.cost), "a positive number",
             "Give its share of the time, in a unit of all");
    if (!module.make) refuse(where, "nothing that makes it", "a function", "Use pipeline_module()");
    for (const at::Tensor& tensor : module.given)
      if (place_of(impl_->given, tensor) < 0) impl_->given.push_back(tensor);
  }
  impl_->made.resize(modules.size());
}

// Makes a module under the seed of its name.
void PipelineModel::Impl::make(std::size_t place) {
  const PipelineModule& one = list[place];
  CallableModule module;
  {
    static std::mutex one_at_a_time;  // ranks that are threads share the CPU's default generator
    const std::lock_guard alone(one_at_a_time);
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const auto locked = [&generator](const auto& work) {
      const std::lock_guard lock(generator.mutex());
      return work();
    };
    const at::Tensor before = locked([&] { return generator.get_state(); });
    const auto restore = c10::make_scope_exit([&] { locked([&] { generator.set_state(before); }); });
    const RandomKey key{.seed = options.seed, .layer = hash_name(one.name)};
    locked([&] { generator.set_current_seed(random_bits(key, 0)); });
    module = one.make();
  }
  if (!module.module || !module.forward)
    refuse(fmt::format("module '{}' of a pipeline", one.name), "a null module", "one that is made",
           "Return it from the function that makes it");
  const at::NoGradGuard no_grad;
  const auto convert = [this](at::Tensor tensor) {
    if (!tensor.defined()) return;
    const auto type = options.dtype && tensor.is_floating_point() ? *options.dtype : tensor.scalar_type();
    const at::Tensor changed = tensor.to(options.device, type);
    if (!changed.is_same(tensor)) tensor.set_data(changed);
  };
  for (const auto& item : module.module->named_parameters()) convert(item.value());
  for (const auto& item : module.module->named_buffers()) convert(item.value());
  made[place] = std::move(module);
}

// Makes those of `wanted` that do not exist yet, drops the others, and collects the parameters of all.
void PipelineModel::Impl::make(const std::vector<bool>& wanted) {
  for (std::size_t place = 0; place < list.size(); ++place)
    if (wanted[place] && !made[place].module) make(place);
  drop_others(wanted);
  modules = std::make_shared<torch::nn::Module>("model");
  for (std::size_t place = 0; place < list.size(); ++place)
    if (made[place].module) modules->register_module(list[place].name, made[place].module);
  check_shared();
  prepare_module(*modules, Group::solo(), {.accept_dropout = options.accept_dropout});
}

// A tensor in two modules would diverge if these are on two ranks, which do not know of each other.
void PipelineModel::Impl::check_shared() const {
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::string>> seen;
  for (std::size_t place = 0; place < list.size(); ++place) {
    if (!made[place].module) continue;
    for (const auto& [key, tensor] : parameters_of(*made[place].module)) {
      const std::string name = fmt::format("{}.{}", list[place].name, key);
      const auto [first, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), std::pair(place, name));
      const auto gives = [&, of = tensor](std::size_t to) { return place_of(list[to].given, of) >= 0; };
      if (is_new || (gives(place) && gives(first->second.first))) continue;
      refuse(fmt::format("parameter '{}'", name),
             fmt::format("the tensor of '{}', of another module", first->second.second),
             "a tensor of its own, or one that the list gives to both modules (PipelineModule::given)",
             "Make a tied parameter before the list, and give it to both as an argument of "
             "pipeline_module<Module>()");
    }
  }
}

// Facts of each module that ranks must agree on before any module is made.
Json PipelineModel::Impl::described_list() const {
  Json lines;
  for (const PipelineModule& module : list) {
    std::string line = fmt::format("'{}' of cost {}", module.name, module.cost);
    for (const at::Tensor& tensor : module.given)
      line += fmt::format(", given tensor {}", place_of(given, tensor));
    lines.push_back(line);
  }
  return lines;
}

// The parameters of each module of the list; none of those that this rank has not made.
Json PipelineModel::Impl::described() const {
  Json all;
  for (std::size_t place = 0; place < list.size(); ++place) {
    Json own = Json::array();
    if (made[place].module)
      for (const auto& [key, tensor] : parameters_of(*made[place].module))
        own.push_back({{"name", fmt::format("{}.{}", list[place].name, key)},
                       {"dtype", c10::toString(tensor.scalar_type())},
                       {"shape", tensor.sizes().vec()},
                       {"trained", tensor.requires_grad()},
                       {"given", place_of(given, tensor)}});
    all.push_back(std::move(own));
  }
  return all;
}

// This rank's parameters by the names that they have in the whole model.
void PipelineModel::Impl::name(const std::vector<ListedParameter>& listed) {
  named.clear();
  for (const auto& [own_name, tensor] : parameters_of(*modules)) {
    const int place = place_of(given, tensor);
    const auto found = std::ranges::find_if(listed, [&, own = own_name](const ListedParameter& one) {
      return one.name == own || (place >= 0 && one.given == place);
    });
    ISOGRAD_INVARIANT(found != listed.end(), fmt::format("parameter '{}', which no rank listed", own_name));
    named.emplace_back(found->name, tensor);
  }
}

// Modules of other stages, which a whole model was made with.
void PipelineModel::Impl::drop_others(const std::vector<bool>& own) {
  const at::NoGradGuard no_grad;
  std::set<const c10::TensorImpl*> kept;
  for (std::size_t place = 0; place < list.size(); ++place)
    if (own[place])
      for (const auto& [name, tensor] : parameters_of(*made[place].module))
        kept.insert(tensor.unsafeGetTensorImpl());
  for (std::size_t place = 0; place < list.size(); ++place) {
    if (own[place] || !made[place].module) continue;
    for (auto& [name, tensor] : parameters_of(*made[place].module))  // others may keep the tensor
      if (!kept.contains(tensor.unsafeGetTensorImpl()))
        at::Tensor(tensor).set_data(at::empty({0}, tensor.options()));
    made[place] = {};
  }
}

void PipelineModel::make_all() {
  Impl& own = *impl_;
  if (own.pipeline)
    refuse("PipelineModel::make_all", "a model in stages", "one that has not been split",
           "Make another PipelineModel of the same list");
  own.make(std::vector<bool>(own.list.size(), true));
  own.name(listed_parameters({own.described()}, {0}, own.list));
  own.placements.clear();
}

Layout PipelineModel::split(const Mesh& mesh, PipelineOptions options) {
  Impl& own = *impl_;
  if (own.pipeline)
    refuse("PipelineModel::split", "a model that is in stages already", "one call",
           "Make another PipelineModel of the same list");
  const auto pipeline = std::make_shared<Pipeline>(mesh, std::move(options));
  Group all = mesh.all();
  check_same_lists(described_by_all(all, [&] { return own.described_list(); }));
  const auto modules = static_cast<std::int64_t>(own.list.size());
  if (modules < pipeline->stages())
    refuse("a pipeline's list of modules", fmt::format("{} for {} stages", modules, pipeline->stages()),
           "a module for each stage at least", "Use fewer ranks along pp, or fewer stages on each");

  std::vector<double> costs;
  for (const PipelineModule& module : own.list) costs.push_back(module.cost);
  own.stages = assign_layers(costs, pipeline->stages());
  std::vector<bool> is_own(own.list.size(), false);
  for (const int stage : pipeline->own_stages()) {
    const StageLayers& which = own.stages[static_cast<std::size_t>(stage)];
    std::fill_n(is_own.begin() + which.begin, which.count, true);
  }
  const auto modules_by_rank = described_by_all(all, [&] {
    own.make(is_own);
    return own.described();
  });
  std::vector<int> along_pp;
  for (int rank = 0; rank < all.size(); ++rank)
    along_pp.push_back(mesh.grid().has(kStageAxis) ? mesh.grid().place({kStageAxis}, rank) : 0);
  const auto listed = listed_parameters(modules_by_rank, along_pp, own.list);
  Group copies = ranks_of_same_parameters(mesh);
  on_every_rank(all, [&] {  // collective over `copies`, all of which find the same
    prepare_module(*own.modules, copies,
                   {.initial = InitialValues::kMustAgree, .accept_dropout = own.options.accept_dropout});
  });
  own.name(listed);
  Layout layout(mesh, placements_of(listed, mesh.grid()));
  own.placements = layout.placements();
  own.pipeline = pipeline;
  for (PipelineModule& module : own.list) module.make = nullptr, module.given.clear();  // and what they keep
  own.given.clear();
  return layout;
}

const Pipeline& PipelineModel::pipeline() const {
  if (!impl_->pipeline)
    refuse("PipelineModel::pipeline", "a model that has not been split", "split() before it",
           "Call split() with the ranks' mesh");
  return *impl_->pipeline;
}
const torch::nn::Module& PipelineModel::modules() const { return *impl_->modules; }
torch::nn::Module& PipelineModel::modules() { return *impl_->modules; }
const PipelineModel::NamedTensors& PipelineModel::named() const { return impl_->named; }

TrainableParameters PipelineModel::parameters() const {
  TrainableParameters parameters = trainable_parameters(impl_->named);
  parameters.placements = impl_->placements;
  parameters.check = module_check(*impl_->modules);
  return parameters;
}

at::Tensor PipelineModel::Impl::call(StageLayers which, at::Tensor x, const Batch& batch) const {
  for (std::int64_t place = which.begin; place < which.begin + which.count; ++place)
    x = made[static_cast<std::size_t>(place)].forward(x, batch);
  return x;
}

PipelineModel::Outputs PipelineModel::outputs(const Batch& batch) const {
  const Impl& own = *impl_;
  const auto input = [&] { return own.options.input ? own.options.input(batch) : batch.tokens; };
  if (!own.pipeline) {
    if (!own.made.front().module)
      refuse("PipelineModel::outputs", "modules that no rank has made", "make_all() or split() before it",
             "Call make_all() for one process, split() for stages");
    return {.output = own.call({0, static_cast<std::int64_t>(own.list.size())}, input(), batch)};
  }
  Pipeline& pipeline = *own.pipeline;
  Outputs result;
  for (const int stage : pipeline.in_step() ? std::vector{pipeline.stage()} : pipeline.own_stages()) {
    if (!pipeline.in_step()) pipeline.look_at(stage);
    const at::Tensor x = pipeline.is_first() ? input() : pipeline.receive();
    const at::Tensor y = own.call(own.stages[static_cast<std::size_t>(stage)], x, batch);
    if (pipeline.is_last())
      result.output = y;
    else
      result.passed_on = pipeline.pass_on(y);
  }
  return result;
}

ForwardLossTerms PipelineModel::forward_loss(std::vector<std::string> terms, LossOfOutput loss) const {
  if (terms.empty())
    refuse("PipelineModel::forward_loss", "no term", "the names of those that the loss gives",
           "Name them in the order in which it gives them");
  return [model = *this, terms = std::move(terms), loss = std::move(loss)](const Batch& batch) -> LossTerms {
    const Outputs outputs = model.outputs(batch);
    if (!outputs.output.defined()) {
      LossTerms zeros;
      for (const std::string& name : terms)
        zeros.push_back({.name = name, .sum = at::zeros({}, at::TensorOptions(at::kDouble))});
      zeros.front().sum = outputs.passed_on;
      return zeros;
    }
    LossTerms given = loss(outputs.output, batch);
    std::vector<std::string> names;
    for (const LossTerm& term : given) names.push_back(term.name);
    if (names != terms)
      refuse("PipelineModel::forward_loss", fmt::format("a loss that gives '{}'", fmt::join(names, "', '")),
             fmt::format("'{}', as on every other stage", fmt::join(terms, "', '")),
             "Name the terms that the loss gives");
    return given;
  };
}

}  // namespace isograd
