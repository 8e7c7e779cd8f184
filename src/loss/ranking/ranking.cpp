#include "isograd/ranking.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "isograd/random.hpp"
#include "loss/checks.hpp"
#include "loss/ranking/cores.hpp"
#include "loss/ranking/pool.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kNotFilled = -1;
constexpr std::int64_t kSums = 3;  // of a class: value, contributions, their squares
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Values that depend on the scores by a gradient known already.
struct PerClass final : torch::autograd::Function<PerClass> {
  // scores [N, C], values [C], gradient [N, C] of each class's value
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& scores,
                            const at::Tensor& values, const at::Tensor& gradient) {
    context->save_for_backward({gradient});
    context->saved_data["type"] = static_cast<std::int64_t>(scores.scalar_type());
    return values.clone();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list upstream) {
    if (at::GradMode::is_enabled())
      refuse("a ranking loss", "a backward that is to be differentiated (create_graph)", "first derivatives",
             "Call backward() without create_graph");
    const at::Tensor gradient = context->get_saved_variables()[0];
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    return {(gradient * upstream[0].detach().unsqueeze(0)).to(type), {}, {}};
  }
};

// The `count` rows of `from` with the smallest random numbers, ascending.
std::vector<std::int64_t> draw(std::vector<std::int64_t> from, std::int64_t count, const RandomKey& key) {
  if (count < static_cast<std::int64_t>(from.size())) {
    std::vector<std::pair<std::uint64_t, std::int64_t>> drawn;
    for (const auto row : from) drawn.emplace_back(random_bits(key, static_cast<std::uint64_t>(row)), row);
    std::nth_element(drawn.begin(), drawn.begin() + count, drawn.end());
    from.clear();
    for (std::int64_t i = 0; i < count; ++i) from.push_back(drawn[static_cast<std::size_t>(i)].second);
  }
  std::sort(from.begin(), from.end());
  return from;
}

std::uint64_t bytes_hash(const at::Tensor& tensor) {
  return hash_name({static_cast<const char*>(tensor.const_data_ptr()),
                    static_cast<std::size_t>(tensor.numel() * tensor.element_size())});
}

// What the classes' cores gave, over all ranks.
struct Computed {
  std::vector<ClassResult> classes;
  at::Tensor gradient;  // [live, C] of each class's loss; of shared work this rank's rows alone are whole
  bool own_only = false;
};

}  // namespace

RankingLoss::RankingLoss(std::string name, RankingOptions options, Group group)
    : torch::nn::Module(name), name_(std::move(name)), options_(options), group_(std::move(group)) {
  const auto number = [](auto value) { return fmt::format("{}", value); };
  check(options_.num_classes > 0, "num_classes", number(options_.num_classes), "1 or more");
  check(options_.queue_size >= 0, "queue_size", number(options_.queue_size), "0 or more");
  check(options_.max_pool_size >= 0, "max_pool_size", number(options_.max_pool_size), "0 (no limit) or more");
  check(options_.temperature > 0 && std::isfinite(options_.temperature), "temperature",
        number(options_.temperature), "above 0");
  check(options_.reduction != LossReduction::kMeanPositive, "reduction", "mean_positive",
        "mean, sum or none: mean_positive is softmax focal's");
  const std::int64_t rows = options_.queue_size;
  queue_scores_ = register_buffer("queue_scores", at::zeros({rows, options_.num_classes}, at::kDouble));
  queue_labels_ = register_buffer("queue_labels", at::full({rows}, kNotFilled, at::kLong));
  queue_iid_ = register_buffer("queue_iid", at::ones({rows}, at::kBool));
  queue_weights_ = register_buffer("queue_weights", at::ones({rows}, at::kDouble));
  position_ = register_buffer("position", at::zeros({2}, at::kLong));
  temperature_ = register_buffer("temperature", at::full({1}, options_.temperature, at::kDouble));
}

