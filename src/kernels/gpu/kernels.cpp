#include "kernels/gpu/kernels.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "isograd/error.hpp"

#ifdef ISOGRAD_WITH_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "kernels/gpu/kept.hpp"
#include "kernels/gpu/kernels_source.hpp"
#endif

namespace isograd::gpu {
namespace {

constexpr std::int64_t kMostThreads = 256;  // __launch_bounds__ of kernels.cu

unsigned blocks_for(std::int64_t items, std::int64_t each) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((items + each - 1) / each, 1, (1LL << 31) - 1));
}

}  // namespace

std::vector<Runs> tables_of(std::int64_t begin, const std::vector<RunEnd>& ends) {
  std::vector<Runs> tables;
  for (const RunEnd& one : ends) {
    if (one.end <= begin) continue;
    if (tables.empty() || tables.back().count == Runs::kMost) tables.emplace_back().begin = begin;
    Runs& runs = tables.back();
    runs.end[runs.count] = begin = one.end;
    if (one.decays) runs.decays[runs.count / 32] |= 1u << (runs.count % 32);
    ++runs.count;
  }
  return tables;
}

unsigned adamw_blocks(const Runs& runs) {
  return blocks_for(runs.end[runs.count - 1] - runs.begin, kAdamWChunk);
}

unsigned rotary_threads(std::int64_t heads, std::int64_t half) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((heads * half / 8 + 31) / 32 * 32, 32, kMostThreads));
}

unsigned norm_threads(std::int64_t packs) {
  if (packs > kMostThreads * kNormPacks) return kNormThreads;
  return static_cast<unsigned>(std::clamp<std::int64_t>((packs + 31) / 32 * 32, 32, kMostThreads));
}

// Enough blocks to fill a GPU, and no more sums than that.
std::int64_t norm_rows(std::int64_t rows) { return (rows + 511) / 512; }

