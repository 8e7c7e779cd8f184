#include "sampler/attention.hpp"

#include <algorithm>

#include "kernels/paged_attention.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "model/attention/attention.hpp"
#include "model/hooks.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kRowsOfTask = 16;

// The keys (0) or values (1) of one layer, [key heads, page · dim].
template <typename T>
T* part(const Page& page, std::int64_t layer, std::int64_t which) {
  return static_cast<T*>(page.memory.data_ptr()) + layer * page.memory.stride(0) +
         which * page.memory.stride(1);
}

template <typename T>
void write(const PagedPiece& piece, std::int64_t page, std::int64_t layer, const at::Tensor& k,
           const at::Tensor& v) {
  const std::int64_t heads = k.size(1), dim = k.size(2);
  for (std::int64_t i = 0; i < piece.count; ++i) {
    const std::int64_t position = piece.begin + i, at = position % page;
    const Page& to = *(*piece.pages)[static_cast<std::size_t>(position / page)];
    const auto row = [&](const at::Tensor& x) {
      return static_cast<const T*>(x.const_data_ptr()) + (piece.row + i) * x.stride(0);
    };
    T *const keys = part<T>(to, layer, 0), *const values = part<T>(to, layer, 1);
    for (std::int64_t head = 0; head < heads; ++head) {
      const T *const key = row(k) + head * dim, *const value = row(v) + head * dim;
      for (std::int64_t d = 0; d < dim; ++d) keys[(head * dim + d) * page + at] = key[d];
      std::copy_n(value, dim, values + (head * page + at) * dim);
    }
  }
}

template <typename T, typename C>
void attend_on_threads(const std::vector<PagedPiece>& pieces, std::int64_t page, std::int64_t layer,
                       const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out) {
  const std::int64_t heads = q.size(1), key_heads = k.size(1), dim = q.size(2);
  std::vector<PagedPiece> tasks;
  for (const PagedPiece& piece : pieces)
    for (std::int64_t i = 0; i < piece.count; i += kRowsOfTask)
      tasks.push_back({piece.row + i, piece.begin + i, std::min(kRowsOfTask, piece.count - i), piece.pages});
  parallel_for(0, std::ssize(pieces), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i)
      write<T>(pieces[static_cast<std::size_t>(i)], page, layer, k, v);
  });
  parallel_for(0, std::ssize(tasks) * key_heads, 1, [&](std::int64_t first, std::int64_t last) {
    std::vector<const T*> keys, values;
    std::vector<C> scratch;
    for (std::int64_t i = first; i < last; ++i) {
      const PagedPiece& task = tasks[static_cast<std::size_t>(i / key_heads)];
      const std::int64_t head = i % key_heads;
      const kernels::PagedShape shape{.rows = task.count,
                                      .groups = heads / key_heads,
                                      .stride = heads * dim,
                                      .dim = dim,
                                      .page = page,
                                      .visible = task.begin + 1};
      keys.clear(), values.clear();
      for (std::int64_t position = 0; position < shape.most(); position += page) {
        const Page& one = *(*task.pages)[static_cast<std::size_t>(position / page)];
        keys.push_back(part<T>(one, layer, 0) + head * dim * page);
        values.push_back(part<T>(one, layer, 1) + head * dim * page);
      }
      scratch.resize(static_cast<std::size_t>(shape.scratch()));
      const std::int64_t at = (task.row * heads + head * shape.groups) * dim;
      kernels::attend_pages(shape, static_cast<const T*>(q.const_data_ptr()) + at, keys.data(), values.data(),
                            scratch.data(), static_cast<T*>(out.data_ptr()) + at);
    }
  });
}

at::Tensor attend_gathered(const std::vector<PagedPiece>& pieces, std::int64_t page, std::int64_t layer,
                           const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t key_heads = k.size(1), dim = k.size(2);
  const at::Tensor out = at::empty_like(q);
  for (const PagedPiece& piece : pieces) {
    const std::int64_t end = piece.begin + piece.count;
    std::vector<at::Tensor> keys, values;
    for (std::int64_t begin = 0; begin < end; begin += page) {
      const at::Tensor memory =
          (*piece.pages)[static_cast<std::size_t>(begin / page)]->memory.select(0, layer);
      keys.push_back(memory.select(0, 0).view({key_heads, dim, page}).permute({2, 0, 1}));
      values.push_back(memory.select(0, 1).view({key_heads, page, dim}).permute({1, 0, 2}));
      const std::int64_t first = std::max(begin, piece.begin), last = std::min(begin + page, end);
      if (first >= last) continue;
      for (const auto& [from, to] : {std::pair{k, keys.back()}, std::pair{v, values.back()}})
        to.narrow(0, first - begin, last - first)
            .copy_(from.narrow(0, piece.row + first - piece.begin, last - first));
    }
    out.narrow(0, piece.row, piece.count)
        .copy_(cached_attention(q.narrow(0, piece.row, piece.count), at::cat(keys).narrow(0, 0, end),
                                at::cat(values).narrow(0, 0, end)));
  }
  return out;
}

}  // namespace

PagedAttention::PagedAttention(std::int64_t page, const DecoderConfig& config, const ModelHooks& hooks)
    : page_(page), places_(static_cast<std::size_t>(config.layers)) {
  const auto add = [&](std::int64_t begin, std::int64_t count) {
    for (std::int64_t layer = begin; layer < begin + count; ++layer)
      places_[static_cast<std::size_t>(layer)] = layers_++;
  };
  if (hooks.pipeline.stages)
    for (const auto& stage : hooks.pipeline.stages()) add(stage.begin, stage.count);
  else
    add(0, config.layers);
}

at::Tensor PagedAttention::attend(const std::vector<PagedPiece>& pieces, std::int64_t layer,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  bool by_products) const {
  for (const PagedPiece& piece : pieces)
    for (Page* page : *piece.pages)
      if (!page->memory.defined())
        page->memory = at::empty({layers_, 2, k.size(1), page_ * k.size(2)}, k.options());
  const std::int64_t place = places_[static_cast<std::size_t>(layer)];
  const at::Tensor dense_q = q.contiguous();
  if (by_products || !q.is_cpu()) return attend_gathered(pieces, page_, place, dense_q, k, v);
  const at::Tensor out = at::empty_like(dense_q), dense_k = k.contiguous(), dense_v = v.contiguous();
  if (q.scalar_type() == at::kDouble)
    attend_on_threads<double, double>(pieces, page_, place, dense_q, dense_k, dense_v, out);
  else if (q.scalar_type() == at::kFloat)
    attend_on_threads<float, float>(pieces, page_, place, dense_q, dense_k, dense_v, out);
  else
    attend_on_threads<kernels::Bfloat16, float>(pieces, page_, place, dense_q, dense_k, dense_v, out);
  return out;
}

}  // namespace isograd
