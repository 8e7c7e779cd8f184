// The thread that computes: whose turn it is, what an operation does, and how its completion becomes part of
// the state.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/service/service.hpp"
#include "serve/wire/xorl.hpp"

namespace isograd::serve {
namespace {

constexpr double kLongestTick = 5;  // seconds between two looks of the watching thread

// Adds the result of the next datums, whose metrics are sums over them.
void join(ForwardBackwardResult& all, ForwardBackwardResult piece) {
  for (const auto& [key, value] : piece.metrics) all.metrics[key] += value;
  std::ranges::move(piece.log_probabilities, std::back_inserter(all.log_probabilities));
}

// Failures of these leave a state that the client did not ask for; later operations would build on it.
bool changes_model(const LogRecord& record) {
  const std::string path = record.text("path");
  if (record.head.value("forward_only", false)) return false;
  return path == "forward_backward" || path == "optim_step" || path == "load_weights" ||
         path == "create_model";
}

// Why what succeeded once may fail when it is done again.
struct Lost {
  explicit Lost(std::string text, const char* whose = "user") : error(std::move(text)), category(whose) {}
  explicit Lost(const ErrorText& text) : Lost(ConfigError(text).what()) {}
  std::string error, category;
};

// One that a limit stopped can still be saved: the engine has it.
void require_sound(const State::Model& model, const std::string& id, bool saves) {
  if (!model.absent.empty()) throw Lost(model.absent);
  if (!model.failure.empty() && !(saves && model.loaded))
    throw Lost({id, "an earlier operation that failed: " + model.failure, "a model without failures",
                "Create another model, from a checkpoint where there is one"});
}

[[noreturn]] void lack(const std::string& path) {
  throw Lost({"load", "no checkpoint " + path, "one that was saved", "List the checkpoints"});
}

// Files may be damaged after an operation that read them succeeded.
template <class Call>
void with_files(Call call) {
  try {
    call();
  } catch (const ConfigError& error) {
    throw Lost(error.what());
  }
}

// Errors of a call become the outcome: a ConfigError is the user's mistake.
template <class Call>
auto guarded(const std::string& id, Call call) -> decltype(call()) {
  using Outcome = typename std::remove_reference_t<decltype(*call())>;
  Outcome failed;
  try {
    return call();
  } catch (const Lost& lost) {
    failed.error = lost.error, failed.category = lost.category, failed.lost = true;
    failed.status = lost.category == "user" ? 400 : 500;
  } catch (const ConfigError& error) {
    failed.error = error.what(), failed.category = "user", failed.status = 400;
    failed.intact = dynamic_cast<const LimitReached*>(&error) != nullptr;
  } catch (const std::exception& error) {
    print(stderr, fmt::format("{}: {}\n", id, printable(error.what())));
    failed.error = fmt::format("the server failed: {}", printable(error.what(), 1000));
    failed.category = "server", failed.status = 500;
  }
  return failed;
}

}  // namespace

// While it lives, a kill of the process counts as a death in the operation or sample `id`.
struct Service::Attempt {
  Attempt(Service& of, std::string_view id) : folder(of.folder_) {
    const auto deaths = of.deaths_.find(std::string(id));
    if (deaths != of.deaths_.end() && deaths->second >= of.options_.deaths)
      throw Lost(
          fmt::format("the server died {} times while it did this, and does not try again", deaths->second),
          "server");
    former = folder.set_doing(id);
  }
  ~Attempt() { folder.set_doing(former); }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  StateFolder& folder;
  std::string former{};
};

// ---- turns ----

void Service::run() {
  Lock lock(mutex_);
  started_ = seconds_now();
  while (!stopping_) {
    if (writing_ && writing_->is_over()) end_snapshot(lock);
    State::Model* model = nullptr;
    const Turn turn = choose(model);
    if (turn == Turn::kNone) changed_.wait_for(lock, std::chrono::seconds(1));
    const AddSeconds busy(busy_seconds_);
    switch (turn) {
      case Turn::kNone: break;
      case Turn::kControl: {
        const Accepted record = state_.controls.front();
        lock.unlock();
        Outcome outcome = *execute(*record, nullptr);
        lock.lock();
        complete(lock, record, std::move(outcome));
        break;
      }
      case Turn::kTraining: train(lock, *model); break;
      case Turn::kSampling: sample(lock); break;
      case Turn::kSnapshot: begin_snapshot(lock); break;
    }
    send(lock);
  }
  end_snapshot(lock);
  const bool behind = work_since_ > 0 && !abandoned_;
  const bool between = std::none_of(state_.models.begin(), state_.models.end(),
                                    [](const auto& entry) { return entry.second.progress.has_value(); });
  if (behind && between) take_snapshot(lock);
  if (unsynced_) std::rethrow_exception(unsynced_);
}

// A tenant's share grows by the seconds that its models take; the smallest share has the next turn. One that
// did not want any for a while starts with the smallest share of those that did: it cannot save up.
Service::Turn Service::choose(State::Model*& best) {
  // Before all else, but a turn of training comes between two: many of them must not stop everybody.
  if (!state_.controls.empty() && !std::exchange(controlled_last_, true)) return Turn::kControl;
  controlled_last_ = false;
  std::map<std::string, State::Model*> ready;
  if (snapshot_due()) {  // between operations: those in progress are completed first
    for (auto& [id, model] : state_.models)
      if (model.progress) best = &model;
    return best ? Turn::kTraining : Turn::kSnapshot;
  }
  for (auto& [id, model] : state_.models) {
    if (!model.ready()) continue;
    State::Model*& first = ready[model.tenant];
    if (!first || model.turn < first->turn) first = &model;
  }
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [tenant, share] : shares_)
    if (share.was_ready && ready.contains(tenant)) least = std::min(least, share.seconds);
  for (auto& [tenant, share] : shares_) share.was_ready &= ready.contains(tenant);
  for (auto& [tenant, model] : ready) {
    Share& share = shares_[tenant];
    if (!share.was_ready && std::isfinite(least)) share.seconds = std::max(share.seconds, least);
    share.was_ready = true;
    if (!best || share.seconds < shares_[best->tenant].seconds) best = model;
  }
  if (!(submitted_.empty() && state_.unsubmitted.empty()) && (!best || !sampled_last_)) {
    sampled_last_ = true;
    return Turn::kSampling;
  }
  sampled_last_ = false;
  if (best) return Turn::kTraining;
  return state_.controls.empty() ? Turn::kNone : Turn::kControl;
}

