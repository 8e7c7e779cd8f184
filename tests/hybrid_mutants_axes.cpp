// Mistakes of single axes in a mesh of several: placements, schedules, data, and what operators exchange.
#include <memory>

#include "hybrid_fault.hpp"
#include "hybrid_mutants.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd::hybrid {
namespace {

bool text(const Cell& cell) {
  return !cell.is(kModel, "video");
}

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
ChangePlacement unsummed(const std::vector<std::string>& parts, const AxisSet& axes) {
  return [parts, axes](const std::string& name, Placement& placement) {
    for (const std::string& part : parts)
      if (named(name, part))
        for (const std::string& axis : axes) placement.summed.erase(axis);
  };
}

void add_placements(std::vector<Mutant>& all) {
  const auto add = [&](const char* what, std::function<bool(const Cell&)> exists, ChangePlacement change) {
    all.push_back({"placement", what, std::move(exists), {.meshes = {}, .change = placed_otherwise(change)}});
  };
  const auto cut = [](const Cell& c) { return above(c, kTp) && c.is(kTokens, "cut"); };
  const auto together = [](const Cell& c) {
    return whole(c) && (above(c, kTp) || above(c, kEp) || above(c, kPp));
  };
  add(
      "norms not summed along tp, whose ranks have other tokens",
      [=](const Cell& c) { return cut(c) && text(c); }, unsummed({"layernorm", "model.norm"}, {"tp"}));
  add(
      "norms summed along tp, whose ranks have the same tokens",
      [](const Cell& c) { return above(c, kTp) && c.is(kTokens, "whole") && text(c); },
      [](const std::string& name, Placement& placement) {
        if (named(name, "layernorm") || name == "model.norm.weight") placement.summed.insert("tp");
      });
  add(
      "norms of queries and keys not summed along tp",
      [](const Cell& c) { return above(c, kTp) && (c.is(kModel, "dense") || c.has_experts()); },
      unsummed({"q_norm", "k_norm"}, {"tp"}));
  add(
      "copied key heads not summed along tp", [](const Cell& c) { return c.number(kTp) > 2 && text(c); },
      unsummed({"k_proj", "v_proj"}, {"tp", "tp_copies"}));
  add(
      "biases of cut sums not summed along tp",
      [=](const Cell& c) { return cut(c) && c.is(kModel, "biased"); },
      unsummed({"o_proj.bias", "down_proj.bias"}, {"tp"}));
  add(
      "routers not summed along tp, whose ranks have other tokens",
      [=](const Cell& c) { return cut(c) && c.has_experts(); }, unsummed({"mlp.gate."}, {"tp"}));
  add(
      "a video's modulation not summed along tp",
      [=](const Cell& c) { return cut(c) && c.is(kModel, "video"); }, unsummed({"modulation"}, {"tp"}));
  add(
      "copies of experts not summed",
      [](const Cell& c) { return whole(c) && above(c, kEp) && c.data() > c.number(kEp); },
      unsummed({".experts."}, {"edp"}));
  add(
      "the ends of a tied embedding not summed",
      [](const Cell& c) { return above(c, kPp) && c.is(kModel, "tied") && !c.is(kSchedule, "zb-v"); },
      [](const std::string&, Placement& placement) { placement.summed.erase(kStageAxis); });
  add(
      "nothing summed over replicas", [=](const Cell& c) { return together(c) && above(c, kReplicate); },
      unsummed({""}, {"dp_replicate"}));
  add(
      "nothing summed over the ring", [=](const Cell& c) { return together(c) && above(c, kRing); },
      unsummed({""}, {"cp_ring"}));
  add(
      "nothing summed over Ulysses", [=](const Cell& c) { return together(c) && above(c, kUlysses); },
      unsummed({""}, {"cp_ulysses"}));
  add(
      "the last stage's norm not summed over data",
      [](const Cell& c) { return whole(c) && text(c) && above(c, kPp) && c.data() > 1; },
      unsummed({"model.norm.weight"}, kDataAxes));
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

// Of every model that runs under the problem, what its terms become.
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

void add_schedules_and_data(std::vector<Mutant>& all) {
  const auto add = [&](const char* kind, const char* what, std::function<bool(const Cell&)> exists,
                       Change change) {
    all.push_back({kind, what, std::move(exists), {.meshes = {}, .change = std::move(change)}});
  };
  const auto several = [](const Cell& c) { return c.is(kStrategy, "naive") && !c.is(kPacks, "9"); };
  const auto halves = [](const Cell& c) { return c.is(kSchedule, "zb-h1") || c.is(kSchedule, "zb-v"); };
  add("schedule", "a micro-batch's gradient lost", several, tampered(0, 0));
  add("schedule", "a micro-batch's backward twice", several, tampered(0, 2));
  add("schedule", "lost on one rank alone", several, tampered(0, 0, true));
  add(
      "schedule", "gradients of weights lost, in a backward of halves",
      [=](const Cell& c) { return c.is(kStrategy, "bucketed") && halves(c) && !c.is(kPacks, "9"); },
      tampered(0, 0));
  add(
      "schedule", "the loss of the last stage by the number of stages",
      [](const Cell& c) { return above(c, kPp); },
      terms_become(scaled("cross_entropy", [](const VerifyProblem& p) -> double {
        const Mesh& mesh = *p.mesh;
        return mesh.place({kStageAxis}) + 1 == mesh.size({kStageAxis}) ? 1.0 / mesh.size({kStageAxis}) : 1.0;
      })));
  add(
      "data", "the balance loss by the ranks along tp",
      [](const Cell& c) { return c.has_experts() && above(c, kTp); },
      terms_become(
          scaled("balance", [](const VerifyProblem& p) -> double { return size_of(*p.mesh, "tp"); })));
  add(
      "data", "the routers' z-loss by the ranks along ep",
      [](const Cell& c) { return c.is(kModel, "experts") && above(c, kEp); },
      terms_become(
          scaled("router_z", [](const VerifyProblem& p) -> double { return size_of(*p.mesh, "ep"); })));
  const auto local = [](const std::function<void(VerifyProblem&, int place)>& change) -> Change {
    return [change](VerifyProblem& problem, World& world) {
      const Mesh* mesh = problem.mesh ? &*problem.mesh : nullptr;
      change(problem, mesh ? mesh->place(mesh->data()) : world.rank);
    };
  };
  const auto no_context = [](const Cell& c) { return c.number(kRing) * c.number(kUlysses) == 1; };
  add(
      "data", "a micro-batch twice",
      [=](const Cell& c) { return no_context(c) && c.is(kPacks, "1") && text(c); },
      local([](VerifyProblem& problem, int place) {
        if (place == 0 && !problem.local.empty()) problem.local.push_back(problem.local[0]);
      }));
  add(
      "data", "a micro-batch left out", [=](const Cell& c) { return no_context(c) && c.is(kPacks, "1"); },
      local([](VerifyProblem& problem, int place) {
        if (place == 0 && problem.local.size() > 1) problem.local.pop_back();
      }));
  add(
      "data", "positions lost on context ranks", [=](const Cell& c) { return !no_context(c) && text(c); },
      local([](VerifyProblem& problem, int) {
        for (Batch& batch : problem.local) batch.positions = at::zeros_like(batch.positions);
      }));
  add(
      "data", "noise by the rank", [](const Cell& c) { return c.is(kModel, "video") && c.data() > 1; },
      local([](VerifyProblem& problem, int place) {
        for (Batch& batch : problem.local) batch.draw += place;
      }));
  add(
      "data", "one rank's second choice of experts another",
      [=](const Cell& c) {
        return c.has_experts() && c.number(kReplicate) * c.number(kShard) > 1 && no_context(c);
      },
      [](VerifyProblem& problem, World& world) {
        if (world.rank != 0) return;
        problem.make_model = [make = problem.make_model](at::ScalarType dtype) {
          VerifyModel model = make(dtype);
          model.choose_experts(
              [](const Batch&, std::int64_t, const ExpertScores& scores, const at::Tensor& likeliest) {
                const std::int64_t experts = scores.values.size(1);
                at::Tensor other = likeliest.clone();
                other.select(1, 1).copy_((likeliest.select(1, 0) + 1).remainder(experts));
                return other;
              });
          return model;
        };
      });
}

void add_operators(std::vector<Mutant>& all) {
  using Spoil = std::function<void(at::Tensor&, const at::Tensor&, int, int)>;
  const Spoil own_alone = [](at::Tensor& out, const at::Tensor& in, int, int) { out.copy_(in); };
  const Spoil averaged = [](at::Tensor& out, const at::Tensor&, int, int size) { out.div_(size); };
  const Spoil slipped = [](at::Tensor& out, const at::Tensor&, int, int) { out.mul_(1 + 1e-6); };
  const Spoil turned = [](at::Tensor& out, const at::Tensor&, int, int) { out.copy_(out.roll(1, 0)); };
  const Spoil first_lost = [](at::Tensor& out, const at::Tensor&, int, int) { out.select(0, 0).zero_(); };
  const Spoil lost = [](at::Tensor& out, const at::Tensor&, int, int) { out.zero_(); };
  const auto add = [&](const char* what, std::function<bool(const Cell&)> exists, AxisSet along, Operation of,
                       const Spoil& spoil, bool of_layout = false) {
    const Fault fault{std::move(along), of, spoil};
    all.push_back({"operator",
                   what,
                   std::move(exists),
                   {.meshes = [fault, of_layout](const std::shared_ptr<bool>& armed) -> MeshesOfProblem {
                      const MakeMesh spoiled = spoiled_mesh(fault, armed);
                      if (of_layout) return {.model = plain_mesh, .layouts = spoiled};
                      return {.model = spoiled, .layouts = plain_mesh};
                    },
                    .change = {}}});
  };
  // Where the axis is not all there is: then its group is the world's.
  const auto beside = [](Which axis, const std::function<bool(const Cell&)>& more = {}) {
    return [axis, more](const Cell& c) {
      return above(c, axis) && c.ranks() > c.number(axis) && c.is(kShare, "off") && (!more || more(c));
    };
  };
  const auto tokens_cut = [](const Cell& c) { return c.is(kTokens, "cut"); };
  const auto tokens_whole = [](const Cell& c) { return c.is(kTokens, "whole"); };
  add("tp: a sum that stays this rank's part", beside(kTp, tokens_whole), {"tp"}, Operation::kAllReduce,
      own_alone);
  add("tp: a sum that is averaged", beside(kTp, tokens_whole), {"tp"}, Operation::kAllReduce, averaged);
  add("tp: a sum off by a millionth", beside(kTp, tokens_whole), {"tp"}, Operation::kAllReduce, slipped);
  add("tp: gathered in another order", beside(kTp, tokens_cut), {"tp"}, Operation::kAllGather, turned);
  add("tp: the first rank's tokens lost", beside(kTp, tokens_cut), {"tp"}, Operation::kAllGather, first_lost);
  add("tp: scattered without the others' parts", beside(kTp, tokens_cut), {"tp"}, Operation::kReduceScatter,
      own_alone);
  add("tp: scattered averages", beside(kTp, tokens_cut), {"tp"}, Operation::kReduceScatter, averaged);
  add("ep: the first row lost", beside(kEp), {"ep"}, Operation::kAllToAll, first_lost);
  add("ep: rows back in another order", beside(kEp), {"ep"}, Operation::kAllToAll, turned);
  add("ep: rows averaged", beside(kEp), {"ep"}, Operation::kAllToAll, averaged);
  add("ring: keys that do not come", beside(kRing), {"cp_ring"}, Operation::kReceive, lost);
  add("ring: keys off by a millionth", beside(kRing), {"cp_ring"}, Operation::kReceive, slipped);
  add("Ulysses: tokens in another order", beside(kUlysses), {"cp_ulysses"}, Operation::kAllToAll, turned);
  add("Ulysses: the first part lost", beside(kUlysses), {"cp_ulysses"}, Operation::kAllToAll, first_lost);
  add("pp: a stream that does not come", beside(kPp), {"pp"}, Operation::kReceive, lost);
  add("pp: a stream off by a millionth", beside(kPp), {"pp"}, Operation::kReceive, slipped);
  const auto one_by_one = [](const Cell& c) {
    return c.shards() && above(c, kShard) && above(c, kReplicate) && c.is(kShare, "off") &&
           c.is(kSpread, "all") && c.number(kRing) * c.number(kUlysses) * c.number(kEp) == 1;
  };
  add("dp_replicate: replicas that are not summed", one_by_one, {"dp_replicate"}, Operation::kAllReduce,
      own_alone, true);
  add("dp_shard: shards without the others' parts", one_by_one, {"dp_shard"}, Operation::kReduceScatter,
      own_alone, true);
  add("dp_shard: averaged shards", one_by_one, {"dp_shard"}, Operation::kReduceScatter, averaged, true);
  add(
      "dp_shard: parameters gathered in another order",
      [=](const Cell& c) { return one_by_one(c) && c.strategy() == "zero3"; }, {"dp_shard"},
      Operation::kAllGather, turned, true);
}

}  // namespace

void add_mutants_of_axes(std::vector<Mutant>& all) {
  add_placements(all);
  add_schedules_and_data(all);
  add_operators(all);
}

}  // namespace isograd::hybrid
