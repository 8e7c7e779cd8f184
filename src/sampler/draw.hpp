// One position's distribution over the vocabulary, and draws from it.
#pragma once

#include <cstdint>
#include <vector>

namespace isograd {

struct Draw {
  double temperature = 1;  // 0: the likeliest token
  std::int64_t top_k = 0;  // 0: off
  double top_p = 1;
};

class TokenDistribution {
 public:
  // softmax(logits / temperature) in fp64; at temperature 0 softmax(logits).
  template <typename T>
  TokenDistribution(const T* logits, std::int64_t size, double temperature) : values_(logits, logits + size) {
    compute(temperature);
  }
  bool finite() const { return finite_; }  // false: NaN, +∞, or no finite logit; nothing else may be asked
  double log_probability(std::int64_t token) const;
  // The k likeliest tokens, the likeliest first; equal ones by their number.
  std::vector<std::int64_t> likeliest(std::int64_t k) const;
  // The token whose part of [0, 1) holds `uniform`, among the top_k likeliest and of those the fewest that
  // together have top_p. Parts are in the order of tokens.
  std::int64_t draw(const Draw& how, double uniform) const;

 private:
  void compute(double temperature);
  bool before(std::int64_t a, std::int64_t b) const;  // a is likelier, or as likely and smaller
  // The tokens that top_k and top_p leave, ascending.
  std::vector<std::int64_t> kept(const Draw& how) const;

  std::vector<double> values_;   // (logit − largest) / temperature
  std::vector<double> weights_;  // their exponentials
  double total_ = 0;
  std::int64_t best_ = 0;
  bool finite_ = false;
};

}  // namespace isograd