void Service::train(Lock& lock, State::Model& model) {
  const Accepted record = model.waiting.begin()->second;
  lock.unlock();
  const Stopwatch clock;
  std::optional<Outcome> outcome = execute(*record, &model);
  const double seconds = clock.seconds();
  lock.lock();
  model.seconds += seconds, model.step_seconds += seconds, model.turn = ++turn_, work_since_ += seconds;
  shares_[model.tenant].seconds += seconds;
  longest_ = std::max(longest_, model.progress ? model.progress->seconds += seconds : seconds);
  if (outcome) complete(lock, record, std::move(*outcome));
}

std::optional<Service::Outcome> Service::execute(const LogRecord& record, State::Model* model) {
  const std::string id = record.text("id"), path = record.text("path");
  // Whatever came before: a model can be unloaded, and a replay finds what a lost model has saved.
  const bool saves = path.starts_with("save_weights"),
             always = path == "unload_model" || path == "kill_session" || (replaying_ && saves);
  std::optional<Outcome> outcome = guarded(id, [&]() -> std::optional<Outcome> {
    if (model && !always) require_sound(*model, id, saves);
    if (const auto why = record.head.find("refused"); why != record.head.end())
      throw LimitReached({why->at(0), why->at(1), why->at(2), why->at(3)});
    const Attempt attempt(*this, id);
    return model ? advance(*model, record) : control(record);
  });
  if (!model) return outcome;
  Lock lock(mutex_);
  bool changes = changes_model(record) || (path == "abort_gradient_epoch" && outcome && outcome->lost);
  if (model->progress) {
    const std::int64_t tokens = std::exchange(model->progress->tokens, 0);
    changes = !model->progress->request.forward_only;
    model->tokens += tokens, model->step_tokens += changes ? tokens : 0;
  }
  if (!outcome) return outcome;
  outcome->poison = !outcome->error.empty() && changes && model->failure.empty();
  if (!outcome->poison || outcome->intact || !model->in_engine()) return outcome;
  model->loaded = false;
  lock.unlock();
  engine_.remove(model->id);  // may wait for a snapshot
  return outcome;
}

// ---- operations of a model ----

std::optional<Service::Outcome> Service::advance(State::Model& model, const LogRecord& record) {
  const std::string path = record.text("path");
  if (path != "forward_backward" && path != "forward") return perform(model, record);
  if (!model.progress) {
    ForwardBackward request = record.read(xorl::forward_backward, tinker::forward_backward).body;
    model.progress.emplace().request = std::move(request);
  }
  ForwardProgress& progress = *model.progress;
  ForwardBackward piece{.data = {},
                        .loss = progress.request.loss,
                        .config = progress.request.config,
                        .forward_only = progress.request.forward_only};
  std::vector<Datum>& data = progress.request.data;
  std::int64_t tokens = 0;
  do {
    if (progress.done == data.size()) break;  // the engine refuses a request without data
    tokens += static_cast<std::int64_t>(data[progress.done].tokens.size());
    piece.data.push_back(std::move(data[progress.done++]));
  } while (tokens < options_.piece_tokens);
  join(progress.result, [&] {
    const AddSeconds in_engine(engine_seconds_);
    return engine_.forward_backward(model.id, piece);
  }());
  progress.tokens = tokens;
  if (progress.done < data.size()) return {};
  Outcome outcome;
  if (record.xorl()) {
    outcome.body = xorl::forward_backward_reply(xorl::forward_backward(record.body).body, progress.result);
  } else {
    outcome.type = tinker::kProtobuf, outcome.body = tinker::forward_backward_reply(progress.result);
  }
  return outcome;
}

