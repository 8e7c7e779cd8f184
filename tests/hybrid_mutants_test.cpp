// Mistakes planted in cells of the sweep: in the mean, the layout, placements, the norm, the schedule, the
// data, and the groups that operators communicate over. The pairwise cells find each of them: a table of
// mistakes, each with the cell that finds it first and how many of those that it is in do.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "full_tests.hpp"
#include "hybrid_testing.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "museum/room.hpp"
#include "parallel/context/context_testing.hpp"

namespace isograd::hybrid::mutants {
namespace {

using planted::Wrapped;

// Cells in which a mistake is another gradient or norm.
struct Where {
  std::function<bool(const Cell&)> holds;
  bool operator()(const Cell& cell) const { return holds(cell); }
};
Where operator&&(const Where& a, const Where& b) {
  return {[=](const Cell& cell) { return a(cell) && b(cell); }};
}
Where operator||(const Where& a, const Where& b) {
  return {[=](const Cell& cell) { return a(cell) || b(cell); }};
}
Where operator!(const Where& a) {
  return {[=](const Cell& cell) { return !a(cell); }};
}
Where is(Which factor, const char* value) {
  return {[=](const Cell& cell) { return cell.is(factor, value); }};
}
Where above(Which axis, int least = 1) {
  return {[=](const Cell& cell) { return cell.number(axis) > least; }};
}

const Where everywhere{[](const Cell&) { return true; }}, several{[](const Cell&c) { return c.ranks() > 1; }};
const Where data{[](const Cell&c) { return c.data() > 1; }}, data_ranks = above(kReplicate) || above(kShard);
const Where context = above(kRing) || above(kUlysses);
const Where text = !is(kModel, "video"), video = !text, tied = is(kModel, "tied");
const Where experts = is(kModel, "experts") || is(kModel, "sigmoid");
const Where token_mean = is(kMean, "token_mean"), sample_mean = is(kMean, "sample_mean");
const Where accumulates = !is(kPacks, "9"), apart = is(kShare, "off");
const Where cut = above(kTp) && is(kTokens, "cut"), uncut = above(kTp) && is(kTokens, "whole");
// Gradients lie whole in buckets that nothing reduces before the end.
const Where plain = is(kStrategy, "naive");
// Whole on every rank once they are summed.
const Where whole = is(kStrategy, "bucketed") || plain || is(kStrategy, "overlapped");
// Ranks that hold the same experts.
const Where copied{[](const Cell& c) { return c.number(kEp) > 1 && c.data() > c.number(kEp); }};
// Where both ends of a tied embedding lie in other stages.
const Where ends = above(kPp) && tied && !is(kSchedule, "zb-v");

struct Mutant {
  std::string kind, what;
  Where exists;
  Planted planted{};
  // Parts of the names of the parameters whose gradients are wrong; the others are right. Empty: any may be.
  std::vector<std::string> wrong{};
};

using Change = std::function<void(VerifyProblem&, World&)>;

auto adds(std::vector<Mutant>& all, const char* kind) {
  return [&all, kind](const char* what, const Where& where, Change change) {
    all.push_back({kind, what, where, {.meshes = {}, .change = std::move(change)}});
  };
}

// Around the layout under test; `grid`: its mesh's.
using Around = std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)>;
Change around_layout(const Around& around) {
  return [around](VerifyProblem& problem, World&) {
    wrap(problem.layouts[0], [around](auto right, const VerifyModel&) { return around(std::move(right)); });
  };
}
template <class Wrong, class... Arguments>
Change layout_is(Arguments... arguments) {
  return around_layout([=](auto right) { return std::make_unique<Wrong>(std::move(right), arguments...); });
}

// After the sum over ranks.
using ChangeBuckets = std::function<void(std::vector<Bucket>& buckets, const Mesh& mesh)>;
struct AfterSum : Wrapped {
  ChangeBuckets change;
  AfterSum(std::unique_ptr<DataParallel> inner_, ChangeBuckets change_)
      : Wrapped(std::move(inner_)), change(std::move(change_)) {}
  void finish_reduction() override {
    inner->finish_reduction();
    change(buckets(), mesh());
  }
};

// This rank's part of a slot, in the bucket's gradients.
at::Tensor held_of(const Bucket& bucket, const Slot& slot) {
  const std::int64_t begin = std::max(slot.offset, bucket.held.begin),
                     end = std::min(slot.offset + slot.numel, bucket.held.end);
  return bucket.gradients.narrow(0, begin < end ? begin - bucket.held.begin : 0,
                                 std::max<std::int64_t>(0, end - begin));
}
bool named(const std::string& name, const std::string& part) { return name.find(part) != std::string::npos; }
int size_of(const Mesh& mesh, const std::string& axis) {
  return mesh.grid().has(axis) ? mesh.size({axis}) : 1;
}

// ---- what is divided by, sums over ranks and micro-batches, the norm ----

template <class Wrong, class... Arguments>
Change mean_is(Arguments... arguments) {
  return [=](VerifyProblem& problem, World&) {
    problem.make_normalizer = [=] { return std::make_unique<Wrong>(arguments...); };
  };
}
// Counts as many times as there are ranks along the axes.
template <class Mean>
struct CountsPeersOf : Mean {
  std::shared_ptr<double> peers;  // known once there is a layout
  explicit CountsPeersOf(std::shared_ptr<double> peers_) : peers(std::move(peers_)) {}
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = Mean::denominator(step_counts);
    wrong.value *= *peers;
    return wrong;
  }
};
template <class Mean = TokenMean>
Change counted_along(const AxisSet& axes) {
  return [axes](VerifyProblem& problem, World&) {
    const auto peers = std::make_shared<double>(1);
    wrap(problem.layouts[0], [peers, axes](auto right, const VerifyModel&) {
      for (const std::string& axis : axes) *peers *= size_of(right->mesh(), axis);
      return right;
    });
    problem.make_normalizer = [peers] { return std::make_unique<CountsPeersOf<Mean>>(peers); };
  };
}
// A fragment is taken for a sample, of the tokens at hand.
struct FragmentsAreSamples : SampleMean {
  Batch prepare(const Batch& batch, const Denominator& denominator) const override {
    Denominator wrong = denominator;
    wrong.sample_sizes.clear();
    for (std::size_t i = 0; i < batch.sample_ids.size(); ++i)
      wrong.sample_sizes[batch.sample_ids[i]] +=
          batch.targets.slice(0, batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
              .ne(kIgnoreIndex)
              .sum()
              .item<double>();
    return SampleMean::prepare(batch, wrong);
  }
};

struct SamplesOfThisRank : SampleMean {
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = SampleMean::denominator(step_counts);
    wrong.value =
        std::max(1.0, double(step_counts.samples_by_rank.at(static_cast<std::size_t>(step_counts.rank))));
    return wrong;
  }
};
struct DividedByRounds : TokenMean {  // B31
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = TokenMean::denominator(step_counts);
    wrong.value *= static_cast<double>(step_counts.global_micro_batches);
    return wrong;
  }
};
struct CountsTokens : TokenMean {  // those without a target too
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = TokenMean::denominator(step_counts);
    wrong.value = static_cast<double>(step_counts.tokens);
    return wrong;
  }
};

