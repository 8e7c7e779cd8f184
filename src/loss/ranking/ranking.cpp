#include "isograd/ranking.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "comm/autograd.hpp"
#include "isograd/random.hpp"
#include "loss/checks.hpp"
#include "loss/ranking/cores.hpp"
#include "loss/ranking/pool.hpp"
#include "loss/ranking/quantile.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kNotFilled = -1;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int kForwardsBeforeWarning = 20;  // training forwards without a value of a class
constexpr int kWarned = -1;

std::int64_t& forwards_made(at::Tensor& position) { return position.data_ptr<std::int64_t>()[1]; }

// The `count` rows of `from` with the smallest random numbers, ascending.
std::vector<std::int64_t> draw(std::vector<std::int64_t> from, std::int64_t count, const RandomKey& key) {
  if (count < std::ssize(from)) {
    std::vector<std::pair<std::uint64_t, std::int64_t>> drawn;
    for (const auto row : from) drawn.emplace_back(random_bits(key, static_cast<std::uint64_t>(row)), row);
    std::nth_element(drawn.begin(), drawn.begin() + count, drawn.end());
    from.clear();
    for (std::int64_t i = 0; i < count; ++i) from.push_back(drawn[i].second);
  }
  std::sort(from.begin(), from.end());
  return from;
}

std::uint64_t bytes_hash(const at::Tensor& tensor) {
  return hash_name({static_cast<const char*>(tensor.const_data_ptr()),
                    static_cast<std::size_t>(tensor.numel() * tensor.element_size())});
}

// ---- all classes of one forward: from gathered rows, or by selection of thresholds over the ranks ----

constexpr std::int64_t kSums = 3;  // of a class whose work is split: value, contributions, their squares
// About what two ranks exchange through shared memory in the time of a collective of a few numbers.
constexpr std::int64_t kCollectiveBytes = 32 << 10;

// Results of the classes' cores, over all ranks.
struct Computed {
  std::vector<ClassResult> classes;
  at::Tensor gradient;    // [rows, C] of each class's loss
  bool own_only = false;  // rows: this rank's; else those of all ranks, of which only this rank's are whole
};

// One class's view of the pool, which must outlive it.
template <typename T>
ClassPool<T> view_of(const RankingPool& pool, std::int64_t c, double temperature) {
  const T* scores = pool.scores.const_data_ptr<T>() + c * pool.size();
  ClassPool<T> view;
  view.scores.assign(scores, scores + pool.size());
  view.positive.resize(pool.labels.size());
  for (std::size_t i = 0; i < pool.labels.size(); ++i)
    view.positive[i] = pool.labels[i] == (pool.classes == 1 ? 1 : c);
  view.iid = pool.iid;
  view.weights = pool.weights.empty() ? nullptr : pool.weights.data();
  view.live = pool.live;
  view.temperature = temperature;
  return view;
}

// Every class's core on the rows `chosen` of the pool, all of them where it is empty; then, where the work
// was split, one collective that adds the shares up: a reduce-scatter of gradients and sums, or without
// gradient an all-reduce.
template <typename T>
Computed compute_classes(const RankingPool& pool, const std::vector<std::int64_t>& chosen, double temperature,
                         bool wants_gradient, bool split, Group& group, const auto& compute) {
  Computed computed;
  const std::int64_t classes = pool.classes;
  const auto type = c10::CppTypeToScalarType<T>::value;
  at::Tensor by_class;  // gradients [C, live]
  if (wants_gradient) by_class = at::zeros({classes, pool.live}, at::TensorOptions(type));
  RankingPool some;
  if (!chosen.empty()) {
    some = some_rows(pool, chosen);
    some.live = std::lower_bound(chosen.begin(), chosen.end(), pool.live) - chosen.begin();
  }
  for (std::int64_t c = 0; c < classes; ++c) {
    ClassPool<T> view = view_of<T>(chosen.empty() ? pool : some, c, temperature);
    if (split) view.share = group.rank(), view.shares = group.size();
    T* own = wants_gradient ? by_class.data_ptr<T>() + c * pool.live : nullptr;
    if (!wants_gradient || chosen.empty()) {
      computed.classes.push_back(compute(view, own));
      continue;
    }
    std::vector<T> of_chosen(view.live, T(0));
    computed.classes.push_back(compute(view, of_chosen.data()));
    for (std::size_t i = 0; i < of_chosen.size(); ++i) own[chosen[i]] = of_chosen[i];
  }

  if (split && group.size() > 1) {
    at::Tensor sums = at::empty({classes, kSums}, at::kDouble);
    auto* sum = sums.data_ptr<double>();
    for (const auto& result : computed.classes)
      *sum++ = result.value, *sum++ = result.contributed, *sum++ = result.squared;
    if (wants_gradient) {
      // For each rank: the gradients of its rows, then the sums.
      std::vector<at::Tensor> message;
      Group::Rows parts;
      std::int64_t begin = 0;
      for (const auto rows : pool.rows) {
        message.push_back(by_class.narrow(1, begin, rows).reshape({-1}));
        message.push_back(sums.to(type).view({-1}));
        parts.push_back(classes * (rows + kSums));
        begin += rows;
      }
      const std::int64_t own_rows = pool.rows[group.rank()];
      at::Tensor received = at::empty({classes * (own_rows + kSums)}, type);
      group.reduce_scatter_async(received, at::cat(message), ReduceOp::kSum, parts).wait();
      by_class = received.narrow(0, 0, classes * own_rows).view({classes, own_rows});
      sums = received.narrow(0, classes * own_rows, classes * kSums).to(at::kDouble).contiguous();
      computed.own_only = true;
    } else {
      group.all_reduce(sums);
    }
    const double* total = sums.data_ptr<double>();
    for (auto& result : computed.classes)
      result.value = *total++, result.contributed = *total++, result.squared = *total++;
  }
  if (wants_gradient) computed.gradient = by_class.t().contiguous();
  return computed;
}

