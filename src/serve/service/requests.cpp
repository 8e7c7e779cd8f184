// The endpoints: checks, duplicates, limits, the journal. Nothing here waits for the engine.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/json.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/service/service.hpp"
#include "serve/wire/xorl.hpp"

namespace isograd::serve {
namespace {

HttpReply json_reply(std::string body, int status = 200) {
  return {.status = status, .body = std::move(body)};
}

// A body without secrets, which the journal must not keep and nothing here reads.
std::string without_secrets(const std::string& path, const std::string& body) {
  if (path == "forward_backward" || path == "forward") return body;  // large, and they have none
  auto parsed = parse_json(body);
  bool found = false;
  for (const char* key : {"weights_access_token", "access_token", "api_key", "token"})
    if (parsed.problem.empty()) found |= parsed.value.erase(key) > 0;
  return found ? parsed.value.dump() : body;
}

// Why an endpoint of the vendor's service is not here, and what serves instead.
std::string why_not(const std::string& path) {
  static constexpr std::pair<const char*, const char*> kReasons[] = {
      {"archive", "archives are not made; save_weights_external gives a directory that peft loads"},
      {"copy_weights", "there are no projects to copy to; publish the checkpoint"},
      {"create_custom_loss", "losses of your own run in the client: forward_backward_custom"},
      {"project", "there are no projects"},
      {"billing", "nothing is billed"},
      {"audit", "there is no audit log; the journal in the state folder has every request"},
      {"trace_export", "sessions are not traced"},
      {"sessions/search", "list the sessions"},
      {"retrieve_futures", "retrieve_future answers each"}};
  for (const auto& [name, reason] : kReasons)
    if (path.find(name) != std::string::npos) return std::string(": ") + reason;
  return "";
}

// The path behind /api/v1/; a prefix that a proxy left is skipped.
std::string path_of(const HttpRequest& request) {
  static constexpr std::string_view kPrefix = "/api/v1/";
  const std::size_t at = request.path.find(kPrefix);
  return at == std::string::npos ? "" : request.path.substr(at + kPrefix.size());
}

bool is_operation(const std::string& path, bool xorl) {
  static const std::set<std::string> kAll{"forward_backward",
                                          "optim_step",
                                          "load_weights",
                                          "save_weights",
                                          "unload_model",
                                          "save_weights_external",
                                          "save_weights_for_sampler"};
  return kAll.contains(path) || (xorl && (path == "forward" || path == "abort_gradient_epoch"));
}

// "a/b/c" as its parts.
std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> parts(1);
  for (const char c : path) c == '/' ? void(parts.emplace_back()) : parts.back().push_back(c);
  return parts;
}

}  // namespace

void refuse_unknown(const char* kind, const std::string& name) {
  throw Refusal{404, fmt::format("there is no {} {}", kind, printable(name, 200))};
}

void Service::handle(const HttpRequest& request, const std::string& tenant, Respond respond) {
  const AddSeconds busy(busy_seconds_);
  if (OptionalReply reply = answer(request, tenant, respond)) give(std::move(respond), *std::move(reply));
}

Service::OptionalReply Service::answer(const HttpRequest& request, const std::string& tenant,
                                       Respond& respond) {
  HttpReply refused;
  try {
    return route(request, tenant, respond);
  } catch (const Refusal& refusal) {
    refused = json_reply(tinker::detail_reply(refusal.detail), refusal.status);
    if (refusal.status == 429) refused.headers["retry-after"] = "1";
  } catch (const ConfigError& error) {
    refused = json_reply(tinker::detail_reply(error.what()), 400);
  } catch (const std::exception& error) {
    print(stderr,
          fmt::format("{} {}: {}\n", request.method, printable(request.path, 200), printable(error.what())));
    refused = json_reply(tinker::detail_reply("a defect of the server; its log says more"), 500);
  }
  return refused;
}

std::unique_ptr<HttpReply> Service::unread(const HttpRequest& request, const std::string& tenant) {
  if (request.method != "POST" || !is_operation(path_of(request), is_xorl(request))) return nullptr;
  Respond at_once;
  OptionalReply reply = answer(request, tenant, at_once);
  if (options_.sync) journal_->sync();
  const bool unknown = !reply || reply->status == 400 || reply->status == 404;
  return unknown ? nullptr : std::make_unique<HttpReply>(*std::move(reply));
}

