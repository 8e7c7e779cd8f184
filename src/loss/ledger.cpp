#include "loss/ledger.hpp"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cmath>

#include "isograd/error.hpp"

namespace isograd {
namespace {

// The message: the loss; over ranks that have terms Σ of a mark of their names, and how many they are; that
// mark from the rank that names; then each term's value and name, six letters to an fp64 number.
enum : std::size_t { kLoss, kMarks, kRanks, kMark, kFirstTerm };
constexpr std::size_t kLettersOfNumber = 6, kNumbersOfName = TermLedger::kLongestName / kLettersOfNumber,
                      kNumbersOfTerm = 1 + kNumbersOfName;

double mark_of(const std::vector<TermValue>& terms) {
  std::uint32_t mark = 2166136261u;  // FNV-1a
  for (const auto& term : terms)
    for (const char letter : term.name + '\n') mark = (mark ^ static_cast<unsigned char>(letter)) * 16777619u;
  return mark;
}

[[noreturn]] void refuse_terms(std::string found, std::string expected, std::string action) {
  throw ConfigError({.where = "loss terms",
                     .found = std::move(found),
                     .expected = std::move(expected),
                     .action = std::move(action)});
}

}  // namespace

void TermLedger::clear() {
  loss_ = 0;
  terms_.clear();
}

void TermLedger::add(const LossTerms& terms, const at::Tensor& share, const Denominator& denominator,
                     const Census& census, Readings& readings) {
  readings.add(share, [this](double value) { loss_ += value; });
  if (terms_.empty()) {
    if (terms.size() > kMostTerms)
      refuse_terms(fmt::format("{} terms", terms.size()), fmt::format("at most {}", kMostTerms),
                   "Add some of them up");
    for (const LossTerm& term : terms) {
      if (term.name.empty() || term.name.size() > kLongestName)
        refuse_terms(fmt::format("a term named '{}'", term.name),
                     fmt::format("1 to {} letters", kLongestName), "Rename it");
      terms_.push_back({term.name, 0});
    }
  }
  if (terms.size() != terms_.size())
    refuse_terms(
        fmt::format("{} terms after {} in the step's first micro-batch", terms.size(), terms_.size()),
        "the same terms in every micro-batch", "Return a sum of 0 for a term that has nothing to add");
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const LossTerm& term = terms[i];
    if (term.name != terms_[i].name)
      refuse_terms(fmt::format("'{}' where the step's first micro-batch had '{}'", term.name, terms_[i].name),
                   "the same terms in the same order in every micro-batch", "Return them in one order");
    const double divisor = denominator.of_term(term);
    if (divisor == 0 || std::isinf(divisor)) continue;  // nothing is counted, in the step or this replica
    const bool ours = !term.replicated || census.rank == census.first_with_micro_batches();
    readings.add(term.sum, [this, i, divisor, ours, weight = term.weight](double sum) {
      if (ours)
        terms_[i].value += sum / divisor;
      else if (weight != 0)  // it is in the share, and another rank logs it
        loss_ -= weight * (sum / divisor);
    });
  }
}

std::vector<double> TermLedger::message(const Census& census, bool may_name) const {
  std::vector<double> message(kFirstTerm + kMostTerms * kNumbersOfTerm);
  message[kLoss] = loss_;
  if (terms_.empty()) return message;
  message[kMarks] = mark_of(terms_);
  message[kRanks] = 1;
  const bool names = may_name && census.rank == census.first_with_micro_batches();
  if (names) message[kMark] = mark_of(terms_);
  for (std::size_t i = 0; i < terms_.size(); ++i) {
    double* term = &message[kFirstTerm + i * kNumbersOfTerm];
    term[0] = terms_[i].value;
    if (!names) continue;
    for (std::size_t letter = terms_[i].name.size(); letter-- > 0;) {
      double& number = term[1 + letter / kLettersOfNumber];
      number = number * 256 + static_cast<unsigned char>(terms_[i].name[letter]);
    }
  }
  return message;
}

std::vector<TermValue> TermLedger::read(const std::vector<double>& sums) {
  if (sums[kMarks] != sums[kRanks] * sums[kMark])
    refuse_terms("terms with other names or in another order on some rank", "the same terms on every rank",
                 "Return a sum of 0 for a term that has nothing to add");
  std::vector<TermValue> terms;
  for (std::size_t i = 0; i < kMostTerms; ++i) {
    const double* term = &sums[kFirstTerm + i * kNumbersOfTerm];
    TermValue read{.name = {}, .value = term[0]};
    for (std::size_t n = 1; n <= kNumbersOfName; ++n)
      for (auto letters = static_cast<std::uint64_t>(term[n]); letters != 0; letters /= 256)
        read.name += static_cast<char>(letters % 256);
    if (read.name.empty()) break;
    terms.push_back(std::move(read));
  }
  return terms;
}

}  // namespace isograd