void RankingLoss::check(bool holds, const std::string& key, const std::string& found,
                        const std::string& expected) const {
  if (!holds) refuse(name_ + ": " + key, found, expected, "Set " + key + " in that range");
}

double RankingLoss::temperature() const {
  return temperature_.item<double>();
}

void RankingLoss::set_temperature(double temperature) {
  check(temperature > 0 && std::isfinite(temperature), "temperature", fmt::format("{}", temperature),
        "above 0");
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
    copies.emplace_back(buffer.value(), given->second);
  }
  for (auto& [to, from] : copies) to.copy_(from);
}

// Minimum quotas: each class keeps some rows, the rest is drawn uniformly. Same rows on every rank.
std::vector<std::int64_t> RankingLoss::subsample(const RankingPool& pool) const {
  std::vector<std::int64_t> all(static_cast<std::size_t>(pool.size()));
  std::iota(all.begin(), all.end(), 0);
  const std::int64_t most = options_.max_pool_size;
  if (most == 0 || pool.size() <= most) return all;
  RandomKey key{.seed = options_.seed,
                .step = static_cast<std::uint64_t>(position_[1].item<std::int64_t>()),
                .layer = hash_name("ranking: quotas")};
  std::map<std::int64_t, std::vector<std::int64_t>> by_class;
  for (const auto row : all) by_class[pool.labels[static_cast<std::size_t>(row)]].push_back(row);
  const std::int64_t quota =
      std::max<std::int64_t>(1, most / (2 * static_cast<std::int64_t>(by_class.size())));
  std::vector<std::int64_t> chosen;
  for (auto& [label, rows] : by_class)
    for (const auto row : draw(rows, quota, key)) chosen.push_back(row);
  std::sort(chosen.begin(), chosen.end());
  key.layer = hash_name("ranking: the rest");
  const std::int64_t left = most - static_cast<std::int64_t>(chosen.size());
  if (left <= 0) return draw(chosen, most, key);
  std::vector<std::int64_t> others;
  std::set_difference(all.begin(), all.end(), chosen.begin(), chosen.end(), std::back_inserter(others));
  for (const auto row : draw(others, left, key)) chosen.push_back(row);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

void RankingLoss::push(const RankingPool& pool) {
  const std::int64_t size = options_.queue_size;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(pool.live));
  std::iota(rows.begin(), rows.end(), 0);
  if (pool.live >= size) {
    // More than fit: a draw favours neither the last rows nor the last rank.
    rows = draw(rows, size,
                {.seed = options_.seed,
                 .step = static_cast<std::uint64_t>(position_[1].item<std::int64_t>()),
                 .layer = hash_name("ranking: queue")});
    position_[0].zero_();
  }
  const at::Tensor scores = pool.scores.narrow(1, 0, pool.live)
                                .index_select(1, at::tensor(rows, at::kLong))
                                .t()
                                .to(at::kDouble)
                                .contiguous();
  auto* position = position_.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::size_t>(rows[i]);
    const std::int64_t at = *position;
    std::copy_n(scores.data_ptr<double>() + static_cast<std::int64_t>(i) * pool.classes, pool.classes,
                queue_scores_.data_ptr<double>() + at * pool.classes);
    queue_labels_.data_ptr<std::int64_t>()[at] = pool.labels[row];
    queue_iid_.data_ptr<bool>()[at] = pool.iid[row] != 0;
    queue_weights_.data_ptr<double>()[at] = pool.weights.empty() ? 1 : pool.weights[row];
    *position = (at + 1) % size;
  }
}

