#include "serve/models/datums.hpp"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "base/refuse.hpp"

namespace isograd::serve {
namespace {

constexpr const char* kTargets = "target_tokens";
constexpr const char* kWeights = "weights";
constexpr const char* kMask = "sequence_ratio_mask";

// A loss by the name of the wire (docs/losses_reference.md has the formulas).
struct LossKind {
  const char* name;
  RowLoss loss;
  std::vector<std::string> inputs;  // all are needed
  std::vector<std::string> keys;
  RowLossOptions defaults{};
};

const std::vector<std::string> kPolicy = {kTargets, "logprobs", "advantages"},
                               kMasked = {kTargets, "logprobs", "advantages", kMask},
                               kThresholds = {"clip_low_threshold", "clip_high_threshold"};
const std::vector<LossKind> kLosses = {
    {"cross_entropy", RowLoss::kCrossEntropy, {kTargets, kWeights}, {}},
    {"importance_sampling", RowLoss::kImportanceSampling, kPolicy, {}},
    {"ppo", RowLoss::kPpo, kPolicy, kThresholds, {.clip_low = 0.8, .clip_high = 1.2}},
    {"cispo", RowLoss::kCispo, kPolicy, kThresholds, {.clip_low = 0, .clip_high = 4}},
    {"dro", RowLoss::kDro, kPolicy, {"beta"}},
    {"gspo", RowLoss::kGspo, kMasked, kThresholds, {.clip_low = 0.8, .clip_high = 1.2}},
};

std::string listed(const std::vector<std::string>& names) {
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

const LossKind& find_loss(const std::string& name) {
  std::vector<std::string> known;
  for (const LossKind& kind : kLosses) {
    if (kind.name == name) return kind;
    known.emplace_back(kind.name);
  }
  if (name == "stable_reinforce")
    refuse("loss_fn", "stable_reinforce, whose formula is not published", listed(known),
           "Pass loss_fn=importance_sampling, ppo, cispo or gspo");
  if (name == "custom")
    refuse("loss_fn", "custom, a loss that the server would run", listed(known),
           "Use forward_backward_custom, which runs it in the client");
  refuse("loss_fn", "'" + name + "'", "one of " + listed(known), "Pass one of these");
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

RowLossOptions options_of(const LossKind& kind, const std::map<std::string, ConfigValue>& config) {
  RowLossOptions options = kind.defaults;
  for (const auto& [key, value] : config) {
    const std::string where = fmt::format("loss_fn_config of {}: {}", kind.name, key);
    if (!has(kind.keys, key)) refuse(where, "an unknown key", listed(kind.keys), "Leave it out");
    const auto* number = std::get_if<double>(&value);
    if (!number || !std::isfinite(*number) || *number < 0)
      refuse(where, number ? fmt::format("{}", *number) : "'" + std::get<std::string>(value) + "'",
             "a finite number, 0 or more", "Change it");
    (key == "beta"                 ? options.beta
     : key == "clip_low_threshold" ? options.clip_low
                                   : options.clip_high) = *number;
  }
  if (kind.loss == RowLoss::kDro && !config.contains("beta"))
    refuse("loss_fn_config of dro", "no beta", "a beta: it has no agreed default",
           "Pass loss_fn_config={\"beta\": 0.05}");
  if (options.clip_low > options.clip_high)
    refuse(fmt::format("loss_fn_config of {}", kind.name),
           fmt::format("clip_low_threshold {} above clip_high_threshold {}", options.clip_low,
                       options.clip_high),
           "limits of the ratio, in ascending order", "Exchange them");
  return options;
}

double number_at(const Array& array, std::size_t i) {
  return array.numbers.empty() ? static_cast<double>(array.integers[i])
                               : static_cast<double>(array.numbers[i]);
}
std::size_t size_of(const Array& array) { return array.numbers.size() + array.integers.size(); }
std::string shape_text(const Array& array) { return fmt::format("[{}]", fmt::join(array.shape, ", ")); }

bool any(const Array& array) {
  for (std::size_t i = 0; i < size_of(array); ++i)
    if (number_at(array, i) != 0) return true;
  return false;
}

void check_datum(const Datum& datum, std::size_t place, const LossKind& kind, std::int64_t vocabulary,
                 std::int64_t context) {
  const auto where = [&](const std::string& input) { return fmt::format("datum {}: {}", place, input); };
  const auto check_tokens = [&](const std::string& name, const std::vector<std::int64_t>& tokens) {
    for (const std::int64_t token : tokens)
      if (token < 0 || token >= vocabulary)
        refuse(where(name), fmt::format("token {}", token),
               fmt::format("0 to {}, the vocabulary", vocabulary - 1),
               "Tokenize with this model's tokenizer");
  };
  const auto length = static_cast<std::int64_t>(datum.tokens.size());
  if (length == 0) refuse(where("model_input"), "no tokens", "one at least", "Leave the datum out");
  if (length > context)
    refuse(where("model_input"), fmt::format("{} tokens", length),
           fmt::format("at most {}, the context", context), "Shorten it");
  check_tokens("model_input", datum.tokens);
  for (const auto& [name, array] : datum.inputs)
    if (!has(kind.inputs, name))
      refuse(where(name), "an input that " + std::string(kind.name) + " does not have", listed(kind.inputs),
             "Leave it out");
  for (const std::string& name : kind.inputs)
    if (!datum.inputs.contains(name))
      refuse(where(name), "no such input", listed(kind.inputs), "Add it to loss_fn_inputs");

  const Array& targets = datum.inputs.at(kTargets);
  const bool entropy = kind.loss == RowLoss::kCrossEntropy, two = entropy && targets.shape.size() == 2;
  if (!targets.numbers.empty())
    refuse(where(kTargets), "floating-point numbers", "integers", "Pass int64 token ids");
  if ((targets.shape.size() != 1 && !two) || targets.shape[0] != length || (two && targets.shape[1] < 1))
    refuse(where(kTargets), shape_text(targets),
           fmt::format("[{0}]{1}: a row for each token", length,
                       entropy ? fmt::format(" or [{}, K]", length) : ""),
           "Shift targets by one in the client, and pass one for each token");
  if (two && targets.shape[1] > vocabulary)
    refuse(where(kTargets), shape_text(targets),
           fmt::format("at most {} targets of a token, the vocabulary", vocabulary), "Pass fewer");
  const std::int64_t elements = length * (two ? targets.shape[1] : 1);
  for (const auto& [name, array] : datum.inputs) {
    if (array.shape != targets.shape)
      refuse(where(name), shape_text(array), "the shape of target_tokens, " + shape_text(targets),
             "Reshape it");
    if (static_cast<std::int64_t>(size_of(array)) != elements)
      refuse(where(name), fmt::format("{} numbers", size_of(array)), fmt::format("{}, its shape's", elements),
             "Pass all of them");
  }
  check_tokens(kTargets, targets.integers);
  for (const auto& [name, array] : datum.inputs)
    for (const float number : array.numbers)
      if (!std::isfinite(number))
        refuse(where(name), fmt::format("{}", number), "finite numbers", "Look for where it was computed");
  if (kind.loss == RowLoss::kGspo && any(datum.inputs.at("advantages")) && !any(datum.inputs.at(kMask)))
    refuse(where(kMask), "zeros alone, and advantages other than 0", "a token over which the ratio is a mean",
           "Set it to 1 at sampled tokens");
}

void count(const Datum& datum, CheckedCall& call) {
  const std::size_t rows = datum.tokens.size();
  call.counted.sequences += 1;
  const auto found = datum.inputs.find(kWeights);
  if (found == datum.inputs.end()) {
    call.counted.tokens += static_cast<std::int64_t>(rows);
    call.counted.weights += static_cast<double>(rows);
    return;
  }
  const std::size_t columns = size_of(found->second) / rows;
  for (std::size_t row = 0; row < rows; ++row) {
    bool counts = false;
    for (std::size_t i = row * columns; i < (row + 1) * columns; ++i) {
      const double weight = number_at(found->second, i);
      counts = counts || weight != 0, call.counted.weights += weight;
      call.negative_weights = call.negative_weights || weight < 0;
    }
    call.counted.tokens += counts ? 1 : 0;
  }
}

RowLossInputs inputs_of(const ForwardBackward& request, const CheckedCall& call, const Batch& batch) {
  const at::Tensor positions = batch.positions.cpu().contiguous();
  const auto* position = positions.const_data_ptr<std::int64_t>();
  const auto first = std::ranges::find_if(batch.sample_ids, [](auto id) { return id != kPaddingSample; });
  const Datum& any = request.data[first == batch.sample_ids.end() ? 0 : static_cast<std::size_t>(*first)];
  std::vector<std::int64_t> shape = {batch.num_tokens()};
  if (const auto& of = any.inputs.at(kTargets).shape; of.size() == 2) shape.push_back(of[1]);
  const std::size_t columns = shape.size() == 2 ? static_cast<std::size_t>(shape[1]) : 1;
  const auto joined = [&](const char* name) {
    if (!any.inputs.contains(name)) return at::Tensor();
    std::vector<double> values;
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      const std::int64_t begin = batch.cu_seqlens[f], id = batch.sample_ids[f];
      const std::size_t cells = static_cast<std::size_t>(batch.cu_seqlens[f + 1] - begin) * columns;
      if (id == kPaddingSample || cells == 0) {
        values.resize(values.size() + cells, 0.0);
        continue;
      }
      const Array& array = request.data[static_cast<std::size_t>(id)].inputs.at(name);
      const std::size_t start = static_cast<std::size_t>(position[begin]) * columns;
      for (std::size_t i = start; i < start + cells; ++i) values.push_back(number_at(array, i));
    }
    return at::tensor(values, at::kDouble).view(shape);
  };
  return {.targets = joined(kTargets).to(at::kLong),
          .weights = joined(kWeights),
          .old_log_probabilities = joined("logprobs"),
          .advantages = joined("advantages"),
          .ratio_mask = joined(kMask),
          .cu_seqlens = call.loss == RowLoss::kGspo ? batch.cu_seqlens : std::vector<std::int64_t>()};
}

}  // namespace

Counted& Counted::operator+=(const Counted& more) {
  calls += more.calls, sequences += more.sequences, tokens += more.tokens, weights += more.weights;
  return *this;
}

CheckedCall check_call(const ForwardBackward& request, const DecoderConfig& model, std::int64_t context) {
  const LossKind& kind = find_loss(request.loss);
  if (request.data.empty()) refuse("forward_backward", "no datums", "one at least", "Leave the call out");
  CheckedCall call{.loss = kind.loss, .options = options_of(kind, request.config), .counted = {.calls = 1}};
  for (std::size_t i = 0; i < request.data.size(); ++i) {
    check_datum(request.data[i], i, kind, model.vocabulary, context);
    count(request.data[i], call);
  }
  return call;
}

std::vector<std::size_t> split_datums(const ForwardBackward& request, int parts) {
  std::size_t all = 0, before = 0;
  for (const Datum& datum : request.data) all += datum.tokens.size();
  std::vector<std::size_t> begins = {0};
  for (std::size_t i = 0; i < request.data.size(); ++i) {
    // A datum belongs to the part in which its middle lies.
    const std::size_t middle = before + request.data[i].tokens.size() / 2;
    while (begins.size() * all <= middle * static_cast<std::size_t>(parts)) begins.push_back(i);
    before += request.data[i].tokens.size();
  }
  begins.resize(static_cast<std::size_t>(parts), request.data.size());
  begins.push_back(request.data.size());
  return begins;
}

RowLossResult losses_of(const DecoderLM& model, const at::Tensor& hidden, const ForwardBackward& request,
                        const CheckedCall& call, const Batch& batch) {
  RowLossOptions options = call.options;
  options.shard = model.vocabulary();
  std::optional<LowRankUpdate> head;
  const Adapter* adapter = model.adapter();
  if (const LowRank* of_head = adapter ? adapter->find(0, Projection::kHead) : nullptr)
    head = LowRankUpdate{.a = of_head->a, .b = of_head->b, .scale = of_head->scale};
  return linear_row_loss(hidden, model.output_weight(), inputs_of(request, call, batch), call.loss, options,
                         head ? &*head : nullptr);
}

Array array_of(const at::Tensor& log_probabilities) {
  const at::Tensor flat = log_probabilities.detach().to(at::kCPU, at::kFloat).contiguous();
  const auto* from = flat.const_data_ptr<float>();
  return {.shape = flat.sizes().vec(), .numbers = {from, from + flat.numel()}};
}

MicroBatches pack(const ForwardBackward& request, const CheckedCall& call, std::int64_t most_tokens,
                  std::size_t first, std::size_t last) {
  MicroBatches all;
  last = std::min(last, request.data.size());
  for (std::size_t begin = first, end = first; begin < last; begin = end) {
    const auto& shape = request.data[begin].inputs.at(kTargets).shape;
    const auto columns = [](const std::vector<std::int64_t>& of) { return of.size() == 2 ? of[1] : -1; };
    std::int64_t rows = 0;
    for (end = begin; end < last; ++end) {
      const auto more = static_cast<std::int64_t>(request.data[end].tokens.size());
      if (end > begin && (rows + more > most_tokens ||
                          columns(request.data[end].inputs.at(kTargets).shape) != columns(shape)))
        break;
      rows += more;
    }
    Batch& packed = all.emplace_back();
    std::vector<std::int64_t> tokens, positions;
    for (std::size_t i = begin; i < end; ++i) {
      const auto& own = request.data[i].tokens;
      tokens.insert(tokens.end(), own.begin(), own.end());
      for (std::size_t p = 0; p < own.size(); ++p) positions.push_back(static_cast<std::int64_t>(p));
      packed.cu_seqlens.push_back(static_cast<std::int64_t>(tokens.size()));
      packed.sample_ids.push_back(static_cast<std::int64_t>(i));
      packed.sample_targets.push_back(static_cast<std::int64_t>(own.size()));
    }
    packed.tokens = at::tensor(tokens, at::kLong);
    packed.positions = at::tensor(positions, at::kLong);
    packed.targets = packed.tokens;  // the model's forward does not read them
  }
  return all;
}

}  // namespace isograd::serve
