// Snapshots and replay. The state is the last snapshot and what the journal holds behind its position:
// accepted requests are admitted again, and complete operations are executed again in the order in which they
// were completed.
#include <fmt/format.h>

#include <algorithm>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/number_ranges.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/service/service.hpp"

namespace isograd::serve {
namespace {

constexpr std::string_view kSnapshot = "snapshot-";
constexpr const char* kDeaths = "deaths.json";
constexpr double kKeepDeleted = 3600, kKeepClosed = 86400;  // seconds

// Numbers of the snapshots in the folder.
std::vector<std::uint64_t> snapshots_in(const fs::path& folder) {
  std::vector<std::uint64_t> numbers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kSnapshot)) continue;
    if (const auto number = whole_number(std::string_view(name).substr(kSnapshot.size())))
      numbers.push_back(static_cast<std::uint64_t>(*number));
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

fs::path snapshot_path(const fs::path& folder, std::uint64_t number) {
  return folder / fmt::format("{}{}", kSnapshot, number);
}

// In a handler: a file that is whole names what there is not, or has another form than a server writes.
[[noreturn]] void refuse_state(const fs::path& file, const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) throw;
  refuse(file.string(), printable(error.what(), 500), "the state as a server wrote it",
         "Restore the state folder from a copy");
}

nlohmann::json parsed_file(const fs::path& file) {
  auto [value, problem] = parse_json(read_file(file));
  if (!problem.empty()) throw std::runtime_error(problem);
  return std::move(value);
}

}  // namespace

Service::Service(ServiceOptions options, Engine& engine)
    : options_(std::move(options)),
      engine_(engine),
      folder_(options_.state),
      store_(folder_.path() / "checkpoints"),
      started_(seconds_now()) {
  restore();
  watcher_ = std::thread([this] { watch(); });
  if (options_.sync) syncer_ = std::thread([this] { sync_answers(); });
}

Service::~Service() {
  stop();
  watcher_.join();
  {
    const std::scoped_lock held(held_mutex_);
    ending_ = true;
  }
  held_changed_.notify_all();
  if (syncer_.joinable()) syncer_.join();
}

void Service::give(Respond respond, HttpReply reply) {
  if (!respond) return;
  if (!options_.sync) return respond(std::move(reply));
  const std::scoped_lock held(held_mutex_);
  held_.emplace_back(std::move(respond), std::move(reply));
  held_changed_.notify_all();
}

void Service::sync_answers() {
  std::unique_lock held(held_mutex_);
  for (;;) {
    held_changed_.wait(held, [this] { return ending_ || !held_.empty(); });  // ends: ~Service notifies
    if (held_.empty()) return;
    auto answers = std::exchange(held_, {});
    held.unlock();
    try {
      journal_->sync();
      for (auto& [respond, reply] : answers) respond(std::move(reply));
    } catch (const ConfigError& error) {
      {
        const Lock lock(mutex_);  // only the next start finds what the disk has
        unsynced_ = std::current_exception(), abandoned_ = stopping_ = true;
      }
      for (auto& [respond, reply] : answers)
        respond(
            {.status = 503, .body = tinker::detail_reply("the server ends: its journal cannot be written")});
      stop();
    }
    held.lock();
  }
}

void Service::stop() {
  const Lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all(), ticked_.notify_all();
}