void add_means(std::vector<Mutant>& all) {
  const auto add = adds(all, "mean");
  add("each micro-batch's own mean, averaged", token_mean && accumulates,
      mean_is<planted::MeanOfMicroBatchMeans>());
  add("each rank's own mean, averaged", token_mean && data_ranks, mean_is<planted::MeanOfRankMeans>());
  add("a count that stays on its rank", token_mean && data_ranks, mean_is<planted::CountNotReduced>());
  add("targets counted on ranks along tp", token_mean && above(kTp), counted_along({"tp"}));
  add("targets counted in every stage", token_mean && above(kPp), counted_along({"pp"}));
  add("targets counted on ranks along ep again", token_mean && above(kEp), counted_along({"ep"}));
  add("targets counted on context ranks", token_mean && context, counted_along(kContextAxes));
  add("samples counted on context ranks", sample_mean && context, counted_along<SampleMean>(kContextAxes));
  add("fragments taken for samples", sample_mean && context && text, mean_is<FragmentsAreSamples>());
  add("nothing divides", token_mean, mean_is<planted::NothingDivides>());
  add("divided by the micro-batches too", token_mean && accumulates, mean_is<DividedByRounds>());
  add("tokens counted in the place of targets", token_mean && text, mean_is<CountsTokens>());
  add("samples of this rank alone", sample_mean && data_ranks, mean_is<SamplesOfThisRank>());
}

Change multiplied(const std::string& part, const std::function<double(const Mesh&)>& factor) {
  return layout_is<AfterSum>([part, factor](std::vector<Bucket>& buckets, const Mesh& mesh) {
    for (Bucket& bucket : buckets)
      for (const Slot& slot : bucket.plan.slots)
        if (named(slot.name, part)) held_of(bucket, slot).mul_(factor(mesh));
  });
}
Change multiplied(const std::string& part, double factor) {
  return multiplied(part, [factor](const Mesh&) { return factor; });
}
Change multiplied_by(const std::string& part, const std::string& axis, int power = 1) {
  return multiplied(part, [=](const Mesh& mesh) { return std::pow(size_of(mesh, axis), power); });
}

// One rank's part of one parameter.
struct ForgetsAPart : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->begin_backward(false);  // naive() takes the last backward's gradients into the buckets
    if (mesh().rank() == 0) buckets().back().gradients.zero_();
    inner->finish_reduction();
  }
};
struct SumsAgain : Wrapped {  // along all that parts lie on
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) {
      Group group = mesh().along(bucket.plan.sync.summed);
      if (group.size() > 1) group.all_reduce(bucket.gradients);
    }
  }
};

