// Any table that check_pipeline() accepts, carried out, gives one process's gradient, whatever goes between
// stages; and so does each step after one that all ranks gave up.
#include <gmock/gmock.h>

#include <deque>
#include <random>
#include <set>

#include "full_tests.hpp"
#include "staged_modules.hpp"

namespace isograd {
namespace {

using Kind = PipelineAction::Kind;
using Random = std::mt19937_64;
using tensor::Gradient;

int below(Random& random, int end) { return static_cast<int>(random() % static_cast<std::uint64_t>(end)); }
double fraction(Random& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

// ---- tables ----

// One action after another over all ranks, each when what it needs is there: so no rank waits for ever. What
// comes first of several is drawn, by kinds, micro-batches and chance with weights that are drawn as well.
PipelineTable random_table(Random& random, int ranks, int stages, int micro_batches) {
  PipelineTable table{.name = "drawn", .stages = stages, .micro_batches = micro_batches};
  for (int stage = 0; stage < stages; ++stage)
    table.rank_of_stage.push_back(stage < ranks ? stage : below(random, ranks));
  std::ranges::shuffle(table.rank_of_stage, random);
  table.ranks.resize(static_cast<std::size_t>(ranks));

  struct Open {
    PipelineAction action;
    std::vector<PipelineAction> needs;
    double priority = 0;
  };
  std::vector<Open> open;
  const bool transfers = below(random, 3) == 0;
  const int halves = below(random, 3);  // none, all, some
  const auto are_apart = [&](int stage) {
    const auto at = static_cast<std::size_t>(stage);
    return transfers && table.rank_of_stage[at] != table.rank_of_stage[at + 1];
  };
  std::vector<std::vector<Kind>> back(
      static_cast<std::size_t>(stages));  // the kind that gives inputs' gradients
  for (auto& own : back)
    for (int i = 0; i < micro_batches; ++i)
      own.push_back(halves == 1 || (halves == 2 && below(random, 2) == 0) ? Kind::kBackwardInputs
                                                                          : Kind::kBackward);
  for (int stage = 0; stage < stages; ++stage)
    for (int i = 0; i < micro_batches; ++i) {
      const auto back_of = [&](int of) {
        return PipelineAction{back[static_cast<std::size_t>(of)][static_cast<std::size_t>(i)], of, i};
      };
      const PipelineAction forward{Kind::kForward, stage, i}, backward = back_of(stage);
      Open f{forward, {}}, b{backward, {forward}};
      if (stage > 0) {
        f.needs.push_back(are_apart(stage - 1) ? PipelineAction{Kind::kReceiveInput, stage, i}
                                               : PipelineAction{Kind::kForward, stage - 1, i});
        if (are_apart(stage - 1)) {
          open.push_back({{Kind::kSendOutput, stage - 1, i}, {{Kind::kForward, stage - 1, i}}});
          open.push_back({{Kind::kReceiveInput, stage, i}, {{Kind::kSendOutput, stage - 1, i}}});
          open.push_back({{Kind::kSendGradient, stage, i}, {backward}});
          open.push_back({{Kind::kReceiveGradient, stage - 1, i}, {{Kind::kSendGradient, stage, i}}});
        }
      }
      if (stage + 1 < stages)
        b.needs.push_back(are_apart(stage) ? PipelineAction{Kind::kReceiveGradient, stage, i}
                                           : back_of(stage + 1));
      open.push_back(f), open.push_back(b);
      if (backward.kind == Kind::kBackwardInputs)
        open.push_back({{Kind::kBackwardWeights, stage, i}, {backward}});
    }

  const double by_kind = below(random, 3), by_micro_batch = below(random, 3), by_chance = fraction(random);
  std::vector<double> of_kind(8);
  for (double& each : of_kind) each = fraction(random);
  std::vector<std::vector<int>> order(static_cast<std::size_t>(stages));  // of micro-batches, of each stage
  const int orders = below(random, 3);                                    // ascending, descending, any
  for (auto& own : order) {
    for (int i = 0; i < micro_batches; ++i) own.push_back(orders == 1 ? micro_batches - i : i);
    if (orders == 2) std::ranges::shuffle(own, random);
  }
  for (Open& each : open) {
    const auto& [kind, stage, i] = each.action;
    each.priority =
        by_kind * of_kind[static_cast<std::size_t>(kind)] + by_chance * fraction(random) -
        by_micro_batch / micro_batches * order[static_cast<std::size_t>(stage)][static_cast<std::size_t>(i)];
  }
  std::vector<PipelineAction> done;
  while (!open.empty()) {
    auto next = open.end();
    for (auto each = open.begin(); each != open.end(); ++each)
      if (std::ranges::all_of(each->needs,
                              [&](const auto& need) { return std::ranges::count(done, need) > 0; }))
        if (next == open.end() || each->priority > next->priority) next = each;
    done.push_back(next->action);
    const int rank = table.rank_of_stage[static_cast<std::size_t>(next->action.stage)];
    table.ranks[static_cast<std::size_t>(rank)].push_back(next->action);
    open.erase(next);
  }
  EXPECT_EQ(error_testing::error_of([&] { check_pipeline(table); }), "no error") << to_json(table);
  // Neighbours change places, as long as the checker accepts that.
  for (int tries = below(random, 12); tries > 0; --tries) {
    PipelineTable changed = table;
    auto& actions = changed.ranks[static_cast<std::size_t>(below(random, ranks))];
    const auto at = static_cast<std::size_t>(below(random, static_cast<int>(actions.size())));
    std::swap(actions[at], actions[(at + 1) % actions.size()]);
    if (error_testing::error_of([&] { check_pipeline(changed); }) == "no error") table = changed;
  }
  return table;
}

// ---- a model, and the same by plain code ----

struct Reverse : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) { return tokens.flip(0); }
};
struct Narrow : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) { return ((tokens + 1) % staged::kVocabulary).to(at::kInt); }
};
struct Turn : torch::nn::Module {
  at::Tensor weight;
  Turn() { weight = register_parameter("weight", at::randn({staged::kHidden, staged::kHidden})); }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::linear(x, weight)); }
};