Service::Outcome Service::perform(State::Model& model, const LogRecord& record) {
  const std::string path = record.text("path");
  const bool xorl = record.xorl();
  if (path == "optim_step") return step(model, record);
  if (path == "load_weights") return load(model, record);
  if (path == "create_model") {
    check_base(model.id, model.request.base, model.digest);
    engine_.create(model.id, model.request);
    const std::string name = xorl ? model.name : model.id;
    return {.body = xorl ? xorl::create_model_reply(name) : tinker::create_model_reply(name),
            .change = [&model] { model.loaded = true; }};
  }
  if (path == "unload_model") {
    if (model.in_engine()) engine_.remove(model.id);
    return {.body = nlohmann::json{{"model_id", model.id}, {"type", "unload_model"}}.dump(),
            .change = [&model] { model.loaded = false, model.gone = true; }};
  }
  if (path == "abort_gradient_epoch") {
    engine_.drop_gradient(model.id);
    return {.body = xorl::aborted_reply(model.name, model.steps)};
  }
  if (path == "kill_session") {
    Outcome outcome;
    std::string saved;
    const auto sequence = record.head.at("sequence").get<std::int64_t>();
    const std::string path_of_last = model.path_of(sequence);
    const CheckpointInfo* const last = saved_before(path_of_last);
    if ((model.loaded || (last && last->operation == sequence)) && xorl::kill_session(record.body).save) {
      outcome = save(model, record, {}, Engine::Save::kTraining);
      saved = path_of_last;
    }
    if (model.in_engine()) engine_.remove(model.id);
    outcome.body = xorl::killed_reply(saved);
    outcome.change = [&model, change = outcome.change] {
      if (change) change();
      model.loaded = false, model.gone = true;
    };
    return outcome;
  }
  if (path == "save_weights")
    return save(model, record, record.read(xorl::save_weights, tinker::save_weights).body,
                Engine::Save::kTraining);
  if (path == "save_weights_external")
    return save(model, record, tinker::save_weights_external(record.body).body, Engine::Save::kExternal);
  ISOGRAD_INVARIANT(path == "save_weights_for_sampler", path);
  const SaveWeights request =
      record.read(xorl::save_weights_for_sampler, tinker::save_weights_for_sampler).body;
  if (!request.name && request.sampling_sequence)
    return open_sampler_of(model, *request.sampling_sequence, record.time());
  return save(model, record, request, Engine::Save::kSampler);
}

Service::Outcome Service::step(State::Model& model, const LogRecord& record) {
  const AdamParams params = record.read(xorl::optim_step, tinker::optim_step).body;
  check_dumps(model);
  const Metrics metrics = [&] {
    const AddSeconds in_engine(engine_seconds_);
    return engine_.optim_step(model.id, params);
  }();
  const auto change = [this, &model, metrics] {
    model.steps += 1, model.last = metrics;
    if (options_.print_steps && !replaying_) {
      std::string line = fmt::format("{} step {}:", model.id, model.steps);
      for (const auto& [name, value] : metrics)
        if (!name.starts_with(kNormOf)) line += fmt::format(" {} {:.6g}", name, value);
      print(stdout, fmt::format("{} tokens {} seconds {:.3f} queue {}\n", line, model.step_tokens,
                                model.step_seconds, model.waiting.size() - 1));
      std::fflush(stdout);  // a pipe or a file has the line at once, and after a kill
    }
    model.step_tokens = 0, model.step_seconds = 0;
  };
  return {.body = tinker::optim_step_reply(metrics), .change = change};
}

