// Counts which experts tokens chose, step by step, and which experts no token chooses any more
// (docs/experts.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "isograd/trainer.hpp"

namespace isograd {

inline constexpr std::int64_t kDeadAfter = 50;  // logged steps without a token

struct DeadExperts {
  std::int64_t steps = 0;  // the last ones with loads, in which no token chose them: kDeadAfter or all
  std::vector<std::vector<std::int64_t>> by_layer{};  // as many as loads; experts ascending

  std::size_t count() const;
};

// "layer 2: 3 and 7; layer 5: 0", shortened by "and 12 more" if the list is long; "none" if it is empty.
std::string name_dead(const DeadExperts& dead, const std::vector<ExpertLoad>& loads, std::size_t most = 24);

// Counts the steps for which each expert has been idle.
class IdleExperts {
 public:
  void step(const std::vector<ExpertLoad>& loads);  // empty: the step has no counts
  DeadExperts dead() const;

 private:
  std::int64_t steps_ = 0;  // that had loads, of experts as they are now
  std::vector<std::int64_t> layers_{};
  std::vector<std::vector<std::int64_t>> idle_{};  // steps without a token, by layer and expert
};

// Writes and reads the value of "experts" in a line of the JSON log. read_experts() returns a
// human-readable problem, or nothing.
nlohmann::ordered_json experts_json(const std::vector<ExpertLoad>& loads, const DeadExperts& dead);
std::string read_experts(const nlohmann::json& json, std::vector<ExpertLoad>& loads, DeadExperts& dead);

}  // namespace isograd
