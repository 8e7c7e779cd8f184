// Values that ranks have written into parameters in place, compared over the ranks that hold copies of them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "isograd/mesh.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

class WrittenValues {
 public:
  explicit WrittenValues(Mesh mesh) : mesh_(std::move(mesh)) {}

  // `values`: the whole parameter as this rank holds it. Not collective: they are read once.
  void add(const std::string& name, const AxisSet& copies, const at::Tensor& values);
  // Replaced by write(): the same on all ranks.
  void forget(const std::string& name) { hashes_.erase(name); }
  // Nothing where this rank has written nothing. Otherwise collective over the ranks with copies of what it
  // has: ConfigError that names the first parameter which they have not all written, with the same values.
  // `parameters`: all of the layout, frozen ones too.
  void compare(const TrainableParameters& parameters);

 private:
  void compare(const TrainableParameters& parameters, const AxisSet& copies) const;

  Mesh mesh_;
  struct Hash {
    AxisSet copies;
    std::int64_t value;  // not 0
  };
  std::map<std::string, Hash> hashes_;  // by parameter, since they were last compared
};

}  // namespace isograd
