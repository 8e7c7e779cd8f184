#include "verify/run.hpp"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/refuse.hpp"
#include "isograd/context_parallel.hpp"
#include "layout/flat.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "parallel/data/unit_node.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/rank_zero.hpp"
#include "train/task.hpp"
#include "verify/layout_run.hpp"

namespace isograd {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

// The elements of each unit that ZeRO-3 gathers, padded. Counted, not asked of the layout that is checked.
// Nothing where the formula does not hold: untrained parameters, blocks that are used several times.
std::optional<std::vector<SharedElements>> gathered_by(const VerifyModel& model, const RunConfig& config,
                                                       const Grid& grid, int rank) {
  for (const auto& [name, tensor] : model.named)
    if (!tensor.requires_grad()) return std::nullopt;
  const auto& blocks = model.units->blocks;
  std::map<const c10::TensorImpl*, std::set<std::size_t>> units_of;  // blocks from 1
  std::set<const void*> seen;
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    if (!seen.insert(blocks[block].binding().get()).second) return std::nullopt;
    for (const at::Tensor& tensor : blocks[block].binding()->parameters())
      units_of[tensor.unsafeGetTensorImpl()].insert(block + 1);
  }
  const Layout::Named placements = model.placed ? model.placed->placements() : Layout::Named{};
  std::vector<std::vector<NamedParameter>> units(blocks.size() + 1);
  for (const NamedParameter& parameter : unit_members(model.named, placements, grid, rank).trained) {
    const auto own = units_of.find(parameter.tensor.unsafeGetTensorImpl());
    // A parameter of several blocks belongs to the root.
    units[own != units_of.end() && own->second.size() == 1 ? *own->second.begin() : 0].push_back(parameter);
  }
  std::vector<SharedElements> gathered;
  for (const auto& unit : units)
    for (BucketPlan& plan : plan_buckets(unit, std::numeric_limits<std::int64_t>::max())) {
      const AxisSet asked = sharded_axes(config);
      pad_for(plan, grid.size(sharded_along(grid, plan.sync, asked)));
      const bool whole = &unit == &units.front() || !config.parallel.reshard_after_forward;
      gathered.push_back(shared_elements(plan.sync, grid, asked, plan.numel, whole ? plan.numel : 0));
    }
  return gathered;
}

// LayoutUnderTest::traffic of the configured strategy. `gathered` of stage 3; none: not claimed.
std::pair<double, double> traffic_by_plan(const RunConfig& config, const RanksOfRun& ranks,
                                          DataParallel& layout,
                                          const std::optional<std::vector<SharedElements>>& gathered,
                                          std::int64_t rounds, at::ScalarType dtype) {
  const bool units = stage_of(config.parallel.strategy) == 3;
  if (units && !gathered) return {0, 0};
  DataParallelPlan plan = make_plan(config, ranks);
  plan.bytes.parameter = plan.bytes.gradient = dtype == at::kDouble ? 8 : 4;
  plan.micro_batches = rounds;
  const auto bytes = [&](std::vector<SharedElements> elements) {
    plan.elements = std::move(elements);
    return traffic_bytes(plan).total();
  };
  if (units) return {bytes(*gathered), bytes(*gathered)};
  const AxisSet asked = sharded_axes(config);
  return {bytes(shared_elements(layout, asked, true)), bytes(shared_elements(layout, asked, false))};
}

// One rank's part of one parameter: elements [begin, end) of its bucket or of itself.
struct KeptPiece {
  std::size_t order;  // of the parameter, in the model
  std::string name;
  std::int64_t begin, end;
  at::Tensor bits;
  std::int64_t cut = 0;  // which of the parts along the axes that the parameter is cut along
};

