#include "model/kept_tensors.hpp"

#include <algorithm>

namespace isograd {
namespace {

constexpr std::int64_t kIndex = 8;  // bytes of an int64

std::int64_t most_of(std::int64_t number, std::int64_t parts) { return (number + parts - 1) / parts; }

// Bytes of the fullest rank's tensors.
struct Sizes {
  Sizes(const DecoderConfig& config, const KeptShape& shape)
      : element(shape.element),
        computing(std::max<std::int64_t>(shape.element, 4)),
        split(shape.tp > 1 && shape.sequence_parallel),
        tokens(shape.tokens),
        own(split ? most_of(shape.tokens, shape.tp) : shape.tokens),
        heads(most_of(config.heads, shape.tp)),
        keys(key_heads_of(config, shape.tp)),
        copies(shape.tokens * config.experts.per_token),
        stream(own * config.hidden * element),
        whole(tokens * config.hidden * element),
        queries(tokens * heads * config.head_dim * element),
        // Ulysses: all tokens of its group, and some of the heads; at least one.
        read(tokens * shape.cp_ulysses * std::max<std::int64_t>(1, keys.read / shape.cp_ulysses) *
             config.head_dim * element),
        inner(tokens * most_of(config.feed_forward, shape.tp) * element),
        expert_rows(copies * config.hidden * element),
        expert_inner(copies * most_of(config.experts.feed_forward, shape.tp) * element),
        shared_inner(tokens * most_of(config.experts.shared_feed_forward, shape.tp) * element) {}

  std::int64_t element, computing;
  bool split;  // the stream is, along tp
  std::int64_t tokens, own, heads;
  KeyHeads keys;
  std::int64_t copies;
  std::int64_t stream, whole, queries, read, inner, expert_rows, expert_inner, shared_inner;
};

bool has_log_sums(const KeptShape& shape) { return !shape.on_gpu || shape.element == 2; }

bool copies_operands(const KeptShape& shape) { return shape.element == 2 && !shape.on_gpu; }

// bf16 on a CPU would be rounded before it is added.
bool in_place(const KeptShape& shape) {
  return shape.gradients == KeptShape::Gradients::kInPlace && !copies_operands(shape);
}

class List {
 public:
  void add(const char* name, std::int64_t bytes) {
    if (bytes > 0) tensors_.push_back({name, bytes});
  }
  std::vector<KeptTensor> take() { return std::move(tensors_); }