Service::Outcome Service::save(State::Model& model, const LogRecord& record, const SaveWeights& request,
                               Engine::Save which) {
  const bool sampler = which == Engine::Save::kSampler, external = which == Engine::Save::kExternal;
  State::Saved saved{.shape = model.request};
  CheckpointInfo& info = saved.info;
  info.run = model.id, info.tenant = model.tenant, info.base = model.request.base,
  info.rank = model.request.lora.rank;
  info.operation = record.head.at("sequence").get<std::int64_t>();
  if (info.rank > 0) info.digest = model.digest;
  info.kind = sampler ? "sampler_weights" : external ? "external_weights" : "weights";
  info.name = request.name.value_or(fmt::format("operation-{}", info.operation));
  info.metadata = request.metadata;
  check_checkpoint_name(info.name);
  // Times are those of the request: a replay has the same.
  info.created = record.time();
  if (request.ttl_seconds) info.expires = record.time() + static_cast<double>(*request.ttl_seconds);
  const std::string path = info.path();
  if (!request.overwrite && find_saved(path, model.tenant, record.time()))
    refuse("save", fmt::format("a checkpoint {}", path), "a name that is free",
           "Choose another name, or overwrite");
  if (!replaying_) {
    const Lock lock(mutex_);
    std::int64_t count = 0, bytes = 0, metadata = 0;
    for (const auto& [key, other] : state_.saved)
      if (other.info.tenant == model.tenant && other.exists(record.time()) && key != path)
        count += 1, bytes += other.info.bytes;
    for (const auto& [key, value] : info.metadata) metadata += std::ssize(key) + std::ssize(value);
    const char* const action = "Delete checkpoints that are not needed any more";
    check_limit("checkpoints", count, 1, action), check_limit("checkpoint-bytes", bytes, 1, action);
    check_metadata(model.tenant, static_cast<std::size_t>(metadata));
  }
  if (external) saved.secret = record.text("draw");
  // A later save of the name, or this one by a model that is lost now: what lies there stays.
  const CheckpointInfo* const written = saved_before(path);
  if (written &&
      (written->operation > info.operation ||
       (written->operation == info.operation && !(model.failure.empty() && model.absent.empty())))) {
    info.bytes = written->bytes, info.base = written->base, info.rank = written->rank,
    info.digest = written->digest;
    // A model that lost the checkpoint it was created from does not know its shape.
    saved.shape.base = info.base, saved.shape.lora.rank = info.rank;
  } else {
    require_sound(model, record.text("id"), true);
    release(path);
    info = store_.save(info,
                       [&](const fs::path& directory) { return engine_.save(model.id, which, directory); });
  }
  std::string body = record.xorl() ? xorl::path_reply(path)
                     : sampler     ? tinker::save_for_sampler_reply(path, "")
                     : external    ? tinker::save_external_reply(path, info.bytes)
                                   : tinker::save_weights_reply(path);
  return {.body = std::move(body), .change = [this, path, saved] { state_.saved[path] = saved; }};
}

// A replay finds what a model that is lost now has saved.
const CheckpointInfo* Service::saved_before(const std::string& path) const {
  const auto found = store_.all().find(path);
  return replaying_ && found != store_.all().end() ? &found->second : nullptr;
}

Service::Outcome Service::open_sampler_of(State::Model& model, std::int64_t sequence, double time) {
  const std::string id = tinker::sampler_id(model.session, sequence);
  {
    const Lock lock(mutex_);
    if (state_.samplers.contains(id))
      refuse("sampling_session_seq_id", std::to_string(sequence),
             "a number that no sampler of the session has", "Use an SDK that counts them");
  }
  require_sound(model, id, true);
  Outcome outcome{.body = tinker::save_for_sampler_reply("", id)};
  make_room_for_sampler(model.tenant, outcome);
  engine_.open_sampler_of(id, model.id);
  outcome.change = [this, &model, id, time] {
    state_.samplers[id] = {
        .tenant = model.tenant, .session = model.session, .base = model.request.base, .open = true};
    state_.samplers[id].used = time;
    if (model.request.lora.rank > 0) state_.samplers[id].digest = model.digest;
  };
  return outcome;
}

// Clients never close samplers: the one that was not used for longest makes room. Which ones those are is
// part of the journal, because a replay does not know what was complete by then.
void Service::make_room_for_sampler(const std::string& tenant, Outcome& outcome) {
  if (replaying_) return;
  std::vector<std::pair<double, std::string>> idle;
  std::int64_t open = 0;
  const Lock lock(mutex_);
  for (const auto& [id, sampler] : state_.samplers) {
    if (sampler.tenant != tenant || !sampler.in_engine()) continue;
    open += 1;
    if (sampler.waiting == 0) idle.emplace_back(sampler.used, id);
  }
  std::sort(idle.begin(), idle.end());
  for (std::size_t i = 0; i < idle.size() && open >= most("samplers"); ++i, --open)
    outcome.closed.push_back(idle[i].second);  // with the outcome
  check_limit("samplers", open, 1, "Wait for results of those at work");
}

