// The norm of a gradient that ranks of combined axes hold, in stages, as trainers with several axes take it:
// the naive twin of the norm from owners (include/isograd/optimizer.hpp). With sums where replicas are often
// averaged, and with edp in the place of dp_shard for experts, along which alone there are copies of them.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <string>

#include "isograd/parameters.hpp"

namespace isograd::hybrid {

inline double summed(double value, const Mesh& mesh, const AxisSet& along) {
  Group group = mesh.along(along);
  at::Tensor message = at::full({1}, value, at::kDouble);
  if (group.size() > 1) group.all_reduce(message);
  return message.item<double>();
}

// The squares of this rank's shard of one gradient, which all ranks along `shards` have whole.
inline double squares_of_shard(const at::Tensor& gradient, const Mesh& mesh, const AxisSet& shards) {
  const Range own = owned_slice(gradient.numel(), mesh.place(shards), mesh.size(shards), 1);
  return gradient.flatten().narrow(0, own.begin, own.size()).to(at::kDouble).square().sum().item<double>();
}

// `gradients`: by name, this rank's parts, summed. `placed`: null where every rank has copies of everything.
// Collective over the mesh.
inline double staged_norm(const Mesh& mesh, const Layout* placed,
                          const std::map<std::string, at::Tensor>& gradients) {
  AxisSet shards = data_axes(mesh.grid());
  shards.erase("dp_replicate");  // replicas hold the same: nothing is added up over them
  if (!placed) {
    double squares = 0;
    for (const auto& [name, gradient] : gradients) squares += squares_of_shard(gradient, mesh, shards);
    return std::sqrt(summed(squares, mesh, shards));
  }

  // (1) Each parameter's shard on this rank, dense ones and experts apart, by the axes that tp cuts them
  // along. What two stages hold counts in the first of them.
  std::map<AxisSet, double> dense, experts;
  const bool has_stages = mesh.grid().has(kStageAxis);
  for (const PlacedParameter& each : placed->parameters()) {
    AxisSet cut;
    bool is_expert = false;
    for (const Cut& one : each.placement.cuts) {
      if (one.axis == "ep")
        is_expert = true;
      else
        cut.insert(one.axis);
    }
    double& squares = (is_expert ? experts : dense)[cut];
    const auto& stages = each.placement.stages;
    if (has_stages && !stages.empty() && stages.front() != mesh.place({kStageAxis})) continue;
    if (const auto own = gradients.find(each.name); own != gradients.end())
      squares += squares_of_shard(own->second, mesh, is_expert ? AxisSet{"edp"} : shards);
  }
  // (2) Over tp where it cuts a parameter; what it copies is the same on all of its ranks.
  const auto over_tp = [&](const std::map<AxisSet, double>& parts) {
    double sum = 0;
    for (const auto& [cut, squares] : parts) sum += cut.empty() ? squares : summed(squares, mesh, cut);
    return sum;
  };
  // (3) Dense parameters over their shards; experts over theirs, then over the ranks that have other experts.
  double all = summed(over_tp(dense), mesh, shards);
  if (!experts.empty()) all += summed(summed(over_tp(experts), mesh, {"edp"}), mesh, {"ep"});
  // (4) Over the stages.
  return std::sqrt(has_stages ? summed(all, mesh, {kStageAxis}) : all);
}

inline double assembled_norm(const std::vector<at::Tensor>& gradients) {
  double squares = 0;
  for (const at::Tensor& gradient : gradients)
    squares += gradient.to(at::kDouble).square().sum().item<double>();
  return std::sqrt(squares);
}

}  // namespace isograd::hybrid