 private:
  std::vector<KeptTensor> tensors_{};
};

// RmsNorm and Linears of fused.cpp: the norm keeps its input and a number a row, the products their input,
// under sequence parallelism the gathered one (ColumnParallel, gather_from_sequence).
void add_norm(List& list, const Sizes& of, const char* input, const char* scales, const char* normed) {
  list.add(input, of.stream);
  list.add(scales, of.own * of.computing);
  list.add(normed, of.whole);
}

// Rotary keeps tables alone; FragmentAttention and the context ranks' Function what they read and gave.
void add_attention(List& list, const DecoderConfig& config, const KeptShape& shape, const Sizes& of) {
  if (config.query_key_norm) {
    list.add("attention: queries before their norm", of.queries);
    list.add("attention: scales of queries", of.tokens * of.heads * of.computing);
    list.add("attention: keys before their norm", of.tokens * of.keys.normed * config.head_dim * of.element);
    list.add("attention: scales of keys", of.tokens * of.keys.normed * of.computing);
  }
  list.add("attention: queries", of.queries);
  list.add("attention: keys", of.read);
  list.add("attention: values", of.read);
  if (of.keys.by_index) list.add("attention: key heads that are read", of.heads * kIndex);
  list.add("attention: output", of.queries);
  if (has_log_sums(shape)) list.add("attention: log-sums", of.tokens * of.heads * of.computing);
  if (shape.cp_ulysses > 1) list.add("attention: output of own tokens", of.queries);
}

// SwiGlu and the product behind it.
void add_network(List& list, std::int64_t inner, const char* gate, const char* up, const char* product) {
  list.add(gate, inner);
  list.add(up, inner);
  list.add(product, inner);
}

// route(), CopyToExperts, GroupedLinears and AddByWeight of experts.cpp.
void add_experts(List& list, const DecoderConfig& config, const KeptShape& shape, const Sizes& of) {
  const ExpertsShape& experts = config.experts;
  const bool shares = experts.shared_feed_forward > 0;
  list.add("experts norm: input", of.stream);
  list.add("experts norm: scales", of.own * of.computing);
  list.add("router: normed input", of.stream);
  // Without split tokens the shared expert reads the router's input.
  if (of.split && shares) list.add("shared expert: normed input", of.whole);
  const std::int64_t weights = of.copies * of.computing;
  list.add("router: scores", of.tokens * experts.count * of.computing);
  list.add("router: chosen experts", of.copies * kIndex);
  if (experts.normalise) {
    list.add("router: weights before their sum", weights);
    list.add("router: sums of weights", of.tokens * of.computing);
  }
  list.add("router: weights", weights);
  list.add("experts: order of copies", 3 * of.copies * kIndex);
  if (shape.ep > 1) list.add("experts: places of what came", 2 * of.copies * kIndex);
  list.add("experts: copies of tokens", of.expert_rows);
  add_network(list, of.expert_inner, "experts: gate", "experts: up", "experts: product");
  list.add("experts: outputs", of.expert_rows);
  if (!shares) return;
  add_network(list, of.shared_inner, "shared expert: gate", "shared expert: up", "shared expert: product");
  if (config.family != "qwen2_moe") return;
  list.add("shared expert: output", of.whole);
  list.add("shared expert: switch", of.tokens * of.element);
}

// Bytes that are alive beyond those that were kept, and the most of them.
class Alive {
 public:
  explicit Alive(std::int64_t before) : now_(before), most_(before) {}
  void take(std::int64_t bytes) { most_ = std::max(most_, now_ += bytes); }
  void drop(std::int64_t bytes) { now_ -= bytes; }
  std::int64_t most() const { return most_; }

 private:
  std::int64_t now_, most_;
};

class Backward {
 public:
  Backward(const DecoderConfig& config, const KeptShape& shape, std::int64_t before)
      : config_(config), shape_(shape), of_(config, shape), alive_(before) {
    take(of_.stream);  // the gradient that came
  }

  void network(std::int64_t inner, std::int64_t width) {
    gather();
    take(inner);
    weights(width * config_.hidden, inner + of_.whole);
    end_gather();
    let_go(inner);
    swiglu(inner);
    columns(2 * inner, 2 * width * config_.hidden, inner);
    norm();
  }
  void attention() {
    gather();
    take(of_.queries);
    const std::int64_t dim = config_.head_dim;
    weights(of_.heads * dim * config_.hidden, of_.queries + of_.whole);
    end_gather();
    const std::int64_t inputs = of_.queries + 2 * of_.read;
    take(inputs);
    drop(inputs + of_.queries);
    let_go(of_.queries);  // the output of attention, the product's input
    if (has_log_sums(shape_)) drop(of_.tokens * of_.heads * of_.computing);
    const int passes = config_.query_key_norm ? 2 : 1;  // rotary, and the norms
    for (int pass = 0; pass < passes; ++pass) {
      for (const std::int64_t each : {of_.queries, of_.read}) take(each), drop(each);
      if (pass > 0) drop(of_.queries + of_.read);
    }
    columns(inputs, (of_.heads + 2 * of_.keys.kept) * dim * config_.hidden, of_.queries);
    norm();
  }
  void experts() {
    const ExpertsShape& experts = config_.experts;
    const std::int64_t rows = of_.expert_rows, wide = rows / of_.element * of_.computing,
                       inner = of_.expert_inner, width = most_of(experts.feed_forward, shape_.tp),
                       own = most_of(experts.count, shape_.ep) * width * config_.hidden;
    gather();
    // AddByWeight: the sum's gradient by row, times rows for the weights, times weights for the rows.
    take(wide), take(wide);
    drop(wide), take(wide);
    if (of_.element < of_.computing) take(rows), drop(wide);
    drop(wide + rows);
    end_gather();
    if (experts.shared_feed_forward > 0) {
      const std::int64_t shared = most_of(experts.shared_feed_forward, shape_.tp);
      take(of_.shared_inner);
      weights(shared * config_.hidden, of_.shared_inner + of_.whole);
      let_go(of_.shared_inner);
      swiglu(of_.shared_inner);
      take(of_.whole);
      weights(2 * shared * config_.hidden, of_.shared_inner + of_.whole);
      let_go(2 * of_.shared_inner);
    }
    if (shape_.ep > 1) exchange(rows);
    take(inner);
    weights(own);
    let_go(rows + inner);
    swiglu(inner);
    take(rows);
    weights(2 * own);
    let_go(2 * inner + rows);
    if (shape_.ep > 1) exchange(rows);
    take(rows), take(of_.whole / of_.element * of_.computing);
    drop(2 * rows + of_.whole / of_.element * (of_.computing - of_.element));
    norm();
  }
  std::int64_t most() const { return alive_.most(); }

