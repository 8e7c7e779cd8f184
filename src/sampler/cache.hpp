// Pages of cached keys and values: who uses them, which prefixes they hold, and which are given up first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace isograd {

struct Page {
  at::Tensor memory{};     // [layers, 2, key heads, page · dim]: keys turned [dim, page], values [page, dim]
  std::int64_t users = 0;  // sequences that read it
  bool in_tree = false;
};

// A sequence reserves the pages that it may need before it starts, so that it never waits in the middle.
// Pages without users stay for later prompts until their memory is wanted.
class PageCache {
 public:
  PageCache(std::int64_t page, std::int64_t capacity) : page_(page), capacity_(capacity) {}

  std::int64_t page() const { return page_; }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t pages_of(std::int64_t positions) const { return (positions + page_ - 1) / page_; }

  // The pages that hold the longest kept prefix of `tokens`.
  std::vector<Page*> find(std::uint64_t weights, std::span<const std::int64_t> tokens);
  // Keeps the whole pages of a sequence for others.
  void keep(std::uint64_t weights, std::span<const std::int64_t> tokens, const std::vector<Page*>& pages);
  void forget(std::uint64_t weights);

  // Whether a sequence may start that reads `prefix` and takes `count` pages; then it is their user.
  bool reserve(std::int64_t count, const std::vector<Page*>& prefix);
  Page* take();  // one of the reserved pages
  void release(const std::vector<Page*>& pages, std::int64_t reserved);

 private:
  struct Node {
    Page* page = nullptr;
    std::uint64_t used = 0;  // the last time; never before a child's
    std::map<std::vector<std::int64_t>, std::unique_ptr<Node>> children{};  // by the tokens of their page
  };
  std::vector<std::int64_t> block(std::span<const std::int64_t> tokens, std::size_t index) const;
  void drop(Node& node);  // with all below it
  void give_up_oldest();

  const std::int64_t page_, capacity_;
  std::deque<Page> pages_;
  std::vector<Page*> free_;
  std::map<std::uint64_t, Node> roots_;  // by weights
  std::int64_t in_use_ = 0, reserved_ = 0;
  std::uint64_t clock_ = 0;
};

}  // namespace isograd