Service::OptionalReply Service::route(const HttpRequest& request, const std::string& tenant,
                                      Respond& respond) {
  static constexpr std::string_view kFiles = "/isograd/files/";
  const bool get = request.method == "GET", post = request.method == "POST";
  if (get && request.path == "/metrics")
    return HttpReply{.type = "text/plain; version=0.0.4", .body = metrics(tenant)};
  if (get && request.path == "/isograd/status") return json_reply(json_text(status(tenant)));
  if (const std::size_t at = request.path.find(kFiles); get && at != std::string::npos)
    return external_file(request.path.substr(at + kFiles.size()));
  const std::string path = path_of(request);
  const std::vector<std::string> parts = parts_of(path);
  const bool xorl = is_xorl(request);

  if (get && path == "healthz") return json_reply(R"({"status":"ok"})");
  if (post && path == "client/config") return json_reply(options_.client_config);
  if (post && path == "client/dynamic_config") return json_reply("{}");
  if (post && path == "telemetry")
    return json_reply(R"({"status":"accepted"})");  // may hold the key: not read
  if (post && path == "cancel_future") return json_reply(tinker::empty_reply());
  if (post && path == "create_session") {
    tinker::create_session(request.body);
    LogRecord record = new_record("session", random_hex(), tenant, request.body);
    const std::string id = record.text("id");
    const Lock lock(mutex_);
    const auto open = std::ranges::count_if(state_.sessions, [&](const auto& entry) {
      return entry.second.tenant == tenant && !entry.second.ended;
    });
    check_limit("sessions", open, 1, "Close clients; those that are silent for a while end by themselves");
    check_metadata(tenant, request.body.size());
    accept(std::move(record));
    return json_reply(tinker::session_reply(id));
  }
  if (post && path == "session_heartbeat") {
    const std::string id = tinker::heartbeat(request.body);
    const Lock lock(mutex_);
    State::OpenSession& session = own(state_.sessions, "session", id, tenant);
    if (!session.finished.empty() || session.ending) throw Refusal{410, "the session is over"};
    session.seen = seconds_now();
    return json_reply(tinker::empty_reply());
  }
  if (post && parts.size() == 3 && parts[0] == "sessions" && parts[2] == "finish") {
    tinker::finish(request.body);
    const Lock lock(mutex_);
    if (own(state_.sessions, "session", parts[1], tenant).finished.empty())
      accept(new_record("finish", parts[1], tenant, request.body));
    return json_reply(tinker::empty_reply());
  }
  if (post && path == "create_model") return create_model(request, false, tenant);
  // The form that creates names a session; the other one is an operation, which keeps its sequence if it is
  // refused.
  if (post && path == "load_weights" && !xorl && request.too_large == 0 &&
      tinker::address_of(request.body, false).model.empty())
    return create_model(request, true, tenant);
  if (post && is_operation(path, xorl)) return submit_operation(request, path, tenant);
  if (post && xorl && path == "kill_session") return kill_session(request, tenant, respond);
  if (post && xorl && path == "delete_checkpoint") {
    const auto [name, id] = xorl::delete_checkpoint(request.body);
    return change_checkpoint(request, checkpoint_called(name, id, tenant), "delete", tenant, respond);
  }
  if (post && path == "create_sampling_session") return create_sampler(request, tenant);
  if (post && path == "asample") return submit_sample(request, tenant);
  if (post && path == "retrieve_future") {
    const std::string id = tinker::retrieve_future(request.body);
    const Lock lock(mutex_);
    return retrieve(id, tenant, respond);
  }
  // training_runs/<run>/checkpoints/<kind>/<name>[/publish or /ttl]
  if (!get && parts.size() >= 5 && parts[0] == "training_runs" && parts[2] == "checkpoints") {
    const std::string checkpoint = "tinker://" + parts[1] + "/" + parts[3] + "/" + parts[4];
    const std::string last = parts.size() == 6 ? parts[5] : "";
    const std::string change = request.method == "DELETE" && parts.size() == 5   ? "delete"
                               : request.method == "DELETE" && last == "publish" ? "unpublish"
                               : post && last == "publish"                       ? "publish"
                               : request.method == "PUT" && last == "ttl"        ? "ttl"
                                                                                 : "";
    if (!change.empty()) return change_checkpoint(request, checkpoint, change, tenant, respond);
  }
  const Lock lock(mutex_);
  if (auto body = list(request, parts, tenant)) return json_reply(std::move(*body));
  throw Refusal{404, fmt::format("{} {} is not served here{}", request.method, printable(request.path, 200),
                                 why_not(path))};
}

