// Every strategy, on flat buckets and on units, gives the gradient, norm and updates of one process, the same
// bits whatever the delays, and leaves nothing behind of a step that is given up; and the tests notice when
// it does not.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/random.hpp"
#include "isograd/world.hpp"
#include "layout/flat.hpp"
#include "parallel/data/flat_shard.hpp"
#include "planted.hpp"
#include "zero3_model.hpp"

namespace isograd {
namespace {

using planted::Wrapped;
using zero3::Model;
using zero3::Reference;
using zero3::replicas_of;
using zero3::Way;
using zero3::ways;

constexpr double kExact = 1e-10;  // E1
constexpr double kMaxNorm = 0.05;

double norm_of(const std::map<std::string, at::Tensor>& gradients) {
  double squares = 0;
  for (const auto& [name, gradient] : gradients) squares += gradient.square().sum().item<double>();
  return std::sqrt(squares);
}

// One or three micro-batches by turns; ISOGRAD_FULL_TESTS=1: both.
TEST(Strategies, GiveTheGradientAndNormOfOneProcess) {
  const Reference reference{Model()};
  int turn = 0;
  for (int ranks : {1, 2, 3, 4, 5, 8})
    for (int micros : {1, 3}) {
      if (!full_tests() && (micros == 1) == (ranks % 2 == 0)) continue;
      std::vector<std::map<std::string, at::Tensor>> wanted;
      for (int step : {0, 1}) wanted.push_back(reference.gradients(ranks, step, micros));
      constexpr std::int64_t kBucketBytes[] = {1, 300, 1 << 20};
      ++turn;
      for (const Way& way : ways(kBucketBytes[turn % 3], turn / 2 % 2 == 0))
        for (int replicas : {1, 2}) {
          if (ranks % replicas != 0 || (replicas > 1 && !way.sharded)) continue;
          run_ranks(ranks, [&](World& world) {
            const Sharded<Model> model(std::make_shared<Model>());
            const auto layout = way.make(model, replicas_of(world, replicas));
            for (int step = 0; step < 2; ++step) {  // the second uses the buffers again
              SCOPED_TRACE(fmt::format("{}, {} ranks, {} replicas, {} micro-batches, step {}", way.name,
                                       ranks, replicas, micros, step));
              const auto& right = wanted[static_cast<std::size_t>(step)];
              zero3::accumulate(*layout, model, world.rank, ranks, step, micros);
              EXPECT_LE(zero3::worst_error(*layout, right), kExact);
              // Elements owned over all ranks are the model's once.
              const double norm = global_norm(layout->buckets(), 0, layout->mesh().all()).norm;
              EXPECT_NEAR(norm, norm_of(right), kExact * norm_of(right));
            }
            if (const auto* units = dynamic_cast<FullySharded*>(layout.get())) {
              EXPECT_EQ(units->gathered_bytes(), 0) << way.name;
            }
          });
        }
    }
}

// ---- updates ----

using Parameters = std::map<std::string, at::Tensor>;
using Around = std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)>;

// Parameters after `steps` steps with two micro-batches each, clipped by `max_norm`.
Parameters trained(World& world, const Way& way, int replicas, bool adam, int steps, double max_norm,
                   const Around& around = {}) {
  const Sharded<Model> model(std::make_shared<Model>());
  auto layout = way.make(model, replicas_of(world, replicas));
  DataParallel& inner = *layout;
  if (around) layout = around(std::move(layout));
  const auto optimizer = adam ? adamw({.learning_rate = 0.01, .weight_decay = 0.1})
                              : sgd({.learning_rate = 0.1, .momentum = 0.9});
  for (int step = 0; step < steps; ++step) {
    zero3::accumulate(*layout, model, world.rank, world.size, step, 2);
    double scale = 1;
    if (max_norm > 0)
      scale = std::min(1., max_norm / (global_norm(layout->buckets(), 0, inner.mesh().all()).norm + 1e-6));
    if (zero3::at_place) zero3::at_place("update");
    optimizer->update(layout->buckets(), scale);
    layout->publish_parameters();
    if (zero3::at_place) zero3::at_place("published");
  }
  const auto whole = inner.whole_parameters();
  Parameters result;
  for (auto& item : model->named_parameters()) result[item.key()] = item.value().detach().clone();
  return result;
}

// Momentum and AdamW as their papers write them, on the reference's gradients.
Parameters trained_alone(bool adam, int ranks, int steps, double max_norm) {
  Reference reference{Model()};
  std::map<std::string, at::Tensor> first, second;
  for (int step = 0; step < steps; ++step) {
    auto gradients = reference.gradients(ranks, step, 2);
    const double clip = max_norm > 0 ? std::min(1., max_norm / (norm_of(gradients) + 1e-6)) : 1;
    EXPECT_EQ(clip<1, max_norm> 0);
    const at::NoGradGuard no_grad;
    for (auto& [name, g] : gradients) {
      g = g * clip;
      at::Tensor& p = reference.p.at(name);
      at::Tensor& m = first.try_emplace(name, at::zeros_like(g)).first->second;
      if (!adam) {
        m = 0.9 * m + g;
        p -= 0.1 * m;
        continue;
      }
      at::Tensor& v = second.try_emplace(name, at::zeros_like(g)).first->second;
      m = 0.9 * m + 0.1 * g;
      v = 0.95 * v + 0.05 * g * g;
      const double t = step + 1;
      if (p.dim() >= 2) p -= 0.01 * 0.1 * p;
      p -= 0.01 * (m / (1 - std::pow(0.9, t))) / ((v / (1 - std::pow(0.95, t))).sqrt() + 1e-8);
    }
  }
  Parameters result;
  for (auto& [name, tensor] : reference.p) result[name] = tensor.detach();
  return result;
}

double distance(const Parameters& found, const Parameters& wanted) {
  double worst = 0;
  for (const auto& [name, values] : wanted) {
    const double error = (found.at(name) - values).norm().item<double>() / values.norm().item<double>();
    worst = std::isfinite(error) ? std::max(worst, error) : HUGE_VAL;
  }
  return worst;
}

// Each with momentum or AdamW by turns; ISOGRAD_FULL_TESTS=1: with both.
TEST(Strategies, FiveStepsAreThoseOfOneProcess) {
  std::size_t turn = 0;
  for (bool adam : {false, true})
    for (int ranks : {1, 3, 4}) {
      const Parameters wanted = trained_alone(adam, ranks, 5, kMaxNorm);
      for (const Way& way : ways()) {
        if (!full_tests() && takes_first(turn++)) continue;
        run_ranks(ranks, [&](World& world) {
          const int replicas = ranks == 4 && way.sharded ? 2 : 1;
          const std::string where = fmt::format("{}, AdamW {}, {} ranks", way.name, adam, ranks);
          EXPECT_LE(distance(trained(world, way, replicas, adam, 5, kMaxNorm), wanted), 1e-9) << where;
          if (ranks == 3) {  // B18d: without clipping
            EXPECT_GT(distance(trained(world, way, replicas, adam, 5, 0), wanted), 1e-6) << where;
          }
        });
      }
    }
}

// Five steps of SGD with momentum by plain code, from the values that a model of `type` has: in fp64, or in
// `type` with fp32 masters. `rounding`: the change of each parameter at the end by one unit of rounding in
// each step's gradient, relative to its scale s.
struct Momentum {
  Parameters end, rounding;
};
constexpr int kMomentumSteps = 5;
// `draw`: the micro-batch that the sum begins with, so that rounding is another one. Micro-batches' gradients
// are added in the masters' type.
Momentum momentum_alone(at::ScalarType type, bool exact, int ranks, int draw = 0) {
  Reference reference{Model(type)};
  Momentum result;
  Parameters moved;
  for (auto& [name, p] : reference.p) {
    if (exact) p = p.detach().to(at::kDouble).requires_grad_(p.requires_grad());
    result.end[name] = p.detach().to(exact ? at::kDouble : at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    result.rounding[name] = at::zeros({}, at::kDouble);
  }
  for (int step = 0; step < kMomentumSteps; ++step) {
    Parameters gradients;
    for (const auto& [name, p] : reference.p)
      if (p.requires_grad()) gradients[name] = at::zeros_like(result.end.at(name));
    for (int i = 0; i < 2 * ranks; ++i) {
      const int place = (i + draw) % (2 * ranks);
      const zero3::Batch from = zero3::batch(place / 2, step, place % 2);
      if (from.tokens.numel() == 0) continue;
      const at::Tensor share = zero3::loss(reference.forward(from), from, zero3::count(ranks, step, 2));
      for (const auto& [name, g] : reference.gradients_of(share))
        gradients.at(name).add_(g.to(gradients.at(name).scalar_type()));
    }
    double count = 0;
    for (const auto& [name, g] : gradients) count += static_cast<double>(g.numel());
    const double rms = norm_of(gradients) / std::sqrt(count);
    const at::NoGradGuard no_grad;
    for (const auto& [name, g] : gradients) {
      at::Tensor& master = result.end.at(name);
      at::Tensor& m = moved.try_emplace(name, at::zeros_like(master)).first->second;
      m = 0.9 * m + g;
      master.sub_(m, 0.1);
      reference.p.at(name).copy_(master);
      const double weight = (1 - std::pow(0.9, kMomentumSteps - step)) / (1 - 0.9);
      const double s =
          std::max(g.norm().item<double>(), 1e-3 * rms * std::sqrt(static_cast<double>(g.numel())));
      result.rounding.at(name) += 0.1 * weight * s;
    }
  }
  return result;
}

// E2, added up over the steps: ‖w − w64‖ ≤ 4‖w_one − w64‖ + u·√(W·G)·Σ rate·(weight of the step)·s +
// steps·u32·‖w‖. w_one is one process in the same precision, the most of up to 8 draws, as rounding_of() has
// it. The last term is what fp32 masters lose by being rounded after each step, which one process may happen
// not to lose. One precision for each number of ranks, half of the strategies on each; ISOGRAD_FULL_TESTS=1:
// both, and all.
TEST(Strategies, MomentumInLowPrecisionIsNoWorseThanOneProcess) {
  std::size_t turn = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8})
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      if (!full_tests() && (ranks % 2 == 0) != (type == at::kBFloat16)) continue;
      const Momentum wanted = momentum_alone(type, true, ranks);
      std::vector<Momentum> alone{momentum_alone(type, false, ranks)};  // as many as a way needs
      const double unit = std::ldexp(1.0, type == at::kFloat ? -24 : -8) * std::sqrt(2.0 * ranks);
      const auto share_of = [&](const Way& way, int replicas, bool averages) {
        Parameters found;  // of rank 0
        run_ranks(ranks, [&](World& world) {
          const Sharded<Model> model(std::make_shared<Model>(type));
          auto layout = way.make(model, replicas_of(world, replicas));
          if (averages) layout = std::make_unique<planted::Averages>(std::move(layout));
          const auto optimizer = sgd({.learning_rate = 0.1, .momentum = 0.9});
          for (int step = 0; step < kMomentumSteps; ++step) {
            zero3::accumulate(*layout, model, world.rank, ranks, step, 2);
            optimizer->update(layout->buckets(), 1);
            layout->publish_parameters();
          }
          for (const DataParallel::View& view : layout->views()) {
            const at::Tensor values = view.master.defined() ? view.master : view.parameter;
            const at::Tensor own = values.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
            if (world.rank == 0) found[view.name] = own;
          }
        });
        for (;;) {
          double worst = 0;
          for (const auto& [name, values] : found) {
            const at::Tensor& end = wanted.end.at(name);
            double own = 0;
            for (const Momentum& draw : alone)
              own = std::max(own, (draw.end.at(name) - end).norm().item<double>());
            const double share = (values - end).norm().item<double>() /
                                 (4 * own + unit * wanted.rounding.at(name).item<double>() +
                                  kMomentumSteps * std::ldexp(1.0, -24) * end.norm().item<double>());
            worst = std::isfinite(share) ? std::max(worst, share) : HUGE_VAL;
          }
          const auto draws = static_cast<int>(alone.size());
          if (averages || worst <= 1 || draws == std::min(8, 2 * ranks)) return worst;
          alone.push_back(momentum_alone(type, false, ranks, draws));
        }
      };
      for (const Way& way : ways()) {
        if (!full_tests() && takes_first(turn++)) continue;
        EXPECT_LE(share_of(way, ranks % 2 == 0 && way.sharded ? 2 : 1, false), 1)
            << way.name << ", " << ranks << " ranks, " << c10::toString(type);
      }
      if (ranks > 1) {
        EXPECT_GT(share_of(ways()[0], 1, true), 1) << "an average over ranks passed on " << ranks;
      }
    }
}

