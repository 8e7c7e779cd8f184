// The dialect of the tinker SDK (0.38): bodies of requests to plain data, plain data to bodies of replies.
// Every parse function throws ConfigError for what it refuses; the model's own limits (vocabulary, context,
// known losses and inputs) are checked elsewhere. Unknown fields are ignored.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/wire/messages.hpp"

namespace isograd::serve {

inline constexpr std::int64_t kMostCells = std::int64_t{1} << 26;  // of all arrays of one request, dense
inline constexpr std::int64_t kMostSamples = 4096, kMostStops = 1000, kMostRank = 512, kMostTop = 4096;

// Operation `sequence` (1, 2, ...) of a model. 0: the client gave none (xorl's may).
template <class Body>
struct Operation {
  std::string model{};
  std::int64_t sequence = 0;
  Body body{};
};

struct Session {
  std::vector<std::string> tags{};
  std::map<std::string, std::string> metadata{};  // values that are no strings: their JSON
  std::string sdk_version{}, display_name{};
};

struct NewModel {
  std::string session{};  // empty: xorl's, which gives the model's name itself
  std::string model{};    // "<session>:train:<model_seq_id>"
  CreateModel body{};
};

struct LoadWeights {
  bool creates = false;  // a new model `model`, else operation `sequence` of an existing one
  std::string session, model;
  std::int64_t sequence = 0;
  std::string path;
  bool optimizer = false;
  std::string base;  // empty: the checkpoint's
  std::map<std::string, std::string> metadata;
};

struct SaveWeights {
  std::optional<std::string> name{};  // none: the service chooses one
  std::optional<std::int64_t> ttl_seconds{};
  bool overwrite = false;
  std::map<std::string, std::string> metadata{};
  // Given by save_weights_for_sampler without a name; a repeated request may give another.
  std::optional<std::int64_t> sampling_sequence{};
};

struct SamplingSession {
  std::string session;
  std::int64_t sequence = 0;
  std::string base, path;  // one of the two
};

struct SampleRequest {
  std::string sampler{};  // sampling_session_id
  std::int64_t sequence = 0;
  Sample body{};
};

// ---- what replies list ----

struct CheckpointListing {
  std::string id{};                 // "weights/<name>"
  std::string kind{};               // "training", "sampler", "external"
  std::string path{};               // "tinker://..."
  double created = 0, expires = 0;  // seconds since 1970; 0: never
  std::int64_t bytes = 0;
  bool is_public = false;
  std::map<std::string, std::string> metadata{};
};

struct RunListing {
  std::string id{}, base{}, owner{};
  std::int64_t rank = 0;
  double last_request = 0;
  bool corrupted = false;
  std::optional<CheckpointListing> last_checkpoint{}, last_sampler_checkpoint{};
  std::map<std::string, std::string> metadata{};
};

struct Cursor {
  std::int64_t offset = 0, limit = 0, total = 0;
};

namespace tinker {

std::string model_id(const std::string& session, std::int64_t model_sequence);  // "<session>:train:<n>"
std::string sampler_id(const std::string& session, std::int64_t sequence);      // "<session>:sample:<n>"

// ---- requests ----
// The model and sequence of an operation whose other parts are read when it runs: what is wrong with them
// fails the operation, whose sequence is used either way.
struct Address {
  std::string model{};
  std::int64_t sequence = 0;  // 0: not given
  bool forward_only = false;
};
Address address_of(std::string_view body, bool protobuf);
Session create_session(std::string_view json);
std::string heartbeat(std::string_view json);  // the session
std::string finish(std::string_view json);     // the reason: "success", "errored", "interrupted"
NewModel create_model(std::string_view json);
LoadWeights load_weights(std::string_view json);
std::string get_info(std::string_view json);  // the model
Operation<ForwardBackward> forward_backward(std::string_view protobuf);
Operation<AdamParams> optim_step(std::string_view json);
Operation<SaveWeights> save_weights(std::string_view json);
Operation<SaveWeights> save_weights_for_sampler(std::string_view json);
Operation<SaveWeights> save_weights_external(std::string_view json);
SamplingSession create_sampling_session(std::string_view json);
SampleRequest asample(std::string_view json);
std::string retrieve_future(std::string_view json);      // the request
std::string weights_info(std::string_view json);         // the path
std::optional<std::int64_t> ttl(std::string_view json);  // none: never expires

// ---- replies: JSON except the two that say protobuf ----
std::string empty_reply();
std::string session_reply(const std::string& session);
std::string promise_reply(const std::string& request, const std::string& model);
std::string sample_promise_reply(const std::string& request, const std::vector<std::string>& sequences);
std::string try_again_reply(const std::string& request);  // with status 408
// A future that failed (status 200). `category`: "user", "server" or "unknown".
std::string failure_reply(const std::string& error, const std::string& category);
std::string detail_reply(const std::string& detail);  // a refused request (status 4xx)
std::string create_model_reply(const std::string& model);
std::string load_weights_reply(const std::string& model, const std::string& path);
// The last two may be empty.
std::string info_reply(const std::string& model, const CreateModel& made, const std::string& architecture,
                       const std::string& tokenizer);
std::string optim_step_reply(const Metrics& metrics);  // what is not finite is left out
std::string save_weights_reply(const std::string& path);
std::string save_for_sampler_reply(const std::string& path, const std::string& sampler);  // one of the two
std::string save_external_reply(const std::string& path, std::int64_t bytes);
std::string sampling_session_reply(const std::string& sampler);
std::string sampler_reply(const std::string& sampler, const std::string& base, const std::string& path);
std::string weights_info_reply(const CreateModel& saved);
std::string capabilities_reply(
    const std::vector<std::pair<std::string, std::int64_t>>& contexts);  // of bases
std::string sessions_reply(const std::vector<std::string>& sessions);
std::string session_info_reply(const std::vector<std::string>& models,
                               const std::vector<std::string>& samplers, const Session& session);
std::string run_reply(const RunListing& run);
std::string runs_reply(const std::vector<RunListing>& runs, const Cursor& cursor);
std::string checkpoints_reply(const std::vector<CheckpointListing>& checkpoints,
                              const std::optional<Cursor>& cursor);

inline constexpr const char* kProtobuf = "application/x-protobuf";
std::string forward_backward_reply(const ForwardBackwardResult& result);  // protobuf
std::string sample_reply(const SampleResult& result);                     // protobuf

}  // namespace tinker
}  // namespace isograd::serve