// ---- what is asked for by name ----

State::OpenSession& Service::usable_session(const std::string& id, const std::string& tenant) {
  State::OpenSession& session = own(state_.sessions, "session", id, tenant);
  if (session.ending || !session.finished.empty())
    throw Refusal{400, fmt::format("session {} is over; create another one", id)};
  session.seen = seconds_now();
  return session;
}

State::Model& Service::find_model(const std::string& id, const std::string& tenant, bool xorl) {
  std::vector<const State::Model*> called;
  if (xorl) called = models_called(id, tenant);
  return own(state_.models, "model", called.empty() ? id : called[0]->id, tenant);
}

// As xorl's clients call them, the newest first: by the name that they gave, or by the one in paths of
// checkpoints, which these clients also give to a model that goes on from one.
std::vector<const State::Model*> Service::models_called(const std::string& name,
                                                        const std::string& tenant) const {
  std::vector<const State::Model*> found;
  for (const auto& [id, model] : state_.models)
    if (model.tenant == tenant && (id == name || (!model.name.empty() && model.name == name)))
      found.push_back(&model);
  std::sort(found.begin(), found.end(), [](auto* a, auto* b) { return a->created > b->created; });
  return found;
}

std::string Service::checkpoint_called(const std::string& name, const std::string& id,
                                       const std::string& tenant) const {
  const Lock lock(mutex_);
  for (const State::Model* model : models_called(name, tenant))
    if (std::string path = fmt::format("tinker://{}/{}", model->id, id); state_.saved.contains(path))
      return path;
  refuse_unknown("checkpoint", id + " of " + name);
}

const BaseModel* Service::find_base(const std::string& name) const {
  for (const BaseModel& base : engine_.bases())
    if (base.name == name) return &base;
  return nullptr;
}

const State::Saved* Service::find_saved(const std::string& path, const std::string& tenant,
                                        double now) const {
  const auto found = state_.saved.find(path);
  if (found == state_.saved.end() || !found->second.exists(now)) return nullptr;
  return found->second.info.tenant == tenant || found->second.info.is_public ? &found->second : nullptr;
}

// ---- limits ----

std::int64_t Service::most(const char* limit) const {
  const std::int64_t most = options_.limits.at(limit);
  return most == 0 ? std::numeric_limits<std::int64_t>::max() : most;
}

void Service::check_limit(const char* limit, std::int64_t used, std::size_t more, const char* action) const {
  const std::int64_t wanted = used + static_cast<std::int64_t>(more);
  if (wanted > most(limit))
    throw LimitReached({fmt::format("limit {}", limit), std::to_string(wanted),
                        fmt::format("at most {} of a key", most(limit)), action});
}

void Service::check_results(const std::string& tenant) {
  make_room_for_results(tenant);
  check_limit("result-bytes", state_.use_of(tenant).result_bytes, 1, "Fetch the results that are ready");
}

void Service::check_metadata(const std::string& tenant, std::size_t more) const {
  check_limit("metadata-bytes", state_.metadata_bytes(tenant), more,
              "Say less, or delete checkpoints; sessions and models are forgotten a day after their end");
}

void Service::check_room(const std::string& tenant, std::int64_t State::Use::*kind, std::size_t bytes) const {
  const State::Use use = state_.use_of(tenant);
  const bool any = use.operations + use.samples + use.controls > 0;
  if (use.*kind >= most(kind == &State::Use::samples ? "open-samples" : "open-requests") ||
      (any && use.request_bytes + static_cast<std::int64_t>(bytes) > most("request-bytes")))
    throw Refusal{429, fmt::format("{} requests like this one wait, and {} bytes in all; send it later",
                                   use.*kind, use.request_bytes)};
}

