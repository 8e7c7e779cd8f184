// The placement of every parameter of a run on one rank, computed from shapes alone.
#pragma once

#include <string>
#include <vector>

#include "isograd/parameters.hpp"
#include "isograd/world.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "train/build.hpp"
#include "train/config.hpp"

namespace isograd {

// Elements that a rank owns.
struct OwnedBy {
  int rank = 0;
  Range elements;
};

struct LaidBucket {
  PlannedBucket planned;
  Range held;                   // by the rank
  AxisSet sharded{};            // along which the bucket is sharded
  std::vector<OwnedBy> owners;  // of its elements, each once, ascending; among the ranks that hold copies
  std::int64_t padding = 0;     // elements of no parameter
};

struct LaidParameter {
  std::string name;
  Placement placement;
  SyncAxes sync;  // along which it is copied and summed
  std::vector<std::int64_t> local_shape;
  std::size_t bucket = 0;       // of RankLayout::buckets
  Range held;                   // of the local tensor's elements, in their order
  std::vector<OwnedBy> owners;  // of these, as those of a bucket
  PersistentBytes kept;         // by the rank
};

struct RankLayout {
  Grid grid;
  int rank = 0;
  std::vector<LaidParameter> parameters;  // trained ones, in the model's order
  std::vector<LaidBucket> buckets;        // in the layout's order
  PersistentBytes padding, total;         // kept by the rank; total: with the padding

  std::int64_t numel() const;  // of the parameters
};

// Lays out `parameters`, in the rank's local shapes, in the buckets of plan_layout(). `bytes`: of an
// element by its use, except for gradients, whose type the bucket has.
RankLayout lay_out(const NamedTensors& parameters, std::vector<PlannedBucket> buckets, const Grid& grid,
                   int rank, const ElementBytes& bytes, const Layout::Named& placements = {});

// The layout of a run and the facts that are printed with it.
struct RunLayout {
  RankLayout layout;
  RunConfig config;
  DataParallelPlan plan;    // whose formulas `train --memory` prints
  std::string description;  // describe_layout()
  Hosts hosts{};            // of the ranks: as planned_hosts() gives them
};
// Needs no weights and no ranks. ConfigError: as check(), except for devices; no such rank or number of
// hosts.
RunLayout lay_out(const RunConfig& config, int ranks, int rank, int hosts = 1);

// As above, for an existing model with parameters of the rank's local shapes, before its layout is made.
RunLayout lay_out(const RunConfig& config, const NamedTensors& parameters, const ModelUnits& units,
                  const RanksOfRun& ranks, int rank, const Layout::Named& placements);

std::string to_text(const RunLayout& run);  // lines of at most 100 columns
std::string to_json(const RunLayout& run);  // docs/layout.md

}  // namespace isograd
