// Ranks that are to do the same: of one configuration, and of one batch along axes that are no data axes.
#pragma once

#include "isograd/batch.hpp"
#include "isograd/trainer.hpp"
#include "isograd/world.hpp"
#include "train/config.hpp"
#include "train/task.hpp"

namespace isograd {

// Whether any of them was asked to stop. ConfigError on all of them where their micro-batches differ: each
// would compute its part of another loss. Collective over these ranks; nothing where there is one.
bool agree_with_peers(const MicroBatches& micro_batches, bool stop_requested, const Mesh& mesh);

// Collective: ranks that were started with different values of a key that is not Ranks::kMayDiffer are
// refused with the key and both values, by an AgreedConfigError on all.
void check_same_configuration(const RunConfig& config, Group& world);

// Collective, the same of what each rank has read: its files may lie elsewhere, but must hold the same.
void check_same_data(const TaskFacts& facts, Group& world);

// Collective: the verdicts of tables are rank 0's, and every rank ends with them: what rank 0 has, elsewhere
// nothing, or one table that has not passed.
std::vector<ReportTable> tables_of_rank_zero(Group& world, std::vector<ReportTable> own);

}  // namespace isograd