namespace {

// Every class's core; then, where the work was dealt out, one collective that adds the shares up.
template <typename T, typename Compute>
Computed compute_classes(const RankingPool& pool, const std::vector<std::int64_t>& chosen, double temperature,
                         bool wants_gradient, bool dealt, Group& group, const Compute& compute) {
  Computed computed;
  const std::int64_t classes = pool.classes, whole = pool.size();
  const auto type = c10::CppTypeToScalarType<T>::value;
  std::vector<T> gradient;  // [C, live]
  if (wants_gradient) gradient.assign(static_cast<std::size_t>(classes * pool.live), T(0));
  std::vector<double> weights;
  if (!pool.weights.empty())
    for (const auto row : chosen) weights.push_back(pool.weights[static_cast<std::size_t>(row)]);
  const bool all_rows = static_cast<std::int64_t>(chosen.size()) == whole;
  ClassPool<T> view;
  view.weights = weights.empty() ? nullptr : weights.data();
  view.live = std::lower_bound(chosen.begin(), chosen.end(), pool.live) - chosen.begin();
  view.temperature = temperature;
  if (dealt) view.share = group.rank(), view.shares = group.size();
  for (const auto row : chosen) view.iid.push_back(pool.iid[static_cast<std::size_t>(row)]);
  std::vector<T> of_chosen;
  for (std::int64_t c = 0; c < classes; ++c) {
    const T* scores = pool.scores.const_data_ptr<T>() + c * whole;
    view.scores.clear(), view.positive.clear();
    for (const auto row : chosen) {
      view.scores.push_back(scores[row]);
      view.positive.push_back(pool.labels[static_cast<std::size_t>(row)] == (classes == 1 ? 1 : c));
    }
    T* own = wants_gradient ? gradient.data() + c * pool.live : nullptr;
    if (!wants_gradient || all_rows) {
      computed.classes.push_back(compute(view, own));
      continue;
    }
    of_chosen.assign(static_cast<std::size_t>(view.live), T(0));
    computed.classes.push_back(compute(view, of_chosen.data()));
    for (std::size_t i = 0; i < of_chosen.size(); ++i) own[chosen[i]] = of_chosen[i];
  }

  at::Tensor by_class;
  if (wants_gradient)
    by_class = at::from_blob(gradient.data(), {classes, pool.live}, at::TensorOptions(type));
  if (dealt && group.size() > 1) {
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
      const std::int64_t own_rows = pool.rows[static_cast<std::size_t>(group.rank())];
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
  if (wants_gradient) computed.gradient = by_class.t().contiguous();  // a copy: `gradient` ends here
  if (computed.gradient.defined() && computed.gradient.data_ptr() == static_cast<void*>(gradient.data()))
    computed.gradient = computed.gradient.clone();
  return computed;
}

RankingDiagnostics diagnostics_of(const std::vector<ClassResult>& classes, const LocalRows& local) {
  const auto count = static_cast<std::int64_t>(classes.size());
  RankingDiagnostics made{.t_alpha = at::full({count}, kNaN, at::kDouble),
                          .t_beta = at::full({count}, kNaN, at::kDouble),
                          .tau_eff = at::full({count}, kNaN, at::kDouble),
                          .pauc_var = at::full({count}, kNaN, at::kDouble),
                          .band_neg_count = at::zeros({count}, at::kLong),
                          .grad_pos_count = at::zeros({count}, at::kLong)};
  for (std::int64_t c = 0; c < count; ++c) {
    const ClassResult& result = classes[static_cast<std::size_t>(c)];
    made.grad_pos_count[c] = std::count(local.labels.begin(), local.labels.end(), count == 1 ? 1 : c);
    if (!result.valid) continue;
    made.t_alpha[c] = result.t_alpha;
    made.t_beta[c] = result.t_beta;
    made.tau_eff[c] = result.tau_eff;
    made.band_neg_count[c] = result.band_negatives;
    const double rows = result.numerator_rows, mean = result.contributed / rows;
    made.pauc_var[c] = std::max(0.0, result.squared / rows - mean * mean);
  }
  return made;
}

}  // namespace

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
                             "{} {} {} {} {} {} {} {} {}", name_, classes, options_.queue_size, temperature(),
                             static_cast<int>(options_.reduction), options_.max_pool_size,
                             static_cast<int>(options_.grad_reduction), options_.seed, fingerprint())),
                         .forwards = position_[1].item<std::int64_t>(),
                         .wants_gradient = differentiable,
                         .updates_queue = updates};
  if (options_.check_queue)
    header.queue_checksum = bytes_hash(queue_scores_) ^ 3 * bytes_hash(queue_labels_) ^
                            5 * bytes_hash(queue_iid_) ^ 7 * bytes_hash(queue_weights_) ^
                            11 * bytes_hash(position_);

  // The rows of all ranks, then those of earlier batches.
  RankingPool pool = exchange_rows(name_, group_, local, header);
  const at::Tensor filled = queue_labels_.ne(kNotFilled).nonzero().squeeze(1);
  if (filled.numel() > 0) {
    std::vector<std::int64_t> labels;
    std::vector<std::uint8_t> iid;
    std::vector<double> weights;
    for (std::int64_t i = 0; i < filled.numel(); ++i) {
      const std::int64_t row = filled.const_data_ptr<std::int64_t>()[i];
      labels.push_back(queue_labels_.const_data_ptr<std::int64_t>()[row]);
      iid.push_back(queue_iid_.const_data_ptr<bool>()[row]);
      weights.push_back(queue_weights_.const_data_ptr<double>()[row]);
    }
    append_rows(pool, queue_scores_.index_select(0, filled), labels, iid, weights);
  }

  const std::vector<std::int64_t> chosen = subsample(pool);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    return compute_classes<T>(pool, chosen, temperature(), header.wants_gradient, deals_out_work(), group_,
                              [&](const ClassPool<T>& view, T* own) { return compute(view, own); });
  };
  const Computed computed = pool.scores.scalar_type() == at::kDouble ? run(double()) : run(float());
  if (updates) push(pool);
  position_[1] += 1;

  // Values [C] and which of them count; the same on every rank.
  const at::ScalarType type = pool.scores.scalar_type();
  at::Tensor values = at::zeros({classes}, type), valid = at::zeros({classes}, at::kBool);
  for (std::int64_t c = 0; c < classes; ++c) {
    const ClassResult& of = computed.classes[static_cast<std::size_t>(c)];
    valid[c] = of.valid;
    if (of.valid) values[c] = 1 - of.value;
  }
  RankingResult result{.loss = {},
                       .per_class = at::where(valid, values, kNaN).to(type),
                       .valid = valid,
                       .diagnostics = diagnostics_of(computed.classes, local)};
  if (differentiable) {
    const auto own = static_cast<std::int64_t>(local.labels.size());
    at::Tensor gradient = computed.gradient;
    if (!computed.own_only) gradient = gradient.narrow(0, pool.own_begin, own);
    if (options_.grad_reduction == GradReduction::kMean) gradient = gradient * group_.size();
    if (own < scores.size(0))
      gradient = at::zeros({scores.size(0), classes}, type)
                     .index_copy(0, at::tensor(local.kept, at::kLong), gradient);
    values = PerClass::apply(scores, values.to(scores.device()), gradient.to(scores.device()));
    valid = valid.to(scores.device());
  }
  const std::int64_t count = result.valid.sum().item<std::int64_t>();
  const at::Tensor zero = at::zeros_like(values);
  const at::Tensor sum = at::where(valid, values, zero).sum();
  switch (options_.reduction) {
    case LossReduction::kNone:
      // A pool without rows gives zeros, not NaN: nothing was there that could have been invalid.
      result.loss = pool.size() == 0 ? at::where(valid, values, zero) : at::where(valid, values, zero + kNaN);
      break;
    case LossReduction::kMean:
      result.loss = sum / static_cast<double>(std::max<std::int64_t>(count, 1));
      break;
    default:
      result.loss = sum;
  }
  return result;
}

}  // namespace isograd
