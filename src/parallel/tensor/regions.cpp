// The functions at the boundaries of a TP region, and column- and row-parallel products, which are computed
// while tokens or their gradients travel where an overlap is asked for.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <numeric>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "isograd/tensor_parallel.hpp"
#include "kernels/matmul/product.hpp"
#include "layout/flat.hpp"
#include "model/fused.hpp"
#include "parallel/tensor/hooks.hpp"

namespace isograd {
namespace {

bool checked_from_the_start() {
  if (std::getenv("ISOGRAD_CHECK_SEAMS")) return true;
#ifdef __OPTIMIZE__
  return false;
#else
  return true;
#endif
}

std::atomic<bool> checking{checked_from_the_start()};

// Whether each rank's tensor is bit for bit rank 0's. Every rank has the same answer.
std::vector<int> differing(const at::Tensor& tensor, Group& tp) {
  const at::Tensor all = tp.all_gather(checksums({tensor}));
  std::vector<int> ranks;
  for (int rank = 1; rank < tp.size(); ++rank)
    if (!all[rank].equal(all[0])) ranks.push_back(rank);
  return ranks;
}

[[noreturn]] void refuse_tensor(const char* function, const std::string& found, const std::string& expected,
                                const std::string& action) {
  throw PeerError(
      {.where = fmt::format("{}()", function), .found = found, .expected = expected, .action = action});
}

void expect_same(const at::Tensor& tensor, Group& tp, const char* function, const char* what) {
  if (!checking) return;
  if (const auto ranks = differing(tensor, tp); !ranks.empty())
    refuse_tensor(
        function, fmt::format("{} of rank {} along {} differs from rank 0's", what, ranks[0], tp.name()),
        "the same on all of these ranks",
        "Give ranks along tp the same batch; reduce_from_tp() what is a part, and copy_to_tp() before it is used again");
}

void expect_parts(const at::Tensor& tensor, Group& tp, const char* function) {
  if (!checking || !differing(tensor, tp).empty() || tensor.count_nonzero().item<std::int64_t>() == 0) return;
  refuse_tensor(function, fmt::format("the same tensor on all {} ranks along {}", tp.size(), tp.name()),
                "each rank's part of a sum",
                "Cut the weight of the product before it along its inputs, or leave this call out: what "
                "is whole already would be counted once for each rank");
}

// Consecutive tokens.
struct Span {
  std::int64_t begin, count;
  at::Tensor of(const at::Tensor& whole) const { return whole.narrow(0, begin, count); }
};

std::int64_t sum_of(const Group::Rows& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

Span own_span(const Group::Rows& rows, int rank) {
  return {std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0}),
          rows[static_cast<std::size_t>(rank)]};
}

Group::Rows rows_of(const at::Tensor& whole, const Group& tp, const Group::Rows& rows, const char* function) {
  if (rows.empty()) return split_rows(whole.size(0), tp.size());
  const std::int64_t sum = sum_of(rows);
  if (static_cast<int>(rows.size()) != tp.size() || sum != whole.size(0))
    refuse(fmt::format("{}()", function),
           fmt::format("{} numbers of rows that add up to {}", rows.size(), sum),
           fmt::format("one for each of {} ranks, {} together", tp.size(), whole.size(0)),
           "Pass the rows that each rank has");
  return rows;
}

enum class Exchanged { kNothing, kSum, kGather, kScatter, kOwnRows };

// One direction of a function of the table in tensor_parallel.hpp; `rows` of each rank, where tokens are
// split.
at::Tensor exchanged(Exchanged how, Group& tp, const at::Tensor& x, const Group::Rows& rows) {
  if (how == Exchanged::kNothing) return at::alias(x);
  if (how == Exchanged::kOwnRows) return own_span(rows, tp.rank()).of(x).clone();
  if (how == Exchanged::kSum) {
    at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
    tp.all_reduce(sum);
    return sum;
  }
  const bool gathers = how == Exchanged::kGather;
  auto sizes = x.sizes().vec();
  sizes.at(0) = gathers ? sum_of(rows) : rows[static_cast<std::size_t>(tp.rank())];
  at::Tensor result = at::empty(sizes, x.options());
  if (gathers)
    tp.all_gather_rows_async(result, x, rows).wait();
  else
    tp.reduce_scatter_async(result, x, ReduceOp::kSum, rows).wait();
  return result;
}

at::Tensor region_map(const char* function, Group tp, const at::Tensor& x, const Group::Rows& rows,
                      Exchanged forward, Exchanged backward) {
  return apply_map(
      x, [tp, rows, forward](const at::Tensor& in) mutable { return exchanged(forward, tp, in, rows); },
      [tp, rows, backward, function](const at::Tensor& gradient) mutable {
        if (backward == Exchanged::kNothing || backward == Exchanged::kOwnRows)
          expect_same(gradient, tp, function, "the gradient of the output");
        return exchanged(backward, tp, gradient, rows);
      });
}

Group::Rows asked(Group& tp, const at::Tensor& split) {
  const at::Tensor all = tp.all_gather(at::full({1}, split.size(0), at::kLong)).flatten();
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
}

// The tokens that a product exchanges with the other ranks.
struct Tokens final : torch::CustomClassHolder {
  Tokens(Group group, Group::Rows of_ranks, TensorOverlap how)
      : tp(std::move(group)), rows(std::move(of_ranks)), overlap(how) {}