Parameters on_rank_zero(int ranks, const Way& way, std::uint64_t delays = 0, const Around& around = {}) {
  Parameters result;
  run_ranks(ranks, [&](World& world) {
    std::uint64_t places = 0;
    if (delays > 0)
      zero3::at_place = [&](const char*) {
        const RandomKey key{.seed = delays, .sample = static_cast<std::uint64_t>(world.rank)};
        if (random_bits(key, places++) % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      };
    Parameters own = trained(world, way, ranks == 4 ? 2 : 1, false, 2, 0, around);
    zero3::at_place = nullptr;
    if (world.rank == 0) result = std::move(own);
  });
  return result;
}

bool same_bits(const Parameters& a, const Parameters& b) {
  return std::all_of(a.begin(), a.end(),
                     [&](const auto& item) { return at::equal(item.second, b.at(item.first)); });
}

template <class Fault>
Around with() {
  return [](std::unique_ptr<DataParallel> right) -> std::unique_ptr<DataParallel> {
    return std::make_unique<Fault>(std::move(right));
  };
}

// No buffer is touched while its reduction is under way (B17).
TEST(Strategies, GiveTheSameBitsWhateverTheDelays) {
  for (const Way& way : ways())
    for (int ranks : {3, 4}) {
      if (ranks == 4 && (!way.sharded || way.name.find(' ') != std::string::npos)) continue;  // two replicas
      const Parameters calm = on_rank_zero(ranks, way);
      EXPECT_TRUE(same_bits(on_rank_zero(ranks, way), calm)) << way.name;
      for (std::uint64_t seed : {1, 2})
        EXPECT_TRUE(same_bits(on_rank_zero(ranks, way, seed), calm)) << way.name << " " << seed;
    }
#ifndef ISOGRAD_SANITIZE_THREAD  // the planted mistake is a data race, which the sanitizer reports as such
  const Way late = ways(300, /*overlap=*/false)[1];
  EXPECT_FALSE(
      same_bits(on_rank_zero(3, late, 1, with<planted::ReusesBuffersInFlight>()), on_rank_zero(3, late)));
#endif
}

// Policies that change only when things are whole do not change a bit.
TEST(Strategies, PoliciesOfLifetimeDoNotChangeABit) {
  const auto units = zero3::unit_ways();
  const Parameters plain = on_rank_zero(3, units[0]);
  for (std::size_t i : {1, 2, 3, 4})
    EXPECT_TRUE(same_bits(on_rank_zero(3, units[i]), plain)) << units[i].name;
}

struct SkipsABucketsSum : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    buckets().at(1).gradients.zero_();
  }
};
struct UpdatesACopy : Wrapped {  // gathers then find shards of the step before
  std::vector<Bucket> stale;
  explicit UpdatesACopy(std::unique_ptr<DataParallel> inner_)
      : Wrapped(std::move(inner_)), stale(inner->buckets()) {
    for (Bucket& bucket : stale) bucket.parameters = bucket.master = bucket.parameters.clone();
  }
  std::vector<Bucket>& buckets() override { return stale; }
};

