// Data-parallel ranks must start from the same model: names, shapes, dtypes and values.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"
#include "isograd/world.hpp"

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

}  // namespace isograd
