#include "model/attention/kernel.hpp"

#include "isograd/error.hpp"

#ifdef ISOGRAD_WITH_CUDNN
#include <ATen/cudnn/Handle.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <memory>
#include <mutex>

// Libraries are found when they are first used. LibTorch carries functions of another version of these
// headers under the same names, which must not be mistaken for these.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define cudnn_frontend isograd_cudnn_frontend
#include <cudnn_frontend.h>
void* cudnn_frontend::cudnn_dlhandle = nullptr;
#endif

namespace isograd::cudnn {

std::int64_t key_heads_at_a_time(std::int64_t tokens, std::int64_t heads, std::int64_t key_heads) {
  const std::int64_t rounded = (tokens + 127) / 128 * 128, each = heads / key_heads * rounded * rounded * 2;
  for (std::int64_t count = key_heads; count > 0; --count)
    if (key_heads % count == 0 && count * each <= kMostKept) return count;
  return 0;
}

#ifdef ISOGRAD_WITH_CUDNN
namespace {

namespace fe = cudnn_frontend;

constexpr std::size_t kMostPlans = 32;  // more sizes than that go elsewhere
constexpr std::int64_t kTokenStep = 128;

enum Uid : std::int64_t { kQ = 1, kK, kV, kOut, kLogSums, kGradient, kDq, kDk, kDv };

// The sizes that a plan is made for. Distances between rows are in elements.
struct Sizes {
  c10::DeviceIndex device;
  std::int64_t tokens, heads, key_heads, dim, q_row, k_row, v_row;
  bool bf16, causal;
  auto operator<=>(const Sizes&) const = default;
};

struct Plans {
  std::shared_ptr<fe::graph::Graph> forward{}, backward{};
  std::int64_t forward_bytes = 0, backward_bytes = 0;
  std::int64_t key_heads = 0;  // of a call of backward
};

void check(fe::error_t result, const char* doing) {
  if (result.is_bad()) throw std::runtime_error(fmt::format("{}: {}", doing, result.get_message()));
}

// One graph, forward or backward, of some heads.
class Making {
 public:
  Making(const Sizes& sizes, std::int64_t key_heads)
      : sizes_(sizes), key_heads_(key_heads), heads_(sizes.heads / sizes.key_heads * key_heads) {
    graph_->set_io_data_type(sizes.bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void forward() {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
    const auto [out, log_sums] =
        graph_->sdpa(rows(kQ, heads_, sizes_.q_row), rows(kK, key_heads_, sizes_.k_row),
                     rows(kV, key_heads_, sizes_.v_row), with_mask(options));
    as_output(out, kOut, heads_, sizes_.heads);
    log_sums->set_output(true).set_data_type(fe::DataType_t::FLOAT).set_uid(kLogSums);
    shape_log_sums(*log_sums);
  }

  void backward() {
    auto options =
        fe::graph::SDPA_backward_attributes().set_name("attention").set_deterministic_algorithm(true);
    fe::graph::Tensor_attributes log_sums;
    shape_log_sums(log_sums.set_uid(kLogSums).set_data_type(fe::DataType_t::FLOAT));
    const std::int64_t row = sizes_.heads * sizes_.dim;
    const auto [dq, dk, dv] =
        graph_->sdpa_backward(rows(kQ, heads_, sizes_.q_row), rows(kK, key_heads_, sizes_.k_row),
                              rows(kV, key_heads_, sizes_.v_row), rows(kOut, heads_, row),
                              rows(kGradient, heads_, row), graph_->tensor(log_sums), with_mask(options));
    as_output(dq, kDq, heads_, sizes_.heads);
    as_output(dk, kDk, key_heads_, sizes_.key_heads);
    as_output(dv, kDv, key_heads_, sizes_.key_heads);
  }

  std::pair<std::shared_ptr<fe::graph::Graph>, std::int64_t> made() {
    check(graph_->build(at::native::getCudnnHandle(), {fe::HeurMode_t::A}), "making a plan");
    std::int64_t bytes = 0;
    check(graph_->get_workspace_size(bytes), "asking for a plan's memory");
    return {graph_, bytes};
  }

 private:
  using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

  std::vector<std::int64_t> shape(std::int64_t heads) const { return {1, heads, sizes_.tokens, sizes_.dim}; }
  std::vector<std::int64_t> strides(std::int64_t row) const {
    return {sizes_.tokens * row, sizes_.dim, row, 1};
  }

  Tensor rows(Uid uid, std::int64_t heads, std::int64_t row) {
    return graph_->tensor(
        fe::graph::Tensor_attributes().set_uid(uid).set_dim(shape(heads)).set_stride(strides(row)));
  }
  void as_output(const Tensor& tensor, Uid uid, std::int64_t heads, std::int64_t all_heads) const {
    tensor->set_output(true).set_uid(uid).set_dim(shape(heads)).set_stride(strides(all_heads * sizes_.dim));
  }
  void shape_log_sums(fe::graph::Tensor_attributes& log_sums) const {
    log_sums.set_dim({1, heads_, sizes_.tokens, 1}).set_stride({heads_ * sizes_.tokens, sizes_.tokens, 1, 1});
  }
  template <typename Options>
  Options& with_mask(Options& options) const {
    options.set_attn_scale(static_cast<float>(1 / std::sqrt(static_cast<double>(sizes_.dim))));
    if (sizes_.causal)
      options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    return options;
  }

  Sizes sizes_;
  std::int64_t key_heads_, heads_;
  std::shared_ptr<fe::graph::Graph> graph_ = std::make_shared<fe::graph::Graph>();
};

void open_library() {
  if (!fe::cudnn_dlhandle) fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
  if (!fe::cudnn_dlhandle) throw std::runtime_error("LibTorch has loaded no libcudnn.so.9");
}

void check(cudaError_t result, const char* doing) {
  if (result != cudaSuccess)
    throw std::runtime_error(fmt::format("{}: CUDA's error {}", doing, static_cast<int>(result)));
}

bool is_recording(c10::DeviceIndex device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(fe::detail::cuda_stream_is_capturing(c10::cuda::getCurrentCUDAStream(device).stream(), &status),
        "asking for the stream");
  return status != cudaStreamCaptureStatusNone;
}

Plans made(const Sizes& sizes) {
  int major = 0;
  check(fe::detail::cuda_device_get_attribute(&major, cudaDevAttrComputeCapabilityMajor, sizes.device),
        "asking for the device");
  if (major < 9) return {};  // where nobody has seen it faster
  Plans plans;
  plans.key_heads = key_heads_at_a_time(sizes.tokens, sizes.heads, sizes.key_heads);
  Making forward(sizes, sizes.key_heads), backward(sizes, plans.key_heads);
  forward.forward(), backward.backward();
  std::tie(plans.forward, plans.forward_bytes) = forward.made();
  std::tie(plans.backward, plans.backward_bytes) = backward.made();
  return plans;
}

std::mutex& mutex() {
  static std::mutex one;
  return one;
}

Sizes sizes_of(const Qkv& of, bool causal) {
  const auto& [q, k, v] = of;
  return {.device = q.device().index(),
          .tokens = q.size(0),
          .heads = q.size(1),
          .key_heads = k.size(1),
          .dim = q.size(2),
          .q_row = q.stride(0),
          .k_row = k.stride(0),
          .v_row = v.stride(0),
          .bf16 = q.scalar_type() == at::kBFloat16,
          .causal = causal};
}

// Null: none. Plans that are there stay where they are, also until the process ends: cuDNN may be gone before
// them.
const Plans* plans_for(const Sizes& sizes) {
  static auto& known = *new std::map<Sizes, Plans>();
  const std::lock_guard lock(mutex());
  auto found = known.find(sizes);
  if (found == known.end()) {
    if (known.size() == kMostPlans) return nullptr;
    Plans plans;
    try {
      open_library();
      if (is_recording(sizes.device)) return nullptr;  // nothing can be loaded now
      plans = made(sizes);
    } catch (const std::exception& error) {
      const std::string why = error.what();
      TORCH_WARN_ONCE("isograd: attention goes to LibTorch's flash attention, as cuDNN's cannot be used: ",
                      why);
    }
    found = known.emplace(sizes, std::move(plans)).first;
  }
  return found->second.backward ? &found->second : nullptr;
}

bool is_aligned(const at::Tensor& x) {
  return reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0 && x.stride(0) % 8 == 0;
}

void* place(const at::Tensor& x, std::int64_t at) {
  return static_cast<char*>(const_cast<void*>(x.const_data_ptr())) + at * x.element_size();
}

void run(const fe::graph::Graph& graph, std::int64_t bytes, const at::Tensor& like,
         std::unordered_map<std::int64_t, void*> places) {
  const at::Tensor workspace = at::empty({bytes}, like.options().dtype(at::kByte));
  const std::lock_guard lock(mutex());
  check(graph.execute(at::native::getCudnnHandle(), places, workspace.mutable_data_ptr()),
        "attention by cuDNN");
}

}  // namespace

bool serves(const Qkv& of, bool causal) {
  const auto& [q, k, v] = of;
  const auto type = q.scalar_type();
  if (!q.is_cuda() || (type != at::kBFloat16 && type != at::kHalf) || q.size(2) % 8 != 0 || q.size(2) > 128 ||
      q.size(0) == 0 || q.size(0) % kTokenStep != 0 || !is_aligned(q) || !is_aligned(k) || !is_aligned(v) ||
      key_heads_at_a_time(q.size(0), q.size(1), k.size(1)) == 0)
    return false;
  const c10::DeviceGuard guard(q.device());
  return plans_for(sizes_of(of, causal)) != nullptr;
}

fragments::Attended attend(const Qkv& of, bool causal) {
  const auto& [q, k, v] = of;
  const c10::DeviceGuard guard(q.device());
  const Plans& plans = *plans_for(sizes_of(of, causal));
  fragments::Attended result{.out = at::empty(q.sizes(), q.options()),
                             .log_sums = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat))};
  run(*plans.forward, plans.forward_bytes, q,
      {{kQ, place(q, 0)},
       {kK, place(k, 0)},
       {kV, place(v, 0)},
       {kOut, place(result.out, 0)},
       {kLogSums, place(result.log_sums, 0)}});
  return result;
}

Qkv attend_backward(const Qkv& of, const at::Tensor& given, const fragments::Attended& attended,
                    bool causal) {
  const auto& [q, k, v] = of;
  const c10::DeviceGuard guard(q.device());
  const at::Tensor gradient = is_aligned(given) ? given : given.clone();
  const Plans& plans = *plans_for(sizes_of(of, causal));
  Qkv result{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
             at::empty(v.sizes(), v.options())};
  const std::int64_t tokens = q.size(0), dim = q.size(2), group = queries_per_key(q, k);
  for (std::int64_t key_head = 0; key_head < k.size(1); key_head += plans.key_heads) {
    const std::int64_t keys = key_head * dim, queries = keys * group;
    run(*plans.backward, plans.backward_bytes, q,
        {{kQ, place(q, queries)},
         {kK, place(k, keys)},
         {kV, place(v, keys)},
         {kOut, place(attended.out, queries)},
         {kLogSums, place(attended.log_sums, key_head * group * tokens)},
         {kGradient, place(gradient, queries)},
         {kDq, place(result.q, queries)},
         {kDk, place(result.k, keys)},
         {kDv, place(result.v, keys)}});
  }
  return result;
}

#else  // without cuDNN nobody calls the rest

bool serves(const Qkv&, bool) { return false; }
fragments::Attended attend(const Qkv&, bool) { ISOGRAD_INVARIANT(false, "a build without cuDNN"); }
Qkv attend_backward(const Qkv&, const at::Tensor&, const fragments::Attended&, bool) {
  ISOGRAD_INVARIANT(false, "a build without cuDNN");
}

#endif

}  // namespace isograd::cudnn
