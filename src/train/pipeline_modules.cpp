// A list of modules made and called, stage after stage.
#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/random.hpp"
#include "parallel/data/same_parameters.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace {

// Seeds the CPU's default generator, from which a module's values are drawn, and restores it afterwards.
class Seeded {
 public:
  explicit Seeded(std::uint64_t seed)
      : alone_(made_one_at_a_time()), generator_(at::globalContext().defaultGenerator(at::kCPU)) {
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~Seeded() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }
  Seeded(const Seeded&) = delete;
  Seeded& operator=(const Seeded&) = delete;

 private:
  static std::mutex& made_one_at_a_time() {  // by ranks that are threads
    static std::mutex mutex;
    return mutex;
  }
  std::lock_guard<std::mutex> alone_;
  at::Generator generator_;
  at::Tensor before_;
};

std::vector<std::pair<std::string, at::Tensor>> parameters_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : module.named_parameters())
    if (std::ranges::none_of(all, [&](const auto& known) { return known.second.is_same(item.value()); }))
      all.emplace_back(item.key(), item.value());
  return all;
}

// ---- the parameters of a list of modules of which each rank has made some ----

// A parameter of the whole list, on any rank.
struct ListedParameter {
  std::string name;     // "<module>.<parameter>", of a tied one the first such
  std::size_t module;   // place of the module in the list
  std::vector<int> on;  // ranks along pp that have it, ascending
  std::vector<std::int64_t> shape;
  int given = -1;  // which of the given tensors it is, if any
};

using KeyedTensors = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  std::string part;
  while (std::getline(stream, part, at)) parts.push_back(part);
  return parts;
}

std::string line_in_words(const std::string& line) {
  const auto words = split(line, '\t');
  return fmt::format("'{}', {} {}{}", words.at(1), words.at(2), words.at(3),
                     words.at(4) == "1" ? "" : ", frozen");
}

// "no parameter" where one rank has fewer than the other.
[[noreturn]] void refuse_module(const std::string& module, int rank, int other,
                                const std::vector<std::string>& own, const std::vector<std::string>& others) {
  std::size_t place = 0;
  while (place < own.size() && place < others.size() && own[place] == others[place]) ++place;
  const auto said = [&](const std::vector<std::string>& lines) {
    return place < lines.size() ? line_in_words(lines[place]) : std::string("no such parameter");
  };
  refuse(fmt::format("module '{}' of a pipeline", module),
         fmt::format("{} on rank {}, {} on rank {}", said(own), rank, said(others), other),
         "the same parameters on all ranks of its stage",
         "Make it from what all ranks know alike, and freeze the same parameters everywhere");
}

// The texts of all ranks, by rank. `say` is not collective itself. If it throws a ConfigError on any rank,
// all ranks throw the one of the first. Collective.
std::vector<std::string> texts_of_all(Group& group, const std::function<std::string()>& say) {
  std::string own;
  on_every_rank(group, [&] { own = say(); });
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) texts.push_back(broadcast_text(group, own, rank));
  return texts;
}

// The given tensors of the whole list, each once.
std::vector<at::Tensor> given_tensors(const std::vector<PipelineModule>& list) {
  std::vector<at::Tensor> all;
  for (const PipelineModule& module : list)
    for (const at::Tensor& tensor : module.given)
      if (std::ranges::none_of(all, [&](const at::Tensor& known) { return known.is_same(tensor); }))
        all.push_back(tensor);
  return all;
}

// One line for each module: the facts that ranks must agree on before any module is made.
std::string text_of_list(const std::vector<PipelineModule>& list, const std::vector<at::Tensor>& given) {
  std::string text;
  for (const PipelineModule& module : list) {
    text += fmt::format("'{}' of cost {}", module.name, module.cost);
    for (const at::Tensor& tensor : module.given)
      text += fmt::format(", given tensor {}", std::ranges::find_if(given, [&](const at::Tensor& known) {
                                                 return known.is_same(tensor);
                                               }) - given.begin());
    text += '\n';
  }
  return text;
}

// ConfigError if a rank's list differs from rank 0's.
void check_same_lists(const std::vector<std::string>& texts) {
  const auto first = split(texts.front(), '\n');
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const auto other = split(texts[rank], '\n');
    if (other == first) continue;
    std::size_t place = 0;
    while (place < first.size() && place < other.size() && first[place] == other[place]) ++place;
    const auto said = [&](const auto& lines) {
      return place < lines.size() ? lines[place] : std::string("nothing more");
    };
    refuse(fmt::format("module {} of a pipeline's list", place),
           fmt::format("{} on rank 0, {} on rank {}", said(first), said(other), rank),
           "the same list on every rank", "Make the list from what all ranks know alike");
  }
}

