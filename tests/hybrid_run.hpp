// A cell of the sweep, run: the problem of its configuration (the same that `isograd verify` judges), one
// step of the layout on thread ranks, its raw gradient and norm against those of one process.
#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hybrid_cells.hpp"
#include "hybrid_norm.hpp"
#include "hybrid_oracle.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "planted.hpp"
#include "train/task.hpp"
#include "verify/layout_run.hpp"
#include "verify/replayed_choices.hpp"
#include "verify/run.hpp"

namespace isograd::hybrid {

// A planted mistake, on every rank. `armed` is true from the first
// forward of the step until its gradients are summed: how models are made and gradients assembled stays
// right.
struct Planted {
  std::function<MeshesOfProblem(const std::shared_ptr<bool>& armed)> meshes{};
  std::function<void(VerifyProblem&, World&)> change{};
};

struct Measured {
  double gradient = 0;               // the largest ‖g − g64‖ / s of any parameter on any rank
  std::string worst{};               // whose
  double loss = 0, norm = 0;         // off those of one process, by their part
  double assembled = 0, staged = 0;  // the norm off that of the assembled gradient; the naive twin likewise
  double parts = 0, largest = 0;     // of the norm of any parameter, and of the infinity norm
  bool repeats = true;               // the same step again has the same bits
  bool same_norm = true;             // to the bit, on all ranks
  // Parameters that are summed: how many, and those of which all ranks had the same part before the sum.
  int summed = 0;
  std::vector<std::string> alike{};
  std::map<std::string, double> errors{};  // by parameter
  double seconds = 0;
};

inline constexpr double kExact = 1e-10;  // E1
inline constexpr double kNorm = 1e-12;   // of norms against the assembled gradient's

// The problems found; empty: none. `alike`: whether parts that are the same on all ranks count, which
// they may be where ranks see few samples.
inline std::string wrong_with(const Measured& measured, bool alike = true) {
  std::string text;
  const auto expect = [&](bool holds, const std::string& what) {
    if (!holds) text += (text.empty() ? "" : "; ") + what;
  };
  expect(measured.gradient < kExact, fmt::format("{} is off by {:.1e}", measured.worst, measured.gradient));
  expect(measured.loss < kExact, fmt::format("the loss is off by {:.1e}", measured.loss));
  expect(measured.norm < kExact, fmt::format("the norm is off one process's by {:.1e}", measured.norm));
  expect(measured.assembled < kNorm,
         fmt::format("the norm is off the assembled gradient's by {:.1e}", measured.assembled));
  expect(measured.staged < kNorm, fmt::format("the norm in stages is off by {:.1e}", measured.staged));
  expect(measured.parts < kNorm, fmt::format("a parameter's norm is off by {:.1e}", measured.parts));
  expect(measured.largest == 0, fmt::format("the infinity norm is off by {:.1e}", measured.largest));
  expect(measured.same_norm, "ranks have other bits of the norm");
  expect(measured.repeats, "the same step again has other bits");
  expect(!alike || measured.alike.empty(),
         fmt::format("summed, but the same on all ranks before: {}", fmt::join(measured.alike, ", ")));
  return text;
}

// The layout under test, seen through: everything is passed on.
struct Watched : planted::Wrapped {
  std::shared_ptr<bool> armed;
  Watched(std::unique_ptr<DataParallel> inner_, std::shared_ptr<bool> armed_)
      : Wrapped(std::move(inner_)), armed(std::move(armed_)) {}
  void zero_gradients() override {
    inner->zero_gradients();
    *armed = true;
  }
  void finish_reduction() override {
    inner->finish_reduction();
    *armed = false;
  }
  void finish_reduction_with(const Reduced& reduced) override {
    inner->finish_reduction_with(reduced);
    *armed = false;
  }
  std::vector<std::size_t> launch_order() override { return inner->launch_order(); }
  std::int64_t bytes_sent() override { return inner->bytes_sent(); }
  double exposed_seconds() const override { return inner->exposed_seconds(); }
  std::shared_ptr<const void> whole_parameters() override { return inner->whole_parameters(); }
  void take_over_writes(const std::set<std::string>& excluded) override { inner->take_over_writes(excluded); }
  void compare_writes() override { inner->compare_writes(); }
};

// Around the naive layout: what ranks hold before it is summed.
struct LooksBefore : planted::Wrapped {
  Measured& into;
  LooksBefore(std::unique_ptr<DataParallel> inner_, Measured& into_)
      : Wrapped(std::move(inner_)), into(into_) {}
  void finish_reduction() override {
    inner->begin_backward(false);  // takes the last backward's gradients into the buckets, as naive() does
    for (const Bucket& bucket : buckets()) {
      Group group = mesh().along(bucket.plan.sync.summed);
      if (group.size() == 1) continue;
      std::vector<double> prints;
      for (const Slot& slot : bucket.plan.slots) {
        const at::Tensor own = bucket.gradients.narrow(0, slot.offset, slot.numel).to(at::kDouble);
        prints.push_back(own.square().sum().item<double>());
        prints.push_back((own * at::arange(slot.numel, at::kDouble).cos()).sum().item<double>());
      }
      const at::Tensor all = group.all_gather(at::tensor(prints, at::kDouble));  // [ranks, 2 slots]
      for (std::size_t s = 0; s < bucket.plan.slots.size(); ++s) {
        const at::Tensor of = all.narrow(1, 2 * static_cast<std::int64_t>(s), 2);
        ++into.summed;
        // Rows of the vocabulary that no text has are zero on all.
        if (of.ne(0).any().item<bool>() && of.eq(of[0]).all().item<bool>())
          into.alike.push_back(bucket.plan.slots[s].name);
      }
    }
    inner->finish_reduction();
  }
};

// Meshes of one problem that are the same share their groups.
inline MeshesOfProblem one_mesh_each() {
  const auto made = std::make_shared<std::map<std::string, Mesh>>();
  const MakeMesh make = [made](const World& world, const Grid& grid) {
    return made->try_emplace(grid.text(), plain_mesh(world, grid)).first->second;
  };
  return {.model = make, .layouts = make};
}

using WrapLayout =
    std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, const VerifyModel&)>;
