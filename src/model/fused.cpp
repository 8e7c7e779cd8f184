#include "model/fused.hpp"

#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "kernels/gpu/kernels.hpp"
#include "kernels/matmul/product.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "loss/checks.hpp"
#include "model/rows.hpp"

namespace isograd {
namespace {

void refuse_second_derivative() {
  ISOGRAD_INVARIANT(!at::GradMode::is_enabled(), "a second derivative of the model, which is not supported");
}

bool has_rows(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == at::kDouble || x.scalar_type() == at::kFloat ||
                        x.scalar_type() == at::kBFloat16);
}

// Calls work.template operator()<T, C>(begin, end) for ranges of [0, count) on LibTorch's threads, with the
// types of the rows' kernels: stored and computed in.
template <typename Work>
void for_ranges(const at::Tensor& x, std::int64_t count, std::int64_t grain, const Work& work) {
  parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
    if (x.scalar_type() == at::kDouble)
      work.template operator()<double, double>(begin, end);
    else if (x.scalar_type() == at::kFloat)
      work.template operator()<float, float>(begin, end);
    else
      work.template operator()<kernels::Bfloat16, float>(begin, end);
  });
}

template <typename T>
T* data(const at::Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data_ptr()) : nullptr;
}

constexpr std::int64_t kChunk = 64;  // rows whose weight gradients are summed together, whatever the threads

bool has_norm(const at::Tensor& x, const at::Tensor& weight) {
  return has_rows(x) || (x.scalar_type() == weight.scalar_type() && gpu::has_norm(x, weight.numel()));
}

// y and the rows' scales.
std::pair<at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& weight,
                                               double epsilon) {
  if (!x.is_cpu()) return gpu::rms_norm(x, weight, epsilon);
  const std::int64_t width = weight.numel(), rows = x.numel() / width;
  at::Tensor y = at::empty(x.sizes(), x.options()),
             scale = at::empty({rows}, x.options().dtype(computing_type(x.scalar_type())));
  for_ranges(x, rows, kChunk, [&]<typename T, typename C>(std::int64_t begin, std::int64_t end) {
    rows::rms_norm(data<T>(x) + begin * width, data<T>(weight), end - begin, width, epsilon,
                   data<T>(y) + begin * width, data<C>(scale) + begin);
  });
  return {y, scale};
}

variable_list norm_backward(AutogradContext* ctx, const at::Tensor& gradient, const at::Tensor& residual) {
  refuse_second_derivative();
  const auto saved = ctx->get_saved_variables();
  const at::Tensor &x = saved[0], &weight = saved[1], &scale = saved[2];
  if (!gradient.defined()) return {residual, at::Tensor(), at::Tensor()};
  const std::int64_t width = weight.numel(), rows = x.numel() / width, chunks = (rows + kChunk - 1) / kChunk;
  const at::Tensor dy = gradient.contiguous(), kept = residual.defined() ? residual.contiguous() : residual;
  if (!x.is_cpu()) {
    const auto [dx, of_weight] = gpu::rms_norm_backward(dy, x, weight, scale, kept, ctx->needs_input_grad(1));
    return {dx, of_weight, at::Tensor()};
  }
  at::Tensor dx, sums;
  if (ctx->needs_input_grad(0)) dx = at::empty(x.sizes(), x.options());
  if (ctx->needs_input_grad(1)) sums = at::zeros({chunks, width}, scale.options());
  for_ranges(x, chunks, 1, [&]<typename T, typename C>(std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = chunk * kChunk, count = std::min(kChunk, rows - begin), at = begin * width;
      rows::rms_norm_backward(data<T>(dy) + at, data<T>(x) + at, data<T>(weight), data<C>(scale) + begin,
                              kept.defined() ? data<T>(kept) + at : nullptr, count, width,
                              dx.defined() ? data<T>(dx) + at : nullptr,
                              sums.defined() ? data<C>(sums) + chunk * width : nullptr);
    }
  });
  return {dx, sums.defined() ? sums.sum(0).to(weight.scalar_type()) : at::Tensor(), at::Tensor()};
}

