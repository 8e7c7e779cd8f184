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
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "isograd/lora.hpp"
#include "isograd/model.hpp"
#include "model/safetensors.hpp"
#include "serve/verify/remote.hpp"
#include "verify/compare.hpp"

namespace isograd::serve {
namespace {

using Call = ForwardBackward;

constexpr std::uint64_t kSeed = 20261128;
constexpr double kExact = 1e-10;          // E1
constexpr double kTooCoarse = 1e-2;       // a matrix whose rounding alone is more proves nothing
constexpr double kShows = 10;             // bounds that a mistake must be away from what is right
constexpr double kExplains = 1e-2;        // of the error may be left, where a mistake is named
constexpr double kLogProbability = 1e-5;  // nats between sampler and trainer in fp32
constexpr double kCopies = 32;            // of the trained weights in fp64, at most, in this process

// isograd.normalise, and how its mistake is called; counts are in this order.
constexpr std::size_t kModes = 4, kTokens = 1, kWeights = 2;
constexpr std::array<std::pair<const char*, const char*>, kModes> kDivisors = {{
    {"none", "the sum is not divided"},
    {"tokens", "the sum is divided by its tokens"},
    {"weights", "the sum is divided by its weights"},
    {"sequences", "the sum is divided by its datums"},
}};

// ---- one process ----

// The sum of a datum's loss, of log-probabilities p: the published formulas.
at::Tensor loss_of(const Call& call, const Datum& datum, const at::Tensor& p) {
  const auto input = [&](const char* name) {
    return at::tensor(datum.inputs.at(name).numbers, at::kFloat).to(p.scalar_type()).view(p.sizes());
  };
  const auto key = [&](const char* name, double otherwise) {
    const auto found = call.config.find(name);
    return found == call.config.end() ? otherwise : std::get<double>(found->second);
  };
  if (call.loss == "cross_entropy") return -(input("weights") * p).sum();
  const at::Tensor apart = p - input("logprobs"), advantages = input("advantages");
  at::Tensor ratio = apart.exp();
  if (call.loss == "importance_sampling") return -(ratio * advantages).sum();
  if (call.loss == "dro") return -(p * advantages - apart.square() * (key("beta", 0) / 2)).sum();
  if (call.loss == "gspo")
    ratio = apart.masked_select(input("sequence_ratio_mask").ne(0)).mean().exp().detach() *
            (p - p.detach()).exp();
  const bool cispo = call.loss == "cispo";
  const at::Tensor clipped =
      ratio.clamp(key("clip_low_threshold", cispo ? 0 : 0.8), key("clip_high_threshold", cispo ? 4 : 1.2));
  if (cispo) return -(clipped.detach() * p * advantages).sum();
  return -at::min(ratio * advantages, clipped * advantages).sum();  // ppo, gspo
}

// The gradient of a sum over datums, and what is counted for each mode's divisor (0 for `none`).
struct Sum {
  Tensors gradient;
  std::array<double, kModes> counts{};
  void add(const Sum& more, double factor = 1) {
    if (gradient.empty())
      for (const at::Tensor& each : more.gradient) gradient.push_back(at::zeros_like(each));
    for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i].add_(more.gradient[i], factor);
    for (std::size_t i = 0; i < kModes; ++i) counts[i] += factor * more.counts[i];
  }
  double divisor(std::size_t mode) const { return mode == 0 ? 1 : counts[mode]; }
};

std::array<double, kModes> counts_of(const Datum& datum) {
  const auto found = datum.inputs.find("weights");
  const auto rows = static_cast<std::ptrdiff_t>(datum.tokens.size());
  if (found == datum.inputs.end()) return {0, static_cast<double>(rows), static_cast<double>(rows), 1};
  const std::vector<float>& weights = found->second.numbers;
  const std::ptrdiff_t columns = std::ssize(weights) / rows;
  double tokens = 0;
  for (auto row = weights.begin(); row != weights.end(); row += columns)
    tokens += std::any_of(row, row + columns, [](float w) { return w != 0; }) ? 1 : 0;
  return {0, tokens, std::accumulate(weights.begin(), weights.end(), 0.0), 1};
}

// A base, or an adapter over it, datum by datum.
class OneProcess {
 public:
  OneProcess(const fs::path& base, at::ScalarType dtype, bool whole)
      : dtype_(dtype), whole_(whole), model_(read_hf(base, dtype)) {
    for (const auto& [name, tensor] : model_->named()) at::Tensor(tensor).requires_grad_(whole);
  }
  ~OneProcess() { model_->set_adapter(nullptr); }
  OneProcess(const OneProcess&) = delete;
  OneProcess& operator=(const OneProcess&) = delete;

