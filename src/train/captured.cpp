#include "train/captured.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <cstring>
#include <map>
#ifdef ISOGRAD_WITH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "loss/checks.hpp"
#include "loss/share.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kTokenStep = 128;  // tokens are rounded up to a multiple of it
constexpr std::size_t kMostForms = 16;    // more of them are computed without a recording
constexpr int kRunsBefore = 1;            // that make every library's handles and workspaces

struct Form {
  std::int64_t tokens = 0, fragments = 0;
  bool weights = false, given_weights = false, sample_weights = false;
  auto operator<=>(const Form&) const = default;
};

// A batch of one form in memory that recordings know, one tensor, so that it arrives in one copy.
class FixedBatch {
 public:
  FixedBatch(const Form& form, at::Device device) : form_(form) {
    const std::int64_t tokens = form.tokens, ends = (form.fragments + 2) / 2;  // two int32 to a word
    words_ =
        at::zeros({3 * tokens + ends + kMostTerms + 3 * tokens}, at::TensorOptions(at::kLong).device(device));
    const auto part = [&](std::int64_t count) {
      return words_.narrow(0, std::exchange(used_, used_ + count), count);
    };
    batch_.tokens = part(tokens), batch_.targets = part(tokens), batch_.positions = part(tokens);
    batch_.cu_seqlens_on_device = part(ends).view(at::kInt).narrow(0, 0, form.fragments + 1);
    factors_ = part(kMostTerms).view(at::kDouble);
    for (const auto& [has, weights] : {std::pair(form.weights, &batch_.weights),
                                       {form.given_weights, &batch_.given_weights},
                                       {form.sample_weights, &batch_.sample_weights}})
      if (has) *weights = part(tokens).view(at::kDouble);
    // One fragment of all tokens bounds the length of any. What the kernels read is on the device.
    batch_.cu_seqlens.assign(static_cast<std::size_t>(form.fragments) + 1, tokens);
    batch_.cu_seqlens.front() = 0;
    batch_.largest_position = tokens - 1;
    batch_.bounds_only = true;
  }

  void fill(const Batch& from, const std::vector<double>& factors) {
    const std::int64_t tokens = form_.tokens, own = from.num_tokens();
    const at::Tensor staged = at::zeros({used_}, at::TensorOptions(at::kLong).pinned_memory(true));
    auto* at = staged.mutable_data_ptr<std::int64_t>();
    const auto put = [&](const at::Tensor& values) {
      std::memcpy(at, values.const_data_ptr(), static_cast<std::size_t>(own) * sizeof(std::int64_t));
      at += tokens;
    };
    put(from.tokens.contiguous());
    std::fill_n(at + own, tokens - own, kIgnoreIndex);
    put(from.targets.contiguous());
    for (std::int64_t t = own; t < tokens; ++t) at[t] = t - own;
    put(from.positions.contiguous());
    auto* ends = reinterpret_cast<std::int32_t*>(at);
    for (std::size_t f = 0; f <= static_cast<std::size_t>(form_.fragments); ++f)
      ends[f] = static_cast<std::int32_t>(f < from.cu_seqlens.size() ? from.cu_seqlens[f] : tokens);
    at += (form_.fragments + 2) / 2;
    std::memcpy(at, factors.data(), factors.size() * sizeof(double));
    at += kMostTerms;
    for (const at::Tensor* weights : {&from.weights, &from.given_weights, &from.sample_weights})
      if (weights->defined()) put(weights->to(at::kDouble).contiguous());
    words_.narrow(0, 0, used_).copy_(staged, /*non_blocking=*/true);
  }

  const Batch& batch() const { return batch_; }
  const at::Tensor& factors() const { return factors_; }  // [kMostTerms] fp64

  static constexpr std::int64_t kMostTerms = 8;

 private:
  Form form_;
  at::Tensor words_, factors_;
  std::int64_t used_ = 0;
  Batch batch_;
};

// Nothing where a term is left out of the share, or multiplied by 0, which a recording does not know.
std::optional<std::vector<double>> all_factors(const LossTerms& terms, const Denominator& denominator) {
  std::vector<double> factors;
  for (const auto& factor : factors_of(terms, denominator)) {
    if (!factor || *factor == 0) return std::nullopt;
    factors.push_back(*factor);
  }
  return factors;
}

// One form, in one state of the gradients' places.
struct Recording {
  int runs = 0;
  bool fails = false;
  LossTerms terms{};     // without sums
  at::Tensor numbers{};  // [1 + terms] fp64: the share, then the sums
#ifdef ISOGRAD_WITH_CUDA
  std::unique_ptr<at::cuda::CUDAGraph> graph{};
#endif
};

class Work final : public CapturedWork {
 public:
  Work(DataParallel& layout, at::Device device) : layout_(layout), device_(device) {}

  std::optional<Share> run(const Batch& prepared, const ForwardLossTerms& forward,
                           const Denominator& denominator, const Look& look) override {
    const std::int64_t tokens = prepared.num_tokens();
    if (tokens == 0 || !prepared.inputs.empty() || prepared.cut || !prepared.tokens.is_cpu())
      return std::nullopt;
    const auto rounded = [](std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; };
    const std::int64_t all = rounded(tokens, kTokenStep);
    if (prepared.positions.max().item<std::int64_t>() >= all) return std::nullopt;
    // One fragment more where something fills up.
    const std::uint64_t fragments = prepared.cu_seqlens.size() - (tokens == all ? 1 : 0);
    const Form form{all, static_cast<std::int64_t>(std::bit_ceil(fragments)), prepared.weights.defined(),
                    prepared.given_weights.defined(), prepared.sample_weights.defined()};
    if (!batches_.contains(form)) {
      if (batches_.size() == kMostForms) return std::nullopt;
      batches_.emplace(form, FixedBatch(form, device_));
    }
    FixedBatch& batch = batches_.at(form);
    const std::vector<std::uint64_t> state = layout_.gradient_places();
    Recording& recording = recordings_[{form, state}];
    // Factors are data of the recording: the first forward of a form says which terms there are.
    if (recording.terms.empty()) return first(batch, prepared, forward, denominator, recording, look);
    const auto factors = all_factors(recording.terms, denominator);
    if (!factors) return std::nullopt;
    batch.fill(prepared, *factors);
    return compute(batch, forward, recording, state, look);
  }

