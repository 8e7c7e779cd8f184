#include "bench/device_profile.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace isograd {
namespace {

namespace impl = torch::profiler::impl;
namespace profiler = torch::autograd::profiler;

using Nanoseconds = std::int64_t;

Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Calls of the runtime that return when the device has done something.
bool is_wait(const std::string& name) {
  static const std::set<std::string> waits = {"cudaStreamSynchronize", "cudaDeviceSynchronize",
                                              "cudaEventSynchronize",  "cudaMemcpy",
                                              "cuStreamSynchronize",   "cuCtxSynchronize"};
  return waits.contains(name);
}

struct Kernel {
  std::int64_t count = 0;
  Nanoseconds time = 0;
};

// Time that at least one of the intervals covers.
Nanoseconds covered(std::vector<std::pair<Nanoseconds, Nanoseconds>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  Nanoseconds sum = 0, until = 0;
  for (const auto& [begin, end] : intervals) {
    sum += std::max<Nanoseconds>(0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  return sum;
}

}  // namespace

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

nlohmann::ordered_json profile_steps(c10::Device device, std::int64_t steps,
                                     const std::function<void()>& step) {
  nlohmann::ordered_json found = nlohmann::ordered_json::object();
  if (device.is_cpu()) return found;
  synchronize(device);
  auto* const allocator = c10::getDeviceAllocator(device.type());
  allocator->resetPeakStats(device.index());
  try {
    const impl::ProfilerConfig config(impl::ProfilerState::KINETO);
    const std::set<impl::ActivityType> activities{impl::ActivityType::CUDA};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    const Nanoseconds begin = now();
    for (std::int64_t i = 0; i < steps; ++i) step();
    const Nanoseconds issued = now();
    // Apart in time, so that the profiler's clock tells the steps' waits from this one.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    synchronize(device);
    const auto result = profiler::disableProfiler();

    std::map<std::string, Kernel> kernels;
    std::vector<std::pair<Nanoseconds, Nanoseconds>> busy;
    std::int64_t count = 0, waits = 0, copies = 0;
    Nanoseconds end = issued;
    for (const auto& event : result->events()) {
      const std::string name = event.name();
      const auto from = static_cast<Nanoseconds>(event.startNs()),
                 to = static_cast<Nanoseconds>(event.endNs());
      if (event.deviceType() == c10::kCPU) {
        waits += is_wait(name) && from < issued + 1'000'000 ? 1 : 0;
        continue;
      }
      busy.emplace_back(from, to);
      end = std::max(end, to);
      Kernel& kernel = kernels[name];
      ++kernel.count, kernel.time += to - from;
      copies += name.starts_with("Memcpy DtoH") ? 1 : 0;
      count += name.starts_with("Mem") ? 0 : 1;
    }
    const auto each = [&](auto value) { return static_cast<double>(value) / static_cast<double>(steps); };
    const double busy_ns = static_cast<double>(covered(std::move(busy)));
    found["kernels"] = each(count), found["waits"] = each(waits), found["copies_to_host"] = each(copies);
    found["busy_ms"] = each(busy_ns) / 1e6, found["step_ms"] = each(end - begin) / 1e6;
    found["idle"] = 1 - busy_ns / static_cast<double>(end - begin);
    std::vector<std::pair<std::string, Kernel>> longest(kernels.begin(), kernels.end());
    std::sort(longest.begin(), longest.end(),
              [](const auto& a, const auto& b) { return a.second.time > b.second.time; });
    constexpr std::size_t kShown = 15;
    if (longest.size() > kShown) longest.resize(kShown);
    found["top"] = nlohmann::ordered_json::array();
    for (const auto& [name, kernel] : longest)
      found["top"].push_back(
          {{"name", name.substr(0, 120)}, {"count", each(kernel.count)}, {"ms", each(kernel.time) / 1e6}});
  } catch (const std::exception& error) {
    found["problem"] = std::string(error.what()).substr(0, 500);
  }
  const auto bytes = allocator->getDeviceStats(device.index()).allocated_bytes;
  found["peak_bytes"] = bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak;
  return found;
}

}  // namespace isograd