// `own`: this rank's rows, on rank 0 the queue's too; nothing but counts and sums leaves a rank. `rows`: of
// all ranks and the queue. Collectives: selection_rounds(), then one all-reduce of RateSums.
template <typename T>
Computed compute_by_selection(const RankingPool& own, std::int64_t rows, double temperature,
                              bool wants_gradient, const RateRule& rule, Group& group) {
  const std::int64_t classes = own.classes;
  const auto count = static_cast<std::size_t>(classes);
  std::vector<ClassPool<T>> views;
  std::vector<std::vector<T>> references;
  for (std::int64_t c = 0; c < classes; ++c) {
    views.push_back(view_of<T>(own, c, temperature));
    references.push_back(rate_reference(views.back(), rule));
  }
  const auto selected =
      select_over_ranks(group, references, rate_probabilities<T>(rule), rule.interpolation, rows);

  std::vector<RateSlopes> slopes(count);
  at::Tensor sums = at::empty({classes, RateSums::kCount}, at::kDouble);
  auto* sum = sums.data_ptr<double>();
  for (std::size_t c = 0; c < count; ++c) {
    const RateSums part =
        rate_sums(views[c], rule, selected.quantiles[c], wants_gradient ? &slopes[c] : nullptr);
    for (const double value : {part.weighted, part.mass, part.contributed, part.squared, part.positives,
                               part.iid_negatives, part.band_negatives})
      *sum++ = value;
  }
  group.all_reduce(sums);

  Computed computed;
  computed.own_only = true;
  if (wants_gradient)
    computed.gradient = at::zeros({own.live, classes}, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
  const double* total = sums.data_ptr<double>();
  for (std::size_t c = 0; c < count; ++c, total += RateSums::kCount) {
    const RateSums whole{total[0], total[1], total[2], total[3], total[4], total[5], total[6]};
    computed.classes.push_back(rate_result(whole, rule, selected.quantiles[c], temperature));
    if (!wants_gradient || !computed.classes.back().valid) continue;
    T* gradient = computed.gradient.data_ptr<T>() + c;
    for (std::size_t i = 0; i < slopes[c].rows.size(); ++i)
      gradient[slopes[c].rows[i] * classes] = -static_cast<T>(slopes[c].slopes[i] / whole.mass);
  }
  return computed;
}

// Whether a forward of such a loss selects: as asked for, else where it is cheaper in bytes that a rank
// sends, a collective counted as kCollectiveBytes. `queued`: rows that go to the queue, which are gathered
// all the same.
bool selects_thresholds(const RankingOptions& options, const RateRule& rule, const RowCounts& counts,
                        at::ScalarType type, std::size_t queued, int ranks) {
  if (ranks == 1 || options.max_pool_size > 0 || options.thresholds == Thresholds::kGather) return false;
  if (options.thresholds == Thresholds::kSelect) return true;
  const std::int64_t bytes = type == at::kDouble ? 8 : 4;
  const std::vector<double> q = rate_probabilities<double>(rule);
  const bool two =
      rule.interpolation == Interpolation::kLinear || rule.interpolation == Interpolation::kMidpoint;
  const std::int64_t statistics =
      static_cast<std::int64_t>(std::set<double>(q.begin(), q.end()).size()) * (two ? 2 : 1);
  const std::int64_t rounds = selection_rounds(static_cast<int>(8 * bytes));
  const std::int64_t histograms = options.num_classes * (1 + (rounds - 1) * statistics);
  // An all-reduce sends everything twice, an all-gather once; both (W - 1)/W of it.
  const std::int64_t counted =
      2 * (histograms * (std::int64_t{4} << kSelectionDigit) + options.num_classes * RateSums::kCount * 8);
  const std::int64_t kept = static_cast<std::int64_t>(queued) * counts.row_bytes;
  const std::int64_t collectives = rounds + 1 + (queued > 0 ? 1 : 0);
  return counted + kept + collectives * kCollectiveBytes <
         counts.total() * counts.row_bytes + kCollectiveBytes;
}

// ---- a loss made of its classes' values, which depends on the scores by a gradient known already ----

struct ClassValues {
  at::Tensor values;  // [C] on the CPU; 0 where invalid, but under kNone what is to be returned
  at::Tensor valid;   // [C] bool on the CPU: an invalid class takes no gradient from above
  LossReduction reduction;
};

std::int64_t count_valid(const ClassValues& of) {
  const auto* valid = of.valid.const_data_ptr<bool>();
  return std::count(valid, valid + of.valid.numel(), true);
}

// A scalar, or [C] under kNone, detached.
at::Tensor reduced(const ClassValues& of) {
  if (of.reduction == LossReduction::kNone) return of.values.clone();
  const at::Tensor sum = of.values.sum();
  if (of.reduction != LossReduction::kMean) return sum;
  return sum / static_cast<double>(std::max<std::int64_t>(count_valid(of), 1));
}

// One node for the reduction and its classes: backward is a product with what comes from above.
struct Reduced final : torch::autograd::Function<Reduced> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores, const at::Tensor& gradient,
                            const ClassValues* of) {
    const std::int64_t count = count_valid(*of);
    const bool all = count == of->valid.numel();
    context->save_for_backward({gradient, all ? at::Tensor() : of->valid.to(scores.device())});
    context->saved_data["type"] = static_cast<std::int64_t>(scores.scalar_type());
    context->saved_data["divisor"] =
        of->reduction == LossReduction::kMean ? std::max<std::int64_t>(count, 1) : std::int64_t{1};
    return reduced(*of).to(scores.device());
  }

  static variable_list backward(AutogradContext* context, variable_list upstream) {
    if (at::GradMode::is_enabled())
      refuse("a ranking loss", "a backward that is to be differentiated (create_graph)", "first derivatives",
             "Call backward() without create_graph");
    const variable_list saved = context->get_saved_variables();
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    at::Tensor above = upstream[0].detach();  // a scalar, or [C]
    const std::int64_t divisor = context->saved_data["divisor"].toInt();
    if (divisor > 1) above = above / static_cast<double>(divisor);
    if (saved[1].defined()) above = at::where(saved[1], above, at::zeros_like(above));
    return {(saved[0] * above).to(type), {}, {}};
  }
};

