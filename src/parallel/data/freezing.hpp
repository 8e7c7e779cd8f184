// Parameters that are frozen or unfrozen while a layout lives.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"
#include "isograd/world.hpp"

namespace isograd {

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