  std::int64_t all() const { return sum_of(rows); }
  Span own() const { return own_span(rows, tp.rank()); }
  // All tokens but this rank's.
  std::vector<Span> others() const {
    const auto [begin, count] = own();
    std::vector<Span> spans;
    for (const Span span : {Span{0, begin}, Span{begin + count, all() - begin - count}})
      if (span.count > 0) spans.push_back(span);
    return spans;
  }
  at::Tensor empty(std::int64_t count, const at::Tensor& like) const {
    return at::empty({count, like.size(1)}, like.options());
  }

  Group tp;
  Group::Rows rows;  // of the tokens, by rank; none: every rank has all
  TensorOverlap overlap;
};

Tokens& tokens_of(AutogradContext* context) {
  return *static_cast<Tokens*>(context->saved_data["tokens"].toCapsule().get());
}

void refuse_second_derivative() {
  ISOGRAD_INVARIANT(!at::GradMode::is_enabled(), "a second derivative of the model, which is not supported");
}

// copy_to_tp() or, with rows, gather_from_sequence() of x, and its products: [T, out] each. In backward the
// gradient of x is summed over the ranks while those of weights and biases are computed. kTokens: own tokens
// are multiplied while the others come. `biases` holds those there are, in order.
struct ColumnParallel final : torch::autograd::Function<ColumnParallel> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& /*anchor*/,
                               at::TensorList weights, at::TensorList biases,
                               const std::vector<std::int64_t>& has_bias,
                               const c10::intrusive_ptr<Tokens>& tokens) {
    const at::Tensor whole = tokens->rows.empty() ? x : tokens->empty(tokens->all(), x);
    variable_list saved{whole}, results, bias(weights.size());
    for (std::size_t i = 0, next = 0; i < bias.size(); ++i)
      if (has_bias[i] != 0) bias[i] = biases[next++];
    Pending pending;
    if (!tokens->rows.empty()) pending = tokens->tp.all_gather_rows_async(whole, x, tokens->rows);
    const bool by_tokens = tokens->overlap == TensorOverlap::kTokens;
    if (!by_tokens) pending.wait();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      saved.push_back(weights[i]);
      if (!by_tokens) {
        results.push_back(product(whole, weights[i], {}, bias[i]));
        continue;
      }
      results.push_back(at::empty({whole.size(0), weights[i].size(0)}, whole.options()));
      tokens->own().of(results[i]).copy_(product(x, weights[i], {}, bias[i]));
      pending.progress();
    }
    pending.wait();
    for (std::size_t i = 0; by_tokens && i < weights.size(); ++i)
      for (const Span& span : tokens->others())
        span.of(results[i]).copy_(product(span.of(whole), weights[i], {}, bias[i]));
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["has_bias"] = has_bias;
    context->saved_data["tokens"] = c10::IValue::make_capsule(tokens);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative();
    Tokens& tokens = tokens_of(context);
    const auto saved = context->get_saved_variables();
    const auto has_bias = context->saved_data["has_bias"].toIntVector();
    const at::Tensor& whole = saved[0];
    const std::size_t n = gradients.size();
    constexpr std::size_t kFirst = 2;  // of the weights, behind x and the anchor
    variable_list results(kFirst + n), dy(n);
    // The gradient of x first: others wait for their part of it, whatever is asked for here.
    at::Tensor sum;
    for (std::size_t i = 0; i < n; ++i)
      if (gradients[i].defined()) {
        dy[i] = gradients[i].contiguous();
        sum = product(dy[i], saved[1 + i].t(), sum);
      }
    if (!sum.defined()) sum = at::zeros_like(whole);
    Pending pending;
    if (tokens.rows.empty()) {
      results[0] = sum;
      pending = tokens.tp.all_reduce_async(sum);
    } else {
      results[0] = tokens.empty(tokens.own().count, sum);
      pending = tokens.tp.reduce_scatter_async(results[0], sum, ReduceOp::kSum, tokens.rows);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (dy[i].defined() && context->needs_input_grad(kFirst + i))
        results[kFirst + i] = weight_gradient(dy[i], whole, saved[1 + i]);
      if (has_bias[i] != 0) {
        const bool wanted = dy[i].defined() && context->needs_input_grad(results.size());
        results.push_back(wanted ? dy[i].sum(0) : at::Tensor());
      }
      pending.progress();
    }
    pending.wait();
    results.resize(results.size() + 2);  // has_bias and the tokens
    return results;
  }
};

