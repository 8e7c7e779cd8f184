// The step of one process, in fp64 and in the run's precision, and checks of the input before it.
#pragma once

#include "verify/layout_run.hpp"
#include "verify/oracle.hpp"

namespace isograd {

// ConfigError on all ranks when rank 0 has not the memory for the oracle. Collective.
void refuse_without_memory(const VerifyProblem& problem, const Initial& initial, Group& group);

struct Leak {
  std::int64_t perturbed = 0, touched = 0;  // sample ids
  double logits = 0;                        // largest change of the other documents' logits
  std::string parameter;                    // whose gradient of the other documents' loss changed, or ""
  double gradient = 0;                      // by how much, at most
  std::string text() const;
};

// Changes the first and then the last document of `batch`, and holds the others' logits and gradient to the
// bits that they had (a model with experts to E1's bound). Nothing: no leak.
std::optional<Leak> probe_documents(const VerifyModel& model, const Batch& batch,
                                    const DeclaredLoss& declared = {});

// Rank 0's; empty on the other ranks.
struct Reference {
  OracleStep oracle;                // fp64
  std::vector<double> scales;       // s of each parameter
  double alone_scale = 0;           // by how much that gradient is off along itself: Along::share
  std::vector<double> alone_error;  // ‖g32 − g64‖ / s of one process in the run's precision
  MicroBatches whole;
  std::vector<OracleUpdates> updates;  // plain SGD, the configured optimizer
  std::string random;                  // how two runs of the model differ
  std::optional<Leak> leak;
  StepDump::Named alone;        // in the run's precision, where dumps are taken
  StepFigures alone_figures{};  // of one process in the run's precision; in fp64 the oracle's
};

inline const SgdOptions kPlainSgd{.learning_rate = 0.1, .momentum = 0, .weight_decay = 0};

// Parameters are followed through this many updates.
struct Path {
  OptimizerOptions optimizer;
  int updates = 0;
};

// One update shows how a gradient is applied, a second the optimizer's state, which plain SGD does not have.
std::vector<Path> paths(const VerifyProblem& problem);

// Collective: rank 0 makes the oracle's step while the last rank makes the one in the run's precision.
Reference make_reference(const VerifyProblem& problem, const Initial& initial, Group& group);

// Parameters that one run did not clear, by place, and the error of one process that would clear each.
struct Retry {
  std::vector<std::size_t> places;
  std::vector<double> enough;
};

// The largest ‖g32 − g64‖ / s of each of them over up to kMostDraws steps of one process, on rank 0, until
// all are cleared. Collective: the last rank makes the steps, from parameters an ulp away and (except for a
// loss over all rows) in another cut of the batch with as many micro-batches as all ranks have together.
std::vector<double> measure_rounding(const VerifyProblem& problem, const Initial& initial,
                                     const std::vector<double>& scales, const Retry& retry, Group& group);

}  // namespace isograd