  const DecoderConfig& config() const { return model_->config(); }
  void take(const fs::path& trained) {
    if (whole_) {
      const at::NoGradGuard no_grad;
      const NamedTensors named = model_->named(), read = read_hf(trained, dtype_)->named();
      for (std::size_t i = 0; i < named.size(); ++i) {
        if (read.size() != named.size() || read[i].first != named[i].first ||
            read[i].second.sizes() != named[i].second.sizes())
          refuse("the server's whole weights",
                 "another model than the base has, from " + named[i].first + " on",
                 "the names and shapes of the base",
                 "Give --base the directory that the server reads, or leave it out");
        at::Tensor(named[i].second).copy_(read[i].second);
      }
    } else {
      adapter_ = read_peft(trained, config(), dtype_);
      model_->set_adapter(adapter_.get());
    }
  }
  NamedTensors named() const { return whole_ ? model_->named() : adapter_->named(); }
  Tensors weights() const {
    Tensors all;
    for (const auto& [name, tensor] : named()) all.push_back(tensor.detach().clone());
    return all;
  }
  // `targets`: [T] or [T, K].
  at::Tensor log_probabilities(const std::vector<std::int64_t>& tokens, const Array& targets) {
    const auto length = static_cast<std::int64_t>(tokens.size());
    Batch batch;
    batch.tokens = batch.targets = at::tensor(tokens, at::kLong);  // no target is read
    batch.positions = at::arange(length, at::kLong), batch.cu_seqlens = {0, length};
    batch.sample_ids = {0}, batch.sample_targets = {length};
    const at::Tensor hidden = model_->hidden(batch);
    at::Tensor logits = hidden.matmul(model_->output_weight().t());
    if (const LowRank* head = whole_ ? nullptr : adapter_->find(0, Projection::kHead))
      logits = logits + hidden.matmul(head->a.t()).matmul(head->b.t()) * head->scale;
    return logits.log_softmax(-1)
        .gather(1, at::tensor(targets.integers, at::kLong).view({length, -1}))
        .view(targets.shape);
  }
  // `by_weight`: each datum's gradient divided by the sum of its weights is added to it.
  Sum sum_of(const Call& call, Sum* by_weight = nullptr) {
    const at::AutoGradMode gradients(true);
    Sum sum;
    for (const Datum& datum : call.data) {
      loss_of(call, datum, log_probabilities(datum.tokens, datum.inputs.at("target_tokens"))).backward();
      Sum one{.gradient = {}, .counts = counts_of(datum)};
      for (const auto& [name, tensor] : named()) {
        at::Tensor leaf = tensor;
        one.gradient.push_back(leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf).detach());
        leaf.mutable_grad() = at::Tensor();
      }
      if (by_weight) by_weight->add(one, 1 / one.counts[kWeights]);
      sum.add(one);
    }
    return sum;
  }

 private:
  at::ScalarType dtype_;
  bool whole_;
  std::shared_ptr<DecoderLM> model_;
  std::shared_ptr<LoraAdapter> adapter_;
};

// The numbers that a call returns.
struct Returned {
  Tensors log_probabilities{};  // by datum, in fp64
  double loss = 0;
  double slope = 0;  // Σ |∂ loss / ∂ log-probability|: how far errors of these move it
};
Returned returned_by(OneProcess& process, const Call& call) {
  Returned all;
  for (const Datum& datum : call.data) {
    const at::AutoGradMode no_gradients(false);
    const at::Tensor p =
        process.log_probabilities(datum.tokens, datum.inputs.at("target_tokens")).to(at::kDouble);
    const at::AutoGradMode gradients(true);
    const at::Tensor leaf = p.detach().requires_grad_(true), loss = loss_of(call, datum, leaf);
    loss.backward();
    all.loss += loss.item<double>(), all.slope += leaf.grad().abs().sum().item<double>();
    all.log_probabilities.push_back(p);
  }
  return all;
}

double furthest(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

// A number that the server returned, that of one process, and those of mistakes by their names.
struct Figure {
  std::string kind, of;
  std::optional<double> found;
  double right = 0, bound = 0;
  std::vector<std::pair<std::string, double>> mistaken{};
};
std::optional<double> number_in(const Metrics& metrics, const std::string& name) {
  const auto found = metrics.find(name);
  return found == metrics.end() ? std::nullopt : std::optional(found->second);
}

// ---- what mistakes would make of the sums of calls ----

// A mistake in the calls of a loss: in the numbers of an input, by their column; without an input it is
// computed as ppo.
struct Change {
  const char *mistake, *loss, *input = nullptr;
  float (*of)(float number, std::size_t column) = nullptr;
};
constexpr Change kChanges[] = {
    {"negative weights are dropped", "cross_entropy", "weights",
     [](float w, std::size_t) { return std::max(w, 0.F); }},
    {"weights are taken for a mask", "cross_entropy", "weights",
     [](float w, std::size_t) { return w != 0 ? 1.F : 0; }},
    {"all targets of a token but the first are dropped", "cross_entropy", "weights",
     [](float w, std::size_t column) { return column == 0 ? w : 0; }},
    {"sequence_ratio_mask is ignored", "gspo", "sequence_ratio_mask", [](float, std::size_t) { return 1.F; }},
    {"cispo is computed as ppo", "cispo"},
    {"gspo is computed as ppo", "gspo"},
};

// False: nothing changes.
bool change(Call& call, const Change& how) {
  if (call.loss != how.loss) return false;
  if (!how.input) return call.loss = "ppo", true;
  bool changed = false;
  for (Datum& datum : call.data) {
    std::vector<float>& numbers = datum.inputs.at(how.input).numbers;
    const std::size_t columns = numbers.size() / datum.tokens.size();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const float before = std::exchange(numbers[i], how.of(numbers[i], i % columns));
      changed |= numbers[i] != before;
    }
  }
  return changed;
}

