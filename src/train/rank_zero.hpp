// Agreement of ranks: on failures of work that one rank does for all, on configuration, data and a stop.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "isograd/error.hpp"
#include "isograd/trainer.hpp"

namespace isograd {

struct TaskFacts;  // task.hpp

// A ConfigError that every rank throws, so no rank has to be poisoned.
class AgreedConfigError : public ConfigError {
  using ConfigError::ConfigError;
};

// Collective. Rank 0 runs `work`; the others wait, at most for the group's timeout. Every rank throws what it
// throws: a ConfigError as an AgreedConfigError, anything else as a PeerError on the others.
void on_rank_zero(Group& group, const std::function<void()>& work);

// Collective. Where some ranks have a problem every rank throws the first one's, as an AgreedConfigError.
void throw_agreed(Group& group, const std::optional<ErrorText>& problem);

// Every rank runs `work`, which is not collective. All throw the first rank's ConfigError, if any.
// Collective.
void on_every_rank(Group& group, const std::function<void()>& work);

// Collective: "TEXT on rank R" of the first rank that has one; empty: none has.
std::string first_text(Group& group, const std::string& own);

// Collective: whether it is true on any rank.
bool on_any_rank(Group& group, bool own);

// Collective: rank 0's answer on every rank.
bool of_rank_zero(Group& group, bool own);

// Collective: a text of one rank on every rank.
std::string broadcast_text(Group& group, const std::string& text, int from = 0);

// ---- ranks that are to do the same ----

// Collective: all throw an AgreedConfigError naming the first key, not kMayDiffer, whose values differ.
void check_same_configuration(const RunConfig& config, Group& world);

// Collective, the same of what each rank has read, whatever its files are called.
void check_same_data(const TaskFacts& facts, Group& world);

// Collective: all ranks end with rank 0's verdicts: its tables there, elsewhere none or one that did not
// pass.
std::vector<ReportTable> tables_of_rank_zero(Group& world, std::vector<ReportTable> own);

// While one exists, signals set flags. The first SIGINT, SIGTERM or SIGHUP asks for a stop; another one a
// second or more later (a terminal and a launcher may both forward one Ctrl-C) ends the process. SIGUSR1 and
// SIGUSR2 ask for what run.on_signal says, and never end it. An ignored SIGHUP (nohup) stays ignored; SIGXFSZ
// and SIGPIPE become errors of the write. May be nested, with the same configuration, and shared by threads.
class StopSignals {
 public:
  explicit StopSignals(const RunConfig& config);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Blocks SIGUSR1 and SIGUSR2 in this thread, so that one that comes before anybody handles it waits. The
  // handlers then stay when the run has ended: for programs that end with it.
  static void hold();
  static bool requested();  // a stop
  static bool by_hand();    // a stop by Ctrl-C (SIGINT)
  // A save, told once.
  static bool take_save();
  // A save that any rank was asked for by a signal begins: it is the one that this rank was asked for until
  // now or is asked for within a second, by the same signal sent to a launcher and to ranks.
  static void save_begins();
};

}  // namespace isograd
