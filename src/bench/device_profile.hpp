// What a device does in a step: kernels, waits of the host for it, its idle time and its memory.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>

namespace isograd {

void synchronize(c10::Device device);  // a CPU: nothing to wait for

// Runs `step` so many times under LibTorch's profiler. Figures are those of one step: {"kernels", "waits"
// (calls in which the host waits for the device), "copies_to_host", "busy_ms" (some kernel or copy runs),
// "step_ms", "idle" (share of the step in which none does), "peak_bytes" (of LibTorch's allocator), "top":
// the 15 kernels that take longest,
// {"name", "count", "ms"}}, or {"problem": why there are none}. Empty on a CPU.
nlohmann::ordered_json profile_steps(c10::Device device, std::int64_t steps,
                                     const std::function<void()>& step);

}  // namespace isograd
