#include "loss/term_sums.hpp"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/refuse.hpp"

namespace isograd {

void TermSums::clear() {
  loss_ = 0;
  terms_.clear();
}

void TermSums::add(const LossTerms& terms, const at::Tensor& share, const Denominator& denominator,
                   const StepCounts& step_counts, Readings& readings) {
  readings.add_loss(share, [this](double value) { loss_ += value; });
  if (terms_.empty()) {
    if (terms.size() > kMostTerms)
      refuse("loss terms", fmt::format("{} terms", terms.size()), fmt::format("at most {}", kMostTerms),
             "Add some of them up");
    for (const LossTerm& term : terms) {
      if (term.name.empty() || term.name.size() > kLongestName)
        refuse("loss terms", fmt::format("a term named '{}'", term.name),
               fmt::format("1 to {} letters", kLongestName), "Rename it");
      terms_.push_back({term.name, 0});
    }
  }
  if (terms.size() != terms_.size())
    refuse("loss terms",
           fmt::format("{} terms after {} in the step's first micro-batch", terms.size(), terms_.size()),
           "the same terms in every micro-batch", "Return a sum of 0 for a term that has nothing to add");
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const LossTerm& term = terms[i];
    if (term.name != terms_[i].name)
      refuse("loss terms",
             fmt::format("'{}' where the step's first micro-batch had '{}'", term.name, terms_[i].name),
             "the same terms in the same order in every micro-batch", "Return them in one order");
    const double divisor = denominator.of_term(term);
    if (divisor == 0 || std::isinf(divisor)) continue;  // nothing is counted, in the step or this replica
    const bool ours = !term.replicated || step_counts.rank == step_counts.first_with_micro_batches();
    readings.add(term.sum, [this, i, divisor, ours, weight = term.weight](double sum) {
      if (ours)
        terms_[i].value += sum / divisor;
      else if (weight != 0)  // it is in the share, and another rank logs it
        loss_ -= weight * (sum / divisor);
    });
  }
}

bool TermNames::differ_from(const std::vector<TermValue>& own) const {
  return !own.empty() && !std::ranges::equal(own, names_, {}, &TermValue::name);
}

void TermNames::agree(const std::vector<TermValue>& own, Group& all) {
  constexpr std::int64_t kMostTerms = TermSums::kMostTerms, kWidth = 1 + TermSums::kLongestName;
  at::Tensor written = at::zeros({kMostTerms, kWidth}, at::kByte);  // a name's length, then its letters
  auto* row = written.mutable_data_ptr<std::uint8_t>();
  for (const TermValue& term : own) {
    row[0] = static_cast<std::uint8_t>(term.name.size());
    std::memcpy(row + 1, term.name.data(), term.name.size());
    row += kWidth;
  }
  const at::Tensor rows = all.size() > 1 ? all.all_gather(written) : written.unsqueeze(0);
  int first = -1;
  for (int rank = 0; rank < all.size(); ++rank) {
    std::vector<std::string> names;
    const auto* letters = rows.const_data_ptr<std::uint8_t>() + rank * kMostTerms * kWidth;
    for (std::int64_t i = 0; i < kMostTerms && letters[0] > 0; ++i, letters += kWidth)
      names.emplace_back(reinterpret_cast<const char*>(letters) + 1, letters[0]);
    if (names.empty()) continue;
    if (first < 0)
      first = rank, names_ = std::move(names);
    else if (names != names_)
      refuse("loss terms",
             fmt::format(
                 "terms with other names or in another order on some rank: '{}' on rank {}, '{}' on rank {}",
                 fmt::join(names_, "', '"), first, fmt::join(names, "', '"), rank),
             "the same terms on every rank", "Return a sum of 0 for a term that has nothing to add");
  }
}

}  // namespace isograd
