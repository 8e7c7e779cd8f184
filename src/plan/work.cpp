// The products, operators and bytes of a rank for one micro-batch, as isograd's decoder does it, and how fast
// a device is.
#include <algorithm>
#include <cmath>

#include "plan/time.hpp"

namespace isograd::planner {
namespace {

// A rank's tokens of a micro-batch.
std::int64_t tokens_of(const Problem& problem, const Candidate& candidate) {
  return candidate.micro_batch * problem.work.sequence /
         (std::int64_t{candidate.cp_ring} * candidate.cp_ulysses);
}

std::int64_t part(std::int64_t number, std::int64_t ranks) { return (number + ranks - 1) / ranks; }

// y = x W and, in backward, the gradients of x and of W: three products of as many operations.
void add(LayerWork& to, std::int64_t tokens, std::int64_t in, std::int64_t out, double count = 1) {
  to.forward.push_back({tokens, out, in, count});
  to.inputs.push_back({tokens, in, out, count});
  to.weights.push_back({in, out, tokens, count});
}

}  // namespace

LayerWork layer_work(const Problem& problem, const Candidate& candidate, std::int64_t layer,
                     std::optional<double> pairs) {
  const ModelShape& model = problem.model;
  const std::int64_t tokens = tokens_of(problem, candidate), tp = candidate.tp, hidden = model.hidden,
                     queries = part(model.heads, tp) * model.head_dim,
                     keys = part(model.key_heads, tp) * model.head_dim;
  const double element = bytes_of(problem.work.precision), T = double(tokens), h = double(hidden);
  LayerWork work;
  add(work, tokens, hidden, queries);
  add(work, tokens, hidden, keys, 2);
  add(work, tokens, queries, hidden);
  const bool mixture = model.has_experts(layer);
  // Rows that feed-forward networks read, and the width of what they multiply.
  const double rows = mixture ? T * double(model.experts.per_token) : T;
  std::int64_t width = part(model.feed_forward, tp);
  const auto network = [&](std::int64_t m, std::int64_t wide, double count) {
    add(work, m, hidden, wide, count * (model.gated ? 2 : 1));
    add(work, m, wide, hidden, count);
  };
  double multiplied = 0;
  if (mixture) {
    const ModelShape::Experts& experts = model.experts;
    add(work, tokens, hidden, experts.count);
    // A rank's experts get as many tokens as it sends, shared among them.
    const std::int64_t own = part(experts.count, candidate.ep);
    width = part(experts.feed_forward, tp);
    network(std::max<std::int64_t>(1, std::int64_t(rows / double(own))), width, double(own));
    if (experts.shared_feed_forward > 0) {
      network(tokens, part(experts.shared_feed_forward, tp), 1);
      multiplied += T * double(part(experts.shared_feed_forward, tp));
    }
    work.expert_bytes = candidate.ep > 1 ? rows * h * element : 0;
  } else {
    network(tokens, width, 1);
  }
  multiplied += rows * double(width);
  // Two products of a head for each pair that is not masked; packs say how many (without documents: causal).
  if (!pairs) pairs = packs_of(pairs_by_sequence(problem.work)).pairs;
  work.pairs = 4 * double(queries) * *pairs * double(candidate.micro_batch) /
               double(candidate.cp_ring * candidate.cp_ulysses);
  // Two norms that read and write, two sums that read twice; over tp where the sequence is; rotated queries
  // and keys; gate and up read, their product written.
  const double streams = candidate.sequence_parallel ? double(tp) : 1;
  work.bytes =
      element * ((2 * 2 + 2 * 3) * T * h / streams + 2 * T * double(queries + keys) + 3 * multiplied);
  work.operators = mixture ? 40 : 20;
  if (tp > 1) work.tp_bytes = T * h * element;
  work.ring_bytes = candidate.cp_ring > 1 ? 2 * T * double(keys) / candidate.cp_ulysses * element : 0;
  work.ulysses_bytes = candidate.cp_ulysses > 1 ? 2 * T * double(queries + keys) * element : 0;
  return work;
}

LayerWork output_work(const Problem& problem, const Candidate& candidate) {
  const ModelShape& model = problem.model;
  const std::int64_t tokens = tokens_of(problem, candidate),
                     vocabulary = part(model.vocabulary, candidate.tp);
  LayerWork work;
  add(work, tokens, model.hidden, vocabulary);
  // Logits are read for their largest, their sum and their gradient.
  work.bytes = 3 * double(tokens) * double(vocabulary) * bytes_of(problem.work.precision);
  work.operators = 10;
  if (candidate.tp > 1)
    work.tp_bytes = double(tokens) * double(model.hidden) * bytes_of(problem.work.precision);
  return work;
}

namespace {

// A calibrated rate, and the sizes that it is of.
struct Known {
  std::array<double, 3> sizes{1, 1, 1};
  double rate = 0;
};
double size(std::int64_t of) { return double(std::max<std::int64_t>(1, of)); }

// Between the nearest sizes that are known; those outside of all sizes take the border's. The time of an
// operation is linear in 1/size: it has a part of its own, which larger sizes share among more.
double interpolated(const std::vector<Known>& known, const std::array<double, 3>& at) {
  std::array<double, 3> below{}, above{}, part{};  // part: of `below`
  for (std::size_t i = 0; i < at.size(); ++i) {
    const auto [least, most] = std::ranges::minmax(known, {}, [&](const Known& one) { return one.sizes[i]; });
    const double here = std::clamp(at[i], least.sizes[i], most.sizes[i]);
    below[i] = least.sizes[i], above[i] = most.sizes[i];
    for (const Known& one : known) {
      if (one.sizes[i] <= here) below[i] = std::max(below[i], one.sizes[i]);
      if (one.sizes[i] >= here) above[i] = std::min(above[i], one.sizes[i]);
    }
    part[i] = below[i] == above[i] ? 1 : (1 / here - 1 / above[i]) / (1 / below[i] - 1 / above[i]);
  }
  double time = 0, weights = 0, near = 0, nearness = 0;
  for (const Known& one : known) {
    double weight = 1, distance = 1e-9;
    for (std::size_t i = 0; i < at.size(); ++i) {
      weight *= one.sizes[i] == below[i] ? part[i] : one.sizes[i] == above[i] ? 1 - part[i] : 0;
      const double apart = std::log2(at[i] / one.sizes[i]);
      distance += apart * apart;
    }
    time += weight / one.rate, weights += weight;
    near += 1 / (one.rate * distance * distance), nearness += 1 / (distance * distance);
  }
  return weights > 1e-9 ? weights / time : nearness / near;  // a corner that was not measured: the nearest
}

}  // namespace

struct RatesData {
  Constants constants{};
  Device device{};
  Calibration calibration{};
  Precision precision = Precision::kBFloat16;
  std::vector<Known> products{}, attention{};  // of the precision
};

Rates::Rates(const Problem& problem)
    : data_(std::make_shared<RatesData>(RatesData{
          problem.constants, problem.cluster.device, problem.calibration, problem.work.precision, {}, {}})) {
  RatesData& data = *data_;
  for (const auto& found : data.calibration.products)
    if (found.precision == data.precision && found.flops > 0)
      data.products.push_back({{size(found.m), size(found.n), size(found.k)}, found.flops});
  for (const auto& found : data.calibration.attention)
    if (found.precision == data.precision && found.flops > 0)
      data.attention.push_back({{size(found.length), size(found.head_dim), 1}, found.flops});
}

double Rates::seconds(const Product& product) const {
  const double flops = 2 * product.count * double(product.m) * double(product.n) * double(product.k);
  if (flops == 0) return 0;
  if (!data_->products.empty())
    return flops / interpolated(data_->products, {size(product.m), size(product.n), size(product.k)});
  return flops / (data_->device.peak[std::size_t(data_->precision)] * data_->constants.share_of_peak);
}

double Rates::attention(double flops, std::int64_t length, std::int64_t head_dim) const {
  if (flops == 0) return 0;
  if (!data_->attention.empty())
    return flops / interpolated(data_->attention, {size(length), size(head_dim), 1});
  // Calibrated products alone: as tiles of 128 rows and keys and a head of 128 are multiplied.
  if (!data_->products.empty()) return seconds({128, 128, 128, flops / (2.0 * 128 * 128 * 128)});
  return flops / (data_->device.peak[std::size_t(data_->precision)] * data_->constants.share_of_attention);
}

double Rates::memory(double bytes) const {
  const double found = data_->calibration.memory_bandwidth;
  return bytes / (found > 0 ? found : data_->device.memory_bandwidth * data_->constants.share_of_memory);
}

double Rates::operators(int count) const {
  constexpr double kOfLayer = 130;  // operators of a layer, forward and backward, that layer_overhead is of
  const double found = data_->calibration.operator_overhead;
  return count * (found > 0 ? found : data_->constants.layer_overhead / kOfLayer);
}

double Rates::optimizer(double bytes) const {
  const double found = data_->calibration.optimizer_bandwidth;
  return found > 0 ? bytes / found : memory(bytes);
}

Origin Rates::origin() const { return data_->calibration.empty() ? Origin::kFitted : Origin::kCalibrated; }

}  // namespace isograd::planner
