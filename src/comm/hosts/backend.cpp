#include "comm/hosts/backend.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/account.hpp"
#include "base/refuse.hpp"
#include "comm/call.hpp"
#include "comm/queue.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "kernels/reduce.hpp"

namespace isograd {
namespace {

using queue::Part;
using queue::Stage;
using Tensors = std::vector<at::Tensor>;

// Places whose messages two operations might confuse have separate tags.
enum Place : int { kReduceWithin, kExchange, kReturn, kGatherWithin };

constexpr int kFirstTag = 32760;  // every MPI has tags up to 32767

constexpr int tag_of(Place place) { return kFirstTag + place; }

// 16-bit floats as float32; other tensors are returned as they are.
at::Tensor widened(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kBFloat16 || type == at::kHalf ? tensor.to(at::kFloat) : tensor;
}

// Combines one tensor of each host, in the hosts' order. `into` may be one of them.
void combine(const shm::Reduction& reduction, const Tensors& of_hosts, const at::Tensor& into) {
  std::vector<const void*> inputs;
  for (const at::Tensor& one : of_hosts) inputs.push_back(one.const_data_ptr());
  void* output = into.data_ptr();
  kernels::reduce_slices(reduction.number, reduction.combine, inputs.data(), static_cast<int>(inputs.size()),
                         0, into.numel(), &output, 1);
}

std::vector<Part> of(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  std::vector<Part> parts;
  for (auto& work : works) parts.push_back({std::move(work)});
  return parts;
}

queue::Works gathered(const c10::intrusive_ptr<ShmBackend>& within, const Tensors& outputs,
                      const at::Tensor& input) {
  std::vector<Tensors> lists{outputs};
  Tensors inputs{input};
  return within->allgather(lists, inputs);
}

Tensors cut_up(const at::Tensor& flat, const std::vector<std::int64_t>& pieces) {
  const at::NoGradGuard no_graph;
  return flat.split_with_sizes(pieces);
}

// Adds `more` to the end of the last stage.
void end_with(std::vector<Stage>& stages, std::function<void()> more) {
  if (stages.empty()) stages.push_back({kGatherWithin, [] { return std::vector<Part>{}; }});
  stages.back().end = [before = stages.back().end, more = std::move(more)] { before(), more(); };
}

class OverHosts final : public HostsBackend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  OverHosts(Parts parts, std::shared_ptr<HostsOfGroup> hosts, const std::vector<std::string>& names,
            std::string group, std::chrono::milliseconds timeout)
      : HostsBackend(parts.all->getRank(), parts.all->getSize()),
        group_(std::move(group)),
        name_("shm+" + parts.all->getBackendName()) {
    auto links = std::make_shared<Links>();
    links->parts = parts;
    for (const int number : hosts->numbers) links->names.push_back(names[static_cast<std::size_t>(number)]);
    const auto [fewest, most] =
        std::ranges::minmax(hosts->members, {}, [](const std::vector<int>& ranks) { return ranks.size(); });
    links->lanes = static_cast<int>(fewest.size());
    links->even = fewest.size() == most.size();
    links->hosts = std::move(hosts);
    ISOGRAD_INVARIANT(links->host_count() > 1, "a group of one host");
    ISOGRAD_INVARIANT(!parts.reducing == (links->here() == 1), "shared memory of another group");
    links_ = links;
    const auto give_up = [parts](const std::string& reason) {
      for (const auto& within : {parts.reducing, parts.gathering})
        if (within) within->poison(reason);
      try {
        parts.all->abort();
      } catch (...) {  // a backend without abort(): its peers have its own timeout
      }
    };
    queue_ = std::make_shared<queue::Queue>(
        queue::Queue::Names{group_, name_, rank_, size_, /*peers_know_more=*/true}, timeout, give_up);
  }

  const std::string getBackendName() const override { return name_; }  // "shm+mpi"
  void setTimeout(std::chrono::milliseconds timeout) override { queue_->set_timeout(timeout); }
  void abort() override { give_up("this rank has given the group up"); }
  void give_up(const std::string& reason) noexcept override { queue_->fail(reason); }