void Service::restore() {
  const Stopwatch clock;
  for (const std::string& why : store_.ignored())
    print(stderr, fmt::format("no checkpoint, ignored: {}\n", printable(why)));
  const std::string died_in = folder_.set_doing("");
  if (const fs::path deaths = folder_.path() / kDeaths; fs::exists(deaths)) try {
      parsed_file(deaths).get_to(deaths_);
    } catch (const std::exception& error) {
      refuse_state(deaths, error);
    }
  if (!died_in.empty() && died_in != kSamples) deaths_[died_in] += 1, write_deaths();
  const std::vector<std::uint64_t> numbers = snapshots_in(folder_.path());
  std::uint64_t position = 0;
  if (!numbers.empty()) {
    snapshot_number_ = numbers.back();
    const fs::path path = snapshot_path(folder_.path(), snapshot_number_);
    try {
      nlohmann::json all = parsed_file(path / "state.json");
      const MappedFile blobs(path / "blobs");
      state_ = State::from_json(std::move(all.at("state")),
                                {reinterpret_cast<const char*>(blobs.data()), blobs.size()});
      all.at("position").get_to(position);
      for (const auto& [id, entry] : all.at("folders").items())
        snapshot_folders_[id] = {entry.at(0).get<std::int64_t>(), path / entry.at(1).get<std::string>()};
    } catch (const std::exception& error) {
      refuse_state(path, error);
    }
    for (auto& [id, model] : state_.models) {
      if (!model.loaded) continue;
      if (model.request.lora.rank > 0) model.absent = other_base(id, model.request.base, model.digest);
      if (model.in_engine())  // a folder that is not named is not found
        engine_.load(id, snapshot_folders_[id].second, true, model.request.metadata);
      else
        print(stderr, fmt::format("{}\n", printable(model.absent)));
    }
    for (auto& [id, sampler] : state_.samplers) {
      if (sampler.open) sampler.absent = other_base(id, sampler.base, sampler.digest);
      if (sampler.in_engine()) engine_.load_sampler(id, snapshot_folders_[id].second);
    }
    for (std::size_t i = 0; i + 1 < numbers.size(); ++i)
      fs::remove_all(snapshot_path(folder_.path(), numbers[i]));
  }
  // Else checkpoints would be removed that records or a snapshot list which somebody took away.
  const fs::path journal = folder_.path() / "journal";
  const auto refuse_gap = [&](const std::string& found, const std::string& expected) {
    refuse(journal.string(), found, expected, "Restore the state folder from a copy, or name another folder");
  };
  if (fs::exists(journal)) {
    if (const std::uint64_t begin = Journal::begin_of(journal); begin > position)
      refuse_gap(fmt::format("records from position {} on", begin),
                 fmt::format("records from the snapshot's position on, {}", position));
  } else if (!numbers.empty() || !store_.all().empty()) {
    refuse_gap("no such file", "the journal of the snapshots and checkpoints there");
  }
  replaying_ = true;
  std::int64_t count = 0;
  journal_ = std::make_unique<Journal>(journal, [&](std::uint64_t after, std::string_view text) {
    if (after > position) replay(text), ++count;
  });
  replaying_ = false;
  engine_seconds_ = 0;  // counts turns alone
  // The replay has completed some; others wait for the base of their sampler.
  std::erase_if(state_.unsubmitted, [&](const std::string& id) {
    const auto found = state_.samples.find(id);
    return found == state_.samples.end() ||
           !state_.samplers.at(found->second->text("sampler")).absent.empty();
  });
  if (died_in == kSamples) {
    // A sample that already has a death runs alone, so it was not in the pass that died: its count stays.
    for (const auto& [id, sample] : state_.samples) deaths_.emplace(id, 1);
    write_deaths();
  }
  if (journal_->position() < position) {
    print(stderr,
          fmt::format("{}: the journal ends before its snapshot, as after a power cut: what was accepted "
                      "after the snapshot is lost (--sync keeps it)\n",
                      printable(folder_.path().string())));
    journal_->drop_before(position);
  }
  position_at_snapshot_ = position;
  // Nobody could ask for a result while there was no server.
  const double now = seconds_now();
  double newest = 0;
  for (const auto& [id, future] : state_.futures)
    if (future.done) newest = std::max(newest, future.finished);
  for (auto& [id, future] : state_.futures)
    if (future.done)
      results_.emplace_back((future.finished += std::max(0.0, now - newest)) + options_.result_seconds, id);
  std::sort(results_.begin(), results_.end());
  for (auto& [id, session] : state_.sessions) session.seen = now;
  if (count > 0 && options_.print_steps)
    print(stdout, fmt::format("restored {}: {} records replayed in {:.2f} s\n",
                              printable(folder_.path().string()), count, clock.seconds()));
  // The journal says that what was lost succeeded; the snapshot tells the next start that it is lost.
  Lock lock(mutex_);
  remove_unlisted(lock, /*tells=*/true);
  if (const std::string problem = lost_ ? take_snapshot(lock) : ""; !problem.empty())
    refuse(folder_.path().string(), "no snapshot of what was lost: " + printable(problem, 500),
           "room in the state folder", "Free space there");
  if (fs::exists(folder_.path() / kDeaths)) write_deaths();  // none is left of what was replayed
}

