// The state of a service as plain data: what a snapshot holds.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/http/http.hpp"
#include "serve/store/store.hpp"
#include "serve/wire/tinker.hpp"

namespace isograd::serve {

// A line of the journal: an accepted request, or the completion of one. Head is JSON, body is the client's
// bytes. Keys of a head: kind ("session", "finish", "model", "operation", "sampler", "sample", "control",
// "done"), time, tenant, id (of the future), path (the endpoint), draw (128 random bits), xorl, and what the
// kind needs.
struct LogRecord {
  nlohmann::json head;
  std::string body;

  std::string text(const char* key) const { return head.value(key, std::string()); }
  double time() const { return head.value("time", 0.0); }
  bool xorl() const { return head.value("xorl", false); }
  std::uint64_t seed() const { return std::stoull(text("draw").substr(0, 16), nullptr, 16); }
  // The body, by the reader of its dialect.
  template <class Xorl, class Tinker>
  auto read(Xorl of_xorl, Tinker of_tinker) const {
    return xorl() ? of_xorl(body) : of_tinker(body);
  }
  std::string encode() const;
  static LogRecord decode(std::string_view text);
};
using Accepted = std::shared_ptr<const LogRecord>;

// A forward_backward in progress; never in a snapshot.
struct ForwardProgress {
  ForwardBackward request{};
  std::size_t done = 0;     // datums
  std::int64_t tokens = 0;  // of the last piece
  double seconds = 0;       // of all pieces
  ForwardBackwardResult result{};
};

struct State {
  static constexpr std::int64_t kEntryBytes = 256;  // of anything, besides its texts

  // A tenant has it, and it follows from the rest of the state.
  struct Use {
    std::int64_t operations = 0, samples = 0, controls = 0, request_bytes = 0;  // that wait
    std::int64_t result_bytes = 0;
  };

  struct OpenSession {
    std::string tenant{};
    Session client{};
    double created = 0;
    double seen = 0;         // last sign of life; not in snapshots: a restart is no silence
    std::string finished{};  // the client's reason; empty: none yet
    bool lasting = false;    // xorl's: nothing tells that its client lives
    bool ending = false, ended = false;
    std::int64_t models = 0;  // of xorl's clients, which do not count
  };

  struct Model {
    std::string id{}, tenant{}, session{};
    std::string name{};  // xorl's name of it
    CreateModel request{};
    std::string digest{};  // of its base
    std::string absent{};  // why the engine cannot have it on this base: it waits for another start
    double created = 0, last_request = 0;
    std::int64_t next = 0;                       // sequence of the next operation; 0 creates the model
    std::map<std::int64_t, Accepted> waiting{};  // by sequence; may have holes
    std::string failure{};                       // the first failed operation and its cause
    bool loaded = false, gone = false;           // the engine has it; it will never have it again
    std::int64_t steps = 0, tokens = 0;          // since it was created
    std::int64_t step_tokens = 0;                // since the last step
    double seconds = 0, step_seconds = 0;        // of computing, likewise
    Metrics last{};                              // of the last step
    std::optional<ForwardProgress> progress{};
    std::int64_t turn = 0;  // of its last computation

    bool in_engine() const { return loaded && absent.empty(); }
    bool ready() const {
      return !gone && absent.empty() && !waiting.empty() && waiting.begin()->first == next;
    }
    // The path of a checkpoint that the operation saves without a name.
    std::string path_of(std::int64_t sequence) const {
      return "tinker://" + id + "/weights/operation-" + std::to_string(sequence);
    }
    std::int64_t free_sequence() const { return waiting.empty() ? next : waiting.rbegin()->first + 1; }
  };

  struct Sampler {
    std::string tenant{}, session{}, base{}, path{}, digest{};
    std::string absent{};               // as a model's
    bool open = false, closed = false;  // the engine has it; it will never have it again
    std::string failure{};
    double used = 0;
    std::int64_t waiting = 0;  // samples

    bool in_engine() const { return open && absent.empty(); }
  };

  struct Saved {
    CheckpointInfo info{};
    CreateModel shape{};
    std::string secret{};  // part of the address of an external checkpoint's files
    double deleted = 0;    // kept for a while: a repeated DELETE is no mistake
    bool exists(double now) const { return deleted == 0 && (info.expires == 0 || info.expires > now); }
  };

  struct Future {
    std::string tenant{};
    bool done = false;
    bool fetched = false;  // or it comes from before a restart
    double finished = 0;
    std::string type{};
    std::shared_ptr<const std::string> body{};  // shared with snapshots that are being written
    std::int64_t bytes() const { return kEntryBytes + (body ? static_cast<std::int64_t>(body->size()) : 0); }
    struct Poll {
      double deadline;
      Respond respond;
    };
    std::vector<Poll> polls{};
  };

  std::map<std::string, OpenSession> sessions{};
  std::map<std::string, Model> models{};  // those gone too: their checkpoints belong to a run
  std::map<std::string, Sampler> samplers{};
  std::map<std::string, Saved> saved{};  // by path
  std::map<std::string, Future> futures{};
  std::deque<Accepted> controls{};            // what is neither a model's operation nor a sample, in order
  std::map<std::string, Accepted> samples{};  // that are not complete
  std::deque<std::string> unsubmitted{};      // of them: the engine was not asked yet
  std::int64_t control_count = 0;
  std::map<std::string, Use> use{};  // by tenant

  Use use_of(const std::string& tenant) const;
  void count(const LogRecord& record, std::int64_t change);      // 1: it waits; -1: no more
  std::int64_t metadata_bytes(const std::string& tenant) const;  // what its clients said of their things
  // All but the engine's files; `blob` takes bodies, in order.
  nlohmann::json to_json(const std::function<void(std::string_view)>& blob) const;
  static State from_json(nlohmann::json json, std::string_view blobs);
};

double seconds_now();      // since 1970
std::string random_hex();  // 128 bits, unguessable

}  // namespace isograd::serve
