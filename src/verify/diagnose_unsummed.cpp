// Ranks hold different gradients for one parameter: over which axis their parts were not summed.
#include <algorithm>

#include "verify/fits.hpp"

namespace isograd {
namespace {

// Copies on ranks that see the same batch, each of which has its own part of the gradient.
std::optional<Finding> diagnose_peers(const ComparedStep& one, const std::vector<std::string>& names) {
  std::string axes;
  for (const auto& parameter : one.parameters()) {
    if (std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    const auto& sums = one.found().peer_sums;
    const auto peers =
        std::find_if(sums.begin(), sums.end(), [&](const auto& sum) { return sum.name == parameter.name; });
    if (peers == sums.end()) return std::nullopt;
    const double off = (peers->sum.to(at::kDouble) - parameter.expected).norm().item<double>();
    if (!(off <= one.spread_allowed() * parameter.scale)) return std::nullopt;
    axes = peers->axes;
  }
  if (axes.empty()) return std::nullopt;
  return Finding{
      "not_summed_over_axis",
      fmt::format("{}: not summed over {}, whose ranks each have the part of their own tokens, heads or "
                  "uses: {}",
                  subject(one, names), axes, list_names(names)),
      {fmt::format("the sum of what these ranks have is right; as given: {}", numbers_of(one, names))}};
}

}  // namespace

std::optional<Finding> diagnose_unsummed(ComparedStep& one) {
  const std::vector<std::string> names = one.off();
  if (names.empty() || !one.finite()) return std::nullopt;
  if (auto peers = diagnose_peers(one, names)) return peers;
  for (const Cause& cause : unsummed_causes(one))
    if (explains(one, cause, names).value_or(false))
      return Finding{cause.id,
                     subject(one, names) + ": " + cause.sentence(one),
                     {fmt::format("rank 0 has the sum of its own parts along that axis; as given: {}",
                                  numbers_of(one, names))}};
  return std::nullopt;
}

}  // namespace isograd