void Service::write_deaths() const {
  try {
    write_file(folder_.path() / kDeaths, json_text(nlohmann::json(deaths_)));
  } catch (const ConfigError& error) {
    print(stderr, fmt::format("{}\n", printable(error.what())));  // a full disk: a death may be forgotten
  }
}

void Service::replay(std::string_view text) try {
  const Accepted record = std::make_shared<LogRecord>(LogRecord::decode(text));
  Lock lock(mutex_);
  if (record->text("kind") != "done") return admit(record);
  const std::string of = record->text("of"), id = record->text("id");
  Outcome outcome;
  Accepted accepted;
  if (of == "sample") {
    accepted = state_.samples.at(id);
    outcome.type = record->text("type"), outcome.body = record->body;
  } else if (of == "control" || of == "sampler") {
    ISOGRAD_INVARIANT(!state_.controls.empty(), id);
    accepted = state_.controls.front();
  } else {
    State::Model& model = state_.models.at(record->text("model"));
    accepted = model.waiting.at(model.next);
  }
  ISOGRAD_INVARIANT(accepted->text("id") == id,
                    fmt::format("{} where {} was complete", accepted->text("id"), id));
  outcome.error = record->text("error"), outcome.category = record->text("category");
  outcome.poison = record->head.value("poison", false);
  outcome.intact = record->head.value("intact", false);
  if (outcome.error.empty() && of != "sample") {
    const Stopwatch clock;
    State::Model* const model =
        of == "operation" || of == "model" ? &state_.models.at(record->text("model")) : nullptr;
    lock.unlock();  // as in live operation
    std::optional<Outcome> found;
    while (!found) found = execute(*accepted, model);
    outcome = std::move(*found);
    lock.lock();
    if (!outcome.error.empty()) lose(*accepted, outcome);
    work_since_ += clock.seconds();
  }
  if (record->head.contains("closed")) record->head.at("closed").get_to(outcome.closed);
  apply(accepted, outcome, record->time());
} catch (const std::exception& error) {
  refuse_state(folder_.path() / "journal", error);
}

// A succeeded operation cannot be done again: files that it read are damaged, or the process dies in it. Its
// model fails with that cause, and all others go on. Any other error ends the start, because flags may be
// wrong that the next start has right.
void Service::lose(const LogRecord& record, const Outcome& outcome) {
  if (!outcome.lost)
    refuse(record.text("id"), "when it is done again: " + outcome.error, "the result that it had",
           "Start with the flags and base models of before");
  print(stderr, fmt::format("{} is lost: {}\n", record.text("id"), printable(outcome.error)));
  lost_ = true;
  if (record.text("path") != "save_weights_for_sampler" || record.xorl()) return;
  const Operation<SaveWeights> save = tinker::save_weights_for_sampler(record.body);
  if (save.body.name || !save.body.sampling_sequence) return;
  // Samples are journalled that name it.
  const State::Model& model = state_.models.at(record.text("model"));
  state_.samplers[tinker::sampler_id(model.session, *save.body.sampling_sequence)] = {
      .tenant = model.tenant,
      .session = model.session,
      .base = model.request.base,
      .closed = true,
      .failure = outcome.error};
}

