#include "serve/verify/verify_server.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/min.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "base/refuse.hpp"
#include "isograd/lora.hpp"
#include "isograd/model.hpp"
#include "model/safetensors.hpp"
#include "serve/verify/remote.hpp"
#include "verify/compare.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kSeed = 20261128;
constexpr std::int64_t kRank = 4;
constexpr double kExact = 1e-10;          // E1
constexpr double kTooCoarse = 1e-2;       // a matrix whose rounding alone is more proves nothing
constexpr double kShows = 10;             // bounds that a mistake must be away from what is right
constexpr double kExplains = 1e-2;        // of the error may be left, where a mistake is named
constexpr double kLogProbability = 1e-5;  // nats between sampler and trainer in fp32
constexpr const char* kUnknown = "another gradient or update than one process has";

class Folder {
 public:
  Folder() : path(fs::temp_directory_path() / fmt::format("isograd-verify-{}-{}", ::getpid(), count_++)) {
    fs::create_directories(path);
    fs::permissions(path, fs::perms::owner_all);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path path;

 private:
  static inline int count_ = 0;
};

// ---- one process ----

at::Tensor input(const Datum& datum, const char* name, at::ScalarType dtype) {
  return at::tensor(datum.inputs.at(name).numbers, at::kFloat).to(dtype);
}

// The sum of a datum's loss, of log-probabilities p: the published formulas.
at::Tensor loss_of(const std::string& loss, const Datum& datum, const at::Tensor& p, bool drops_negative) {
  const at::ScalarType dtype = p.scalar_type();
  if (loss == "cross_entropy") {
    const at::Tensor weights = input(datum, "weights", dtype);
    return -((drops_negative ? weights.clamp_min(0) : weights) * p).sum();
  }
  const at::Tensor ratio = (p - input(datum, "logprobs", dtype)).exp();
  const at::Tensor advantages = input(datum, "advantages", dtype);
  if (loss == "importance_sampling") return -(ratio * advantages).sum();
  return -at::min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum();  // ppo
}

// The base and an adapter over it, datum by datum.
class OneProcess {
 public:
  OneProcess(const fs::path& base, at::ScalarType dtype) : dtype_(dtype), model_(read_hf(base, dtype)) {
    for (const auto& [name, tensor] : model_->named()) at::Tensor(tensor).requires_grad_(false);
  }
  ~OneProcess() { model_->set_adapter(nullptr); }
  OneProcess(const OneProcess&) = delete;
  OneProcess& operator=(const OneProcess&) = delete;

  const DecoderConfig& config() const { return model_->config(); }
  void take(const fs::path& adapter) {
    adapter_ = read_peft(adapter, config(), dtype_);
    model_->set_adapter(adapter_.get());
  }
  const NamedTensors& named() const { return adapter_->named(); }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : adapter_->named()) names.push_back(name);
    return names;
  }
  Tensors weights() const {
    Tensors all;
    for (const auto& [name, tensor] : adapter_->named()) all.push_back(tensor.detach().clone());
    return all;
  }
  at::Tensor log_probabilities(const std::vector<std::int64_t>& tokens,
                               const std::vector<std::int64_t>& targets) {
    const auto length = static_cast<std::int64_t>(tokens.size());
    Batch batch;
    batch.tokens = at::tensor(tokens, at::kLong), batch.targets = at::tensor(targets, at::kLong);
    batch.positions = at::arange(length, at::kLong), batch.cu_seqlens = {0, length};
    batch.sample_ids = {0}, batch.sample_targets = {length};
    const at::Tensor hidden = model_->hidden(batch);
    at::Tensor logits = hidden.matmul(model_->output_weight().t());
    if (const LowRank* head = adapter_->find(0, Projection::kHead))
      logits = logits + hidden.matmul(head->a.t()).matmul(head->b.t()) * head->scale;
    return logits.log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1);
  }
  Tensors gradient(const std::string& loss, const Datum& datum, bool drops_negative) {
    const at::Tensor p = log_probabilities(datum.tokens, datum.inputs.at("target_tokens").integers);
    loss_of(loss, datum, p, drops_negative).backward();
    Tensors all;
    for (const auto& [name, tensor] : adapter_->named()) {
      at::Tensor leaf = tensor;
      all.push_back(leaf.grad().defined() ? leaf.grad().clone() : at::zeros_like(leaf));
      leaf.mutable_grad() = at::Tensor();
    }
    return all;
  }

 private:
  at::ScalarType dtype_;
  std::shared_ptr<DecoderLM> model_;
  std::shared_ptr<LoraAdapter> adapter_;
};

