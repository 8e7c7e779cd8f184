// Listings of models, checkpoints and sessions; how busy the server is.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/json.hpp"
#include "base/number_ranges.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/service/service.hpp"
#include "serve/wire/xorl.hpp"

namespace isograd::serve {
namespace {

std::int64_t number_in(const HttpRequest& request, const char* key, std::int64_t otherwise) {
  const auto found = request.query.find(key);
  if (found == request.query.end()) return otherwise;
  const std::optional<std::int64_t> number = whole_number(found->second);
  if (!number) refuse(key, printable(found->second, 100), "a whole number of 0 or more", "Correct the query");
  return *number;
}

// The part of `all` that the query asks for.
template <class Entry>
Cursor cut(const HttpRequest& request, std::int64_t limit, std::vector<Entry>& all) {
  const Cursor cursor{.offset = number_in(request, "offset", 0),
                      .limit = number_in(request, "limit", limit),
                      .total = static_cast<std::int64_t>(all.size())};
  const std::int64_t from = std::min(cursor.offset, cursor.total), most = cursor.total - from;
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(from);
  all = std::vector<Entry>(begin, begin + static_cast<std::ptrdiff_t>(std::min(cursor.limit, most)));
  return cursor;
}

void newest_first(std::vector<CheckpointListing>& all) {
  std::ranges::sort(all, std::greater(), &CheckpointListing::created);
}

CheckpointListing listing_of_checkpoint(const CheckpointInfo& info) {
  return {.id = info.kind + "/" + info.name,
          .kind = info.kind == "weights"           ? "training"
                  : info.kind == "sampler_weights" ? "sampler"
                                                   : "external",
          .path = info.path(),
          .created = info.created,
          .expires = info.expires,
          .bytes = info.bytes,
          .is_public = info.is_public,
          .metadata = info.metadata};
}

}  // namespace

RunListing Service::listing_of(const State::Model& model, double now) const {
  RunListing run;
  run.id = model.id, run.base = model.request.base, run.owner = model.tenant.empty() ? "local" : model.tenant;
  run.rank = model.request.lora.rank, run.last_request = model.last_request;
  run.corrupted = !model.failure.empty(), run.metadata = model.request.metadata;
  for (const auto& [path, saved] : state_.saved) {
    if (saved.info.run != model.id || !saved.exists(now)) continue;
    auto& last = saved.info.kind == "weights" ? run.last_checkpoint : run.last_sampler_checkpoint;
    if (saved.info.kind != "external_weights" && (!last || last->created < saved.info.created))
      last = listing_of_checkpoint(saved.info);
  }
  return run;
}

std::optional<std::string> Service::list(const HttpRequest& request, const std::vector<std::string>& parts,
                                         const std::string& tenant) {
  const std::string path = parts.size() == 1 ? parts[0] : "";
  const bool get = request.method == "GET", xorl = is_xorl(request);
  const double now = seconds_now();
  const auto checkpoints_of = [&](const std::string& run) {
    std::vector<CheckpointListing> found;
    for (const auto& [key, saved] : state_.saved)
      if (saved.info.tenant == tenant && saved.exists(now) && (run.empty() || saved.info.run == run))
        found.push_back(listing_of_checkpoint(saved.info));
    newest_first(found);
    return found;
  };
  if (request.method == "POST" && path == "get_info") {
    const State::Model& model = find_model(tinker::get_info(request.body), tenant, xorl);
    const BaseModel* const base = find_base(model.request.base);
    fs::path tokenizer = base ? base->tokenizer : "";
    if (fs::is_regular_file(tokenizer)) tokenizer = tokenizer.parent_path();  // clients open the directory
    return tinker::info_reply(model.id, model.request, base ? base->architecture : "", tokenizer.string());
  }
  if (request.method == "POST" && path == "weights_info") {
    const std::string asked = xorl ? xorl::weights_info(request.body) : tinker::weights_info(request.body);
    const State::Saved* saved = find_saved(asked, tenant, now);
    if (!saved) refuse_unknown("checkpoint", asked);
    return tinker::weights_info_reply(saved->shape);
  }
  if (request.method == "POST" && xorl && path == "list_checkpoints") {
    const std::string name = xorl::list_checkpoints(request.body);
    find_model(name, tenant, true);
    std::vector<CheckpointListing> found;
    for (const State::Model* model : models_called(name, tenant))
      std::ranges::move(checkpoints_of(model->id), std::back_inserter(found));
    newest_first(found);
    return tinker::checkpoints_reply(found, {});
  }
  if (!get) return {};
  if (path == "session_info" && xorl) {
    std::vector<xorl::OpenModel> models;
    for (const auto& [id, model] : state_.models)
      if (model.tenant == tenant && !model.gone)
        models.push_back({.name = model.name.empty() ? id : model.name,
                          .last_request = model.last_request,
                          .adapter = model.request.lora.rank > 0});
    return xorl::session_info_reply(models, most("models"));
  }
  if (path == "get_server_capabilities") {
    std::vector<std::pair<std::string, std::int64_t>> contexts;
    for (const BaseModel& base : engine_.bases()) contexts.emplace_back(base.name, base.context);
    return tinker::capabilities_reply(contexts);
  }
  if (parts.size() == 2 && parts[0] == "samplers") {
    const State::Sampler& sampler = own(state_.samplers, "sampler", parts[1], tenant);
    return tinker::sampler_reply(parts[1], sampler.base, sampler.path);
  }
  if (path == "sessions") {
    std::vector<std::string> ids;
    for (const auto& [id, session] : state_.sessions)
      if (session.tenant == tenant) ids.push_back(id);
    std::sort(ids.begin(), ids.end(), [&](auto& a, auto& b) {
      return state_.sessions.at(a).created > state_.sessions.at(b).created;
    });
    cut(request, 20, ids);
    return tinker::sessions_reply(ids);
  }
  if (parts.size() == 2 && parts[0] == "sessions") {
    const std::string& id = parts[1];
    const State::OpenSession& session = own(state_.sessions, "session", id, tenant);
    std::vector<std::string> models, samplers;
    for (const auto& [name, model] : state_.models)
      if (model.session == id) models.push_back(name);
    for (const auto& [name, sampler] : state_.samplers)
      if (sampler.session == id) samplers.push_back(name);
    return tinker::session_info_reply(models, samplers, session.client);
  }
  if (path == "checkpoints") {
    std::vector<CheckpointListing> found = checkpoints_of("");
    const Cursor cursor = cut(request, 100, found);
    return tinker::checkpoints_reply(found, cursor);
  }
  if (path == "training_runs") {
    std::vector<const State::Model*> models;
    for (const auto& [id, model] : state_.models)
      if (model.tenant == tenant) models.push_back(&model);
    std::sort(models.begin(), models.end(),
              [](auto* a, auto* b) { return a->last_request > b->last_request; });
    const Cursor cursor = cut(request, 20, models);
    std::vector<RunListing> runs;
    for (const State::Model* model : models) runs.push_back(listing_of(*model, now));
    return tinker::runs_reply(runs, cursor);
  }
  if (parts.size() < 2 || parts[0] != "training_runs") return {};
  const State::Model& model = find_model(parts[1], tenant, false);
  if (parts.size() == 2) return tinker::run_reply(listing_of(model, now));
  if (parts[2] != "checkpoints") return {};
  if (parts.size() == 3) return tinker::checkpoints_reply(checkpoints_of(model.id), {});
  if (parts.size() != 6 || parts[5] != "external_weights_urls") return {};
  return external_urls(request, fmt::format("tinker://{}/{}/{}", model.id, parts[3], parts[4]), tenant);
}

std::string Service::external_urls(const HttpRequest& request, const std::string& path,
                                   const std::string& tenant) const {
  const double now = seconds_now();
  const State::Saved* saved = find_saved(path, tenant, now);
  if (!saved || saved->secret.empty()) refuse_unknown("external checkpoint", path);
  const auto header = [&](const char* name, const char* otherwise) {
    const auto found = request.headers.find(name);
    return found == request.headers.end() ? std::string(otherwise) : found->second;
  };
  const std::string root = header("x-forwarded-proto", "http") + "://" + header("host", "localhost");
  nlohmann::json urls = nlohmann::json::object();
  const fs::path directory = store_.directory(saved->info);
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    const std::string name = fs::relative(entry.path(), directory).string();
    if (entry.is_regular_file() && name != "info.json")
      urls[name] = fmt::format("{}/isograd/files/{}/{}", root, saved->secret, name);
  }
  // The addresses are good while the checkpoint is.
  const auto expires = static_cast<std::time_t>(saved->info.expires > 0 ? saved->info.expires : now + 86400);
  return json_text({{"urls", urls}, {"expires", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(expires))}});
}

