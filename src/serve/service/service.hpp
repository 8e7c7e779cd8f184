// The service of a training server: every endpoint that the tinker SDK and xorl's client call, over an
// Engine. handle() accepts requests and journals them, run() computes them. The journal determines every bit
// of every answer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "isograd/error.hpp"
#include "serve/http/http.hpp"
#include "serve/service/engine.hpp"
#include "serve/service/state.hpp"
#include "serve/store/store.hpp"

namespace isograd::serve {

// They hold for each tenant; docs/server.md has their meaning. 0: none.
using Limits = std::map<std::string, std::int64_t>;
inline const Limits kLimits{{"models", 64},
                            {"samplers", 64},
                            {"sessions", 1024},
                            {"checkpoints", 0},
                            {"checkpoint-bytes", 0},
                            {"dump-bytes", std::int64_t{64} << 30},
                            {"metadata-bytes", std::int64_t{64} << 20},
                            {"result-bytes", std::int64_t{1} << 30},
                            {"open-requests", 4096},
                            {"open-samples", 2048},
                            {"request-bytes", std::int64_t{1} << 30}};

// An operation was refused before it began: its model is as it was.
struct LimitReached : ConfigError {
  using ConfigError::ConfigError;
};

// Answered with this status. No mistake of a user has one that clients retry: 408, 409, 429, 5xx.
struct Refusal {
  int status;
  std::string detail;
};
[[noreturn]] void refuse_unknown(const char* kind, const std::string& name);
// The tenant's own thing of that name; another's looks like an unknown one.
template <class All>
auto& own(All& all, const char* kind, const std::string& name, const std::string& tenant) {
  const auto found = all.find(name);
  if (found == all.end() || found->second.tenant != tenant) refuse_unknown(kind, name);
  return found->second;
}

inline bool is_xorl(const HttpRequest& request) { return !request.headers.contains("x-api-key"); }

struct ServiceOptions {
  std::filesystem::path state;  // a folder of this server alone
  bool sync = false;            // survive power cuts, not only kills
  Limits limits = kLimits;
  double poll_seconds = 25, session_seconds = 900, result_seconds = 3600;
  std::int64_t piece_tokens = 8192;  // a forward_backward is computed in pieces of about this size
  // An operation in which the process died this often in a row is failed, not tried again. Kills from outside
  // look the same and must not be noticed, hence the large number.
  int deaths = 20;
  // A snapshot is due when a replay would take longer than `snapshot_least`, and longer than writing one
  // takes divided by `snapshot_share`: a thread of its own writes no more than that share of the time. It is
  // put off until steps are whole, at most for three operations.
  double snapshot_least = 2, snapshot_share = 0.1;
  std::string client_config = R"({"use_pyqwest_transport": false})";
  bool print_steps = true;
};

class Service {
 public:
  // Restores the state folder: the last snapshot, then the journal. ConfigError: it cannot be restored.
  Service(ServiceOptions options, Engine& engine);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Called on the I/O thread; never waits for the engine. A server without keys has one tenant, "".
  void handle(const HttpRequest& request, const std::string& tenant, Respond respond);
  // The answer to a request whose body was too large to be read. An operation's sequence is used by it:
  // otherwise the later ones would wait for it. Null: it was none.
  std::unique_ptr<HttpReply> unread(const HttpRequest& request, const std::string& tenant);
  // Computes until stop(), which any thread may call. What is unfinished then goes on at the next start.
  void run();
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using OptionalReply = std::optional<HttpReply>;
  // Results of an operation. `change` is applied to the state together with the result.
  struct Outcome {
    std::string type = "application/json", body{};
    std::string error{}, category{};  // empty: it succeeded
    bool poison = false;              // a failure that fails the model's later operations
    bool intact = false;              // a failure before it began: the model is as it was
    bool lost = false;                // a failure that a replay may have where the operation succeeded
    int status = 200;                 // of a control's reply
    std::function<void()> change{};
    std::vector<std::string> closed{};  // samplers
  };
  struct Attempt;
  static constexpr std::string_view kSamples = "samples";  // what is done in a pass of several
  enum class Turn { kNone, kControl, kTraining, kSampling, kSnapshot };