// A module for each stage, but for the first two of integers and two stages: these hand on int64, then int32.
std::vector<PipelineModule> modules_of(int stages, bool integers) {
  std::vector<PipelineModule> list;
  if (integers) list.push_back(pipeline_module<Reverse>().called("reverse"));
  if (integers && stages > 3) list.push_back(pipeline_module<Narrow>().called("narrow"));
  const double cost = stages == 2 && integers ? 0.5 : 1;
  list.push_back(pipeline_module<staged::Embedding>().called("embed").costing(cost));
  for (int turn = 0; static_cast<int>(list.size()) + 1 < stages; ++turn)
    list.push_back(pipeline_module<Turn>().called(fmt::format("turn{}", turn)));
  list.push_back(pipeline_module<staged::Output>().called("head").costing(cost));
  return list;
}
PipelineModelOptions double_values() { return {.seed = 5, .dtype = at::kDouble}; }

Gradient one_process(int stages, bool integers, const std::vector<MicroBatches>& batches) {
  PipelineModel initial(modules_of(stages, integers), double_values());
  initial.make_all();
  std::map<std::string, at::Tensor> of;
  for (const auto& [name, value] : initial.named()) of[name] = value.detach().clone().requires_grad_();
  at::Tensor loss = at::zeros({}, at::kDouble);
  std::int64_t targets = 0;
  for (const MicroBatches& own : batches)
    for (const Batch& batch : own) {
      at::Tensor tokens = batch.tokens;
      if (integers) tokens = tokens.flip(0);
      if (integers && stages > 3) tokens = (tokens + 1) % staged::kVocabulary;
      at::Tensor x = of.at("embed.weight").index_select(0, tokens);
      for (int turn = 0; of.contains(fmt::format("turn{}.weight", turn)); ++turn)
        x = x.matmul(of.at(fmt::format("turn{}.weight", turn)).t()).tanh();
      const at::Tensor log_p = x.matmul(of.at("head.weight").t()).log_softmax(1);
      const at::Tensor rows = batch.targets.ne(kIgnoreIndex).nonzero().squeeze(1);
      loss = loss - log_p.index({rows, batch.targets.index({rows})}).sum();
      targets += rows.numel();
    }
  loss = loss / static_cast<double>(targets);
  loss.backward();
  Gradient wanted{.of = {}, .loss = loss.item<double>()};
  for (const auto& [name, value] : of)
    wanted.of[name] = value.grad().defined() ? value.grad() : at::zeros_like(value);
  return wanted;
}

