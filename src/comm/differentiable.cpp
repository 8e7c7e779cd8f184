#include "isograd/group.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <numeric>
#include <utility>

#include "comm/autograd.hpp"

namespace isograd {
namespace {

// A collective and its dual, as the node's saved state.
struct Duals final : torch::CustomClassHolder {
  Duals(TensorMap a, TensorMap b) : forward(std::move(a)), backward(std::move(b)) {}
  TensorMap forward, backward;
};

struct Collective final : torch::autograd::Function<Collective> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& /*anchor*/, const c10::intrusive_ptr<Duals>& duals) {
    context->saved_data["duals"] = c10::IValue::make_capsule(duals);
    return duals->forward(input);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["duals"].toCapsule();
    return {static_cast<Duals*>(capsule.get())->backward(gradients[0]), {}, {}};
  }
};

}  // namespace

namespace differentiable {

const at::Tensor& anchor() {
  static const at::Tensor* leaf =
      new at::Tensor(at::zeros({0}).requires_grad_());  // never destroyed: threads may outlive statics
  return *leaf;
}

}  // namespace differentiable

at::Tensor apply_map(const at::Tensor& input, TensorMap forward, TensorMap backward) {
  const bool has_gradient = at::GradMode::is_enabled() && (at::isFloatingType(input.scalar_type()) ||
                                                           at::isComplexType(input.scalar_type()));
  if (!has_gradient) return forward(input.detach());
  // Other ranks need this rank in the backward even if nothing here needs a gradient.
  return Collective::apply(input, differentiable::anchor(),
                           c10::make_intrusive<Duals>(std::move(forward), std::move(backward)));
}

}  // namespace isograd