 private:
  using Half = KeptShape::Half;
  // A row-parallel product's gradient, of all tokens.
  void gather() { take(of_.split ? of_.whole : 0); }
  void end_gather() { let_go(of_.split ? of_.whole : 0); }
  // bf16 products on a CPU copy operands that are turned: gradient and input.
  void weights(std::int64_t elements, std::int64_t operands = 0) {
    if (in_place(shape_) || shape_.half == Half::kInputs) return;
    alive_.take(elements * shape_.element);
    if (copies_operands(shape_)) alive_.take(operands), alive_.drop(operands);
    if (shape_.gradients != KeptShape::Gradients::kOfUnits) alive_.drop(elements * shape_.element);
  }
  // In the second half nothing but gradients of weights is made; what products need for these stays until
  // then.
  void take(std::int64_t bytes) { alive_.take(shape_.half == Half::kWeights ? 0 : bytes); }
  void drop(std::int64_t bytes) { alive_.drop(shape_.half == Half::kWeights ? 0 : bytes); }
  void let_go(std::int64_t bytes) { drop(shape_.half == Half::kWhole ? bytes : 0); }
  void swiglu(std::int64_t inner) {
    take(2 * inner);
    drop(3 * inner);
  }
  void exchange(std::int64_t rows) {  // sent in another order, and received
    take(rows), take(rows);
    drop(2 * rows);
  }
  // Column-parallel products: `gradients` of their outputs, of which one is `widest`, end, as does their
  // input.
  void columns(std::int64_t gradients, std::int64_t elements, std::int64_t widest) {
    take(of_.whole);
    weights(elements, widest + of_.whole);
    let_go(gradients + of_.whole);
    if (shape_.tp == 1) return;
    take(of_.stream);  // summed
    drop(of_.whole);
  }
  // Adds the stream's gradient: its own result takes the place of both.
  void norm() {
    take(of_.stream);
    drop(2 * of_.stream + of_.own * of_.computing);
    of_.split ? drop(of_.stream) : let_go(of_.stream);  // which the product onto the stream was given
  }

