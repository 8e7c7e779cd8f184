// Every rank's micro-batches on every rank, as flat tensors on the way.
#include <array>

#include "verify/experiments.hpp"

namespace isograd {
namespace {

// A list of batches as flat tensors: whole numbers, weights, the bytes of inputs.
struct Flat {
  at::Tensor numbers, weights, inputs;
};

// Where the next list begins.
struct Place {
  std::int64_t number = 0, weight = 0, input = 0;
};

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous().flatten().view(at::kByte);
}

Flat flatten(const MicroBatches& batches) {
  std::vector<std::int64_t> head = {static_cast<std::int64_t>(batches.size())};
  std::vector<at::Tensor> bodies, weights = {at::empty({0}, at::kDouble)},
                                  inputs = {at::empty({0}, at::kByte)};
  for (const Batch& batch : batches) {
    head.insert(head.end(), {batch.num_tokens(), batch.num_fragments(), batch.weights.defined() ? 1 : 0,
                             static_cast<std::int64_t>(batch.sample_targets.size()), batch.draw,
                             static_cast<std::int64_t>(batch.inputs.size())});
    head.insert(head.end(), batch.cu_seqlens.begin(), batch.cu_seqlens.end());
    head.insert(head.end(), batch.sample_ids.begin(), batch.sample_ids.end());
    head.insert(head.end(), batch.sample_targets.begin(), batch.sample_targets.end());
    for (const at::Tensor& input : batch.inputs) {
      head.insert(head.end(), {static_cast<std::int64_t>(input.scalar_type()), input.dim()});
      head.insert(head.end(), input.sizes().begin(), input.sizes().end());
      if (input.numel() > 0) inputs.push_back(bytes_of(input));
    }
    for (const at::Tensor& tensor : {batch.tokens, batch.targets, batch.positions})
      bodies.push_back(tensor.defined() ? tensor.to(at::kCPU, at::kLong).reshape({-1})
                                        : at::zeros({batch.num_tokens()}, at::kLong));
    if (batch.weights.defined()) weights.push_back(batch.weights.to(at::kCPU, at::kDouble));
  }
  bodies.insert(bodies.begin(), at::tensor(head, at::kLong));
  return {at::cat(bodies), at::cat(weights), at::cat(inputs)};
}

// The next list of batches; `at` moves past it.
MicroBatches unflatten(const Flat& flat, Place& at) {
  auto& [number, weight, byte] = at;
  const auto* values = flat.numbers.const_data_ptr<std::int64_t>();
  const std::int64_t count = values[number++];
  struct Shape {
    std::int64_t tokens;
    bool weighted;
  };
  MicroBatches batches(static_cast<std::size_t>(count));
  std::vector<Shape> shapes;
  for (Batch& batch : batches) {
    const std::int64_t tokens = values[number], fragments = values[number + 1], sized = values[number + 3];
    shapes.push_back({tokens, values[number + 2] != 0});
    batch.draw = values[number + 4];
    batch.inputs.resize(static_cast<std::size_t>(values[number + 5]));
    number += 6;
    const auto take = [&](std::vector<std::int64_t>& list, std::int64_t length) {
      list.assign(values + number, values + number + length);
      number += length;
    };
    take(batch.cu_seqlens, fragments + 1);
    take(batch.sample_ids, fragments);
    take(batch.sample_targets, sized);
    for (at::Tensor& input : batch.inputs) {
      const auto type = static_cast<at::ScalarType>(values[number]);
      std::vector<std::int64_t> sizes;
      const std::int64_t dims = values[number + 1];
      number += 2;
      take(sizes, dims);
      input = at::empty(sizes, type);
      if (input.numel() == 0) continue;
      const auto bytes = static_cast<std::int64_t>(input.nbytes());
      bytes_of(input).copy_(flat.inputs.narrow(0, byte, bytes));
      byte += bytes;
    }
  }
  for (std::size_t b = 0; b < batches.size(); ++b) {
    for (at::Tensor* tensor : {&batches[b].tokens, &batches[b].targets, &batches[b].positions}) {
      *tensor = flat.numbers.narrow(0, number, shapes[b].tokens).clone();
      number += shapes[b].tokens;
    }
    if (!shapes[b].weighted) continue;
    batches[b].weights = flat.weights.narrow(0, weight, shapes[b].tokens).clone();
    weight += shapes[b].tokens;
  }
  return batches;
}

}  // namespace

DataByRank gather_batches(const MicroBatches& local, Group& group) {
  const Flat own = flatten(local);
  const Flat all{group.all_gather_rows(own.numbers), group.all_gather_rows(own.weights),
                 group.all_gather_rows(own.inputs)};
  DataByRank data;
  Place at;
  for (int rank = 0; rank < group.size(); ++rank) data.push_back(unflatten(all, at));
  return data;
}

}  // namespace isograd