// "<secret>/<file>": whoever has the address may read the file.
HttpReply Service::external_file(const std::string& path) const {
  const std::size_t slash = path.find('/');
  const std::string secret = path.substr(0, slash);
  const fs::path name = slash == std::string::npos ? "" : path.substr(slash + 1);
  fs::path directory;
  {
    const Lock lock(mutex_);
    for (const auto& [key, saved] : state_.saved)
      if (!saved.secret.empty() && saved.secret == secret && saved.exists(seconds_now()))
        directory = store_.directory(saved.info);
  }
  // Only names as they are listed: nothing that leaves the directory.
  if (directory.empty() || name.empty() || name.is_absolute() || name != name.lexically_normal() ||
      *name.begin() == "..")
    refuse_unknown("file", path);
  std::error_code error;
  const fs::path file = fs::canonical(directory / name, error);
  if (error || file != fs::canonical(directory, error) / name || !fs::is_regular_file(file, error) ||
      name == "info.json")  // it names the tenant
    refuse_unknown("file", path);
  return {.type = "application/octet-stream", .body = {}, .file = file};
}

namespace {

// A server without keys has one tenant, "", who sees everything.
constexpr const char* kOperator = "operator";
bool sees(const std::string& tenant, const std::string& owner) {
  return tenant.empty() || tenant == kOperator || tenant == owner;
}

}  // namespace

