// A layout's parameters between steps, under every strategy and at any number of ranks: state
// written early, tensors that share their memory, values written into them, sparse gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layout/flat.hpp"
#include "layout_life.hpp"

namespace isograd::layout_life {
namespace {

using isograd::testing::error_of;
using ::testing::HasSubstr;

TEST(LayoutLife, StateWrittenBeforeTheFirstStepStaysWithItsParameter) {
  constexpr double kRate = 0.1, kMomentum = 0.5;
  for (const Way& way : ways())
    for (int size : {1, 2, 3, 4})
      run_ranks(size, [&](World& world) {
        const Sharded<Net> net(std::make_shared<Net>());
        const auto layout = way.make(net, world.group);
        const auto optimizer = sgd({.learning_rate = kRate, .momentum = kMomentum});
        auto state = optimizer->state(layout->buckets());
        for (std::size_t b = 0; b < layout->buckets().size(); ++b) {
          const Bucket& bucket = layout->buckets()[b];
          for (const Slot& slot : bucket.plan.slots)
            if (slot.name == "table")
              write_slot(state.at("momentum_buffer")[b], bucket.held, slot,
                         at::ones(slot.shape, at::kDouble));
        }
        optimizer->set_updates(1);
        backward(*layout, net, world.rank, 0);
        update(*layout, *optimizer);
        Net wanted;
        reference_backward(wanted, size, 0);
        descend(wanted, kRate);
        const at::NoGradGuard no_grad;
        wanted.table.sub_(at::full({7, 6}, kRate * kMomentum, at::kDouble));
        EXPECT_LE(worst(*layout, wanted, &DataParallel::View::parameter), kExact) << way.name << " " << size;
      });
}

enum class Alias { kBefore, kAfter, kCopy };

// The largest error of three steps' gradients of a net whose output is tied to a tensor that shares its
// memory.
double tied_error(const Way& way, int size, Alias when) {
  std::vector<double> errors(size);
  run_ranks(size, [&](World& world) {
    const Sharded<Net> net(std::make_shared<Net>());
    if (when == Alias::kBefore) net->target = net->out.detach();
    const auto layout = way.make(net, world.group);
    if (when == Alias::kAfter) net->target = net->out.detach();
    if (when == Alias::kCopy) net->target = Net().out.detach();
    const auto optimizer = sgd({.learning_rate = 0.3});
    Net wanted;
    wanted.target = wanted.out.detach();
    for (int step = 0; step < 3; ++step) {
      backward(*layout, net, world.rank, step);
      clear(wanted);
      reference_backward(wanted, size, step);
      errors[world.rank] =
          std::max(errors[world.rank], worst(*layout, wanted, &DataParallel::View::gradient));
      update(*layout, *optimizer);
      descend(wanted, 0.3);
    }
  });
  return *std::max_element(errors.begin(), errors.end());
}

TEST(LayoutLife, WhatSharesAParametersMemoryFollowsIt) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3, 4}) {
      EXPECT_LE(tied_error(way, size, Alias::kBefore), kExact) << way.name << " " << size;
      EXPECT_LE(tied_error(way, size, Alias::kAfter), kExact) << way.name << " " << size;
    }
  EXPECT_GT(tied_error(ways()[1], 2, Alias::kCopy), 1e-4);  // planted: stale
}

TEST(LayoutLife, AnAliasThatCannotFollowIsRefusedByName) {
  for (const Way& way : ways())
    for (int size : {1, 3})
      for (bool held : {true, false})
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>());
          at::Tensor whole = at::cat({drawn({7, 6}, 2), drawn({2, 6}, 9)});
          net->out.set_data(whole.narrow(0, 0, 7));
          net->block->mid.set_data(net->block->mid.detach().clone().t());  // another order, nobody else's
          if (!held) whole = at::Tensor();
          const std::string said = error_of([&] { way.make(net, world.group); });
          if (held) {
            EXPECT_THAT(said, HasSubstr("parameter 'out': found 1 other tensor in the memory")) << way.name;
            EXPECT_EQ(net->out.const_data_ptr(), whole.const_data_ptr()) << way.name;
          } else {
            EXPECT_EQ(said, "no error") << way.name;
          }
        });
}

TEST(LayoutLife, ASecondLayoutOfTheSameMemoryIsRefusedByName) {
  for (const Way& way : ways()) {
    const Sharded<Net> net(std::make_shared<Net>()), other(std::make_shared<Net>());
    other->out.set_data(net->out.detach());  // as ranks that are threads have it from one tensor
    {
      const auto layout = way.make(net, Group::solo());
      EXPECT_THAT(error_of([&] { way.make(other, Group::solo()); }),
                  HasSubstr("parameter 'out': found memory that another parameter or layout uses"))
          << way.name;
    }
    EXPECT_EQ(error_of([&] { way.make(other, Group::solo()); }), "no error") << way.name;
  }
}