void add_sums(std::vector<Mutant>& all) {
  const auto add = adds(all, "sum");
  add("averaged over all ranks", several, layout_is<planted::Averages>());
  add("multiplied by the replicas", above(kReplicate), multiplied_by("", "dp_replicate"));
  add("context ranks averaged", context,
      multiplied("", [](const Mesh& mesh) { return 1.0 / mesh.size(kContextAxes); }));
  add("a stage's gradients divided by the stages", above(kPp), multiplied("", [](const Mesh& mesh) {
        return mesh.has_first_stage() ? 1.0 / size_of(mesh, "pp") : 1.0;
      }));
  add("experts multiplied by ep", above(kEp), multiplied_by(".experts.", "ep"));
  add("experts divided by ep", above(kEp), multiplied_by(".experts.", "ep", -1));
  add("experts multiplied by their copies", copied, multiplied_by(".experts.", "edp"));
  add("routers cut off", experts, multiplied(".mlp.gate.", 0));
  add("a parameter off by a millionth of a thousandth", text, multiplied("model.norm.weight", 1 + 1e-9));
  add("the embedding of a tied output off", tied, multiplied("embed_tokens", 2));
  add("summed twice", whole && data, layout_is<SumsAgain>());
  add("one rank's part of a bucket forgotten", plain, layout_is<ForgetsAPart>());
  add("scaled again with every micro-batch", plain && accumulates,
      layout_is<planted::RescalesTheBuffer>([] { return 2.0; }));
  for (const auto& [what, which, axis] :
       {std::tuple{"summed along tp with every micro-batch", kTp, "tp"},
        {"summed over the ring with every micro-batch", kRing, "cp_ring"},
        {"summed over Ulysses with every micro-batch", kUlysses, "cp_ulysses"}})
    add(what, plain && above(which) && accumulates, layout_is<museum::SumsAgain>(AxisSet{axis}));
}

// Which elements this rank counts, of each bucket.
using Owns = std::function<Range(const Bucket& bucket, const Mesh& mesh)>;
struct Owned : Wrapped {
  Owned(std::unique_ptr<DataParallel> inner_, const Owns& owns) : Wrapped(std::move(inner_)) {
    for (Bucket& bucket : buckets()) bucket.owned = owns(bucket, mesh());
  }
};
Change owned(const Owns& owns) { return layout_is<Owned>(owns); }
// Copies that lie along this axis alone count on each of its ranks.
Change copies_count(const std::string& counted) {
  return owned([counted](const Bucket& bucket, const Mesh& mesh) {
    AxisSet along;
    for (const std::string& axis : bucket.plan.sync.copies)
      for (const std::string& each : mesh.grid().axes_of(axis))
        if (each != counted) along.insert(axis);
    return owned_slice(bucket.plan.numel, mesh.place(along), mesh.size(along));
  });
}
bool of_experts(const Bucket& bucket) {
  return !bucket.plan.slots.empty() && named(bucket.plan.slots[0].name, ".experts.");
}

using Norm = std::function<double(const std::vector<Bucket>& buckets, const Mesh& mesh)>;
Change norm_is(const Norm& norm) {
  return [norm](VerifyProblem& problem, World&) {
    const auto mesh = std::make_shared<std::optional<Mesh>>();
    wrap(problem.layouts[0], [mesh](auto right, const VerifyModel&) {
      mesh->emplace(right->mesh());
      return right;
    });
    problem.clipping = OwnClipping{
        .norm = [norm, mesh](std::vector<Bucket>& buckets, Group&) { return norm(buckets, **mesh); }};
  };
}
using Buckets = std::vector<Bucket>;
double summed_squares(const Buckets& buckets, const Mesh& mesh, const AxisSet& along) {
  const double norm = museum::norm_of_own(buckets);
  return std::sqrt(summed(norm * norm, mesh, along));
}
double norm_of_stage(const Buckets& buckets, const Mesh& mesh) {
  return summed_squares(buckets, mesh, without(mesh.grid().names(), {kStageAxis}));
}

void add_norms(std::vector<Mutant>& all) {
  const auto add = adds(all, "norm");
  add("every copy counts", data && whole, owned([](const Bucket& b, const Mesh&) { return b.held; }));
  add("copies along tp count", above(kTp) && whole, copies_count("tp"));
  add("replicas count", above(kReplicate) && whole, copies_count("dp_replicate"));
  add("both ends of a tied embedding count", ends && whole, copies_count(kStageAxis));
  add("experts sharded to all data ranks, as dense ones are", above(kEp) && whole,
      owned([](const Bucket& b, const Mesh& mesh) {
        return of_experts(b) ? owned_slice(b.plan.numel, mesh.place(mesh.data()), mesh.size(mesh.data()))
                             : b.owned;
      }));
  add("experts left out", above(kEp), owned([](const Bucket& b, const Mesh&) {
        return of_experts(b) ? Range{b.owned.begin, b.owned.begin} : b.owned;
      }));
  add("the norm of what this rank owns", several,
      norm_is([](const Buckets& buckets, const Mesh&) { return museum::norm_of_own(buckets); }));
  add("the mean of the ranks' norms", several, norm_is([](const Buckets& buckets, const Mesh& mesh) {
        return museum::mean_over(mesh.all(), museum::norm_of_own(buckets));
      }));
  add("the norm of this stage", above(kPp), norm_is(norm_of_stage));
  add("the largest norm of any stage", above(kPp), norm_is([](const Buckets& buckets, const Mesh& mesh) {
        at::Tensor norm = at::full({1}, norm_of_stage(buckets, mesh), at::kDouble);
        mesh.all().all_reduce(norm, ReduceOp::kMax);
        return norm.item<double>();
      }));
  add("the norm over data ranks alone", above(kTp), norm_is([](const Buckets& buckets, const Mesh& mesh) {
        return summed_squares(buckets, mesh, mesh.data());
      }));
  add("norms added up, not squares", several, norm_is([](const Buckets& buckets, const Mesh& mesh) {
        return summed(museum::norm_of_own(buckets), mesh, mesh.grid().names());
      }));
  add("the largest element", everywhere,
      norm_is([](const Buckets& buckets, const Mesh& mesh) { return infinity_norm(buckets, mesh.all()); }));
}

