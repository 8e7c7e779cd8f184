#include "layout/cost/meter.hpp"

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "base/account.hpp"

namespace isograd {
namespace {

class Watch final : public c10::Allocator {
 public:
  // The pointer is its own context: oneDNN's scratch memory asks for that.
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    constexpr std::size_t kAlignment = 64;
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    TORCH_CHECK_WITH(OutOfMemoryError, memory, "no memory for ", bytes, " bytes");
    if (const auto& account = memory_account()) {
      account->add(static_cast<std::int64_t>(bytes));
      const std::lock_guard lock(mutex());
      owners()[memory] = {account, static_cast<std::int64_t>(bytes)};
    }
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  struct Owner {
    std::shared_ptr<MemoryAccount> account;
    std::int64_t bytes = 0;
  };
  // Leaked: tensors may be freed after every static object is gone.
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static std::unordered_map<void*, Owner>& owners() {
    static auto* one = new std::unordered_map<void*, Owner>;
    return *one;
  }
  static void release(void* memory) {
    if (!memory) return;
    {
      const std::lock_guard lock(mutex());
      if (const auto found = owners().find(memory); found != owners().end()) {
        found->second.account->alive -= found->second.bytes;
        owners().erase(found);
      }
    }
    std::free(memory);
  }
};

}  // namespace

void MemoryMeter::install() {
  static std::once_flag once;
  constexpr std::uint8_t kPriority = 200;
  std::call_once(once, [] { c10::SetAllocator(c10::kCPU, new Watch, kPriority); });
}

MemoryMeter::MemoryMeter() : account_(std::make_shared<MemoryAccount>()), outer_(memory_account()) {
  install();
  memory_account() = account_;
}
MemoryMeter::~MemoryMeter() { memory_account() = outer_; }

std::int64_t MemoryMeter::alive() const { return account_->alive; }
std::int64_t MemoryMeter::shared() const { return account_->shared; }
std::int64_t MemoryMeter::peak() const { return account_->peak; }
void MemoryMeter::restart_peak() { account_->peak = account_->alive.load(); }

}  // namespace isograd
