// Work that one rank does for all (files), whose failure must become everybody's failure.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "isograd/error.hpp"
#include "isograd/group.hpp"

namespace isograd {

// A ConfigError that every rank throws, so no rank has to be poisoned.
class AgreedConfigError : public ConfigError {
  using ConfigError::ConfigError;
};

// Collective. Rank 0 runs `work`; the others wait for at most the group's timeout. When it throws, every rank
// throws the same error: a ConfigError becomes an
// AgreedConfigError, anything else becomes a PeerError on the other ranks.
void on_rank_zero(Group& group, const std::function<void()>& work);

// Collective. Where some ranks have a problem every rank throws the first one's, as an AgreedConfigError.
void throw_agreed(Group& group, const std::optional<ErrorText>& problem);

// Every rank runs `work`, which is not collective itself. If any rank throws a ConfigError, all ranks throw
// the one of the first, so an error that all ranks find is reported once. Collective.
void on_every_rank(Group& group, const std::function<void()>& work);

// Collective: "TEXT on rank R" of the first rank that has one; empty: none has.
std::string first_text(Group& group, const std::string& own);

// Rank 0's value of `own`. Collective.
bool of_rank_zero(Group& group, bool own);

// Collective: a text of one rank on every rank.
std::string broadcast_text(Group& group, const std::string& text, int from = 0);

}  // namespace isograd