inline void wrap(LayoutUnderTest& layout, const WrapLayout& around) {
  layout.make_from_model = [right = layout.make_from_model, around](const VerifyModel& model, Group group) {
    return around(right(model, std::move(group)), model);
  };
}

struct Asked {
  Planted planted{};
  bool look_before = true;     // at the parts that are summed
  bool repeat = true;          // and look at the bits
  std::uint64_t nudge = 0;     // other values of the parameters, an ulp or two away; 0: those of the run
  bool tied_routers = false;   // routers of zeros: all tokens go to the first experts
  bool after_nothing = false;  // a step without micro-batches and one without a target go before
};

inline Initial initial_of(const VerifyProblem& problem, std::uint64_t nudge, bool tied_routers) {
  Initial initial(problem.make_model(problem.dtype));
  if (nudge > 0) initial = initial.nudged(nudge);
  for (std::size_t i = 0; tied_routers && i < initial.names.size(); ++i)
    if (initial.names[i].find("mlp.gate.weight") != std::string::npos) initial.values[i].zero_();
  return initial;
}

inline double off(double found, double wanted) {
  const double share = std::abs(found - wanted) / std::abs(wanted);
  return std::isnan(share) ? HUGE_VAL : share;
}

// ‖g − g64‖ / s.
inline std::map<std::string, double> errors_of(const LayoutRun::RecordedStep& made, const Wanted& wanted) {
  std::map<std::string, double> errors;
  const double rms = rms_of(wanted);
  for (const auto& [name, exact] : wanted.gradients) errors[name] = HUGE_VAL;  // one that is not there
  for (std::size_t i = 0; i < made.names.size(); ++i) {
    const auto exact = wanted.gradients.find(made.names[i]);
    if (exact == wanted.gradients.end()) continue;
    const at::Tensor difference = made.gradients[i].to(at::kDouble) - exact->second;
    const double error = difference.norm().item<double>() / scale_of(rms, exact->second);
    errors[made.names[i]] = std::isnan(error) ? HUGE_VAL : error;
  }
  return errors;
}

