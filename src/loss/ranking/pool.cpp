#include "loss/ranking/pool.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "loss/checks.hpp"

namespace isograd {
namespace {

class Checker {
 public:
  Checker(const std::string& where, LocalRows& rows) : where_(where), rows_(rows) {}
  // Keeps the first problem. False: stop looking.
  bool operator()(bool holds, std::string found, std::string expected, std::string action) {
    if (!holds && !rows_.problem)
      rows_.problem = ErrorText{where_, std::move(found), std::move(expected), std::move(action)};
    return !rows_.problem;
  }

 private:
  const std::string& where_;
  LocalRows& rows_;
};

enum Field : std::int64_t {
  kFingerprint,
  kClasses,
  kType,
  kRows,
  kProblem,  // 0: none, 1: refused, 2: scores that are not finite
  kWeights,  // 0: none, 1: given, 2: no rows to weigh
  kIid,
  kGradient,
  kForwards,
  kUpdates,
  kChecksum,
  kFields
};

// 1 byte a row where labels are 0 and 1, else 4: the label above a bit for iid.
std::int64_t label_bytes(std::int64_t classes) { return classes == 1 ? 1 : 4; }

std::int64_t row_bytes(std::int64_t classes, std::int64_t element, bool weights) {
  return classes * element + label_bytes(classes) + (weights ? 8 : 0);
}

at::Tensor packed(const LocalRows& local, std::int64_t classes, bool weights) {
  const auto n = std::ssize(local.labels);
  const auto element = static_cast<std::int64_t>(local.scores.element_size());
  at::Tensor bytes = at::empty({n * row_bytes(classes, element, weights)}, at::kByte);
  if (n == 0) return bytes;
  auto* at = bytes.data_ptr<std::uint8_t>();
  std::memcpy(at, local.scores.const_data_ptr(), static_cast<std::size_t>(n * classes * element));
  at += n * classes * element;
  for (std::size_t i = 0; i < local.labels.size(); ++i) {
    const auto code = static_cast<std::uint32_t>(local.labels[i] << 1 | local.iid[i]);
    std::memcpy(at, &code, static_cast<std::size_t>(label_bytes(classes)));  // little-endian, as all of us
    at += label_bytes(classes);
  }
  if (weights) std::memcpy(at, local.weights.data(), static_cast<std::size_t>(n) * 8);
  return bytes;
}

// Whether the targets are integers from 0 to `most` without exception; then they are the labels.
bool all_classes(const at::Tensor& targets, std::int64_t most, std::int64_t ignore_index,
                 std::vector<std::int64_t>& labels) {
  if (!at::isIntegralType(targets.scalar_type(), /*includeBool=*/true)) return false;
  const at::Tensor on_host = targets.detach().to(at::kCPU, at::kLong).contiguous();
  const auto* label = on_host.const_data_ptr<std::int64_t>();
  bool others = false;
  for (std::int64_t i = 0; i < on_host.numel(); ++i)
    others |= (static_cast<std::uint64_t>(label[i]) > static_cast<std::uint64_t>(most)) |
              (label[i] == ignore_index);
  if (!others) labels.assign(label, label + on_host.numel());
  return !others;
}

template <typename T>
bool all_finite(const T* values, std::int64_t count) {
  bool all = true;
  for (std::int64_t i = 0; i < count; ++i) all &= std::abs(values[i]) <= std::numeric_limits<T>::max();
  return all;
}

bool all_finite(const at::Tensor& scores) {
  switch (scores.scalar_type()) {
    case at::kFloat: return all_finite(scores.const_data_ptr<float>(), scores.numel());
    case at::kDouble: return all_finite(scores.const_data_ptr<double>(), scores.numel());
    default: return at::isfinite(scores).all().item<bool>();
  }
}

// All of some rows but their scores.
template <typename Rows>
void take_rows(const Rows& from, const std::vector<std::int64_t>& rows, Rows& to) {
  for (const auto row : rows) {
    to.labels.push_back(from.labels[row]), to.iid.push_back(from.iid[row]);
    if (!from.weights.empty()) to.weights.push_back(from.weights[row]);
  }
}

using Say = std::string (*)(std::int64_t value);
std::string ranks_by(const std::int64_t* headers, int size, Field field, Say say) {
  std::string text;
  for (int rank = 0; rank < size; ++rank)
    text += fmt::format("{}rank {}: {}", rank > 0 ? ", " : "", rank, say(headers[rank * kFields + field]));
  return text;
}

// The same refusal on every rank, the one at fault saying more.
void check_headers(const std::string& where, const std::int64_t* headers, int size, const LocalRows& local) {
  for (int rank = 0; rank < size; ++rank)
    if (headers[rank * kFields + kProblem] == 1) {
      if (local.problem) throw ConfigError(*local.problem);
      refuse(where, fmt::format("rank {} refused its input", rank), "rows that can be ranked on every rank",
             fmt::format("See what rank {} says", rank));
    }
  // {} in `found` stands for the ranks' values.
  const auto must_agree = [&](Field field, const char* found, Say say, const char* expected,
                              const char* action) {
    for (int rank = 1; rank < size; ++rank)
      if (headers[rank * kFields + field] != headers[field])
        refuse(where, fmt::format(fmt::runtime(found), ranks_by(headers, size, field, say)), expected,
               action);
  };
  const Say number = [](std::int64_t value) { return std::to_string(value); },
            hash =
                [](std::int64_t value) { return fmt::format("{:016x}", static_cast<std::uint64_t>(value)); },
            type = [](std::int64_t value) -> std::string {
              return c10::toString(static_cast<at::ScalarType>(value));
            };
  must_agree(kFingerprint, "ranks that differ: {}", hash, "the same loss with the same options",
             "Construct it alike on every rank");
  must_agree(kClasses, "scores of {} classes", number, "one number", "Give scores [N, C] with one C");
  must_agree(kType, "scores of other types: {}", type, "one type", "Convert the scores");
  must_agree(kForwards, "forwards made: {}", number, "as many on every rank",
             "Call the loss equally often, without rows where there are none; load one state everywhere");
  must_agree(kUpdates, "ranks in training and ranks in evaluation", number, "one mode",
             "Call train() or eval() alike");
  must_agree(kChecksum, "queues that differ over ranks", number, "the same rows on every rank",
             "Load one state on every rank, and never write to the buffers");
  for (const Field field : {kWeights, kIid}) {
    bool given = false, absent = false;
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t value = headers[rank * kFields + field];
      given = given || value == 1, absent = absent || value == 0;
    }
    if (given && absent)
      refuse(where,
             std::string(field == kWeights ? "sample_weight" : "iid_mask") + " on some ranks only: " +
                 ranks_by(headers, size, field,
                          [](std::int64_t value) -> std::string {
                            return value == 2 ? "no rows" : value == 1 ? "given" : "not given";
                          }),
             "on all ranks that have rows, or on none",
             "Pass it on every rank, ones where nothing is special");
  }
}

}  // namespace

