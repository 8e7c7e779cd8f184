#include "parallel/expert/dispatch.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>

#include "base/refuse.hpp"
#include "comm/linear_map.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// Rows in another order; their gradients take the order back.
at::Tensor reordered(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& back) {
  const auto by = [device = rows.device()](const at::Tensor& places) {  // which are counted on the host
    return [places = places.to(device)](const at::Tensor& x) { return x.index_select(0, places); };
  };
  return apply_map(rows, by(order), by(back));
}

}  // namespace

ExpertDispatch::ExpertDispatch(Group ep, std::int64_t experts)
    : ep_(std::move(ep)), own_(split_rows(experts, ep_.size())) {
  if (experts < ep_.size())
    refuse("parallel.ep", fmt::format("{} ranks for {} experts", ep_.size(), experts),
           "an expert for each rank at least", "Lower parallel.ep");
  first_ = std::accumulate(own_.begin(), own_.begin() + ep_.rank(), std::int64_t{0});
}

Journey ExpertDispatch::plan(const std::vector<std::int64_t>& begin) {
  return plan(std::vector<std::vector<std::int64_t>>(1, begin)).front();
}

std::vector<Journey> ExpertDispatch::plan(const std::vector<std::vector<std::int64_t>>& begins) {
  const std::int64_t experts = std::accumulate(own_.begin(), own_.end(), std::int64_t{0});
  const auto parts = static_cast<std::int64_t>(begins.size());
  at::Tensor own = at::empty({parts, experts}, at::kLong);
  auto* count = own.mutable_data_ptr<std::int64_t>();
  for (const auto& begin : begins) {
    ISOGRAD_INVARIANT(static_cast<std::int64_t>(begin.size()) == experts + 1,
                      fmt::format("{} groups of rows for {} experts", begin.size() - 1, experts));
    for (std::size_t e = 0; e + 1 < begin.size(); ++e) *count++ = begin[e + 1] - begin[e];
  }
  const at::Tensor counts = ep_.all_gather(own);  // [ranks, parts, experts]
  std::vector<Journey> journeys;
  for (std::int64_t part = 0; part < parts; ++part)
    journeys.push_back(journey_of(begins[static_cast<std::size_t>(part)], counts.select(1, part)));
  return journeys;
}

Journey ExpertDispatch::journey_of(const std::vector<std::int64_t>& begin, const at::Tensor& counts) const {
  const auto count = counts.accessor<std::int64_t, 2>();

  Journey journey;
  std::int64_t expert = 0;
  for (const std::int64_t of_rank : own_) {
    const auto first = static_cast<std::size_t>(expert), last = static_cast<std::size_t>(expert + of_rank);
    journey.sent.push_back(begin[last] - begin[first]);
    expert += of_rank;
  }
  // What arrives lies by rank and, within a rank, by expert. Where each group begins:
  std::vector<std::vector<std::int64_t>> arrives(static_cast<std::size_t>(ep_.size()));
  std::int64_t rows = 0;
  for (int rank = 0; rank < ep_.size(); ++rank) {
    const std::int64_t before = rows;
    for (std::int64_t e = 0; e < own_experts(); ++e) {
      arrives[static_cast<std::size_t>(rank)].push_back(rows);
      rows += count[rank][first_ + e];
    }
    journey.received.push_back(rows - before);
  }
  journey.arrival = at::empty({rows}, at::kLong), journey.place = at::empty({rows}, at::kLong);
  auto *arrival = journey.arrival.mutable_data_ptr<std::int64_t>(),
       *place = journey.place.mutable_data_ptr<std::int64_t>();
  std::int64_t next = 0;
  for (std::int64_t e = 0; e < own_experts(); ++e) {
    journey.begin.push_back(next);
    for (int rank = 0; rank < ep_.size(); ++rank)
      for (std::int64_t i = 0; i < count[rank][first_ + e]; ++i, ++next) {
        const std::int64_t from = arrives[static_cast<std::size_t>(rank)][static_cast<std::size_t>(e)] + i;
        arrival[next] = from, place[from] = next;
      }
  }
  journey.begin.push_back(next);
  return journey;
}

at::Tensor ExpertDispatch::to_experts(const at::Tensor& rows, const Journey& journey) const {
  Exchange exchange = depart(rows, journey);
  return arrive(exchange, journey);
}

at::Tensor ExpertDispatch::back(const at::Tensor& rows, const Journey& journey) const {
  return depart_back(rows, journey).finish();
}

Exchange ExpertDispatch::depart(const at::Tensor& rows, const Journey& journey) const {
  return Exchange::start(ep_, rows, journey.received, journey.sent);
}

at::Tensor ExpertDispatch::arrive(Exchange& exchange, const Journey& journey) const {
  return reordered(exchange.finish(), journey.arrival, journey.place);
}

Exchange ExpertDispatch::depart_back(const at::Tensor& rows, const Journey& journey) const {
  return Exchange::start(ep_, reordered(rows, journey.place, journey.arrival), journey.sent,
                         journey.received);
}

}  // namespace isograd