// The parameters of one module, "<key>" to tensor and each tensor once, as lines.
std::string text_of_module(std::size_t module, const KeyedTensors& parameters,
                           const std::vector<at::Tensor>& given) {
  std::string text;
  for (const auto& [name, tensor] : parameters) {
    const auto found =
        std::ranges::find_if(given, [&, of = tensor](const at::Tensor& known) { return known.is_same(of); });
    text += fmt::format("{}\t{}\t{}\t[{}]\t{}\t{}\n", module, name, c10::toString(tensor.scalar_type()),
                        fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? 1 : 0,
                        found == given.end() ? -1 : found - given.begin());
  }
  return text;
}

// Parses `texts` of all ranks, each with that rank's modules. `pp`: the place of each rank along pp.
// ConfigError names module, parameter and ranks if two ranks describe a module differently.
std::vector<ListedParameter> listed_parameters(const std::vector<std::string>& texts,
                                               const std::vector<int>& pp,
                                               const std::vector<std::string>& names) {
  std::vector<std::vector<std::string>> lines;  // by rank
  for (const std::string& text : texts) lines.push_back(split(text, '\n'));
  std::vector<ListedParameter> all;
  for (std::size_t module = 0; module < names.size(); ++module) {
    // Lines of the first rank that has this module. A module without parameters has no lines.
    std::map<int, std::pair<std::size_t, std::vector<std::string>>> said;  // by place along pp
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      std::vector<std::string> own;
      for (const std::string& line : lines[rank])
        if (line.starts_with(fmt::format("{}\t", module))) own.push_back(line);
      const auto [first, is_new] = said.emplace(pp[rank], std::pair(rank, own));
      if (!is_new && first->second.second != own)
        refuse_module(names[module], static_cast<int>(first->second.first), static_cast<int>(rank),
                      first->second.second, own);
    }
    for (const auto& [place, rank_and_lines] : said)
      for (const std::string& line : rank_and_lines.second) {
        const auto words = split(line, '\t');
        ListedParameter one{.name = words.at(1),
                            .module = module,
                            .on = {place},
                            .shape = {},
                            .given = std::stoi(words.at(5))};
        for (const std::string& size : split(words.at(3).substr(1, words.at(3).size() - 2), ','))
          one.shape.push_back(std::stoll(size));
        const auto tied = std::ranges::find_if(
            all, [&](const ListedParameter& known) { return one.given >= 0 && known.given == one.given; });
        if (tied == all.end()) {
          all.push_back(std::move(one));
        } else if (!std::ranges::binary_search(tied->on, place)) {
          tied->on.insert(std::ranges::upper_bound(tied->on, place), place);
        }
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
  std::vector<at::Tensor> given;
  std::vector<CallableModule> made{};  // by place in the list; null where this rank has none
  std::shared_ptr<torch::nn::Module> modules = std::make_shared<torch::nn::Module>("model");
  NamedTensors named{};
  Layout::Named placements{};
  std::shared_ptr<Pipeline> pipeline{};
  std::vector<StageLayers> stages{};

  void make(std::size_t place);
  void convert(torch::nn::Module& module) const;
  void drop(const std::vector<bool>& own);
  void collect();
  void check_shared() const;
  std::string text() const;
  void name(const std::vector<ListedParameter>& listed);
  at::Tensor call(StageLayers which, at::Tensor x, const Batch& batch) const;
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const PipelineModule& module : list) all.push_back(module.name);
    return all;
  }
};

PipelineModel::PipelineModel(std::vector<PipelineModule> list, PipelineModelOptions options)
    : impl_(
          std::make_shared<Impl>(Impl{.list = std::move(list), .options = std::move(options), .given = {}})) {
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
  }
  impl_->given = given_tensors(modules);
  impl_->made.resize(modules.size());
}

void PipelineModel::Impl::convert(torch::nn::Module& module) const {
  const at::NoGradGuard no_grad;
  const auto change = [this](at::Tensor tensor) {
    if (!tensor.defined()) return;
    const auto type = options.dtype && tensor.is_floating_point() ? *options.dtype : tensor.scalar_type();
    const at::Tensor changed = tensor.to(options.device, type);
    if (!changed.is_same(tensor)) tensor.set_data(changed);
  };
  for (const auto& item : module.named_parameters()) change(item.value());
  for (const auto& item : module.named_buffers()) change(item.value());
}

void PipelineModel::Impl::make(std::size_t place) {
  const PipelineModule& one = list[place];
  const RandomKey key{.seed = options.seed, .layer = hash_name(one.name)};
  CallableModule module;
  {
    const Seeded seeded(random_bits(key, 0));
    module = one.make();
    if (module.module) convert(*module.module);
  }
  const std::string where = fmt::format("module '{}' of a pipeline", one.name);
  if (!module.module || !module.forward)
    refuse(where, "a null module", "one that is made", "Return it from the function that makes it");
  made[place] = std::move(module);
}

