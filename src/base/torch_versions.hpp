// Names that differ between the accepted versions of LibTorch, 2.10 to 2.15 (cmake/FindLibTorch.cmake). No
// other file depends on the version. The assertions say which change each branch is for.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <type_traits>
#include <utility>

namespace isograd::torch_versions {

// 2.12 gave the operation a kind of its own.
#if TORCH_VERSION_MINOR < 12
inline constexpr c10d::OpType kReduceScatterCoalesced = c10d::OpType::COALESCED;
#else
inline constexpr c10d::OpType kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

// 2.13 named the scaled sum without NCCL, counts nodes by intrusive_ptr, and made a refusing storage's setter
// public.
#if TORCH_VERSION_MINOR < 13

static_assert(std::is_base_of_v<std::enable_shared_from_this<torch::autograd::Node>, torch::autograd::Node>);
using PreMulSum = c10d::NCCLPreMulSumSupplement;
inline c10d::ReduceOp pre_mul_sum(double factor) { return c10d::makeNCCLPreMulSum(factor); }

template <class Node, class... Arguments>
std::shared_ptr<Node> make_node(Arguments&&... arguments) {
  return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
}

// LibTorch has no setter to make a refusing storage readable again. An explicit instantiation may access the
// private member.
bool& refuses(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*member>
struct Refuses {
  friend bool& refuses(c10::StorageImpl& storage) { return storage.*member; }
};
template struct Refuses<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
inline void allow_reading(c10::StorageImpl& storage) {
  refuses(storage) = false;  // set_data_ptr_noswap(), which follows, updates it
}

#else

static_assert(std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>);
using PreMulSum = c10d::PreMulSumSupplement;
inline c10d::ReduceOp pre_mul_sum(double factor) { return c10d::makePreMulSum(factor); }

template <class Node, class... Arguments>
c10::intrusive_ptr<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

inline void allow_reading(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }

#endif

}  // namespace isograd::torch_versions