// The step of one rank.
inline Measured measure_rank(const RunConfig& config, World& world, const Wanted& wanted,
                             const Asked& asked) {
  check(config, world.size);
  Measured measured;
  const auto armed = std::make_shared<bool>(false);
  VerifyProblem problem =
      configured_problem(config, world, {config.parallel.strategy, "naive:share=off"},
                         asked.planted.meshes ? asked.planted.meshes(armed) : one_mesh_each());
  if (asked.planted.change) asked.planted.change(problem, world);
  Initial initial = initial_of(problem, asked.nudge, asked.tied_routers);
  initial.choices = record_choices(problem, initial, world.group);

  if (asked.look_before) {
    LayoutUnderTest naive = problem.layouts[1];
    wrap(naive, [&](auto right, const VerifyModel&) -> std::unique_ptr<DataParallel> {
      return std::make_unique<LooksBefore>(std::move(right), measured);
    });
    LayoutRun(problem, naive, initial.model(problem, problem.dtype), world.group).step(problem.local);
  }

  DataParallel* layout = nullptr;
  std::shared_ptr<const Layout> placed;
  LayoutUnderTest watched = problem.layouts[0];
  wrap(watched, [&](auto right, const VerifyModel& model) -> std::unique_ptr<DataParallel> {
    auto made = std::make_unique<Watched>(std::move(right), armed);
    layout = made.get(), placed = model.placed;
    return made;
  });
  LayoutRun run(problem, watched, initial.model(problem, problem.dtype), world.group);
  if (asked.after_nothing) {
    MicroBatches nothing = problem.local;
    for (Batch& batch : nothing) {
      batch.targets = at::full_like(batch.targets, kIgnoreIndex);
      batch.sample_targets.assign(batch.sample_targets.size(), 0);
    }
    EXPECT_EQ(run.step({}).figures.loss, 0);
    EXPECT_EQ(run.step(nothing).figures.loss, 0);
  }
  const LayoutRun::RecordedStep made = run.step(problem.local);
  measured.errors = errors_of(made, wanted);
  for (const auto& [name, error] : measured.errors)
    if (error > measured.gradient) measured.gradient = error, measured.worst = name;
  double squares = 0;
  for (const auto& [name, gradient] : wanted.gradients) squares += gradient.square().sum().item<double>();
  measured.loss = off(made.figures.loss, wanted.loss);
  measured.norm = off(made.figures.norm, std::sqrt(squares));
  const double assembled = assembled_norm(made.gradients);
  measured.assembled = off(made.figures.norm, assembled);
  Group all = layout->mesh().all();
  const auto place = [&](const Slot& slot) {
    return static_cast<int>(std::ranges::find(made.names, slot.name) - made.names.begin());
  };
  const auto parts =
      part_norms(layout->buckets(), place, static_cast<int>(made.names.size()), NormOrder::kTwo, all);
  double largest = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const double own = assembled_norm({made.gradients[i]});
    measured.parts = std::max(measured.parts, std::abs(parts[i] - own) / assembled);
    if (made.gradients[i].numel() > 0)
      largest = std::max(largest, made.gradients[i].abs().max().item<double>());
  }
  measured.largest = off(infinity_norm(layout->buckets(), all), largest);
  std::map<std::string, at::Tensor> own;
  for (const auto& view : layout->views()) own[view.name] = view.gradient;
  const Mesh mesh = placed ? placed->mesh() : layout->mesh();
  measured.staged = off(staged_norm(mesh, placed.get(), own), assembled);
  const at::Tensor norms = world.group.all_gather(at::full({1}, made.figures.norm, at::kDouble));
  measured.same_norm = norms.eq(norms[0]).all().item<bool>();
  if (!asked.repeat) return measured;
  const LayoutRun::RecordedStep again = run.step(problem.local);
  for (std::size_t i = 0; i < made.gradients.size(); ++i)
    measured.repeats = measured.repeats && again.gradients[i].equal(made.gradients[i]);
  return measured;
}

// The worst of all ranks.
inline Measured measure(const RunConfig& config, int ranks, const Wanted& wanted, const Asked& asked = {}) {
  const auto start = std::chrono::steady_clock::now();
  Measured all;
  std::mutex mutex;
  run_ranks(ranks,
            [&](World& world) {
              const Measured own = measure_rank(config, world, wanted, asked);
              const std::lock_guard lock(mutex);
              if (own.gradient > all.gradient) all.gradient = own.gradient, all.worst = own.worst;
              all.loss = std::max(all.loss, own.loss), all.norm = std::max(all.norm, own.norm);
              all.assembled = std::max(all.assembled, own.assembled),
              all.staged = std::max(all.staged, own.staged);
              all.parts = std::max(all.parts, own.parts), all.largest = std::max(all.largest, own.largest);
              all.same_norm = all.same_norm && own.same_norm, all.repeats = all.repeats && own.repeats;
              all.summed += own.summed;
              all.alike.insert(all.alike.end(), own.alike.begin(), own.alike.end());
              for (const auto& [name, error] : own.errors)
                all.errors[name] = std::max(all.errors[name], error);
            },
            {.timeout = std::chrono::seconds(60)});
  all.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return all;
}

// The batches of replicas, where the loss is the mean of their own means: samples are assigned to the ranks
// that see different ones in order, and neighbours make up a replica.
inline std::vector<MicroBatches> by_replica(const RunConfig& config, int ranks, World& world) {
  const Grid grid = grid_of(config, ranks);
  const int shares = grid.size(kSampleAxes), replicas = grid.size({"dp_replicate"});
  std::vector<MicroBatches> parts(static_cast<std::size_t>(replicas));
  const auto task = make_task(config, world.group);
  for (int place = 0; place < shares; ++place)
    for (const Batch& batch : task->make_loader(place, shares)->next())
      parts[static_cast<std::size_t>(place * replicas / shares)].push_back(batch);
  return parts;
}

// One process of the same configuration: what it has in fp64, by the oracle. `ranks` matter to means of
// replicas alone.
inline Wanted wanted_of(const RunConfig& config, std::uint64_t nudge = 0, int ranks = 1,
                        bool tied_routers = false) {
  RunConfig alone = config;
  alone.parallel = RunConfig{}.parallel;
  Wanted wanted;
  run_ranks(1, [&](World& world) {
    const VerifyProblem problem = configured_problem(alone, world);
    const Initial initial = initial_of(problem, nudge, tied_routers);
    Values values;
    for (std::size_t i = 0; i < initial.names.size(); ++i)
      values.emplace_back(initial.names[i], initial.values[i].to(at::kDouble));
    wanted = oracle(config,
                    normalises_by_replica(config) ? by_replica(config, ranks, world)
                                                  : std::vector<MicroBatches>{problem.whole()},
                    values);
  });
  return wanted;
}

}  // namespace isograd::hybrid
