#include "serve/service/state.hpp"

#include <fmt/format.h>
#include <sys/random.h>

#include <chrono>
#include <utility>

#include "base/json.hpp"
#include "base/refuse.hpp"

namespace isograd::serve {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Session, tags, metadata, sdk_version, display_name)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckpointInfo, run, kind, name, tenant, base, rank, bytes, created,
                                   expires, is_public, metadata)

namespace {

using nlohmann::json;

json json_of(const CreateModel& model) {
  json found{{"base", model.base},    {"rank", model.lora.rank},           {"unembed", model.lora.unembed},
             {"mlp", model.lora.mlp}, {"attention", model.lora.attention}, {"metadata", model.metadata}};
  if (model.lora.seed) found["seed"] = *model.lora.seed;
  return found;
}

CreateModel model_of(const json& found) {
  CreateModel model;
  found.at("base").get_to(model.base);
  found.at("rank").get_to(model.lora.rank);
  found.at("unembed").get_to(model.lora.unembed);
  found.at("mlp").get_to(model.lora.mlp);
  found.at("attention").get_to(model.lora.attention);
  found.at("metadata").get_to(model.metadata);
  if (found.contains("seed")) model.lora.seed = found.at("seed").get<std::uint64_t>();
  return model;
}

// Bodies are kept in one file, one after another; the JSON has their lengths.
struct Writer {
  std::string& blobs;
  json operator()(std::string_view bytes) const {
    blobs += bytes;
    return bytes.size();
  }
  json operator()(const Accepted& record) const { return (*this)(record->encode()); }
};

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

 private:
  std::string_view rest_;
};

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string random_hex() {
  std::uint64_t bits[2];
  ISOGRAD_INVARIANT(::getrandom(bits, sizeof(bits), 0) == sizeof(bits), "no random numbers from the system");
  return fmt::format("{:016x}{:016x}", bits[0], bits[1]);
}

LogRecord LogRecord::decode(std::string_view text) {
  const std::size_t line = text.find('\n');
  ISOGRAD_INVARIANT(line != text.npos, "a record without a head");
  auto parsed = parse_json(text.substr(0, line));
  ISOGRAD_INVARIANT(parsed.problem.empty(), parsed.problem);
  return {std::move(parsed.value), std::string(text.substr(line + 1))};
}

json State::to_json(std::string& blobs) const {
  const Writer blob{blobs};
  json all{{"control_count", control_count}};
  json& open = all["sessions"] = json::object();
  for (const auto& [id, of] : sessions)
    open[id] = {{"tenant", of.tenant},     {"client", of.client},   {"created", of.created},
                {"finished", of.finished}, {"lasting", of.lasting}, {"ending", of.ending},
                {"ended", of.ended},       {"models", of.models}};
  json& runs = all["models"] = json::object();
  for (const auto& [id, of] : models) {
    json& run = runs[id] = {{"tenant", of.tenant},
                            {"session", of.session},
                            {"name", of.name},
                            {"request", json_of(of.request)},
                            {"created", of.created},
                            {"last_request", of.last_request},
                            {"next", of.next},
                            {"failure", of.failure},
                            {"loaded", of.loaded},
                            {"gone", of.gone},
                            {"steps", of.steps},
                            {"tokens", of.tokens},
                            {"seconds", of.seconds},
                            {"step_tokens", of.step_tokens},
                            {"step_seconds", of.step_seconds}};
    for (const auto& [sequence, record] : of.waiting) run["waiting"].push_back({sequence, blob(record)});
  }
  json& opened = all["samplers"] = json::object();
  for (const auto& [id, of] : samplers)
    opened[id] = {{"tenant", of.tenant},   {"session", of.session}, {"base", of.base},
                  {"path", of.path},       {"open", of.open},       {"closed", of.closed},
                  {"failure", of.failure}, {"used", of.used},       {"waiting", of.waiting}};
  json& kept = all["saved"] = json::array();
  for (const auto& [path, of] : saved)
    kept.push_back(
        {{"info", of.info}, {"shape", json_of(of.shape)}, {"secret", of.secret}, {"deleted", of.deleted}});
  json& promised = all["futures"] = json::object();
  for (const auto& [id, of] : futures)
    promised[id] = {{"tenant", of.tenant},
                    {"done", of.done},
                    {"finished", of.finished},
                    {"type", of.type},
                    {"body", blob(of.body)}};
  for (const Accepted& record : controls) all["controls"].push_back(blob(record));
  for (const auto& [id, record] : samples) all["samples"].push_back(blob(record));
  return all;
}

