#include "serve/models/ranked_engine.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/refuse.hpp"
#include "serve/models/trained_model.hpp"

namespace isograd::serve {
namespace {

constexpr std::int64_t kBeat = 0, kEnd = -1;  // in place of a message's length

// Plain data as bytes, between processes of one program: the same lines write and read.
class Message {
 public:
  Message() = default;
  explicit Message(std::string from) : bytes(std::move(from)), reads_(true) {}

  // Reads into the values, or writes them and leaves them as they are.
  template <class... Values>
  void each(Values&... values) {
    (one(const_cast<std::remove_const_t<Values>&>(values)), ...);
  }
  std::string bytes;

 private:
  template <class T>
  void one(T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      raw(&value, sizeof value);
    } else if constexpr (std::is_same_v<T, Array>) {
      each(value.shape, value.numbers, value.integers);
    } else if constexpr (std::is_same_v<T, Datum>) {
      each(value.tokens, value.inputs);
    } else if constexpr (std::is_same_v<T, ForwardBackward>) {
      each(value.data, value.loss, value.config, value.forward_only);
    } else {
      static_assert(std::is_same_v<T, CreateModel>);
      each(value.base, value.lora, value.metadata);
    }
  }
  void one(std::string& text) { list(text); }
  template <class T>
  void one(std::vector<T>& values) {
    list(values);
  }
  void one(fs::path& path) {
    std::string text = path.string();
    one(text);
    if (reads_) path = text;
  }
  void one(ConfigValue& value) {
    bool is_number = std::holds_alternative<double>(value);
    one(is_number);
    if (reads_ && !is_number) value = std::string();
    is_number ? one(std::get<double>(value)) : one(std::get<std::string>(value));
  }
  template <class T>
  void one(std::map<std::string, T>& values) {
    std::size_t size = values.size();
    one(size);
    if (!reads_)
      for (auto& [key, value] : values) each(key, value);
    else
      for (std::string key; size > 0; --size) one(key), one(values[key]);
  }
  template <class List>
  void list(List& values) {
    std::size_t size = values.size();
    one(size);
    if (reads_) values.resize(size);
    if constexpr (std::is_arithmetic_v<typename List::value_type>)
      raw(values.data(), size * sizeof(values[0]));
    else
      for (auto& value : values) one(value);
  }
  void raw(void* at, std::size_t count) {
    if (!reads_) {
      bytes.append(static_cast<const char*>(at), count);
      return;
    }
    ISOGRAD_INVARIANT(count <= bytes.size() - next_, "a message that ends too early");
    if (count > 0) std::memcpy(at, bytes.data() + next_, count);
    next_ += count;
  }
  bool reads_ = false;
  std::size_t next_ = 0;
};

// Makes a call with the arguments of a message.
template <class Result, class... Arguments>
auto follow_call(Result (ModelEngine::*call)(Arguments...)) {
  return [call](ModelEngine& own, Message& message) {
    std::tuple<std::remove_cvref_t<Arguments>...> arguments;
    std::apply([&](auto&... argument) { message.each(argument...), (own.*call)(argument...); }, arguments);
  };
}

// The calls that all ranks make; a message begins with a name.
const std::map<std::string, std::function<void(ModelEngine&, Message&)>> kCalls = {
    {"create", follow_call(&ModelEngine::create)},
    {"forward_backward", follow_call(&ModelEngine::forward_backward)},
    {"optim_step", follow_call(&ModelEngine::optim_step)},
    {"drop_gradient", follow_call(&ModelEngine::drop_gradient)},
    {"remove", follow_call(&ModelEngine::remove)},
    {"save", follow_call(&ModelEngine::save)},
    {"load", follow_call(&ModelEngine::load)},
    {"open_sampler_of", follow_call(&ModelEngine::open_sampler_of)}};

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

RankedEngine::RankedEngine(ModelEngineOptions options, Lost when_lost)
    : ModelEngine(options), group_(options.ranks->world.group), when_lost_(std::move(when_lost)) {
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

template <class Arguments, class Own>
auto RankedEngine::together(const char* call, const Arguments& arguments, Own own) {
  Message message;
  const std::string name = call;
  std::apply([&](const auto&... argument) { message.each(name, argument...); }, arguments);
  const std::lock_guard lock(mutex_);
  if (lost_) std::rethrow_exception(lost_);
  try {
    exchange(group_, static_cast<std::int64_t>(message.bytes.size()), message.bytes);
    return own();
  } catch (const PeerError& error) {
    lost_ = std::current_exception();
    if (when_lost_) when_lost_(error);
    throw;
  }
}

void RankedEngine::create(const std::string& model, const CreateModel& request) {
  together("create", std::tie(model, request), [&] { ModelEngine::create(model, request); });
}
ForwardBackwardResult RankedEngine::forward_backward(const std::string& model,
                                                     const ForwardBackward& request) {
  return together("forward_backward", std::tie(model, request),
                  [&] { return ModelEngine::forward_backward(model, request); });
}
Metrics RankedEngine::optim_step(const std::string& model, const AdamParams& params) {
  return together("optim_step", std::tie(model, params),
                  [&] { return ModelEngine::optim_step(model, params); });
}
void RankedEngine::drop_gradient(const std::string& model) {
  together("drop_gradient", std::tie(model), [&] { ModelEngine::drop_gradient(model); });
}
void RankedEngine::remove(const std::string& model) {
  together("remove", std::tie(model), [&] { ModelEngine::remove(model); });
}
std::int64_t RankedEngine::save(const std::string& model, Save which, const fs::path& directory) {
  return together("save", std::tie(model, which, directory),
                  [&] { return ModelEngine::save(model, which, directory); });
}
void RankedEngine::load(const std::string& model, const fs::path& directory, bool optimizer,
                        const std::map<std::string, std::string>& metadata) {
  const fs::path absolute = fs::absolute(directory);
  together("load", std::tie(model, absolute, optimizer, metadata),
           [&] { ModelEngine::load(model, directory, optimizer, metadata); });
}
void RankedEngine::open_sampler_of(const std::string& sampler, const std::string& model) {
  together("open_sampler_of", std::tie(sampler, model),
           [&] { ModelEngine::open_sampler_of(sampler, model); });
}

void follow(ModelEngine& own, World& world) {
  for (std::string bytes;;) {
    const std::int64_t length = exchange(world.group, 0, bytes);
    if (length == kEnd) return;
    if (length == kBeat) {
      world.group.barrier();
      continue;
    }
    Message message(std::move(bytes));
    std::string call;
    message.each(call);
    try {
      kCalls.at(call)(own, message);
    } catch (const ConfigError&) {  // rank 0 has it too, and answers
    } catch (const std::exception& error) {
      world.group.poison(error.what());
      throw;
    }
  }
}

}  // namespace isograd::serve
