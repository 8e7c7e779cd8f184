// Each axis by itself and with a few others, in the sizes and options that the sweep over combined axes does
// not have: heads that ranks do not divide, every Ulysses size, experts that are tied or many, each schedule
// with one to eleven micro-batches, ranks without any. The gradient, loss and norm are those of one process.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "changed_config.hpp"
#include "full_tests.hpp"
#include "hybrid_testing.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/tensor_parallel.hpp"
#include "parallel/context/context_testing.hpp"

namespace isograd::hybrid {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Case {
  const char* model;  // of the sweep's factor
  int ranks;
  std::string set;  // "key=value ..." of the configuration; a key without a section is of [parallel]
  Asked asked{.look_before = false, .repeat = false};
  bool may_be_refused = false;
  const char* note = "";  // what is planted, in the name
};

constexpr const char* kMeans[] = {"token_mean", "sample_mean"};
constexpr const char* kBools[] = {"false", "true"};
constexpr const char* kOverlaps[] = {"none", "weights", "tokens"};

// A strategy and its options, by the sweep's names for them.
std::string strategy(const std::string& name, bool shared = false) {
  return fmt::format("strategy={} reduce_once={} checkpoint_activations={} share_parameters={} ",
                     name.substr(0, name.find('-')), name.ends_with("-once"), name.ends_with("-checkpointed"),
                     shared ? "on" : "off");
}
const std::pair<const char*, bool> kStrategies[] = {
    {"naive", false},      {"bucketed", false}, {"zero1", false}, {"zero2", false},
    {"zero2-once", false}, {"bucketed", true},  {"zero2", true},  {"zero3-checkpointed", false},
    {"zero3-once", false}, {"zero3", true},
};

std::vector<Case> tensor_cases() {
  std::vector<Case> all;
  std::size_t turn = 0;
  const auto add = [&](const char* model, int ranks, const char* by_tokens, const std::string& set) {
    const bool cut = by_tokens == kBools[1];
    all.push_back({model, ranks,
                   fmt::format("sequence_parallel={} tensor_overlap={} {}", by_tokens,
                               kOverlaps[turn++ / 2 % (cut ? 3 : 2)], set)});
    all.back().asked.repeat = turn % 4 == 0;
  };
  for (const char* by_tokens : kBools) {
    for (const int tp : {2, 3, 4, 5, 8}) {
      add("dense", tp, by_tokens, fmt::format("tp={} loss.fused={}", tp, tp % 2 ? "on" : "off"));
      add("tied", tp, by_tokens,
          fmt::format("tp={} model.key_value_heads=8 model.feed_forward=89 loss.kind=sample_mean", tp));
      add("video", tp, by_tokens, fmt::format("tp={} model.heads=12 loss.kind={}", tp, kMeans[tp % 2]));
    }
    // Key heads 0 and 1 on the first rank, 1 and 2 on the second; one that all have; biases.
    add("dense", 2, by_tokens, "tp=2 model.heads=6 model.key_value_heads=3 loss.fused=on");
    add("tied", 2, by_tokens, "tp=2 model.hidden=20 model.heads=5 model.key_value_heads=1");
    add("biased", 3, by_tokens, "tp=3 strategy=naive");
    // The same key heads along a view of tp, or along none.
    for (const bool viewed : {true, false}) {
      add("dense", 4, by_tokens, "tp=4");
      const MakeMesh make = [viewed](const World& world, const Grid& grid) {
        const Grid plain(grid.axes());
        return Mesh(world,
                    viewed ? plain.viewed({"tp"}, {Axis{"tp_copies", 2}, Axis{"tp_heads", 2}}) : plain);
      };
      all.back().note = viewed ? " viewed-tp" : " plain-tp";
      all.back().asked.planted.meshes = [make](const auto&) {
        return MeshesOfProblem{.model = make, .layouts = make};
      };
    }
    add("tied", 6, by_tokens, "tp=2 loss.fused=on");
    add("dense", 4, by_tokens, "tp=2 cp_ring=2 loss.kind=sample_mean");
    add("tied", 8, by_tokens, "tp=2 cp_ring=2 loss.kind=sample_mean");
    add("dense", 6, by_tokens, "tp=3 " + strategy("zero3-checkpointed"));
    for (const auto& [name, shared] : kStrategies)
      for (const int replicas : {1, 2})
        if (std::string(name).starts_with("zero") || (shared && replicas == 1))
          add("dense", 4, by_tokens,
              fmt::format("tp=2 replicas={} model.heads=6 model.key_value_heads=3 ", replicas) +
                  strategy(name, shared && replicas == 1));
    add("video", 4, by_tokens, "tp=2 batch.tokens_per_micro_batch=1");
    add("video", 4, by_tokens, "tp=2 cp_ring=2 loss.kind=sample_mean");
    add("video", 6, by_tokens, "tp=3 cp_ulysses=2 model.heads=12 " + strategy("zero3"));
    add("video", 8, by_tokens, "tp=2 cp_ring=2 batch.tokens_per_micro_batch=1000 " + strategy("zero2"));
    // Ranks with unequal parts fill their buckets differently: reductions launched within backward are in no
    // order with the model's own collectives.
    for (const auto& [heads, tp] : {std::pair{5, 2}, {8, 3}, {8, 5}})
      for (const int bytes : {1, 300, 700, 1500, 5000, 1 << 20}) {
        add("dense", tp, by_tokens,
            fmt::format("tp={} model.heads={} model.key_value_heads=1 bucket_bytes={}", tp, heads, bytes));
        all.back().asked.repeat = true;
      }
  }
  return all;
}

std::vector<Case> expert_cases() {
  std::vector<Case> all;
  const std::string shared_expert =
      "model.family=qwen2_moe model.query_key_norm=false model.attention_bias=true "
      "model.shared_expert_feed_forward=5 ";
  int turn = 0;
  const auto add = [&](const char* model, int ranks, const std::string& set, bool tied = false) {
    static constexpr const char* kOverlaps[] = {"none", "shared", "halves"};
    all.push_back({model, ranks, set});
    if (set.find("expert_overlap") == std::string::npos && set.find(" ep=") != std::string::npos)
      all.back().set += fmt::format(" expert_overlap={}", kOverlaps[turn / 2 % 3]);
    all.back().set += fmt::format(" loss.balance_over={}", turn % 3 == 1 ? "model" : "layers");
    all.back().asked.tied_routers = tied, all.back().asked.repeat = turn++ % 4 == 0;
  };
  for (const auto& [name, shared] : kStrategies) {
    const std::string own = strategy(name, shared);
    add("experts", 4, own + " ep=2");
    add("experts", 2, own + " ep=2 model.experts=4 loss.kind=sample_mean batch.packs_per_micro_batch=9");
    add("sigmoid", 3, own + " ep=3 model.experts_per_token=3");
    add("sigmoid", 4, own + " ep=2 cp_ring=2 loss.kind=sample_mean");
  }
  for (const auto& [name, shared] : {std::pair{"zero1", false}, {"bucketed", true}, {"zero3", false}}) {
    const std::string own = strategy(name, shared), replicas = shared ? "" : " replicas=2";
    add("experts", 4, own + replicas + " ep=2 loss.kind=sample_mean");
    add("experts", 4, own + replicas + " ep=4");
    add("experts", 4, own + " ep=4 cp_ring=2");
    add("experts", 3, own + " ep=3 model.experts=60 model.experts_per_token=4");
    add("experts", 6, own + " ep=3 model.experts=5", /*tied=*/true);
    for (const char* overlap : {"none", "halves"}) {
      const std::string with = fmt::format("{} expert_overlap={} ", own, overlap);
      add("experts", 4, with + shared_expert + " ep=2");
      add(shared ? "experts" : "sigmoid", 4, with + " ep=4 cp_ring=2", true);
      add("experts", 4, with + shared_expert + " tp=2 ep=2");
    }
  }
  for (const char* by_tokens : kBools)
    for (const std::string& more : {std::string(), shared_expert}) {
      const std::string own = more + "sequence_parallel=" + by_tokens;
      add("experts", 3, own + " tp=3 model.experts=5 " + strategy("bucketed"));
      add("experts", 4, own + " tp=2 ep=2 " + strategy(more.empty() ? "zero1" : "zero3"));
      add("experts", more.empty() ? 8 : 4,
          own + " tp=2 ep=2 loss.kind=sample_mean " + (more.empty() ? "cp_ring=2 " : "") +
              strategy("bucketed", true));
      add("sigmoid", 4, fmt::format("sequence_parallel={} tp=2 ep=2 ", by_tokens) + strategy("zero1"));
    }
  // All tokens to one expert.
  for (const char* overlap : {"shared", "halves"})
    add("experts", 4,
        fmt::format(" ep=4 model.experts_per_token=1 expert_overlap={} ", overlap) + strategy("zero1"), true);
  add("experts", 2, shared_expert + strategy("bucketed"));
  add("experts", 8, strategy("bucketed") + " ep=8 batch.packs_per_micro_batch=9");
  add("experts", 5, strategy("zero2") + " ep=5 model.experts=5");
  add("experts", 8, strategy("zero3") + " replicas=2 cp_ring=2 ep=2 loss.kind=sample_mean");
  return all;
}

// All data ranks but the first have no micro-batch, and one of that rank's is empty.
void idle(VerifyProblem& problem, World&) {
  if (problem.mesh->place(kSampleAxes) > 0) {
    problem.local.clear();
  } else {
    problem.local = problem.alone();
    problem.local.insert(problem.local.begin() + 1, empty_batch());
  }
}

std::vector<Case> pipeline_cases() {
  std::vector<Case> all;
  int turn = 0;
  // `micro_batches` of one pack for each data rank.
  const auto add = [&](const char* model, const char* schedule, int pp, int stages, int micro_batches,
                       int others = 1, const std::string& set = {}) {
    all.push_back(
        {model, pp * others,
         fmt::format("pp={} schedule={} stages_per_rank={} batch.packs_per_micro_batch=1 "
                     "batch.packs_per_step={} model.layers={} loss.kind={} {}",
                     pp, schedule, stages, micro_batches, pp * stages + 1, kMeans[turn++ / 2 % 2], set)});
    return &all.back().asked;
  };
  for (const char* schedule : {"one-after-another", "gpipe", "1f1b"})
    for (const int pp : {2, 3, 5, 8}) add("dense", schedule, pp, 1, pp % 2 == 0 ? pp : 2 * pp + 1);
  for (const auto& [pp, stages] : {std::pair{2, 2}, {2, 3}, {3, 2}, {4, 2}})
    for (const int rounds : {1, 2}) add("dense", "interleaved", pp, stages, pp * rounds);
  add("dense", "interleaved", 3, 2, 4);  // filled up
  add("dense", "one-after-another", 2, 2, 3);
  for (const int pp : {2, 3, 4, 5})
    for (const int micro_batches : {1, pp, 2 * pp + 1}) {  // backwards in halves
      add("dense", "zb-h1", pp, 1, micro_batches);
      add("dense", "zb-v", pp, 2, micro_batches);
    }
  for (const char* name : {"naive", "bucketed", "zero1", "zero2", "zero3"}) {
    add("dense", "1f1b", 2, 1, 6, 2, strategy(name));
    add("tied", "1f1b", 3, 1, 6, 2, strategy(name));
    add("dense", "gpipe", 3, 1, 6, 2, strategy(name))->planted.change = idle;
    if (std::string(name) == "zero3") continue;
    add("dense", "zb-h1", 2, 1, 6, 2, strategy(name));
    add("dense", "zb-v", 2, 2, 6, 2, strategy(name));
  }
  for (int i = 0; i < 2; ++i) {
    add("dense", "1f1b", 2, 1, 3, 2, "tp=2 tensor_overlap=weights");
    add("dense", "zb-h1", 2, 1, 3, 2, "tp=2 tensor_overlap=tokens");
    add("dense", "zb-v", 2, 2, 6, 4, "tp=2");
    for (const int pp : {2, 3}) add("dense", "1f1b", pp, 1, 6, 2)->after_nothing = true;
    add("dense", "zb-h1", 2, 1, 6, 2)->after_nothing = true;
    ++turn;
  }
  add("dense", "interleaved", 2, 2, 5, 3)->planted.change = idle;
  for (const int pp : {2, 3, 4, 5})  // a tied embedding's ends, on one rank or two
    for (const char* schedule : {"1f1b", "zb-h1"}) add("tied", schedule, pp, 1, pp);
  for (const int pp : {2, 3}) add("tied", "zb-v", pp, 2, 2 * pp);
  add("tied", "interleaved", 3, 2, 3);
  add("tied", "interleaved", 2, 2, 4, 2);
  add("tied", "zb-h1", 2, 1, 6, 2, strategy("zero2"));
  add("tied", "1f1b", 3, 1, 3, 2, "tp=2");
  add("tied", "1f1b", 3, 1, 3)->after_nothing = true;
  add("dense", "zb-h1", 2, 1, 3, 1, "loss.fused=on");
  add("tied", "zb-v", 2, 2, 4, 2, "tp=2 loss.fused=on");
  // Units of ZeRO-3 in stages.
  for (const auto& [schedule, stages] :
       {std::pair{"one-after-another", 2}, {"gpipe", 1}, {"1f1b", 1}, {"interleaved", 2}}) {
    add("dense", schedule, 2, stages, 6, 3, strategy("zero3"));
    add("dense", schedule, 2, stages, 4, 2, strategy("zero3") + "reshard_after_forward=false");
    add("dense", schedule, 2, stages, 4, 2, strategy("zero3-checkpointed"));
    add("dense", schedule, 2, stages, 4, 2, strategy("zero3", true));
    add("tied", schedule, 2, stages, 4, 2, strategy("zero3"));
    add("dense", schedule, 2, stages, 5, 2, strategy("zero3"))->planted.change = idle;
    add("dense", schedule, 2, stages, 4, 2, strategy("zero3"))->after_nothing = true;
  }
  add("dense", "1f1b", 4, 1, 6, 2, strategy("zero3") + "loss.fused=on");
  add("dense", "1f1b", 2, 1, 6, 4, strategy("zero3") + "tp=2");
  add("dense", "1f1b", 3, 1, 4, 1, strategy("zero3"));  // nobody to share with
  return all;
}

// Long documents, packs of many, and packs of fewer tokens than ranks; strategies, axes of shards and means
// take turns.
std::vector<Case> context_cases() {
  std::vector<Case> all;
  std::size_t turn = 0;
  const auto add = [&](int others, int ring, int ulysses, const std::string& set) {
    std::vector<const char*> spreads{"all"};
    if (ring * ulysses > 1) spreads.push_back("none");
    if (ring > 1 && ulysses > 1) spreads.insert(spreads.end(), {"ring_only", "ulysses_only"});
    for (const char* data : {"pack_length=48", "pack_length=13", "pack_length=3", "video=1", "video=40"}) {
      const bool video = std::string(data).starts_with("video");
      auto [name, shared] = kStrategies[turn % std::size(kStrategies)];
      std::string own = strategy(name, shared);
      if (!shared && std::string(name).starts_with("zero"))
        own += fmt::format("cp_fsdp_mode={} ", spreads[turn / 3 % spreads.size()]);
      all.push_back(
          {video ? "video" : "dense", others * ring * ulysses,
           fmt::format("cp_ring={} cp_ulysses={} model.heads=12 loss.kind={} {}={} {} {}", ring, ulysses,
                       kMeans[turn / 2 % 2], video ? "batch.tokens_per_micro_batch" : "data.pack_length",
                       std::string(data).substr(std::string(data).find('=') + 1), own, set)});
      if (!video)
        all.back().set += fmt::format(" model.key_value_heads={} batch.packs_per_micro_batch={}",
                                      ulysses == 3 ? 12 : 2, turn % 2 ? 1 : 9);
      turn += 7;  // no divisor of the numbers that take turns
    }
  };
  for (const testing::ContextSizes& sizes : testing::kContextSizes) add(1, sizes.ring, sizes.ulysses, "");
  add(2, 2, 1, ""), add(2, 1, 2, ""), add(2, 2, 2, "");
  // Angles that depend on a document's length know the whole document's.
  all.push_back({"dense", 3,
                 "cp_ring=3 model.max_positions=16 model.rope_scaling.kind=dynamic "
                 "model.rope_scaling.factor=2 data.pack_length=48"});
  return all;
}

// With ISOGRAD_FULL_TESTS=1 each under every strategy and mean that it can have.
std::vector<Case> with_all(std::vector<Case> cases) {
  const std::size_t count = full_tests() ? cases.size() : 0;
  for (std::size_t i = 0; i < count; ++i)
    for (const auto& [name, shared] : kStrategies)
      for (const char* mean : kMeans) {
        Case other = cases[i];
        other.set += fmt::format(" loss.kind={} {}", mean, strategy(name, shared));
        other.may_be_refused = true;
        cases.push_back(std::move(other));
      }
  return cases;
}

class Axes : public HybridCells {
 protected:
  RunConfig config_for(const Case& one) const {
    RunConfig config = HybridCells::config_for(Cell{}.with(kModel, one.model));
    if (config.model.kind == "decoder" && one.ranks > 4) config.batch.packs_per_step = 9;
    return changed(std::move(config), one.set);
  }
  static std::string name_of(const Case& one) {
    return fmt::format("{} on {}: {}{}{}{}{}", one.model, one.ranks, one.set,
                       one.asked.tied_routers ? " tied routers" : "",
                       one.asked.after_nothing ? " after nothing" : "",
                       one.asked.planted.change ? " idle ranks" : "", one.note);
  }
  void check(const std::vector<Case>& cases) {
    double worst = 0;
    std::size_t runs = 0;
    DefaultCases made(8);
    for (const Case& one : with_all(cases)) {
      if (!made.has(name_of(one))) continue;
      SCOPED_TRACE(name_of(one));
      try {
        if (one.may_be_refused &&
            testing_runs::config_error_of([&] { isograd::check(config_for(one), one.ranks); }) != "no error")
          continue;
        const RunConfig config = config_for(one);
        EXPECT_EQ(refusal_of(config, one.ranks), "no error");
        const Measured measured =
            measure(config, one.ranks, wanted(config, 0, one.asked.tied_routers), one.asked);
        EXPECT_EQ(wrong_with(measured), "");
        worst = std::max(worst, measured.gradient), ++runs;
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    EXPECT_GE(runs, full_tests() ? cases.size() : cases.size() / 8);
    std::printf("%zu runs of %zu cases, worst gradient %.1e of %.0e\n", runs, cases.size(), worst, kExact);
  }
  // In fp32 or bf16 by turns; in both with ISOGRAD_FULL_TESTS=1.
  void check_lower(const std::vector<Case>& cases, DefaultCases& made) {
    double worst = 0;
    std::size_t runs = 0;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (!made.has(name_of(cases[i]))) continue;
      for (const char* dtype : {"float32", "bfloat16"}) {
        if (!full_tests() && takes_first(runs) != (dtype[0] == 'f')) continue;
        SCOPED_TRACE(fmt::format("{} in {}", name_of(cases[i]), dtype));
        try {
          RunConfig config = config_for(cases[i]);
          config.train.dtype = dtype;
          const Rounding rounding = rounding_of(config, cases[i].ranks, cases[i].asked);
          EXPECT_THAT(rounding.outside, IsEmpty());
          worst = std::max(worst, rounding.share);
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      }
      ++runs;
    }
    std::printf("%zu cases in lower precision, at most %.2f of the error allowed\n", runs, worst);
  }
};

TEST_F(Axes, TensorParallelIsOneProcess) { check(tensor_cases()); }
TEST_F(Axes, ExpertParallelIsOneProcess) { check(expert_cases()); }
TEST_F(Axes, PipelineParallelIsOneProcess) { check(pipeline_cases()); }
TEST_F(Axes, ContextParallelIsOneProcess) { check(context_cases()); }
TEST_F(Axes, InLowerPrecisionNoWorseThanOneProcess) {
  DefaultCases made(32);
  for (const auto cases : {tensor_cases, expert_cases, pipeline_cases, context_cases})
    check_lower(cases(), made);
}

// Matrix products made by all threads while it lives, by at::mm, at::addmm and addmm_(): in fp64 there are no
// others.
class CountedProducts {
 public:
  CountedProducts() {
    count = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& called)
                                                                   -> std::unique_ptr<at::ObserverContext> {
                                      for (const char* name : {"aten::mm", "aten::addmm", "aten::addmm_"})
                                        if (std::strcmp(called.name(), name) == 0) ++count;
                                      return nullptr;
                                    }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountedProducts() { at::removeCallback(handle_); }
  CountedProducts(const CountedProducts&) = delete;
  CountedProducts& operator=(const CountedProducts&) = delete;
  static inline std::atomic<std::int64_t> count = 0;

 private:
  at::CallbackHandle handle_;
};

// One for the forward, one for the gradient of what goes in, one for that of the weight.
TEST_F(Axes, HalvesOfABackwardMakeEachMatrixProductOnce) {
  for (const auto& [schedule, stages] : {std::pair{"1f1b", 1}, {"zb-h1", 1}, {"zb-v", 2}}) {
    const Case one{"dense", 2,
                   fmt::format("pp=2 schedule={} stages_per_rank={} batch.packs_per_micro_batch=2 "
                               "batch.packs_per_step=8 model.layers=5",
                               schedule, stages)};
    const RunConfig config = config_for(one);
    const Wanted& exact = wanted(config);  // the first product of a process tries kernels out
    const CountedProducts counted;
    measure(config, one.ranks, exact, one.asked);
    // q, k, v, o, gate, up and down of each layer, and the output.
    EXPECT_EQ(CountedProducts::count, 4 * 3 * (7 * 5 + 1)) << schedule;
  }
}

// At zero every block is the identity: its gradients vanish, and parity would hold whatever attention did.
TEST_F(Axes, GatesOfVideosBeginAwayFromZero) {
  for (const char* gate : {"0", "0.5"})
    for (const auto& [name, g] :
         wanted_of(config_for({"video", 1, fmt::format("video.gate_init={}", gate)})).gradients)
      if (name.starts_with("blocks."))
        EXPECT_EQ(g.norm().item<double>() > 0, gate[0] != '0' || gate[1]) << name;
}

// The two means are different losses here, so that one cannot pass for the other.
TEST_F(Axes, TheMeansDiffer) {
  for (const char* data : {"48", "24", "13"}) {
    const auto gradients = [&](const char* mean) {
      return wanted(config_for({"dense", 1, fmt::format("data.pack_length={} loss.kind={}", data, mean)}));
    };
    const Wanted tokens = gradients("token_mean"), samples = gradients("sample_mean");
    double worst = 0;
    for (const auto& [name, g] : samples.gradients)
      worst = std::max(worst,
                       (tokens.gradients.at(name) - g).norm().item<double>() / scale_of(rms_of(samples), g));
    EXPECT_GT(worst, 1e-2) << data;
  }
}

// Another document's tokens change nothing, bit for bit.
TEST_F(Axes, NothingLeaksBetweenDocuments) {
  for (const auto& [ring, ulysses] : {std::pair{2, 1}, {5, 1}, {1, 4}, {2, 2}})
    for (const std::vector<std::int64_t>& lengths : std::vector<std::vector<std::int64_t>>{
             {5, 1, 9, 3, 12, 7, 2, 6}, {5, 1, 9, 3, 12, 7}, {3, 37, 5, 2}}) {
      Batch whole = empty_batch();
      for (const std::int64_t length : lengths) {
        whole.cu_seqlens.push_back(whole.cu_seqlens.back() + length);
        whole.sample_ids.push_back(static_cast<std::int64_t>(whole.sample_ids.size()));
        whole.sample_targets.push_back(0);
      }
      const std::int64_t tokens = whole.num_tokens();
      whole.tokens = at::arange(tokens).mul(7).remainder(31),
      whole.positions = at::zeros({tokens}, at::kLong);
      whole.targets = at::full({tokens}, kIgnoreIndex);
      for (std::size_t f = 0; f < lengths.size(); ++f)
        whole.positions.slice(0, whole.cu_seqlens[f], whole.cu_seqlens[f + 1]).copy_(at::arange(lengths[f]));
      const ContextCut cut =
          cut_documents(whole.cu_seqlens, {.ring = ring, .ulysses = ulysses, .level = lengths.size() != 6});
      run_ranks(ring * ulysses, [&](World& world) {
        DecoderConfig config;
        config.vocabulary = 31, config.hidden = 24, config.layers = 2, config.heads = 12;
        config.key_value_heads = 2, config.head_dim = 4, config.feed_forward = 20;
        config.max_positions = 128, config.initializer_range = 0.3;
        DecoderLM model(config, at::kFloat, 3);
        model.set_attention(
            ContextAttention(Mesh(world, data_grid(world.size, {.cp_ring = ring, .cp_ulysses = ulysses}))));
        const auto hidden = [&](const Batch& batch) {
          return model.hidden(cut_batch(batch, cut, world.rank)).detach();
        };
        const at::Tensor before = hidden(whole);
        const Batch own = cut_batch(whole, cut, world.rank);
        for (std::size_t victim = 0; victim < lengths.size(); ++victim) {
          Batch changed = whole;
          changed.tokens = whole.tokens.clone();
          at::Tensor place = changed.tokens.slice(0, whole.cu_seqlens[victim], whole.cu_seqlens[victim + 1]);
          place.add_(11).remainder_(31);
          const at::Tensor after = hidden(changed);
          for (std::size_t f = 0; f < own.sample_ids.size(); ++f) {
            const auto part = [&](const at::Tensor& x) {
              return x.slice(0, own.cu_seqlens[f], own.cu_seqlens[f + 1]);
            };
            const bool is_victim = own.sample_ids[f] == whole.sample_ids[victim];
            const bool same = part(before).equal(part(after));
            EXPECT_TRUE(is_victim ? !same || part(before).numel() == 0 : same)
                << ring << " x " << ulysses << ", document " << own.sample_ids[f];
          }
        }
        // A model that does not know of the other ranks refuses a part.
        EXPECT_THAT(
            testing_runs::config_error_of([&] { DecoderLM(config, at::kFloat, 3).hidden(own); }),
            HasSubstr(fmt::format("a part of a batch that is cut over {} context ranks", ring * ulysses)));
      });
    }
}

TEST_F(Axes, RanksThatRouteByOtherRulesAreRefused) {
  struct Other {
    const char* name;
    void (*change)(DecoderConfig&, ExpertParallelOptions&);
  };
  const Other others[] = {
      {"model.experts 12 on rank 2, 8 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.count = 12; }},
      {"model.experts_per_token 1 on rank 2, 2 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.per_token = 1; }},
      {"model.normalise_experts 0 on rank 2",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.normalise = false; }},
      {"model.expert_groups 1 on rank 2, 4 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.groups = c.experts.groups_per_token = 1; }},
      {"model.expert_scale 1 on rank 2, 2.5 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.scale = 1; }},
      {"dense layers, their number 0 on rank 2, 1 on rank 0",
       [](DecoderConfig& c, ExpertParallelOptions&) { c.experts.dense_layers = {}; }},
      {"parallel.expert_overlap",
       [](DecoderConfig&, ExpertParallelOptions& o) { o.overlap = ExpertOverlap::kHalves; }},
  };
  for (const int ep : {1, 3})
    for (const Other& other : others) {
      const RunConfig run = config_for({"sigmoid", 3, fmt::format("ep={}", ep)});
      std::vector<std::string> errors(3);
      run_ranks(3, [&](World& world) {
        DecoderConfig config = configured_shape(run);
        config.vocabulary = 31;
        ExpertParallelOptions options;
        if (world.rank == 2) other.change(config, options);
        DecoderLM model(config, at::kFloat, 1);
        const Mesh mesh(world, grid_of(run, 3));
        errors[static_cast<std::size_t>(world.rank)] =
            testing_runs::config_error_of([&] { shard_experts(model, mesh, {}, options); });
      });
      for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr(other.name));
    }
}

TEST_F(Axes, MoreRanksThanHeadsAreRefused) {
  run_ranks(3, [this](World& world) {
    const Mesh mesh(world, Grid({{"tp", 3}}));
    RunConfig run = config_for({"dense", 1, "model.heads=2 model.key_value_heads=1"});
    run.model.shape.vocabulary = 31;
    DecoderLM text(configured_shape(run), at::kDouble, 1);
    EXPECT_THAT(testing_runs::config_error_of([&] { cut_decoder(text, mesh); }),
                ::testing::AllOf(HasSubstr("2 pieces of 4 rows"), HasSubstr("q_proj"),
                                 HasSubstr("at most 2 ranks along tp")));
    VideoDiTConfig config = testing::small_video_dit();
    config.heads = 2;
    VideoDiT video(config, at::kDouble, 1);
    EXPECT_THAT(testing_runs::config_error_of([&] { cut_video(video, mesh); }),
                HasSubstr("at most 2 ranks along tp"));
  });
}

TEST_F(Axes, StagesAreAssignedByCost) {
  const auto counts = [](const std::vector<double>& costs, int stages, double behind = 0) {
    std::vector<std::int64_t> result;
    std::int64_t next = 0;
    for (const StageLayers& own : assign_layers(costs, stages, behind)) {
      EXPECT_EQ(own.begin, next);
      next += own.count;
      result.push_back(own.count);
    }
    EXPECT_EQ(next, static_cast<std::int64_t>(costs.size()));
    return result;
  };
  EXPECT_EQ(counts({1, 1, 1, 1}, 2), (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(counts({1, 1, 1, 1, 1, 1}, 2, 4), (std::vector<std::int64_t>{5, 1}));  // a head that costs four
  EXPECT_EQ(counts({1, 1, 5, 1, 1}, 3), (std::vector<std::int64_t>{2, 1, 2}));
  EXPECT_THAT(testing_runs::config_error_of([] { assign_layers({1, 1}, 3); }), HasSubstr("3 for 2 layers"));
}

TEST_F(Axes, PipelinesThatCannotBeRunAreRefused) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, Grid({{kStageAxis, 2}}));
    const auto refused = [&](PipelineOptions options, const std::function<void(Pipeline&)>& use = {}) {
      return testing_runs::config_error_of([&] {
        Pipeline pipeline(mesh, std::move(options));
        if (use) use(pipeline);
      });
    };
    EXPECT_THAT(refused({.schedule = "zb-v"}), HasSubstr("1 stages on each rank"));
    EXPECT_THAT(refused({.table = make_pipeline("1f1b", 3, 1, 3)}), HasSubstr("2 ranks along pp"));
    const PipelineOptions several{.schedule = "interleaved", .stages_of_rank = 2};
    EXPECT_THAT(refused(several, [](Pipeline& pipeline) { pipeline.stage(); }),
                HasSubstr("a forward outside of a step, of a rank with 2 stages"));
    EXPECT_THAT(refused(several, [&](Pipeline& pipeline) { pipeline.look_at(1 - world.rank); }),
                HasSubstr("one of this rank's"));
  });
}

}  // namespace
}  // namespace isograd::hybrid