std::string shape_text(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("[{}]", fmt::join(tensor.sizes(), ", ")) : "nothing";
}

LocalRows local_rows(const std::string& where, std::int64_t num_classes, std::int64_t ignore_index,
                     const at::Tensor& scores, const at::Tensor& targets_given, const at::Tensor& iid_mask,
                     const at::Tensor& sample_weight) {
  LocalRows rows;
  Checker check(where, rows);
  rows.scores = at::empty({0, num_classes}, at::kFloat);
  if (!check(scores.defined() && scores.dim() == 2 && scores.size(1) == num_classes &&
                 at::isFloatingType(scores.scalar_type()),
             "scores " + shape_text(scores), fmt::format("[N, {}] of a floating type", num_classes),
             "Pass one score for each row and class"))
    return rows;
  const std::int64_t n = scores.size(0);
  rows.is_empty = n == 0;
  rows.scores = at::empty({0, num_classes}, scores.options().device(at::kCPU));
  at::Tensor targets = targets_given;
  if (targets.defined() && targets.dim() == 2 && targets.size(1) == 1) targets = targets.squeeze(1);
  if (!check(targets.defined() && targets.dim() == 1 && targets.size(0) == n,
             "targets " + shape_text(targets), fmt::format("[{}]", n),
             "Pass one target for each row of scores"))
    return rows;
  if (iid_mask.defined() &&
      !check(iid_mask.dim() == 1 && iid_mask.size(0) == n, "iid_mask " + shape_text(iid_mask),
             fmt::format("[{}]", n), "Pass one flag for each row of scores"))
    return rows;
  if (sample_weight.defined() && !check(sample_weight.dim() == 1 && sample_weight.size(0) == n,
                                        "sample_weight " + shape_text(sample_weight), fmt::format("[{}]", n),
                                        "Pass one weight for each row of scores"))
    return rows;
  rows.has_weights = sample_weight.defined();
  rows.has_iid = iid_mask.defined();

  const std::int64_t most = num_classes == 1 ? 1 : num_classes - 1;
  const at::Tensor flags =
      rows.has_iid ? iid_mask.detach().to(at::kCPU, at::kBool).contiguous() : at::Tensor();
  const at::Tensor weights =
      rows.has_weights ? sample_weight.detach().to(at::kCPU, at::kDouble).contiguous() : at::Tensor();
  if (!rows.has_weights && all_classes(targets, most, ignore_index, rows.labels)) {
    rows.iid.assign(static_cast<std::size_t>(n), 1);
    if (rows.has_iid) std::copy_n(flags.data_ptr<bool>(), n, rows.iid.begin());
    rows.scores = scores.detach().to(at::kCPU).contiguous();
    rows.finite = all_finite(rows.scores);
    return rows;
  }
  const at::Tensor labels = targets.detach().to(at::kCPU, at::kDouble).contiguous();
  const double* label = labels.data_ptr<double>();
  rows.kept.reserve(n), rows.labels.reserve(n);
  rows.iid.reserve(n);
  if (rows.has_weights) rows.weights.reserve(n);
  for (std::int64_t i = 0; i < n; ++i) {
    if (label[i] == static_cast<double>(ignore_index)) continue;
    // Texts are made for what is wrong only: this runs for every row.
    if (!(label[i] == std::floor(label[i]) && label[i] >= 0 && label[i] <= static_cast<double>(most)) &&
        !check(false, fmt::format("target {} in row {}", label[i], i),
               fmt::format("an integer from 0 to {}, or {} to ignore the row", most, ignore_index),
               "Correct the targets"))
      return rows;
    if (rows.has_weights) {
      const double weight = weights.data_ptr<double>()[i];
      if (!(std::isfinite(weight) && weight >= 0) &&
          !check(false, fmt::format("sample_weight {} in row {}", weight, i), "finite weights >= 0",
                 "Correct the weights"))
        return rows;
      rows.weights.push_back(weight + 0.0);
    }
    rows.kept.push_back(i);
    rows.labels.push_back(static_cast<std::int64_t>(label[i]));
    rows.iid.push_back(!rows.has_iid || flags.data_ptr<bool>()[i] ? 1 : 0);
  }
  at::Tensor chosen = scores.detach().to(at::kCPU);
  if (std::ssize(rows.kept) < n)
    chosen = chosen.index_select(0, at::tensor(rows.kept, at::kLong));
  else
    rows.kept.clear();
  rows.scores = chosen.contiguous();
  rows.finite = all_finite(rows.scores);
  return rows;
}