// ---- sums, and what mistakes would make of them ----

// The sum over some datums, and how many rows divide it in mode `tokens`.
struct Sum {
  Tensors gradient;
  double rows = 0;
  Sum& add(const Sum& more, double factor = 1) {
    if (gradient.empty())
      for (const at::Tensor& each : more.gradient) gradient.push_back(at::zeros_like(each));
    for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i].add_(more.gradient[i], factor);
    return *this;
  }
};

using Call = ForwardBackward;

double rows_of(const Call& call, const Datum& datum, bool drops_negative) {
  if (call.loss != "cross_entropy") return static_cast<double>(datum.tokens.size());
  const auto& weights = datum.inputs.at("weights").numbers;
  return static_cast<double>(
      std::ranges::count_if(weights, [&](float w) { return drops_negative ? w > 0 : w != 0; }));
}

double weight_of(const Call& call, const Datum& datum) {
  if (call.loss != "cross_entropy") return static_cast<double>(datum.tokens.size());
  double sum = 0;
  for (const float weight : datum.inputs.at("weights").numbers) sum += weight;
  return sum;
}

constexpr const char* kRight = "";

// By what is done wrong; kRight: nothing.
std::map<std::string, Sum> sums_of(OneProcess& process, const std::vector<Call>& calls) {
  std::map<std::string, Sum> found;
  std::vector<Sum> of_calls;
  const auto add = [&](const std::string& name, const Sum& part, double factor, double rows) {
    found[name].add(part, factor).rows += rows;
  };
  for (const Call& call : calls) {
    double call_rows = 0;
    Sum of_call;
    for (const Datum& datum : call.data) call_rows += static_cast<double>(datum.tokens.size());
    for (const Datum& datum : call.data) {
      const Sum own{process.gradient(call.loss, datum, false), rows_of(call, datum, false)};
      const Sum dropped{process.gradient(call.loss, datum, true), rows_of(call, datum, true)};
      of_call.add(own).rows += own.rows;
      add("each call's gradient is divided by its rows", own, 1 / call_rows, own.rows);
      add("each call's gradient is divided by its datums", own, 1 / static_cast<double>(call.data.size()),
          own.rows);
      add("each datum's gradient is divided by the sum of its weights", own, 1 / weight_of(call, datum),
          own.rows);
      add("negative weights are dropped", dropped, 1, dropped.rows);
    }
    of_calls.push_back(of_call);
    add(kRight, of_call, 1, of_call.rows);
  }
  for (std::size_t i = 0; i < of_calls.size(); ++i) {
    const std::string call = fmt::format("call {} ({}) of a step", i + 1, calls[i].loss);
    for (const auto& [name, factor] : {std::pair(call + " is added twice", 1.0), {call + " is lost", -1.0}}) {
      Sum& changed = found[name];
      changed.add(found.at(kRight)).add(of_calls[i], factor);
      changed.rows = found.at(kRight).rows + factor * of_calls[i].rows;
    }
  }
  return found;
}

// ---- AdamW, as torch.optim has it ----

struct Step {
  Tensors gradient;  // divided and clipped
  AdamParams params;
};