// The blobs are read in the order in which they were written: objects are sorted by key on both sides.
State State::from_json(const json& all, std::string_view blobs) {
  State state;
  Reader reader(blobs);
  const double now = seconds_now();
  all.at("control_count").get_to(state.control_count);
  for (const auto& [id, from] : all.at("sessions").items()) {
    OpenSession& of = state.sessions[id];
    from.at("tenant").get_to(of.tenant), from.at("client").get_to(of.client);
    from.at("created").get_to(of.created), from.at("finished").get_to(of.finished);
    from.at("lasting").get_to(of.lasting), from.at("ending").get_to(of.ending);
    from.at("ended").get_to(of.ended), from.at("models").get_to(of.models);
    of.seen = now;
  }
  for (const auto& [id, from] : all.at("models").items()) {
    Model& of = state.models[id];
    of.id = id, of.request = model_of(from.at("request"));
    from.at("tenant").get_to(of.tenant), from.at("session").get_to(of.session),
        from.at("name").get_to(of.name);
    from.at("created").get_to(of.created), from.at("last_request").get_to(of.last_request);
    from.at("next").get_to(of.next), from.at("failure").get_to(of.failure);
    from.at("loaded").get_to(of.loaded), from.at("gone").get_to(of.gone);
    from.at("steps").get_to(of.steps), from.at("tokens").get_to(of.tokens);
    from.at("seconds").get_to(of.seconds), from.at("step_tokens").get_to(of.step_tokens);
    from.at("step_seconds").get_to(of.step_seconds);
    if (!from.contains("waiting")) continue;
    for (const json& entry : from.at("waiting")) {
      const Accepted record = reader.record(entry.at(1));
      of.waiting_bytes += static_cast<std::int64_t>(record->body.size());
      of.waiting[entry.at(0).get<std::int64_t>()] = record;
    }
  }
  for (const auto& [id, from] : all.at("samplers").items()) {
    Sampler& of = state.samplers[id];
    from.at("tenant").get_to(of.tenant), from.at("session").get_to(of.session);
    from.at("base").get_to(of.base), from.at("path").get_to(of.path);
    from.at("open").get_to(of.open), from.at("closed").get_to(of.closed);
    from.at("failure").get_to(of.failure), from.at("used").get_to(of.used);
    from.at("waiting").get_to(of.waiting);
  }
  for (const json& from : all.at("saved")) {
    Saved of;
    from.at("info").get_to(of.info), of.shape = model_of(from.at("shape"));
    from.at("secret").get_to(of.secret), from.at("deleted").get_to(of.deleted);
    state.saved[of.info.path()] = std::move(of);
  }
  for (const auto& [id, from] : all.at("futures").items()) {
    Future& of = state.futures[id];
    from.at("tenant").get_to(of.tenant), from.at("done").get_to(of.done);
    from.at("finished").get_to(of.finished), from.at("type").get_to(of.type);
    of.body = reader.bytes(from.at("body"));
  }
  if (all.contains("controls"))
    for (const json& length : all.at("controls")) state.controls.push_back(reader.record(length));
  if (all.contains("samples")) {
    for (const json& length : all.at("samples")) {
      const Accepted record = reader.record(length);
      state.samples[record->text("id")] = record;
      state.unsubmitted.push_back(record->text("id"));
    }
  }
  return state;
}

}  // namespace isograd::serve
