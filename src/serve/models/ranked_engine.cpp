#include "serve/models/ranked_engine.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>

#include "base/refuse.hpp"

namespace isograd::serve {
namespace {

constexpr std::int64_t kBeat = 0, kEnd = -1;  // in place of a message's length

enum class Call : std::int64_t {
  kCreate,
  kForwardBackward,
  kOptimStep,
  kDropGradient,
  kRemove,
  kSave,
  kLoad,
  kOpenSamplerOf
};

// ---- plain data as bytes, between processes of one program ----

class Packer {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void operator()(const T& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void operator()(const std::string& text) { list(text); }
  template <class T>
  void operator()(const std::vector<T>& values) {
    if constexpr (std::is_arithmetic_v<T>) {
      list(values);
    } else {
      (*this)(values.size());
      for (const T& value : values) fields(*this, value);
    }
  }
  template <class T>
  void operator()(const std::map<std::string, T>& values) {
    (*this)(values.size());
    for (const auto& [key, value] : values) (*this)(key), fields(*this, value);
  }
  std::string bytes;

 private:
  template <class List>
  void list(const List& values) {
    (*this)(values.size());
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  }
};

class Unpacker {
 public:
  explicit Unpacker(std::string from) : bytes_(std::move(from)) {}
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void operator()(T& value) { take(&value, sizeof value); }
  void operator()(std::string& text) { list(text); }
  template <class T>
  void operator()(std::vector<T>& values) {
    if constexpr (std::is_arithmetic_v<T>) {
      list(values);
    } else {
      values.resize(size());
      for (T& value : values) fields(*this, value);
    }
  }
  template <class T>
  void operator()(std::map<std::string, T>& values) {
    for (std::size_t i = size(); i > 0; --i) {
      std::string key;
      (*this)(key), fields(*this, values[key]);
    }
  }

 private:
  std::size_t size() {
    std::size_t value = 0;
    take(&value, sizeof value);
    return value;
  }
  template <class List>
  void list(List& values) {
    values.resize(size());
    take(values.data(), values.size() * sizeof(values[0]));
  }
  void take(void* to, std::size_t count) {
    ISOGRAD_INVARIANT(count <= bytes_.size() - next_, "a message that ends too early");
    if (count > 0) std::memcpy(to, bytes_.data() + next_, count);
    next_ += count;
  }
  std::string bytes_;
  std::size_t next_ = 0;
};

void fields(Packer& pack, const std::string& text) { pack(text); }
void fields(Unpacker& unpack, std::string& text) { unpack(text); }
void fields(Packer& pack, const ConfigValue& value) {
  const auto* number = std::get_if<double>(&value);
  pack(number != nullptr);
  number ? pack(*number) : pack(std::get<std::string>(value));
}
void fields(Unpacker& unpack, ConfigValue& value) {
  bool is_number = false;
  unpack(is_number);
  double number = 0;
  std::string text;
  is_number ? unpack(number) : unpack(text);
  value = is_number ? ConfigValue(number) : ConfigValue(text);
}
// The same lines for both directions; `value` is const for a Packer.
template <class Archive, class Value>
void fields(Archive& each, Value& value) {
  using Plain = std::remove_const_t<Value>;
  if constexpr (std::is_same_v<Plain, Array>) {
    each(value.shape), each(value.numbers), each(value.integers);
  } else if constexpr (std::is_same_v<Plain, Datum>) {
    each(value.tokens), each(value.inputs);
  } else if constexpr (std::is_same_v<Plain, ForwardBackward>) {
    each(value.data), each(value.loss), each(value.config), each(value.forward_only);
  } else {
    static_assert(std::is_same_v<Plain, CreateModel>);
    each(value.base), each(value.lora), each(value.metadata);
  }
}

// Collective; `message` on rank 0. Returns its length, kBeat or kEnd.
std::int64_t exchange(Group& group, std::int64_t length, std::string& message) {
  at::Tensor size = at::full({1}, length, at::kLong);
  group.broadcast(size, 0);
  length = size.item<std::int64_t>();
  if (length <= 0) return length;
  at::Tensor bytes = at::empty({length}, at::kByte);
  if (group.rank() == 0) std::memcpy(bytes.mutable_data_ptr(), message.data(), message.size());
  group.broadcast(bytes, 0);
  message.assign(static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(length));
  return length;
}

}  // namespace

// A call and its arguments, of which most calls have some.
struct RankedEngine::Order {
  Call call{};
  std::string model{};
  std::string directory{};
  Save which{};
  bool optimizer = false;
  std::map<std::string, std::string> metadata{};
  AdamParams params{};
  CreateModel create{};
  const ForwardBackward* batch = nullptr;

