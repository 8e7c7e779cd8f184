#include "verify/reference.hpp"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "base/refuse.hpp"
#include "comm/shm/segment.hpp"
#include "isograd/random.hpp"
#include "train/rank_zero.hpp"
#include "verify/experiments.hpp"

namespace isograd {
namespace {

const Batch* first_with_targets(const MicroBatches& whole) {
  for (const Batch& batch : whole)
    if (batch.num_targets() > 0) return &batch;
  return nullptr;
}

std::vector<at::Tensor> trainable(const VerifyModel& model) {
  std::vector<at::Tensor> leaves;
  for (const auto& [name, tensor] : model.named)
    if (tensor.requires_grad()) leaves.push_back(tensor);
  return leaves;
}

// "model.layers.7.mlp" -> 7; -1 where no part of the name is a number.
int layer_of(const std::string& name) {
  for (std::size_t at = 0; at < name.size();) {
    const auto end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    if (!part.empty() && part.size() < 7 && part.find_first_not_of("0123456789") == std::string::npos)
      return std::stoi(part);
    at = end + 1;
  }
  return -1;
}

constexpr std::int64_t kCopies = 5;  // values, gradients of two runs, the copies compared, one to work in

std::string gigabytes(double bytes) {
  return bytes < 1e9 ? fmt::format("{:.3g} MB", bytes * 1e-6) : fmt::format("{:.3g} GB", bytes * 1e-9);
}

struct PackRun {
  at::Tensor logits;
  std::vector<at::Tensor> gradients;  // of the loss, by parameter
};

PackRun run(const VerifyModel& model, const std::vector<at::Tensor>& leaves, const Batch& batch,
            const DeclaredLoss& declared) {
  PackRun outcome;
  const at::Tensor logits = model.logits(batch);
  outcome.logits = logits.detach();
  const at::Tensor nll = plain_token_losses(logits, batch, declared).sum();
  if (nll.requires_grad()) outcome.gradients = dense_gradients(nll, leaves);
  return outcome;
}

// Equal to the bit or, where experts' products round by how many tokens they get, within E1's bound.
bool same(const at::Tensor& a, const at::Tensor& b, bool to_the_bit, double scale) {
  return to_the_bit ? a.equal(b) : (a - b).norm().item<double>() <= Bounds{}.exact * scale;
}

// s of each gradient, which is not that of its own rounding where it is next to nothing.
std::vector<double> scales_of(std::vector<at::Tensor> gradients, const std::vector<at::Tensor>& leaves) {
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(leaves[i]);
  return error_scales(gradients);
}

double largest(const at::Tensor& tensor) { return tensor.numel() ? tensor.abs().max().item<double>() : 0; }

std::vector<MicroBatches> parts(const VerifyProblem& problem, const MicroBatches& whole) {
  if (problem.loss.replicas) return problem.loss.replicas();
  return {whole};
}

// Batches that rank 0 can make forwards of by itself: its own, or what they were cut from.
MicroBatches uncut(const VerifyProblem& problem, const MicroBatches& whole) {
  if (problem.shared_samples) return problem.shared_samples->whole;
  const bool parts = !problem.local.empty() && problem.local.front().cut;
  if (parts && problem.alone) return problem.alone();
  return parts || problem.local.empty() ? whole : problem.local;
}

// The same samples in another order (by `turn`), in at most `pieces` micro-batches of whole fragments.
MicroBatches cut_anew(const MicroBatches& whole, std::int64_t pieces, std::uint64_t turn) {
  std::vector<std::pair<const Batch*, std::int64_t>> fragments;
  for (const Batch& batch : whole)
    for (std::int64_t f = 0; f < batch.num_fragments(); ++f) fragments.emplace_back(&batch, f);
  const auto count = static_cast<std::int64_t>(fragments.size());
  const auto order = random_permutation(count, {.sample = turn, .layer = hash_name("cut")});
  pieces = std::clamp<std::int64_t>(pieces, 1, std::max<std::int64_t>(1, count));
  MicroBatches cut;
  std::size_t next = 0;
  for (const std::int64_t share : split_rows(count, static_cast<int>(pieces))) {
    MicroBatches piece;
    for (std::int64_t i = 0; i < share; ++i) {
      const auto& [batch, f] = fragments[static_cast<std::size_t>(order[next++])];
      piece.push_back(fragments_of(*batch, f, f + 1));
    }
    if (!piece.empty()) cut.push_back(joined(piece));
  }
  return cut;
}

// Rank 0's places, on every rank.
std::vector<std::size_t> share(const std::vector<std::size_t>& own, Group& group) {
  const std::string bytes =
      broadcast_text(group, {reinterpret_cast<const char*>(own.data()), own.size() * sizeof(std::size_t)});
  std::vector<std::size_t> places(bytes.size() / sizeof(std::size_t));
  std::memcpy(places.data(), bytes.data(), bytes.size());
  return places;
}

// ConfigError when the model runs in its own precision but not in fp64 throughout.
void refuse_without_fp64(const VerifyModel& in_fp64, const VerifyModel& own, const MicroBatches& whole) {
  const Batch* batch = first_with_targets(whole);
  if (!batch) return;
  const auto reject = [](std::string found) {
    refuse("verify, the model in fp64", std::move(found),
           "a model that computes in fp64 throughout when it is made in fp64",
           "Take the types of intermediate results from the parameters instead of naming one");
  };
  const auto backward = [&](const VerifyModel& model) {
    const at::Tensor logits = model.logits(*batch);
    dense_gradients(logits.to(at::kDouble).square().sum(), trainable(model));
    return logits.scalar_type();
  };
  try {
    const auto type = backward(in_fp64);
    if (type != at::kDouble) reject(fmt::format("logits of type {}", c10::toString(type)));
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace(), message = text.substr(0, text.find('\n'));
    backward(own);  // an error of the model in its own precision is passed on as it is
    reject("it fails: " + message);
  }
}

// How two runs of the first micro-batch that has a target differ; "": not at all.
std::string difference_of_two_runs(const VerifyModel& model, const MicroBatches& whole) {
  const Batch* batch = first_with_targets(whole);
  if (!batch) return "";
  const auto run = [&] {
    const at::Tensor logits = model.logits(*batch);
    auto results = dense_gradients(logits.square().sum(), trainable(model));
    results.push_back(logits.detach());
    return results;
  };
  const auto first = run(), second = run();
  const at::Tensor &a = first.back(), &b = second.back();
  // NaN in the same places is no difference, and is found later.
  const auto same = [](const at::Tensor& one, const at::Tensor& other) {
    return one.eq(other).logical_or(one.isnan().logical_and(other.isnan())).all().item<bool>();
  };
  if (!same(a, b))
    return fmt::format("logits differ by up to {:.3g}, {} of {} elements", (a - b).abs().max().item<double>(),
                       a.ne(b).sum().item<std::int64_t>(), a.numel());
  for (std::size_t i = 0; i + 1 < first.size(); ++i)
    if (first[i].defined() && second[i].defined() && !same(first[i], second[i]))
      return fmt::format("the same logits, another gradient of trainable parameter {}", i);
  return "";
}

}  // namespace

void refuse_without_memory(const VerifyProblem& problem, const Initial& initial, Group& group) {
  double available = static_cast<double>(std::numeric_limits<std::int64_t>::max());
  if (group.rank() == 0)
    available = problem.memory_bytes > 0 ? static_cast<double>(problem.memory_bytes)
                                         : static_cast<double>(shm::available_memory());
  at::Tensor shared = at::full({1}, available, at::kDouble);
  group.broadcast(shared, 0);
  available = shared.item<double>();
  std::map<int, double> layers;
  double needed = 0, rest = 0;
  for (std::size_t i = 0; i < initial.names.size(); ++i) {
    const auto bytes = static_cast<double>(initial.values[i].numel() * 8 * kCopies);
    const int layer = layer_of(initial.names[i]);
    (layer < 0 ? rest : layers[layer]) += bytes;
    needed += bytes;
  }
  if (needed <= available) return;
  std::size_t fit = 0;
  for (const auto& [layer, bytes] : layers)
    if ((rest += bytes) <= available) ++fit;
  std::string action = "Verify on a machine with more memory";
  if (fit > 0)
    action =
        fmt::format("Verify {} of the {} layers, which fit (model.layers = {})", fit, layers.size(), fit);
  refuse("verify, memory for the oracle", gigabytes(available) + " available",
         gigabytes(needed) + " for parameters and gradients in fp64", action);
}

std::string Leak::text() const {
  return fmt::format(
      "changing document {} in a pack changes document {}: its logits by {:.3g}{}", perturbed, touched,
      logits,
      parameter.empty() ? "" : fmt::format(", the others' gradient of {} by {:.3g}", parameter, gradient));
}

std::optional<Leak> probe_documents(const VerifyModel& model, const Batch& batch,
                                    const DeclaredLoss& declared) {
  const std::set<std::int64_t> documents(batch.sample_ids.begin(), batch.sample_ids.end());
  if (documents.size() < 2) return std::nullopt;
  const std::vector<at::Tensor> leaves = trainable(model);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : model.named)
    if (tensor.requires_grad()) names.push_back(name);
  const bool to_the_bit = !model.choose_experts;
  const std::int64_t vocabulary = model.logits(batch).size(1);
  // Documents look at what stands before them, or after: the first one is changed, then the last.
  for (const std::int64_t changed : {batch.sample_ids.front(), batch.sample_ids.back()}) {
    Batch before = batch, after;
    before.targets = batch.targets.clone();
    at::Tensor tokens = batch.tokens.clone();
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      if (batch.sample_ids[f] != changed) continue;
      of_fragment(before.targets, batch, f).fill_(kIgnoreIndex);  // its own loss takes no part
      at::Tensor own = of_fragment(tokens, batch, f);
      own.copy_(declared.per_token ? own.flip(0) : (own + 1).remainder(vocabulary));
    }
    after = before;
    after.tokens = tokens;
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      if (batch.sample_ids[f] == changed) perturb_inputs(after, static_cast<std::int64_t>(f));
    const PackRun first = run(model, leaves, before, declared), second = run(model, leaves, after, declared);
    Leak leak{.perturbed = changed, .touched = 0, .logits = 0, .parameter = {}, .gradient = 0};
    bool leaks = false;
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      if (batch.sample_ids[f] == changed) continue;
      const at::Tensor one = of_fragment(first.logits, batch, f),
                       other = of_fragment(second.logits, batch, f);
      if (same(one, other, to_the_bit, one.norm().item<double>())) continue;
      const double change = largest(one - other);
      if (!leaks || change > leak.logits) leak.touched = batch.sample_ids[f], leak.logits = change;
      leaks = true;
    }
    const auto scales = scales_of(first.gradients, leaves);
    for (std::size_t i = 0; i < first.gradients.size(); ++i) {
      const at::Tensor &a = first.gradients[i], &b = second.gradients[i];
      if (!a.defined() || !b.defined() || same(a, b, to_the_bit, scales[i])) continue;
      const double change = largest(a - b);
      if (leak.parameter.empty() || change > leak.gradient) leak.parameter = names[i], leak.gradient = change;
      leaks = true;
    }
    if (leaks) return leak;
  }
  return std::nullopt;
}

