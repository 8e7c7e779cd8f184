#include "layout/copies.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/files.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

std::int64_t hash_of(const void* data, std::size_t bytes) {
  return static_cast<std::int64_t>(std::stoull(checksum(data, bytes), nullptr, 16));
}

// Each rank's text, by rank. Collective.
std::vector<std::string> all_texts(const std::string& mine, Group& group) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  std::copy(mine.begin(), mine.end(), bytes.data_ptr<std::uint8_t>());
  const at::Tensor sizes = group.all_gather(at::full({1}, bytes.size(0), at::kLong)).flatten();
  const at::Tensor all = group.all_gather_rows(bytes);
  const auto* begin = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto size = static_cast<std::size_t>(sizes[rank].item<std::int64_t>());
    texts.emplace_back(begin, size);
    begin += size;
  }
  return texts;
}

// The line of each text in which they differ first; a text that has ended says "nothing more".
std::pair<std::string, std::string> first_difference(const std::string& one, const std::string& other) {
  const auto line = [](const std::string& text, std::size_t begin) {
    return begin >= text.size() ? std::string("nothing more")
                                : text.substr(begin, text.find('\n', begin) - begin);
  };
  std::size_t begin = 0;
  while (line(one, begin) == line(other, begin)) begin += line(one, begin).size() + 1;
  return {line(one, begin), line(other, begin)};
}

}  // namespace

void check_same_placements(const std::vector<std::pair<std::string, Placement>>& placements, Group group) {
  if (group.size() == 1) return;
  std::vector<std::string> texts;
  for (const auto& [name, placement] : placements)
    texts.push_back(fmt::format("{}", fmt::join(describe(name, placement), "\n")));
  const auto count = static_cast<std::int64_t>(texts.size());
  const at::Tensor counts = group.all_gather(at::full({1}, count, at::kLong));
  const auto most = counts.max().item<std::int64_t>();
  at::Tensor mine = at::zeros({most}, at::kLong);  // 0: this rank has no such parameter
  for (std::int64_t i = 0; i < count; ++i) mine[i] = hash_of(texts[i].data(), texts[i].size());
  const at::Tensor all = group.all_gather(mine);  // [ranks, most]
  const at::Tensor differs = all.ne(all.select(0, 0)).any(0);
  if (!differs.any().item<bool>()) return;
  const auto index = differs.to(at::kLong).argmax().item<std::int64_t>();
  const auto by_rank = all_texts(index < count ? texts[index] : "no such parameter", group);
  const auto other =
      std::find_if(by_rank.begin(), by_rank.end(), [&](const auto& text) { return text != by_rank[0]; });
  const auto [first, second] = first_difference(by_rank[0], *other);
  const std::string& named = by_rank[0].find('\'') != std::string::npos ? by_rank[0] : *other;
  refuse(fmt::format("the placement of {}", named.substr(0, named.find('\n'))),
         fmt::format("{} on rank 0, {} on rank {}", first, second, other - by_rank.begin()),
         "the same placements in the same order on every rank",
         "Make the placements from what all ranks know alike");
}

at::Tensor checksums(const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  at::Tensor result = at::empty({static_cast<std::int64_t>(tensors.size())}, at::kLong);
  auto* sums = result.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor values = tensors[i].detach().cpu().contiguous();
    const std::string bits = values.nbytes() > 0 ? checksum(values.const_data_ptr(), values.nbytes()) : "";
    const std::string text =
        fmt::format("{} [{}] {}", c10::toString(values.scalar_type()), fmt::join(values.sizes(), ", "), bits);
    sums[i] = hash_of(text.data(), text.size());
  }
  return result;
}

}  // namespace isograd
