// Layout: the parameters of a whole model, each with its placement on a mesh, and everything that follows
// from that: gradients are summed, whole tensors assembled, copies compared and elements owned by it and by
// nothing else.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "isograd/mesh.hpp"
#include "isograd/placement.hpp"

namespace isograd {

// A parameter, and what of it is this rank's.
struct PlacedParameter {
  std::string name;
  Placement placement;
  AxisSet copies;                         // of the placement
  std::vector<std::int64_t> local_shape;  // {0} where this rank does not hold it
  bool held = true;
  Range owned;  // of the local elements
};

// The same catalogue on every rank: all parameters in the whole model's order, those of other stages too.
//
// Tensors of a parameter (its values, gradient, optimizer state) are given and returned as local ones, of
// local_shape and any type, and lists of them in the order of parameters(). Where a rank does not hold the
// parameter its tensor is an empty one of that type.
class Layout {
 public:
  using Named = std::vector<std::pair<std::string, Placement>>;

  // Collective over mesh.all(), before a model is touched. ConfigError on a placement that check_placement()
  // refuses, on a name used twice, and, on every rank, on the first parameter whose placement differs between
  // ranks.
  Layout(Mesh mesh, Named placements);

  const Mesh& mesh() const { return mesh_; }
  const std::vector<PlacedParameter>& parameters() const { return parameters_; }
  Named placements() const;                                         // in the order of parameters()
  const PlacedParameter& parameter(const std::string& name) const;  // ConfigError: no such parameter

  // The rank's part of a whole tensor: a copy.
  at::Tensor local(const std::string& name, const at::Tensor& whole) const;

  // The whole tensor, assembled along the cuts and fetched from the first stage that holds it. Collective
  // over mesh.all(); every rank gets it.
  at::Tensor whole(const std::string& name, const at::Tensor& local) const;

  // Adds up each gradient over the ranks along `summed`, in place. What comes out is the rank's part of the
  // whole gradient. Collective over mesh.all().
  void sum_gradients(const std::vector<at::Tensor>& gradients) const;

  // PeerError, on every rank, that names the first parameter of whose copies some differ in a bit, and those
  // ranks. `what` the tensors are ("gradient") stands in it. Collective over mesh.all().
  void check_copies(const std::vector<at::Tensor>& tensors, const std::string& what) const;

 private:
  void check_local(const PlacedParameter& parameter, const at::Tensor& tensor) const;

  Mesh mesh_;
  std::vector<PlacedParameter> parameters_;
};

// Of parameters that every rank has whole.
Layout::Named whole_placements(const std::vector<std::pair<std::string, at::Tensor>>& named,
                               const Grid& grid);

}  // namespace isograd
