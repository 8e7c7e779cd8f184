// Comparisons of ranks that hold copies: they start from the same model, train the same parameters and write
// the same values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "isograd/error.hpp"
#include "isograd/parameters.hpp"
#include "isograd/world.hpp"
#include "layout/storage.hpp"

namespace isograd {

// Compares parameters over the ranks that hold copies of them. Collective. Throws ConfigError on every rank
// of those, naming the first parameter in which a rank differs from the first one.
void check_same_parameters(const std::vector<NamedParameter>& parameters, const Mesh& mesh,
                           bool compare_values = true);

// As above, for parameters that every rank of a group has a copy of.
void check_same_parameters(const std::vector<NamedParameter>& parameters, Group group,
                           bool compare_values = true);

// The ranks whose models have the same list of parameters, each its part of them: those of one stage.
Group ranks_of_same_parameters(const Mesh& mesh);

// Parameters that are frozen or unfrozen while a layout lives.
// Between a step's gradients and its update: takes requires_grad of the parameters over into Slot::trained.
// Returns the frozen ones that need a gradient now, which have left parameters.frozen and have no bucket yet.
// Collective where something has changed. ConfigError that names a parameter which only some ranks train.
std::vector<NamedParameter> follow_freezing(TrainableParameters& parameters, std::vector<Bucket>& buckets,
                                            const Mesh& mesh);

// Buckets for those, whose slots index `parameters`, at the end of which they are put. ConfigError on what
// cannot be trained.
std::vector<BucketPlan> plan_joined(TrainableParameters& parameters,
                                    const std::vector<NamedParameter>& unfrozen, std::int64_t bucket_bytes);

// ---- values that ranks give to parameters, in place or with write() ----

// By name, the same names in the same order on all ranks of a group: a hash of each one's values.
class ValueHashes {
 public:
  static constexpr std::int64_t kNone = 0;  // no values on this rank; of none the hash
  static std::int64_t of(const at::Tensor& values);

  void add(const std::string& name, std::int64_t hash) { names_.push_back(name), hashes_.push_back(hash); }
  at::Tensor mine() const;  // [P]
  // The first of them whose values are not everywhere those of rank 0; `by_rank`: mine() of all, [W, P].
  // `given`: how ranks came to them ("written in place").
  std::optional<ErrorText> first_difference(const at::Tensor& by_rank, const std::string& given,
                                            const std::string& action) const;

 private:
  std::vector<std::string> names_;
  std::vector<std::int64_t> hashes_;
};

class WrittenValues {
 public:
  explicit WrittenValues(Mesh mesh) : mesh_(std::move(mesh)) {}

  // `values`: the whole parameter as this rank holds it. Not collective: they are read once.
  void add(const std::string& name, const AxisSet& copies, const at::Tensor& values);
  // Replaced by write(): the same on all ranks.
  void forget(const std::string& name) { hashes_.erase(name); }
  // Frozen parameters that lie in the model as they are: nothing of the layout's follows what is written into
  // them, which compare() finds by itself.
  void watch(const std::vector<NamedParameter>& frozen);
  // Nothing where this rank has written nothing. Otherwise collective over the ranks with copies of what it
  // has: ConfigError that names the first parameter which they have not all written, with the same values.
  // `parameters`: all of the layout, frozen ones too.
  void compare(const TrainableParameters& parameters);

 private:
  void compare(const TrainableParameters& parameters, const AxisSet& copies) const;

  Mesh mesh_;
  struct Hash {
    AxisSet copies;
    std::int64_t value;  // not ValueHashes::kNone
  };
  std::map<std::string, Hash> hashes_;  // by parameter, since they were last compared
  std::vector<NamedParameter> watched_;
  Writes writes_;  // into these
};

}  // namespace isograd