void Service::check_dumps(const State::Model& model) const {
  const auto dumps = model.request.metadata.find("isograd.dump");
  if (replaying_ || dumps == model.request.metadata.end() || dumps->second != "true") return;
  std::vector<fs::path> folders;
  {
    const Lock lock(mutex_);
    for (const auto& [id, other] : state_.models)
      if (other.tenant == model.tenant) folders.push_back(options_.state / "dumps" / id);
  }
  std::uintmax_t bytes = 0;
  std::error_code error;  // of folders that are not there, or are deleted meanwhile
  for (const fs::path& folder : folders)
    for (fs::recursive_directory_iterator at(folder, error), end; at != end; at.increment(error))
      if (const std::uintmax_t size = at->is_regular_file(error) ? at->file_size(error) : 0; !error)
        bytes += size;
  check_limit("dump-bytes", static_cast<std::int64_t>(bytes), 1,
              "Delete dumps in the server's state folder; this model can still be saved");
}

Service::Outcome Service::load(State::Model& model, const LogRecord& record) {
  const LoadWeights request = record.read(xorl::load_weights, tinker::load_weights);
  const State::Saved* found = find_saved(request.path, model.tenant, record.time());
  if (!found) lack(request.path);
  const State::Saved& saved = *found;
  if (saved.info.kind != "weights")
    refuse("load", saved.info.kind + " of " + request.path, "weights that training goes on from",
           "Save with save_state, and load that");
  const std::string base = request.creates ? request.base : model.request.base;
  if (!base.empty() && base != saved.info.base)
    refuse("load", fmt::format("a checkpoint of {}", saved.info.base), "one of " + base,
           "Load it into a model of its base");
  if (!request.creates && model.request.lora.rank != saved.info.rank)
    refuse("load", fmt::format("a checkpoint of rank {}", saved.info.rank),
           fmt::format("rank {}", model.request.lora.rank), "Create a model from the checkpoint");
  const fs::path directory = store_.directory(saved.info);
  with_files([&] { store_.check_files(saved.info); });
  check_base(request.path, saved.info.base, saved.info.digest);
  loaded_since_.insert(request.path);
  CreateModel shape = saved.shape;
  // Knobs of the saved model hold unless the request has its own.
  std::map<std::string, std::string> metadata = request.creates ? request.metadata : model.request.metadata;
  for (const auto& [key, value] : saved.shape.metadata)
    if (key.starts_with("isograd.")) metadata.try_emplace(key, value);
  shape.metadata = metadata;
  if (model.loaded) {
    engine_.remove(model.id);
    const Lock lock(mutex_);
    model.loaded = false;
  }
  engine_.load(model.id, directory, request.optimizer, metadata);
  const std::string name = record.xorl() ? model.name : model.id;
  return {
      .body = record.xorl() ? xorl::path_reply(request.path) : tinker::load_weights_reply(name, request.path),
      .change = [&model, shape, digest = digest_of(saved.info.base)] {
        model.loaded = true, model.request = shape, model.digest = digest;
      }};
}

// ---- the rest ----

Service::Outcome Service::control(const LogRecord& record) {
  const std::string path = record.text("path"), id = record.text("id");
  Outcome outcome{.body =
                      record.xorl() ? xorl::deleted_reply(record.text("checkpoint")) : tinker::empty_reply()};
  if (path == "end") return end_session(record.text("session"));
  if (path == "open") {
    State::Sampler& sampler = [&]() -> State::Sampler& {
      const Lock lock(mutex_);
      return state_.samplers.at(id);
    }();
    make_room_for_sampler(sampler.tenant, outcome);
    if (sampler.path.empty()) {
      check_base(id, sampler.base, sampler.digest);
      engine_.open_sampler(id, sampler.base);
    } else {
      const State::Saved* saved = find_saved(sampler.path, sampler.tenant, record.time());
      if (!saved) lack(sampler.path);
      with_files([&] { store_.check_files(saved->info); });
      check_base(sampler.path, saved->info.base, saved->info.digest);
      loaded_since_.insert(sampler.path);
      engine_.load_sampler(id, store_.directory(saved->info));
    }
    outcome.change = [&sampler] { sampler.open = true; };
    return outcome;
  }
  const std::string checkpoint = record.text("checkpoint");
  const auto found = state_.saved.find(checkpoint);
  if (found == state_.saved.end() || found->second.deleted > 0) {  // since the request was accepted
    outcome.status = path == "delete" ? 200 : 404;
    return outcome;
  }
  CheckpointInfo info = found->second.info;
  const double time = record.time();
  const bool has_files = fs::exists(store_.directory(info));  // a replay may find that they are gone
  if (path == "delete") {
    release(checkpoint);
    if (has_files) store_.remove(info);
  } else if (path == "ttl") {
    const std::optional<std::int64_t> seconds = tinker::ttl(record.body);
    info.expires = seconds ? time + static_cast<double>(*seconds) : 0;
  } else {
    info.is_public = path == "publish";
  }
  if (has_files && path != "delete") with_files([&] { store_.update(info); });
  outcome.change = [this, checkpoint, info, deleted = path == "delete" ? time : 0.0] {
    const auto entry = state_.saved.find(checkpoint);
    if (entry != state_.saved.end()) entry->second.info = info, entry->second.deleted = deleted;
  };
  return outcome;
}

