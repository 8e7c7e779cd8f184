#include "sampler/cache.hpp"

#include <algorithm>
#include <functional>

#include "isograd/error.hpp"

namespace isograd {

std::vector<std::int64_t> PageCache::block(std::span<const std::int64_t> tokens, std::size_t index) const {
  const auto own = tokens.subspan(index * static_cast<std::size_t>(page_), static_cast<std::size_t>(page_));
  return {own.begin(), own.end()};
}

std::vector<Page*> PageCache::find(std::uint64_t weights, std::span<const std::int64_t> tokens) {
  std::vector<Page*> found;
  const auto root = roots_.find(weights);
  if (root == roots_.end()) return found;
  Node* node = &root->second;
  node->used = ++clock_;
  while ((found.size() + 1) * static_cast<std::size_t>(page_) <= tokens.size()) {
    const auto next = node->children.find(block(tokens, found.size()));
    if (next == node->children.end()) break;
    node = next->second.get();
    node->used = clock_;
    found.push_back(node->page);
  }
  return found;
}

void PageCache::keep(std::uint64_t weights, std::span<const std::int64_t> tokens,
                     const std::vector<Page*>& pages) {
  Node* node = &roots_[weights];
  node->used = ++clock_;
  for (std::size_t i = 0; (i + 1) * static_cast<std::size_t>(page_) <= tokens.size(); ++i) {
    auto& next = node->children[block(tokens, i)];
    if (!next) {
      next = std::make_unique<Node>(Node{.page = pages[i]});
      next->page->in_tree = true;
    }
    node = next.get();
    node->used = clock_;
  }
}

void PageCache::drop(Node& node) {
  for (auto& [tokens, child] : node.children) {
    drop(*child);
    child->page->in_tree = false;
    if (child->page->users == 0) free_.push_back(child->page);
  }
  node.children.clear();
}

void PageCache::forget(std::uint64_t weights) {
  const auto root = roots_.find(weights);
  if (root == roots_.end()) return;
  drop(root->second);
  roots_.erase(root);
}

void PageCache::give_up_oldest() {
  Node* parent = nullptr;
  const std::vector<std::int64_t>* tokens = nullptr;
  std::uint64_t oldest = 0;
  const std::function<void(Node&)> look = [&](Node& node) {
    for (auto& [block, child] : node.children) {
      // A child is as old as its parent or older, and goes first.
      if (child->page->users == 0 && (!parent || child->used <= oldest))
        parent = &node, tokens = &block, oldest = child->used;
      look(*child);
    }
  };
  for (auto& [weights, root] : roots_) look(root);
  ISOGRAD_INVARIANT(parent, "more pages taken than reserved");
  const auto found = parent->children.find(*tokens);
  drop(*found->second);
  found->second->page->in_tree = false;
  free_.push_back(found->second->page);
  parent->children.erase(found);
}

bool PageCache::reserve(std::int64_t count, const std::vector<Page*>& prefix) {
  const auto idle = std::ranges::count_if(prefix, [](const Page* page) { return page->users == 0; });
  if (in_use_ + reserved_ + idle + count > capacity_) return false;
  in_use_ += idle, reserved_ += count;
  for (Page* page : prefix) ++page->users;
  return true;
}

Page* PageCache::take() {
  ISOGRAD_INVARIANT(reserved_ > 0, "a page that was not reserved");
  if (free_.empty() && std::ssize(pages_) < capacity_) free_.push_back(&pages_.emplace_back());
  if (free_.empty()) give_up_oldest();
  Page* page = free_.back();
  free_.pop_back();
  --reserved_, ++in_use_;
  page->users = 1;
  return page;
}

void PageCache::release(const std::vector<Page*>& pages, std::int64_t reserved) {
  reserved_ -= reserved;
  for (Page* page : pages) {
    if (--page->users > 0) continue;
    --in_use_;
    if (!page->in_tree) free_.push_back(page);
  }
}

}  // namespace isograd
