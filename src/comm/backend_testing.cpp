#include "comm/backend_testing.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/torch_versions.hpp"

namespace isograd::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<std::int64_t>;

// 1 to 3, depending on rank, slot and index. These are exact in every type, and so are products of 4 and,
// rounded once, of more.
at::Tensor numbers(int rank, int slot, std::int64_t count, at::ScalarType type) {
  const at::Tensor seeds = at::arange(count, at::kLong) * 7919 + (104729 * (rank + 1) + 1299709 * (slot + 1));
  const at::Tensor mixed = seeds.mul(2654435761).bitwise_and(0xffffffff).bitwise_right_shift(16).remainder(3);
  return type == at::kBool ? mixed.eq(0) : (mixed + 1).to(type);
}

// The factor of a rank in a scaled sum.
double factor_of(int rank) { return 0.5 * (rank + 1); }

at::Tensor combined(const Tensors& inputs, const c10d::ReduceOp& op) {
  const at::ScalarType type = inputs[0].scalar_type();
  const bool logical = type == at::kBool, floating = at::isFloatingType(type);
  at::Tensor all = at::stack(inputs).to(floating ? at::kDouble : at::kLong);
  for (int r = 0; r < all.size(0) && op.op_ == c10d::ReduceOp::PREMUL_SUM; ++r) all[r].mul_(factor_of(r));
  at::Tensor result;
  switch (op.op_) {
    case c10d::ReduceOp::MAX: result = all.amax(0); break;
    case c10d::ReduceOp::MIN: result = all.amin(0); break;
    case c10d::ReduceOp::PRODUCT: result = all.prod(0); break;
    case c10d::ReduceOp::BAND:
      result = logical ? all.amin(0) : all[0].clone();
      for (int r = 1; r < all.size(0) && !logical; ++r) result.bitwise_and_(all[r]);
      break;
    case c10d::ReduceOp::BXOR:
      result = all[0].clone();
      for (int r = 1; r < all.size(0); ++r) result.bitwise_xor_(all[r]);
      break;
    case c10d::ReduceOp::BOR:
      result = all[0].clone();
      for (int r = 1; r < all.size(0); ++r) result.bitwise_or_(all[r]);
      break;
    default: result = logical ? all.amax(0) : all.sum(0);
  }
  const auto ranks = static_cast<double>(inputs.size());
  if (op.op_ == c10d::ReduceOp::AVG) result = floating ? result / ranks : result.div(inputs.size(), "trunc");
  return result.to(type);
}

class Check {
 public:
  Check(c10d::Backend& backend, const BackendCases& cases)
      : backend_(backend), cases_(cases), rank_(backend.getRank()), size_(backend.getSize()) {}

  std::vector<std::string> run() {
    for (const at::ScalarType type : cases_.types) {
      type_ = type;
      for (const std::int64_t count : {0, 1, 7, 1000}) {
        count_ = count;
        reductions();
        copies();
        uneven();
        if (size_ > 1) messages();
      }
    }
    wait("barrier", backend_.barrier());
    return problems_;
  }

 private:
  at::Tensor own(int slot, std::int64_t count) { return placed(numbers(rank_, slot, count, type_)); }
  at::Tensor room(std::int64_t count) { return placed(at::zeros({count}, at::TensorOptions(type_))); }
  at::Tensor placed(const at::Tensor& content) {
    if (!cases_.memory.defined()) return content;
    const auto bytes = static_cast<std::int64_t>(content.nbytes());
    if (used_ + bytes > cases_.memory.numel()) used_ = 0;
    const at::Tensor place = cases_.memory.narrow(0, used_, bytes).view(type_);
    used_ += (bytes + 63) / 64 * 64;
    return place.copy_(content);
  }
  std::int64_t width(int rank) const { return count_ == 0 ? 0 : (count_ + 3 * rank) % 11; }

  Tensors from_all(int slot, std::int64_t count) const {
    Tensors inputs;
    for (int r = 0; r < size_; ++r) inputs.push_back(numbers(r, slot, count, type_));
    return inputs;
  }

  void wait(const std::string& name, c10::intrusive_ptr<c10d::Work> work) {
    if (!work->wait()) problems_.push_back(name + " was not completed");
  }

  void expect(const std::string& name, const at::Tensor& found, const at::Tensor& expected) {
    if (at::equal(found, expected)) return;
    problems_.push_back(fmt::format("{} of {} {} on rank {}", name, count_, c10::toString(type_), rank_));
  }

