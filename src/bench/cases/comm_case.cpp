#include "bench/cases/comm_case.hpp"

#include <cmath>

#include "bench/exchange.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kKilo = 1024, kMega = 1024 * kKilo;
const std::vector<std::int64_t> kSizes = {4 * kKilo, 64 * kKilo, 512 * kKilo,
                                          4 * kMega, 64 * kMega, 256 * kMega};

CommCase make_case(const std::string& operation, std::int64_t bytes, bool quick,
                   const std::string& dtype = "float32") {
  CommCase what{.operation = operation, .bytes = bytes, .dtype = dtype};
  what.seconds = quick ? 0.6 : bytes >= 64 * kMega ? 3 : 1.5;
  if (quick) what.fewest = 3;
  return what;
}

}  // namespace

std::vector<CommCase> comm_cases(bool quick) {
  std::vector<CommCase> cases;
  const std::vector<std::int64_t> few = {64 * kKilo, 4 * kMega};
  for (const char* operation : {"all_reduce", "reduce_scatter", "all_gather", "all_gather_in_place",
                                "broadcast", "all_to_all", "round_trip"}) {
    const bool all = !quick || operation == std::string("all_reduce");
    for (const std::int64_t bytes : all ? kSizes : few) {
      if (!quick || bytes <= 64 * kMega) cases.push_back(make_case(operation, bytes, quick));
    }
  }
  for (const std::int64_t bytes : {64 * kKilo, 4 * kMega, 64 * kMega}) {
    if (!quick || bytes == 4 * kMega) cases.push_back(make_case("all_reduce", bytes, quick, "bfloat16"));
  }
  cases.push_back(make_case("barrier", 0, quick));
  return cases;
}

std::string comm_title(const std::string& contestant) {
  static const std::map<std::string, std::string> titles = {{"shared", "shared memory"},
                                                            {"group", "the same by Group"},
                                                            {"ordinary", "ordinary tensors"},
                                                            {"gloo", "Gloo"},
                                                            {"mpi", "MPI"},
                                                            {"memcpy", "memcpy"}};
  return titles.at(contestant);
}

double CommResult::at(const std::string& contestant, double q) const {
  return quantile(seconds.at(contestant), q);
}

std::string size_title(std::int64_t bytes) {
  return bytes >= kMega ? fmt::format("{} MB", bytes / kMega) : fmt::format("{} KB", bytes / kKilo);
}

std::string CommResult::title() const {
  if (what.bytes == 0) return what.operation;
  return fmt::format("{} {} {}", what.operation, what.dtype == "float32" ? "fp32" : "bf16",
                     size_title(what.bytes));
}

std::string microseconds(double seconds) {
  const double value = seconds * 1e6;
  return fmt::format("{:.{}f}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

}  // namespace isograd