// The same on the scores' device, differentiable: gradient [N, C] of each class's value by the scores [N, C].
at::Tensor reduced(const ClassValues& of, const at::Tensor& scores, const at::Tensor& gradient) {
  return Reduced::apply(scores, gradient.to(scores.device()), &of);
}

RankingDiagnostics diagnostics_of(const std::vector<ClassResult>& classes, const LocalRows& local) {
  const auto count = std::ssize(classes);
  RankingDiagnostics made{.t_alpha = at::full({count}, kNaN, at::kDouble),
                          .t_beta = at::full({count}, kNaN, at::kDouble),
                          .tau_eff = at::full({count}, kNaN, at::kDouble),
                          .pauc_var = at::full({count}, kNaN, at::kDouble),
                          .band_neg_count = at::zeros({count}, at::kLong),
                          .grad_pos_count = at::zeros({count}, at::kLong)};
  auto* positives = made.grad_pos_count.data_ptr<std::int64_t>();
  for (const auto label : local.labels) positives[count == 1 ? 0 : label] += count == 1 ? label : 1;
  for (std::int64_t c = 0; c < count; ++c) {
    const ClassResult& result = classes[c];
    if (!result.valid) continue;
    made.t_alpha.data_ptr<double>()[c] = result.t_alpha;
    made.t_beta.data_ptr<double>()[c] = result.t_beta;
    made.tau_eff.data_ptr<double>()[c] = result.tau_eff;
    made.band_neg_count.data_ptr<std::int64_t>()[c] = result.band_negatives;
    const double rows = result.numerator_rows, mean = result.contributed / rows;
    made.pauc_var.data_ptr<double>()[c] = std::max(0.0, result.squared / rows - mean * mean);
  }
  return made;
}