  void reductions() {
    const bool floating = at::isFloatingType(type_);
    std::vector<std::pair<std::string, c10d::ReduceOp>> ops = {{"sum", c10d::ReduceOp::SUM},
                                                               {"max", c10d::ReduceOp::MAX},
                                                               {"min", c10d::ReduceOp::MIN},
                                                               {"product", c10d::ReduceOp::PRODUCT}};
    if (type_ != at::kBool) ops.push_back({"avg", c10d::ReduceOp::AVG});
    if (floating) ops.push_back({"premul_sum", torch_versions::pre_mul_sum(factor_of(rank_))});
    if (!floating)
      ops.insert(
          ops.end(),
          {{"band", c10d::ReduceOp::BAND}, {"bor", c10d::ReduceOp::BOR}, {"bxor", c10d::ReduceOp::BXOR}});
    for (const auto& [name, op] : ops) reduction(name, op);
  }

  void reduction(const std::string& name, const c10d::ReduceOp& op) {
    const at::Tensor expected = combined(from_all(0, count_), op);
    Tensors tensors{own(0, count_)};
    c10d::AllreduceOptions all;
    all.reduceOp = op;
    wait("all_reduce", backend_.allreduce(tensors, all));
    expect("all_reduce " + name, tensors[0], expected);

    Tensors several{own(0, count_), own(1, 3)};
    c10d::AllreduceCoalescedOptions coalesced;
    coalesced.reduceOp = op;
    wait("all_reduce_coalesced", backend_.allreduce_coalesced(several, coalesced));
    expect("all_reduce_coalesced " + name, several[0], expected);
    expect("all_reduce_coalesced " + name, several[1], combined(from_all(1, 3), op));

    c10d::ReduceOptions to_root;
    to_root.reduceOp = op;
    to_root.rootRank = size_ - 1;
    Tensors reduced{own(0, count_)};
    wait("reduce", backend_.reduce(reduced, to_root));
    expect("reduce " + name, reduced[0], rank_ == size_ - 1 ? expected : own(0, count_));

    c10d::ReduceScatterOptions scatter;
    scatter.reduceOp = op;
    const at::Tensor whole = combined(from_all(2, count_ * size_), op);
    at::Tensor input = own(2, count_ * size_), output = room(count_);
    wait("reduce_scatter", backend_._reduce_scatter_base(output, input, scatter));
    expect("_reduce_scatter_base " + name, output, whole.narrow(0, rank_ * count_, count_));
    at::Tensor inside = input.narrow(0, rank_ * count_, count_);
    wait("reduce_scatter", backend_._reduce_scatter_base(inside, input, scatter));
    expect("_reduce_scatter_base in place " + name, inside, whole.narrow(0, rank_ * count_, count_));

    Tensors outputs{room(count_), room(1)}, inputs{own(2, count_ * size_), own(3, size_)};
    wait("reduce_scatter", backend_.reduce_scatter_tensor_coalesced(outputs, inputs, scatter));
    expect("reduce_scatter_tensor_coalesced " + name, outputs[0], whole.narrow(0, rank_ * count_, count_));
    expect("reduce_scatter_tensor_coalesced " + name, outputs[1],
           combined(from_all(3, size_), op).narrow(0, rank_, 1));

    Tensors parts;
    for (int r = 0; r < size_; ++r) parts.push_back(own(4 + r, width(r)));
    std::vector<Tensors> lists{parts};
    Tensors part{room(width(rank_))};
    wait("reduce_scatter", backend_.reduce_scatter(part, lists, scatter));
    expect("reduce_scatter of lists " + name, part[0], combined(from_all(4 + rank_, width(rank_)), op));
  }

  void copies() {
    const int root = static_cast<int>(count_) % size_;
    Tensors sent{own(0, count_)};
    c10d::BroadcastOptions broadcast;
    broadcast.rootRank = root;
    wait("broadcast", backend_.broadcast(sent, broadcast));
    expect("broadcast", sent[0], numbers(root, 0, count_, type_));

    at::Tensor output = room(count_ * size_), input = own(0, count_);
    wait("all_gather", backend_._allgather_base(output, input));
    expect("_allgather_base", output, at::cat(from_all(0, count_)));
    at::Tensor place = room(count_ * size_), inside = place.narrow(0, rank_ * count_, count_);
    inside.copy_(own(1, count_));
    wait("all_gather", backend_._allgather_base(place, inside));
    expect("_allgather_base in place", place, at::cat(from_all(1, count_)));
    Tensors outputs{room(count_ * size_), room(size_)}, inputs{own(0, count_), own(1, 1)};
    wait("all_gather", backend_.allgather_into_tensor_coalesced(outputs, inputs));
    expect("allgather_into_tensor_coalesced", outputs[0], at::cat(from_all(0, count_)));
    expect("allgather_into_tensor_coalesced", outputs[1], at::cat(from_all(1, 1)));

    std::vector<Tensors> by_rank;
    for (int r = 0; r < size_; ++r) by_rank.push_back({room(count_), room(1)});
    wait("all_gather", backend_.allgather_coalesced(by_rank, inputs));
    for (int r = 0; r < size_; ++r) {
      expect("allgather_coalesced", by_rank[static_cast<std::size_t>(r)][0], numbers(r, 0, count_, type_));
      expect("allgather_coalesced", by_rank[static_cast<std::size_t>(r)][1], numbers(r, 1, 1, type_));
    }

    at::Tensor exchanged = room(count_ * size_), mine = own(5, count_ * size_);
    Sizes none;
    wait("all_to_all", backend_.alltoall_base(exchanged, mine, none, none));
    for (int r = 0; r < size_; ++r)
      expect("alltoall_base", exchanged.narrow(0, r * count_, count_),
             numbers(r, 5, count_ * size_, type_).narrow(0, rank_ * count_, count_));
  }