// y, and with the residual x itself: the gradients of both uses of x are added in one pass.
template <bool kAndResidual>
class RmsNorm : public torch::autograd::Function<RmsNorm<kAndResidual>> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               double epsilon) {
    const auto [y, scale] = norm_forward(x, weight, epsilon);
    ctx->save_for_backward({x, weight, scale});
    if constexpr (!kAndResidual) return {y};
    ctx->set_materialize_grads(false);
    return {y, x};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return norm_backward(ctx, gradients[0], kAndResidual ? gradients[1] : at::Tensor());
  }
};

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int direction) {
  if (!x.is_cpu()) return gpu::rotary(x, cos, sin, direction);
  const std::int64_t heads = x.size(1), dim = x.size(2), half = dim / 2, stride = x.stride(0);
  at::Tensor y = at::empty(x.sizes(), x.options());
  for_ranges(x, x.size(0), kChunk, [&]<typename T, typename C>(std::int64_t begin, std::int64_t end) {
    rows::rotate(data<T>(x) + begin * stride, stride, data<C>(cos) + begin * half,
                 data<C>(sin) + begin * half, end - begin, heads, dim, direction,
                 data<T>(y) + begin * heads * dim);
  });
  return y;
}

at::Tensor dense_heads(const at::Tensor& x) {
  return x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
}

class Rotary : public torch::autograd::Function<Rotary> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotated(dense_heads(x), cos, sin, 1);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivative();
    const auto saved = ctx->get_saved_variables();
    return {rotated(dense_heads(gradients[0]), saved[0], saved[1], -1), at::Tensor(), at::Tensor()};
  }
};

class SwiGlu : public torch::autograd::Function<SwiGlu> {
 public:
  static constexpr std::int64_t kGrain = 1 << 15;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    if (!gate.is_cpu()) return gpu::swiglu(gate, up);
    at::Tensor y = at::empty(gate.sizes(), gate.options());
    for_ranges(gate, gate.numel(), kGrain, [&]<typename T, typename>(std::int64_t begin, std::int64_t end) {
      rows::swiglu(data<T>(gate) + begin, data<T>(up) + begin, end - begin, data<T>(y) + begin);
    });
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivative();
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1];
    const at::Tensor dy = gradients[0].contiguous();
    if (!gate.is_cpu()) {
      const auto [dgate, dup] = gpu::swiglu_backward(dy, gate, up);
      return {dgate, dup};
    }
    at::Tensor dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(up.sizes(), up.options());
    for_ranges(gate, gate.numel(), kGrain, [&]<typename T, typename>(std::int64_t begin, std::int64_t end) {
      rows::swiglu_backward(data<T>(dy) + begin, data<T>(gate) + begin, data<T>(up) + begin, end - begin,
                            data<T>(dgate) + begin, data<T>(dup) + begin);
    });
    return {dgate, dup};
  }
};

// `biases` holds those there are, in order. The gradient of x is summed inside the products.
class Linears : public torch::autograd::Function<Linears> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<std::int64_t>& has_bias) {
    variable_list saved{x}, results;
    std::size_t bias = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      results.push_back(product(x, weights[i], {}, has_bias[i] != 0 ? biases[bias++] : at::Tensor()));
      saved.push_back(weights[i]);
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data["has_bias"] = has_bias;
    return results;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivative();
    const auto saved = ctx->get_saved_variables();
    const auto has_bias = ctx->saved_data["has_bias"].toIntVector();
    const std::size_t n = gradients.size();
    variable_list results(1 + n);
    for (std::size_t i = 0; i < n; ++i) {
      const at::Tensor dy = gradients[i].defined() ? gradients[i].contiguous() : at::Tensor();
      if (dy.defined() && ctx->needs_input_grad(0)) {
        if (results[0].defined())
          multiply_into(results[0], dy, saved[1 + i].t(), /*adds=*/true);
        else
          results[0] = product(dy, saved[1 + i].t());
      }
      if (dy.defined() && ctx->needs_input_grad(1 + i))
        results[1 + i] = weight_gradient(dy, saved[0], saved[1 + i]);
      if (has_bias[i] != 0) {
        const bool wanted = dy.defined() && ctx->needs_input_grad(results.size());
        results.push_back(wanted ? dy.sum(0) : at::Tensor());
      }
    }
    results.emplace_back();  // has_bias itself
    return results;
  }
};

