// A side's end of the pipes of contestant.hpp.
#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "bench/contestant.hpp"

namespace isograd {

class TurnPipes {
 public:
  // ConfigError where bench made none. Only rank 0 answers.
  TurnPipes(const std::filesystem::path& exchange, const std::string& name, int rank);
  bool wait();  // sleeps until the next turn; false: there is none
  bool profiled() const {
    return turn_ == kProfiledTurn;
  }  // this turn is for device_profile.hpp, and not timed
  void answer(const nlohmann::json& line);

 private:
  int turn_ = 0;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> go_, done_;
};

}  // namespace isograd