  // ---- requests (requests.cpp): on the I/O thread ----
  OptionalReply answer(const HttpRequest& request, const std::string& tenant, Respond& respond);
  OptionalReply route(const HttpRequest& request, const std::string& tenant, Respond& respond);
  HttpReply create_model(const HttpRequest& request, bool loads, const std::string& tenant);
  HttpReply submit_operation(const HttpRequest& request, const std::string& path, const std::string& tenant);
  HttpReply create_sampler(const HttpRequest& request, const std::string& tenant);
  HttpReply submit_sample(const HttpRequest& request, const std::string& tenant);
  OptionalReply kill_session(const HttpRequest& request, const std::string& tenant, Respond respond);
  OptionalReply change_checkpoint(const HttpRequest& request, const std::string& checkpoint,
                                  const std::string& change, const std::string& tenant, Respond& respond);
  OptionalReply retrieve(const std::string& id, const std::string& tenant,
                         Respond& respond);  // with the lock
  State::OpenSession& usable_session(const std::string& id, const std::string& tenant);
  std::string xorl_session(const std::string& tenant);
  State::Model& find_model(const std::string& id, const std::string& tenant, bool xorl);
  std::string checkpoint_called(const std::string& name, const std::string& id,
                                const std::string& tenant) const;  // its path
  std::vector<const State::Model*> models_called(const std::string& name, const std::string& tenant) const;
  const BaseModel* find_base(const std::string& name) const;
  const State::Saved* find_saved(const std::string& path, const std::string& tenant, double now) const;
  std::int64_t most(const char* limit) const;
  void check_limit(const char* limit, std::int64_t used, std::size_t more, const char* action) const;
  void check_results(const std::string& tenant);
  void check_metadata(const std::string& tenant, std::size_t more) const;
  // Room for another request that waits: until there is some, clients ask again.
  void check_room(const std::string& tenant, std::int64_t State::Use::*kind, std::size_t bytes) const;
  LogRecord new_record(const char* kind, const std::string& id, const std::string& tenant, std::string body,
                       const nlohmann::json& more = nlohmann::json::object()) const;  // more: of its head
  LogRecord operation_record(const State::Model& model, std::int64_t sequence, const std::string& path,
                             std::string body, bool xorl) const;
  void accept(LogRecord record);       // appends it to the journal, then admits it
  void admit(const Accepted& record);  // the change of the state by an accepted request

  // ---- what replies tell (listings.cpp) ----
  // `parts`: of the path. None: no such path. With the lock.
  std::optional<std::string> list(const HttpRequest& request, const std::vector<std::string>& parts,
                                  const std::string& tenant);
  RunListing listing_of(const State::Model& model, double now) const;
  std::string external_urls(const HttpRequest& request, const std::string& path,
                            const std::string& tenant) const;
  HttpReply external_file(const std::string& path) const;
  std::string metrics(const std::string& tenant) const;
  nlohmann::json status(const std::string& tenant) const;

  // ---- computing (operations.cpp): on the thread of run(), or in the constructor ----
  Turn choose(State::Model*& model);
  void train(Lock& lock, State::Model& model);  // one piece
  // A piece of an operation, or a control (`model` null). None: the operation has further pieces. Errors are
  // part of the outcome.
  std::optional<Outcome> execute(const LogRecord& record, State::Model* model);
  std::optional<Outcome> advance(State::Model& model, const LogRecord& record);
  Outcome perform(State::Model& model, const LogRecord& record);
  Outcome save(State::Model& model, const LogRecord& record, const SaveWeights& request, Engine::Save which);
  const CheckpointInfo* saved_before(const std::string& path) const;
  Outcome open_sampler_of(State::Model& model, std::int64_t sequence, double time);
  Outcome load(State::Model& model, const LogRecord& record);
  Outcome step(State::Model& model, const LogRecord& record);
  Outcome control(const LogRecord& record);
  Outcome end_session(const std::string& id);
  void fail_waiting(State::Model& model, const std::string& cause, double time);
  void sample(Lock& lock);
  void make_room_for_sampler(const std::string& tenant, Outcome& outcome);
  void check_dumps(const State::Model& model) const;
  void release(const std::string& path);                 // before files of a checkpoint change
  std::string digest_of(const std::string& base) const;  // empty: no such base
  // Why `what` is of no use: it was made over other weights of the base than those of now. Empty: it was not.
  std::string other_base(const std::string& what, const std::string& base, const std::string& digest) const;
  void check_base(const std::string& what, const std::string& base, const std::string& digest) const;
  // Journals that the operation is complete (until that succeeds, or the service stops) and applies the
  // outcome.
  void complete(Lock& lock, const Accepted& record, Outcome outcome);
  void apply(const Accepted& record, Outcome& outcome, double time);
  void finish_future(const std::string& id, const std::string& type, std::string body, double time);
  void make_room_for_results(const std::string& tenant);
  void forget_result(const std::string& id);
  void send(Lock& lock);  // gives the collected answers, without the lock
  void skip_time(double seconds);
  void watch();  // the thread that ends long polls, results and sessions
  void end_sessions(double now);

