#include "train/rank_zero.hpp"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <mutex>
#include <sstream>

#include "base/json.hpp"
#include "base/refuse.hpp"
#include "kernels/matmul/product.hpp"
#include "train/config_table.hpp"
#include "train/task.hpp"

namespace isograd {
namespace {

ErrorText text_of(const std::exception& error) {
  if (auto known = dynamic_cast<const Error*>(&error)) return known->text();
  if (auto file = dynamic_cast<const fs::filesystem_error*>(&error)) return isograd::text_of(*file);
  return {.where = "rank 0",
          .found = error.what(),
          .expected = "no failure",
          .action = "See rank 0's own message"};
}

nlohmann::json to_json(const ErrorText& text) {
  return {{"where", text.where}, {"found", text.found}, {"expected", text.expected}, {"action", text.action}};
}

ErrorText from_json(const nlohmann::json& json) {
  const std::string none = "(nothing)";
  return {.where = json.value("where", none),
          .found = json.value("found", none),
          .expected = json.value("expected", none),
          .action = json.value("action", none)};
}

// The first rank that has something; the number of ranks where none has. Collective.
int first_rank(Group& group, bool has) {
  at::Tensor first = at::full({1}, has ? group.rank() : group.size(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  return static_cast<int>(first.item<std::int64_t>());
}

using KeyValues = std::vector<std::pair<std::string, std::string>>;  // values without an end of line

// Collective: throws on all ranks where a value is not that of rank 0.
void refuse_others(const KeyValues& own, Group& world, const std::string& expected,
                   const std::string& action) {
  std::string text;
  for (const auto& [name, value] : own) text += value + '\n';
  const std::string first = broadcast_text(world, text);
  on_every_rank(world, [&] {
    std::istringstream values(first);
    std::string value;
    for (const auto& [name, here] : own)
      if (std::getline(values, value); value != here)
        refuse(name, fmt::format("{} on rank {}, {} on rank 0", here, world.rank(), value), expected, action);
  });
}

}  // namespace

std::string first_text(Group& group, const std::string& own) {
  const int rank = first_rank(group, !own.empty());
  return rank == group.size() ? "" : fmt::format("{} on rank {}", broadcast_text(group, own, rank), rank);
}

bool on_any_rank(Group& group, bool own) { return first_rank(group, own) < group.size(); }

bool of_rank_zero(Group& group, bool own) {
  at::Tensor said = at::full({1}, own ? 1 : 0, at::kLong);
  group.broadcast(said, 0);
  return said.item<std::int64_t>() != 0;
}

std::string broadcast_text(Group& group, const std::string& text, int from) {
  if (group.size() == 1) return text;
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast(length, from);
  const auto bytes = length.item<std::int64_t>();
  if (bytes == 0) return "";
  at::Tensor content = at::zeros({bytes}, at::kByte);
  if (group.rank() == from) std::memcpy(content.data_ptr(), text.data(), text.size());
  group.broadcast(content, from);
  return std::string(static_cast<const char*>(content.data_ptr()), static_cast<std::size_t>(bytes));
}

void on_rank_zero(Group& group, const std::function<void()>& work) {
  nlohmann::json message;
  std::exception_ptr failure;
  if (group.rank() == 0) {
    try {
      work();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      message = to_json(text_of(error));
      message["config"] = exit_status(error) == 2;
    }
  }
  const std::string outcome = broadcast_text(group, failure ? json_text(message) : std::string());
  if (outcome.empty()) return;
  group.barrier();  // a rank that leaves would free memory that others still read the error from
  message = parse_json(outcome).value;
  ErrorText text = from_json(message);
  if (message.is_object() && message.value("config", nlohmann::json()) == true) throw AgreedConfigError(text);
  if (failure) std::rethrow_exception(failure);
  text.where = "rank 0: " + text.where;
  throw PeerError(text);
}

void on_every_rank(Group& group, const std::function<void()>& work) {
  std::optional<ErrorText> problem;
  try {
    work();
  } catch (const ConfigError& error) {
    problem = error.text();
  }
  throw_agreed(group, problem);
}

void throw_agreed(Group& group, const std::optional<ErrorText>& problem) {
  const int from = first_rank(group, problem.has_value());
  if (from == group.size()) return;
  const std::string text =
      broadcast_text(group, group.rank() == from ? json_text(to_json(*problem)) : std::string(), from);
  group.barrier();  // as above
  throw AgreedConfigError(from_json(parse_json(text).value));
}

void check_same_configuration(const RunConfig& config, Group& world) {
  if (world.size() == 1) return;
  KeyValues own;
  for (const ConfigKey& key : config_keys())
    if (key.ranks == Ranks::kAlike) own.emplace_back(key.name, toml_text(key.get(config)));
  // No key: who multiplies. What several ranks compute alike, as those of tp do, must be the same bits.
  std::string_view products;
  on_every_rank(world, [&] { products = name_of(multiplier()); });
  own.emplace_back(kMultiplierVariable, products);
  refuse_others(own, world, "one configuration on all ranks",
                "Start every rank with the same file, --set and environment");
}

void check_same_data(const TaskFacts& facts, Group& world) {
  if (world.size() == 1) return;
  KeyValues own = {{"data.tokenizer", toml_text(facts.tokenizer)},
                   {"training " + facts.documents, std::to_string(facts.train_documents)},
                   {"validation " + facts.documents, std::to_string(facts.validation_documents)},
                   {facts.tokens + " of all data", std::to_string(facts.num_tokens)}};
  for (const auto& [name, value] : facts.order) own.emplace_back(name, toml_text(value));
  refuse_others(own, world, "the same data on all ranks",
                "Copy the same files to every host, whatever their paths there");
}

std::vector<ReportTable> tables_of_rank_zero(Group& world, std::vector<ReportTable> own) {
  const bool passed = std::ranges::all_of(own, &ReportTable::passed);
  const bool passed_there = of_rank_zero(world, passed);
  if (world.rank() == 0) return own;
  if (passed_there) return {};
  return {{"see rank 0", "", {}, {}, /*passed=*/false}};
}

namespace {

std::atomic<bool> stop_asked{false}, asked_by_hand{false}, save_asked{false};
// Times of the first SIGINT, SIGTERM or SIGHUP, and of the last wish for a save; 0: none.
std::atomic<long long> asked_at_ms{0}, wished_at_ms{0};
static_assert(std::atomic<long long>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);
constexpr long long kSameMs = 1000;  // signals within this time are one wish

std::mutex guard;
int holders = 0;
bool user_signals_held = false;

long long now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // async-signal-safe
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

extern "C" void on_stop(int signal) {
  stop_asked = true;
  if (signal == SIGINT) asked_by_hand = true;
  long long none = 0;
  if (asked_at_ms.compare_exchange_strong(none, now_ms()) || now_ms() - none < kSameMs) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}
extern "C" void on_user_stop(int) { stop_asked = true; }
extern "C" void on_user_save(int) {
  const long long now = now_ms(), before = wished_at_ms;
  if (before != 0 && now - before < kSameMs) return;
  wished_at_ms = now, save_asked = true;
}

using Handler = void (*)(int);
Handler handler_of(const std::string& wish) {
  return wish == "stop" ? on_user_stop : wish == "save" ? on_user_save : SIG_IGN;
}

struct Handled {
  int signal;
  Handler handler{};
  struct sigaction before {};
};
// The last two become errors of the write that caused them.
std::array<Handled, 7> handled = {{{SIGINT, on_stop},
                                   {SIGTERM, on_stop},
                                   {SIGHUP, on_stop},
                                   {SIGUSR1},
                                   {SIGUSR2},
                                   {SIGXFSZ, SIG_IGN},
                                   {SIGPIPE, SIG_IGN}}};

void user_signals(int how) {
  sigset_t both;
  sigemptyset(&both), sigaddset(&both, SIGUSR1), sigaddset(&both, SIGUSR2);
  ::pthread_sigmask(how, &both, nullptr);
}

}  // namespace

StopSignals::StopSignals(const RunConfig& config) {
  std::lock_guard<std::mutex> lock(guard);
  if (holders++ > 0) return;
  stop_asked = asked_by_hand = save_asked = false;
  asked_at_ms = wished_at_ms = 0;
  for (Handled& each : handled) {
    if (each.signal == SIGUSR1) each.handler = handler_of(config.run.on_signal.usr1);
    if (each.signal == SIGUSR2) each.handler = handler_of(config.run.on_signal.usr2);
    struct sigaction action {};
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;  // writes to files are not interrupted
    action.sa_handler = each.handler;
    sigaction(each.signal, &action, &each.before);
    if (each.signal == SIGHUP && each.before.sa_handler == SIG_IGN) sigaction(SIGHUP, &each.before, nullptr);
  }
  user_signals(SIG_UNBLOCK);
}

StopSignals::~StopSignals() {
  std::lock_guard<std::mutex> lock(guard);
  // A program that held signals ends with its run, whose status no signal between the two replaces. Blocking
  // them here would not do: threads that the run started have them unblocked.
  if (--holders > 0 || user_signals_held) return;
  for (const Handled& each : handled) sigaction(each.signal, &each.before, nullptr);
}

void StopSignals::hold() {
  std::lock_guard<std::mutex> lock(guard);
  user_signals_held = true;
  user_signals(SIG_BLOCK);
}
bool StopSignals::requested() { return stop_asked.load(std::memory_order_relaxed); }
bool StopSignals::by_hand() { return asked_by_hand; }
bool StopSignals::take_save() { return save_asked.exchange(false); }
void StopSignals::save_begins() { wished_at_ms = now_ms(), save_asked = false; }

}  // namespace isograd