// Bodies count too: they are read again, and they fill the disk.
bool Service::snapshot_due() const {
  const double seconds =
      work_since_ + 1e-8 * static_cast<double>(journal_->position() - position_at_snapshot_);
  if (writing_ || seconds <= options_.snapshot_least ||
      seconds * options_.snapshot_share <= snapshot_seconds_ || seconds_now() <= snapshot_after_)
    return false;
  // The step of a model with sums comes next, and would wait for the writing, which a forward pass does not.
  const bool sums = std::any_of(state_.models.begin(), state_.models.end(), [](const auto& entry) {
    return entry.second.in_engine() && entry.second.step_tokens > 0;
  });
  return !sums || seconds > options_.snapshot_least + 3 * longest_;
}

void Service::begin_snapshot(Lock& lock) {
  end_snapshot(lock);
  // Requests that are accepted from here on have later positions. Operations are completed by this thread
  // alone.
  const double now = seconds_now();
  writing_ = std::make_unique<Snapshot>();
  Snapshot& made = *writing_;
  std::erase_if(state_.saved, [&](const auto& entry) {
    const State::Saved& saved = entry.second;
    const bool over = saved.deleted > 0 ? saved.deleted + kKeepDeleted < now : !saved.exists(now);
    if (over) forgotten_[entry.first] = saved.info.operation;
    return over;
  });
  // Nothing that clients may still name is forgotten.
  std::erase_if(state_.samplers, [&](const auto& entry) {
    const State::Sampler& sampler = entry.second;
    return sampler.closed && !sampler.open && sampler.waiting == 0 && sampler.used + kKeepClosed < now;
  });
  std::set<std::string> runs, sessions;
  for (const auto& [path, saved] : state_.saved) runs.insert(saved.info.run);
  for (const auto& [id, model] : state_.models)
    if (std::error_code hidden; fs::exists(options_.state / "dumps" / id, hidden))
      runs.insert(id);  // its dumps count for its tenant
  std::erase_if(state_.models, [&](const auto& entry) {
    return entry.second.gone && !runs.contains(entry.first) && entry.second.last_request + kKeepClosed < now;
  });
  for (const auto& [id, model] : state_.models) sessions.insert(model.session);
  std::erase_if(state_.sessions, [&](const auto& entry) {
    return entry.second.ended && !sessions.contains(entry.first) && entry.second.seen + kKeepClosed < now;
  });
  made.number = snapshot_number_ + 1, made.position = journal_->position();
  made.former = snapshot_path(folder_.path(), snapshot_number_);
  made.loaded = std::exchange(loaded_since_, {}), made.work = std::exchange(work_since_, 0);
  longest_ = 0;
  made.state = state_;
  for (auto& [id, future] : made.state.futures) future.polls.clear();
  lock.unlock();
  try {
    const fs::path target = snapshot_path(folder_.path(), made.number);
    made.folder = std::make_unique<WholeFolder>(target);
    const auto add = [&](const std::string& id, std::int64_t next, bool changes) -> Snapshot::Part* {
      const std::string name = fmt::format("{}", made.parts.size());
      made.folders[id] = {next, target / name};
      Snapshot::Part& part = made.parts.emplace_back(Snapshot::Part{.name = name});
      const auto before = snapshot_folders_.find(id);
      if (before == snapshot_folders_.end() || (changes && before->second.first != next)) return &part;
      part.linked = before->second.second;
      return nullptr;
    };
    for (const auto& [id, model] : made.state.models)
      if (Snapshot::Part* const part = model.loaded ? add(id, model.next, model.in_engine()) : nullptr) {
        part->write = engine_.saving(id);
        if (part->write) continue;
        fs::create_directory(made.folder->directory() / part->name);
        engine_.save(id, Engine::Save::kTraining, made.folder->directory() / part->name);
      }
    for (const auto& [id, sampler] : made.state.samplers)
      if (Snapshot::Part* const part = sampler.open ? add(id, -1, sampler.in_engine()) : nullptr)
        part->write = engine_.saving_sampler(id);
    made.written = std::async(std::launch::async, [this, &made] { write(made); });
  } catch (...) {
    std::promise<void> failed;
    failed.set_exception(std::current_exception());
    made.written = failed.get_future();
  }
  lock.lock();
}