// Each parameter and its fp32 master in the model's order, so that ranks with other buckets or parts of the
// model list as much, then buffers; empty where this rank has none.
std::vector<KeptPiece> kept_pieces(const Named& named, const Named& buffers, DataParallel& layout,
                                   const Layout* placed) {
  std::vector<KeptPiece> pieces;
  std::map<std::string, std::size_t> place_of;
  const at::Tensor nothing = at::empty({0});
  const bool readable = dynamic_cast<FullySharded*>(&layout) == nullptr;
  for (std::size_t i = 0; i < named.size(); ++i) {
    const auto& [name, tensor] = named[i];
    AxisSet axes;
    if (placed)
      for (const Cut& each : placed->parameter(name).placement.cuts) axes.insert(each.axis);
    const std::int64_t cut = axes.empty() ? 0 : placed->mesh().place(axes);
    place_of[name] = pieces.size();
    pieces.push_back({i, name, 0, readable ? tensor.numel() : 0, readable ? tensor : nothing, cut});
    pieces.push_back({i, name + " (its fp32 master)", 0, 0, nothing, cut});
  }
  for (const Bucket& bucket : layout.buckets())
    for (const Slot& slot : bucket.plan.slots) {
      const auto keep = [&](KeptPiece& piece, const at::Tensor& flat) {
        const Range part = within(bucket.held, slot);
        piece.begin = part.begin - slot.offset, piece.end = part.end - slot.offset;
        piece.bits = flat.narrow(0, part.size() > 0 ? part.begin - bucket.held.begin : 0, part.size());
      };
      const std::size_t place = place_of.at(slot.name);
      if (!readable) keep(pieces[place], bucket.parameters);
      if (bucket.master.scalar_type() != bucket.parameters.scalar_type())
        keep(pieces[place + 1], bucket.master);
    }
  for (const auto& [name, buffer] : buffers)
    pieces.push_back({named.size(), name + " (a buffer)", 0, buffer.numel(), buffer.detach().flatten()});
  return pieces;
}

// Where ranks that keep the same weights do not keep the same bits: how many parameters differ, the first in
// the model's order, and which ranks agree about it, the largest camp first. Empty: nowhere. Collective; the
// same answer on every rank. `placed` says which part of the whole model `named` is, null: all of it.
std::string divergence(const Named& named, const Named& buffers, DataParallel& layout, const Layout* placed) {
  Group group = layout.mesh().all();
  const std::vector<KeptPiece> pieces = kept_pieces(named, buffers, layout, placed);
  std::vector<at::Tensor> bits;
  for (const KeptPiece& piece : pieces) bits.push_back(piece.bits);
  const at::Tensor digests = digest(bits);
  std::vector<std::int64_t> own;
  for (std::size_t i = 0; i < pieces.size(); ++i)
    own.insert(own.end(),
               {pieces[i].begin, pieces[i].end, pieces[i].cut, digests.const_data_ptr<std::int64_t>()[i]});
  const at::Tensor all = group.all_gather(at::tensor(own, at::kLong)).contiguous();  // [W, pieces · 4]
  const auto* value = all.const_data_ptr<std::int64_t>();

  const KeptPiece* first = nullptr;
  std::vector<std::vector<int>> camps;
  std::size_t differing = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::map<std::array<std::int64_t, 3>, std::map<std::int64_t, std::vector<int>>> by_part;
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto* entry = value + static_cast<std::size_t>(rank) * own.size() + i * 4;
      if (entry[0] < entry[1]) by_part[{entry[2], entry[0], entry[1]}][entry[3]].push_back(rank);
    }
    const auto apart = std::ranges::find_if(by_part, [](const auto& part) { return part.second.size() > 1; });
    if (apart == by_part.end()) continue;
    ++differing;
    if (first && pieces[i].order >= first->order) continue;
    first = &pieces[i];
    camps.clear();
    for (const auto& [hash, ranks] : apart->second) camps.push_back(ranks);
    std::ranges::sort(camps, {}, [](const std::vector<int>& camp) {
      return std::pair(-static_cast<std::ptrdiff_t>(camp.size()), camp[0]);
    });
  }
  if (!first) return {};
  std::vector<std::string> sides;
  for (const auto& camp : camps)
    sides.push_back(fmt::format("rank{} {}", camp.size() == 1 ? "" : "s", fmt::join(camp, ", ")));
  return fmt::format("replicas differ in {} parameter{}, first {}: {}", differing, differing == 1 ? "" : "s",
                     first->name, fmt::join(sides, " against "));
}

