// The document-leak probe: documents in a pack must not see one another.
#pragma once

#include <optional>
#include <string>

#include "isograd/verify.hpp"

namespace isograd {

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