void Service::write(Snapshot& made) {
  const Stopwatch clock;
  const fs::path directory = made.folder->directory();
  // First, because operations wait for them, also for those that an exception skips: it destroys them.
  for (auto parts = std::exchange(made.parts, {}); Snapshot::Part & part : parts) {
    const fs::path into = directory / part.name;
    if (!part.linked.empty())
      fs::copy(part.linked, into, fs::copy_options::recursive | fs::copy_options::create_hard_links);
    if (!part.write) continue;
    fs::create_directory(into);
    std::exchange(part.write, {})(into);
  }
  nlohmann::json all{{"position", made.position}, {"folders", nlohmann::json::object()}};
  for (const auto& [id, folder] : made.folders)
    all["folders"][id] = {folder.first, folder.second.filename().string()};
  AtomicFile blobs(directory / "blobs");
  all["state"] = std::exchange(made.state, {}).to_json([&](std::string_view body) { blobs.write(body); });
  blobs.commit();
  write_file(directory / "state.json", json_text(all));
  made.folder->commit();
  try {
    fs::remove_all(made.former);  // first: it makes room for the journal's copy
    journal_->drop_before(made.position);
  } catch (const std::exception& error) {  // a restart skips what the snapshot has
    print(stderr, fmt::format("old state was not removed: {}\n", printable(error.what())));
  }
  made.seconds = clock.seconds();
  changed_.notify_all();
}

std::string Service::end_snapshot(Lock& lock) {
  if (!writing_) return "";
  lock.unlock();  // so that requests are answered meanwhile
  writing_->written.wait();
  lock.lock();
  const std::unique_ptr<Snapshot> made = std::move(writing_);
  try {
    made->written.get();
  } catch (const std::exception& error) {
    print(stderr, fmt::format("no snapshot was written: {}\n", printable(error.what())));
    snapshot_after_ = seconds_now() + 10;
    loaded_since_.merge(made->loaded), work_since_ += made->work;
    return error.what();
  }
  snapshot_number_ = made->number, snapshot_folders_ = std::move(made->folders);
  position_at_snapshot_ = made->position;
  snapshot_seconds_ = made->seconds;
  remove_unlisted(lock, /*tells=*/false);
  return "";
}

void Service::remove_unlisted(Lock& lock, bool tells) {
  const double now = seconds_now();
  std::vector<CheckpointInfo> gone;
  for (const auto& [path, info] : store_.all()) {
    const auto saved = state_.saved.find(path);
    const auto model = state_.models.find(info.run);
    // Its operation is done again, or its completion is not known yet.
    const bool waits = model != state_.models.end() && model->second.waiting.contains(info.operation);
    if (waits || (saved != state_.saved.end() && saved->second.deleted == 0)) continue;
    const auto forgotten = forgotten_.find(path);
    const bool deleted = saved != state_.saved.end()
                             ? saved->second.info.operation == info.operation
                             : forgotten != forgotten_.end() && forgotten->second == info.operation,
               expired = info.expires != 0 && info.expires <= now;
    if (deleted || expired)
      gone.push_back(info);
    else if (tells)  // its client may have been told that it is saved
      print(stderr,
            fmt::format("kept {}, whose request was lost, as after a power cut: no client can name it. "
                        "Copy the folder, or remove it.\n",
                        printable(store_.directory(info).string())));
  }
  lock.unlock();
  for (const CheckpointInfo& info : gone) try {
      store_.remove(info);
    } catch (const std::exception& error) {  // the next snapshot tries again
      print(stderr, fmt::format("old state was not removed: {}\n", printable(error.what())));
    }
  lock.lock();
  std::erase_if(forgotten_, [&](const auto& entry) { return !store_.all().contains(entry.first); });
}

}  // namespace isograd::serve