double clip_factor(const Tensors& gradient, double limit) {
  return limit > 0 ? std::min(1.0, limit / (norm_of(gradient) + 1e-6)) : 1;
}
Tensors scaled(const Tensors& tensors, double factor) {
  Tensors all;
  for (const at::Tensor& each : tensors) all.push_back(each * factor);
  return all;
}
// The sum over its denominator, clipped; or clipped before it is divided.
Tensors prepared(const Sum& sum, double denominator, double limit, bool clips_first = false) {
  const Tensors mean = scaled(sum.gradient, 1 / denominator);
  return scaled(mean, clip_factor(clips_first ? sum.gradient : mean, limit));
}

// The weights `before` after the last of all steps of a model.
Tensors stepped(const Tensors& before, const std::vector<Step>& steps) {
  Tensors after;
  const AdamParams& last = steps.back().params;
  for (std::size_t i = 0; i < before.size(); ++i) {
    at::Tensor m = at::zeros_like(before[i]), v = at::zeros_like(before[i]);
    for (const auto& [gradient, p] : steps) {
      m = m * p.beta1 + gradient[i] * (1 - p.beta1);
      v = v * p.beta2 + gradient[i].square() * (1 - p.beta2);
    }
    const auto t = static_cast<double>(steps.size());
    const at::Tensor root = v.sqrt() / std::sqrt(1 - std::pow(last.beta2, t)) + last.epsilon;
    after.push_back(before[i] * (1 - last.learning_rate * last.weight_decay) -
                    m / root * (last.learning_rate / (1 - std::pow(last.beta1, t))));
  }
  return after;
}

// ---- the batch ----

class Draws {
 public:
  explicit Draws(std::int64_t vocabulary) : vocabulary_(vocabulary) {}
  double number(double least, double most) { return std::uniform_real_distribution(least, most)(random_); }
  std::vector<std::int64_t> tokens(std::int64_t length) {
    std::vector<std::int64_t> drawn;
    for (std::int64_t i = 0; i < length; ++i)
      drawn.push_back(std::uniform_int_distribution<std::int64_t>(0, vocabulary_ - 1)(random_));
    return drawn;
  }
  Datum datum(std::int64_t length) {
    Datum made{.tokens = tokens(length), .inputs = {}};
    made.inputs["target_tokens"] = {.shape = {length}, .numbers = {}, .integers = tokens(length)};
    return made;
  }

 private:
  std::mt19937_64 random_{kSeed};
  std::int64_t vocabulary_;
};

Array array_of(const std::vector<double>& values) {
  return {.shape = {static_cast<std::int64_t>(values.size())},
          .numbers = {values.begin(), values.end()},
          .integers = {}};
}

// Weights that are fractions, and where `is_signed` one in three is negative: their sum stays away from 0.
Datum supervised(Draws& draws, std::int64_t length, bool is_signed) {
  Datum datum = draws.datum(length);
  std::vector<double> weights;
  for (std::int64_t i = 0; i < length; ++i)
    weights.push_back((is_signed && i % 3 == 2 ? -1 : 1) * draws.number(0.6, 1.4));
  if (!is_signed) weights[0] = 0;  // a prompt
  datum.inputs["weights"] = array_of(weights);
  return datum;
}

// Ratios are well inside of ppo's limits or well outside, so that rounding moves none over them.
Datum sampled(Draws& draws, OneProcess& process, std::int64_t length) {
  Datum datum = draws.datum(length);
  const at::Tensor p =
      process.log_probabilities(datum.tokens, datum.inputs["target_tokens"].integers).detach();
  std::vector<double> old, advantages;
  for (std::int64_t i = 0; i < length; ++i) {
    const double away = i % 2 == 0 ? draws.number(-0.1, 0.1) : draws.number(0.4, 0.8) * (i % 4 == 1 ? 1 : -1);
    old.push_back(p[i].item<double>() + away);
    advantages.push_back(draws.number(0.3, 1) * (i % 3 == 1 ? -1 : 1));
  }
  datum.inputs["logprobs"] = array_of(old), datum.inputs["advantages"] = array_of(advantages);
  return datum;
}

