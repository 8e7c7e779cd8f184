// What `bench comm` measures, and what came of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace isograd {

struct CommCase {
  std::string operation;
  std::int64_t bytes = 0;  // of the largest buffer of a rank; 0: none
  std::string dtype = "float32";
  double seconds = 1;  // of taking turns
  int fewest = 5;      // rounds
  int most = 3000;
};

std::vector<CommCase> comm_cases(bool quick);

// Ours: "shared" (tensors in shared memory), "ordinary" (other tensors), "group" ("shared" through
// isograd::Group). Peers: "gloo", "mpi", and "memcpy" (every rank copies as many bytes at once).
inline const std::vector<std::string> kCommContestants = {"shared", "group", "ordinary",
                                                          "gloo",   "mpi",   "memcpy"};
std::string comm_title(const std::string& contestant);

struct CommResult {
  CommCase what;
  int ranks = 2;
  double round_trip = 0;                               // seconds, between the cores of ranks 0 and 1
  std::map<std::string, std::vector<double>> seconds;  // of the slowest rank, each round, by contestant

  bool has(const std::string& contestant) const { return seconds.contains(contestant); }
  double at(const std::string& contestant, double q) const;  // quantile, in seconds
  std::string title() const;                                 // "all_reduce fp32 64 KB"
};

std::string size_title(std::int64_t bytes);

// "1.42", "44.9", "19700": three digits.
std::string microseconds(double seconds);

// Time over size, a chart for each operation, a line for each contestant; both axes logarithmic.
std::string comm_svg(const std::vector<CommResult>& results);
// The picture and a table of all percentiles.
std::string comm_html(const std::vector<CommResult>& results);

}  // namespace isograd