std::int64_t RowCounts::total() const { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }

RowCounts exchange_headers(const std::string& where, Group& group, const LocalRows& local,
                           RankingExchange& header) {
  const int size = group.size();
  const std::int64_t classes = local.scores.size(1);
  RowCounts counts{.rows = {std::ssize(local.labels)}, .weighted = local.has_weights};
  const auto element = static_cast<std::int64_t>(local.scores.element_size());
  if (size == 1) {
    if (local.problem) throw ConfigError(*local.problem);
    header.finite = local.finite;
    counts.row_bytes = row_bytes(classes, element, counts.weighted);
    return counts;
  }
  at::Tensor own = at::zeros({kFields}, at::kLong);
  auto* field = own.data_ptr<std::int64_t>();
  field[kFingerprint] = static_cast<std::int64_t>(header.fingerprint);
  field[kClasses] = classes;
  field[kType] = static_cast<std::int64_t>(local.scores.scalar_type());
  field[kRows] = counts.rows[0];
  field[kProblem] = local.problem ? 1 : local.finite ? 0 : 2;
  field[kWeights] = local.is_empty ? 2 : local.has_weights ? 1 : 0;
  field[kIid] = local.is_empty ? 2 : local.has_iid ? 1 : 0;
  field[kGradient] = header.wants_gradient ? 1 : 0;
  field[kForwards] = header.forwards;
  field[kUpdates] = header.updates_queue ? 1 : 0;
  field[kChecksum] = static_cast<std::int64_t>(header.queue_checksum);
  const at::Tensor all = group.all_gather(own);
  const auto* headers = all.data_ptr<std::int64_t>();
  check_headers(where, headers, size, local);
  counts = {};
  for (int rank = 0; rank < size; ++rank) {
    const std::int64_t* of = headers + rank * kFields;
    counts.rows.push_back(of[kRows]);
    counts.weighted = counts.weighted || of[kWeights] == 1;
    header.wants_gradient = header.wants_gradient || of[kGradient] == 1;
    header.finite = header.finite && of[kProblem] == 0;
  }
  counts.row_bytes = row_bytes(classes, element, counts.weighted);
  return counts;
}