// Sums of calls, each times a factor.
using Parts = std::vector<std::pair<std::shared_ptr<const Sum>, double>>;
Sum total(const Parts& parts) {
  Sum sum;
  for (const auto& [part, factor] : parts) sum.add(*part, factor);
  return sum;
}
double divisor_of(const Parts& parts, std::size_t mode) {
  double divisor = mode == 0 ? 1 : 0;
  for (const auto& [part, factor] : parts) divisor += factor * part->counts[mode];
  return divisor;
}

// The sum that a right server makes, and those of others by the name of their mistake. `foreign`: a call of
// another model.
std::pair<Sum, std::map<std::string, Parts>> sums_of(OneProcess& process, const std::vector<Call>& calls,
                                                     const std::optional<Call>& foreign) {
  Parts right;
  const auto by_weight = std::make_shared<Sum>();
  for (const Call& call : calls)
    right.emplace_back(std::make_shared<Sum>(process.sum_of(call, by_weight.get())), 1);
  std::map<std::string, Parts> found = {
      {"each datum's gradient is divided by the sum of its weights", {{by_weight, 1}}}};
  if (foreign)
    found.try_emplace("a call of another model is added", right)
        .first->second.emplace_back(std::make_shared<Sum>(process.sum_of(*foreign)), 1);
  const auto part = [&](const std::string& mistake, std::size_t i) -> Parts::value_type& {
    return found.try_emplace(mistake, right).first->second[i];
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    double rows = 0;
    for (const Datum& datum : call.data) rows += static_cast<double>(datum.tokens.size());
    part("each call's gradient is divided by its rows", i).second = 1 / rows;
    part("each call's gradient is divided by its datums", i).second =
        1 / static_cast<double>(call.data.size());
    const std::string name = fmt::format("call {} ({}) of a step", i + 1, call.loss);
    part(name + " is added twice", i).second = 2;
    part(name + " is lost", i).second = 0;
    const auto computed_otherwise = [&](const std::string& mistake, const Call& other) {
      part(mistake, i).first = std::make_shared<Sum>(process.sum_of(other));
    };
    for (const Change& how : kChanges)
      if (Call other = call; change(other, how)) computed_otherwise(how.mistake, other);
    if (Call other = call; !std::exchange(other.config, {}).empty())
      computed_otherwise(fmt::format("loss_fn_config of {} is ignored", call.loss), other);
  }
  return {total(right), std::move(found)};
}

// ---- AdamW, as torch.optim has it ----

struct Step {
  Tensors gradient;  // divided and clipped
  AdamParams params;
};

// A sum over its denominator, clipped; or clipped before it is divided.
Tensors prepared(const Sum& sum, double denominator, double limit, bool clips_first = false) {
  const double norm = norm_of(sum.gradient) / (clips_first ? 1 : denominator);
  const double factor = (limit > 0 ? std::min(1.0, limit / (norm + 1e-6)) : 1) / denominator;
  Tensors all;
  for (const at::Tensor& each : sum.gradient) all.push_back(each * factor);
  return all;
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
  // With `columns` targets a token.
  Datum datum(std::int64_t length, std::int64_t columns = 1) {
    Datum made{.tokens = tokens(length), .inputs = {}};
    std::vector<std::int64_t> shape = {length};
    if (columns > 1) shape.push_back(columns);
    made.inputs["target_tokens"] = {.shape = shape, .numbers = {}, .integers = tokens(length * columns)};
    return made;
  }

 private:
  std::mt19937_64 random_{kSeed};
  std::int64_t vocabulary_;
};

void give(Datum& datum, const char* name, const std::vector<double>& values) {
  datum.inputs[name] = {.shape = datum.inputs.at("target_tokens").shape,
                        .numbers = {values.begin(), values.end()},
                        .integers = {}};
}

// Weights that are fractions, and where `is_signed` one in three is negative: their sum stays away from 0.
Datum supervised(Draws& draws, std::int64_t length, bool is_signed, std::int64_t columns = 1) {
  Datum datum = draws.datum(length, columns);
  std::vector<double> weights;
  for (std::int64_t i = 0; i < length * columns; ++i)
    weights.push_back((is_signed && i % 3 == 2 ? -1 : 1) * draws.number(0.6, 1.4));
  if (!is_signed && length > 1) weights[0] = 0;  // a prompt
  give(datum, "weights", weights);
  return datum;
}