// ---- journal ----

LogRecord Service::new_record(const char* kind, const std::string& id, const std::string& tenant,
                              std::string body, const nlohmann::json& more) const {
  LogRecord record{{{"kind", kind}, {"id", id}, {"tenant", tenant}, {"time", seconds_now()}},
                   std::move(body)};
  record.head.update(more);
  return record;
}

void Service::accept(LogRecord record) {
  try {
    journal_->append(record.encode());
  } catch (const ConfigError& error) {
    print(stderr, fmt::format("a request is refused: {}\n", error.what()));
    throw Refusal{503, "the server's journal cannot be written now; nothing was changed"};
  }
  admit(std::make_shared<LogRecord>(std::move(record)));
  changed_.notify_all();
}

void Service::admit(const Accepted& record) {
  const std::string kind = record->text("kind"), id = record->text("id"), tenant = record->text("tenant");
  if (kind == "session") {
    State::OpenSession& session = state_.sessions[id];
    session.tenant = tenant, session.lasting = record->xorl();
    if (!session.lasting) session.client = tinker::create_session(record->body);
    session.created = record->time(), session.seen = seconds_now();
    return;
  }
  if (kind == "finish") {
    state_.sessions.at(id).finished = tinker::finish(record->body);
    return;
  }
  state_.count(*record, 1);
  if (kind == "control") {
    state_.controls.push_back(record);
    state_.control_count += 1;
    if (record->text("path") == "end") state_.sessions.at(record->text("session")).ending = true;
    return;
  }
  if (kind == "sampler") {
    const SamplingSession asked = tinker::create_sampling_session(record->body);
    State::Sampler& sampler = state_.samplers[id];
    sampler = {.tenant = tenant, .session = asked.session, .base = asked.base, .path = asked.path};
    sampler.digest = record->text("digest");
    if (const auto saved = state_.saved.find(asked.path); saved != state_.saved.end())
      sampler.base = saved->second.info.base, sampler.digest = saved->second.info.digest;
    sampler.used = record->time();
    state_.controls.push_back(record);
    return;
  }
  if (kind == "sample") {
    State::Sampler& sampler = state_.samplers.at(record->text("sampler"));
    sampler.used = record->time(), sampler.waiting += 1;
    state_.samples[id] = record;
    state_.unsubmitted.push_back(id);
    forget_result(id);  // an older one, where the same sample is asked for again
    state_.futures[id] = {.tenant = tenant};
    return;
  }
  ISOGRAD_INVARIANT(kind == "model" || kind == "operation", kind);
  const std::string name = record->text("model");
  State::Model& model = state_.models[name];
  if (kind == "model") {
    model.id = name, model.tenant = tenant, model.session = record->text("session");
    model.name = record->text("name"), model.digest = record->text("digest"), model.created = record->time();
    if (record->text("path") == "create_model")
      model.request = record->read(xorl::create_model, tinker::create_model).body;
    state_.sessions.at(model.session).models += 1;
    if (!model.request.lora.seed) model.request.lora.seed = record->seed();
  }
  model.waiting[record->head.at("sequence").get<std::int64_t>()] = record;
  model.last_request = record->time();
  state_.futures[id] = {.tenant = tenant};
}

// ---- models ----

std::string Service::xorl_session(const std::string& tenant) {
  for (const auto& [id, session] : state_.sessions)
    if (session.lasting && session.tenant == tenant) return id;
  LogRecord record = new_record("session", random_hex(), tenant, "", {{"xorl", true}});
  const std::string id = record.text("id");
  accept(std::move(record));
  return id;
}

LogRecord Service::operation_record(const State::Model& model, std::int64_t sequence, const std::string& path,
                                    std::string body, bool xorl) const {
  LogRecord record =
      new_record("operation", fmt::format("{}:op:{}", model.id, sequence), model.tenant, std::move(body),
                 {{"model", model.id}, {"sequence", sequence}, {"path", path}, {"draw", random_hex()}});
  if (xorl) record.head["xorl"] = true;
  return record;
}

