// For tests: stands in for LibTorch's CPU allocator and remembers the most bytes that were alive at once.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace isograd {

// From construction to destruction; memory may be freed later. One at a time.
class CountingAllocator : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) {
    Account& a = account();
    a.alive = a.peak = 0;
    c10::SetAllocator(c10::kCPU, this, kPriority);
  }
  ~CountingAllocator() override { c10::SetAllocator(c10::kCPU, inner_, kPriority); }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  static std::int64_t peak() { return account().peak; }

  // The pointer is its own context: oneDNN's scratch memory asks for that.
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free, c10::Device(c10::kCPU)};
    constexpr std::size_t kAlignment = 64;
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    Account& a = account();
    const std::lock_guard lock(a.mutex);
    a.sizes[memory] = static_cast<std::int64_t>(bytes);
    a.alive += static_cast<std::int64_t>(bytes);
    a.peak = std::max(a.peak, a.alive);
    return {memory, memory, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static constexpr std::uint8_t kPriority = 255;
  struct Account {
    std::mutex mutex;
    std::unordered_map<void*, std::int64_t> sizes;
    std::int64_t alive = 0, peak = 0;
  };
  static Account& account() {
    static Account one;
    return one;
  }
  static void free(void* memory) {
    if (!memory) return;
    Account& a = account();
    {
      const std::lock_guard lock(a.mutex);
      const auto found = a.sizes.find(memory);
      a.alive -= found->second;
      a.sizes.erase(found);
    }
    std::free(memory);
  }

  c10::Allocator* inner_;
};

}  // namespace isograd