std::vector<Call> calls_of(Draws& draws, OneProcess& process) {
  const auto call = [](const char* loss, std::vector<Datum> data) {
    return Call{.data = std::move(data), .loss = loss, .config = {}};
  };
  return {call("cross_entropy", {supervised(draws, 3, false), supervised(draws, 20, false)}),
          call("cross_entropy",
               {supervised(draws, 9, true), supervised(draws, 5, true), supervised(draws, 4, true)}),
          call("importance_sampling", {sampled(draws, process, 12), sampled(draws, process, 4)}),
          call("ppo", {sampled(draws, process, 7), sampled(draws, process, 15)})};
}

// ---- the judgement ----

double root_mean_square(const Tensors& tensors) {
  double elements = 0;
  for (const at::Tensor& each : tensors) elements += static_cast<double>(each.numel());
  return norm_of(tensors) / std::sqrt(elements);
}

Tensors wide(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& each : tensors) all.push_back(each.to(at::kDouble));
  return all;
}

class Judge {
 public:
  Judge(Remote& remote, const std::string& base, const fs::path& directory, ServerVerdict& verdict)
      : remote_(remote),
        base_(base),
        directory_(directory),
        exact_(directory, at::kDouble),
        verdict_(verdict) {}

  void judge() {
    for (const char* mode : {"none", "tokens"}) {
      try {
        judge_mode(mode);
      } catch (const ConfigError& error) {
        verdict_.unjudged.push_back(fmt::format("{}, isograd.normalise = {}: {}", base_, mode, error.what()));
      }
    }
    for (const std::string& mistake : mistakes_)
      if (!shown_.contains(mistake))
        verdict_.unjudged.push_back(fmt::format("{}: whether {}; it would not have shown", base_, mistake));
  }

 private:
  void judge_mode(const std::string& mode) {
    mode_ = mode, steps_.clear(), rounded_steps_.clear();
    Draws draws(exact_.config().vocabulary);
    CreateModel request;
    request.base = base_, request.lora.rank = kRank, request.lora.seed = 7,
    request.metadata = {{"isograd.normalise", mode}};
    const std::string model = remote_.create(request);
    before_ = std::make_unique<Folder>();
    remote_.download(model, before_->path);
    exact_.take(before_->path);
    check_adapter({.rank = kRank});
    // The first step is of plain SGD's kind: epsilon is above every element of the gradient.
    std::vector<std::int64_t> prompt = draws.tokens(12);
    if (!judge_step(model, draws, true)) return;
    const std::string older = remote_.sampler_of(model);
    at::Tensor stale = prompt_values(exact_, prompt);
    judge_step(model, draws, false);
    judge_sampler(model, prompt, stale, older);
    remote_.unload(model);
  }

  // An adapter of less than was asked for would leave the rest unjudged.
  void check_adapter(const LoraConfig& asked) const {
    const auto shapes = [](const NamedTensors& named) {
      std::map<std::string, std::vector<std::int64_t>> all;
      for (const auto& [name, tensor] : named) all[name] = tensor.sizes().vec();
      return all;
    };
    const auto expected = shapes(LoraAdapter::without_values(exact_.config(), asked, at::kFloat)->named()),
               found = shapes(exact_.named());
    for (const auto& [name, shape] : expected)
      if (const auto at = found.find(name); at == found.end() || at->second != shape)
        refuse(base_, at == found.end() ? "an adapter without " + name : "another shape of " + name,
               fmt::format("rank {} of attention, mlp and unembed, as was asked", asked.rank),
               "Look at the server");
  }

  at::ScalarType dtype_of(const fs::path& adapter) const {
    std::set<at::ScalarType> types;
    for (const auto& [name, tensor] : read_safetensors(adapter / "adapter_model.safetensors"))
      types.insert(tensor.scalar_type());
    if (types == std::set{at::kDouble} || types == std::set{at::kFloat}) return *types.begin();
    refuse(base_, "an adapter in another type than float64 or float32", "one of them",
           "Start the server with --dtype float32 or float64");
  }