  // ---- durability (snapshot.cpp) ----
  // Answers; with `sync` once everything that was journalled before is on the disk. One fsync is for all
  // answers that wait when it begins.
  void give(Respond respond, HttpReply reply);
  void sync_answers();  // their thread
  void restore();
  void replay(std::string_view text);
  void lose(const LogRecord& record, const Outcome& outcome);
  void write_deaths() const;
  bool snapshot_due() const;
  // A thread writes a snapshot of now; there is one at a time. Only files that the engine can write at
  // once alone are written before it returns.
  void begin_snapshot(Lock& lock);
  // Waits for it, if there is one. Returns why it could not be written; empty: it was.
  std::string end_snapshot(Lock& lock);
  std::string take_snapshot(Lock& lock) {
    begin_snapshot(lock);
    return end_snapshot(lock);
  }
  // Files of checkpoints that expired or were deleted. Those that a power cut left without the request that
  // made them are kept, and told where `tells`.
  void remove_unlisted(Lock& lock, bool tells);
  using Folders = std::map<std::string, std::pair<std::int64_t, std::filesystem::path>>;
  struct Snapshot {
    std::uint64_t number = 0, position = 0;
    std::filesystem::path former{};
    State state{};
    struct Part {  // a folder of the engine's
      std::filesystem::path name, linked{};
      Engine::Write write{};
    };
    std::vector<Part> parts{};
    Folders folders{};
    std::unique_ptr<WholeFolder> folder{};
    // These are put back if it cannot be written.
    std::set<std::string> loaded{};
    double work = 0;
    double seconds = 0;           // of writing it
    std::future<void> written{};  // the last, whose end waits for the thread
    bool is_over() const { return written.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  };
  void write(Snapshot& snapshot);  // on its thread

  struct Stopwatch {
    double seconds() const {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  };
  struct AddSeconds : Stopwatch {  // those of its life
    explicit AddSeconds(std::atomic<double>& of) : sum(of) {}
    ~AddSeconds() { sum += seconds(); }
    AddSeconds(const AddSeconds&) = delete;
    AddSeconds& operator=(const AddSeconds&) = delete;
    std::atomic<double>& sum;
  };
  // Seconds of requests and turns, and those of turns that the engine's passes and updates took.
  std::atomic<double> busy_seconds_ = 0, engine_seconds_ = 0;

  const ServiceOptions options_;
  Engine& engine_;
  StateFolder folder_;
  CheckpointStore store_;  // files, for the computing thread. State::saved says which checkpoints there are.
  std::unique_ptr<Journal> journal_{};

  mutable std::mutex mutex_{};  // of everything below
  std::condition_variable changed_{}, ticked_{};
  State state_{};
  std::map<std::string, Respond> control_answers_{};  // by id
  std::vector<std::pair<Respond, HttpReply>> answers_{};
  std::deque<std::pair<double, std::string>> polls_{}, results_{};  // until when, and the future
  std::set<std::string> submitted_{};                               // samples
  struct Share {
    double seconds = 0;  // of computing
    bool was_ready = false;
  };
  std::map<std::string, Share> shares_{};  // by tenant
  std::int64_t turn_ = 0;
  bool sampled_last_ = false, controlled_last_ = false, replaying_ = false, stopping_ = false;
  bool lost_ = false;                    // the replay could not do again all that was done
  std::map<std::string, int> deaths_{};  // of the process, by the operation or sample that it was busy with
  bool abandoned_ = false;               // the engine is ahead of the journal, which could not be written
  std::exception_ptr unsynced_{};        // why the journal's end may not be on the disk
  double started_ = 0;

  // Since the last snapshot, with the lock: checkpoints whose files a replay would read, and seconds that it
  // would take.
  std::set<std::string> loaded_since_{};
  double work_since_ = 0, longest_ = 0;  // longest: of one operation
  std::uint64_t position_at_snapshot_ = 0;
  double snapshot_seconds_ = 0, snapshot_after_ = 0;
  std::uint64_t snapshot_number_ = 0;
  // Folders of the last snapshot by model and sampler, with the model's next operation: what did not change
  // is linked.
  Folders snapshot_folders_{};
  std::map<std::string, std::int64_t>
      forgotten_{};  // paths that expired or were deleted, and their operations
  std::unique_ptr<Snapshot> writing_{};
  std::thread watcher_{};

  std::mutex held_mutex_{};  // of what follows
  std::condition_variable held_changed_{};
  std::vector<std::pair<Respond, HttpReply>> held_{};
  bool ending_ = false;
  std::thread syncer_{};
};

}  // namespace isograd::serve