namespace {

enum Which { kSwiGlu, kSwiGluBackward, kRotary, kRmsNorm, kRmsNormBackward, kAdamW, kKernels };

#ifdef ISOGRAD_WITH_CUDA

constexpr std::array<const char*, kKernels> kNames = {"swiglu",   "swiglu_backward",   "rotary",
                                                      "rms_norm", "rms_norm_backward", "adamw"};

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

void* open_libraries() {
  constexpr const char* name = "libcaffe2_nvrtc.so";
  if (void* found = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return found;
  std::string why = dlerror();
  // Where libtorch_cuda.so was loaded from.
  if (void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) {
    std::string folder(4096, '\0');
    if (dlinfo(torch, RTLD_DI_ORIGIN, folder.data()) == 0) {
      const std::string path = std::string(folder.c_str()) + "/" + name;
      if (void* found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
      why = dlerror();
    }
  }
  fail(why);
}

// NVRTC and CUDA's driver, through the library in which LibTorch links both. nvrtc.h may be missing where
// the rest of CUDA's headers are found.
struct Libraries {
  void* const library = open_libraries();
  using Program = void*;
  int (*version)(int*, int*) = find("nvrtcVersion");
  int (*create)(Program*, const char*, const char*, int, const char* const*,
                const char* const*) = find("nvrtcCreateProgram");
  int (*compile)(Program, int, const char* const*) = find("nvrtcCompileProgram");
  int (*log_size)(Program, std::size_t*) = find("nvrtcGetProgramLogSize");
  int (*log)(Program, char*) = find("nvrtcGetProgramLog");
  int (*code_size)(Program, std::size_t*) = find("nvrtcGetCUBINSize");
  int (*code)(Program, char*) = find("nvrtcGetCUBIN");
  int (*destroy)(Program*) = find("nvrtcDestroyProgram");
  decltype(&::cuDeviceGet) device_get = find("cuDeviceGet");
  decltype(&::cuDeviceGetAttribute) attribute = find("cuDeviceGetAttribute");
  decltype(&::cuDevicePrimaryCtxRetain) retain = find("cuDevicePrimaryCtxRetain");
  decltype(&::cuCtxGetCurrent) current = find("cuCtxGetCurrent");
  decltype(&::cuCtxSetCurrent) set_current = find("cuCtxSetCurrent");
  decltype(&::cuModuleLoadData) load = find("cuModuleLoadData");
  decltype(&::cuModuleGetFunction) function = find("cuModuleGetFunction");
  decltype(&::cuLaunchKernel) launch = find("cuLaunchKernel");
  decltype(&::cuStreamIsCapturing) is_capturing = find("cuStreamIsCapturing");
  decltype(&::cuGetErrorString) error_string = find("cuGetErrorString");

 private:
  // A function of any type.
  struct Found {
    void* place;
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(place);
    }
  };
  Found find(const char* name) const {
    void* const found = dlsym(library, name);
    if (!found) fail(fmt::format("no {} in the libraries of CUDA", name));
    return {found};
  }
};

Libraries loaded_libraries() {
  Libraries all;
  // NVRTC opens a library of its own by name. Where it lies in no folder that the loader knows it must have
  // been opened before.
  int major = 0, minor = 0;
  Dl_info place;
  if (all.version(&major, &minor) == 0 && dladdr(reinterpret_cast<void*>(all.create), &place) != 0) {
    const std::string path = place.dli_fname;
    dlopen(
        fmt::format("{}/libnvrtc-builtins.so.{}.{}", path.substr(0, path.rfind('/')), major, minor).c_str(),
        RTLD_NOW | RTLD_LOCAL);
  }
  return all;
}

const Libraries& libraries() {
  static const Libraries all = loaded_libraries();
  return all;
}

void check(CUresult result, const char* doing) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  libraries().error_string(result, &text);
  fail(fmt::format("{}: {}", doing, text ? text : "an error without a name"));
}

// Threads in which nothing of CUDA has run yet have no context.
void have_context(c10::DeviceIndex device) {
  CUcontext context = nullptr;
  check(libraries().current(&context), "asking for the context");
  if (context) return;
  CUdevice number = 0;
  check(libraries().device_get(&number, device), "asking for the device");
  check(libraries().retain(&context, number), "asking for the device's context");
  check(libraries().set_current(context), "taking the device's context");
}

void check_nvrtc(int result, const char* doing) {
  if (result != 0) fail(fmt::format("{}: NVRTC's error {}", doing, result));
}

std::string compile(const std::vector<const char*>& options) {
  const Libraries& with = libraries();
  Libraries::Program program = nullptr;
  check_nvrtc(with.create(&program, kSource, "isograd.cu", 0, nullptr, nullptr), "reading the kernels");
  const int result = with.compile(program, static_cast<int>(options.size()), options.data());
  std::size_t size = 0;
  std::string text;
  if (result != 0) {
    check_nvrtc(with.log_size(program, &size), "reading NVRTC's messages");
    text.resize(size);
    check_nvrtc(with.log(program, text.data()), "reading NVRTC's messages");
    with.destroy(&program);
    fail(fmt::format("compiling with {}: {}", options.front(), text.c_str()));
  }
  check_nvrtc(with.code_size(program, &size), "reading compiled kernels");
  text.resize(size);
  check_nvrtc(with.code(program, text.data()), "reading compiled kernels");
  with.destroy(&program);
  return text;
}

// By this process or one before, for a GPU of this compute capability.
std::string compiled(int capability) {
  const std::string architecture = fmt::format("--gpu-architecture=sm_{}", capability);
  const std::vector<const char*> options = {architecture.c_str(), "--std=c++17", "--fmad=false"};
  int major = 0, minor = 0;
  check_nvrtc(libraries().version(&major, &minor), "asking for NVRTC's version");
  return kept(kept_in(), fmt::format("{} {}.{} {}", fmt::join(options, " "), major, minor, kSource),
              [&] { return compile(options); });
}

// By kernel, of fp32 and of bf16. Modules stay until the process ends.
using Functions = std::array<std::array<CUfunction, 2>, kKernels>;

Functions loaded_functions(c10::DeviceIndex device) {
  const Libraries& with = libraries();
  have_context(device);
  CUdevice number = 0;
  int major = 0, minor = 0;
  check(with.device_get(&number, device), "asking for the device");
  check(with.attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, number),
        "asking for the device");
  check(with.attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, number),
        "asking for the device");
  if (major < 8) fail(fmt::format("a GPU of compute capability {}.{}, and 8.0 is needed", major, minor));
  const std::string code = compiled(major * 10 + minor);
  CUmodule module = nullptr;
  check(with.load(&module, code.data()), "loading compiled kernels");
  Functions functions{};
  for (std::size_t kernel = 0; kernel < kKernels; ++kernel)
    for (const auto& [type, name] : {std::pair(0, "float"), std::pair(1, "bfloat16")})
      check(with.function(&functions[kernel][type], module,
                          fmt::format("isograd_{}_{}", kNames[kernel], name).c_str()),
            "looking for a kernel");
  return functions;
}