  // False: what follows would only repeat that it is wrong.
  bool judge_step(const std::string& model, Draws& draws, bool first) {
    const bool in_fp64 = dtype_of(before_->path) == at::kDouble;
    if (!in_fp64 && !rounded_) rounded_ = std::make_unique<OneProcess>(directory_, at::kFloat);
    OneProcess* const rounded = in_fp64 ? nullptr : rounded_.get();
    exact_.take(before_->path);
    if (rounded) rounded->take(before_->path);
    const std::vector<Call> calls = calls_of(draws, exact_);
    const auto sums = sums_of(exact_, calls);
    const Sum& right = sums.at(kRight);
    const auto denominator = [&](double rows) { return mode_ == "tokens" ? rows : 1; };
    const Tensors mean = scaled(right.gradient, 1 / denominator(right.rows));
    AdamParams params{.learning_rate = 0.25, .beta1 = 0.9, .beta2 = 0.95};
    params.epsilon = 64 * root_mean_square(mean);
    if (!first) {
      params = {.learning_rate = 5e-3, .beta1 = 0.8, .beta2 = 0.9};
      params.weight_decay = 0.5, params.clip = 0.5 * norm_of(mean);
      params.epsilon = 0.5 * root_mean_square(mean);
    }
    for (const Call& call : calls) remote_.forward_backward(model, call);
    remote_.optim_step(model, params);
    auto after = std::make_unique<Folder>();
    remote_.download(model, after->path);

    const at::AutoGradMode no_gradients(false);
    const Tensors initial = exact_.weights();
    const auto predicted = [&](const Tensors& gradient, const AdamParams& with,
                               const std::function<void(AdamParams&)>& change = {}) {
      std::vector<Step> steps = steps_;
      steps.push_back({gradient, with});
      if (change)
        for (Step& step : steps) change(step.params);
      return stepped(initial, steps);
    };
    const Tensors gradient = prepared(right, denominator(right.rows), params.clip);
    const Tensors expected = predicted(gradient, params);

    std::map<std::string, std::vector<Tensors>> mistaken;
    for (const auto& [name, sum] : sums) {
      if (name == kRight) continue;
      for (const double rows : std::set{right.rows, sum.rows})
        mistaken[name].push_back(predicted(prepared(sum, denominator(rows), params.clip), params));
    }
    if (mode_ == "tokens")
      mistaken["the sum is not divided (isograd.normalise)"] = {
          predicted(prepared(right, 1, params.clip), params)};
    for (const double epsilon : {1e-12, 1e-8}) {
      AdamParams other = params;
      other.epsilon = epsilon;
      mistaken["eps is ignored"].push_back(predicted(gradient, other));
    }
    if (!first) {
      const auto ignored = [&](const char* name, auto field, std::vector<double> values) {
        for (const double value : values)
          mistaken[fmt::format("{} is ignored", name)].push_back(
              predicted(gradient, params, [&](AdamParams& p) { p.*field = value; }));
      };
      ignored("beta1", &AdamParams::beta1, {0.9});
      ignored("beta2", &AdamParams::beta2, {0.95, 0.999});
      ignored("weight_decay", &AdamParams::weight_decay, {0, 0.01});
      mistaken["grad_clip_norm is ignored"] = {predicted(mean, params)};
      if (mode_ == "tokens")
        mistaken["the sum is clipped before it is divided"] = {
            predicted(prepared(right, denominator(right.rows), params.clip, true), params)};
    }

    Tensors moved;
    for (std::size_t i = 0; i < initial.size(); ++i) moved.push_back(expected[i] - initial[i]);
    const std::vector<double> scales = error_scales(moved);
    std::vector<double> bounds(scales.size(), kExact);
    if (rounded) bound_by_rounding(*rounded, calls, params, expected, scales, bounds);

    before_ = std::move(after);
    exact_.take(before_->path);
    const Tensors found = exact_.weights();
    const std::size_t before = verdict_.wrong.size() + verdict_.unjudged.size();
    conclude(first, expected, found, mistaken, scales, bounds);
    steps_.push_back({gradient, params});
    return before == verdict_.wrong.size() + verdict_.unjudged.size();
  }

