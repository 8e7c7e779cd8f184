// Requests for samples, as the sampler takes them, and its answers, as the wire has them.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "serve/models/fixed_weights.hpp"

namespace isograd::serve {

class Sampling {
 public:
  // As Engine::submit().
  void submit(const std::string& id, std::shared_ptr<const FixedWeights> weights, const Sample& request,
              std::uint64_t seed);
  // One pass over one model; models with requests take turns.
  std::vector<Engine::Sampled> pass();
  bool busy() const { return !turns_.empty(); }

 private:
  struct Waiting {
    std::shared_ptr<const FixedWeights> weights;
    Sample request;
  };
  std::map<std::string, Waiting> waiting_;
  std::deque<SampledModel*> turns_;  // of those that wait, each once
};

}  // namespace isograd::serve