// Ratios are well inside of the clip's limits or well outside, so that rounding moves none over them.
// `shift`: of a whole sequence, whose first token and every third one after it are outside of its mask.
Datum sampled(Draws& draws, OneProcess& process, std::int64_t length, std::optional<double> shift = {}) {
  Datum datum = draws.datum(length);
  const at::Tensor p = process.log_probabilities(datum.tokens, datum.inputs["target_tokens"]);
  std::vector<double> old, advantages, mask;
  for (std::int64_t i = 0; i < length; ++i) {
    mask.push_back(i % 3 == 0 ? 0 : 1);
    const double away = shift        ? *shift + draws.number(-0.05, 0.05) + 1 - mask.back()
                        : i % 2 == 0 ? draws.number(-0.1, 0.1)
                                     : draws.number(0.4, 0.8) * (i % 4 == 1 ? 1 : -1);
    old.push_back(p[i].item<double>() + away);
    advantages.push_back(draws.number(0.3, 1) * (i % 3 == 1 ? -1 : 1));
  }
  give(datum, "logprobs", old), give(datum, "advantages", advantages);
  if (shift) give(datum, "sequence_ratio_mask", mask);
  return datum;
}

// All losses but those that are left out.
std::vector<Call> calls_of(Draws& draws, OneProcess& process, bool is_signed,
                           const std::set<std::string>& left_out) {
  const at::NoGradGuard no_grad;
  const auto one = [&](std::int64_t length, std::optional<double> shift = {}) {
    return sampled(draws, process, length, shift);
  };
  std::vector<Call> calls = {
      {{supervised(draws, 3, false), supervised(draws, 20, false)}, "cross_entropy", {}},
      {{supervised(draws, 9, is_signed), supervised(draws, 1, is_signed), supervised(draws, 4, is_signed, 3)},
       "cross_entropy",
       {}},
      {{one(12), one(4)}, "importance_sampling", {}},
      {{one(7), one(15)}, "ppo", {}},
      {{one(8), one(3)}, "cispo", {{"clip_low_threshold", 0.75}, {"clip_high_threshold", 1.3}}},
      {{one(6), one(1)}, "dro", {{"beta", 0.3}}},
      // These are inside of both these limits and the default ones, between them, and outside of both.
      {{one(5, 0), one(8, 0.55), one(4, -0.55), one(6, 1.2)},
       "gspo",
       {{"clip_low_threshold", 0.4}, {"clip_high_threshold", 2.2}}},
  };
  std::erase_if(calls, [&](const Call& call) { return left_out.contains(call.loss); });
  return calls;
}

// ---- the judgement ----

double root_mean_square(const Tensors& tensors) {
  double elements = 0;
  for (const at::Tensor& each : tensors) elements += static_cast<double>(each.numel());
  return norm_of(tensors) / std::sqrt(elements);
}

struct RefusedLoss {
  std::string loss, why;
};

// Judges one model.
class Judge {
 public:
  Judge(Remote& remote, std::string base, const fs::path& directory, const JudgedModel& kind,
        const std::set<std::string>& left_out, ServerVerdict& verdict)
      : remote_(remote),
        base_(std::move(base)),
        directory_(directory),
        kind_(kind),
        mode_(static_cast<std::size_t>(
            std::ranges::find(kDivisors, kind.normalise, [](const auto& each) { return each.first; }) -
            kDivisors.begin())),
        where_(fmt::format("{}, rank {}, isograd.normalise = {}", base_, kind.rank, kind.normalise)),
        left_out_(left_out),
        verdict_(verdict),
        exact_(directory, at::kDouble, kind.rank == 0) {}
  ~Judge() {  // after a failure, too: the next model may need the room
    try {
      unload();
    } catch (const std::exception&) {  // the end of the session closes them
    }
  }
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  void judge() {
    Draws draws(exact_.config().vocabulary);
    CreateModel request;
    request.base = base_, request.lora.rank = kind_.rank, request.lora.seed = 7,
    request.metadata = {{"isograd.normalise", kind_.normalise}};
    model_ = remote_.create(request);
    request.lora.rank = std::max<std::int64_t>(kind_.rank, 1), request.lora.seed = 8;
    std::string alone;  // why there is no second model
    try {
      neighbour_ = remote_.create(request);
    } catch (const ConfigError& error) {
      alone = error.what();
    }
    take_trained();
    const std::vector<std::int64_t> prompt = draws.tokens(12);
    if (!judge_step(draws, true)) return;
    const std::string older = remote_.sampler_of(model_);
    const at::Tensor stale = prompt_values(exact_, prompt);
    judge_step(draws, false);
    judge_sampler(prompt, stale, older);
    unload();
    if (!alone.empty())
      verdict_.unjudged.push_back(
          fmt::format("{}: whether a call of another model is added: this needs two models at a time: {}",
                      where_, alone));
    for (const std::string& mistake : mistakes_)
      if (!shown_.contains(mistake))
        verdict_.unjudged.push_back(fmt::format("{}: whether {}; it would not have shown", where_, mistake));
  }

 private:
  void unload() {
    for (std::string* const model : {&model_, &neighbour_})
      if (!model->empty()) remote_.unload(std::exchange(*model, ""));
  }