void Service::fail_waiting(State::Model& model, const std::string& cause, double time) {
  for (const auto& [sequence, record] : model.waiting)
    finish_future(record->text("id"), "application/json", tinker::failure_reply(cause, "user"), time);
  for (const auto& [sequence, record] : model.waiting) state_.count(*record, -1);
  model.waiting.clear();
}

Service::Outcome Service::end_session(const std::string& id) {
  Outcome outcome;
  std::vector<std::string> models;
  {
    const Lock lock(mutex_);
    for (const auto& [name, sampler] : state_.samplers)
      if (sampler.session == id && sampler.open) outcome.closed.push_back(name);
    for (const auto& [name, model] : state_.models)
      if (model.session == id && model.in_engine()) models.push_back(name);
  }
  for (const std::string& name : models) engine_.remove(name);  // may wait for a snapshot
  outcome.change = [this, id] {
    const double now = seconds_now();
    for (auto& [name, sampler] : state_.samplers)
      if (sampler.session == id) sampler.closed = true;
    for (auto& [name, model] : state_.models) {
      if (model.session != id) continue;
      fail_waiting(model, "the session ended before earlier operations arrived", now);
      model.loaded = false, model.gone = true;
    }
    state_.sessions.at(id).ended = true;
  };
  return outcome;
}

void Service::sample(Lock& lock) {
  std::vector<std::pair<Accepted, Outcome>> complete_ones;
  const Stopwatch clock;
  std::vector<Accepted> asked;
  // Samples of a pass in which the process died go alone, so that the one that killed it is known.
  const auto died = [&](const std::string& id) { return deaths_.contains(id); };
  bool alone = std::any_of(submitted_.begin(), submitted_.end(), died);
  std::deque<std::string> later;
  for (; !alone && !state_.unsubmitted.empty(); state_.unsubmitted.pop_front()) {
    const std::string& id = state_.unsubmitted.front();
    const Accepted& record = state_.samples.at(id);
    const State::Sampler& sampler = state_.samplers.at(record->text("sampler"));
    if (!sampler.open && !sampler.closed && sampler.failure.empty()) {  // a control opens it
      later.push_back(id);
      continue;
    }
    alone = died(id);
    if (alone && !(submitted_.empty() && asked.empty())) break;
    asked.push_back(record);
  }
  state_.unsubmitted.insert(state_.unsubmitted.begin(), later.begin(), later.end());
  lock.unlock();
  for (const Accepted& record : asked) {
    const std::string id = record->text("id"), name = record->text("sampler");
    std::optional<Outcome> refused = guarded(id, [&]() -> std::optional<Outcome> {
      {
        const Lock held(mutex_);
        const State::Sampler& sampler = state_.samplers.at(name);
        if (!sampler.open)
          refuse(name, sampler.failure.empty() ? "a closed sampler" : sampler.failure, "an open sampler",
                 "Create another one");
      }
      const Attempt attempt(*this, id);
      engine_.submit(id, name, tinker::asample(record->body).body, record->seed());
      return {};
    });
    if (refused)
      complete_ones.emplace_back(record, std::move(*refused));
    else
      submitted_.insert(id);
  }
  std::vector<Engine::Sampled> sampled;
  std::string failure;
  try {
    const AddSeconds in_engine(engine_seconds_);
    const Attempt attempt(*this, submitted_.size() == 1 ? std::string_view(*submitted_.begin()) : kSamples);
    if (engine_.sampling()) sampled = engine_.sample_pass();
  } catch (const std::exception& error) {
    print(stderr, fmt::format("sampling: {}\n", printable(error.what())));
    failure = error.what();
  }
  lock.lock();
  if (!failure.empty())  // of the pass, not of one request
    for (const std::string& id : submitted_) sampled.push_back({id, failure, true, {}});
  for (Engine::Sampled& one : sampled) {
    const auto found = state_.samples.find(one.id);
    if (found == state_.samples.end() || submitted_.erase(one.id) == 0) continue;
    Outcome outcome{.type = tinker::kProtobuf};
    if (one.error.empty())
      outcome.body = tinker::sample_reply(one.result);
    else
      outcome.error = (one.of_server ? "the server failed: " : "") + one.error,
      outcome.category = one.of_server ? "server" : "user";
    complete_ones.emplace_back(found->second, std::move(outcome));
  }
  for (auto& [record, outcome] : complete_ones) complete(lock, record, std::move(outcome));
  // A pass that has nothing to do would be repeated at once.
  if (complete_ones.empty() && sampled.empty() && clock.seconds() < 1e-4)
    changed_.wait_for(lock, std::chrono::milliseconds(1));
}