RankingPool gather_rows(Group& group, const LocalRows& local, const RowCounts& counts) {
  const std::int64_t classes = local.scores.size(1);
  const bool weighted = counts.weighted;
  const at::ScalarType type = local.scores.scalar_type();
  RankingPool pool{.classes = classes, .live = counts.total(), .rows = counts.rows};
  if (group.size() == 1) {
    pool.scores = local.scores.to(computing_type(type)).t().contiguous();
    pool.labels = local.labels, pool.iid = local.iid;
    if (weighted) pool.weights = local.weights;
    return pool;
  }
  const at::Tensor own = packed(local, classes, weighted);
  at::Tensor bytes = at::empty({counts.total() * counts.row_bytes}, at::kByte);
  Group::Rows parts;
  for (const auto count : counts.rows) parts.push_back(count * counts.row_bytes);
  if (bytes.numel() > 0) group.all_gather_rows_async(bytes, own, parts).wait();

  for (int rank = 0; rank < group.rank(); ++rank) pool.own_begin += pool.rows[rank];
  const auto element = static_cast<std::int64_t>(local.scores.element_size());
  at::Tensor scores = at::empty({pool.live, classes}, type);
  const auto live = static_cast<std::size_t>(pool.live);
  pool.labels.resize(live), pool.iid.resize(live);
  if (weighted) pool.weights.resize(live);
  const auto* from = bytes.data_ptr<std::uint8_t>();
  std::size_t row = 0;
  for (const auto count : pool.rows) {
    const auto score_bytes = static_cast<std::size_t>(count * classes * element);
    if (count == 0) continue;
    std::memcpy(static_cast<std::uint8_t*>(scores.mutable_data_ptr()) +
                    static_cast<std::int64_t>(row) * classes * element,
                from, score_bytes);
    from += score_bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t code = 0;
      std::memcpy(&code, from, static_cast<std::size_t>(label_bytes(classes)));
      from += label_bytes(classes);
      pool.labels[row + static_cast<std::size_t>(i)] = code >> 1;
      pool.iid[row + static_cast<std::size_t>(i)] = code & 1;
    }
    if (weighted) {
      std::memcpy(pool.weights.data() + row, from, static_cast<std::size_t>(count) * 8);
      from += count * 8;
    }
    row += static_cast<std::size_t>(count);
  }
  pool.scores = scores.to(computing_type(type)).t().contiguous();
  return pool;
}

RankingPool gather_some(Group& group, const LocalRows& local, const RowCounts& counts,
                        const std::vector<std::int64_t>& rows) {
  RowCounts chosen{.rows = {}, .weighted = counts.weighted, .row_bytes = counts.row_bytes};
  std::vector<std::int64_t> own;
  std::int64_t begin = 0;
  auto row = rows.begin();
  for (std::size_t rank = 0; rank < counts.rows.size(); ++rank) {
    const auto first = row;
    for (; row != rows.end() && *row < begin + counts.rows[rank]; ++row)
      if (static_cast<int>(rank) == group.rank()) own.push_back(*row - begin);
    chosen.rows.push_back(row - first);
    begin += counts.rows[rank];
  }
  LocalRows some;
  some.scores = local.scores.index_select(0, at::tensor(own, at::kLong));
  take_rows(local, own, some);
  return gather_rows(group, some, chosen);
}

RankingPool some_rows(const RankingPool& pool, const std::vector<std::int64_t>& rows) {
  RankingPool some{.classes = pool.classes,
                   .scores = pool.scores.index_select(1, at::tensor(rows, at::kLong))};
  some.live = std::ssize(rows);
  take_rows(pool, rows, some);
  return some;
}

}  // namespace isograd
