// The losses of one class over a pool of scores: values, and gradients in closed form. No torch, no ranks but
// a share of the work.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace isograd {

enum class Interpolation;

// The lowest that a loss may be given, whatever its scores' type: fp32 can still divide by it.
inline constexpr double kLowestTemperature = std::numeric_limits<float>::min();
inline constexpr const char* kTemperatures = "a finite number, at least 1.2e-38";
inline bool is_temperature(double value) { return value >= kLowestTemperature && std::isfinite(value); }

// One class's view of the pool. Rows of this step come first, the queue's after them.
template <typename T>
struct ClassPool {
  std::vector<T> scores;               // [M], finite
  std::vector<std::uint8_t> positive;  // [M]
  std::vector<std::uint8_t> iid;       // [M]
  const double* weights = nullptr;     // [M]; null: 1
  std::int64_t live = 0;               // rows of this step
  int share = 0, shares = 1;           // which of the anchors this rank evaluates: k ≡ share (mod shares)
  double temperature = 0;

  std::int64_t rows() const { return std::ssize(scores); }
  double weight(std::int64_t row) const { return weights ? weights[row] : 1; }
};

struct ClassResult {
  bool valid = false;
  const char* missing = "";  // what a class that is not valid lacks
  bool too_cold = false;     // tau_eff is no number that T can divide by
  // Added over the shares these are the whole.
  double value = 0;                     // mean contribution of the positives: 1 − loss
  double contributed = 0, squared = 0;  // Σ of the contributions and of their squares, unweighted
  // The same on every share.
  double numerator_rows = 0;
  double t_alpha = std::numeric_limits<double>::quiet_NaN(), t_beta = t_alpha, tau_eff = t_alpha;
  std::int64_t band_negatives = 0;
};

// Each adds its share of ∂loss/∂score to gradient [live]; null: not wanted.
template <typename T>
ClassResult smooth_ap(const ClassPool<T>& pool, T* gradient);

struct Band {
  double alpha, beta;
  bool pairwise, by_band, live_only, population;
  std::int64_t knots;
  Interpolation interpolation;
};

// The losses that need of the other rows a few quantiles alone: mean true-positive rates at thresholds.
struct RateRule {
  std::optional<double> quantile{};  // of all rows, for recall; none: the trapezoid over `band`
  Band band{};
  Interpolation interpolation{};
};

// Pairs, or the trapezoid.
template <typename T>
ClassResult partial_auc(const ClassPool<T>& pool, const Band& band, T* gradient);
template <typename T>
ClassResult mean_rate(const ClassPool<T>& pool, const RateRule& rule, T* gradient);

// One of the losses: what it computes of a class, and what else its base needs to know.
struct RankingCore {
  template <typename Compute>
  explicit RankingCore(Compute each) : single(each), exact(each) {}

  std::function<ClassResult(const ClassPool<float>&, float*)> single;
  std::function<ClassResult(const ClassPool<double>&, double*)> exact;
  std::uint64_t fingerprint = 1;    // hash of its own options
  bool shards_work = false;         // over the ranks
  std::optional<RateRule> rates{};  // of a loss that needs only thresholds
};

// Such a loss in steps, so that the rows may lie on several ranks: the scores that thresholds are quantiles
// of, and which quantiles; sums over rows, which add up over ranks; the result.
template <typename T>
std::vector<T> rate_reference(const ClassPool<T>& pool, const RateRule& rule);
template <typename T>
std::vector<T> rate_probabilities(const RateRule& rule);

struct RateSums {
  static constexpr std::int64_t kCount = 7;
  double weighted = 0, mass = 0;  // Σ ω·rate and Σ ω over the numerator's positives
  double contributed = 0, squared = 0, positives = 0;
  double iid_negatives = 0, band_negatives = 0;
};
// Gradient of Σ ω·rate by the scores of this step's rows; 0 for rows that it leaves out.
struct RateSlopes {
  std::vector<std::int64_t> rows;
  std::vector<double> slopes;
};
// `thresholds`: as rate_probabilities; empty: no row to be a quantile of. slopes null: not wanted.
template <typename T>
RateSums rate_sums(const ClassPool<T>& pool, const RateRule& rule, const std::vector<T>& thresholds,
                   RateSlopes* slopes);
template <typename T>
ClassResult rate_result(const RateSums& whole, const RateRule& rule, const std::vector<T>& thresholds,
                        double temperature);

}  // namespace isograd
