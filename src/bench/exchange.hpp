// What the comparisons have in common: where both sides find each other, which Python, quantiles.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/python.hpp"

namespace isograd {

// A folder of our own below the temporary folder, removed with everything in it.
class ExchangeFolder {
 public:
  ExchangeFolder();
  ~ExchangeFolder();
  ExchangeFolder(const ExchangeFolder&) = delete;
  ExchangeFolder& operator=(const ExchangeFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A script of bench/peers. ConfigError when the source tree is gone.
std::filesystem::path find_peer(const std::string& script);

// ConfigError unless the Python of find_python(wish) has these packages, which the peers of `bench` import:
// said before anything is measured, with the command that installs them.
void require_packages(const std::string& bench, const std::string& wish,
                      const std::vector<std::string>& packages);

// The folder that holds isograd_comm.so, beside this program's. ConfigError where the module was not built.
std::filesystem::path find_module();

double quantile(std::vector<double> values, double q);

}  // namespace isograd
