#include "loss/ranking/cores.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/sigmoid.hpp"
#include "loss/ranking/quantile.hpp"

namespace isograd {
namespace {

constexpr double kScaleEpsilon = 1e-12;  // a dispersion up to here calibrates no temperature

// The rows for which `holds`, ascending. Which rows are positive is what no branch can be predicted by, so
// every row is written down and the next one takes the place of a row that does not hold.
template <typename T>
std::vector<std::int64_t> rows_where(const ClassPool<T>& pool, const auto& holds) {
  std::vector<std::int64_t> index(pool.scores.size() + 1);
  std::size_t count = 0;
  for (std::size_t row = 0; row < pool.scores.size(); ++row) {
    index[count] = static_cast<std::int64_t>(row);
    count += holds(row) ? 1 : 0;
  }
  index.resize(count);
  return index;
}

// Positives or negatives by themselves, those of this step first, as in the pool.
template <typename T>
struct Rows {
  std::vector<std::int64_t> index;  // in the pool
  std::vector<T> scores;
  std::int64_t live = 0;  // the first `live` rows are of this step
  std::int64_t size() const { return std::ssize(index); }

  Rows(const ClassPool<T>& pool, const auto& holds) : index(rows_where(pool, holds)), scores(index.size()) {
    for (std::size_t i = 0; i < index.size(); ++i) scores[i] = pool.scores[index[i]];
    live = std::lower_bound(index.begin(), index.end(), pool.live) - index.begin();
  }
};

// Below the smallest normal number 1/τ is infinite, or τ has lost its digits.
template <typename T>
bool can_divide(double temperature) {
  return temperature >= static_cast<double>(std::numeric_limits<T>::min()) && std::isfinite(temperature);
}

constexpr const char* kNoPositive = "a positive row";
constexpr const char* kNoNegative = "a negative row";
constexpr const char* kNoWeight = "a positive whose weight is above 0";
constexpr const char* kNoDispersion = "scores that differ: the dispersion that scales the temperature is 0";

double mass(const auto& pool, const auto& rows) {
  double sum = 0;
  for (const auto row : rows.index) sum += pool.weight(row);
  return sum;
}

void contribute(ClassResult& result, double contribution, double share) {
  result.value += share * contribution;
  result.contributed += contribution;
  result.squared += contribution * contribution;
}

// k-th of the band's knots in T, as at::linspace counts them: from both ends.
template <typename T>
T knot(const Band& band, std::int64_t k) {
  const T begin = static_cast<T>(band.alpha), end = static_cast<T>(band.beta);
  const T step = (end - begin) / static_cast<T>(band.knots - 1);
  return k < band.knots / 2 ? begin + step * static_cast<T>(k)
                            : end - step * static_cast<T>(band.knots - k - 1);
}

// The numbers that a positive is softly compared with: thresholds, the weight of each, and the temperature; 0
// where the reference scores have no dispersion.
struct Steps {
  std::vector<double> thresholds, weights;
  double temperature = 0;
};

template <typename T>
Steps steps_of(const RateRule& rule, const std::vector<T>& at, double temperature) {
  if (rule.quantile) return {{static_cast<double>(at[0])}, {1}, temperature};
  const T scale = at[2] - at[3];
  if (static_cast<double>(scale) <= kScaleEpsilon) return {};
  Steps steps{{at.begin() + 4, at.end()}, {}, static_cast<double>(static_cast<T>(temperature) * scale)};
  const double inner = 1 / static_cast<double>(rule.band.knots - 1);
  steps.weights.assign(steps.thresholds.size(), inner);
  steps.weights.front() = steps.weights.back() = 0.5 * inner;
  return steps;
}

// Split by positives. σ((s_i − s_j)/τ): the kernel's z with the sign turned.
template <typename T>
void pairwise(const ClassPool<T>& pool, const Rows<T>& positives, const Rows<T>& band, double temperature,
              double whole, ClassResult& result, T* gradient) {
  std::vector<T> anchors, weights;
  std::vector<std::int64_t> rows;
  const auto pairs = static_cast<double>(band.size());
  for (std::int64_t i = pool.share; i < positives.size(); i += pool.shares) {
    rows.push_back(positives.index[i]);
    anchors.push_back(positives.scores[i]);
    weights.push_back(static_cast<T>(pool.weight(rows.back()) / whole / pairs / temperature));
  }
  const auto count = std::ssize(anchors);
  const T scale = static_cast<T>(-1 / temperature);
  std::vector<double> sums(anchors.size(), 0);
  kernels::sigmoid_sums(band.scores.data(), band.size(), anchors.data(), count, scale, sums.data());
  for (std::size_t i = 0; i < anchors.size(); ++i)
    contribute(result, sums[i] / pairs, pool.weight(rows[i]) / whole);
  if (!gradient) return;
  std::vector<double> of_band(band.scores.size(), 0), of_anchors(anchors.size(), 0);
  kernels::sigmoid_slopes(band.scores.data(), band.size(), anchors.data(), weights.data(), count, scale,
                          of_band.data(), of_anchors.data());
  for (std::size_t i = 0; i < anchors.size(); ++i)
    if (rows[i] < pool.live)
      gradient[rows[i]] -= static_cast<T>(static_cast<double>(weights[i]) * of_anchors[i]);
  for (std::int64_t j = 0; j < band.live; ++j) gradient[band.index[j]] += static_cast<T>(of_band[j]);
}

}  // namespace

// With d_kj = σ(1 − σ)/τ, w_kj = (a_k − p_k)/a_k² for a positive j and −p_k/a_k² for a negative one:
// ∂AP/∂s_j = Σ_k ω_k w_kj d_kj / Ω − [j positive] ω_j Σ_m w_jm d_jm / Ω. The pair j = k stands in both sums
// and cancels.
template <typename T>
ClassResult smooth_ap(const ClassPool<T>& pool, T* gradient) {
  const Rows<T> positives(pool, [&](std::size_t row) { return pool.positive[row] != 0; }),
      negatives(pool, [&](std::size_t row) { return pool.positive[row] == 0; });
  ClassResult result;
  result.numerator_rows = static_cast<double>(positives.size());
  const double whole = mass(pool, positives);
  if (positives.size() == 0 || negatives.size() == 0 || whole == 0) {
    result.missing = positives.size() == 0 ? kNoPositive : negatives.size() == 0 ? kNoNegative : kNoWeight;
    return result;
  }
  result.valid = true;

  std::vector<T> anchors;
  std::vector<std::int64_t> anchor_rows;
  for (std::int64_t k = pool.share; k < positives.size(); k += pool.shares) {
    anchors.push_back(positives.scores[k]);
    anchor_rows.push_back(positives.index[k]);
  }
  const auto count = std::ssize(anchors);
  const T scale = static_cast<T>(1 / pool.temperature);
  std::vector<double> above(anchors.size(), 0), below(anchors.size(), 0);
  kernels::sigmoid_sums(positives.scores.data(), positives.size(), anchors.data(), count, scale,
                        above.data());
  kernels::sigmoid_sums(negatives.scores.data(), negatives.size(), anchors.data(), count, scale,
                        below.data());
  std::vector<T> to_positives(anchors.size()), to_negatives(anchors.size());
  for (std::size_t k = 0; k < anchors.size(); ++k) {
    const double p = 0.5 + above[k];  // 1 + the others: the anchor itself gave σ(0) = 0.5
    const double a = p + below[k];
    const double share = pool.weight(anchor_rows[k]) / whole;
    contribute(result, p / a, share);
    to_positives[k] = static_cast<T>(share * below[k] / (a * a) / pool.temperature);
    to_negatives[k] = static_cast<T>(-share * p / (a * a) / pool.temperature);
  }
  if (!gradient) return result;

  std::vector<double> of_positives(positives.index.size(), 0), of_negatives(negatives.index.size(), 0);
  std::vector<double> anchor_above(anchors.size(), 0), anchor_below(anchors.size(), 0);
  kernels::sigmoid_slopes(positives.scores.data(), positives.size(), anchors.data(), to_positives.data(),
                          count, scale, of_positives.data(), anchor_above.data());
  kernels::sigmoid_slopes(negatives.scores.data(), negatives.size(), anchors.data(), to_negatives.data(),
                          count, scale, of_negatives.data(), anchor_below.data());
  for (std::size_t k = 0; k < anchors.size(); ++k)
    of_positives[static_cast<std::size_t>(pool.share) + k * static_cast<std::size_t>(pool.shares)] -=
        static_cast<double>(to_positives[k]) * anchor_above[k] +
        static_cast<double>(to_negatives[k]) * anchor_below[k];
  for (std::int64_t i = 0; i < positives.live; ++i)
    gradient[positives.index[i]] -= static_cast<T>(of_positives[i]);
  for (std::int64_t i = 0; i < negatives.live; ++i)
    gradient[negatives.index[i]] -= static_cast<T>(of_negatives[i]);
  return result;
}

template <typename T>
std::vector<T> rate_reference(const ClassPool<T>& pool, const RateRule& rule) {
  if (rule.quantile) return pool.scores;
  return Rows<T>(pool,
                 [&](std::size_t row) {
                   return (pool.iid[row] != 0) & (rule.band.population | (pool.positive[row] == 0));
                 })
      .scores;
}

// Order statistics of a band: its ends, the two whose distance is the dispersion, then the knots of the
// trapezoid.
template <typename T>
std::vector<T> rate_probabilities(const RateRule& rule) {
  if (rule.quantile) return {static_cast<T>(1 - *rule.quantile)};
  const Band& band = rule.band;
  const T alpha = static_cast<T>(1 - band.alpha), beta = static_cast<T>(1 - band.beta);
  std::vector<T> q = {alpha, beta, band.by_band ? alpha : T(0.75), band.by_band ? beta : T(0.25)};
  if (!band.pairwise)
    for (std::int64_t k = 0; k < band.knots; ++k) q.push_back(T(1) - knot<T>(band, k));
  return q;
}

template <typename T>
RateSums rate_sums(const ClassPool<T>& pool, const RateRule& rule, const std::vector<T>& thresholds,
                   RateSlopes* slopes) {
  RateSums sums;
  const auto steps = thresholds.empty() ? Steps() : steps_of(rule, thresholds, pool.temperature);
  if (!rule.quantile) {
    std::int64_t negatives = 0, in_band = 0;
    for (std::size_t row = 0; row < pool.scores.size(); ++row) {
      const bool counts = (pool.positive[row] == 0) & (pool.iid[row] != 0);
      negatives += counts;
      if (!thresholds.empty())
        in_band += counts & (pool.scores[row] >= thresholds[1]) & (pool.scores[row] <= thresholds[0]);
    }
    sums.iid_negatives = static_cast<double>(negatives), sums.band_negatives = static_cast<double>(in_band);
  }
  const bool live_only = !rule.quantile && rule.band.live_only;
  const Rows<T> positives(pool, [&](std::size_t row) {
    return (pool.positive[row] != 0) & (!live_only | (static_cast<std::int64_t>(row) < pool.live));
  });
  if (slopes) {
    slopes->rows.assign(positives.index.begin(), positives.index.begin() + positives.live);
    slopes->slopes.assign(slopes->rows.size(), 0);
  }
  sums.positives = static_cast<double>(positives.size()), sums.mass = mass(pool, positives);
  if (!(steps.temperature > 0)) return sums;
  for (std::size_t i = 0; i < positives.index.size(); ++i) {
    const double weight = pool.weight(positives.index[i]);
    double rate = 0, slope = 0;
    for (std::size_t k = 0; k < steps.thresholds.size(); ++k) {
      const double z = (static_cast<double>(positives.scores[i]) - steps.thresholds[k]) / steps.temperature;
      // σ(|z|) and σ(−|z|), by the exponential that overflows for no z.
      const double e = std::exp(-std::abs(z)), high = 1 / (1 + e), low = e / (1 + e);
      rate += steps.weights[k] * (z < 0 ? low : high);
      slope += steps.weights[k] * high * low / steps.temperature;
    }
    sums.weighted += weight * rate, sums.contributed += rate, sums.squared += rate * rate;
    if (slopes && i < slopes->rows.size()) slopes->slopes[i] = weight * slope;
  }
  return sums;
}

template <typename T>
ClassResult rate_result(const RateSums& whole, const RateRule& rule, const std::vector<T>& thresholds,
                        double temperature) {
  ClassResult result;
  result.numerator_rows = whole.positives;
  result.missing = whole.positives == 0 ? kNoPositive : whole.mass == 0 ? kNoWeight : kNoNegative;
  if (whole.positives == 0 || whole.mass == 0 || thresholds.empty()) return result;
  if (!rule.quantile) {
    if (whole.iid_negatives == 0) return result;
    const auto steps = steps_of(rule, thresholds, temperature);
    result.missing = kNoDispersion;
    if (steps.thresholds.empty()) return result;
    result.tau_eff = steps.temperature;
    result.too_cold = !can_divide<T>(steps.temperature);
    if (result.too_cold) return result;
    result.t_alpha = static_cast<double>(thresholds[0]);
    result.t_beta = static_cast<double>(thresholds[1]);
    result.band_negatives = static_cast<std::int64_t>(whole.band_negatives);
  }
  result.valid = true;
  result.value = whole.weighted / whole.mass;
  result.contributed = whole.contributed, result.squared = whole.squared;
  return result;
}

template <typename T>
ClassResult mean_rate(const ClassPool<T>& pool, const RateRule& rule, T* gradient) {
  const std::vector<T> apart = rule.quantile ? std::vector<T>() : rate_reference(pool, rule);
  const std::vector<T>& reference = rule.quantile ? pool.scores : apart;
  std::vector<T> thresholds;
  if (!reference.empty())
    thresholds = select_quantiles(reference, rate_probabilities<T>(rule), rule.interpolation);
  RateSlopes own;
  const RateSums sums = rate_sums(pool, rule, thresholds, gradient ? &own : nullptr);
  const ClassResult result = rate_result(sums, rule, thresholds, pool.temperature);
  if (result.valid)
    for (std::size_t i = 0; i < own.rows.size(); ++i)
      gradient[own.rows[i]] -= static_cast<T>(own.slopes[i] / sums.mass);
  return result;
}

template <typename T>
ClassResult partial_auc(const ClassPool<T>& pool, const Band& band, T* gradient) {
  const RateRule rule{.quantile = {}, .band = band, .interpolation = band.interpolation};
  if (!band.pairwise) return mean_rate(pool, rule, gradient);
  const Rows<T> positives(pool, [&](std::size_t row) {
    return (pool.positive[row] != 0) & (!band.live_only | (static_cast<std::int64_t>(row) < pool.live));
  });
  bool iid_negatives = false;
  for (std::size_t row = 0; row < pool.scores.size(); ++row)
    iid_negatives |= (pool.iid[row] != 0) & (pool.positive[row] == 0);
  ClassResult result;
  result.numerator_rows = static_cast<double>(positives.size());
  const double whole = mass(pool, positives);
  if (positives.size() == 0 || !iid_negatives || whole == 0) {
    result.missing = positives.size() == 0 ? kNoPositive : !iid_negatives ? kNoNegative : kNoWeight;
    return result;
  }
  const std::vector<T> at =
      select_quantiles(rate_reference(pool, rule), rate_probabilities<T>(rule), band.interpolation);
  const T t_alpha = at[0], t_beta = at[1], scale = at[2] - at[3];
  result.missing = kNoDispersion;
  if (static_cast<double>(scale) <= kScaleEpsilon) return result;
  const double temperature = static_cast<double>(static_cast<T>(pool.temperature) * scale);
  result.tau_eff = temperature;
  result.too_cold = !can_divide<T>(temperature);
  if (result.too_cold) return result;
  const Rows<T> in_band(pool, [&](std::size_t row) {
    return (pool.positive[row] == 0) & (pool.scores[row] >= t_beta) & (pool.scores[row] <= t_alpha);
  });
  for (const auto row : in_band.index) result.band_negatives += pool.iid[row];
  if (in_band.size() == 0) {
    result.band_negatives = 0;
    result.missing = "a negative in the band";
    return result;
  }
  result.valid = true;
  result.t_alpha = static_cast<double>(t_alpha);
  result.t_beta = static_cast<double>(t_beta);
  pairwise(pool, positives, in_band, temperature, whole, result, gradient);
  return result;
}

template ClassResult smooth_ap(const ClassPool<float>&, float*);
template ClassResult smooth_ap(const ClassPool<double>&, double*);
template ClassResult partial_auc(const ClassPool<float>&, const Band&, float*);
template ClassResult mean_rate(const ClassPool<float>&, const RateRule&, float*);
template std::vector<float> rate_reference(const ClassPool<float>&, const RateRule&);
template std::vector<float> rate_probabilities(const RateRule&);
template RateSums rate_sums(const ClassPool<float>&, const RateRule&, const std::vector<float>&, RateSlopes*);
template ClassResult rate_result(const RateSums&, const RateRule&, const std::vector<float>&, double);
template ClassResult partial_auc(const ClassPool<double>&, const Band&, double*);
template ClassResult mean_rate(const ClassPool<double>&, const RateRule&, double*);
template std::vector<double> rate_reference(const ClassPool<double>&, const RateRule&);
template std::vector<double> rate_probabilities(const RateRule&);
template RateSums rate_sums(const ClassPool<double>&, const RateRule&, const std::vector<double>&,
                            RateSlopes*);
template ClassResult rate_result(const RateSums&, const RateRule&, const std::vector<double>&, double);

}  // namespace isograd
