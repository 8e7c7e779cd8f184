#include "loss/ranking/cores.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/sigmoid.hpp"
#include "loss/ranking/quantile.hpp"

namespace isograd {
namespace {

constexpr double kScaleEpsilon = 1e-12;  // a dispersion up to here calibrates no temperature

// Positives or negatives by themselves, those of this step first, as in the pool.
template <typename T>
struct Rows {
  std::vector<T> scores;
  std::vector<std::int64_t> index;  // in the pool
  std::int64_t live = 0;            // the first so many are of this step
  std::int64_t size() const { return static_cast<std::int64_t>(index.size()); }

  void add(const ClassPool<T>& pool, std::int64_t row) {
    scores.push_back(pool.scores[static_cast<std::size_t>(row)]);
    index.push_back(row);
    if (row < pool.live) ++live;
  }
};

double sigmoid(double z) {
  return z < 0 ? std::exp(z) / (1 + std::exp(z)) : 1 / (1 + std::exp(-z));
}

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

}  // namespace

// With d_kj = σ(1 − σ)/τ, w_kj = (a_k − p_k)/a_k² for a positive j and −p_k/a_k² for a negative one:
// ∂AP/∂s_j = Σ_k ω_k w_kj d_kj / Ω − [j positive] ω_j Σ_m w_jm d_jm / Ω. The pair j = k stands in both sums
// and cancels.
template <typename T>
ClassResult smooth_ap(const ClassPool<T>& pool, T* gradient) {
  Rows<T> positives, negatives;
  for (std::int64_t row = 0; row < pool.rows(); ++row)
    (pool.positive[static_cast<std::size_t>(row)] ? positives : negatives).add(pool, row);
  ClassResult result;
  result.numerator_rows = static_cast<double>(positives.size());
  const double whole = mass(pool, positives);
  if (positives.size() == 0 || negatives.size() == 0 || whole == 0) return result;
  result.valid = true;

  std::vector<T> anchors;
  std::vector<std::int64_t> anchor_rows;
  for (std::int64_t k = pool.share; k < positives.size(); k += pool.shares) {
    anchors.push_back(positives.scores[static_cast<std::size_t>(k)]);
    anchor_rows.push_back(positives.index[static_cast<std::size_t>(k)]);
  }
  const auto count = static_cast<std::int64_t>(anchors.size());
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
    gradient[positives.index[static_cast<std::size_t>(i)]] -=
        static_cast<T>(of_positives[static_cast<std::size_t>(i)]);
  for (std::int64_t i = 0; i < negatives.live; ++i)
    gradient[negatives.index[static_cast<std::size_t>(i)]] -=
        static_cast<T>(of_negatives[static_cast<std::size_t>(i)]);
  return result;
}

template <typename T>
ClassResult recall_at_quantile(const ClassPool<T>& pool, double quantile, Interpolation interpolation,
                               T* gradient) {
  Rows<T> positives;
  for (std::int64_t row = 0; row < pool.rows(); ++row)
    if (pool.positive[static_cast<std::size_t>(row)]) positives.add(pool, row);
  ClassResult result;
  result.numerator_rows = static_cast<double>(positives.size());
  const double whole = mass(pool, positives);
  if (positives.size() == 0 || whole == 0) return result;
  result.valid = true;
  std::vector<T> scores = pool.scores;
  const double threshold =
      static_cast<double>(select_quantiles(scores, {static_cast<T>(1 - quantile)}, interpolation)[0]);
  for (std::int64_t i = 0; i < positives.size(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double z = (static_cast<double>(positives.scores[at]) - threshold) / pool.temperature;
    const double share = pool.weight(positives.index[at]) / whole;
    contribute(result, sigmoid(z), share);
    if (gradient && i < positives.live)
      gradient[positives.index[at]] -= static_cast<T>(share * sigmoid(z) * sigmoid(-z) / pool.temperature);
  }
  return result;
}

namespace {

// k-th of the band's knots in T, as at::linspace counts them: from both ends.
template <typename T>
T knot(const Band& band, std::int64_t k) {
  const T begin = static_cast<T>(band.alpha), end = static_cast<T>(band.beta);
  const T step = (end - begin) / static_cast<T>(band.knots - 1);
  return k < band.knots / 2 ? begin + step * static_cast<T>(k)
                            : end - step * static_cast<T>(band.knots - k - 1);
}

template <typename T>
void trapezoid(const ClassPool<T>& pool, const Rows<T>& positives, const std::vector<T>& thresholds,
               double temperature, double whole, ClassResult& result, T* gradient) {
  const auto knots = thresholds.size();
  const double inner = 1 / static_cast<double>(knots - 1);
  for (std::size_t i = 0; i < positives.scores.size(); ++i) {
    const std::int64_t row = positives.index[i];
    const double share = pool.weight(row) / whole;
    double area = 0, slope = 0;
    for (std::size_t k = 0; k < knots; ++k) {
      const double weight = k == 0 || k + 1 == knots ? 0.5 * inner : inner;
      const double z =
          (static_cast<double>(positives.scores[i]) - static_cast<double>(thresholds[k])) / temperature;
      area += weight * sigmoid(z);
      slope += weight * sigmoid(z) * sigmoid(-z) / temperature;
    }
    contribute(result, area, share);
    if (gradient && row < pool.live) gradient[row] -= static_cast<T>(share * slope);
  }
}

// Dealt out by positives. σ((s_i − s_j)/τ): the kernel's z with the sign turned.
template <typename T>
void pairwise(const ClassPool<T>& pool, const Rows<T>& positives, const Rows<T>& band, double temperature,
              double whole, ClassResult& result, T* gradient) {
  std::vector<T> anchors, weights;
  std::vector<std::int64_t> rows;
  const auto pairs = static_cast<double>(band.size());
  for (std::int64_t i = pool.share; i < positives.size(); i += pool.shares) {
    rows.push_back(positives.index[static_cast<std::size_t>(i)]);
    anchors.push_back(positives.scores[static_cast<std::size_t>(i)]);
    weights.push_back(static_cast<T>(pool.weight(rows.back()) / whole / pairs / temperature));
  }
  const auto count = static_cast<std::int64_t>(anchors.size());
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
  for (std::int64_t j = 0; j < band.live; ++j)
    gradient[band.index[static_cast<std::size_t>(j)]] += static_cast<T>(of_band[static_cast<std::size_t>(j)]);
}

}  // namespace

template <typename T>
ClassResult partial_auc(const ClassPool<T>& pool, const Band& band, T* gradient) {
  Rows<T> positives;
  std::vector<T> reference;
  std::int64_t iid_negatives = 0;
  for (std::int64_t row = 0; row < pool.rows(); ++row) {
    const auto at = static_cast<std::size_t>(row);
    const bool positive = pool.positive[at] != 0, iid = pool.iid[at] != 0;
    if (positive && (!band.live_only || row < pool.live)) positives.add(pool, row);
    if (iid && !positive) ++iid_negatives;
    if (iid && (band.population || !positive)) reference.push_back(pool.scores[at]);
  }
  ClassResult result;
  result.numerator_rows = static_cast<double>(positives.size());
  const double whole = mass(pool, positives);
  if (positives.size() == 0 || iid_negatives == 0 || whole == 0) return result;

  std::vector<T> q = {static_cast<T>(1 - band.alpha), static_cast<T>(1 - band.beta), T(0.75), T(0.25)};
  if (!band.pairwise)
    for (std::int64_t k = 0; k < band.knots; ++k) q.push_back(T(1) - knot<T>(band, k));
  const std::vector<T> at = select_quantiles(reference, q, band.interpolation);
  const T t_alpha = at[0], t_beta = at[1];
  const T scale = band.by_band ? t_alpha - t_beta : at[2] - at[3];
  if (static_cast<double>(scale) <= kScaleEpsilon) {
    result.flat = true;
    return result;
  }
  const double temperature = static_cast<double>(static_cast<T>(pool.temperature) * scale);
  Rows<T> in_band;
  for (std::int64_t row = 0; row < pool.rows(); ++row) {
    const auto i = static_cast<std::size_t>(row);
    if (pool.positive[i] || !(pool.scores[i] >= t_beta && pool.scores[i] <= t_alpha)) continue;
    if (pool.iid[i]) ++result.band_negatives;
    if (band.pairwise) in_band.add(pool, row);
  }
  if (band.pairwise && in_band.size() == 0) {
    result.band_negatives = 0;
    return result;
  }
  result.valid = true;
  result.t_alpha = static_cast<double>(t_alpha);
  result.t_beta = static_cast<double>(t_beta);
  result.tau_eff = temperature;
  if (band.pairwise)
    pairwise(pool, positives, in_band, temperature, whole, result, gradient);
  else
    trapezoid(pool, positives, {at.begin() + 4, at.end()}, temperature, whole, result, gradient);
  return result;
}

template ClassResult smooth_ap(const ClassPool<float>&, float*);
template ClassResult smooth_ap(const ClassPool<double>&, double*);
template ClassResult recall_at_quantile(const ClassPool<float>&, double, Interpolation, float*);
template ClassResult recall_at_quantile(const ClassPool<double>&, double, Interpolation, double*);
template ClassResult partial_auc(const ClassPool<float>&, const Band&, float*);
template ClassResult partial_auc(const ClassPool<double>&, const Band&, double*);

}  // namespace isograd