// ---- single axes in a mesh of several: placements, schedules, data, what operators exchange ----

// The model is cut rightly, and its gradients are summed by other placements.
using ChangePlacement = std::function<void(const std::string& name, Placement& placement)>;
Change placed_otherwise(const ChangePlacement& change) {
  return [change](VerifyProblem& problem, World&) {
    LayoutUnderTest& layout = problem.layouts[0];
    layout.make_from_model = [right = layout.make_from_model, change](const VerifyModel& model, Group group) {
      Layout::Named placements = model.placed->placements();
      for (auto& [name, placement] : placements) change(name, placement);
      VerifyModel wrong = model;
      wrong.placed = std::make_shared<Layout>(model.placed->mesh(), placements);
      return right(wrong, std::move(group));
    };
  };
}

void add_placements(std::vector<Mutant>& all) {
  using Parts = std::vector<std::string>;
  const auto change = [&](const char* what, const Where& where, const Parts& parts,
                          const std::function<void(Placement&)>& to) {
    const auto of_parts = [parts, to](const std::string& name, Placement& placement) {
      for (const std::string& part : parts)
        if (named(name, part)) to(placement);
    };
    all.push_back({"placement", what, where, {.meshes = {}, .change = placed_otherwise(of_parts)}, parts});
  };
  const auto unsummed = [&](const char* what, const Where& where, const Parts& parts, const AxisSet& axes) {
    change(what, where, parts, [axes](Placement& placement) {
      for (const std::string& axis : axes) placement.summed.erase(axis);
    });
  };
  const auto sum_along_tp = [](Placement& placement) { placement.summed.insert("tp"); };
  const Where together = whole && (above(kTp) || above(kEp) || above(kPp));
  unsummed("norms not summed along tp, whose ranks have other tokens", cut && text,
           {"layernorm", "model.norm"}, {"tp"});
  change("norms summed along tp, whose ranks have the same tokens", uncut && text,
         {"layernorm", "model.norm."}, sum_along_tp);
  unsummed("norms of queries and keys not summed along tp", above(kTp) && (is(kModel, "dense") || experts),
           {"q_norm", "k_norm"}, {"tp"});
  unsummed("copied key heads not summed along tp", above(kTp, 2) && text, {"k_proj", "v_proj"},
           {"tp", "tp_copies"});
  unsummed("biases of cut sums not summed along tp", cut && is(kModel, "biased"),
           {"o_proj.bias", "down_proj.bias"}, {"tp"});
  unsummed("routers not summed along tp, whose ranks have other tokens", cut && experts, {"mlp.gate."},
           {"tp"});
  change("routers summed along tp, whose ranks have the same tokens", uncut && experts, {"mlp.gate.weight"},
         sum_along_tp);
  for (const char* part : {"modulation", "q_norm", "k_norm", "attention.o.bias", "patch", "time", "final"})
    unsummed("parts of a video's model not summed along tp", cut && video, {part}, {"tp"});
  unsummed("copies of experts not summed", copied && apart, {".experts."}, {"edp"});
  unsummed("the ends of a tied embedding not summed", ends, {"embed_tokens"}, {kStageAxis});
  unsummed("nothing summed over replicas", together && above(kReplicate), {""}, {"dp_replicate"});
  unsummed("nothing summed over the ring", together && above(kRing), {""}, {"cp_ring"});
  unsummed("nothing summed over Ulysses", together && above(kUlysses), {""}, {"cp_ulysses"});
  unsummed("the last stage's norm not summed over data", whole && text && above(kPp) && data,
           {"model.norm.weight"}, kDataAxes);
}

