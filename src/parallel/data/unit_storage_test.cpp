#include "parallel/data/unit_storage.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
const Slot kMatrix{.name = "w", .offset = 4, .numel = 6, .shape = {2, 3}};

constexpr auto message = [](auto&& action) { return error_testing::error_of<std::exception>(action); };

TEST(UnitStorage, ViewsSeeTheMemoryThatIsIn) {
  UnitStorage storage(12, at::kFloat, at::kCPU, "sharded");
  const at::Tensor weight = storage.view(kMatrix), transposed = weight.t();  // made while nothing is in
  EXPECT_EQ(weight.sizes(), at::IntArrayRef({2, 3}));
  const auto version = weight._version();
  for (float first : {0.f, 100.f}) {
    storage.put_in(at::arange(12, at::kFloat) + first);
    EXPECT_TRUE(at::equal(weight, at::arange(4, 10, at::kFloat).view({2, 3}) + first));
    EXPECT_EQ(transposed[2][1].item<float>(), first + 9);
    EXPECT_EQ(storage.take_out()[0].item<float>(), first);
  }
  EXPECT_EQ(weight._version(), version);
  EXPECT_EQ(storage.bytes(), 48);
}

TEST(UnitStorage, ReadingWhatIsNotThereSaysWhy) {
  UnitStorage storage(12, at::kDouble, at::kCPU, "parameter read while sharded: unit 'b'");
  const at::Tensor weight = storage.view(kMatrix);
  const auto every_use = [&](const char* why) {
    EXPECT_THAT(message([&] { (weight + 1).sum(); }), HasSubstr(why));
    EXPECT_THAT(message([&] { at::mm(weight, at::ones({3, 3}, at::kDouble)); }), HasSubstr(why));
    EXPECT_THAT(message([&] {
                  at::NoGradGuard no_grad;
                  weight.zero_();
                }),
                HasSubstr(why));
    EXPECT_THAT(message([&] { weight.clone(); }), HasSubstr(why));
    EXPECT_THAT(message([&] { weight[1][1].item(); }), HasSubstr(why));
    EXPECT_THAT(message([&] { (void)weight.data_ptr(); }), HasSubstr(why));
  };
  every_use("parameter read while sharded: unit 'b'");
  storage.put_in(at::zeros({12}, at::kDouble));
  every_use("no error");
  storage.take_out();
  every_use("parameter read while sharded: unit 'b'");
}

TEST(UnitStorage, WhatAutogradSavedReadsTheMemoryOfItsOwnTime) {
  UnitStorage storage(12, at::kDouble, at::kCPU, "sharded");
  at::Tensor weight = at::zeros({2, 3}, at::kDouble).requires_grad_();
  weight.set_data(storage.view(kMatrix));
  storage.put_in(at::arange(12, at::kDouble));
  const at::Tensor loss = (weight * weight).sum();
  storage.take_out().fill_(std::nan(""));
  EXPECT_THAT(message([&] { torch::autograd::grad({loss}, {weight}, {}, /*retain_graph=*/true); }),
              HasSubstr("sharded"));
  storage.put_in(at::arange(12, at::kDouble));
  const auto gradient = torch::autograd::grad({loss}, {weight})[0];
  EXPECT_TRUE(at::equal(gradient, 2 * at::arange(4, 10, at::kDouble).view({2, 3})));
}

TEST(UnitStorage, EmptyAndScalarSlots) {
  UnitStorage storage(3, at::kBFloat16, at::kCPU, "sharded");
  const at::Tensor none = storage.view({.name = "none", .offset = 3, .numel = 0, .shape = {0, 2}});
  const at::Tensor one = storage.view({.name = "one", .offset = 1, .numel = 1, .shape = {}});
  storage.put_in(at::ones({3}, at::kBFloat16));
  EXPECT_EQ(one.item<float>(), 1);
  EXPECT_EQ(none.sum().item<float>(), 0);
  EXPECT_THROW(storage.put_in(at::ones({3}, at::kBFloat16)), BrokenInvariant);
  storage.take_out();
  EXPECT_THROW(storage.put_in(at::ones({3})), BrokenInvariant);
  EXPECT_THROW(storage.view({.name = "beyond", .offset = 3, .numel = 1, .shape = {1}}), BrokenInvariant);
}

}  // namespace
}  // namespace isograd