TEST(Strategies, PlantedFaultsAreNoticed) {
  const Parameters wanted = trained_alone(false, 3, 2, 0);
  for (const Way& way : ways())
    if (way.name == "bucketed" || way.name == "zero1" || way.name == "zero3") {
      const auto notices = [&](const Around& around) {
        return distance(on_rank_zero(3, way, 0, around), wanted) > 1e-9;
      };
      EXPECT_FALSE(notices(with<Wrapped>())) << way.name;
      EXPECT_TRUE(notices(with<planted::Averages>())) << way.name;  // B14, B15
      EXPECT_TRUE(notices(with<SkipsABucketsSum>())) << way.name;
      EXPECT_TRUE(notices(with<UpdatesACopy>())) << way.name;
    }
}

// B17: the next unit's gradients are packed into a buffer whose reduction is under way.
TEST(Strategies, ABufferUsedTooEarlyIsNoticed) {
  for (bool planted : {false, true}) {
    std::vector<char> right(3, 1);
    run_ranks(3, [&](World& world) {
      const Mesh mesh(world.group);
      const SyncAxes copied = sync_axes(placed(mesh.grid(), {}), mesh.grid());
      ShardContext context(mesh, kShardedAxes);
      std::vector<NamedParameter> parameters;
      for (const char* name : {"a", "b"})
        parameters.push_back({.name = name,
                              .tensor = at::zeros({96}, at::kDouble).requires_grad_(),
                              .decays = true,
                              .sync = copied});
      std::vector<std::unique_ptr<FlatShard>> flats;
      for (std::size_t i = 0; i < 2; ++i) {
        BucketPlan plan = plan_buckets({parameters[i]}, 1 << 20).at(0);
        plan.slots[0].index = i;
        pad_for(plan, 3);
        flats.push_back(std::make_unique<FlatShard>(plan, parameters, "unit", true, true, nullptr, context));
        flats.back()->zero();
      }
      const at::Tensor buffer = world.group.empty_shared(96, at::kDouble);
      if (world.rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // rank 0 runs ahead
      for (std::size_t i = 0; i < 2; ++i) {
        flats[i]->add(0, at::full({96}, 1.0 + static_cast<double>(i), at::kDouble));
        flats[i]->give_buffer(buffer);
        flats[i]->begin_reduction();
        if (!planted) flats[i]->wait();
      }
      if (planted)
        for (auto& flat : flats) flat->wait();
      for (std::size_t i = 0; i < 2; ++i)
        if (!flats[i]->bucket().gradients.eq(3.0 * (1.0 + static_cast<double>(i))).all().item<bool>())
          right[world.rank] = 0;
    });
    EXPECT_EQ(std::count(right.begin(), right.end(), 1) == 3, !planted);
  }
}

// ---- steps that are given up ----

Sharded<Model> make_model() {
  return std::make_shared<Model>(at::kDouble, std::vector<std::size_t>{0, 1, 2});
}

struct NeverZeroes : Wrapped {
  using Wrapped::Wrapped;
  void zero_gradients() override {}
};

// The largest error of two steps, each after a backward that belongs to none.
double error_after_probes(const Way& way, int ranks, int replicas, bool planted) {
  std::vector<double> worst(ranks);
  run_ranks(ranks, [&](World& world) {
    const auto model = make_model();
    const Reference reference(*model);
    auto layout = way.make(model, replicas_of(world, replicas));
    if (planted) layout = std::make_unique<NeverZeroes>(std::move(layout));
    for (int step : {0, 1}) {
      const zero3::Batch probe = zero3::batch(world.rank, 7, 0);
      zero3::loss(model(probe.tokens, /*odd=*/true), probe, 1).backward();
      zero3::accumulate(*layout, model, world.rank, ranks, step, 2);
      const double error = zero3::worst_error(*layout, reference.gradients(ranks, step, 2));
      worst[world.rank] = std::max(worst[world.rank], error);
    }
  });
  return *std::max_element(worst.begin(), worst.end());
}

TEST(GivenUp, ABackwardBeforeTheStepLeavesNoTrace) {
  for (const Way& way : ways())
    for (const auto& [ranks, replicas] : {std::pair{1, 1}, {3, 1}, {4, 2}}) {
      EXPECT_LE(error_after_probes(way, ranks, replicas, false), kExact) << way.name << " " << ranks;
      EXPECT_GT(error_after_probes(way, ranks, replicas, true), 1e-3) << way.name << " " << ranks;
    }
}

// Every rank's backward breaks, each in another place and one of them late, so that some wait for reductions
// which others have not begun. (Units must break in the same place: zero3_rules_test.cpp.) In the first
// backward or the second, with a reduction that is finished or not, by turns; ISOGRAD_FULL_TESTS=1: both,
// with both.
TEST(GivenUp, AfterAnExceptionInBackwardTheNextStepIsRight) {
  std::size_t turn = 0;
  for (const Way& way : ways())
    for (const auto& [ranks, replicas] : {std::pair{2, 1}, {3, 1}, {5, 1}, {4, 2}})
      for (const int breaks_at : {0, 1})
        for (const bool finishes : {false, true}) {
          if (way.units) continue;
          if (!full_tests() && takes_first(turn++)) continue;
          run_ranks(ranks, [&](World& world) {
            const auto model = make_model();
            const Reference reference(*model);
            const auto layout = way.make(model, replicas_of(world, replicas));
            bool breaks = false;
            model->blocks[static_cast<std::size_t>(world.rank % 3)]->weight.register_hook(
                [&](const at::Tensor&) {
                  if (breaks) throw std::runtime_error("broke");
                });
            zero3::accumulate(*layout, model, world.rank, ranks, 0, 2);
            std::string error = "nothing thrown";
            try {
              zero3::at_place = [&, micro = 0](const char* place) mutable {
                if (std::string(place) != "backward") return;
                breaks = micro++ == breaks_at;
                if (breaks && world.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(10));
              };
              zero3::accumulate(*layout, model, world.rank, ranks, 1, 2);
            } catch (const std::exception& caught) {
              error = caught.what();
            }
            zero3::at_place = nullptr;
            breaks = false;
            EXPECT_EQ(error, "broke");
            if (finishes) layout->finish_reduction();
            zero3::accumulate(*layout, model, world.rank, ranks, 2, 2);
            EXPECT_LE(zero3::worst_error(*layout, reference.gradients(ranks, 2, 2)), kExact)
                << way.name << " " << ranks << " ranks, broken at " << breaks_at << ", finishes " << finishes;
          });
        }
}

// Rank 1 is lost between the reduction and its update in step 2: its shards are a step behind for ever.
// Calls of blocks that the others have made with the model after that. `alone`: ranks that do not wait.
int calls_with_half_an_update(const Way& way, bool alone) {
  constexpr int kRanks = 3;
  std::vector<int> calls(kRanks), updates(kRanks);
  std::string error;
  try {
    run_ranks(kRanks, [&](World& world) {
      const auto model = make_model();
      const auto layout = way.make(model, alone ? Mesh(Group::solo()) : Mesh(world.group));
      const auto optimizer = sgd({.learning_rate = 0.1});
      zero3::at_place = [&](const char* place) {
        if (updates[world.rank] > 2 && std::string(place) == "block") ++calls[world.rank];
      };
      for (int step = 0; step < 5; ++step) {
        zero3::accumulate(*layout, model, world.rank, kRanks, step, 2);
        if (world.rank == 1 && step == 2) throw std::runtime_error("the power is gone");
        optimizer->update(layout->buckets(), 1);
        ++updates[world.rank];
        layout->publish_parameters();
      }
    });
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  EXPECT_NE(error.find("the power is gone"), std::string::npos) << way.name << ": " << error;
  EXPECT_EQ(updates, alone ? std::vector({5, 2, 5}) : std::vector({3, 2, 3})) << way.name;
  return calls[0] + calls[1] + calls[2];
}

TEST(GivenUp, NobodyUsesWhatALostRankHasNotUpdated) {
  for (const Way& way : ways()) {
    if (!way.sharded) continue;  // every rank updates all: nothing is half done
    EXPECT_EQ(calls_with_half_an_update(way, false), 0) << way.name;
    EXPECT_GT(calls_with_half_an_update(way, true), 0) << way.name;
  }
}

}  // namespace
}  // namespace isograd