// A replay reads the files of checkpoints that were loaded since the last snapshot, so it must not need them
// any more. Models in the middle of an operation are completed first: a snapshot has none.
void Service::release(const std::string& path) {
  if (replaying_) return;
  Lock lock(mutex_);
  if (writing_ && writing_->loaded.contains(path)) end_snapshot(lock);
  if (!loaded_since_.contains(path)) return;
  for (auto& [id, model] : state_.models)
    while (model.progress && !abandoned_) train(lock, model);
  const std::string problem = abandoned_ ? "the server ends" : take_snapshot(lock);
  // A mistake of nobody; but a client would repeat what is answered as one of the server.
  if (!problem.empty())
    refuse(path,
           "a checkpoint that a restart needs, and no snapshot that would replace it: " +
               printable(problem, 500),
           "room in the state folder", "Free space there, and ask again");
}

std::string Service::digest_of(const std::string& base) const {
  const BaseModel* const found = find_base(base);
  return found ? found->digest : "";
}

std::string Service::other_base(const std::string& what, const std::string& base,
                                const std::string& digest) const {
  const std::string now = digest_of(base);
  if (digest.empty() || now.empty() || digest == now) return "";
  return ConfigError({what, fmt::format("files of the base {} with the digest {}", base, now),
                      fmt::format("those that it was made with, of the digest {}", digest),
                      "Put them back and start the server again, or give the new ones a name of their own"})
      .what();
}

void Service::check_base(const std::string& what, const std::string& base, const std::string& digest) const {
  if (const std::string other = other_base(what, base, digest); !other.empty()) throw Lost(other);
}

// ---- completion ----

void Service::complete(Lock& lock, const Accepted& record, Outcome outcome) {
  const double time = seconds_now();
  LogRecord done{{{"kind", "done"}, {"of", record->text("kind")}, {"id", record->text("id")}, {"time", time}},
                 ""};
  if (record->head.contains("model")) done.head["model"] = record->head.at("model");
  if (!outcome.error.empty())
    done.head.update({{"error", outcome.error},
                      {"category", outcome.category},
                      {"poison", outcome.poison},
                      {"intact", outcome.intact}});
  if (!outcome.closed.empty()) done.head["closed"] = outcome.closed;
  // Samples are kept, all other results are computed again.
  if (record->text("kind") == "sample" && outcome.error.empty())
    done.head["type"] = outcome.type, done.body = outcome.body;
  for (bool first = true;; first = false) {
    if (abandoned_) return;
    try {
      journal_->append(done.encode());
      break;
    } catch (const ConfigError& error) {
      if (first) print(stderr, fmt::format("results wait until they can be journalled: {}\n", error.what()));
      changed_.wait_for(lock, std::chrono::seconds(1));
      abandoned_ = stopping_;
    }
  }
  apply(record, outcome, time);
}

void Service::apply(const Accepted& accepted, Outcome& outcome, double time) {
  const Accepted record = accepted;  // the state's own may go away
  const std::string kind = record->text("kind"), id = record->text("id");
  state_.count(*record, -1);
  if (deaths_.erase(id) > 0 && !replaying_) write_deaths();
  if (!outcome.error.empty()) {
    outcome.type = "application/json";
    outcome.body = tinker::failure_reply(outcome.error, outcome.category);
  } else if (outcome.change) {
    outcome.change();
  }
  for (const std::string& name : outcome.closed) {
    State::Sampler& sampler = state_.samplers.at(name);
    if (sampler.in_engine()) engine_.close_sampler(name);
    sampler.open = false, sampler.closed = true;
  }
  if (kind == "control" || kind == "sampler") {
    state_.controls.pop_front();
    if (kind == "sampler") state_.samplers.at(id).failure = outcome.error;
    if (const auto answer = control_answers_.extract(id)) {
      const bool failed = outcome.status >= 400;
      answers_.emplace_back(
          std::move(answer.mapped()),
          HttpReply{.status = outcome.status,
                    .body = failed
                                ? tinker::detail_reply(outcome.error.empty() ? "there is no such checkpoint"
                                                                             : outcome.error)
                                : outcome.body});
    }
    return;
  }
  if (kind == "sample") {
    state_.samplers.at(record->text("sampler")).waiting -= 1;
    state_.samples.erase(id);
  } else {
    State::Model& model = state_.models.at(record->text("model"));
    model.waiting.erase(model.next);
    model.next += 1;
    model.progress.reset();
    if (outcome.poison) {
      model.failure =
          fmt::format("operation {} ({}): {}", model.next - 1, record->text("path"), outcome.error);
      if (!outcome.intact) {
        if (model.in_engine()) engine_.remove(model.id);
        model.loaded = false;
      }
    }
    if (model.gone) fail_waiting(model, "the model was unloaded", time);
  }
  finish_future(id, outcome.type, std::move(outcome.body), time);
}