// bf16 has a master; an update so small that bf16 cannot tell must not bring the old values back.
TEST(LayoutLife, ValuesWrittenInPlaceStay) {
  for (const Way& way : ways())
    for (const auto type : {at::kBFloat16, at::kFloat})
      for (int size : {1, 2, 3})
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>(type));
          const auto layout = way.make(net, world.group);
          const auto optimizer = adamw({.learning_rate = 1e-7, .weight_decay = 0});
          backward(*layout, net, world.rank, 0);
          update(*layout, *optimizer);
          std::map<std::string, at::Tensor> masters;
          for (const auto& view : layout->views()) masters[view.name] = view.master.clone();
          {
            const auto whole = layout->whole_parameters();
            const at::NoGradGuard no_grad;
            for (int rank = 0; rank < size; ++rank) {  // one after another, where they share memory
              if (rank == world.rank) {
                net->block->mid.fill_(2);
                net->out.mul_(3);
                net->table.copy_(net->table.clone());  // the same bits
              }
              world.group.barrier();
            }
          }
          if (way.shared && size > 1) {
            const std::string said = error_of([&] { layout->zero_gradients(); });
            EXPECT_THAT(said, HasSubstr("an in-place operation on the one copy that")) << way.name;
            EXPECT_THAT(said, HasSubstr("Call write()")) << way.name;
            world.group.barrier();
            return;
          }
          backward(*layout, net, world.rank, 1);
          for (const auto& view : layout->views()) {
            if (view.name == "block.mid") {
              EXPECT_TRUE(at::equal(view.master, at::full({6, 6}, 2.f))) << way.name;
            }
            if (view.name == "table" || view.name == "block.shift") {
              EXPECT_TRUE(at::equal(view.master, masters.at(view.name))) << way.name << " " << view.name;
            }
          }
          update(*layout, *optimizer);
          for (const auto& view : layout->views()) {
            if (view.name == "block.mid") {
              EXPECT_LT((view.parameter.to(at::kFloat) - 2).abs().max().item<float>(), 1e-5) << way.name;
            }
            if (view.name == "out") {
              EXPECT_LT((view.parameter.to(at::kFloat) - 3 * masters.at("out")).abs().max().item<float>(),
                        2e-2)
                  << way.name;
            }
          }
        });
}

// Between the gradients' zeroing and the update too: step, zero, clamp is a habit.
TEST(LayoutLife, ValuesWrittenInMidStepStay) {
  for (const Way& way : ways())
    for (const auto type : {at::kBFloat16, at::kFloat})
      for (int size : {1, 2, 3})
        run_ranks(size, [&](World& world) {
          if (way.shared && size > 1) return;  // refused
          const Sharded<Net> net(std::make_shared<Net>(type));
          const auto layout = way.make(net, world.group);
          const auto optimizer = adamw({.learning_rate = 1e-7, .weight_decay = 0});
          backward(*layout, net, world.rank, 0);
          update(*layout, *optimizer);
          layout->zero_gradients();
          {
            const auto whole = layout->whole_parameters();
            const at::NoGradGuard no_grad;
            net->block->mid.fill_(2);
          }
          const at::Tensor loss = loss_of(net, world.rank, 1);
          layout->begin_backward(true);
          loss.backward();
          layout->finish_reduction();
          update(*layout, *optimizer);
          for (const auto& view : layout->views()) {
            if (view.name != "block.mid") continue;
            EXPECT_LT((view.master.to(at::kFloat) - 2).abs().max().item<float>(), 1e-5) << way.name << size;
            EXPECT_LT((view.parameter.to(at::kFloat) - 2).abs().max().item<float>(), 1e-5)
                << way.name << size;
          }
        });
}

// A model that is loaded or moved by replacing tensors leaves the layout with memory that nothing reads.
TEST(LayoutLife, AParameterWithOtherMemoryIsRefusedByName) {
  for (const Way& way : ways())
    for (int size : {1, 2})
      for (const char* name : {"out", "block.mid"})
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>());
          const auto layout = way.make(net, world.group);
          const auto optimizer = sgd({.learning_rate = 0.1});
          backward(*layout, net, world.rank, 0);
          update(*layout, *optimizer);
          {
            const auto whole = layout->whole_parameters();
            at::Tensor parameter = net->find(name);
            parameter.set_data(parameter.detach().clone());
          }
          EXPECT_THAT(error_of([&] { layout->zero_gradients(); }),
                      HasSubstr(fmt::format("parameter '{}': found values that no longer live", name)))
              << way.name << " " << size;
        });
}