namespace isograd::differentiable {
namespace {

at::Tensor copy_of(const at::Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

std::vector<std::int64_t> with_rows(std::int64_t rows, at::IntArrayRef rest) {
  std::vector<std::int64_t> sizes{rows};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return sizes;
}

}  // namespace

at::Tensor all_reduce(Group group, const at::Tensor& input) {
  const auto sum = [group](const at::Tensor& x) mutable {
    at::Tensor result = copy_of(x);
    group.all_reduce(result);
    return result;
  };
  return apply_map(input, sum, [group](const at::Tensor& gradient) { return all_reduce(group, gradient); });
}

at::Tensor reduce(Group group, const at::Tensor& input, int root) {
  const auto sum = [group, root](const at::Tensor& x) mutable {
    at::Tensor result = copy_of(x);
    group.reduce(result, root);
    return group.rank() == root ? result : result.zero_();
  };
  return apply_map(input, sum,
                   [group, root](const at::Tensor& gradient) { return broadcast(group, gradient, root); });
}

at::Tensor broadcast(Group group, const at::Tensor& input, int root) {
  const auto send_all = [group, root](const at::Tensor& x) mutable {
    at::Tensor result = copy_of(x);
    group.broadcast(result, root);
    return result;
  };
  return apply_map(input, send_all,
                   [group, root](const at::Tensor& gradient) { return reduce(group, gradient, root); });
}

at::Tensor all_gather(Group group, const at::Tensor& input) {
  const auto stack = [group](const at::Tensor& x) mutable { return group.all_gather(x); };
  return apply_map(input, stack, [group](const at::Tensor& gradient) {
    return reduce_scatter(group, gradient).squeeze(0);  // one row for each rank
  });
}

at::Tensor all_gather_rows(Group group, const at::Tensor& input) {
  const at::Tensor all = group.all_gather(at::full({1}, input.dim() > 0 ? input.size(0) : 0, at::kLong));
  const std::int64_t* rows = all.data_ptr<std::int64_t>();
  return all_gather_rows(group, input, Group::Rows(rows, rows + all.numel()));
}

at::Tensor all_gather_rows(Group group, const at::Tensor& input, const Group::Rows& rows) {
  const auto join = [group, rows](const at::Tensor& x) mutable {
    const auto total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    at::Tensor result = at::empty(with_rows(total, x.sizes().slice(1)), x.options());
    group.all_gather_rows_async(result, x, rows).wait();
    return result;
  };
  return apply_map(input, join, [group, rows](const at::Tensor& gradient) {
    return reduce_scatter(group, gradient, rows);
  });
}

at::Tensor reduce_scatter(Group group, const at::Tensor& input, const Group::Rows& rows) {
  const Group::Rows parts = rows.empty() ? split_rows(input.size(0), group.size()) : rows;
  const auto sum = [group, parts](const at::Tensor& x) mutable {
    const auto own = parts.at(static_cast<std::size_t>(group.rank()));
    at::Tensor result = at::empty(with_rows(own, x.sizes().slice(1)), x.options());
    group.reduce_scatter_async(result, x, ReduceOp::kSum, parts).wait();
    return result;
  };
  return apply_map(input, sum, [group, parts](const at::Tensor& gradient) {
    return all_gather_rows(group, gradient, parts);
  });
}

at::Tensor gather(Group group, const at::Tensor& input, int root) {
  const auto stack = [group, root](const at::Tensor& x) mutable {
    const at::Tensor all = group.gather(x, root);
    return all.defined() ? all : at::empty(with_rows(0, x.sizes()), x.options());
  };
  return apply_map(input, stack,
                   [group, root](const at::Tensor& gradient) { return scatter(group, gradient, root); });
}

at::Tensor scatter(Group group, const at::Tensor& input, int root) {
  const auto distribute = [group, root](const at::Tensor& x) mutable {
    at::Tensor result = at::empty(x.sizes().slice(1), x.options());
    group.scatter(result, x, root);
    return result;
  };
  const auto rows = input.size(0);
  return apply_map(input, distribute, [group, root, rows](const at::Tensor& gradient) {
    const at::Tensor all = gather(group, gradient, root);
    // The zeros are appended, so that a second backward still reaches the gather.
    return all.size(0) == rows ? all : at::cat({all, gradient.new_zeros(with_rows(rows, gradient.sizes()))});
  });
}

at::Tensor all_to_all(Group group, const at::Tensor& input, const Group::Rows& output_rows,
                      const Group::Rows& input_rows) {
  const auto exchange = [group, output_rows, input_rows](const at::Tensor& x) mutable {
    return output_rows.empty() && input_rows.empty() ? group.all_to_all(x)
                                                     : group.all_to_all(x, output_rows, input_rows);
  };
  return apply_map(input, exchange, [group, output_rows, input_rows](const at::Tensor& gradient) {
    return all_to_all(group, gradient, input_rows, output_rows);
  });
}

at::Tensor send(Group group, const at::Tensor& input, int to, int tag) {
  const auto hand_over = [group, to, tag](const at::Tensor& x) mutable {
    group.send(x, to, tag);
    return at::empty({0}, x.options());
  };
  return apply_map(input, hand_over,
                   [group, sizes = input.sizes().vec(), to, tag](const at::Tensor& gradient) {
                     // The gradient has no elements. Only the graph of a second backward goes through it.
                     return recv(group, gradient.sum().expand(sizes), to, tag);
                   });
}

at::Tensor recv(Group group, const at::Tensor& like, int from, int tag) {
  const auto take = [group, from, tag](const at::Tensor& x) mutable {
    at::Tensor result = at::empty(x.sizes(), x.options());
    group.recv(result, from, tag);
    return result;
  };
  return apply_map(like, take, [group, from, tag](const at::Tensor& gradient) {
    // The result has no elements. Adding it keeps the graph of a second backward.
    return gradient.new_zeros(gradient.sizes()) + send(group, gradient, from, tag).sum();
  });
}

// ---- a parameter's gradient in its final memory ---------------------------------------------------------

namespace impl = torch::autograd::impl;

namespace {
thread_local const PlacesOfReturnedGradients::Take* places_of_returned = nullptr;
}

PlacesOfReturnedGradients::PlacesOfReturnedGradients(Take take)
    : take_(std::move(take)), before_(std::exchange(places_of_returned, &take_)) {}
PlacesOfReturnedGradients::~PlacesOfReturnedGradients() { places_of_returned = before_; }

GradientPlace::Taken take_gradient_place(const at::Tensor& parameter, at::ScalarType type) {
  if (!parameter.defined() || !parameter.is_leaf() || !parameter.requires_grad()) return {};
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (!asked) return {};
  const bool returned = !asked->empty();  // autograd::grad() lists the nodes whose gradients it returns
  auto* place = dynamic_cast<GradientPlace*>(impl::post_acc_grad_hooks(parameter).get());
  if (returned ? !places_of_returned : !place) return {};
  const auto node = impl::try_get_grad_accumulator(parameter);
  if (!node || !node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty())
    return {};
  return returned ? (*places_of_returned)(parameter, type) : place->take(parameter, type);
}

at::Tensor gradient_in(const at::Tensor& memory, const at::Tensor& parameter) {
  if (memory.scalar_type() == parameter.scalar_type()) return memory;
  return at::empty(parameter.sizes(), parameter.options().layout(at::kSparse));
}

}  // namespace isograd::differentiable