// The axes along which ranks differ, and those that samples are assigned along.
std::vector<Axis> used_axes(const Grid& grid) {
  std::vector<Axis> axes = grid.axes();
  std::erase_if(axes, [](const Axis& axis) { return axis.size == 1 && !kSampleAxes.count(axis.name); });
  return axes;
}

LayoutUnderTest layout_of(const RunConfig& config, const LayoutChoice& choice, const std::string& suffix,
                          World& world, at::Device device, const MakeMesh& make_mesh) {
  const RunConfig chosen = choice.in(config);
  // By the layout made last.
  const auto gathered = std::make_shared<std::optional<std::vector<SharedElements>>>();
  return {.name = choice.text() + suffix,
          .make = nullptr,
          .make_from_model =
              [chosen, &world, gathered, device, make_mesh](const VerifyModel& model, const Group& group) {
                if (group.size() == world.size) {
                  const Mesh mesh = make_mesh(world, grid_of(chosen, world.size));
                  // How often a stage of a pipeline gathers what stays whole depends on the schedule.
                  if (chosen.parallel.pp == 1 && stage_of(chosen.parallel.strategy) == 3)
                    *gathered = gathered_by(model, chosen, mesh.grid(), world.rank);
                  return make_layout(chosen, model.named, *model.units, mesh, model.placed.get(), {}, device);
                }
                World fewer;  // in an experiment: one replica, whole samples
                fewer.rank = group.rank();
                fewer.size = group.size();
                fewer.group = group;
                RunConfig on_fewer = chosen;
                on_fewer.parallel.replicas = on_fewer.parallel.tp = on_fewer.parallel.ep = 1;
                on_fewer.parallel.pp = on_fewer.parallel.stages_per_rank = 1;
                on_fewer.parallel.cp_ring = on_fewer.parallel.cp_ulysses = 1;
                return make_layout(on_fewer, model.named, *model.units,
                                   Mesh(fewer, grid_of(on_fewer, fewer.size)), nullptr, {}, device);
              },
          .axes = used_axes(grid_of(chosen, world.size)),
          .traffic =
              [chosen, &world, gathered](DataParallel& layout, std::int64_t rounds, at::ScalarType dtype) {
                return traffic_by_plan(chosen, world.group, layout, *gathered, rounds, dtype);
              }};
}

VerifyModel as_verify_model(const RunConfig& config, const Mesh& mesh, at::Device device,
                            std::shared_ptr<TaskModel> model) {
  model->to(device);
  model->attend_over(mesh);
  VerifyModel made;
  made.named = model->named();
  made.logits = [model](const Batch& batch) { return model->outputs(batch).to(at::kCPU); };
  if (model_parallel(config)) made.cut = [model](const Mesh& over) { return model->cut(over); };
  made.through = [model](StepOptions options) {
    return model->pipeline() ? through(*model->pipeline(), std::move(options)) : options;
  };
  made.look_ahead = [model](const ForwardLossTerms& forward) { return model->look_ahead(forward); };
  if (model->choose_experts({}))
    made.choose_experts = [model](const DecoderLM::ChooseExperts& choose) { model->choose_experts(choose); };
  for (const PlainTerm& term : model->plain_terms())
    made.more_terms.push_back({term.name, term.sum, term.mean, term.weight, term.prepare});
  made.units = model->make_units();
  made.loss_terms = [model, loss = on_device(device, inside(made.units->root, model->loss()))](
                        const Batch& batch) { return loss(batch); };
  return made;
}