  // Each lane sums its piece over this host, then sums a part of it over all hosts. The results go the same
  // way back.
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override {
    const at::NoGradGuard no_graph;
    const auto check = call("all_reduce");
    const at::Tensor tensor = check.only(tensors);
    check.piece(tensor);
    const at::Tensor flat = widened(tensor).view(-1);
    const auto reduction = this->reduction(check, flat, options.reduceOp);
    const auto links = links_;
    const std::size_t host = links->hosts->host, place = links->hosts->place;
    const Tensors pieces = cut_up(flat, links->cut(flat.numel()));
    const at::Tensor piece = pieces[place];
    const Tensors parts = cut_up(piece, split_rows(piece.numel(), links->host_count()));
    const at::Tensor own = parts[host];

    std::vector<Stage> stages;
    if (links->here() > 1) stages.push_back(links->sum_within({pieces}, {piece}, options.reduceOp));
    if (links->sends()) {
      stages.push_back(links->sum_between(parts, own, reduction));
      stages.push_back({kReturn, [links, parts, own] {
                          return links->exchange(Tensors(parts.size(), own), parts, tag_of(kReturn));
                        }});
    }
    if (links->here() > 1)
      stages.push_back({kGatherWithin, [links, pieces, piece] {
                          return of({gathered(links->parts.gathering, pieces, piece)});
                        }});
    if (!flat.is_alias_of(tensor)) end_with(stages, [tensor, flat] { tensor.view(-1).copy_(flat); });
    return queue_->begin("all_reduce", std::move(stages), options.timeout);
  }
  // All parts must be equal. Where all hosts have the same number of ranks, each piece belongs to one rank of
  // the other host, and the exchange completes it. Otherwise a host's parts are split over the lanes, and its
  // ranks gather them at the end.
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override {
    const at::NoGradGuard no_graph;
    const auto check = call("reduce_scatter");
    check.piece(input), check.piece(output);
    check.cut(input, output);
    const auto links = links_;
    const std::size_t host = links->hosts->host, place = links->hosts->place;
    const std::int64_t part = output.numel();
    const at::Tensor flat = widened(input).view(-1);
    const auto reduction = this->reduction(check, flat, options.reduceOp);
    const Tensors slices = flat.split(part);

    Lists pieces = links->by_host(slices);  // by host, then by rank of this host
    for (Tensors& of_host : pieces)
      if (!links->even) {
        const at::Tensor whole = of_host.size() == 1 ? of_host[0] : at::cat(of_host);
        of_host = cut_up(whole, links->cut(whole.numel()));
      }
    Tensors sums;  // of this host's ranks, for each host
    for (const Tensors& of_host : pieces)
      sums.push_back(links->here() > 1 ? at::empty_like(of_host[place]) : of_host[place]);
    const bool gathers = !links->even && links->here() > 1;
    const bool direct = !gathers && output.scalar_type() == flat.scalar_type();
    const at::Tensor own = direct ? output.view(-1) : at::empty_like(sums[host]);

    std::vector<Stage> stages;
    if (links->here() > 1) stages.push_back(links->sum_within(pieces, sums, options.reduceOp));
    if (links->sends()) stages.push_back(links->sum_between(sums, own, reduction));
    if (gathers) {
      const at::Tensor whole = at::empty({part * links->here()}, flat.options());
      stages.push_back({kGatherWithin,
                        [links, whole, own] {
                          const Tensors pieces = cut_up(whole, links->cut(whole.numel()));
                          return of({gathered(links->parts.gathering, pieces, own)});
                        },
                        [whole, output, part, place] {
                          output.view(-1).copy_(
                              whole.narrow(0, static_cast<std::int64_t>(place) * part, part));
                        }});
    } else if (!direct) {
      end_with(stages, [output, own] { output.view(-1).copy_(own); });
    }
    return queue_->begin("reduce_scatter", std::move(stages), options.timeout);
  }
  // The reverse of reduce_scatter: lanes exchange parts between hosts, then each host's ranks gather them.
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override {
    const at::NoGradGuard no_graph;
    const auto check = call("all_gather");
    check.piece(input), check.piece(output);
    check.cut(output, input);
    const auto links = links_;
    const std::size_t host = links->hosts->host, place = links->hosts->place;
    const std::int64_t part = input.numel();
    const Tensors slices = output.view(-1).split(part);

    const Lists parts = links->by_host(slices);  // by host: its ranks' parts
    Lists pieces = parts;                        // as `parts`, by rank of this host
    Tensors wholes;                              // by host, where parts are split over lanes
    for (Tensors& of_host : pieces)
      if (!links->even) {
        wholes.push_back(at::empty({part * static_cast<std::int64_t>(of_host.size())}, output.options()));
        of_host = cut_up(wholes.back(), links->cut(wholes.back().numel()));
      }
    const at::Tensor mine = input.view(-1);
    slices[static_cast<std::size_t>(rank_)].copy_(mine);

    std::vector<Stage> stages;
    if (!links->even && links->here() > 1)
      stages.push_back({kReduceWithin, [links, mine, part, whole = wholes[host]] {
                          return of({gathered(links->parts.reducing, whole.split(part), mine)});
                        }});
    else if (!links->even)
      wholes[host].copy_(mine);
    if (links->sends()) {
      Tensors received;
      for (const Tensors& of_host : pieces) received.push_back(of_host[place]);
      stages.push_back({kReturn, [links, received, own = received[host]] {
                          return links->exchange(Tensors(received.size(), own), received, tag_of(kReturn));
                        }});
    }
    if (links->here() > 1)
      stages.push_back({kGatherWithin, [links, pieces, host, place] {
                          std::vector<Works> works;
                          for (std::size_t i = 0; i < pieces.size(); ++i) {
                            if (!links->even && i == host) continue;  // there already
                            works.push_back(gathered(links->parts.gathering, pieces[i], pieces[i][place]));
                          }
                          return of(std::move(works));
                        }});
    if (!links->even)
      stages.back().end = [parts, wholes, part] {
        for (std::size_t i = 0; i < parts.size(); ++i)
          for (std::size_t j = 0; j < parts[i].size(); ++j)
            parts[i][j].copy_(wholes[i].narrow(0, static_cast<std::int64_t>(j) * part, part));
      };
    return queue_->begin("all_gather", std::move(stages), options.timeout);
  }