HttpReply Service::create_model(const HttpRequest& request, bool loads, const std::string& tenant) {
  const bool xorl = is_xorl(request);
  NewModel asked;
  if (loads) {
    const LoadWeights load = tinker::load_weights(request.body);
    asked.session = load.session, asked.model = load.model;
  } else {
    asked = xorl ? xorl::create_model(request.body) : tinker::create_model(request.body);
  }
  const Lock lock(mutex_);
  std::string name;
  std::vector<std::string> replaced;
  if (xorl) {
    name = asked.model;
    asked.session = xorl_session(tenant);
    asked.model = tinker::model_id(asked.session, state_.sessions.at(asked.session).models);
    // These clients give no sequence. A model that has run nothing is the one that a repeated request means;
    // another one of this name is replaced, once nothing more is refused.
    for (const auto& [id, model] : state_.models) {
      if (model.tenant != tenant || model.name != name || model.gone) continue;
      if (!model.loaded && !model.failure.empty()) continue;
      if (model.free_sequence() <= 1)
        return json_reply(tinker::promise_reply(fmt::format("{}:op:0", id), name));
      replaced.push_back(id);
    }
  } else {
    own(state_.sessions, "session", asked.session, tenant);
  }
  const std::string id = fmt::format("{}:op:0", asked.model);
  if (!state_.models.contains(asked.model)) {
    usable_session(asked.session, tenant);
    check_room(tenant, &State::Use::operations, request.body.size());
    check_results(tenant);
    check_metadata(tenant, request.body.size());
    if (!loads && !find_base(asked.body.base)) {
      std::string known;
      for (const BaseModel& base : engine_.bases()) known += (known.empty() ? "" : ", ") + base.name;
      refuse("base_model", asked.body.base, known, "Name one of these, or start the server with that model");
    }
    const auto counted = [&](const auto& entry) {
      const State::Model& model = entry.second;
      return model.tenant == tenant && !model.gone && (model.loaded || model.failure.empty());
    };
    check_limit("models", std::ranges::count_if(state_.models, counted) - std::ssize(replaced), 1,
                "Close sessions whose models are not needed any more");
    LogRecord record = new_record("model", id, tenant, without_secrets("", request.body),
                                  {{"model", asked.model},
                                   {"session", asked.session},
                                   {"sequence", 0},
                                   {"draw", random_hex()},
                                   {"digest", digest_of(asked.body.base)},
                                   {"path", loads ? "load_weights" : "create_model"}});
    if (xorl) record.head.update({{"xorl", true}, {"name", name}});
    for (const std::string& old : replaced) {
      State::Model& model = state_.models.at(old);
      accept(operation_record(model, model.free_sequence(), "unload_model", "", true));
    }
    accept(std::move(record));
  }
  return json_reply(tinker::promise_reply(id, xorl ? name : asked.model));
}