// The model has diverged: a value and a gradient that nobody takes for numbers.
RankingResult not_a_number(const at::Tensor& scores, const LocalRows& local, const RankingOptions& options,
                           bool differentiable) {
  const std::int64_t classes = options.num_classes;
  const auto type = computing_type(local.scores.scalar_type());
  const ClassValues values{.values = at::full({classes}, kNaN, type),
                           .valid = at::ones({classes}, at::kBool),  // NaN from above or not
                           .reduction = options.reduction};
  RankingResult result{.loss = {},
                       .per_class = values.values,
                       .valid = at::zeros({classes}, at::kBool),
                       .diagnostics = diagnostics_of(std::vector<ClassResult>(classes), local)};
  if (differentiable) {
    at::Tensor gradient = at::zeros({scores.size(0), classes}, type);
    if (std::ssize(local.labels) == scores.size(0))
      gradient.fill_(kNaN);
    else
      gradient.index_fill_(0, at::tensor(local.kept, at::kLong), kNaN);
    result.loss = reduced(values, scores, gradient);
  } else {
    result.loss = reduced(values);
  }
  return result;
}

// The same on every rank: temperature and thresholds are.
void refuse_cold(const std::string& where, const std::vector<ClassResult>& classes, double temperature) {
  for (const ClassResult& of : classes)
    if (of.too_cold)
      refuse(where + ": temperature",
             fmt::format("{}, which times the dispersion of the scores is {}", temperature, of.tau_eff),
             "a number that the scores' type can divide by", "Raise the temperature, or scale the scores");
}

Band band_of(const PAUCOptions& options) {
  return {.alpha = options.alpha,
          .beta = options.beta,
          .pairwise = options.surrogate == PAUCOptions::Surrogate::kPairwise,
          .by_band = options.tau_scale == PAUCOptions::Scale::kBand,
          .live_only = options.pos_numerator == PAUCOptions::Numerator::kLive,
          .population = options.budget_basis == PAUCOptions::Basis::kPopulation,
          .knots = options.n_knots,
          .interpolation = options.interpolation};
}

RankingCore recall_core(const RecallOptions& options) {
  const RateRule rule{.quantile = options.quantile, .interpolation = options.interpolation};
  RankingCore core([rule](const auto& pool, auto* gradient) { return mean_rate(pool, rule, gradient); });
  core.fingerprint =
      hash_name(fmt::format("{} {}", options.quantile, static_cast<int>(options.interpolation)));
  core.rates = rule;
  return core;
}

RankingCore pauc_core(const PAUCOptions& options) {
  const Band band = band_of(options);
  RankingCore core([band](const auto& pool, auto* gradient) { return partial_auc(pool, band, gradient); });
  core.fingerprint = hash_name(fmt::format("{} {} {} {} {} {} {} {}", band.alpha, band.beta, band.pairwise,
                                           band.by_band, band.live_only, band.population, band.knots,
                                           static_cast<int>(band.interpolation)));
  core.shards_work = band.pairwise;
  if (!band.pairwise)
    core.rates = RateRule{.quantile = {}, .band = band, .interpolation = options.interpolation};
  return core;
}

RankingCore smooth_ap_core() {
  RankingCore core([](const auto& pool, auto* gradient) { return smooth_ap(pool, gradient); });
  core.fingerprint = 1, core.shards_work = true;
  return core;
}