class LinearOnto : public torch::autograd::Function<LinearOnto> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& residual, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    return product(x, weight, residual, bias.value_or(at::Tensor()));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    refuse_second_derivative();
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dy = gradients[0].contiguous();
    variable_list results(4);
    results[0] = gradients[0];
    if (ctx->needs_input_grad(1)) results[1] = product(dy, saved[1].t());
    if (ctx->needs_input_grad(2)) results[2] = weight_gradient(dy, saved[0], saved[1]);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(3)) results[3] = dy.sum(0);
    return results;
  }
};

// Norms are not: to compute a weight's gradient in the second half they would keep what they were given and
// the gradient of what they gave, twice the memory of a product's input, for a pass over both.
const differentiable::Separable<Linears, LinearOnto> kLinearsAreSeparable;

}  // namespace

// On other devices, and where a GPU's kernels do not take the width, LibTorch's own.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  if (has_norm(x, weight)) return RmsNorm<false>::apply(x.contiguous(), weight.contiguous(), epsilon)[0];
  return x.is_cpu() ? naive_twin::rms_norm(x, weight, epsilon)
                    : at::rms_norm(x, {weight.numel()}, weight, epsilon);
}

std::pair<at::Tensor, at::Tensor> rms_norm_and_residual(const at::Tensor& x, const at::Tensor& weight,
                                                        double epsilon) {
  if (!has_norm(x, weight)) return {rms_norm(x, weight, epsilon), x};
  const auto both = RmsNorm<true>::apply(x.contiguous(), weight.contiguous(), epsilon);
  return {both[0], both[1]};
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const bool by_kernel = has_rows(x) || (cos.scalar_type() == at::kFloat && gpu::has_kernels(x));
  return by_kernel ? Rotary::apply(x, cos.contiguous(), sin.contiguous()) : naive_twin::rotary(x, cos, sin);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const bool by_kernel = has_rows(gate) || gpu::has_kernels(gate);
  return by_kernel ? SwiGlu::apply(gate.contiguous(), up.contiguous()) : naive_twin::swiglu(gate, up);
}

Biases::Biases(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases) {
  ISOGRAD_INVARIANT(weights.size() == biases.size(), "a bias (or none) for each weight");
  for (const auto& bias : biases) {
    has.push_back(bias.defined());
    if (bias.defined()) present.push_back(bias);
  }
}

std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                const std::vector<at::Tensor>& biases) {
  const Biases given(weights, biases);
  return Linears::apply(x.contiguous(), at::TensorList(weights), at::TensorList(given.present), given.has);
}

at::Tensor linear_onto(const at::Tensor& residual, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& bias) {
  return LinearOnto::apply(residual.contiguous(), x.contiguous(), weight,
                           bias.defined() ? std::optional(bias) : std::nullopt);
}

namespace naive_twin {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const auto type = computing_type(x.scalar_type());
  const at::Tensor wide = x.to(type);
  const at::Tensor normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + epsilon);
  return (weight.to(type) * normed).to(x.scalar_type());
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.to(computing_type(x.scalar_type())).chunk(2, -1);
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(x.scalar_type());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const auto type = computing_type(gate.scalar_type());
  return (at::silu(gate.to(type)) * up.to(type)).to(gate.scalar_type());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

}  // namespace naive_twin
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  const auto type = dy.scalar_type();
  // A GPU's products of bf16 can be written in fp32, as they are added up. The CPU's would be rounded first.
  const bool widens = type == at::kBFloat16 && products_widen(dy.device());
  if ((type == at::kFloat || type == at::kDouble || widens) && weight.scalar_type() == type) {
    const auto place = differentiable::take_gradient_place(weight, widens ? at::kFloat : type);
    if (place.memory.defined()) {
      if (widens)
        multiply_widening_into(place.memory, dy.t(), x.t(), place.adds);
      else
        multiply_into(place.memory, dy.t(), x.t(), place.adds);
      return differentiable::gradient_in(place.memory, weight);
    }
  }
  return product(dy.t(), x.t());
}

}  // namespace isograd
