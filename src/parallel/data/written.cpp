#include "parallel/data/written.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <set>

#include "base/files.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

constexpr const char* kWriteTogether =
    "Call write() of the layout on every rank, or write the same values in place on all of them before the "
    "same step";

std::int64_t hash_of(const at::Tensor& values) {
  const at::Tensor bytes = values.detach().cpu().contiguous();
  const auto hash =
      static_cast<std::int64_t>(std::stoull(checksum(bytes.const_data_ptr(), bytes.nbytes()), nullptr, 16));
  return hash == 0 ? 1 : hash;
}

}  // namespace

void WrittenValues::add(const std::string& name, const AxisSet& copies, const at::Tensor& values) {
  if (mesh_.size(copies) > 1) hashes_.insert_or_assign(name, Hash{copies, hash_of(values)});
}

void WrittenValues::compare(const TrainableParameters& parameters) {
  std::set<AxisSet> kinds;
  for (const auto& [name, hash] : hashes_) kinds.insert(hash.copies);
  for (const AxisSet& copies : kinds) compare(parameters, copies);
  hashes_.clear();
}

void WrittenValues::compare(const TrainableParameters& parameters, const AxisSet& copies) const {
  std::vector<std::string> names;
  std::vector<std::int64_t> mine;  // 0: not written
  std::string first;
  for (const auto* list : {static_cast<const std::vector<NamedParameter>*>(&parameters), &parameters.frozen})
    for (const NamedParameter& parameter : *list) {
      if (parameter.sync.copies != copies) continue;
      const auto written = hashes_.find(parameter.name);
      names.push_back(parameter.name);
      mine.push_back(written == hashes_.end() ? 0 : written->second.value);
      if (first.empty() && mine.back() != 0) first = parameter.name;
    }
  at::Tensor by_rank;  // [W, P]
  try {                // ranks that have written nothing do something else in the group meanwhile
    by_rank = mesh_.along(copies).all_gather(at::tensor(mine, at::kLong));
  } catch (const PeerError& error) {
    throw PeerError(
        {.where = fmt::format("parameter '{}'", first),
         .found = "values written in place on this rank, and not on every rank: " + error.text().found,
         .expected = "the same values on every rank",
         .action = kWriteTogether});
  }
  const auto table = by_rank.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < by_rank.size(1); ++i)
    for (std::int64_t rank = 1; rank < by_rank.size(0); ++rank) {
      if (table[rank][i] == table[0][i]) continue;
      const bool both = table[rank][i] != 0 && table[0][i] != 0;
      const std::int64_t writer = table[0][i] != 0 ? 0 : rank;
      throw ConfigError(
          {.where = fmt::format("parameter '{}'", names.at(i)),
           .found = both ? fmt::format("other values written in place on rank {} than on rank 0 of those "
                                       "with copies of it",
                                       rank)
                         : fmt::format("values written in place on rank {} and none on rank {} of those "
                                       "with copies of it",
                                       writer, writer == 0 ? rank : 0),
           .expected = "the same values on every rank",
           .action = kWriteTogether});
    }
}

}  // namespace isograd