// A schedule in which something is done to the gradients around the backward of a micro-batch.
struct Tampered : MicroBatchWork {
  MicroBatchWork& inner;
  std::vector<at::Tensor> parameters;
  std::size_t which;
  double keeps;  // of what this backward adds
  Tampered(MicroBatchWork& inner_, std::vector<at::Tensor> parameters_, std::size_t which_, double keeps_)
      : inner(inner_), parameters(std::move(parameters_)), which(which_), keeps(keeps_) {}
  template <class F>
  void around(std::size_t i, F&& backward) {
    std::vector<at::Tensor> before;
    for (const at::Tensor& each : parameters)
      before.push_back(each.grad().defined() ? each.grad().clone() : at::Tensor());
    backward();
    if (i != which) return;
    const at::NoGradGuard no_grad;
    for (std::size_t p = 0; p < parameters.size(); ++p)
      if (at::Tensor now = parameters[p].grad(); now.defined())
        now.copy_((now - (before[p].defined() ? before[p] : at::zeros_like(now))) * keeps +
                  (before[p].defined() ? before[p] : at::zeros_like(now)));
  }
  std::size_t size() const override { return inner.size(); }
  void forward(std::size_t i, std::size_t part) override { inner.forward(i, part); }
  void backward(std::size_t i, bool last, std::size_t part) override {
    around(i, [&] { inner.backward(i, last, part); });
  }
  void backward_inputs(std::size_t i, std::size_t part) override { inner.backward_inputs(i, part); }
  void backward_weights(std::size_t i, bool last, std::size_t part) override {
    around(i, [&] { inner.backward_weights(i, last, part); });
  }
};
Change tampered(std::size_t which, double keeps, bool on_first_rank_alone = false) {
  return [=](VerifyProblem& problem, World& world) {
    if (on_first_rank_alone && world.rank > 0) return;
    problem.make_model = [=, make = problem.make_model](at::ScalarType dtype) {
      VerifyModel model = make(dtype);
      std::vector<at::Tensor> parameters;
      for (const auto& [name, tensor] : model.named)
        if (tensor.requires_grad()) parameters.push_back(tensor);
      model.through = [=, right = model.through](StepOptions options) {
        options = right(std::move(options));
        options.schedule = [=, run = options.schedule](MicroBatchWork& work) {
          Tampered wrong(work, parameters, which, keeps);
          run(wrong);
        };
        return options;
      };
      return model;
    };
  };
}

// Changes the terms of every model that runs under the problem.
using ChangeTerms = std::function<void(LossTerms& terms, const VerifyProblem& problem)>;
Change terms_become(const ChangeTerms& change) {
  return [change](VerifyProblem& problem, World&) {
    const auto mesh = std::make_shared<VerifyProblem>();
    mesh->mesh = problem.mesh;
    problem.make_model = [change, mesh, make = problem.make_model](at::ScalarType dtype) {
      VerifyModel model = make(dtype);
      model.loss_terms = [change, mesh, right = model.loss_terms](const Batch& batch) {
        LossTerms terms = right(batch);
        change(terms, *mesh);
        return terms;
      };
      return model;
    };
  };
}
ChangeTerms scaled(const char* name, const std::function<double(const VerifyProblem&)>& factor) {
  return [name, factor](LossTerms& terms, const VerifyProblem& problem) {
    for (LossTerm& term : terms)
      if (term.name == name) term.sum = term.sum * factor(problem);
  };
}

// Changes this rank's micro-batches; `place`: which of the data ranks it is.
using ChangeBatches = std::function<void(MicroBatches& batches, int place)>;
Change local(const ChangeBatches& change) {
  return [change](VerifyProblem& problem, World& world) {
    const Mesh* mesh = problem.mesh ? &*problem.mesh : nullptr;
    change(problem.local, mesh ? mesh->place(mesh->data()) : world.rank);
  };
}
Change each_batch(const std::function<void(Batch& batch, int place)>& change) {
  return local([change](MicroBatches& batches, int place) {
    for (Batch& batch : batches) change(batch, place);
  });
}