 private:
  // Forward and backward, of which a recording is made.
  at::Tensor pass(const FixedBatch& batch, const ForwardLossTerms& forward, const Look& look) {
    const FixedShapes mark(true);
    const LossTerms given = forward(batch.batch());
    if (look) look(given);
    const at::Tensor share = share_on_device(given, batch.factors());
    share.backward();
    std::vector<at::Tensor> numbers{share.detach()};
    for (const LossTerm& term : given) numbers.push_back(term.sum.detach().reshape({}).to(at::kDouble));
    return at::stack(numbers);
  }

  std::optional<Share> first(FixedBatch& batch, const Batch& prepared, const ForwardLossTerms& forward,
                             const Denominator& denominator, Recording& recording, const Look& look) {
    if (recording.fails) return std::nullopt;
    try {
      const at::NoGradGuard no_grad;
      const FixedShapes mark(true);
      batch.fill(prepared, {});
      recording.terms = forward(batch.batch());
    } catch (const ConfigError&) {  // of the batch as it is it says so again
      recording.fails = true;
      return std::nullopt;
    }
    if (recording.terms.size() > static_cast<std::size_t>(FixedBatch::kMostTerms)) recording.fails = true;
    for (LossTerm& term : recording.terms) term.sum = at::Tensor();
    const auto factors = all_factors(recording.terms, denominator);
    if (recording.fails || !factors) return std::nullopt;
    batch.fill(prepared, *factors);
    return compute(batch, forward, recording, layout_.gradient_places(), look);
  }

  std::optional<Share> compute(FixedBatch& batch, const ForwardLossTerms& forward, Recording& recording,
                               const std::vector<std::uint64_t>& state, const Look& look) {
    if (!replay(batch, forward, recording, state)) {
      recording.numbers = pass(batch, forward, [&](const LossTerms& terms) {
        check_terms(terms, /*deferred=*/false);
        look(terms);
      });
      ++recording.runs;
    }
    // The next run writes to the same memory.
    const at::Tensor numbers = recording.numbers.clone();
    Share result{.terms = recording.terms, .value = numbers[0]};
    for (std::size_t i = 0; i < result.terms.size(); ++i)
      result.terms[i].sum = numbers[static_cast<std::int64_t>(i) + 1];
    return result;
  }

#ifdef ISOGRAD_WITH_CUDA
  bool replay(FixedBatch& batch, const ForwardLossTerms& forward, Recording& recording,
              const std::vector<std::uint64_t>& state) {
    if (recording.fails || recording.runs < kRunsBefore) return false;
    if (recording.graph) {
      recording.graph->replay();
      layout_.arrive_again();
      return true;
    }
    if (!capture(batch, forward, recording)) {
      layout_.restore_places(state);
      return false;
    }
    recording.graph->replay();
    return true;
  }

  // Records without running, in a stream of its own, which LibTorch asks for.
  bool capture(FixedBatch& batch, const ForwardLossTerms& forward, Recording& recording) {
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    bool begun = false;
    std::string why;
    const auto outer = c10::cuda::getCurrentCUDAStream(device_.index());
    if (!stream_) stream_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    if (!pool_) pool_ = at::cuda::graph_pool_handle();
    {
      const c10::StreamGuard guard(stream_->unwrap());
      c10::Event before(c10::kCUDA);
      before.record(outer.unwrap());
      before.block(stream_->unwrap());
      try {
        graph->capture_begin(*pool_, cudaStreamCaptureModeThreadLocal);
        begun = true;
        recording.numbers = pass(batch, forward, {});
        graph->capture_end();
        begun = false;
        recording.graph = std::move(graph);
      } catch (const std::exception& error) {
        why = error.what();
        if (begun) try {
            graph->capture_end();
          } catch (const std::exception&) {  // the first error is the one to tell
          }
      }
      c10::Event after(c10::kCUDA);
      after.record(stream_->unwrap());
      after.block(outer.unwrap());
    }
    if (recording.graph && layout_.all_gradients_arrived()) return true;
    recording.graph.reset();
    recording.fails = true;
    if (why.empty()) why = "a parameter of the layout gets no gradient";
    TORCH_WARN_ONCE("isograd: micro-batches are not captured as CUDA graphs, and run more slowly: ",
                    why.substr(0, why.find('\n')));
    return false;
  }

  std::optional<c10::cuda::CUDAStream> stream_{};
  std::optional<c10::MempoolId_t> pool_{};
#else
  bool replay(FixedBatch&, const ForwardLossTerms&, Recording&, const std::vector<std::uint64_t>&) {
    return false;
  }
#endif

  DataParallel& layout_;
  at::Device device_;
  std::map<Form, FixedBatch> batches_{};
  std::map<std::pair<Form, std::vector<std::uint64_t>>, Recording> recordings_{};
};

}  // namespace

std::unique_ptr<CapturedWork> CapturedWork::make(DataParallel& layout) {
  if (!layout.gradients_can_be_replayed()) return nullptr;
  return std::make_unique<Work>(layout, layout.buckets().front().plan.device);
}

}  // namespace isograd