HttpReply Service::submit_operation(const HttpRequest& request, const std::string& path,
                                    const std::string& tenant) {
  const bool xorl = is_xorl(request);
  tinker::Address address = tinker::address_of(request.body, path == "forward_backward" && !xorl);
  if (xorl && address.model.empty()) address.model = "default";
  const Lock lock(mutex_);
  State::Model& model = find_model(address.model, tenant, xorl);
  if (const auto session = state_.sessions.find(model.session); session != state_.sessions.end())
    session->second.seen = seconds_now();
  if (!model.absent.empty()) throw Refusal{400, model.absent};  // whose sequence is not used
  std::int64_t sequence = address.sequence;
  if (sequence == 0 && (xorl || path == "unload_model")) sequence = model.free_sequence();
  if (sequence < 1)
    refuse("seq_id", "none", "a whole number of 1 or more", "Count a model's operations from 1");
  // The last number of a model that kill_session closes is the server's own.
  const auto waits = model.waiting.find(sequence);
  if (waits != model.waiting.end()
          ? waits->second->text("path") == "kill_session"
          : xorl && model.gone && sequence == model.next - 1 && path != "unload_model")
    throw Refusal{400, fmt::format("model {} was closed", address.model)};
  // A number that was used before belongs to the request that came first, whatever this one asks for.
  if (sequence >= model.next && !model.waiting.contains(sequence)) {
    if (model.gone) throw Refusal{400, fmt::format("model {} was closed with its session", address.model)};
    usable_session(model.session, tenant);
    // Refusing the one that runs next would let the others wait for ever.
    if (sequence != model.next) check_room(tenant, &State::Use::operations, request.body.size());
    make_room_for_results(tenant);
    if (state_.use_of(tenant).result_bytes / 2 > most("result-bytes"))  // refusals are results too
      throw Refusal{429, "results of twice the limit result-bytes wait to be fetched; send this one later"};
    LogRecord record = operation_record(model, sequence, path, without_secrets(path, request.body), xorl);
    if (address.forward_only) record.head["forward_only"] = true;
    try {  // Later ones would wait for a number that is not used.
      if (request.too_large > 0)
        refuse(path, "a body that is too large", fmt::format("at most {} bytes", request.too_large),
               "Send fewer datums in a call");
      if (path != "unload_model") check_results(tenant);
    } catch (const ConfigError& error) {
      const ErrorText& text = error.text();
      record.head["refused"] = {text.where, text.found, text.expected, text.action};
      record.body.clear();
    }
    accept(std::move(record));
  }
  return json_reply(tinker::promise_reply(fmt::format("{}:op:{}", model.id, sequence), address.model));
}

// Answered when the model is closed. It ends with a checkpoint named after the operation that closes it: a
// client whose connection broke asks again.
Service::OptionalReply Service::kill_session(const HttpRequest& request, const std::string& tenant,
                                             Respond respond) {
  const xorl::KillSession asked = xorl::kill_session(request.body);
  const Lock lock(mutex_);
  State::Model& model = find_model(asked.model, tenant, true);
  if (!model.absent.empty()) throw Refusal{400, model.absent};
  if (model.gone) {
    const std::string path = model.path_of(model.next - 1);
    return json_reply(xorl::killed_reply(find_saved(path, tenant, seconds_now()) ? path : ""));
  }
  std::int64_t sequence = model.free_sequence();
  const auto asked_before = std::find_if(model.waiting.begin(), model.waiting.end(), [](const auto& entry) {
    return entry.second->text("path") == "kill_session";
  });
  if (asked_before != model.waiting.end())
    sequence = asked_before->first;
  else
    accept(operation_record(model, sequence, "kill_session", request.body, true));
  Respond answer = [respond](HttpReply reply) {
    const auto parsed = parse_json(reply.body);
    if (parsed.problem.empty() && parsed.value.contains("error"))
      reply = json_reply(tinker::detail_reply(parsed.value.value("error", "")), 400);
    respond(std::move(reply));
  };
  return retrieve(fmt::format("{}:op:{}", model.id, sequence), tenant, answer);
}

// ---- samplers ----

HttpReply Service::create_sampler(const HttpRequest& request, const std::string& tenant) {
  if (is_xorl(request)) {
    const std::string path = xorl::create_sampling_session(request.body);
    const Lock lock(mutex_);
    if (!find_saved(path, tenant, seconds_now())) refuse_unknown("checkpoint", path);
    return json_reply(xorl::sampling_session_reply(path));
  }
  const SamplingSession asked = tinker::create_sampling_session(request.body);
  const std::string id = tinker::sampler_id(asked.session, asked.sequence);
  const Lock lock(mutex_);
  own(state_.sessions, "session", asked.session, tenant);
  if (!state_.samplers.contains(id)) {
    usable_session(asked.session, tenant);
    if (!asked.path.empty() && !find_saved(asked.path, tenant, seconds_now()))
      refuse_unknown("checkpoint", asked.path);
    if (asked.path.empty() && !find_base(asked.base)) refuse_unknown("base model", asked.base);
    const auto busy = [&](const auto& entry) {
      return entry.second.tenant == tenant && entry.second.waiting > 0 && entry.second.absent.empty();
    };
    check_limit("samplers", std::ranges::count_if(state_.samplers, busy), 1, "Wait for their results");
    check_room(tenant, &State::Use::controls, request.body.size());
    check_metadata(tenant, request.body.size());
    accept(new_record("sampler", id, tenant, without_secrets("", request.body),
                      {{"path", "open"}, {"digest", digest_of(asked.base)}}));
  }
  return json_reply(tinker::sampling_session_reply(id));
}