// The status as Prometheus' text.
std::string Service::metrics(const std::string& tenant) const {
  const nlohmann::json all = status(tenant);
  std::string text, of;
  const auto line = [&](const std::string& name, const nlohmann::json& value) {
    text += fmt::format("isograd_{}{} {}\n", name, of, value.dump());
  };
  for (const nlohmann::json& model : all["models"]) {
    of = fmt::format("{{model={},tenant={}}}", model["model"].dump(), model["tenant"].dump());
    line("steps_total", model["steps"]), line("tokens_total", model["tokens"]);
    line("compute_seconds_total", model["seconds"]), line("queue", model["queue"]);
    line("failed", model["failure"] == "" ? 0 : 1);
    for (const char* name : {"grad_norm", "denominator"})
      if (model["last"].contains(name)) line(name, model["last"][name]);
  }
  of = "";
  line("models", all["models"].size());
  for (const auto& [name, value] : all.items()) {
    const bool counts = name == "snapshots" || name == "engine_seconds" || name == "own_seconds";
    if (value.is_number()) line(counts ? name + "_total" : name, value);
  }
  return text;
}

nlohmann::json Service::status(const std::string& tenant) const {
  using nlohmann::json;
  const Lock lock(mutex_);
  const auto of_sampler = [&](const auto& entry) {
    return entry.second.in_engine() && sees(tenant, entry.second.tenant);
  };
  const auto of_session = [&](const auto& entry) {
    const State::OpenSession& session = entry.second;
    return !session.ended && session.finished.empty() && sees(tenant, session.tenant);
  };
  json all{{"uptime_seconds", seconds_now() - started_},
           {"bases", json::array()},
           {"models", json::array()},
           {"samplers", std::ranges::count_if(state_.samplers, of_sampler)},
           {"sessions", std::ranges::count_if(state_.sessions, of_session)},
           {"tenants", json::object()}};
  const double engine = engine_seconds_, own = busy_seconds_ - engine;
  if (sees(tenant, ""))
    all.update({{"samples_waiting", state_.samples.size()},
                {"journal_bytes", journal_->position() - position_at_snapshot_},
                {"checkpoints_ignored", store_.ignored().size()},
                {"snapshots", snapshot_number_},
                {"snapshot_seconds", snapshot_seconds_},
                {"engine_seconds", engine},
                {"own_seconds", own}});
  for (const BaseModel& base : engine_.bases()) all["bases"].push_back(base.name);
  for (const auto& [id, model] : state_.models)
    if (!model.gone && sees(tenant, model.tenant))
      all["models"].push_back({{"model", id},
                               {"tenant", model.tenant},
                               {"base", model.request.base},
                               {"rank", model.request.lora.rank},
                               {"steps", model.steps},
                               {"tokens", model.tokens},
                               {"seconds", model.seconds},
                               {"queue", model.waiting.size()},
                               {"next", model.next},
                               {"failure", model.failure},
                               {"last", model.last}});
  for (const auto& [owner, share] : shares_)
    if (sees(tenant, owner)) all["tenants"][owner]["seconds"] = share.seconds;
  for (const auto& [owner, use] : state_.use)
    if (sees(tenant, owner))
      all["tenants"][owner].update(
          {{"request_bytes", use.request_bytes}, {"result_bytes", use.result_bytes}});
  for (const auto& [path, saved] : state_.saved) {
    if (!saved.exists(seconds_now()) || !sees(tenant, saved.info.tenant)) continue;
    json& bytes = all["tenants"][saved.info.tenant]["checkpoint_bytes"];
    bytes = (bytes.is_null() ? 0 : bytes.get<std::int64_t>()) + saved.info.bytes;
  }
  return all;
}

}  // namespace isograd::serve
