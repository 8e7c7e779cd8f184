#include "parallel/data/written.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <set>

#include "base/files.hpp"

namespace isograd {
namespace {

constexpr const char* kWriteTogether =
    "Call write() of the layout on every rank, or write the same values in place on all of "
    "them before the same step";

}  // namespace

std::int64_t ValueHashes::of(const at::Tensor& values) {
  const at::Tensor bytes = values.detach().cpu().contiguous();
  const auto hash =
      static_cast<std::int64_t>(std::stoull(checksum(bytes.const_data_ptr(), bytes.nbytes()), nullptr, 16));
  return hash == kNone ? 1 : hash;
}

void ValueHashes::add(const std::string& name, std::int64_t hash) {
  names_.push_back(name);
  hashes_.push_back(hash);
}

at::Tensor ValueHashes::mine() const { return at::tensor(hashes_, at::kLong); }

std::optional<ErrorText> ValueHashes::first_difference(const at::Tensor& by_rank, const std::string& given,
                                                       const std::string& action) const {
  const auto table = by_rank.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < by_rank.size(1); ++i)
    for (std::int64_t rank = 1; rank < by_rank.size(0); ++rank) {
      if (table[rank][i] == table[0][i]) continue;
      const bool both = table[rank][i] != kNone && table[0][i] != kNone;
      const std::int64_t writer = table[0][i] != kNone ? 0 : rank;
      return ErrorText{
          .where = fmt::format("parameter '{}'", names_.at(static_cast<std::size_t>(i))),
          .found = both ? fmt::format("other values {} on rank {} than on rank 0 of those with copies of it",
                                      given, rank)
                        : fmt::format("values {} on rank {} and none on rank {} of those with copies of it",
                                      given, writer, writer == 0 ? rank : 0),
          .expected = "the same values on every rank",
          .action = action};
    }
  return std::nullopt;
}

void WrittenValues::add(const std::string& name, const AxisSet& copies, const at::Tensor& values) {
  if (mesh_.size(copies) > 1) hashes_.insert_or_assign(name, Hash{copies, ValueHashes::of(values)});
}

void WrittenValues::watch(const std::vector<NamedParameter>& frozen) {
  for (const NamedParameter& parameter : frozen)  // of others there are no bytes to hash
    if (parameter.tensor.layout() == at::kStrided && !parameter.tensor.is_meta())
      watched_.push_back(parameter);
  writes_ = Writes(watched_);
}

void WrittenValues::compare(const TrainableParameters& parameters) {
  for (std::size_t place : writes_.written()) {
    writes_.settle(place);
    const NamedParameter& parameter = watched_[place];
    add(parameter.name, parameter.sync.copies, parameter.tensor);
  }
  std::set<AxisSet> kinds;
  for (const auto& [name, hash] : hashes_) kinds.insert(hash.copies);
  for (const AxisSet& copies : kinds) compare(parameters, copies);
  hashes_.clear();
}

void WrittenValues::compare(const TrainableParameters& parameters, const AxisSet& copies) const {
  ValueHashes hashes;
  std::string first;
  for (const auto* list : {static_cast<const std::vector<NamedParameter>*>(&parameters), &parameters.frozen})
    for (const NamedParameter& parameter : *list) {
      if (parameter.sync.copies != copies) continue;
      const auto written = hashes_.find(parameter.name);
      hashes.add(parameter.name, written == hashes_.end() ? ValueHashes::kNone : written->second.value);
      if (first.empty() && written != hashes_.end()) first = parameter.name;
    }
  at::Tensor by_rank;  // [W, P]
  try {                // ranks that have written nothing do something else in the group meanwhile
    by_rank = mesh_.along(copies).all_gather(hashes.mine());
  } catch (const PeerError& error) {
    throw PeerError(
        {.where = fmt::format("parameter '{}'", first),
         .found = "values written in place on this rank, and not on every rank: " + error.text().found,
         .expected = "the same values on every rank",
         .action = kWriteTogether});
  }
  if (const auto difference = hashes.first_difference(by_rank, "written in place", kWriteTogether))
    throw ConfigError(*difference);
}

}  // namespace isograd