  std::string pack() const {
    Packer packer;
    packer(call), packer(model), packer(directory), packer(which), packer(optimizer), packer(metadata);
    packer(params), fields(packer, create);
    if (call == Call::kForwardBackward) fields(packer, *batch);
    return std::move(packer.bytes);
  }
};

RankedEngine::RankedEngine(ModelEngine& own, World& world, Lost when_lost)
    : own_(own), group_(world.group), when_lost_(std::move(when_lost)) {
  using std::chrono::milliseconds;
  const milliseconds pause = std::min<milliseconds>(group_.timeout() / 4, std::chrono::seconds(5));
  beat_ = std::thread([this, pause] {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, pause, [this] { return ended_; })) {
      if (lost_) continue;
      try {
        std::string nothing;
        exchange(group_, kBeat, nothing);
        group_.barrier();  // the others answer
      } catch (const PeerError& error) {
        lost_ = std::current_exception();
        if (when_lost_) when_lost_(error);
      }
    }
  });
}

RankedEngine::~RankedEngine() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  beat_.join();
  if (lost_) return;
  try {
    std::string nothing;
    exchange(group_, kEnd, nothing);
  } catch (const std::exception&) {  // they find that this rank has ended
  }
}

template <class Work>
auto RankedEngine::together(const Order& order, Work work) {
  const std::lock_guard lock(mutex_);
  if (lost_) std::rethrow_exception(lost_);
  try {
    std::string message = order.pack();
    exchange(group_, static_cast<std::int64_t>(message.size()), message);
    return work();
  } catch (const PeerError& error) {
    lost_ = std::current_exception();
    if (when_lost_) when_lost_(error);
    throw;
  }
}

void RankedEngine::create(const std::string& model, const CreateModel& request) {
  together({.call = Call::kCreate, .model = model, .create = request}, [&] { own_.create(model, request); });
}
ForwardBackwardResult RankedEngine::forward_backward(const std::string& model,
                                                     const ForwardBackward& request) {
  return together({.call = Call::kForwardBackward, .model = model, .batch = &request},
                  [&] { return own_.forward_backward(model, request); });
}
Metrics RankedEngine::optim_step(const std::string& model, const AdamParams& params) {
  return together({.call = Call::kOptimStep, .model = model, .params = params},
                  [&] { return own_.optim_step(model, params); });
}
void RankedEngine::drop_gradient(const std::string& model) {
  together({.call = Call::kDropGradient, .model = model}, [&] { own_.drop_gradient(model); });
}
void RankedEngine::remove(const std::string& model) {
  together({.call = Call::kRemove, .model = model}, [&] { own_.remove(model); });
}
std::int64_t RankedEngine::save(const std::string& model, Save which,
                                const std::filesystem::path& directory) {
  return together({.call = Call::kSave, .model = model, .directory = directory.string(), .which = which},
                  [&] { return own_.save(model, which, directory); });
}
void RankedEngine::load(const std::string& model, const std::filesystem::path& directory, bool optimizer,
                        const std::map<std::string, std::string>& metadata) {
  together({.call = Call::kLoad,
            .model = model,
            .directory = std::filesystem::absolute(directory).string(),
            .optimizer = optimizer,
            .metadata = metadata},
           [&] { own_.load(model, directory, optimizer, metadata); });
}
void RankedEngine::open_sampler_of(const std::string& sampler, const std::string& model) {
  together({.call = Call::kOpenSamplerOf, .model = model}, [&] { own_.open_sampler_of(sampler, model); });
}

void follow(ModelEngine& own, World& world) {
  for (std::string message;;) {
    const std::int64_t length = exchange(world.group, 0, message);
    if (length == kEnd) return;
    if (length == kBeat) {
      world.group.barrier();
      continue;
    }
    Unpacker unpack(std::move(message));
    Call call{};
    std::string model, directory;
    Engine::Save which{};
    bool optimizer = false;
    std::map<std::string, std::string> metadata;
    AdamParams params;
    CreateModel create;
    unpack(call), unpack(model), unpack(directory), unpack(which), unpack(optimizer), unpack(metadata);
    unpack(params), fields(unpack, create);
    try {
      switch (call) {
        case Call::kCreate: own.create(model, create); break;
        case Call::kForwardBackward: {
          ForwardBackward batch;
          fields(unpack, batch);
          own.forward_backward(model, batch);
          break;
        }
        case Call::kOptimStep: own.optim_step(model, params); break;
        case Call::kDropGradient: own.drop_gradient(model); break;
        case Call::kRemove: own.remove(model); break;
        case Call::kSave: own.save(model, which, directory); break;
        case Call::kLoad: own.load(model, directory, optimizer, metadata); break;
        case Call::kOpenSamplerOf: own.open_sampler_of("", model); break;
      }
    } catch (const ConfigError&) {  // rank 0 has it too, and answers
    } catch (const std::exception& error) {
      world.group.poison(error.what());
      throw;
    }
  }
}

}  // namespace isograd::serve