// A rank's, of as many tokens each or not: then one may be empty, another without a target.
MicroBatches batches_of(Random& random, int micro_batches, bool even) {
  MicroBatches all;
  for (int i = 0; i < micro_batches; ++i) {
    Batch batch = empty_batch();
    const std::int64_t tokens = even ? 3 : i == 0 ? 5 : below(random, 5);
    if (tokens > 0) {
      const auto any = [&] {
        at::Tensor drawn = at::empty({tokens}, at::kLong);
        for (std::int64_t t = 0; t < tokens; ++t) drawn[t] = below(random, staged::kVocabulary);
        return drawn;
      };
      batch.tokens = any(), batch.targets = any(), batch.positions = at::arange(tokens);
      batch.cu_seqlens = {0, tokens}, batch.sample_ids = {i}, batch.sample_targets = {tokens};
      if (!even && i > 0 && below(random, 4) == 0) {
        batch.targets.fill_(kIgnoreIndex);
        batch.sample_targets = {0};
      }
    }
    all.push_back(batch);
  }
  return all;
}

// A rank's part of a staged model.
struct Staged {
  PipelineModel model;
  std::unique_ptr<DataParallel> layout;
  std::unique_ptr<Optimizer> optimizer = sgd({.learning_rate = 0});
  TokenMean mean{};
  std::unique_ptr<Step> step{};