TEST(LayoutLife, WriteGivesAllRanksTheValues) {
  const at::Tensor values = drawn({6, 6}, 77), row = drawn({6}, 78);
  for (const Way& way : ways())
    for (const auto type : {at::kBFloat16, at::kDouble})
      for (int size : {1, 2, 3, 4})
        for (int replicas : {1, 2}) {
          if (size % replicas != 0 || (replicas > 1 && way.name == "naive")) continue;
          run_ranks(size, [&](World& world) {
            const Sharded<Net> net(std::make_shared<Net>(type));
            const auto layout = way.make(net, Mesh(world, data_grid(world.size, {.dp_replicate = replicas})));
            const auto optimizer = adamw({.learning_rate = 1e-9, .weight_decay = 0});
            backward(*layout, net, world.rank, 0);
            update(*layout, *optimizer);
            layout->write({{"block.mid", values}, {"block.shift", row}});
            backward(*layout, net, world.rank, 1);
            for (const auto& view : layout->views()) {
              if (view.name != "block.mid" && view.name != "block.shift") continue;
              const at::Tensor& wanted = view.name == "block.mid" ? values : row;
              EXPECT_TRUE(at::equal(view.parameter, wanted.to(type))) << way.name;
              EXPECT_TRUE(at::equal(view.master, wanted.to(view.master.scalar_type()))) << way.name;
            }
            {
              const auto whole = layout->whole_parameters();
              EXPECT_TRUE(at::equal(net->block->mid, values.to(type))) << way.name << " " << size;
            }
            EXPECT_THAT(error_of([&] {
                          layout->write({{"mid", values}});
                        }),
                        HasSubstr("'mid': found no parameter"));
            EXPECT_THAT(error_of([&] { layout->write({{"block.mid", row}}); }), HasSubstr("[6, 6]"));
          });
        }
}

// A rank whose loss is a constant runs no backward. `called`: it has called its model all the same.
double error_with_constants(const Way& way, int size, bool called, bool planted) {
  std::vector<double> errors(size);
  const auto is_constant = [&](int rank, int micro) { return called ? (rank + micro) % 2 == 1 : rank == 1; };
  run_ranks(size,
            [&](World& world) {
              const Sharded<Net> net(std::make_shared<Net>());
              const auto layout = way.make(net, world.group);
              for (int step = 0; step < 2; ++step) {
                layout->zero_gradients();
                Net wanted;
                for (int micro : {0, 1}) {
                  const bool constant = is_constant(world.rank, micro);
                  at::Tensor loss = at::zeros({});
                  if (called || !constant) loss = loss_of(net, world.rank, step + micro);
                  layout->begin_backward(micro == 1);
                  if (!constant) loss.backward();
                  const auto plain = [&](const at::Tensor& in) { return wanted.forward(in); };
                  for (int rank = 0; rank < size; ++rank)
                    if (planted || !is_constant(rank, micro)) loss_of(plain, rank, step + micro).backward();
                }
                layout->finish_reduction();
                errors[world.rank] =
                    std::max(errors[world.rank], worst(*layout, wanted, &DataParallel::View::gradient));
                layout->publish_parameters();
              }
            },
            {.timeout = std::chrono::seconds(10)});
  return *std::max_element(errors.begin(), errors.end());
}

TEST(LayoutLife, ALossThatIsAConstantKeepsUpWithTheOthers) {
  for (const Way& way : ways())
    for (int size : {2, 3, 4})
      for (const bool called : {true, false})
        EXPECT_LE(error_with_constants(way, size, called, false), kExact)
            << way.name << " " << size << (called ? ", called" : "");
  EXPECT_GT(error_with_constants(ways().back(), 2, true, true), 1e-4);  // planted: of all ranks
}

TEST(LayoutLife, SparseGradientsAreSummed) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3, 4})
      for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>(type));
          net->sparse = true;
          const auto layout = way.make(net, world.group);
          const auto optimizer = sgd({.learning_rate = 0});
          for (int step = 0; step < 2; ++step) {
            layout->zero_gradients();
            Net wanted;
            for (int micro : {0, 1}) {
              const at::Tensor loss = loss_of(net, world.rank, step + micro);
              layout->begin_backward(micro == 1);
              loss.backward();
              reference_backward(wanted, size, step + micro);
            }
            layout->finish_reduction();
            const double bound = type == at::kDouble ? kExact : type == at::kFloat ? 1e-5 : 0.1;
            EXPECT_LE(worst(*layout, wanted, &DataParallel::View::gradient), bound)
                << way.name << " " << size << " " << c10::toString(type);
            update(*layout, *optimizer);
          }
        });
}

}  // namespace
}  // namespace isograd::layout_life
