// ZeRO-3 gives the gradient of one process, in every policy; and the tests notice when it does not.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/random.hpp"
#include "isograd/world.hpp"
#include "layout/flat.hpp"
#include "parallel/data/flat_shard.hpp"
#include "zero3_model.hpp"

namespace isograd {
namespace {

using zero3::Model;
using zero3::Reference;

struct Policy {
  std::string name;
  FullyShardOptions options{};
  int replicas = 1;
};

const std::vector<Policy>& policies() {
  static const std::vector<Policy> all = {
      {.name = "default"},
      {.name = "no prefetch", .options = {.prefetch = false}},
      {.name = "root freed", .options = {.reshard_root = true}},
      {.name = "blocks kept", .options = {.reshard_after_forward = false}},
      {.name = "checkpoint", .options = {.checkpoint = true}},
      {.name = "once", .options = {.reduce_once = true}},
      {.name = "shared", .options = {.share_parameters = true}},
      {.name = "shared, once", .options = {.reduce_once = true, .share_parameters = true}},
      {.name = "two replicas", .replicas = 2},
      {.name = "two replicas, once", .options = {.reduce_once = true}, .replicas = 2},
  };
  return all;
}

const double kExact = 1e-10;  // E1

TEST(Zero3, GradientsAreThoseOfOneProcess) {
  for (const Policy& policy : policies())
    for (int ranks : {1, 2, 3, 4, 5, 8})
      for (int micros : {1, 3}) {
        if (ranks % policy.replicas != 0) continue;
        std::mutex mutex;
        run_ranks(ranks, [&](World& world) {
          Sharded<Model> model(std::make_shared<Model>());
          const Reference reference(*model);
          const auto layout = fully_shard(
              model, model->uses(), Mesh(world, data_grid(world.size, {.dp_replicate = policy.replicas})),
              policy.options);
          for (int step = 0; step < 2; ++step) {  // the second uses the buffers again
            zero3::accumulate(*layout, model, world.rank, ranks, step, micros);
            const double error = zero3::worst_error(*layout, reference.gradients(ranks, step, micros));
            const std::lock_guard lock(mutex);
            EXPECT_LE(error, kExact) << policy.name << ", " << ranks << " ranks, " << micros
                                     << " micro-batches, step " << step << ", rank " << world.rank;
          }
          EXPECT_EQ(layout->gathered_bytes(), 0);
        });
      }
}

// Elements owned over all ranks are the model's once, so that the norm is that of one process.
TEST(Zero3, CountsEveryElementOnceInTheNorm) {
  for (const Policy& policy : policies())
    for (int ranks : {2, 4, 5}) {
      if (ranks % policy.replicas != 0) continue;
      double squares = 0;
      for (const auto& [name, gradient] : Reference(Model()).gradients(ranks, 0, 2))
        squares += gradient.square().sum().item<double>();
      run_ranks(ranks, [&](World& world) {
        Sharded<Model> model(std::make_shared<Model>());
        const auto layout = fully_shard(model, model->uses(),
                                        Mesh(world, data_grid(world.size, {.dp_replicate = policy.replicas})),
                                        policy.options);
        zero3::accumulate(*layout, model, world.rank, ranks, 0, 2);
        const double norm = global_norm(layout->buckets(), 0, layout->mesh().all()).norm;
        EXPECT_NEAR(norm, std::sqrt(squares), kExact * std::sqrt(squares)) << policy.name;
      });
    }
}

using Parameters = std::map<std::string, at::Tensor>;

Parameters copies(FullySharded& layout, const Sharded<Model>& model) {
  const auto whole = layout.whole_parameters();
  Parameters result;
  for (auto& item : model->named_parameters()) result[item.key()] = item.value().detach().clone();
  return result;
}

// Parameters after `steps` steps.
Parameters trained(World& world, const Policy& policy, Optimizer& optimizer, int steps, int micros,
                   const std::function<std::unique_ptr<DataParallel>(FullySharded&)>& around = {}) {
  Sharded<Model> model(std::make_shared<Model>());
  auto layout =
      fully_shard(model, model->uses(), Mesh(world, data_grid(world.size, {.dp_replicate = policy.replicas})),
                  policy.options);
  const std::unique_ptr<DataParallel> wrapped = around ? around(*layout) : nullptr;
  DataParallel& used = wrapped ? *wrapped : *layout;
  for (int step = 0; step < steps; ++step) {
    zero3::accumulate(used, model, world.rank, world.size, step, micros);
    if (zero3::at_place) zero3::at_place("update");
    optimizer.update(used.buckets(), 1);
    used.publish_parameters();
    if (zero3::at_place) zero3::at_place("published");
  }
  return copies(*layout, model);
}

double distance(const Parameters& found, const Parameters& wanted) {
  double worst = 0;
  for (const auto& [name, values] : wanted) {
    const double error = (found.at(name) - values).norm().item<double>() / values.norm().item<double>();
    worst = std::isfinite(error) ? std::max(worst, error) : HUGE_VAL;
  }
  return worst;
}

// Momentum and AdamW as their papers write them, on the reference's gradients.
Parameters trained_alone(bool adam, int ranks, int steps, int micros) {
  Reference reference{Model()};
  std::map<std::string, at::Tensor> first, second;
  for (int step = 0; step < steps; ++step) {
    const auto gradients = reference.gradients(ranks, step, micros);
    const at::NoGradGuard no_grad;
    for (const auto& [name, g] : gradients) {
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

std::unique_ptr<Optimizer> make_optimizer(bool adam) {
  if (adam) return adamw({.learning_rate = 0.01, .weight_decay = 0.1});
  return sgd({.learning_rate = 0.1, .momentum = 0.9});
}

TEST(Zero3, FiveStepsAreThoseOfOneProcess) {
  for (bool adam : {false, true})
    for (int ranks : {1, 3, 4}) {
      const Parameters wanted = trained_alone(adam, ranks, 5, 2);
      for (const Policy& policy : policies()) {
        if (ranks % policy.replicas != 0) continue;
        run_ranks(ranks, [&](World& world) {
          const auto optimizer = make_optimizer(adam);
          const double error = distance(trained(world, policy, *optimizer, 5, 2), wanted);
          EXPECT_LE(error, 1e-9) << policy.name << (adam ? ", AdamW, " : ", SGD, ") << ranks << " ranks";
        });
      }
    }
}

Parameters on_rank_zero(int ranks, const Policy& policy, int steps, int micros, std::uint64_t delays = 0,
                        const std::function<std::unique_ptr<DataParallel>(FullySharded&)>& around = {}) {
  Parameters result;
  run_ranks(ranks, [&](World& world) {
    std::uint64_t places = 0;
    if (delays > 0)
      zero3::at_place = [&](const char*) {
        const RandomKey key{.seed = delays, .sample = static_cast<std::uint64_t>(world.rank)};
        if (random_bits(key, places++) % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      };
    const auto optimizer = make_optimizer(false);
    Parameters own = trained(world, policy, *optimizer, steps, micros, around);
    zero3::at_place = nullptr;
    if (world.rank == 0) result = std::move(own);
  });
  return result;
}

bool same_bits(const Parameters& a, const Parameters& b) {
  return std::all_of(a.begin(), a.end(),
                     [&](const auto& item) { return at::equal(item.second, b.at(item.first)); });
}

TEST(Zero3, TheSameBitsRunToRunWhateverTheDelays) {
  for (const Policy& policy : policies()) {
    const int ranks = policy.replicas == 2 ? 4 : 3;
    const Parameters calm = on_rank_zero(ranks, policy, 2, 2);
    EXPECT_TRUE(same_bits(on_rank_zero(ranks, policy, 2, 2), calm)) << policy.name;
    for (std::uint64_t seed : {1, 2})
      EXPECT_TRUE(same_bits(on_rank_zero(ranks, policy, 2, 2, seed), calm)) << policy.name << " " << seed;
  }
}

// Policies that change only when things are whole do not change a bit.
TEST(Zero3, PoliciesOfLifetimeDoNotChangeABit) {
  const Parameters plain = on_rank_zero(3, policies()[0], 2, 2);
  for (std::size_t i : {1, 2, 3, 4}) {
    ASSERT_EQ(policies()[i].options.reduce_once || policies()[i].options.share_parameters, false);
    EXPECT_TRUE(same_bits(on_rank_zero(3, policies()[i], 2, 2), plain)) << policies()[i].name;
  }
}

// ---- planted faults: each must be noticed by what the tests above compare

struct Wrapped : DataParallel {
  FullySharded& inner;
  explicit Wrapped(FullySharded& inner_) : inner(inner_) {}
  void zero_gradients() override { inner.zero_gradients(); }
  void begin_backward(bool last) override { inner.begin_backward(last); }
  void finish_reduction() override { inner.finish_reduction(); }
  void publish_parameters() override { inner.publish_parameters(); }
  std::vector<Bucket>& buckets() override { return inner.buckets(); }
  const Mesh& mesh() const override { return inner.mesh(); }
};
struct DividesByRanks : Wrapped {  // the reducer makes a mean of the sum (B14, B15)
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner.finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.mul_(1.0 / mesh().all().size());
  }
};
struct SkipsAUnit : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner.finish_reduction();
    buckets().at(1).gradients.zero_();
  }
};
struct UpdatesACopy : Wrapped {  // gathers then find shards of the step before
  std::vector<Bucket> stale;
  explicit UpdatesACopy(FullySharded& inner_) : Wrapped(inner_), stale(inner_.buckets()) {
    for (Bucket& bucket : stale) bucket.parameters = bucket.master = bucket.parameters.clone();
  }
  std::vector<Bucket>& buckets() override { return stale; }
};

template <typename Fault>
bool notices(int ranks) {
  const Parameters wanted = trained_alone(false, ranks, 2, 2);
  const auto around = [](FullySharded& inner) { return std::make_unique<Fault>(inner); };
  return distance(on_rank_zero(ranks, policies()[0], 2, 2, 0, around), wanted) > 1e-9;
}

TEST(Zero3, PlantedFaultsAreNoticed) {
  EXPECT_FALSE(notices<Wrapped>(3));
  EXPECT_TRUE(notices<DividesByRanks>(3));
  EXPECT_TRUE(notices<SkipsAUnit>(3));
  EXPECT_TRUE(notices<UpdatesACopy>(3));
}

// B17: the next unit's gradients are packed into a buffer whose reduction is under way.
TEST(Zero3, ABufferUsedTooEarlyIsNoticed) {
  for (bool planted : {false, true}) {
    std::vector<char> right(3, 1);
    run_ranks(3, [&](World& world) {
      const Mesh mesh(world.group);
      const SyncAxes copied = sync_axes(placed(mesh.grid(), {}), mesh.grid());
      ShardContext context{
          .mesh = mesh, .groups = RoleGroups(mesh, copied, kShardedAxes), .sharded_axes = kShardedAxes};
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
        flats[i]->begin_reduction(buffer);
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

// A parameter without values that is all that its unit has: it fills the storage that the unit keeps.
TEST(Zero3Rules, AUnitOfOneParameterStartsFromTheMetaDevice) {
  for (int ranks : {1, 2})
    run_ranks(ranks, [&](World& world) {
      at::Tensor weight = at::empty({16, 16}, at::TensorOptions(at::kDouble).device(at::kMeta));
      weight.requires_grad_();
      const UnitHandle root([&] { return std::vector<at::Tensor>{weight}; });
      const auto layout =
          fully_shard(root, {{"weight", weight}}, {}, Mesh(world, Grid({{"dp_shard", world.size}})),
                      {.initialize = [](const std::string&, at::Tensor& values) { values.fill_(3); }});
      const at::Tensor other =
          at::full({256}, 7, at::kDouble);  // where memory given back would be found again
      const auto whole = layout->whole_parameters();
      EXPECT_TRUE(at::equal(weight.detach(), at::full({16, 16}, 3, at::kDouble))) << ranks;
    });
}

}  // namespace
}  // namespace isograd