DeclaredLoss declared_loss(const std::shared_ptr<const Task>& task, int ranks) {
  const RunConfig& config = task->config();
  const PlainLoss plain = task->plain_loss();
  DeclaredLoss loss;
  loss.name = plain.name;
  loss.global = plain.global;
  if (loss.global) return loss;
  loss.mean = mean_of(config);
  if (loss.mean == Mean::kFixed) loss.denominator = config.loss.denominator;
  loss.per_token = plain.per_token;
  loss.label_smoothing = config.loss.label_smoothing;
  loss.z_loss = config.loss.z_loss;
  if (normalises_by_replica(config))
    loss.replicas = [task, ranks] {
      const RunConfig& own = task->config();
      const Grid grid = grid_of(own, ranks);
      std::vector<MicroBatches> replicas(static_cast<std::size_t>(grid.size({"dp_replicate"})));
      const int data_ranks = grid.size(kSampleAxes), shards = grid.size({"dp_shard"});
      for (int rank = 0; rank < data_ranks; ++rank)
        for (const Batch& batch : task->make_loader(rank, data_ranks)->next())
          replicas[static_cast<std::size_t>(rank / shards)].push_back(batch);
      return replicas;
    };
  return loss;
}

// The same run with all ranks along `axis`; nothing where that cannot be.
std::optional<RunConfig> along(const Task& task, const RunConfig& config, const std::string& axis,
                               int ranks) {
  const bool sharded = stage_of(config.parallel.strategy) > 0;
  if (normalises_by_replica(config) || (axis == "dp_shard" && !sharded)) return std::nullopt;
  if (axis == "cp_ulysses" && !splits_heads(task.heads(), ranks)) return std::nullopt;
  if (axis == "tp" && ranks > task.heads().first) return std::nullopt;
  if (axis == kStageAxis && ranks != config.parallel.pp) return std::nullopt;  // other stages: another run
  RunConfig other = config;
  other.parallel.tp = axis == "tp" ? ranks : 1;
  other.parallel.ep = 1;
  if (axis != kStageAxis) other.parallel.pp = other.parallel.stages_per_rank = 1;
  other.parallel.replicas = sharded && axis == "dp_replicate" ? ranks : 1;
  other.parallel.cp_ring = axis == "cp_ring" ? ranks : 1;
  other.parallel.cp_ulysses = axis == "cp_ulysses" ? ranks : 1;
  return other;
}

using KeptTask = std::shared_ptr<const Task>;
using MakeModel = std::function<std::shared_ptr<TaskModel>(const Task&, at::ScalarType)>;

// One step of `task`, this rank's part of it and its layouts, with `suffix` behind their names.
VerifyProblem problem_of(const KeptTask& task, World& world, const MakeModel& model,
                         const std::vector<LayoutChoice>& layouts, const ChangeProblem& change,
                         const std::string& suffix, const MeshesOfProblem& meshes = {}) {
  const RunConfig& config = task->config();
  if (config.loss.balance != 0 && config.loss.balance_scope == "micro_batch")
    refuse("loss.balance_scope", "micro_batch, which is another loss for each way to cut the step",
           "a loss that one process has too", "Verify the run with --set loss.balance_scope=step");
  const auto mesh = std::make_shared<const Mesh>(meshes.model(world, grid_of(config, world.size)));
  context_groups(*mesh);  // by all ranks: models are made by some alone, later
  const at::Device device = device_of(config, world);
  VerifyProblem problem;
  problem.updates = 0;
  problem.make_model = [task, mesh, device, model](at::ScalarType dtype) {
    return as_verify_model(task->config(), *mesh, device, model(*task, dtype));
  };
  SharedSamples shared{
      .whole = task->make_loader(mesh->place(kSampleAxes), mesh->size(kSampleAxes))->next(),
      .data_rank = mesh->place(kSampleAxes),
      .cut = [task, mesh](const MicroBatches& whole) { return own_parts(*task, *mesh, whole); }};
  problem.local = shared.cut(shared.whole);
  if (mesh->size(kContextAxes) > 1) problem.shared_samples = std::move(shared);
  problem.whole = [task] { return task->make_loader(0, 1)->whole_step({}); };
  problem.loss = declared_loss(task, world.size);
  problem.dtype = scalar_type(config.train.dtype);
  problem.step = {.max_norm = config.train.max_norm};
  problem.clip_groups = clip_groups_of(config, "train.clip_groups");
  if (!problem.clip_groups.empty() || !config.optimizer.groups.empty())
    check_groups(config, model_without_values(config)->named());
  problem.optimizer = optimizer_options(config);
  problem.make_normalizer = [task, &world] { return make_normalizer(task->config(), world.size); };
  for (const auto& choice : layouts)
    problem.layouts.push_back(layout_of(config, choice, suffix, world, device, meshes.layouts));
  if (model_parallel(config)) problem.mesh = *mesh;
  if (problem.loss.global) {
    // Its forward is a collective of all ranks: no experiment on fewer or other ones, no claim of traffic.
    for (LayoutUnderTest& layout : problem.layouts) layout.axes.clear(), layout.traffic = {};
    if (change) change(problem, world);
    return problem;
  }
  problem.alone = [task] { return task->make_loader(0, 1)->next(); };
  problem.subgroup = [&world](const std::vector<int>& ranks) {
    return ranks.size() == 1 ? Group::solo() : world.subgroup(ranks, "verify on fewer ranks");
  };
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const LayoutChoice& choice = layouts[i];
    problem.layouts[i].along = [task, choice, &world, model,
                                change](const std::string& axis) -> std::shared_ptr<VerifyProblem> {
      const auto other = along(*task, choice.in(task->config()), axis, world.size);
      if (!other) return nullptr;
      LayoutChoice same = choice;
      if (same.replicas) same.replicas = other->parallel.replicas;
      return std::make_shared<VerifyProblem>(
          problem_of(task->under(*other), world, model, {same}, change, ""));
    };
  }
  if (change) change(problem, world);
  return problem;
}

