#include "serve/service/state.hpp"

#include <fmt/format.h>
#include <sys/random.h>

#include <chrono>
#include <utility>

#include "base/json.hpp"
#include "base/refuse.hpp"
#include "serve/wire/fields.hpp"

namespace isograd::serve {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CreateModel, base, lora, metadata)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Session, tags, metadata, sdk_version, display_name)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckpointInfo, run, kind, name, tenant, base, digest, rank, bytes,
                                   created, expires, is_public, metadata, operation)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(State::OpenSession, tenant, client, created, finished, lasting, ending,
                                   ended, models)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(State::Model, id, tenant, session, name, request, digest, created,
                                   last_request, next, failure, loaded, gone, steps, tokens, step_tokens,
                                   seconds, step_seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(State::Sampler, tenant, session, base, path, digest, open, closed, failure,
                                   used, waiting)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(State::Saved, info, shape, secret, deleted)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(State::Future, tenant, done, finished, type)

namespace {

using nlohmann::json;

class Reader {
 public:
  explicit Reader(std::string_view blobs) : rest_(blobs) {}
  std::string_view bytes(const json& length) {
    const std::size_t count = length.get<std::size_t>();
    ISOGRAD_INVARIANT(count <= rest_.size(), fmt::format("{} bytes of {}", count, rest_.size()));
    const std::string_view found = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return found;
  }
  Accepted record(const json& length) {
    return std::make_shared<LogRecord>(LogRecord::decode(bytes(length)));
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

// Texts, in whatever holds them.
std::size_t bytes_of(const std::string& text) { return text.size(); }
std::size_t bytes_of(const std::vector<std::string>& texts) {
  std::size_t bytes = 0;
  for (const std::string& text : texts) bytes += State::kEntryBytes + text.size();
  return bytes;
}
std::size_t bytes_of(const std::map<std::string, std::string>& texts) {
  std::size_t bytes = 0;
  for (const auto& [key, value] : texts) bytes += State::kEntryBytes + key.size() + value.size();
  return bytes;
}

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string random_hex() {
  std::uint64_t bits[2];
  ISOGRAD_INVARIANT(::getrandom(bits, sizeof(bits), 0) == sizeof(bits), "no random numbers from the system");
  return fmt::format("{:016x}{:016x}", bits[0], bits[1]);
}

std::string LogRecord::encode() const { return json_text(head) + "\n" + body; }

LogRecord LogRecord::decode(std::string_view text) {
  const std::size_t line = text.find('\n');
  ISOGRAD_INVARIANT(line != text.npos, "a record without a head");
  auto parsed = parse_json(text.substr(0, line));
  ISOGRAD_INVARIANT(parsed.problem.empty(), parsed.problem);
  return {std::move(parsed.value), std::string(text.substr(line + 1))};
}

State::Use State::use_of(const std::string& tenant) const {
  const auto found = use.find(tenant);
  return found == use.end() ? Use{} : found->second;
}

void State::count(const LogRecord& record, std::int64_t change) {
  Use& of = use[record.text("tenant")];
  const std::string kind = record.text("kind");
  (kind == "sample"                         ? of.samples
   : kind == "control" || kind == "sampler" ? of.controls
                                            : of.operations) += change;
  of.request_bytes += change * static_cast<std::int64_t>(record.body.size());
}

std::int64_t State::metadata_bytes(const std::string& tenant) const {
  std::size_t bytes = 0;
  const auto add = [&](const std::string& owner, const auto&... texts) {
    if (owner == tenant) bytes += kEntryBytes + (bytes_of(texts) + ... + 0);
  };
  for (const auto& [id, one] : sessions)
    add(one.tenant, one.client.metadata, one.client.tags, one.client.display_name, one.client.sdk_version);
  for (const auto& [id, one] : models) add(one.tenant, one.name, one.request.metadata);
  for (const auto& [id, one] : samplers) add(one.tenant, one.base, one.path, one.failure);
  for (const auto& [path, one] : saved) add(one.info.tenant, one.info.metadata, one.shape.metadata);
  return static_cast<std::int64_t>(bytes);
}

// Bodies are kept in one file, one after another; the JSON has their lengths.
json State::to_json(const std::function<void(std::string_view)>& blob) const {
  const auto add = [&](std::string_view bytes) {
    blob(bytes);
    return bytes.size();
  };
  json all{{"control_count", control_count}, {"sessions", sessions}, {"models", models},
           {"samplers", samplers},           {"saved", saved},       {"futures", futures}};
  for (const auto& [id, model] : models) {
    if (!model.last.empty()) all["last"][id] = model.last;
    for (const auto& [sequence, record] : model.waiting)
      all["waiting"].push_back({id, sequence, add(record->encode())});
  }
  for (const auto& [id, future] : futures)
    if (future.done) all["bodies"].push_back({id, add(*future.body)});
  for (const Accepted& record : controls) all["controls"].push_back(add(record->encode()));
  for (const auto& [id, record] : samples) all["samples"].push_back(add(record->encode()));
  return all;
}

State State::from_json(json all, std::string_view blobs) {
  // Version 1 began without these. Nothing else may be missing.
  for (json& model : all.at("models")) model.emplace("digest", "");
  for (json& sampler : all.at("samplers")) sampler.emplace("digest", "");
  for (json& saved : all.at("saved")) {
    saved.at("info").emplace("digest", "");
    saved.at("info").emplace("operation", 0);
  }
  State state;
  Reader reader(blobs);
  all.at("control_count").get_to(state.control_count);
  all.at("sessions").get_to(state.sessions), all.at("models").get_to(state.models);
  all.at("samplers").get_to(state.samplers), all.at("saved").get_to(state.saved);
  all.at("futures").get_to(state.futures);
  const json last = all.value("last", json::object());
  for (const auto& [id, metrics] : last.items()) metrics.get_to(state.models.at(id).last);
  for (const json& entry : all.value("waiting", json::array())) {
    Model& model = state.models.at(entry.at(0).get<std::string>());
    state.count(*(model.waiting[entry.at(1).get<std::int64_t>()] = reader.record(entry.at(2))), 1);
  }
  for (const json& entry : all.value("bodies", json::array())) {
    Future& future = state.futures.at(entry.at(0).get<std::string>());
    future.body = std::make_shared<std::string>(reader.bytes(entry.at(1)));
    future.fetched = future.done;
    if (future.done) state.use[future.tenant].result_bytes += future.bytes();
  }
  for (const auto& [id, future] : state.futures)
    ISOGRAD_INVARIANT(!future.done || future.body, "the result " + id + " without its body");
  for (const json& length : all.value("controls", json::array())) {
    state.controls.push_back(reader.record(length));
    state.count(*state.controls.back(), 1);
  }
  for (const json& length : all.value("samples", json::array())) {
    const Accepted record = reader.record(length);
    state.samples[record->text("id")] = record;
    state.count(*record, 1);
    state.unsubmitted.push_back(record->text("id"));
  }
  ISOGRAD_INVARIANT(reader.at_end(), "bodies that nothing names");
  return state;
}

}  // namespace isograd::serve
