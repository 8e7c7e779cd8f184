// The losses of one class over a pool of scores: values, and gradients in closed form. No torch, no ranks but
// a share of the work.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace isograd {

enum class Interpolation;

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

  std::int64_t rows() const { return static_cast<std::int64_t>(scores.size()); }
  double weight(std::int64_t row) const { return weights ? weights[row] : 1; }
};

struct ClassResult {
  bool valid = false;
  bool flat = false;  // invalid because the reference scores have no dispersion
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

template <typename T>
ClassResult recall_at_quantile(const ClassPool<T>& pool, double quantile, Interpolation interpolation,
                               T* gradient);

struct Band {
  double alpha, beta;
  bool pairwise, by_band, live_only, population;
  std::int64_t knots;
  Interpolation interpolation;
};
template <typename T>
ClassResult partial_auc(const ClassPool<T>& pool, const Band& band, T* gradient);

}  // namespace isograd