RankingMetrics metrics_of(const RankingPool& pool, double quantile, double budget) {
  check_option(quantile > 0 && quantile < 1, "ranking_metrics", "quantile", quantile, "between 0 and 1");
  check_option(budget > 0 && budget <= 1, "ranking_metrics", "budget", budget, "above 0, at most 1");
  RankingMetrics metrics{.rows = pool.size()};
  const at::Tensor scores = pool.scores.view({-1}).to(at::kDouble);
  const at::Tensor order = scores.argsort(0, /*descending=*/true);
  const auto* at = order.const_data_ptr<std::int64_t>();
  const auto* score = scores.const_data_ptr<double>();
  for (const auto label : pool.labels) metrics.positives += label;
  const auto positives = static_cast<double>(metrics.positives);
  const double negatives = static_cast<double>(metrics.rows) - positives;
  if (metrics.positives == 0) return metrics;
  const double places = std::ceil(quantile * static_cast<double>(metrics.rows));
  double above = 0, found = 0;  // rows, and positives, with a higher score
  for (std::int64_t i = 0; i < metrics.rows;) {
    double tied = 0, hits = 0;
    for (const double level = score[at[i]]; i < metrics.rows && score[at[i]] == level; ++i, ++tied)
      hits += static_cast<double>(pool.labels[at[i]]);
    metrics.average_precision += hits / positives * (found + hits) / (above + tied);
    metrics.recall_at_quantile += hits / positives * std::clamp((places - above) / tied, 0.0, 1.0);
    // A straight segment of the ROC curve, cut where the budget ends.
    const double begin = (above - found) / negatives, width = (tied - hits) / negatives;
    if (width > 0 && begin < budget) {
      const double part = std::min(1.0, (budget - begin) / width);
      metrics.partial_auc += part * width * (found + 0.5 * part * hits) / positives / budget;
    }
    above += tied, found += hits;
  }
  return metrics;
}

}  // namespace

RankingLoss::RankingLoss(std::string name, RankingOptions options, Group group, RankingCore core)
    : torch::nn::Module(name),
      name_(std::move(name)),
      options_(options),
      group_(std::move(group)),
      core_(std::make_shared<const RankingCore>(std::move(core))) {
  const auto number = [](auto value) { return fmt::format("{}", value); };
  check(options_.num_classes > 0, "num_classes", number(options_.num_classes), "1 or more");
  check(options_.queue_size >= 0, "queue_size", number(options_.queue_size), "0 or more");
  check(options_.max_pool_size >= 0, "max_pool_size", number(options_.max_pool_size), "0 (no limit) or more");
  check(is_temperature(options_.temperature), "temperature", number(options_.temperature), kTemperatures);
  check(options_.reduction != LossReduction::kMeanPositive, "reduction", "mean_positive",
        "mean, sum or none: mean_positive is softmax focal's");
  check(options_.thresholds != Thresholds::kSelect || options_.max_pool_size == 0, "thresholds",
        "kSelect with max_pool_size", "one of the two: a subsample is drawn from gathered rows");
  const std::int64_t rows = options_.queue_size;
  queue_scores_ = register_buffer("queue_scores", at::zeros({rows, options_.num_classes}, at::kDouble));
  queue_labels_ = register_buffer("queue_labels", at::full({rows}, kNotFilled, at::kLong));
  queue_iid_ = register_buffer("queue_iid", at::ones({rows}, at::kBool));
  queue_weights_ = register_buffer("queue_weights", at::ones({rows}, at::kDouble));
  position_ = register_buffer("position", at::zeros({2}, at::kLong));
  temperature_ = register_buffer("temperature", at::full({1}, options_.temperature, at::kDouble));
  without_value_.assign(static_cast<std::size_t>(options_.num_classes), 0);
}

void RankingLoss::check(bool holds, const std::string& key, const std::string& found,
                        const std::string& expected) const {
  check_option(holds, name_, key, found, expected);
}

double RankingLoss::temperature() const { return temperature_.item<double>(); }

void RankingLoss::set_temperature(double temperature) {
  check(is_temperature(temperature), "temperature", fmt::format("{}", temperature), kTemperatures);
  temperature_.fill_(temperature);
}

void RankingLoss::reset_queue() {
  queue_scores_.zero_();
  queue_labels_.fill_(kNotFilled);
  queue_iid_.fill_(true);
  queue_weights_.fill_(1);
  position_[0].zero_();
}

std::int64_t RankingLoss::queue_rows() const {
  return queue_labels_.ne(kNotFilled).sum().item<std::int64_t>();
}

RankingLoss::State RankingLoss::state() const {
  State state;
  for (const auto& buffer : named_buffers()) state.emplace_back(buffer.key(), buffer.value().clone());
  return state;
}