Verdict verify_step(const KeptTask& task, World& world, const MakeModel& model,
                    const std::vector<LayoutChoice>& layouts, const ChangeProblem& change,
                    const std::string& suffix = {}) {
  return verify(problem_of(task, world, model, layouts, change, suffix), world.group);
}

// The values of named(), at this moment. Collective where ranks hold the model together.
std::vector<at::Tensor> values_of(const FinishedRun& run) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : run.model.named())
    values.push_back(run.placed ? run.placed->whole(name, tensor) : tensor.detach().clone());
  return values;
}

// The model of a run with these values; what it draws is keyed as the run's own.
MakeModel model_of(const std::vector<at::Tensor>& values, const Task& task) {
  return [values, &task](const Task&, at::ScalarType dtype) {
    const auto made = task.make_blank_model(dtype);
    at::NoGradGuard no_grad;
    auto named = made->named();
    for (std::size_t i = 0; i < named.size(); ++i) named[i].second.copy_(values[i]);
    return made;
  };
}

// With the weights that the run starts from.
std::shared_ptr<TaskModel> fresh_model(const Task& task, at::ScalarType dtype) {
  return task.make_model(dtype);
}

}  // namespace

VerifyProblem configured_problem(const RunConfig& config, World& world,
                                 const std::vector<std::string>& layouts, const MeshesOfProblem& meshes) {
  const KeptTask task = make_task(config, world.group)->repeatable(nullptr);
  return problem_of(task, world, fresh_model, chosen_layouts(config, layouts, world), {}, {}, meshes);
}

