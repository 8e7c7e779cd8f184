// What ranks must agree on: the failure of work that one rank does for all (files), configuration and data.
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

// Collective. Rank 0 runs `work`; the others wait for at most the group's timeout. When it throws, every rank
// throws the same error: a ConfigError becomes an AgreedConfigError, anything else a PeerError on other
// ranks.
void on_rank_zero(Group& group, const std::function<void()>& work);

// Collective. Where some ranks have a problem every rank throws the first one's, as an AgreedConfigError.
void throw_agreed(Group& group, const std::optional<ErrorText>& problem);

// Every rank runs `work`, which is not collective itself. If any rank throws a ConfigError, all ranks throw
// the one of the first, so an error that all ranks find is reported once. Collective.
void on_every_rank(Group& group, const std::function<void()>& work);

// Collective: "TEXT on rank R" of the first rank that has one; empty: none has.
std::string first_text(Group& group, const std::string& own);

// Collective: rank 0's answer on every rank.
bool of_rank_zero(Group& group, bool own);

// Collective: a text of one rank on every rank.
std::string broadcast_text(Group& group, const std::string& text, int from = 0);

// ---- ranks that are to do the same ----

// Collective: ranks that were started with different values of a key that is not Ranks::kMayDiffer are
// refused with the key and both values, by an AgreedConfigError on all.
void check_same_configuration(const RunConfig& config, Group& world);

// Collective, the same of what each rank has read: its files may lie elsewhere, but must hold the same.
void check_same_data(const TaskFacts& facts, Group& world);

// Collective: the verdicts of tables are rank 0's, and every rank ends with them: what rank 0 has, elsewhere
// nothing, or one table that has not passed.
std::vector<ReportTable> tables_of_rank_zero(Group& world, std::vector<ReportTable> own);

// While one exists, the first SIGINT, SIGTERM or SIGHUP of the process sets a flag. Another one a second or
// more later ends the process at once, as if it had never been caught (a terminal and a launcher may both
// forward one Ctrl-C). A SIGHUP that was ignored before (nohup) stays ignored. A file size limit (SIGXFSZ)
// and a closed output (SIGPIPE) become ordinary write errors. May be nested and shared by ranks that are
// threads.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  static bool requested();
};

}  // namespace isograd