void add_schedules_and_data(std::vector<Mutant>& all) {
  const auto schedule = adds(all, "schedule"), add = adds(all, "data");
  const Where halves = is(kSchedule, "zb-h1") || is(kSchedule, "zb-v"), one_by_one = is(kPacks, "1");
  schedule("a micro-batch's gradient lost", plain && accumulates, tampered(0, 0));
  schedule("a micro-batch's backward twice", plain && accumulates, tampered(0, 2));
  schedule("lost on one rank alone", plain && accumulates, tampered(0, 0, true));
  schedule("gradients of weights lost, in a backward of halves",
           is(kStrategy, "bucketed") && halves && accumulates, tampered(0, 0));
  schedule("the loss of the last stage by the number of stages", above(kPp),
           terms_become(scaled("cross_entropy", [](const VerifyProblem& p) -> double {
             const Mesh& mesh = *p.mesh;
             return mesh.place({kStageAxis}) + 1 == mesh.size({kStageAxis}) ? 1.0 / mesh.size({kStageAxis})
                                                                            : 1.0;
           })));
  const auto by = [](const char* term, const char* axis) {
    return terms_become(
        scaled(term, [axis](const VerifyProblem& p) -> double { return size_of(*p.mesh, axis); }));
  };
  add("the balance loss by the ranks along tp", experts && above(kTp), by("balance", "tp"));
  add("the routers' z-loss by the ranks along ep", is(kModel, "experts") && above(kEp), by("router_z", "ep"));
  add("a micro-batch twice", !context && one_by_one && text, local([](MicroBatches& batches, int place) {
        if (place == 0 && !batches.empty()) batches.push_back(batches[0]);
      }));
  add("a micro-batch left out", !context && one_by_one, local([](MicroBatches& batches, int place) {
        if (place == 0 && batches.size() > 1) batches.pop_back();
      }));
  add("positions lost on context ranks", context && text,
      each_batch([](Batch& batch, int) { batch.positions = at::zeros_like(batch.positions); }));
  add("noise by the place in the part, not in the video", context && video,
      each_batch([](Batch& batch, int) { batch.positions = at::arange(batch.num_tokens()); }));
  add("documents that lie on several ranks taken for one", context && text, each_batch([](Batch& batch, int) {
        auto wrong = std::make_shared<ContextCut>(*testing::joined_across_shards(*batch.cut));
        wrong->rank = batch.cut->rank;
        batch.cut = wrong;
      }));
  add("noise by the rank", video && data, each_batch([](Batch& batch, int place) { batch.draw += place; }));
  add("one rank's second choice of experts another", experts && data_ranks && !context,
      [](VerifyProblem& problem, World& world) {
        if (world.rank != 0) return;
        problem.make_model = [make = problem.make_model](at::ScalarType dtype) {
          VerifyModel model = make(dtype);
          model.choose_experts(
              [](const Batch&, std::int64_t, const ExpertScores& scores, const at::Tensor& likeliest) {
                const std::int64_t count = scores.values.size(1);
                at::Tensor other = likeliest.clone();
                other.select(1, 1).copy_((likeliest.select(1, 0) + 1).remainder(count));
                return other;
              });
          return model;
        };
      });
}

// Groups that pass every operation on and spoil what some of them give: mistakes of operators, put in through
// the mesh that a model or a layout is given.
enum class Operation { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kReceive };

struct Fault {
  AxisSet along{};  // of the groups of ranks that differ along these axes alone
  Operation of = Operation::kAllReduce;
  // The output of an operation, and this rank's input (before, of an all-reduce; nothing, of a
  // receive). Of floating numbers alone: counts that ranks tell each other stay right.
  std::function<void(at::Tensor& output, const at::Tensor& input, int rank, int size)> spoil{};
};

class Spoils : public c10d::Backend {
 public:
  Spoils(Group inner, Fault fault, std::shared_ptr<bool> armed)
      : c10d::Backend(inner.rank(), inner.size()),
        inner_(std::move(inner)),
        fault_(std::move(fault)),
        armed_(std::move(armed)) {}

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  const std::string getBackendName() const override { return "spoils"; }
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const bool sum = options.reduceOp == c10d::ReduceOp::SUM;
    const at::Tensor before = sum ? tensors[0].clone() : at::Tensor();
    inner_.all_reduce(tensors[0], operation(options.reduceOp));
    if (sum) spoil(Operation::kAllReduce, tensors[0], before);
    return done();
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    inner_.reduce(tensors[0], static_cast<int>(options.rootRank), operation(options.reduceOp));
    return done();
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    inner_.broadcast(tensors[0], static_cast<int>(options.rootRank));
    return done();
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    at::Tensor rows = output.view({size_, -1});
    inner_.all_gather_async(rows, input.reshape({-1})).wait();
    spoil(Operation::kAllGather, rows, input);
    return done();
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override {
    at::Tensor flat = output.view(-1);
    const at::Tensor own = input.reshape({size_, -1})[rank_].clone();
    inner_.reduce_scatter_async(flat, input.reshape({-1}), operation(options.reduceOp)).wait();
    spoil(Operation::kReduceScatter, flat, own);
    return done();
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const at::Tensor all = inner_.gather(inputs[0], static_cast<int>(options.rootRank));
    for (std::size_t r = 0; all.defined() && r < outputs[0].size(); ++r)
      outputs[0][r].copy_(all[static_cast<std::int64_t>(r)]);
    return done();
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    const at::Tensor all = inputs.empty() || inputs[0].empty() ? outputs[0] : at::stack(inputs[0]);
    inner_.scatter(outputs[0], all, static_cast<int>(options.rootRank));
    return done();
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions&) override {
    inner_.all_to_all_async(output, input, output_splits, input_splits).wait();
    spoil(Operation::kAllToAll, output, input);
    return done();
  }
  Works barrier(const c10d::BarrierOptions&) override {
    inner_.barrier();
    return done();
  }
  Works send(Tensors& tensors, int to, int tag) override {
    return c10::make_intrusive<Waits>(inner_.send_async(tensors[0], to, tag), std::function<void()>());
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    return c10::make_intrusive<Waits>(
        inner_.recv_async(tensors[0], from, tag),
        [this, tensor = tensors[0]]() mutable { spoil(Operation::kReceive, tensor, {}); });
  }

