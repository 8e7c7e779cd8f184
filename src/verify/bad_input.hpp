// Checks of the input that end a verdict before anything is claimed.
#pragma once

#include <optional>
#include <string>

#include "verify/layout_run.hpp"

namespace isograd {

// ConfigError when the model runs in its own precision but not in fp64, or computes something in another
// type there.
void refuse_without_fp64(const VerifyModel& in_fp64, const VerifyModel& own, const MicroBatches& whole);

// How two runs of the first micro-batch that has a target differ; "" when all bits are the same.
std::string difference_of_two_runs(const VerifyModel& model, const MicroBatches& whole);

// ConfigError on all ranks when rank 0 has not the memory for the oracle: how much it takes, and how many
// layers would fit. Collective.
void refuse_without_memory(const VerifyProblem& problem, const Initial& initial, Group& group);

// Bytes that the oracle takes for parameters, gradients and the copies it compares, all in fp64.
std::int64_t oracle_bytes(const Initial& initial);

struct Leak {
  std::int64_t perturbed = 0, touched = 0;  // sample ids
  double logits = 0;                        // largest change of the other documents' logits
  std::string parameter;                    // whose gradient of the other documents' loss changed, or ""
  double gradient = 0;                      // by how much, at most
  std::string text() const;
};

// Changes the tokens of one document of `batch`, the first and then the last, and holds the others to the
// bits that they had (a model with experts to E1's bound of them): their logits, and the gradient of their
// loss. Nothing: no leak. Takes two forwards and backwards of each. A document is changed into other tokens,
// or, where tokens are no vocabulary (DeclaredLoss::per_token), into its own in reverse. A batch with fewer
// than two documents has nothing to show.
std::optional<Leak> probe_documents(const VerifyModel& model, const Batch& batch,
                                    const DeclaredLoss& declared = {});

}  // namespace isograd