// reduce_scatter_to_sequence() of x Wᵀ. Parts for other ranks' tokens travel while own tokens are multiplied;
// in backward the others' gradients come while the weight's gradient by own tokens is computed.
struct RowParallel final : torch::autograd::Function<RowParallel> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& /*anchor*/,
                            const at::Tensor& weight, const c10::intrusive_ptr<Tokens>& tokens) {
    context->save_for_backward({x, weight});
    context->saved_data["tokens"] = c10::IValue::make_capsule(tokens);
    const auto ranks = static_cast<std::size_t>(tokens->tp.size());
    const auto place = static_cast<std::size_t>(tokens->tp.rank());
    const Span own = tokens->own();
    std::vector<at::Tensor> parts;
    for (const Span& span : tokens->others()) parts.push_back(product(span.of(x), weight));
    const at::Tensor sent = parts.size() == 1  ? parts[0]
                            : parts.size() > 1 ? at::cat(parts)
                                               : at::empty({0, weight.size(0)}, x.options());
    Group::Rows there = tokens->rows, here(ranks, own.count);
    there[place] = here[place] = 0;
    const at::Tensor came = at::empty({own.count * (tokens->tp.size() - 1), weight.size(0)}, x.options());
    Pending pending = tokens->tp.all_to_all_async(came, sent, here, there);
    const at::Tensor mine = product(own.of(x), weight);
    pending.wait();
    // By rank, and rounded once, as a reduce-scatter does it.
    const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor sum;
    std::int64_t next = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      const at::Tensor part = r == place ? mine : came.narrow(0, own.count * next++, own.count);
      sum = r == 0 ? part.to(type) : r == 1 ? sum + part : sum.add_(part);
    }
    return sum.to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative();
    Tokens& tokens = tokens_of(context);
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor own = gradients[0].contiguous(), dy = tokens.empty(tokens.all(), own);
    Pending pending = tokens.tp.all_gather_rows_async(dy, own, tokens.rows);
    variable_list results(4);
    const bool wanted = context->needs_input_grad(2);
    if (wanted) results[2] = weight_gradient(own, tokens.own().of(x), weight);
    pending.wait();
    if (wanted)
      for (const Span& span : tokens.others())
        multiply_into(results[2], span.of(dy).t(), span.of(x).t(), /*adds=*/true);
    if (context->needs_input_grad(0)) results[0] = product(dy, weight.t());
    return results;
  }
};

}  // namespace

void check_tp_regions(bool on) { checking = on; }

Group tensor_group(const Mesh& mesh, const std::string& axis) { return mesh.along({axis}, "tensor"); }

at::Tensor copy_to_tp(Group tp, const at::Tensor& same) {
  if (tp.size() == 1) return same;
  expect_same(same, tp, "copy_to_tp", "the input");
  if (!same.requires_grad()) return same;  // on no rank then
  return region_map("copy_to_tp", tp, same, {}, Exchanged::kNothing, Exchanged::kSum);
}

at::Tensor reduce_from_tp(Group tp, const at::Tensor& part) {
  if (tp.size() == 1) return part;
  expect_parts(part, tp, "reduce_from_tp");
  return region_map("reduce_from_tp", tp, part, {}, Exchanged::kSum, Exchanged::kNothing);
}

at::Tensor reduce_scatter_to_sequence(Group tp, const at::Tensor& part, const Group::Rows& rows) {
  constexpr const char* kName = "reduce_scatter_to_sequence";
  if (tp.size() == 1) return part;
  expect_parts(part, tp, kName);
  return region_map(kName, tp, part, rows_of(part, tp, rows, kName), Exchanged::kScatter, Exchanged::kGather);
}