 private:
  struct Done : c10d::Work {
    bool isCompleted() override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  struct Waits : c10d::Work {
    Pending pending;
    std::function<void()> then;
    bool done = false;
    Waits(Pending pending_, std::function<void()> then_)
        : pending(std::move(pending_)), then(std::move(then_)) {}
    bool isCompleted() override { return done || (pending.progress() && wait({})); }
    bool wait(std::chrono::milliseconds) override {
      if (std::exchange(done, true)) return true;
      pending.wait();
      if (then) then();
      return true;
    }
  };
  static Works done() { return c10::make_intrusive<Done>(); }
  static ReduceOp operation(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::MAX       ? ReduceOp::kMax
           : op == c10d::ReduceOp::MIN     ? ReduceOp::kMin
           : op == c10d::ReduceOp::PRODUCT ? ReduceOp::kProduct
                                           : ReduceOp::kSum;
  }
  void spoil(Operation of, at::Tensor& output, const at::Tensor& input) {
    if (of != fault_.of || !*armed_ || !output.is_floating_point() || output.numel() == 0) return;
    const at::NoGradGuard no_grad;
    fault_.spoil(output, input, rank_, size_);
  }

  Group inner_;
  Fault fault_;
  std::shared_ptr<bool> armed_;
};

// Groups along the fault's axes are such ones. Where these are all ranks there is no group of their own.
MakeMesh spoiled_mesh(Fault fault, std::shared_ptr<bool> armed) {
  return [fault, armed](const World& world, const Grid& grid) {
    AxisSet along;
    for (const std::string& axis : fault.along)
      if (grid.has(axis)) along.insert(axis);
    const auto spoiled = grid.ranks_along(along, world.rank);
    return Mesh(world.group, grid,
                [world, fault, armed, spoiled](const std::vector<int>& ranks, const std::string& name) {
                  const Group right = world.subgroup(ranks, name);
                  if (ranks != spoiled) return right;
                  return Group(c10::make_intrusive<Spoils>(right, fault, armed), name, right.timeout(),
                               {.self_test = false});
                });
  };
}

void add_operators(std::vector<Mutant>& all) {
  using Spoil = std::function<void(at::Tensor&, const at::Tensor&, int, int)>;
  const Spoil own_alone = [](at::Tensor& out, const at::Tensor& in, int, int) { out.copy_(in); };
  const Spoil averaged = [](at::Tensor& out, const at::Tensor&, int, int size) { out.div_(size); };
  const Spoil slipped = [](at::Tensor& out, const at::Tensor&, int, int) { out.mul_(1 + 1e-6); };
  const Spoil turned = [](at::Tensor& out, const at::Tensor&, int, int) { out.copy_(out.roll(1, 0)); };
  const Spoil first_lost = [](at::Tensor& out, const at::Tensor&, int, int) { out.select(0, 0).zero_(); };
  const Spoil lost = [](at::Tensor& out, const at::Tensor&, int, int) { out.zero_(); };
  const auto add = [&](const char* what, const Where& where, AxisSet along, Operation of, const Spoil& spoil,
                       bool of_layout = false) {
    const Fault fault{std::move(along), of, spoil};
    const auto meshes = [fault, of_layout](const std::shared_ptr<bool>& armed) -> MeshesOfProblem {
      const MakeMesh spoiled = spoiled_mesh(fault, armed);
      if (of_layout) return {.model = plain_mesh, .layouts = spoiled};
      return {.model = spoiled, .layouts = plain_mesh};
    };
    all.push_back({"operator", what, where, {.meshes = meshes, .change = {}}});
  };
  using enum Operation;
  // Where the axis is not all there is: then its group is the world's.
  const auto of = [](Which axis) {
    const Where others{[axis](const Cell& c) { return c.ranks() > c.number(axis); }};
    return above(axis) && others && apart;
  };
  add("tp: a sum that stays this rank's part", of(kTp) && uncut, {"tp"}, kAllReduce, own_alone);
  add("tp: a sum that is averaged", of(kTp) && uncut, {"tp"}, kAllReduce, averaged);
  add("tp: a sum off by a millionth", of(kTp) && uncut, {"tp"}, kAllReduce, slipped);
  add("tp: gathered in another order", of(kTp) && cut, {"tp"}, kAllGather, turned);
  add("tp: the first rank's tokens lost", of(kTp) && cut, {"tp"}, kAllGather, first_lost);
  add("tp: scattered without the others' parts", of(kTp) && cut, {"tp"}, kReduceScatter, own_alone);
  add("tp: scattered averages", of(kTp) && cut, {"tp"}, kReduceScatter, averaged);
  add("ep: the first row lost", of(kEp), {"ep"}, kAllToAll, first_lost);
  add("ep: rows back in another order", of(kEp), {"ep"}, kAllToAll, turned);
  add("ep: rows averaged", of(kEp), {"ep"}, kAllToAll, averaged);
  add("ring: keys that do not come", of(kRing), {"cp_ring"}, kReceive, lost);
  add("ring: keys off by a millionth", of(kRing), {"cp_ring"}, kReceive, slipped);
  add("Ulysses: tokens in another order", of(kUlysses), {"cp_ulysses"}, kAllToAll, turned);
  add("Ulysses: the first part lost", of(kUlysses), {"cp_ulysses"}, kAllToAll, first_lost);
  add("pp: a stream that does not come", of(kPp), {"pp"}, kReceive, lost);
  add("pp: a stream off by a millionth", of(kPp), {"pp"}, kReceive, slipped);
  const Where shards{[](const Cell& c) { return c.shards(); }};
  const Where dense =
      shards && above(kShard) && above(kReplicate) && apart && is(kSpread, "all") && !context && is(kEp, "1");
  add("dp_replicate: replicas that are not summed", dense, {"dp_replicate"}, kAllReduce, own_alone, true);
  add("dp_shard: shards without the others' parts", dense, {"dp_shard"}, kReduceScatter, own_alone, true);
  add("dp_shard: averaged shards", dense, {"dp_shard"}, kReduceScatter, averaged, true);
  // Where shards lie along some of the axes, those along the others hold copies of them.
  add("cp_ring: shards that are not summed along it",
      shards && is(kSpread, "ulysses_only") && above(kRing) && apart, {"dp_replicate", "cp_ring"}, kAllReduce,
      own_alone, true);
  add("cp_ulysses: shards that are not summed along it",
      shards && is(kSpread, "ring_only") && above(kUlysses) && apart, {"dp_replicate", "cp_ulysses"},
      kAllReduce, own_alone, true);
  const Where zero3{[](const Cell& c) { return c.strategy() == "zero3"; }};
  add("dp_shard: parameters gathered in another order", dense && zero3, {"dp_shard"}, kAllGather, turned,
      true);
}

class HybridMutants : public HybridCells {};

// As the sweep judges a cell; empty: nothing is seen.
std::string seen(const RunConfig& config, int ranks, const Wanted& wanted, const Mutant& mutant) {
  try {
    const Measured found =
        measure(config, ranks, wanted, {.planted = mutant.planted, .look_before = false, .repeat = false});
    // Exactly those that it is about are wrong, some of each kind.
    for (const std::string& part : mutant.wrong) {
      bool exists = false;
      double worst = 0;
      for (const auto& [name, error] : found.errors)
        if (named(name, part)) exists = true, worst = std::max(worst, error);
      if (exists) {
        EXPECT_GT(worst, 1e-3) << mutant.what << ": " << part;
      }
    }
    for (const auto& [name, error] : found.errors)
      if (!mutant.wrong.empty() &&
          std::ranges::none_of(mutant.wrong, [&](const std::string& part) { return named(name, part); }))
        EXPECT_LT(error, 1e-10) << mutant.what << ": " << name;
    if (!(found.gradient < 1e-10)) return fmt::format("gradient {:.0e} ({})", found.gradient, found.worst);
    if (!(found.loss < 1e-10)) return fmt::format("loss {:.0e}", found.loss);
    if (!(found.assembled < 1e-12)) return fmt::format("norm {:.0e}", found.assembled);
    if (!found.same_norm) return "norm, other bits";
    return {};
  } catch (const std::exception& error) {
    EXPECT_TRUE(mutant.wrong.empty()) << mutant.what << ": " << error.what();
    return fmt::format("refused: {}", std::string(error.what()).substr(0, 60));
  }
}

// Every mutant is tried in the cells that it is in, from the smallest mesh on, until one finds it; with
// ISOGRAD_FULL_TESTS=1 in all of them.
TEST_F(HybridMutants, AreSeenByThePairwiseCells) {
  std::vector<Cell> cells = pairwise_cells();
  std::stable_sort(cells.begin(), cells.end(),
                   [](const Cell& a, const Cell& b) { return a.ranks() < b.ranks(); });
  std::vector<Mutant> all;
  for (const auto add :
       {add_means, add_sums, add_norms, add_placements, add_schedules_and_data, add_operators})
    add(all);
  EXPECT_GE(all.size(), 40u);
  int caught = 0;
  for (const Mutant& mutant : all) {
    int in = 0, tried = 0, found = 0;
    std::string first, where;
    for (const Cell& cell : cells) {
      if (!mutant.exists(cell)) continue;
      ++in;
      if (found > 0 && !full_tests()) continue;
      ++tried;
      RunConfig config = config_for(cell);
      if (!cell.is(kModel, "video"))
        config.batch.packs_per_step = 9;  // some ranks have several micro-batches
      const std::string what = seen(config, cell.ranks(), wanted(config), mutant);
      if (what.empty()) continue;
      if (++found == 1) first = what, where = cell.name();
    }
    EXPECT_GT(in, 0) << mutant.what << ": in no cell";
    EXPECT_GT(found, 0) << mutant.kind << ": " << mutant.what;
    caught += found > 0;
    std::printf("%-9s | %-58s | %3d cells, %d of %d tried | %-44s | %s\n", mutant.kind.c_str(),
                mutant.what.c_str(), in, found, tried, first.c_str(), where.c_str());
    std::fflush(stdout);
  }
  std::printf("%d of %zu mistakes seen\n", caught, all.size());
}

}  // namespace
}  // namespace isograd::hybrid::mutants