  // Four times what rounding does to one process, and the last rounding.
  void bound_by_rounding(OneProcess& process, const std::vector<Call>& calls, const AdamParams& params,
                         const Tensors& expected, const std::vector<double>& scales,
                         std::vector<double>& bounds) {
    Sum sum;
    {
      const at::AutoGradMode gradients(true);
      for (const Call& call : calls)
        for (const Datum& datum : call.data) {
          sum.add({process.gradient(call.loss, datum, false), 0});
          sum.rows += rows_of(call, datum, false);
        }
    }
    rounded_steps_.push_back({prepared(sum, mode_ == "tokens" ? sum.rows : 1, params.clip), params});
    const Tensors alone = wide(stepped(process.weights(), rounded_steps_));
    const auto names = process.names();
    for (std::size_t i = 0; i < bounds.size(); ++i) {
      bounds[i] = bounds_for(at::kFloat, 1, static_cast<std::int64_t>(calls.size()))
                      .rounded(distance(alone[i], expected[i]) / scales[i]);
      if (!(bounds[i] <= kTooCoarse))
        refuse(names[i], fmt::format("rounding of {:.1e} in one process", bounds[i]),
               fmt::format("at most {}", kTooCoarse), "Start the server with --dtype float64");
    }
  }

  void conclude(bool first, const Tensors& expected, const Tensors& found,
                const std::map<std::string, std::vector<Tensors>>& mistaken,
                const std::vector<double>& scales, const std::vector<double>& bounds) {
    const auto names = exact_.names();
    struct Apart {
      double bounds = 0, scales = 0;
      std::size_t matrix = 0;
    };
    // How far the furthest matrix is, in bounds.
    const auto apart = [&](const Tensors& a, const Tensors& b) {
      Apart most;
      for (std::size_t i = 0; i < a.size(); ++i) {
        const double error = in_scales(distance(a[i], b[i]), scales[i]);
        if (i == 0 || (!std::isnan(most.bounds) && !(error / bounds[i] <= most.bounds)))
          most = {error / bounds[i], error, i};
      }
      return most;
    };
    for (const auto& [name, all] : mistaken) {
      mistakes_.insert(name);
      for (const Tensors& each : all)
        if (apart(each, expected).bounds >= kShows) shown_.insert(name);
    }
    const auto error = apart(found, expected);
    const std::string where = fmt::format("{}, isograd.normalise = {}, step {}", base_, mode_, first ? 1 : 2);
    verdict_.compared.push_back(fmt::format("{}: {} is furthest, by {:.1e} of its change; allowed: {:.1e}",
                                            where, names[error.matrix], error.scales, bounds[error.matrix]));
    if (error.bounds <= 1) return;
    std::string best = kUnknown;
    double least = kExplains * error.bounds;
    for (const auto& [name, all] : mistaken)
      for (const Tensors& each : all)
        if (const double left = apart(found, each).bounds; left < least) best = name, least = left;
    // In fp32 a near tie of experts may go the other way.
    const bool may_be_a_tie = best == kUnknown && rounded_ && exact_.config().experts.count > 0;
    (may_be_a_tie ? verdict_.unjudged : verdict_.wrong)
        .push_back(
            fmt::format("{}: {}{}", where, best,
                        may_be_a_tie ? ", or a near tie of experts: start it with --dtype float64" : ""));
  }

  // log p of each token but the first, given those before it.
  at::Tensor prompt_values(OneProcess& process, const std::vector<std::int64_t>& prompt) {
    const at::AutoGradMode no_gradients(false);
    return process.log_probabilities({prompt.begin(), prompt.end() - 1}, {prompt.begin() + 1, prompt.end()})
        .to(at::kDouble);
  }