  void uneven() {
    const int root = static_cast<int>(count_ + 1) % size_;
    std::vector<Tensors> gathered(1);
    for (int r = 0; r < size_; ++r) gathered[0].push_back(room(width(r)));
    Tensors input{own(0, width(rank_))};
    wait("all_gather", backend_.allgather(gathered, input));
    for (int r = 0; r < size_; ++r) expect("allgather", gathered[0][r], numbers(r, 0, width(r), type_));

    const auto part = [&](int rank) { return cases_.uneven ? width(rank) : count_; };
    std::vector<Tensors> at_root(rank_ == root ? 1 : 0);
    for (int r = 0; r < size_ && rank_ == root; ++r) at_root[0].push_back(room(part(r)));
    c10d::GatherOptions gather;
    gather.rootRank = root;
    Tensors given{own(1, part(rank_))};
    wait("gather", backend_.gather(at_root, given, gather));
    for (int r = 0; r < size_ && rank_ == root; ++r)
      expect("gather", at_root[0][r], numbers(r, 1, part(r), type_));

    std::vector<Tensors> scattered(rank_ == root ? 1 : 0);
    for (int r = 0; r < size_ && rank_ == root; ++r) scattered[0].push_back(own(2 + r, part(r)));
    c10d::ScatterOptions scatter;
    scatter.rootRank = root;
    Tensors got{room(part(rank_))};
    wait("scatter", backend_.scatter(got, scattered, scatter));
    expect("scatter", got[0], numbers(root, 2 + rank_, part(rank_), type_));

    // Rank a sends rank b (a + 2 b) % 4 rows of 3.
    const auto rows = [](int from, int to) { return static_cast<std::int64_t>((from + 2 * to) % 4); };
    const auto message = [&](int from, int to) {
      return numbers(from, to, count_ == 0 ? 0 : rows(from, to) * 3, type_).view({-1, 3});
    };
    Tensors sent, expected, into;
    Sizes sent_rows, received_rows;
    for (int r = 0; r < size_; ++r) {
      sent.push_back(message(rank_, r));
      expected.push_back(message(r, rank_));
      into.push_back(at::zeros_like(expected.back()));
      sent_rows.push_back(sent.back().size(0));
      received_rows.push_back(expected.back().size(0));
    }
    at::Tensor flat_sent = at::cat(sent), flat_into = at::zeros_like(at::cat(expected));
    wait("all_to_all", backend_.alltoall_base(flat_into, flat_sent, received_rows, sent_rows));
    expect("alltoall_base with splits", flat_into, at::cat(expected));
    wait("all_to_all", backend_.alltoall(into, sent));
    for (int r = 0; r < size_; ++r) expect("alltoall", into[r], expected[r]);
  }

  void messages() {
    const int right = (rank_ + 1) % size_, left = (rank_ + size_ - 1) % size_;
    // Two tags, received in the other order.
    Tensors a{own(0, count_)}, b{own(1, count_)}, c{room(count_)}, d{room(count_)};
    auto first = backend_.send(a, right, 3), second = backend_.send(b, right, 4);
    wait("recv", backend_.recv(d, left, 4));
    wait("recv", backend_.recv(c, left, 3));
    wait("send", first);
    wait("send", second);
    expect("recv of tag 3", c[0], numbers(left, 0, count_, type_));
    expect("recv of tag 4", d[0], numbers(left, 1, count_, type_));
    if (count_ > 7) return;  // such a receive may be split, which the next call refuses
    if (rank_ == 0) {
      for (int i = 1; i < size_; ++i) {
        Tensors from_any{room(count_)};
        auto work = backend_.recvAnysource(from_any, 5);
        wait("recv", work);
        expect("recvAnysource", from_any[0], numbers(work->sourceRank(), 2, count_, type_));
      }
    } else {
      Tensors mine{own(2, count_)};
      wait("send", backend_.send(mine, 0, 5));
    }
  }

  c10d::Backend& backend_;
  const BackendCases& cases_;
  const int rank_, size_;
  std::int64_t used_ = 0;  // bytes of the memory
  at::ScalarType type_ = at::kFloat;
  std::int64_t count_ = 0;
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> check_backend(c10d::Backend& backend, const BackendCases& cases) {
  return Check(backend, cases).run();
}

}  // namespace isograd::testing