  // The weights as the server has them now.
  void take_trained() {
    const TemporaryFolder trained;
    remote_.download(model_, trained.path());
    std::set<at::ScalarType> types;
    for (const auto& file : fs::directory_iterator(trained.path()))
      if (file.path().extension() == ".safetensors")
        for (const auto& [name, tensor] : read_safetensors(file.path())) types.insert(tensor.scalar_type());
    in_fp32_ = types == std::set{at::kFloat};
    if (!in_fp32_ && types != std::set{at::kDouble})
      refuse(base_,
             types.empty() ? "no trained weights"
                           : fmt::format("trained weights in {}{}", c10::toString(*types.begin()),
                                         types.size() > 1 ? " and other types" : ""),
             "float32 or float64 alone: the rounding of others hides mistakes",
             "Start the server with --dtype float32 or float64");
    exact_.take(trained.path());
    if (kind_.rank > 0) check_adapter();
    if (in_fp32_ && !rounded_) rounded_.emplace(directory_, at::kFloat, kind_.rank == 0);
    if (rounded_) rounded_->take(trained.path());
  }

  // An adapter of less than was asked for would leave the rest unjudged.
  void check_adapter() const {
    std::map<std::string, at::Tensor> found;
    for (const auto& [name, tensor] : exact_.named()) found[name] = tensor;
    const auto asked = LoraAdapter::without_values(exact_.config(), {.rank = kind_.rank}, at::kFloat);
    for (const auto& [name, tensor] : asked->named())
      if (const auto at = found.find(name); at == found.end() || at->second.sizes() != tensor.sizes())
        refuse(base_, at == found.end() ? "an adapter without " + name : "another shape of " + name,
               fmt::format("rank {} of attention, mlp and unembed, as was asked", kind_.rank),
               "Look at the server");
    if (found.size() != asked->named().size())
      refuse(base_, fmt::format("an adapter of {} matrices", found.size()),
             fmt::format("{}, as was asked", asked->named().size()), "Look at the server");
  }

  // False: what follows would only repeat that it is wrong.
  bool judge_step(Draws& draws, bool first) {
    const std::vector<Call> calls = calls_of(draws, exact_, mode_ != kWeights, left_out_);
    if (calls.empty()) refuse(base_, "a server that takes none of the losses", "one", "Look at its log");
    std::optional<Call> foreign;
    if (!neighbour_.empty() && !left_out_.contains("cross_entropy"))
      foreign = {{supervised(draws, 6, mode_ != kWeights)}, "cross_entropy", {}};
    const auto [right, parts] = sums_of(exact_, calls, foreign);
    const Tensors mean = prepared(right, right.divisor(mode_), /*limit=*/0);
    // The first step is of plain SGD's kind: epsilon is far above most elements of the gradient.
    AdamParams params{.learning_rate = 0.25, .beta1 = 0.9, .beta2 = 0.95};
    params.epsilon = 64 * root_mean_square(mean);
    if (!first) {
      params = {.learning_rate = 5e-3, .beta1 = 0.8, .beta2 = 0.9};
      params.weight_decay = 0.5, params.clip = 0.5 * norm_of(mean);
      params.epsilon = 0.5 * root_mean_square(mean);
    }
    std::vector<Figure> figures;
    for (std::size_t i = 0; i < calls.size(); ++i) try {
        add_figures(calls[i], i + 1, remote_.forward_backward(model_, calls[i]), figures);
      } catch (const ConfigError& error) {
        throw RefusedLoss{calls[i].loss, error.what()};
      }
    if (foreign) remote_.forward_backward(neighbour_, *foreign);
    const Metrics metrics = remote_.optim_step(model_, params);

    const at::NoGradGuard no_grad;
    const Tensors initial = exact_.weights();
    const auto predicted = [&](const Tensors& gradient,
                               const std::function<void(AdamParams&)>& changed = {}) {
      std::vector<Step> steps = steps_;
      steps.push_back({gradient, params});
      if (changed)
        for (Step& step : steps) changed(step.params);
      return stepped(initial, steps);
    };
    const Tensors gradient = prepared(right, right.divisor(mode_), params.clip);
    const Tensors expected = predicted(gradient);

    // One at a time: they are of the size of the model.
    std::vector<std::pair<std::string, std::function<Tensors()>>> mistaken;
    for (const auto& [name, made] : parts)
      for (const double divisor : std::set{right.divisor(mode_), divisor_of(made, mode_)})
        mistaken.emplace_back(name, [&, sums = &made, divisor] {
          return predicted(prepared(total(*sums), divisor, params.clip));
        });
    const auto divided_by = [&](double divisor, bool clips_first = false) {
      return
          [&, divisor, clips_first] { return predicted(prepared(right, divisor, params.clip, clips_first)); };
    };
    for (std::size_t mode = 0; mode < kModes; ++mode)
      if (right.divisor(mode) != right.divisor(mode_))
        mistaken.emplace_back(kDivisors[mode].second, divided_by(right.divisor(mode)));
    const auto ignored = [&](const char* name, auto field, std::vector<double> values) {
      for (const double value : values)
        mistaken.emplace_back(fmt::format("{} is ignored", name), [&, field, value] {
          return predicted(gradient, [&](AdamParams& p) { p.*field = value; });
        });
    };
    ignored("eps", &AdamParams::epsilon, {1e-12, 1e-8});
    if (!first) {
      ignored("beta1", &AdamParams::beta1, {0.9});
      ignored("beta2", &AdamParams::beta2, {0.95, 0.999});
      ignored("weight_decay", &AdamParams::weight_decay, {0, 0.01});
      mistaken.emplace_back("grad_clip_norm is ignored", [&] { return predicted(mean); });
      if (mode_ > 0)
        mistaken.emplace_back("the sum is clipped before it is divided",
                              divided_by(right.divisor(mode_), true));
      if (kind_.rank == 0)
        mistaken.emplace_back("norms and biases do not decay", [&] {
          Tensors after = predicted(gradient);
          for (std::size_t i = 0; i < after.size(); ++i)
            if (after[i].dim() == 1) after[i] += initial[i] * (params.learning_rate * params.weight_decay);
          return after;
        });
    }

    Tensors moved;
    for (std::size_t i = 0; i < initial.size(); ++i) moved.push_back(expected[i] - initial[i]);
    const std::vector<double> scales = error_scales(moved);
    std::vector<double> bounds(scales.size(), kExact);
    const double norm = norm_of(mean);
    double norm_bound = kExact * norm;
    if (in_fp32_) {
      const double alone = bound_by_rounding(calls, params, expected, scales, bounds);
      norm_bound = std::max(bounds_for(at::kFloat, 1, std::ssize(calls)).figures * norm,
                            kRoundingFactor * std::abs(alone - norm));
    }
    take_trained();
    const bool is_right = conclude(first, initial, expected, mistaken, scales, bounds);
    steps_.push_back({gradient, params});
    if (!is_right) return false;
    const double divisor = right.divisor(mode_), clip = params.clip;
    const auto add = [&](const char* name, double value, double bound,
                         std::vector<std::pair<std::string, double>> wrong = {}) {
      figures.push_back({name, " of the step", number_in(metrics, name), value, bound, std::move(wrong)});
    };
    add("grad_norm", norm, norm_bound,
        {{"grad_norm is that of the sum", norm * divisor},
         {"grad_norm is that after the clip", clip > 0 ? std::min(norm, clip) : norm}});
    add("grad_norm_sum", norm * divisor, norm_bound * divisor);
    add("denominator", divisor, kExact * divisor);
    add("tokens", right.counts[kTokens], 0);
    add("step", first ? 1 : 2, 0);
    return judge_returned(fmt::format("{}, step {}", where_, first ? 1 : 2), figures);
  }