  Staged(const Mesh& mesh, int stages, bool integers, const PipelineOptions& options,
         const std::string& strategy = "bucketed")
      : model(modules_of(stages, integers), double_values()) {
    model.split(mesh, options);
    layout = testing::strategy_named(strategy).make(model.parameters(), mesh, {.bucket_bytes = 200});
  }
  void make_step(const std::function<MicroBatchSchedule(MicroBatchSchedule)>& changed) {
    StepOptions options = through(model.pipeline());
    options.schedule = changed(options.schedule);
    step = std::make_unique<Step>(
        model.forward_loss({"cross_entropy"},
                           [](const at::Tensor& logits, const Batch& batch) -> LossTerms {
                             return {{"cross_entropy", cross_entropy_sum(logits, batch.targets)}};
                           }),
        *layout, mean, *optimizer, std::move(options));
  }
  // ‖g − g64‖ / s of the worst parameter that this rank has, and the loss's (DESIGN.md, E1).
  double error(const StepReport& report, const Gradient& wanted) const {
    double squares = 0, elements = 0, worst = std::abs(report.loss - wanted.loss) / wanted.loss;
    for (const auto& [name, gradient] : wanted.of)
      squares += gradient.square().sum().item<double>(), elements += static_cast<double>(gradient.numel());
    for (const auto& view : layout->views()) {
      const at::Tensor& exact = wanted.of.at(view.name);
      const double scale =
          std::max(exact.norm().item<double>(),
                   1e-3 * std::sqrt(squares / elements * static_cast<double>(exact.numel())));
      const double error = (view.gradient.view_as(exact) - exact).norm().item<double>() / scale;
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
    return worst;
  }
};

// Work whose micro-batches are others than the schedule says, in the last of a rank's stages.
struct Relabelled final : MicroBatchWork {
  MicroBatchWork& work;
  std::vector<std::size_t> as;
  std::size_t last_part;
  Relabelled(MicroBatchWork& of, std::vector<std::size_t> as_, std::size_t part)
      : work(of), as(std::move(as_)), last_part(part) {}
  std::size_t of(std::size_t i, std::size_t part) const { return part == last_part ? as[i] : i; }
  std::size_t size() const override { return work.size(); }
  void forward(std::size_t i, std::size_t part) override { work.forward(of(i, part), part); }
  void backward(std::size_t i, bool last, std::size_t part) override {
    work.backward(of(i, part), last, part);
  }
  void backward_inputs(std::size_t i, std::size_t part) override { work.backward_inputs(of(i, part), part); }
  void backward_weights(std::size_t i, bool last, std::size_t part) override {
    work.backward_weights(of(i, part), last, part);
  }
};

// The micro-batch for which the last stage would take each output where messages had no number: its n-th
// forward the n-th that was sent.
std::vector<std::size_t> taken_in_order(const PipelineTable& table) {
  const auto forwards = [&](int stage) {
    std::vector<std::size_t> order;
    for (const PipelineAction& action :
         table.ranks[static_cast<std::size_t>(table.rank_of_stage[static_cast<std::size_t>(stage)])])
      if (action.kind == Kind::kForward && action.stage == stage)
        order.push_back(static_cast<std::size_t>(action.micro_batch));
    return order;
  };
  const auto sent = forwards(table.stages - 2), taken = forwards(table.stages - 1);
  std::vector<std::size_t> as(sent.size());
  for (std::size_t n = 0; n < sent.size(); ++n) as[sent[n]] = taken[n];
  return as;
}

// ---- any accepted table ----

struct Case {
  PipelineTable table;
  bool integers = false;
  std::vector<MicroBatches> batches{};  // of each data rank
  Gradient wanted{};
};

// The largest error of each, on `ranks` along pp and `data` that have other samples.
std::vector<double> errors_of(int ranks, int data, const std::vector<Case>& cases, bool without_numbers) {
  std::vector<std::vector<double>> errors(static_cast<std::size_t>(ranks * data));
  run_ranks(
      ranks * data,
      [&](World& world) {
        const Mesh mesh(world, Grid({{"pp", ranks}, {"dp_shard", data}}));
        for (const Case& one : cases) {
          SCOPED_TRACE(to_json(one.table));
          Staged staged(mesh, one.table.stages, one.integers, {.table = one.table});
          staged.make_step([&](MicroBatchSchedule schedule) -> MicroBatchSchedule {
            const auto& own = staged.model.pipeline().own_stages();
            if (!without_numbers || own.back() + 1 < one.table.stages) return schedule;
            return [schedule, part = own.size() - 1, &one](MicroBatchWork& work) {
              Relabelled relabelled(work, taken_in_order(one.table), part);
              schedule(relabelled);
            };
          });
          const StepReport report =
              (*staged.step)(one.batches[static_cast<std::size_t>(mesh.place(mesh.data()))]);
          errors[static_cast<std::size_t>(world.rank)].push_back(staged.error(report, one.wanted));
        }
      },
      staged::kPatience);
  std::vector<double> worst(cases.size(), 0);
  for (std::size_t at = 0; at < cases.size(); ++at)
    for (const auto& own : errors) worst[at] = std::max(worst[at], own[at]);
  return worst;
}

std::vector<Case> drawn_cases(Random& random, int ranks, int data, int count, bool even) {
  std::vector<Case> cases;
  for (int n = 0; n < count; ++n) {
    const int least = std::max(2, ranks), stages = least + below(random, 6 - least);
    Case one{.table = random_table(random, ranks, stages, 1 + below(random, 8)),
             .integers = below(random, 3) == 0};
    const bool of_one_size = even || below(random, 2) == 0;
    for (int place = 0; place < data; ++place)
      one.batches.push_back(batches_of(random, one.table.micro_batches, of_one_size));
    one.wanted = one_process(stages, one.integers, one.batches);
    cases.push_back(std::move(one));
  }
  return cases;
}

constexpr int kTogether = 25;  // tables of the same ranks

TEST(PipelineTables, EachThatIsAcceptedGivesOneProcesssGradient) {
  const int tables = full_tests() ? 10'000 : 300;
  int wrong = 0;
  Random random(1);
  for (int done = 0; done < tables; done += kTogether) {
    const int ranks = 1 + done / kTogether % 5, data = done / kTogether % 4 == 3 ? 2 : 1;
    const auto cases = drawn_cases(random, ranks, data, kTogether, false);
    const auto errors = errors_of(ranks, data, cases, false);
    for (std::size_t at = 0; at < cases.size(); ++at) {
      if (errors[at] < 1e-10) continue;
      if (++wrong < 3)
        ADD_FAILURE() << errors[at] << " on " << ranks << " ranks: " << to_json(cases[at].table);
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << tables;
}

// Messages without numbers are found wherever two stages take micro-batches in different orders.
TEST(PipelineTables, OneThatTakesMessagesInTheirOrderAloneIsFound) {
  Random random(2);
  int others = 0;
  for (const int ranks : {2, 3, 4, 5}) {
    auto cases = drawn_cases(random, ranks, 1, kTogether, true);
    std::erase_if(cases, [](const Case& one) { return std::ranges::is_sorted(taken_in_order(one.table)); });
    others += static_cast<int>(cases.size());
    for (const double error : errors_of(ranks, 1, cases, true)) EXPECT_GT(error, 1e-3);
  }
  EXPECT_GT(others, 20);
}

// ---- steps given up ----

struct GivenUp : std::runtime_error {
  GivenUp() : std::runtime_error("given up") {}
};

enum class Place { kForward, kInputs, kWeights };

// Work that throws where this rank comes to the micro-batch for the first time, before the action or behind.
struct GivingUp final : MicroBatchWork {
  MicroBatchWork& work;
  Place place;
  bool before;
  std::size_t at;
  GivingUp(MicroBatchWork& of, Place place_, bool before_, std::size_t at_)
      : work(of), place(place_), before(before_), at(at_) {}
  template <typename Action>
  void run(std::size_t i, std::initializer_list<Place> these, const Action& action) {
    const bool here = i == at && std::ranges::find(these, place) != these.end();
    if (here && before) throw GivenUp();
    action();
    if (here) throw GivenUp();
  }
  std::size_t size() const override { return work.size(); }
  void forward(std::size_t i, std::size_t part) override {
    run(i, {Place::kForward}, [&] { work.forward(i, part); });
  }
  void backward(std::size_t i, bool last, std::size_t part) override {
    run(i, {Place::kInputs, Place::kWeights}, [&] { work.backward(i, last, part); });
  }
  void backward_inputs(std::size_t i, std::size_t part) override {
    run(i, {Place::kInputs}, [&] { work.backward_inputs(i, part); });
  }
  void backward_weights(std::size_t i, bool last, std::size_t part) override {
    run(i, {Place::kWeights}, [&] { work.backward_weights(i, last, part); });
  }
};

struct Schedule {
  const char* name;
  int ranks, each, micro_batches;
  const char* strategy = "bucketed";
  bool wide = false;  // messages that are read where they lie, not ones that travel in their envelope
};

// Whether each rank comes there, or waits for one that has given up.
bool all_come_to(const PipelineTable& table, Place place, bool before, int micro_batch) {
  std::vector<std::deque<PipelineAction>> left;
  for (const auto& actions : table.ranks) {
    auto& own = left.emplace_back();
    for (const PipelineAction& action : actions) {
      const bool is_it = action.micro_batch == micro_batch &&
                         (action.kind == Kind::kForward           ? place == Place::kForward
                          : action.kind == Kind::kBackwardInputs  ? place == Place::kInputs
                          : action.kind == Kind::kBackwardWeights ? place == Place::kWeights
                                                                  : place != Place::kForward);
      if (!is_it || !before) own.push_back(action);
      if (is_it) break;
    }
  }
  std::set<std::tuple<bool, int, int>> done;  // a forward or a backward of inputs
  const auto is_able = [&](const PipelineAction& action) {
    if (action.kind == Kind::kForward)
      return action.stage == 0 || done.contains({true, action.stage - 1, action.micro_batch});
    return action.kind == Kind::kBackwardWeights || action.stage + 1 == table.stages ||
           done.contains({false, action.stage + 1, action.micro_batch});
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& own : left)
      for (; !own.empty() && is_able(own.front()); own.pop_front(), moved = true)
        if (own.front().kind != Kind::kBackwardWeights)
          done.insert({own.front().kind == Kind::kForward, own.front().stage, own.front().micro_batch});
  }
  return std::ranges::all_of(left, [](const auto& own) { return own.empty(); });
}

// The largest error of the steps behind each one that was given up. A planted mistake: a step takes the
// micro-batches of the last stage for one another, as it would take those that an earlier step has left.
double error_after(const Schedule& cell, bool mistaken) {
  Random random(3);
  const int stages = cell.ranks * cell.each;
  std::vector<MicroBatches> batches{batches_of(random, cell.micro_batches, true)},
      others{batches_of(random, cell.micro_batches, true)};
  if (cell.wide)
    for (auto* all : {&batches, &others})
      for (Batch& batch : all->front()) {
        batch.tokens = batch.tokens.repeat({30}), batch.targets = batch.targets.repeat({30});
        batch.positions = at::arange(90), batch.cu_seqlens = {0, 90}, batch.sample_targets = {90};
      }
  const Gradient wanted = one_process(stages, false, batches);
  const PipelineTable table = make_pipeline(cell.name, cell.ranks, cell.each, cell.micro_batches);
  int given_up = 0;
  std::vector<double> worst(static_cast<std::size_t>(cell.ranks), 0);
  run_ranks(
      cell.ranks,
      [&](World& world) {
        const Mesh mesh(world, Grid({{"pp", cell.ranks}}));
        Staged staged(mesh, stages, false, {.schedule = cell.name, .stages_of_rank = cell.each},
                      cell.strategy);
        std::optional<std::tuple<Place, bool, std::size_t>> where;
        staged.make_step([&](MicroBatchSchedule schedule) -> MicroBatchSchedule {
          return [&, schedule](MicroBatchWork& work) {
            const auto& own = staged.model.pipeline().own_stages();
            if (where) {
              GivingUp giving(work, std::get<0>(*where), std::get<1>(*where), std::get<2>(*where));
              schedule(giving);
            } else if (mistaken && own.back() + 1 == stages) {
              std::vector<std::size_t> as;
              for (std::size_t i = 0; i < work.size(); ++i) as.push_back((i + 1) % work.size());
              Relabelled relabelled(work, as, own.size() - 1);
              schedule(relabelled);
            } else {
              schedule(work);
            }
          };
        });
        double& own = worst[static_cast<std::size_t>(world.rank)];
        for (const Place place : {Place::kForward, Place::kInputs, Place::kWeights})
          for (const bool before : {true, false})
            for (std::size_t i = 0; i < static_cast<std::size_t>(cell.micro_batches); ++i) {
              if (!all_come_to(table, place, before, static_cast<int>(i))) continue;
              if (world.rank == 0) ++given_up;
              where = {place, before, i};
              EXPECT_THROW((*staged.step)(others.front()), GivenUp);
              staged.layout->zero_gradients();
              where.reset();
              if (i == 1) {  // an evaluation takes nothing of it either
                const at::NoGradGuard no_grad;
                const at::Tensor logits = staged.model.outputs(batches.front()[0]).output;
                PipelineModel plain(modules_of(stages, false), double_values());
                if (logits.defined()) {
                  plain.make_all();
                  own = std::max(own,
                                 (plain.outputs(batches.front()[0]).output - logits).norm().item<double>());
                }
              }
              for (int further = 0; further < 2; ++further)
                own = std::max(own, staged.error((*staged.step)(batches.front()), wanted));
            }
      },
      staged::kPatience);
  EXPECT_GT(given_up, 3 * cell.micro_batches) << "of twice as many places";
  return *std::ranges::max_element(worst);
}

TEST(PipelineGivenUp, EachFurtherStepHasOneProcesssGradient) {
  for (const Schedule& cell : std::vector<Schedule>{{"one-after-another", 2, 1, 3},
                                                    {"gpipe", 2, 1, 4},
                                                    {"gpipe", 3, 1, 5, "zero2"},
                                                    {"1f1b", 2, 1, 4},
                                                    {"1f1b", 3, 1, 5, "bucketed", true},
                                                    {"1f1b", 4, 1, 6, "zero1"},
                                                    {"interleaved", 2, 2, 4},
                                                    {"interleaved", 3, 2, 3, "bucketed", true},
                                                    {"zb-h1", 2, 1, 4, "bucketed", true},
                                                    {"zb-h1", 4, 1, 5},
                                                    {"zb-v", 2, 2, 4},
                                                    {"zb-v", 4, 2, 6, "bucketed", true}}) {
    SCOPED_TRACE(fmt::format("{} on {} ranks", cell.name, cell.ranks));
    EXPECT_LT(error_after(cell, false), 1e-10);
  }
}
TEST(PipelineGivenUp, AStepThatTakesOtherMessagesIsFound) {
  EXPECT_GT(error_after({"1f1b", 3, 1, 4}, true), 1e-3);
}

}  // namespace
}  // namespace isograd