  const DecoderConfig& config_;
  const KeptShape& shape_;
  Sizes of_;
  Alive alive_;
};

}  // namespace

std::int64_t total(const std::vector<KeptTensor>& tensors) {
  std::int64_t sum = 0;
  for (const KeptTensor& tensor : tensors) sum += tensor.bytes;
  return sum;
}

KeyHeads key_heads_of(const DecoderConfig& config, std::int64_t tp) {
  const std::int64_t all = config.key_value_heads;
  if (all % tp == 0) return {.kept = all / tp, .normed = all / tp, .read = all / tp};
  if (tp % all == 0 && config.heads % tp == 0) return {.kept = 1, .normed = 1, .read = 1};
  // Only the heads that are read are computed; the fullest rank's queries may begin in the middle of a group.
  const std::int64_t heads = most_of(config.heads, tp), readers = config.heads / all;
  return {.kept = all, .normed = most_of(heads, readers), .read = heads, .by_index = true};
}

std::vector<KeptTensor> kept_by_block(const DecoderConfig& config, std::int64_t layer,
                                      const KeptShape& shape) {
  const Sizes of(config, shape);
  List list;
  if (shape.checkpoint) {
    list.add("block: input", of.stream);
    return list.take();
  }
  add_norm(list, of, "attention norm: input", "attention norm: scales", "attention: normed input");
  add_attention(list, config, shape, of);
  if (config.has_experts(layer)) {
    add_experts(list, config, shape, of);
  } else {
    add_norm(list, of, "mlp norm: input", "mlp norm: scales", "mlp: normed input");
    add_network(list, of.inner, "mlp: gate", "mlp: up", "mlp: product");
  }
  return list.take();
}

std::int64_t kept_between_halves(const DecoderConfig& config, std::int64_t layer, const KeptShape& shape) {
  const Sizes of(config, shape);
  const std::int64_t keys = of.tokens * of.keys.normed * config.head_dim * of.element,
                     attention = 2 * of.whole + 2 * of.queries + 2 * keys;
  if (!config.has_experts(layer)) return attention + 2 * of.whole + 3 * of.inner;
  const std::int64_t router = of.stream + of.tokens * config.experts.count * of.element,
                     shared = config.experts.shared_feed_forward > 0 ? of.whole + 3 * of.shared_inner : 0;
  return attention + router + 2 * of.expert_rows + 3 * of.expert_inner + shared;
}

std::int64_t kept_between_halves_by_output(const DecoderConfig& config, const KeptShape& shape,
                                           bool fused_loss) {
  const Sizes of(config, shape);
  const std::int64_t vocabulary = most_of(config.vocabulary, shape.tp);
  return of.whole + vocabulary * (fused_loss ? config.hidden * of.computing : of.tokens * of.element);
}

std::vector<KeptTensor> kept_by_pass(const DecoderConfig& config, const KeptShape& shape) {
  const Sizes of(config, shape);
  List list;
  list.add("rotary: cosines and sines", of.tokens * config.head_dim * of.computing);
  return list.take();
}

std::vector<KeptTensor> kept_by_output(const DecoderConfig& config, const KeptShape& shape, bool fused_loss) {
  const Sizes of(config, shape);
  const std::int64_t vocabulary = most_of(config.vocabulary, shape.tp);
  List list;
  add_norm(list, of, "last norm: input", "last norm: scales",
           fused_loss ? "loss: gradient of the normed input" : "output: normed input");
  if (fused_loss) {  // the gradients that its forward makes (linear_cross_entropy.cpp), the weight's in fp32
    list.add("loss: gradient of the weight", vocabulary * config.hidden * of.computing);
    return list.take();
  }
  list.add("loss: logits", of.tokens * vocabulary * of.element);
  list.add("loss: sums of rows", of.tokens * 2 * 8);
  list.add("loss: weights of targets", of.tokens * 8);
  list.add("loss: mask", of.tokens);
  return list.take();
}

std::int64_t in_passing(const DecoderConfig& config, std::int64_t layer, const KeptShape& given) {
  KeptShape shape = given;
  shape.checkpoint = false;
  const std::int64_t again = given.checkpoint ? total(kept_by_block(config, layer, shape)) -
                                                    total(kept_by_block(config, layer, given))
                                              : 0;
  Backward backward(config, shape, again);
  if (config.has_experts(layer))
    backward.experts();
  else
    backward.network(Sizes(config, shape).inner, most_of(config.feed_forward, shape.tp));
  backward.attention();
  return backward.most();
}

// The logits' gradient takes the logits' place (cross_entropy.cpp, may_overwrite()).
std::int64_t in_passing_of_output(const DecoderConfig& config, const KeptShape& shape, bool fused_loss) {
  const Sizes of(config, shape);
  const std::int64_t vocabulary = most_of(config.vocabulary, shape.tp),
                     weight = vocabulary * config.hidden * of.element,
                     operands = copies_operands(shape) ? of.tokens * vocabulary * of.element + of.whole : 0;
  const bool inputs = shape.half != KeptShape::Half::kWeights,
             weights = shape.half != KeptShape::Half::kInputs;
  if (fused_loss) return weights && of.element < of.computing ? weight : 0;  // made by forward, rounded here
  return (inputs ? of.whole : 0) + (weights && !in_place(shape) ? weight + operands : 0);
}

}  // namespace isograd