std::vector<Path> paths(const VerifyProblem& problem) {
  if (problem.updates <= 0) return {};
  constexpr std::size_t kManyLayouts = 5;
  return {{kPlainSgd, problem.layouts.size() < kManyLayouts ? problem.updates : 1},
          {problem.optimizer, problem.updates}};
}

Reference make_reference(const VerifyProblem& problem, const Initial& initial, Group& group) {
  Reference reference;
  Heartbeat heartbeat(group, problem.stop);
  const auto tick = [&heartbeat] { heartbeat.tick(); };
  const int last = group.size() - 1;
  const bool rounds = problem.dtype != at::kDouble;
  OracleStep alone;
  if (group.rank() == 0) {
    reference.whole = problem.whole();
    const VerifyModel model = initial.oracle(problem);
    refuse_without_fp64(model, initial.model(problem, problem.dtype), reference.whole);
    tick();
    reference.random = difference_of_two_runs(model, reference.whole);
    tick();
    const auto pieces = parts(problem, reference.whole);
    reference.oracle = oracle_step(model, pieces, problem.loss, clip_of(problem), tick);
    reference.scales = error_scales(reference.oracle.gradients);
    if (problem.probe_documents && !problem.loss.global && reference.random.empty())
      for (const Batch& batch : uncut(problem, reference.whole))
        if (batch.num_fragments() > 1) {
          reference.leak = probe_documents(model, batch, problem.loss);
          tick();
          break;
        }
    for (const auto& [options, updates] : paths(problem))
      reference.updates.push_back(oracle_updates(initial.oracle(problem), pieces, problem.loss,
                                                 clip_of(problem), options, updates, tick));
  }
  if (group.rank() == last && rounds)
    alone = oracle_step(initial.model(problem, problem.dtype),
                        parts(problem, problem.alone ? problem.alone() : problem.whole()), problem.loss,
                        clip_of(problem), tick);
  heartbeat.finish();

  Tensors expected, off;
  for (std::size_t i = 0, next = 0; i < initial.values.size(); ++i) {
    if (!initial.trainable[i]) continue;
    double error = 0;
    if (rounds) {
      at::Tensor gradient =
          group.rank() == last ? alone.gradients[next] : at::empty(initial.values[i].sizes(), at::kFloat);
      group.broadcast(gradient, last);
      if (group.rank() == 0 && problem.take_dump)
        reference.alone.emplace_back(reference.oracle.names[next], gradient);
      if (group.rank() == 0) {
        expected.push_back(reference.oracle.gradients[next]);
        off.push_back(gradient.to(at::kDouble) - expected.back());
        error = in_scales(norm_of(off.back()), reference.scales[next]);
      }
    }
    reference.alone_error.push_back(error);
    ++next;
  }
  reference.alone_figures = reference.oracle.figures;
  if (rounds) {
    for (double StepFigures::*of : {&StepFigures::loss, &StepFigures::norm, &StepFigures::clip_coefficient,
                                    &StepFigures::unclipped_norm}) {
      at::Tensor number = at::full({1}, alone.figures.*of, at::kDouble);
      group.broadcast(number, last);
      reference.alone_figures.*of = number.item<double>();
    }
  }
  if (!off.empty())
    reference.alone_scale = along(off, expected, expected, bounds_for(problem.dtype, 1, 1).unit).share;
  return reference;
}