// Null: none. Kernels that are there stay where they are.
const Functions* functions_on(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto& known = *new std::map<c10::DeviceIndex, std::optional<Functions>>();
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end())
    return found->second ? &*found->second : nullptr;
  try {
    const c10::DeviceGuard guard(at::Device(at::kCUDA, device));
    have_context(device);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    check(libraries().is_capturing(c10::cuda::getCurrentCUDAStream(device).stream(), &status),
          "asking for the stream");
    if (status != CU_STREAM_CAPTURE_STATUS_NONE) return nullptr;  // nothing can be loaded now
    return &*known.emplace(device, loaded_functions(device)).first->second;
  } catch (const std::exception& error) {
    known.emplace(device, std::nullopt);
    const std::string why = error.what();
    TORCH_WARN_ONCE("isograd: kernels of its own are not used on this GPU, and steps take longer: ", why);
    return nullptr;
  }
}

template <typename... Arguments>
void launch(Which kernel, const at::Tensor& like, unsigned blocks, unsigned threads,
            const Arguments&... arguments) {
  const c10::DeviceIndex device = like.device().index();
  const Functions* functions = functions_on(device);
  ISOGRAD_INVARIANT(functions,
                    fmt::format("no kernel {} on GPU {}", kNames[kernel], static_cast<int>(device)));
  const c10::DeviceGuard guard(like.device());
  have_context(device);
  std::array<void*, sizeof...(Arguments)> pointers = {
      const_cast<void*>(static_cast<const void*>(&arguments))...};
  check(
      libraries().launch((*functions)[kernel][like.scalar_type() == at::kBFloat16], blocks, 1, 1, threads, 1,
                         1, 0, c10::cuda::getCurrentCUDAStream(device).stream(), pointers.data(), nullptr),
      kNames[kernel]);
}

#else

const void* functions_on(c10::DeviceIndex) { return nullptr; }

template <typename... Arguments>
void launch(Which, const at::Tensor&, unsigned, unsigned, const Arguments&...) {
  ISOGRAD_INVARIANT(false, "a build without CUDA");
}

#endif

}  // namespace

bool has_kernels(const at::Tensor& like) {
  return like.is_cuda() && (like.scalar_type() == at::kFloat || like.scalar_type() == at::kBFloat16) &&
         functions_on(like.device().index());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  at::Tensor y = at::empty_like(gate);
  if (gate.numel() == 0) return y;
  launch(kSwiGlu, gate, blocks_for(gate.numel() * gate.element_size(), kMostThreads * 16), kMostThreads,
         gate.const_data_ptr(), up.const_data_ptr(), y.mutable_data_ptr(),
         static_cast<long long>(gate.numel()));
  return y;
}