  // Adds the numbers that forward_backward returned of a call; this process has the weights that it saw.
  void add_figures(const Call& call, std::size_t place, const ForwardBackwardResult& answer,
                   std::vector<Figure>& figures) {
    const Returned right = returned_by(exact_, call);
    const Returned alone = in_fp32_ ? returned_by(*rounded_, call) : right;
    const std::vector<Array>& arrays = answer.log_probabilities;
    double largest = 0, rounding = 0, rows = 0;
    bool fits = arrays.size() == call.data.size();
    double error = 0;
    for (std::size_t i = 0; i < call.data.size(); ++i) {
      const at::Tensor& p = right.log_probabilities[i];
      largest = std::max(largest, p.abs().max().item<double>());
      rounding = std::max(rounding, furthest(alone.log_probabilities[i], p));
      rows += static_cast<double>(call.data[i].tokens.size());
      fits = fits && p.sizes() == at::IntArrayRef(arrays[i].shape);
      if (!fits) continue;
      const double one = furthest(at::tensor(arrays[i].numbers).to(at::kDouble).view(p.sizes()), p);
      if (!std::isnan(error) && !(one <= error)) error = one;
    }
    if (!fits) error = std::numeric_limits<double>::infinity();
    const double allowed =
        in_fp32_ ? std::max(kLogProbability, kRoundingFactor * rounding) : kExact * largest;
    const std::string of = fmt::format(" of call {} ({})", place, call.loss);
    figures.push_back({fits ? "the error of log-probabilities"
                            : "the error of log-probabilities, which are in another shape than the targets,",
                       of, error, 0, allowed + last_place(largest)});
    // 1 + |p|: a ratio whose derivative is not taken (cispo's) depends on log-probabilities, too.
    figures.push_back({"loss:sum",
                       of,
                       number_in(answer.metrics, "loss:sum"),
                       right.loss,
                       allowed * (1 + largest) * right.slope + kExact * std::abs(right.loss),
                       {{"the loss of a call is divided by its rows", right.loss / rows},
                        {"the loss of a call is divided by its datums",
                         right.loss * (1 / static_cast<double>(call.data.size()))}}});
  }
  // A log-probability in a reply has fp32.
  static double last_place(double largest) { return std::ldexp(largest, -23); }