void RankingLoss::load_state(const State& state) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& buffer : named_buffers()) {
    const auto given = std::find_if(state.begin(), state.end(),
                                    [&](const auto& entry) { return entry.first == buffer.key(); });
    const std::string where = name_ + ": state '" + buffer.key() + "'";
    if (given == state.end()) refuse(where, "nothing", "a saved buffer", "Load what state() gave");
    if (given->second.sizes() != buffer.value().sizes())
      refuse(where, c10::str(given->second.sizes()), c10::str(buffer.value().sizes()),
             "Construct the loss with the queue_size and num_classes that were saved");
    if (buffer.key() == "temperature" && !is_temperature(given->second.item<double>()))
      refuse(where, fmt::format("{}", given->second.item<double>()), kTemperatures, "Load what state() gave");
    copies.emplace_back(buffer.value(), given->second);
  }
  for (auto& [to, from] : copies) to.copy_(from);
}

// Minimum quotas: each class keeps some rows, the rest is drawn uniformly. Same rows on every rank. Empty
// where all rows are taken.
std::vector<std::int64_t> RankingLoss::subsample(const RankingPool& pool) const {
  const std::int64_t most = options_.max_pool_size;
  if (most == 0 || pool.size() <= most) return {};
  std::vector<std::int64_t> all(pool.size());
  std::iota(all.begin(), all.end(), 0);
  RandomKey key{.seed = options_.seed,
                .step = static_cast<std::uint64_t>(position_[1].item<std::int64_t>()),
                .layer = hash_name("ranking: quotas")};
  std::map<std::int64_t, std::vector<std::int64_t>> by_class;
  for (const auto row : all) by_class[pool.labels[row]].push_back(row);
  const std::int64_t quota = std::max<std::int64_t>(1, most / (2 * std::ssize(by_class)));
  std::vector<std::int64_t> chosen;
  for (auto& [label, rows] : by_class)
    for (const auto row : draw(rows, quota, key)) chosen.push_back(row);
  std::sort(chosen.begin(), chosen.end());
  key.layer = hash_name("ranking: the rest");
  const std::int64_t left = most - std::ssize(chosen);
  if (left <= 0) return draw(chosen, most, key);
  std::vector<std::int64_t> others;
  std::set_difference(all.begin(), all.end(), chosen.begin(), chosen.end(), std::back_inserter(others));
  for (const auto row : draw(others, left, key)) chosen.push_back(row);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// The rows of a batch of `live` rows over all ranks that the queue takes. More than fit: a draw favours
// neither the last rows nor the last rank.
std::vector<std::int64_t> RankingLoss::rows_for_queue(std::int64_t live) const {
  std::vector<std::int64_t> rows(live);
  std::iota(rows.begin(), rows.end(), 0);
  return draw(std::move(rows), options_.queue_size,
              {.seed = options_.seed,
               .step = static_cast<std::uint64_t>(position_[1].item<std::int64_t>()),
               .layer = hash_name("ranking: queue")});
}

void RankingLoss::push(const RankingPool& rows) {
  const std::int64_t size = options_.queue_size, classes = rows.classes;
  auto* position = position_.data_ptr<std::int64_t>();
  if (rows.live >= size) *position = 0;
  const at::Tensor scores = rows.scores.t().to(at::kDouble).contiguous();
  for (std::int64_t row = 0; row < rows.live; ++row) {
    const auto i = static_cast<std::size_t>(row);
    std::copy_n(scores.const_data_ptr<double>() + row * classes, classes,
                queue_scores_.data_ptr<double>() + *position * classes);
    queue_labels_.data_ptr<std::int64_t>()[*position] = rows.labels[i];
    queue_iid_.data_ptr<bool>()[*position] = rows.iid[i] != 0;
    queue_weights_.data_ptr<double>()[*position] = rows.weights.empty() ? 1 : rows.weights[i];
    *position = (*position + 1) % size;
  }
}

void RankingLoss::append_queue(RankingPool& pool) const {
  const at::Tensor filled = queue_labels_.ne(kNotFilled).nonzero().squeeze(1);
  if (filled.numel() == 0) return;
  const at::ArrayRef<std::int64_t> rows(filled.const_data_ptr<std::int64_t>(), filled.numel());
  const auto* weights = queue_weights_.const_data_ptr<double>();
  const bool weighted =
      !pool.weights.empty() || std::ranges::any_of(rows, [&](auto row) { return weights[row] != 1; });
  if (weighted) pool.weights.resize(pool.labels.size(), 1);
  for (const auto row : rows) {
    pool.labels.push_back(queue_labels_.const_data_ptr<std::int64_t>()[row]);
    pool.iid.push_back(queue_iid_.const_data_ptr<bool>()[row]);
    if (weighted) pool.weights.push_back(weights[row]);
  }
  pool.scores =
      at::cat({pool.scores, queue_scores_.index_select(0, filled).t().to(pool.scores.scalar_type())}, 1);
}

// A class without value leaves the mean, and a mean over none is 0, which looks like a perfect loss.
void RankingLoss::warn_of_classes_without_value(const std::vector<ClassResult>& classes) {
  for (std::size_t c = 0; c < classes.size(); ++c) {
    int& forwards = without_value_[c];
    if (forwards == kWarned) continue;
    forwards = classes[c].valid ? kWarned : forwards + 1;
    if (forwards < kForwardsBeforeWarning) continue;
    forwards = kWarned;
    if (group_.rank() == 0)
      TORCH_WARN(name_, ": class ", c, " has had no value in its first ", kForwardsBeforeWarning,
                 " forwards and takes no part in the loss, which is 0 where no class has one. It lacks ",
                 classes[c].missing, ". RankingResult::valid says which classes count.");
  }
}

at::Tensor RankingLoss::forward(const at::Tensor& scores, const at::Tensor& targets,
                                const RankingExtras& extras) {
  return evaluate(scores, targets, extras).loss;
}

RankingResult RankingLoss::evaluate(const at::Tensor& scores, const at::Tensor& targets,
                                    const RankingExtras& extras) {
  const std::int64_t classes = options_.num_classes;
  const bool updates = options_.queue_size > 0 && (is_training() || options_.update_queue_in_eval);
  const LocalRows local = local_rows(name_, classes, options_.ignore_index, scores, targets, extras.iid_mask,
                                     extras.sample_weight);
  const bool differentiable = at::GradMode::is_enabled() && scores.defined() && scores.requires_grad();
  RankingExchange header{.fingerprint = hash_name(fmt::format(
                             "{} {} {} {} {} {} {} {} {} {}", name_, classes, options_.queue_size,
                             temperature(), static_cast<int>(options_.reduction), options_.max_pool_size,
                             static_cast<int>(options_.grad_reduction), static_cast<int>(options_.thresholds),
                             options_.seed, core_->fingerprint)),
                         .forwards = forwards_made(position_),
                         .wants_gradient = differentiable,
                         .updates_queue = updates};
  if (options_.check_queue)
    header.queue_checksum = bytes_hash(queue_scores_) ^ 3 * bytes_hash(queue_labels_) ^
                            5 * bytes_hash(queue_iid_) ^ 7 * bytes_hash(queue_weights_) ^
                            11 * bytes_hash(position_);

  const RowCounts counts = exchange_headers(name_, group_, local, header);
  if (!header.finite) {
    forwards_made(position_) += 1;
    return not_a_number(scores, local, options_, differentiable);
  }
  const std::vector<std::int64_t> queued =
      updates ? rows_for_queue(counts.total()) : std::vector<std::int64_t>();
  const at::ScalarType type = computing_type(local.scores.scalar_type());
  const std::optional<RateRule>& rule = core_->rates;
  // Decided from what all ranks know alike.
  const bool selects =
      rule && selects_thresholds(options_, *rule, counts, type, queued.size(), group_.size());
  // Selected: this rank's rows, and the queue's on one rank, so that each row counts once. Else the rows of
  // all ranks, then those of earlier batches.
  const std::int64_t own = std::ssize(local.labels);
  Group alone = Group::solo();
  RankingPool pool = selects ? gather_rows(alone, local, {{own}, counts.weighted, counts.row_bytes})
                             : gather_rows(group_, local, counts);
  if (!selects || group_.rank() == 0) append_queue(pool);
  const std::int64_t rows = selects ? counts.total() + queue_rows() : pool.size();
  const std::vector<std::int64_t> chosen = subsample(pool);  // none where thresholds are selected
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    if (selects)
      return compute_by_selection<T>(pool, rows, temperature(), header.wants_gradient, *rule, group_);
    return compute_classes<T>(pool, chosen, temperature(), header.wants_gradient, core_->shards_work, group_,
                              [&](const ClassPool<T>& view, T* gradient) {
                                if constexpr (std::is_same_v<T, float>)
                                  return core_->single(view, gradient);
                                else
                                  return core_->exact(view, gradient);
                              });
  };
  const Computed computed = type == at::kDouble ? run(double()) : run(float());
  refuse_cold(name_, computed.classes, temperature());
  if (!queued.empty()) push(selects ? gather_some(group_, local, counts, queued) : some_rows(pool, queued));
  const bool any_rows = rows > 0;
  forwards_made(position_) += 1;
  if (any_rows && is_training()) warn_of_classes_without_value(computed.classes);

  // Values [C] and which of them count; the same on every rank.
  at::Tensor values = at::zeros({classes}, at::kDouble), per_class = at::full({classes}, kNaN, at::kDouble);
  at::Tensor valid = at::zeros({classes}, at::kBool);
  for (std::int64_t c = 0; c < classes; ++c) {
    const ClassResult& of = computed.classes[c];
    valid.data_ptr<bool>()[c] = of.valid;
    if (of.valid) values.data_ptr<double>()[c] = per_class.data_ptr<double>()[c] = 1 - of.value;
  }
  values = values.to(type), per_class = per_class.to(type);
  RankingResult result{.loss = {},
                       .per_class = per_class,
                       .valid = valid,
                       .diagnostics = diagnostics_of(computed.classes, local)};
  // A pool without rows gives zeros, not NaN: nothing was there that could have been invalid.
  const bool shows_invalid = options_.reduction == LossReduction::kNone && any_rows;
  const ClassValues of{shows_invalid ? per_class : values, valid, options_.reduction};
  if (!differentiable) {
    result.loss = reduced(of);
    return result;
  }
  at::Tensor gradient = computed.gradient;
  if (!computed.own_only) gradient = gradient.narrow(0, pool.own_begin, own);
  if (options_.grad_reduction == GradReduction::kMean) gradient = gradient * group_.size();
  if (own < scores.size(0))
    gradient =
        at::zeros({scores.size(0), classes}, type).index_copy(0, at::tensor(local.kept, at::kLong), gradient);
  result.loss = reduced(of, scores, gradient);
  return result;
}

