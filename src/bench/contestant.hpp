// One side of a comparison: a program that computes a few steps each time it is told to, and sleeps
// otherwise.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace isograd {

struct Turn {
  std::vector<double> seconds;  // of each step
  std::vector<double> losses;
  std::vector<double> norms;    // of the whole gradient; empty where a side does not report them
  std::vector<double> exposed;  // seconds of each step that waited for communication; empty likewise
  std::vector<double> parts;    // seconds of the parts of a step, medians of the turn; empty likewise
  std::string profile;          // of a profiled turn: JSON as profile_steps() gives it
};

inline constexpr char kTimedTurn = 'g', kProfiledTurn = 'p';

// Starts `command` and talks to it through named pipes in the exchange folder: NAME.go.R, one byte a turn for
// each rank, so that a waiting side sleeps in the kernel and leaves the cores to the other; NAME.done, one
// line of JSON a turn. Its output goes to NAME.log.
class Contestant {
 public:
  Contestant(std::string name, std::vector<std::string> command, std::filesystem::path exchange, int ranks);
  ~Contestant();  // end of file tells it to stop; killed if it does not
  Contestant(const Contestant&) = delete;
  Contestant& operator=(const Contestant&) = delete;

  void start(char kind = kTimedTurn);
  // ConfigError with the end of its output when it ended or was silent for `patience` seconds.
  Turn answer(double patience = 300);
  Turn turn(double patience = 300) {
    start();
    return answer(patience);
  }

 private:
  bool running();
  [[noreturn]] void fail(const std::string& found);

  std::string name_;
  std::vector<std::string> command_;
  std::filesystem::path exchange_;
  pid_t process_ = -1;
  std::vector<int> go_;
  int done_ = -1;
  std::string unread_;
};

// The other end of the pipes, in our sides.
class TurnPipes {
 public:
  // ConfigError where bench made none. Only rank 0 answers.
  TurnPipes(const std::filesystem::path& exchange, const std::string& name, int rank);
  bool wait();  // sleeps until the next turn; false: there is none
  bool profiled() const { return turn_ == kProfiledTurn; }  // this turn is for profile_steps(), and not timed
  void answer(const nlohmann::json& line);

 private:
  using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
  int turn_ = 0;
  File go_, done_;
};

}  // namespace isograd