std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate,
                                                  const at::Tensor& up) {
  at::Tensor dgate = at::empty_like(gate), dup = at::empty_like(up);
  if (gate.numel() == 0) return {dgate, dup};
  launch(kSwiGluBackward, gate, blocks_for(gate.numel() * gate.element_size(), kMostThreads * 16),
         kMostThreads, dy.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(),
         dgate.mutable_data_ptr(), dup.mutable_data_ptr(), static_cast<long long>(gate.numel()));
  return {dgate, dup};
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int direction) {
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  const std::int64_t heads = x.size(1), half = x.size(2) / 2;
  launch(kRotary, x, static_cast<unsigned>(x.size(0)), rotary_threads(heads, half), x.const_data_ptr(),
         static_cast<long long>(x.stride(0)), cos.const_data_ptr(), sin.const_data_ptr(),
         y.mutable_data_ptr(), static_cast<int>(heads), static_cast<int>(half),
         static_cast<float>(direction));
  return y;
}

bool has_norm(const at::Tensor& like, std::int64_t width) {
  const std::int64_t bytes = width * static_cast<std::int64_t>(like.element_size());
  return bytes % 16 == 0 && bytes / 16 >= 32 && bytes / 16 <= kNormThreads * kNormPacks && has_kernels(like);
}

std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const std::int64_t width = weight.numel(), rows = x.numel() / width,
                     packs = width * static_cast<std::int64_t>(x.element_size()) / 16;
  at::Tensor y = at::empty(x.sizes(), x.options()), scales = at::empty({rows}, x.options().dtype(at::kFloat));
  if (rows == 0) return {y, scales};
  launch(kRmsNorm, x, static_cast<unsigned>(rows), norm_threads(packs), x.const_data_ptr(),
         weight.const_data_ptr(), y.mutable_data_ptr(), scales.mutable_data_ptr(), static_cast<int>(packs),
         static_cast<float>(epsilon));
  return {y, scales};
}

std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                    const at::Tensor& weight, const at::Tensor& scales,
                                                    const at::Tensor& residual, bool of_weight) {
  const std::int64_t width = weight.numel(), rows = x.numel() / width,
                     packs = width * static_cast<std::int64_t>(x.element_size()) / 16, each = norm_rows(rows),
                     blocks = rows == 0 ? 0 : (rows + each - 1) / each;
  at::Tensor dx = at::empty(x.sizes(), x.options()), sums;
  if (of_weight) sums = at::empty({blocks, width}, scales.options());
  if (rows != 0)
    launch(kRmsNormBackward, x, static_cast<unsigned>(blocks), norm_threads(packs), dy.const_data_ptr(),
           x.const_data_ptr(), weight.const_data_ptr(), scales.const_data_ptr(),
           residual.defined() ? residual.const_data_ptr() : nullptr, dx.mutable_data_ptr(),
           of_weight ? sums.mutable_data_ptr() : nullptr, static_cast<long long>(rows),
           static_cast<long long>(each), static_cast<int>(packs));
  return {dx, of_weight ? sums.sum(0).to(weight.scalar_type()) : sums};
}

void adamw(const AdamWScalars& scalars, std::int64_t begin, const std::vector<RunEnd>& ends,
           const at::Tensor& gradients, const at::Tensor& master, const at::Tensor& first,
           const at::Tensor& second, const at::Tensor& rounded, const at::Tensor& scale,
           const at::Tensor& stop) {
  const auto place = [](const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; };
  for (const Runs& runs : tables_of(begin, ends))
    launch(kAdamW, gradients, adamw_blocks(runs), kMostThreads, scalars, runs, gradients.const_data_ptr(),
           master.mutable_data_ptr(), first.mutable_data_ptr(), second.mutable_data_ptr(),
           rounded.defined() ? rounded.mutable_data_ptr() : static_cast<void*>(nullptr), place(scale),
           place(stop));
}

}  // namespace isograd::gpu