Verdict verify_run(const RunConfig& config, World& world, const std::vector<std::string>& layouts,
                   const ChangeProblem& change, const TakeDump& take_dump, const LayoutBegins& begins) {
  check_same_configuration(config, world.group);
  const auto asked = [&](const char* name) { return std::ranges::find(layouts, name) != layouts.end(); };
  std::int64_t begun = 0, total = 0;  // layouts, of all proofs
  const ChangeProblem followed = [&](VerifyProblem& problem, World& own) {
    problem.updates = VerifyProblem{}.updates;
    if (begins) problem.progress = [&](const std::string& layout) { begins(++begun, total, layout); };
    problem.take_dump = take_dump;
    if (change) change(problem, own);
  };
  const std::unique_ptr<const Task> task = make_task(config, world.group)->repeatable(nullptr);
  const auto choices = chosen_layouts(config, layouts, world);
  const auto verify_cut = [&](const RunConfig& cut, const std::vector<LayoutChoice>& on,
                              const std::string& suffix, const ChangeProblem& own) {
    return verify_step(task->under(cut), world, fresh_model, on, own, suffix);
  };
  const TaskKind& kind = kind_of(config);
  std::vector<RunConfig> cuts = {config};
  if (asked(kAllLayouts)) cuts = kind.accumulations(config, world.size);
  const auto of_choices = static_cast<std::int64_t>(choices.empty() ? 0 : cuts.size() * choices.size());
  total = of_choices;
  if (asked(kAllMeshes))
    total += static_cast<std::int64_t>(propose_meshes(config, world.size, task->heads()).run.size());
  if (begins && world.rank == 0) begins(0, total, "a plain step in fp64 on one process comes first");
  Verdict verdict;
  for (std::size_t i = 0; i < cuts.size() && !choices.empty(); ++i)
    join(verdict,
         verify_cut(cuts[i], choices, i == 0 ? "" : " " + kind.accumulation_text(cuts[i]), followed));
  std::int64_t meshes_begun = 0;
  if (asked(kAllMeshes))
    verdict.meshes = try_meshes(config, world.size, task->heads(), verdict, [&](const MeshChoice& mesh) {
      begun = of_choices + meshes_begun++;  // one that was refused has been counted
      // Until its layout is made, a mesh may be refused for this model or batch.
      bool made = false;
      const ChangeProblem watched = [&](VerifyProblem& problem, World& own) {
        followed(problem, own);
        for (LayoutUnderTest& layout : problem.layouts)
          layout.make_from_model = [&made, make = layout.make_from_model](const VerifyModel& model,
                                                                          Group group) {
            auto result = make(model, std::move(group));
            made = true;
            return result;
          };
      };
      try {
        return verify_cut(mesh.config, {{.strategy = config.parallel.strategy}}, " on " + mesh.name, watched);
      } catch (const ConfigError& error) {
        if (!made) throw;
        Verdict ended;
        ended.passed = false;
        ended.diagnosis = {fmt::format("its step ended in an error: {}", error.what())};
        return ended;
      }
    });
  return verdict;
}

Verdict verify_finished(FinishedRun& run, const ChangeProblem& change) {
  const auto values = values_of(run);
  const KeptTask task = run.task.repeatable(&values);
  return verify_step(task, run.world, model_of(values, *task), chosen_layouts(run.config, {}, run.world),
                     change);
}

std::string check_running(RunningRun& run, const ChangeProblem& change) {
  const RunConfig& config = run.run.config;
  World& world = run.run.world;
  const auto due = [&](std::int64_t every) { return every > 0 && run.step % every == 0; };
  if (due(config.verify.checksums_every) && world.size > 1)
    if (auto text = divergence(run.run.model.named(), run.run.model.buffers(), run.layout, run.run.placed);
        !text.empty())
      return text;
  if (!due(config.verify.every)) return {};
  const KeptTask micro = run.run.task.under(run.run.task.micro_sized(world.size, run.step));
  const MakeModel as_now = [&] {
    const auto whole = run.layout.whole_parameters();
    return model_of(values_of(run.run), run.run.task);
  }();
  const ChangeProblem on_live_run = [&](VerifyProblem& problem, World& own) {
    problem.live_run = VerifyProblem::LiveRun{.layout = &run.layout,
                                              .forward = run.forward,
                                              .placed = run.run.placed,
                                              .look_ahead = run.look_ahead,
                                              .named = run.run.model.named()};
    if (const Pipeline* pipeline = run.run.model.pipeline())
      problem.live_run->through = [pipeline](StepOptions options) {
        return through(*pipeline, std::move(options));
      };
    if (run.run.model.choose_experts({}))
      problem.live_run->choose_experts = [&model = run.run.model](const DecoderLM::ChooseExperts& choose) {
        model.choose_experts(choose);
      };
    problem.loss.per_token = run.run.task.plain_loss().per_token;
    if (change) change(problem, own);
  };
  const Verdict verdict =
      verify_step(micro, world, as_now, chosen_layouts(micro->config(), {}, world), on_live_run);
  if (verdict.passed) return {};
  return broadcast_text(world.group, world.rank == 0 ? parity_line(verdict) : std::string());
}

}  // namespace isograd