HttpReply Service::submit_sample(const HttpRequest& request, const std::string& tenant) {
  const SampleRequest asked = tinker::asample(request.body);
  const std::string id = fmt::format("{}:{}", asked.sampler, asked.sequence);
  const Lock lock(mutex_);
  State::Sampler& sampler = own(state_.samplers, "sampler", asked.sampler, tenant);
  if (!state_.futures.contains(id)) {
    if (sampler.closed)
      throw Refusal{
          404, fmt::format("sampler {} was closed: it was the longest unused of {}, or its session is over",
                           asked.sampler, most("samplers"))};
    for (const std::string& why : {sampler.absent, sampler.failure})
      if (!why.empty()) throw Refusal{400, why};
    check_room(tenant, &State::Use::samples, request.body.size());
    check_results(tenant);
    if (const auto session = state_.sessions.find(sampler.session); session != state_.sessions.end())
      session->second.seen = seconds_now();
    accept(
        new_record("sample", id, tenant, request.body, {{"sampler", asked.sampler}, {"draw", random_hex()}}));
  }
  std::vector<std::string> sequences;
  for (std::int64_t i = 0; i < asked.body.samples; ++i) sequences.push_back(fmt::format("{}:{}", id, i));
  return json_reply(tinker::sample_promise_reply(id, sequences));
}

// ---- checkpoints and results ----

Service::OptionalReply Service::change_checkpoint(const HttpRequest& request, const std::string& checkpoint,
                                                  const std::string& change, const std::string& tenant,
                                                  Respond& respond) {
  if (change == "ttl") tinker::ttl(request.body);
  const Lock lock(mutex_);
  const auto found = state_.saved.find(checkpoint);
  const bool own = found != state_.saved.end() && found->second.info.tenant == tenant;
  const bool xorl = is_xorl(request);
  // A client whose DELETE was answered after its connection broke sends it again.
  if (own && change == "delete" && !found->second.exists(seconds_now()))
    return json_reply(xorl ? xorl::deleted_reply(checkpoint) : tinker::empty_reply());
  if (!own || !found->second.exists(seconds_now())) refuse_unknown("checkpoint", checkpoint + " of this key");
  check_room(tenant, &State::Use::controls, request.body.size());
  LogRecord record = new_record("control", fmt::format("control:{}", state_.control_count), tenant,
                                request.body, {{"path", change}, {"checkpoint", checkpoint}});
  if (xorl) record.head["xorl"] = true;
  const std::string id = record.text("id");
  accept(std::move(record));
  control_answers_[id] = std::move(respond);
  return {};
}

Service::OptionalReply Service::retrieve(const std::string& id, const std::string& tenant, Respond& respond) {
  const auto found = state_.futures.find(id);
  if (found == state_.futures.end() || found->second.tenant != tenant)
    throw Refusal{410,
                  fmt::format("there is no result {}: unknown, or older than an hour", printable(id, 100))};
  State::Future& future = found->second;
  future.fetched = future.done;
  const auto model = state_.models.find(id.substr(0, id.rfind(":op:")));
  const auto sampler = state_.samplers.find(id.substr(0, id.rfind(':')));
  const std::string absent = model != state_.models.end()       ? model->second.absent
                             : sampler != state_.samplers.end() ? sampler->second.absent
                                                                : "";
  if (!future.done && !absent.empty()) return json_reply(tinker::failure_reply(absent, "user"));
  if (future.done) return HttpReply{.type = future.type, .body = *future.body};
  const double deadline = seconds_now() + options_.poll_seconds;
  future.polls.push_back({deadline, std::move(respond)});
  polls_.emplace_back(deadline, id);
  return {};
}

}  // namespace isograd::serve