std::vector<double> measure_rounding(const VerifyProblem& problem, const Initial& initial,
                                     const std::vector<double>& scales, const Retry& retry, Group& group) {
  const auto places = share(retry.places, group);
  if (places.empty()) return {};
  at::Tensor pieces = at::full({1}, static_cast<std::int64_t>(problem.local.size()), at::kLong);
  group.all_reduce(pieces);
  const int last = group.size() - 1;
  std::vector<MicroBatches> whole;
  if (group.rank() == last) whole = parts(problem, problem.alone ? problem.alone() : problem.whole());
  std::vector<double> errors(places.size(), 0.0);
  at::Tensor again = at::ones({1}, at::kLong);
  for (std::uint64_t draw = 0; draw < kMostDraws && again.item<std::int64_t>() != 0; ++draw) {
    at::Tensor differences = at::zeros({static_cast<std::int64_t>(places.size())}, at::kDouble);
    Heartbeat heartbeat(group, problem.stop);
    if (group.rank() == last) {
      std::vector<MicroBatches> cut = whole;
      // A loss over the rows of all ranks has its rows in one global micro-batch.
      if (!problem.loss.global)
        for (MicroBatches& part : cut)
          part = cut_anew(part, split_rows(pieces.item<std::int64_t>(), static_cast<int>(whole.size()))[0],
                          draw);
      const Initial nudged = initial.nudged(draw);
      const auto gradients = [&](const VerifyModel& model) {
        return oracle_step(model, cut, problem.loss, clip_of(problem), [&heartbeat] { heartbeat.tick(); })
            .gradients;
      };
      const auto exact = gradients(nudged.oracle(problem)),
                 rounded = gradients(nudged.model(problem, problem.dtype));
      for (std::size_t d = 0; d < places.size(); ++d)
        differences[static_cast<std::int64_t>(d)] =
            (rounded[places[d]].to(at::kDouble) - exact[places[d]]).norm();
    }
    heartbeat.finish();
    group.broadcast(differences, last);
    again.zero_();
    for (std::size_t d = 0; group.rank() == 0 && d < places.size(); ++d) {
      const double difference = differences[static_cast<std::int64_t>(d)].item<double>();
      errors[d] = std::fmax(errors[d], difference == 0 ? 0 : difference / scales[places[d]]);
      if (!(errors[d] >= retry.enough[d])) again.fill_(1);
    }
    group.broadcast(again, 0);
  }
  return errors;
}

}  // namespace isograd