void Service::finish_future(const std::string& id, const std::string& type, std::string body, double time) {
  State::Future& future = state_.futures.at(id);
  const bool polled = !future.polls.empty();
  for (State::Future::Poll& poll : future.polls)
    answers_.emplace_back(std::move(poll.respond), HttpReply{.type = type, .body = body});
  future.polls.clear();
  future.done = true, future.finished = time, future.type = type;
  future.body = std::make_shared<std::string>(std::move(body));
  state_.use[future.tenant].result_bytes += future.bytes();
  make_room_for_results(future.tenant);
  if (!replaying_) results_.emplace_back(time + options_.result_seconds, id);  // else restore() adds all
  future.fetched = polled || replaying_;
}

// The oldest ones that were fetched go.
void Service::make_room_for_results(const std::string& tenant) {
  const std::int64_t& kept = state_.use[tenant].result_bytes;
  for (auto at = results_.begin(); kept >= most("result-bytes") && at != results_.end();) {
    const auto found = state_.futures.find(at->second);
    const bool stays =
        found != state_.futures.end() && (found->second.tenant != tenant || !found->second.fetched);
    if (!stays) forget_result(at->second);
    at = stays ? at + 1 : results_.erase(at);
  }
}

void Service::forget_result(const std::string& id) {
  const auto found = state_.futures.find(id);
  if (found == state_.futures.end()) return;
  state_.use[found->second.tenant].result_bytes -= found->second.bytes();
  state_.futures.erase(found);
}

void Service::send(Lock& lock) {
  if (answers_.empty()) return;
  auto answers = std::exchange(answers_, {});
  lock.unlock();
  for (auto& [respond, reply] : answers) give(std::move(respond), std::move(reply));
  lock.lock();
}

// ---- time ----

// The machine slept, this process was stopped, or the clock was set: nobody was silent for that time.
void Service::skip_time(double seconds) {
  for (auto& [id, session] : state_.sessions) session.seen += seconds;
  for (auto& [deadline, id] : polls_) deadline += seconds;
  for (auto& [until, id] : results_) until += seconds;
  for (auto& [id, future] : state_.futures) {
    for (State::Future::Poll& poll : future.polls) poll.deadline += seconds;
    if (future.done) future.finished += seconds;
  }
}

void Service::watch() {
  Lock lock(mutex_);
  double sessions_at = 0, last = seconds_now();
  while (!stopping_) {
    ticked_.wait_for(lock, std::chrono::milliseconds(100));
    const double now = seconds_now();
    if (std::abs(now - last) > kLongestTick) skip_time(now - last);
    last = now;
    for (; !polls_.empty() && polls_.front().first <= now; polls_.pop_front()) {
      const auto found = state_.futures.find(polls_.front().second);
      if (found == state_.futures.end()) continue;
      auto& polls = found->second.polls;
      for (auto poll = polls.begin(); poll != polls.end();) {
        if (poll->deadline > now) {
          ++poll;
          continue;
        }
        answers_.emplace_back(std::move(poll->respond),
                              HttpReply{.status = 408, .body = tinker::try_again_reply(found->first)});
        poll = polls.erase(poll);
      }
    }
    for (; !results_.empty() && results_.front().first <= now; results_.pop_front()) {
      const auto found = state_.futures.find(results_.front().second);
      if (found != state_.futures.end() && found->second.done &&
          found->second.finished + options_.result_seconds <= now)
        forget_result(found->first);
    }
    if (now >= sessions_at + 1) end_sessions(sessions_at = now);
    send(lock);
  }
}

// A session that finished, or whose client is silent, ends when nothing of it can be computed any more.
void Service::end_sessions(double now) {
  for (auto& [id, session] : state_.sessions) {
    if (session.ending || session.lasting) continue;
    if (session.finished.empty() && now - session.seen < options_.session_seconds) continue;
    bool busy = false;
    for (const auto& [name, model] : state_.models) busy |= model.session == id && model.ready();
    for (const auto& [name, sampler] : state_.samplers)
      busy |= sampler.session == id && sampler.waiting > 0 && sampler.absent.empty();
    if (busy) continue;
    LogRecord record = new_record("control", fmt::format("control:{}", state_.control_count), session.tenant,
                                  "", {{"path", "end"}, {"session", id}});
    try {
      journal_->append(record.encode());
    } catch (const ConfigError&) {
      return;  // the next second tries again
    }
    admit(std::make_shared<LogRecord>(std::move(record)));
    changed_.notify_all();
  }
}

}  // namespace isograd::serve
