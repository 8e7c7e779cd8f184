// Work that one rank does for all (files), whose failure must become everybody's failure.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "isograd/error.hpp"
#include "isograd/group.hpp"

namespace isograd {

// A ConfigError that every rank throws alike, so that nobody needs to be told by poison.
class AgreedConfigError : public ConfigError {
  using ConfigError::ConfigError;
};

// Collective. Rank 0 runs `work`; the others wait for at most the group's timeout. When it throws, every rank
// throws the same error: a ConfigError becomes an
// AgreedConfigError, anything else becomes a PeerError on the other ranks.
void on_rank_zero(Group& group, const std::function<void()>& work);

// Collective. Where some ranks have a problem every rank throws the first one's, as an AgreedConfigError.
void throw_agreed(Group& group, const std::optional<ErrorText>& problem);

// Collective. Every rank runs `work`, which is not collective itself; a ConfigError of any becomes that of
// the first on all, so that what all find alike is said once.
void on_every_rank(Group& group, const std::function<void()>& work);

// Collective: "TEXT on rank R" of the first rank that has one; empty: none has.
std::string first_told(Group& group, const std::string& own);

// Collective: whether rank 0 says so.
bool of_rank_zero(Group& group, bool own);

// Collective: a text of one rank on every rank.
std::string broadcast_text(Group& group, const std::string& text, int from = 0);

}  // namespace isograd