  void judge_sampler(const std::string& model, const std::vector<std::int64_t>& prompt,
                     const at::Tensor& stale, const std::string& older) {
    const at::Tensor expected = prompt_values(exact_, prompt);
    const auto said = [&](const std::string& sampler) {
      const std::vector<float> values = remote_.log_probabilities(sampler, prompt);
      return at::tensor(std::vector<double>(values.begin() + 1, values.end()), at::kDouble);
    };
    const auto apart = [](const at::Tensor& a, const at::Tensor& b) {
      return (a - b).abs().max().item<double>();
    };
    // The reply has fp32; a server in fp32 computes in it, too.
    double bound = std::ldexp(expected.abs().max().item<double>(), -23);
    if (dtype_of(before_->path) == at::kFloat) {
      rounded_->take(before_->path);
      bound += std::max(kLogProbability, kRoundingFactor * apart(prompt_values(*rounded_, prompt), expected));
    }
    const std::string old_name = "the sampler has an older adapter",
                      new_name = "an older sampler has a newer adapter";
    for (const std::string& name : {old_name, new_name}) {
      mistakes_.insert(name);
      if (apart(stale, expected) >= kShows * bound) shown_.insert(name);
    }
    for (const auto& [sampler, right, other, mistake] :
         {std::tuple(remote_.sampler_of(model), expected, stale, old_name),
          {older, stale, expected, new_name}}) {
      const at::Tensor found = said(sampler);
      const double error = apart(found, right);
      const std::string where = fmt::format("{}, isograd.normalise = {}, sampler", base_, mode_);
      verdict_.compared.push_back(
          fmt::format("{}: log-probabilities are off by {:.1e}; allowed: {:.1e}", where, error, bound));
      if (error <= bound) continue;
      verdict_.wrong.push_back(fmt::format(
          "{}: {}", where,
          apart(found, other) <= bound ? mistake : "other log-probabilities than one process has"));
    }
  }

  Remote& remote_;
  const std::string base_;
  const fs::path directory_;
  OneProcess exact_;
  std::unique_ptr<OneProcess> rounded_;  // in fp32, for a server that computes in it
  ServerVerdict& verdict_;
  std::set<std::string> mistakes_{}, shown_{};  // that are looked for; that would have been seen

  // These belong to the model that is judged.
  std::string mode_{};
  std::unique_ptr<Folder> before_{};
  std::vector<Step> steps_{}, rounded_steps_{};
};

}  // namespace

ServerVerdict verify_server(const std::string& url, const std::string& key, const fs::path& base) {
  Remote remote(url, key);
  ServerVerdict verdict;
  const std::vector<std::string> names = remote.bases();
  if (names.empty()) verdict.unjudged.push_back("it serves no model");
  for (const std::string& name : names) {
    try {
      if (!base.empty() && name != names[0])
        refuse(name, "a directory of the first base alone", "the server's other bases, too",
               "Leave the directory out: they are downloaded");
      const Folder folder;
      if (base.empty()) {
        CreateModel whole;
        whole.base = name, whole.lora.rank = 0;
        const std::string model = remote.create(whole);
        remote.download(model, folder.path);
        remote.unload(model);
      }
      Judge(remote, name, base.empty() ? folder.path : base, verdict).judge();
    } catch (const ConfigError& error) {
      verdict.unjudged.push_back(fmt::format("{}: {}", name, error.what()));
    }
  }
  return verdict;
}

std::string to_text(const ServerVerdict& verdict) {
  std::string text =
      verdict.passed()
          ? "PASS: adapters after cross_entropy, importance_sampling and ppo, and samplers, are those of one process\n"
      : !verdict.wrong.empty() ? "FAIL: the server computes something else than one process\n"
                               : "FAIL: not everything could be judged\n";
  for (const std::string& each : verdict.wrong) text += "  wrong: " + each + "\n";
  for (const std::string& each : verdict.unjudged) text += "  not judged: " + each + "\n";
  for (const std::string& each : verdict.compared) text += "  " + each + "\n";
  return text;
}

}  // namespace isograd::serve