  // Passed on to `all`.
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override {
    return pass_on("reduce", &c10d::Backend::reduce, options.timeout, tensors, options);
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override {
    return pass_on("broadcast", &c10d::Backend::broadcast, options.timeout, tensors, options);
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override {
    return pass_on("gather", &c10d::Backend::gather, options.timeout, outputs, inputs, options);
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options = {}) override {
    return pass_on("scatter", &c10d::Backend::scatter, options.timeout, outputs, inputs, options);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options = {}) override {
    return pass_on("all_to_all", &c10d::Backend::alltoall_base, options.timeout, output, input, output_splits,
                   input_splits, options);
  }
  Works send(Tensors& tensors, int to, int tag) override {
    check_tag("send", tag);
    return pass_on("send", &c10d::Backend::send, c10d::kUnsetTimeout, tensors, to, tag);
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    check_tag("recv", tag);
    return pass_on("recv", &c10d::Backend::recv, c10d::kUnsetTimeout, tensors, from, tag);
  }
  Works barrier(const c10d::BarrierOptions& options = {}) override {
    return pass_on("barrier", &c10d::Backend::barrier, options.timeout, options);
  }

  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype) override {
    if (!links_->parts.reducing) return at::zeros({numel}, at::TensorOptions(dtype));
    count_shared(numel * static_cast<std::int64_t>(c10::elementSize(dtype)));
    return links_->parts.reducing->empty_shared(numel, dtype);
  }

 private:
  // State that stages keep beyond the life of the backend.
  struct Links : std::enable_shared_from_this<Links> {
    Parts parts;
    std::shared_ptr<HostsOfGroup> hosts;
    std::vector<std::string> names;  // of hosts
    int lanes = 0;                   // the smallest number of ranks of a host
    bool even = true;                // all hosts have the same number of ranks

    int host_count() const { return static_cast<int>(hosts->members.size()); }
    int here() const { return static_cast<int>(hosts->members[hosts->host].size()); }
    bool sends() const { return static_cast<int>(hosts->place) < lanes; }
    // How `numel` elements are split over the ranks of this host. Only lanes get a part.
    Splits cut(std::int64_t numel) const {
      Splits pieces = split_rows(numel, lanes);
      pieces.resize(static_cast<std::size_t>(here()), 0);
      return pieces;
    }
    // The ranks' tensors by host, in the order of the host's ranks.
    Lists by_host(const Tensors& of_ranks) const {
      Lists of_hosts;
      for (const std::vector<int>& ranks : hosts->members) {
        of_hosts.emplace_back();
        for (const int rank : ranks) of_hosts.back().push_back(of_ranks[static_cast<std::size_t>(rank)]);
      }
      return of_hosts;
    }
    // Stages of sums. sum_within sums pieces[i] over the ranks of this host into sums[i]. sum_between sums
    // this lane's sums of all hosts into `own`, which may be this host's sum.
    queue::Stage sum_within(Lists pieces, Tensors sums, const c10d::ReduceOp& op) const {
      return {kReduceWithin,
              [within = parts.reducing, pieces = std::move(pieces), sums = std::move(sums), op] {
                std::vector<Works> works;
                for (std::size_t i = 0; i < pieces.size(); ++i) {
                  Lists inputs{pieces[i]};
                  Tensors result{sums[i]};
                  c10d::ReduceScatterOptions asked;
                  asked.reduceOp = op;
                  works.push_back(within->reduce_scatter(result, inputs, asked));
                }
                return of(std::move(works));
              }};
    }
    queue::Stage sum_between(Tensors sums, at::Tensor own, const shm::Reduction& reduction) const {
      Tensors received(sums.size());
      for (at::Tensor& one : received) one = at::empty_like(own);
      received[hosts->host] = sums[hosts->host];
      return {kExchange,
              [links = shared_from_this(), sums = std::move(sums), received] {
                return links->exchange(sums, received, tag_of(kExchange));
              },
              [reduction, received, own] { combine(reduction, received, own); }};
    }
    // Sends to_hosts[h] to this lane's rank on each other host h and receives from_hosts[h] from it.
    std::vector<queue::Part> exchange(const Tensors& to_hosts, const Tensors& from_hosts, int tag) const {
      std::vector<Part> begun;
      for (std::size_t other = 0; other < hosts->members.size(); ++other) {
        if (other == hosts->host) continue;
        const int rank = hosts->members[other][hosts->place];
        if (from_hosts[other].numel() > 0) {
          Tensors into{from_hosts[other]};
          begun.push_back({queue::polled(parts.all->recv(into, rank, tag)),
                           fmt::format("host {} (rank {})", names[other], rank)});
        }
        if (to_hosts[other].numel() > 0) {
          Tensors from{to_hosts[other]};
          begun.push_back({queue::polled(parts.all->send(from, rank, tag))});
          hosts->add_across(static_cast<std::int64_t>(from[0].nbytes()));
        }
      }
      return begun;
    }
  };

  template <typename Method, typename... Arguments>
  Works pass_on(const char* operation, Method method, std::chrono::milliseconds timeout,
                Arguments&... arguments) {
    return queue_->follow(
        operation,
        [&](const std::string&) { return queue::polled((links_->parts.all.get()->*method)(arguments...)); },
        timeout);
  }
  Call call(const char* operation) const { return {operation, group_, rank_, size_, name_.c_str()}; }
  shm::Reduction reduction(const Call& check, const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    const auto reduction = check.reduction(tensor, op);
    using kernels::Combine;
    if (reduction.combine == Combine::kAverage || reduction.combine == Combine::kScaledSum)
      check.refuse("a mean or a scaled sum over several hosts", "SUM, MAX, MIN, PRODUCT, BAND, BOR or BXOR",
                   "Sum, and divide once");
    return reduction;
  }
  void check_tag(const char* operation, int tag) const {
    if (tag < kFirstTag) return;
    call(operation).refuse(fmt::format("tag {}", tag),
                           fmt::format("0 to {}: above are the group's own messages", kFirstTag - 1),
                           "Choose another tag");
  }

  std::string group_, name_;
  std::shared_ptr<const Links> links_;
  std::shared_ptr<queue::Queue> queue_;
};

}  // namespace

c10::intrusive_ptr<HostsBackend> make_over_hosts(HostsBackend::Parts parts,
                                                 std::shared_ptr<HostsOfGroup> hosts,
                                                 const std::vector<std::string>& names, std::string group,
                                                 std::chrono::milliseconds timeout) {
  return c10::make_intrusive<OverHosts>(std::move(parts), std::move(hosts), names, std::move(group), timeout);
}

}  // namespace isograd