  // True: nothing is wrong, or missing.
  bool judge_returned(const std::string& where, const std::vector<Figure>& figures) {
    double most = -1;
    std::string closest;
    std::set<std::string> off;  // kinds: one mistake is in all calls
    for (const auto& [kind, of, found, right, bound, mistaken] : figures) {
      for (const auto& [mistake, value] : mistaken) {
        if (value == right) continue;
        mistakes_.insert(mistake);
        if (std::abs(value - right) >= kShows * bound) shown_.insert(mistake);
      }
      if (!found) {
        if (off.insert(kind).second)
          verdict_.unjudged.push_back(fmt::format("{}: {}{}, which is not returned", where, kind, of));
        continue;
      }
      const double error = std::abs(*found - right);
      const double in_bounds = error == 0 ? 0 : error / bound;
      if (!std::isnan(most) && !(in_bounds <= most)) {
        most = in_bounds;
        closest = fmt::format("{}, returned: {}{} is furthest, off by {:.1e}; allowed: {:.1e}", where, kind,
                              of, error, bound);
      }
      if (error <= bound || !off.insert(kind).second) continue;
      std::string what = fmt::format("{}{} is {:.9g}, in one process {:.9g}", kind, of, *found, right);
      for (const auto& [mistake, value] : mistaken)
        if (std::abs(*found - value) <= std::max(bound, kExplains * error)) what = mistake;
      verdict_.wrong.push_back(where + ": " + what);
    }
    verdict_.compared.push_back(closest);
    return off.empty();
  }

  // Four times what rounding does to one process, and the last rounding. Returns the norm that it has.
  double bound_by_rounding(const std::vector<Call>& calls, const AdamParams& params, const Tensors& expected,
                           const std::vector<double>& scales, std::vector<double>& bounds) {
    Sum sum;
    for (const Call& call : calls) sum.add(rounded_->sum_of(call));
    rounded_steps_.push_back({prepared(sum, sum.divisor(mode_), params.clip), params});
    const Tensors alone = stepped(rounded_->weights(), rounded_steps_);
    for (std::size_t i = 0; i < bounds.size(); ++i) {
      bounds[i] = bounds_for(at::kFloat, 1, std::ssize(calls))
                      .rounded(distance(alone[i].to(at::kDouble), expected[i]) / scales[i]);
      if (!(bounds[i] <= kTooCoarse))
        refuse(exact_.named()[i].first, fmt::format("rounding of {:.1e} in one process", bounds[i]),
               fmt::format("at most {}", kTooCoarse), "Start the server with --dtype float64");
    }
    return norm_of(prepared(sum, sum.divisor(mode_), /*limit=*/0));
  }

  // True: nothing is wrong.
  bool conclude(bool first, const Tensors& initial, const Tensors& expected,
                const std::vector<std::pair<std::string, std::function<Tensors()>>>& mistaken,
                const std::vector<double>& scales, const std::vector<double>& bounds) {
    const Tensors found = exact_.weights();
    const NamedTensors named = exact_.named();
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
    const Apart error = apart(found, expected);
    std::string best;
    double least = kExplains * error.bounds;
    const auto consider = [&](const std::string& mistake, const Tensors& made) {
      if (const double left = apart(found, made).bounds; left < least) best = mistake, least = left;
    };
    for (const auto& [mistake, make] : mistaken) {
      const Tensors made = make();
      mistakes_.insert(mistake);
      if (apart(made, expected).bounds >= kShows) shown_.insert(mistake);
      consider(mistake, made);
    }
    Tensors some = expected;
    std::string unmoved;
    for (std::size_t i = 0; i < found.size(); ++i)
      if (found[i].equal(initial[i])) some[i] = initial[i], unmoved += " " + named[i].first;
    if (!unmoved.empty()) consider("these are not trained:" + unmoved, some);
    const std::string where = fmt::format("{}, step {}", where_, first ? 1 : 2);
    verdict_.compared.push_back(fmt::format("{}: {} is furthest, by {:.1e} of its change; allowed: {:.1e}",
                                            where, named[error.matrix].first, error.scales,
                                            bounds[error.matrix]));
    if (error.bounds <= 1) return true;
    // In fp32 a near tie of experts may go the other way.
    const bool may_be_a_tie = best.empty() && in_fp32_ && exact_.config().experts.count > 0;
    if (best.empty()) best = "another gradient or update than one process has";
    if (may_be_a_tie) best += ", or a near tie of experts: start it with --dtype float64";
    (may_be_a_tie ? verdict_.unjudged : verdict_.wrong).push_back(fmt::format("{}: {}", where, best));
    return false;
  }

  // log p of each token but the first, given those before it.
  at::Tensor prompt_values(OneProcess& process, const std::vector<std::int64_t>& prompt) {
    const at::NoGradGuard no_grad;
    const std::vector<std::int64_t> later{prompt.begin() + 1, prompt.end()};
    return process
        .log_probabilities({prompt.begin(), prompt.end() - 1},
                           {.shape = {std::ssize(later)}, .numbers = {}, .integers = later})
        .to(at::kDouble);
  }

