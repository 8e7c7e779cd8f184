// Two GPUs that are none: host memory that passes for a CUDA device, for builds of LibTorch without CUDA. A
// library to be preloaded (LD_PRELOAD), so that the programs as they are take the ways that they take on a
// GPU: tensors of another device than the CPU's, pinned memory, backward in a thread of the device. It is as
// strict as CUDA is: an operation that mixes devices is refused by name. What it cannot show is CUDA's own:
// its kernels' rounding, its streams, NCCL.
//
// At the end of a process it says what was done, where ISOGRAD_STANDIN_GPU names a file.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr c10::DeviceIndex kGpus = 2;
thread_local c10::DeviceIndex current = 0;
thread_local bool in_operation = false;  // whose copies are the stand-in's own

struct Counts {
  std::atomic<std::int64_t> operations{0}, pinned{0}, to_gpu{0}, unpinned{0}, waits{0};
  std::atomic<std::int64_t> used[kGpus] = {};  // bytes ever handed out
} counts;

std::mutex pinned_mutex;
std::set<const void*>& pinned_pointers() {
  static auto* one = new std::set<const void*>;  // leaked: memory may be freed after static objects are gone
  return *one;
}

// ---- memory ----

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::kCUDA, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = static_cast<Block*>(std::aligned_alloc(64, sizeof(Block) + (bytes + 63) / 64 * 64));
    TORCH_CHECK(block, "no memory for ", bytes, " bytes");
    *block = {bytes, current};
    const std::lock_guard lock(mutex());
    stat(current).increase(bytes);
    counts.used[current] += static_cast<std::int64_t>(bytes);
    return {block + 1, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    // CUDA's allocator knows no device before the first tensor is there.
    TORCH_CHECK(counts.used[0] + counts.used[1] > 0, "Invalid device argument: did you call init?");
    const std::lock_guard lock(mutex());
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stat(device);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex());
    stat(device).reset_peak();
  }

 private:
  struct alignas(64) Block {
    std::size_t bytes;
    c10::DeviceIndex device;
  };
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static c10::CachingAllocator::Stat& stat(c10::DeviceIndex device) {
    static auto* all = new c10::CachingAllocator::Stat[kGpus];
    return all[device];
  }
  static void release(void* at) {
    if (!at) return;
    auto* block = static_cast<Block*>(at);
    {
      const std::lock_guard lock(mutex());
      stat(block->device).decrease(block->bytes);
    }
    std::free(block);
  }
};

Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* at = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    const std::lock_guard lock(pinned_mutex);
    pinned_pointers().insert(at);
    ++counts.pinned;
    return {at, at, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void release(void* at) {
    {
      const std::lock_guard lock(pinned_mutex);
      pinned_pointers().erase(at);
    }
    std::free(at);
  }
};

// ---- what LibTorch asks a device ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(c10::kCUDA, current);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kGpus, "no such GPU: ", device);
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kGpus; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override { ++counts.waits; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Each GPU draws from a generator of its own, not from the host's.
const at::Generator& generator_of(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (std::uint64_t gpu = 0; gpu < kGpus; ++gpu)
      made->push_back(at::make_generator<at::CPUGeneratorImpl>(100 + gpu));
    return made;
  }();
  return all->at(static_cast<std::size_t>(device));
}

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex deviceCount() const override { return kGpus; }
  int getNumGPUs() const override { return kGpus; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override {
    static auto* one = new PinnedMemory;
    return one;
  }
  bool isPinnedPtr(const void* at) const override {
    const std::lock_guard lock(pinned_mutex);
    return pinned_pointers().contains(at);
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generator_of(device < 0 ? current : device);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace {

// ---- operations ----

at::Tensor in_host_memory(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(at::kCUDA, current)));
  return at::Tensor(at::detail::empty_generic(sizes, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                              type.value_or(at::kFloat), format));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(at::kCUDA, current)));
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA), type.value_or(at::kFloat)));
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_cuda() && from.is_cpu() && from.dim() > 0) {
    ++counts.to_gpu;
    if (non_blocking && from.numel() > 0 && !from.is_pinned()) ++counts.unpinned;
  }
  if (to.is_cpu() && !non_blocking && !in_operation) ++counts.waits;
  in_host_memory(to).copy_(in_host_memory(from));
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor target = to;
  if (target.sizes() != from.sizes()) target.resize_(from.sizes());
  return target.copy_(from);
}

at::Tensor& set_to_storage(at::Tensor& tensor, at::Storage storage) {
  return at::native::set_(tensor, std::move(storage));
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());  // which the storage may be made anew on
  return at::native::resize_(tensor, sizes, format);
}

at::Tensor& set_to_nothing(at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, &memory(), true);
  return tensor.set_(storage, 0, {0}, {});
}

// CUDA's rule: all on one GPU, but for single numbers and for indices.
void refuse_mixed_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> gpu, other;
  std::string arguments_seen;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    arguments_seen += c10::str(" ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
    if (tensor.is_cpu() ? tensor.dim() == 0 : gpu && tensor.device() == *gpu) return;
    (tensor.is_cpu() || gpu ? other : gpu) = tensor.device();
  };
  const std::size_t arguments = op.schema().arguments().size();
  for (std::size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        if (tensor) see(*tensor);
  }
  const std::string& name = op.schema().name();
  const bool indexes = name == "aten::index" || name == "aten::_index_put_impl_";
  TORCH_CHECK(!gpu || !other || (indexes && other->is_cpu()), "stand-in GPU: ", name, " of tensors on ", *gpu,
              " and ", *other, ":", arguments_seen);
}

// Without a named generator, values are drawn from that of the first tensor's GPU.
void name_generator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "generator" && stack[first + i].isNone() && stack[first].isTensor())
      stack[first + i] = generator_of(stack[first].toTensor().device().index());
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++counts.operations;
  // Those whose result the host needs before it goes on.
  static const std::set<std::string> waiting = {
      "aten::_local_scalar_dense", "aten::nonzero",  "aten::equal",        "aten::is_nonzero",
      "aten::unique_dim",          "aten::_unique2", "aten::masked_select"};
  if (waiting.contains(op.schema().name())) ++counts.waits;
  refuse_mixed_devices(op, *stack);
  name_generator(op, *stack);
  const bool outermost = !std::exchange(in_operation, true);
  at::native::cpu_fallback(op, stack);
  if (outermost) in_operation = false;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_to_storage);
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_", &set_to_nothing);
  library.impl("copy_", &copy);
  library.impl("_copy_from_and_resize", &copy_and_resize);
}

const struct Lifetime {
  Lifetime() { c10::SetAllocator(c10::kCUDA, &memory()); }
  ~Lifetime() {
    const char* const file = std::getenv("ISOGRAD_STANDIN_GPU");
    if (!file || counts.operations == 0) return;
    if (std::FILE* out = std::fopen(file, "a")) {
      std::fprintf(out,
                   "operations %lld pinned %lld to_gpu %lld unpinned %lld gpu0 %lld gpu1 %lld waits %lld\n",
                   static_cast<long long>(counts.operations), static_cast<long long>(counts.pinned),
                   static_cast<long long>(counts.to_gpu), static_cast<long long>(counts.unpinned),
                   static_cast<long long>(counts.used[0]), static_cast<long long>(counts.used[1]),
                   static_cast<long long>(counts.waits));
      std::fclose(out);
    }
  }
} lifetime;

}  // namespace