at::Tensor gather_from_sequence(Group tp, const at::Tensor& split, const Group::Rows& rows) {
  if (tp.size() == 1) return split;
  return region_map("gather_from_sequence", tp, split, rows.empty() ? asked(tp, split) : rows,
                    Exchanged::kGather, Exchanged::kScatter);
}

at::Tensor gather_tokens(Group tp, const at::Tensor& split, const Group::Rows& rows) {
  if (tp.size() == 1) return split;
  return region_map("gather_tokens", tp, split, rows.empty() ? asked(tp, split) : rows, Exchanged::kGather,
                    Exchanged::kOwnRows);
}

at::Tensor split_tokens(Group tp, const at::Tensor& same, const Group::Rows& rows) {
  if (tp.size() == 1) return same;
  expect_same(same, tp, "split_tokens", "the input");
  const Group::Rows each = rows_of(same, tp, rows, "split_tokens");
  if (!same.requires_grad()) return own_span(each, tp.rank()).of(same);
  return region_map("split_tokens", tp, same, each, Exchanged::kOwnRows, Exchanged::kGather);
}

TensorOverlap tensor_overlap_named(const std::string& name) {
  if (name == "weights") return TensorOverlap::kWeights;
  if (name == "tokens") return TensorOverlap::kTokens;
  if (name != "none")
    refuse("what is computed while tokens travel along tp", name, "none, weights, tokens",
           "Choose one of them");
  return TensorOverlap::kNone;
}

void check(const TensorParallelOptions& options) {
  if (!options.sequence_parallel && options.overlap == TensorOverlap::kTokens)
    refuse("parallel.tensor_overlap", "tokens, and parallel.sequence_parallel off",
           "tokens that are split between the products", "Choose weights or none, or turn it on");
}

TensorHooks stream_hooks(const Group& tp, const TensorParallelOptions& options) {
  check(options);
  const TensorOverlap overlap = options.overlap;
  const bool sequence = options.sequence_parallel;
  const auto rows_of = [tp](std::int64_t tokens) { return split_rows(tokens, tp.size()); };
  TensorHooks hooks;
  hooks.copy_to_tp = [tp](const at::Tensor& same) { return isograd::copy_to_tp(tp, same); };
  hooks.region_input = [tp, sequence, rows_of](const at::Tensor& stream, std::int64_t tokens) {
    return sequence ? gather_from_sequence(tp, stream, rows_of(tokens)) : isograd::copy_to_tp(tp, stream);
  };
  hooks.region_output = [tp, sequence](const at::Tensor& part) {
    return sequence ? reduce_scatter_to_sequence(tp, part) : reduce_from_tp(tp, part);
  };
  if (sequence)
    hooks.gather_tokens = [tp, rows_of](const at::Tensor& own, std::int64_t tokens) {
      return isograd::gather_tokens(tp, own, rows_of(tokens));
    };
  hooks.column_parallel = [tp, overlap, sequence, rows_of, input = hooks.region_input](
                              const at::Tensor& x, std::int64_t tokens,
                              const std::vector<at::Tensor>& weights,
                              const std::vector<at::Tensor>& biases) -> std::vector<at::Tensor> {
    // Without a gradient of x on any rank there is nothing to sum; checks are copy_to_tp()'s.
    if (overlap == TensorOverlap::kNone || (!sequence && (!x.requires_grad() || checking)))
      return linears(input(x, tokens), weights, biases);
    const Biases given(weights, biases);
    // Other ranks need this one in the backward even if nobody here asks for a gradient.
    return ColumnParallel::apply(
        x.contiguous(), differentiable::anchor(), at::TensorList(weights), at::TensorList(given.present),
        given.has, c10::make_intrusive<Tokens>(tp, sequence ? rows_of(tokens) : Group::Rows{}, overlap));
  };
  hooks.row_parallel = [tp, overlap, rows_of, output = hooks.region_output](const at::Tensor& x,
                                                                            const at::Tensor& weight) {
    if (overlap != TensorOverlap::kTokens || checking) return output(linears(x, {weight}, {at::Tensor()})[0]);
    return RowParallel::apply(x.contiguous(), differentiable::anchor(), weight,
                              c10::make_intrusive<Tokens>(tp, rows_of(x.size(0)), overlap));
  };
  return hooks;
}

}  // namespace isograd