SmoothAPLoss::SmoothAPLoss(RankingOptions options, Group group)
    : RankingLoss("SmoothAPLoss", options, std::move(group), smooth_ap_core()) {
  check(options.thresholds != Thresholds::kSelect, "thresholds", "kSelect", "kAuto: it has no thresholds");
}

RecallAtQuantileLoss::RecallAtQuantileLoss(RecallOptions options, Group group)
    : RankingLoss("RecallAtQuantileLoss", options, std::move(group), recall_core(options)) {
  check(options.quantile > 0 && options.quantile < 1, "quantile", fmt::format("{}", options.quantile),
        "between 0 and 1");
}

PAUCAtBudgetLoss::PAUCAtBudgetLoss(PAUCOptions options, Group group)
    : RankingLoss("PAUCAtBudgetLoss", options, std::move(group), pauc_core(options)) {
  check(options.alpha >= 0 && options.alpha < 1, "alpha", fmt::format("{}", options.alpha),
        "from 0 to below beta");
  check(options.beta > options.alpha && options.beta <= 1, "beta", fmt::format("{}", options.beta),
        fmt::format("above alpha ({}), at most 1", options.alpha));
  check(options.n_knots >= 2, "n_knots", fmt::format("{}", options.n_knots), "2 or more");
  check(options.surrogate != PAUCOptions::Surrogate::kPairwise || options.thresholds != Thresholds::kSelect,
        "thresholds", "kSelect with pairs", "kAuto: pairs need the rows themselves");
}

RankingMetrics ranking_metrics(Group& group, const at::Tensor& scores, const at::Tensor& targets,
                               double quantile, double budget) {
  const std::string where = "ranking_metrics";
  const at::Tensor column = scores.defined() && scores.dim() == 1 ? scores.detach().unsqueeze(1) : scores;
  const LocalRows local = local_rows(where, 1, -100, column, targets, {}, {});
  RankingExchange header;
  const RowCounts counts = exchange_headers(where, group, local, header);
  if (!header.finite) {
    at::Tensor positives = at::full({1}, std::count(local.labels.begin(), local.labels.end(), 1), at::kLong);
    if (group.size() > 1) group.all_reduce(positives);
    return {.rows = counts.total(),
            .positives = positives.item<std::int64_t>(),
            .average_precision = kNaN,
            .recall_at_quantile = kNaN,
            .partial_auc = kNaN};
  }
  return metrics_of(gather_rows(group, local, counts), quantile, budget);
}

RankingMetrics ranking_metrics(const at::Tensor& scores, const at::Tensor& targets, double quantile,
                               double budget) {
  Group alone = Group::solo();
  return ranking_metrics(alone, scores, targets, quantile, budget);
}

}  // namespace isograd