// Collects the parameters of the modules that this rank keeps.
void PipelineModel::Impl::collect() {
  modules = std::make_shared<torch::nn::Module>("model");
  for (std::size_t place = 0; place < list.size(); ++place)
    if (made[place].module) modules->register_module(list[place].name, made[place].module);
}

// A tensor in two modules would diverge if these are on two ranks, which do not know of each other.
void PipelineModel::Impl::check_shared() const {
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::string>> seen;
  for (std::size_t place = 0; place < list.size(); ++place) {
    if (!made[place].module) continue;
    for (const auto& [key, tensor] : parameters_of(*made[place].module)) {
      const std::string name = fmt::format("{}.{}", list[place].name, key);
      const auto [first, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), std::pair(place, name));
      const auto gives = [&, of = tensor](std::size_t to) {
        return std::ranges::any_of(list[to].given, [&](const at::Tensor& one) { return one.is_same(of); });
      };
      if (is_new || (gives(place) && gives(first->second.first))) continue;
      refuse(fmt::format("parameter '{}'", name),
             fmt::format("the tensor of '{}', of another module", first->second.second),
             "a tensor of its own, or one that the list gives to both modules (PipelineModule::given)",
             "Make a tied parameter before the list, and give it to both as an argument of "
             "pipeline_module<Module>()");
    }
  }
}

std::string PipelineModel::Impl::text() const {
  std::string all;
  for (std::size_t place = 0; place < list.size(); ++place) {
    if (!made[place].module) continue;
    NamedTensors own = parameters_of(*made[place].module);
    for (auto& [name, tensor] : own) name = fmt::format("{}.{}", list[place].name, name);
    all += text_of_module(place, own, given);
  }
  return all;
}

// This rank's parameters by the names that they have in the whole model.
void PipelineModel::Impl::name(const std::vector<ListedParameter>& listed) {
  named.clear();
  for (const auto& [own_name, tensor] : parameters_of(*modules)) {
    const auto found = std::ranges::find_if(listed, [&, of = tensor, own = own_name](const auto& one) {
      return one.name == own || (one.given >= 0 && given[static_cast<std::size_t>(one.given)].is_same(of));
    });
    ISOGRAD_INVARIANT(found != listed.end(), fmt::format("parameter '{}', which no rank listed", own_name));
    named.emplace_back(found->name, tensor);
  }
}

// Modules of other stages, which a whole model was made with.
void PipelineModel::Impl::drop(const std::vector<bool>& own) {
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
  for (std::size_t place = 0; place < own.list.size(); ++place)
    if (!own.made[place].module) own.make(place);
  own.collect();
  own.check_shared();
  prepare_module(*own.modules, Group::solo(), {.accept_dropout = own.options.accept_dropout});
  const auto listed = listed_parameters({own.text()}, {0}, own.names());
  own.name(listed);
  own.placements.clear();
}

Layout PipelineModel::split(const Mesh& mesh, PipelineOptions options) {
  Impl& own = *impl_;
  if (own.pipeline)
    refuse("PipelineModel::split", "a model that is in stages already", "one call",
           "Make another PipelineModel of the same list");
  const auto pipeline = std::make_shared<Pipeline>(mesh, std::move(options));
  Group all = mesh.all();
  check_same_lists(texts_of_all(all, [&] { return text_of_list(own.list, own.given); }));
  const auto modules = static_cast<std::int64_t>(own.list.size());
  if (modules < pipeline->stages())
    refuse("a pipeline's list of modules", fmt::format("{} for {} stages", modules, pipeline->stages()),
           "a module for each stage at least", "Use fewer ranks along pp, or fewer stages on each");

  std::vector<double> costs;
  for (const PipelineModule& module : own.list) costs.push_back(module.cost);
  own.stages = deal_layers(costs, pipeline->stages());
  std::vector<bool> is_own(own.list.size(), false);
  for (const int stage : pipeline->own_stages()) {
    const StageLayers& which = own.stages[static_cast<std::size_t>(stage)];
    std::fill_n(is_own.begin() + which.begin, which.count, true);
  }
  const auto texts = texts_of_all(all, [&] {
    for (std::size_t place = 0; place < own.list.size(); ++place)
      if (is_own[place] && !own.made[place].module) own.make(place);
    own.drop(is_own);
    own.collect();
    own.check_shared();
    prepare_module(*own.modules, Group::solo(), {.accept_dropout = own.options.accept_dropout});
    return own.text();
  });
  std::vector<int> along_pp;
  for (int rank = 0; rank < all.size(); ++rank)
    along_pp.push_back(mesh.grid().has(kStageAxis) ? mesh.grid().place({kStageAxis}, rank) : 0);
  const auto listed = listed_parameters(texts, along_pp, own.names());
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
const torch::nn::Module& PipelineModel::modules() const {
  return *impl_->modules;
}
torch::nn::Module& PipelineModel::modules() {
  return *impl_->modules;
}
const PipelineModel::NamedTensors& PipelineModel::named() const {
  return impl_->named;
}

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