  void judge_sampler(const std::vector<std::int64_t>& prompt, const at::Tensor& stale,
                     const std::string& older) {
    const at::Tensor expected = prompt_values(exact_, prompt);
    double bound = last_place(expected.abs().max().item<double>());
    if (in_fp32_)  // a server in fp32 computes in it, too
      bound +=
          std::max(kLogProbability, kRoundingFactor * furthest(prompt_values(*rounded_, prompt), expected));
    for (const auto& [sampler, right, other, mistake] :
         {std::tuple(remote_.sampler_of(model_), expected, stale, "the sampler has older weights"),
          {older, stale, expected, "an older sampler has newer weights"}}) {
      mistakes_.insert(mistake);
      if (furthest(right, other) >= kShows * bound) shown_.insert(mistake);
      const std::vector<float> values = remote_.log_probabilities(sampler, prompt);
      const at::Tensor found = at::tensor(std::vector<double>(values.begin() + 1, values.end()), at::kDouble);
      const double error = furthest(found, right);
      verdict_.compared.push_back(fmt::format(
          "{}, sampler: log-probabilities are off by {:.1e}; allowed: {:.1e}", where_, error, bound));
      if (error <= bound) continue;
      verdict_.wrong.push_back(fmt::format(
          "{}, sampler: {}", where_,
          furthest(found, other) <= bound ? mistake : "other log-probabilities than one process has"));
    }
  }

  Remote& remote_;
  const std::string base_;
  const fs::path directory_;
  const JudgedModel kind_;
  const std::size_t mode_;
  const std::string where_;
  const std::set<std::string>& left_out_;
  ServerVerdict& verdict_;
  OneProcess exact_;
  std::optional<OneProcess> rounded_{};  // in fp32, for a server that computes in it
  bool in_fp32_ = false;
  std::string model_{}, neighbour_{};
  std::vector<Step> steps_{}, rounded_steps_{};
  std::set<std::string> mistakes_{}, shown_{};  // that are looked for; that would have been seen
};

// The server's reply would be as it is, but this process would end without a word.
void check_memory(const fs::path& base) {
  double bytes = 0;
  for (const auto& [name, tensor] : DecoderLM::without_values(read_hf_config(base), at::kDouble)->named())
    bytes += kCopies * static_cast<double>(tensor.nbytes());
  const double memory =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  if (bytes > memory)
    refuse("whole weights", fmt::format("{:.1f} GB to judge them", bytes / 1e9),
           fmt::format("at most this machine's {:.1f} GB", memory / 1e9),
           "Give --adapters to leave them out");
}

}  // namespace

std::vector<JudgedModel> judged_models(bool adapters_alone) {
  constexpr std::int64_t kRank = 4;
  std::vector<JudgedModel> models;
  for (const auto& [normalise, mistake] : kDivisors) models.push_back({kRank, normalise});
  if (!adapters_alone) models.push_back({0, "tokens"});
  return models;
}

ServerVerdict verify_server(const std::string& url, const std::string& key, const fs::path& base,
                            const std::vector<JudgedModel>& models) {
  Remote remote(url, key);
  ServerVerdict verdict;
  const std::vector<std::string> names = remote.bases();
  if (names.empty()) verdict.unjudged.push_back("it serves no model");
  for (const std::string& name : names) {
    const auto attempt = [&](const std::string& where, const std::function<void()>& work) {
      try {
        work();
      } catch (const ConfigError& error) {
        verdict.unjudged.push_back(where + ": " + error.what());
      }
    };
    attempt(name, [&] {
      if (!base.empty() && name != names[0])
        refuse(name, "a directory of the first base alone", "the server's other bases, too",
               "Leave the directory out: they are downloaded");
      const TemporaryFolder folder;
      if (base.empty()) {
        CreateModel whole;
        whole.base = name, whole.lora.rank = 0;
        const std::string model = remote.create(whole);
        remote.download(model, folder.path());
        remote.unload(model);
      }
      const fs::path directory = base.empty() ? folder.path() : base;
      std::set<std::string> left_out;
      for (const JudgedModel& kind : models)
        attempt(fmt::format("{}, rank {}, isograd.normalise = {}", name, kind.rank, kind.normalise), [&] {
          if (kind.rank == 0) check_memory(directory);
          for (bool again = true; std::exchange(again, false);) try {
              Judge(remote, name, directory, kind, left_out, verdict).judge();
            } catch (const RefusedLoss& refused) {  // which fails the model: the others are judged without it
              verdict.unjudged.push_back(fmt::format(
                  "{}, rank {}, isograd.normalise = {}: {}, which the models after it are judged without: {}",
                  name, kind.rank, kind.normalise, refused.loss, refused.why));
              again = left_out.insert(refused.loss).second;
            }
        });
    });
  }
  return verdict;
}

std::string to_text(const ServerVerdict& verdict) {
  std::string text = verdict.passed()
                         ? "PASS: trained weights, samplers and what calls return are those of one process\n"
                     : !verdict.wrong.empty() ? "FAIL: the server computes something else than one process\n"
                                              : "FAIL: not everything could be judged\n";
  for (const std::string& each : verdict.wrong) text += "  wrong: " + each + "\n";
  for (const std::string& each : verdict.unjudged) text += "  not judged: " + each + "\n";
  for (const std::string& each : verdict.compared) text += "  " + each + "\n";
  return text;
}

}  // namespace isograd::serve
