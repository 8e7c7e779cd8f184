// The rows that a ranking loss ranks: what this rank brings, checked; the rows of all ranks; the queue.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "isograd/group.hpp"

namespace isograd {

// This rank's rows without the ignored ones. A problem is kept until all ranks know of it.
struct LocalRows {
  at::Tensor scores;                 // [n, C] in their own type, on the CPU, contiguous
  std::vector<std::int64_t> kept;    // [n] row of the input; empty where all are kept
  std::vector<std::int64_t> labels;  // [n] class; binary: 0 or 1
  std::vector<std::uint8_t> iid;     // [n]
  std::vector<double> weights;       // [n], or empty
  bool has_weights = false, has_iid = false, is_empty = false;  // of the input, ignored rows included
  bool finite = true;  // the scores: false is no bad input, but a model that has diverged
  std::optional<ErrorText> problem;
};

std::string shape_text(const at::Tensor& tensor);  // for messages, e.g. [3, 4]

LocalRows local_rows(const std::string& where, std::int64_t num_classes, std::int64_t ignore_index,
                     const at::Tensor& scores, const at::Tensor& targets, const at::Tensor& iid_mask,
                     const at::Tensor& sample_weight);

// The header that every rank sends before any row moves.
struct RankingExchange {
  std::uint64_t fingerprint = 0;  // of the loss and its options
  std::int64_t forwards = 0;      // made so far
  bool wants_gradient = false;    // afterwards: on any rank
  bool finite = true;             // afterwards: the scores of every rank; then rows may be exchanged
  bool updates_queue = false;
  std::uint64_t queue_checksum = 0;
};

// Rows of all ranks, rank by rank; then the queue's.
struct RankingPool {
  std::int64_t classes = 1;
  at::Tensor scores{};  // [C, M] fp64 or fp32
  std::vector<std::int64_t> labels{};
  std::vector<std::uint8_t> iid{};
  std::vector<double> weights{};  // empty: 1
  std::int64_t live = 0;          // rows of this step
  Group::Rows rows{};             // of each rank
  std::int64_t own_begin = 0;     // this rank's first

  std::int64_t size() const { return std::ssize(labels); }
};

// The contents of all ranks' headers.
struct RowCounts {
  Group::Rows rows;  // of each rank
  bool weighted = false;
  std::int64_t row_bytes = 0;  // of one row on its way

  std::int64_t total() const;
};

// Collective: the headers. ConfigError on every rank when any has a problem or the headers do not agree.
RowCounts exchange_headers(const std::string& where, Group& group, const LocalRows& local,
                           RankingExchange& header);

// Collective unless no rank has a row: the rows of all ranks.
RankingPool gather_rows(Group& group, const LocalRows& local, const RowCounts& counts);

// Some rows (ascending) of a pool; of all ranks' rows, counted rank by rank: collective.
RankingPool some_rows(const RankingPool& pool, const std::vector<std::int64_t>& rows);
RankingPool gather_some(Group& group, const LocalRows& local, const RowCounts& counts,
                        const std::vector<std::int64_t>& rows);

}  // namespace isograd
