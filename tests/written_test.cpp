// Values that users write into parameters, in place or with write(): they reach masters, shards and the next
// forward, or are refused by name before anything of them is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "isograd/optimizer.hpp"
#include "layout_life.hpp"

namespace isograd::layout_life {
namespace {

using isograd::testing::error_of;
using ::testing::HasSubstr;

const DataParallel::View& view_of(const std::vector<DataParallel::View>& views, const std::string& name) {
  return *std::find_if(views.begin(), views.end(), [&](const auto& view) { return view.name == name; });
}

// Ranks that share memory write one after another.
void in_turn(World& world, const std::function<void()>& action) {
  for (int rank = 0; rank < world.size; ++rank) {
    if (rank == world.rank) {
      const at::NoGradGuard no_grad;
      action();
    }
    world.group.barrier();
  }
}

TEST(Written, ViewsHaveWhatWasWrittenInPlace) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3})
      run_ranks(size, [&](World& world) {
        const Sharded<Net> net(std::make_shared<Net>(at::kBFloat16));
        const auto layout = way.make(net, world.group);
        const auto optimizer = adamw({.learning_rate = 1e-3});
        backward(*layout, net, world.rank, 0);
        update(*layout, *optimizer);
        const auto whole = layout->whole_parameters();
        in_turn(world, [&] { net->out.fill_(3); });
        if (way.shared && size > 1) {
          for (int time = 0; time < 2; ++time)  // once refused it is not taken for granted
            EXPECT_THAT(error_of([&] { layout->views(); }),
                        HasSubstr("an in-place operation on the one copy"))
                << way.name;
          layout->write({{"out", at::full({7, 6}, 2.0)}});  // which is the way out
          EXPECT_TRUE(at::equal(view_of(layout->views(), "out").master, at::full({7, 6}, 2.f))) << way.name;
          world.group.barrier();
          return;
        }
        const auto views = layout->views();
        EXPECT_TRUE(at::equal(view_of(views, "out").master, at::full({7, 6}, 3.f))) << way.name << size;
        EXPECT_TRUE(at::equal(view_of(views, "out").parameter.to(at::kFloat), at::full({7, 6}, 3.f)))
            << way.name << size;
      });
}

TEST(Written, OneCopyWrittenInPlaceIsNotHandedOut) {
  for (const Way& way : ways()) {
    if (!way.shared) continue;
    run_ranks(2, [&](World& world) {
      const Sharded<Net> net(std::make_shared<Net>());
      const auto layout = way.make(net, world.group);
      in_turn(world, [&] { net->out.mul_(3); });
      EXPECT_THAT(error_of([&] { layout->whole_parameters(); }), HasSubstr("Call write()")) << way.name;
      EXPECT_THAT(error_of([&] {
                    layout->write({{"table", drawn({7, 6}, 5)}});
                  }),
                  HasSubstr("parameter 'out': found an in-place operation"))
          << way.name;
      world.group.barrier();
    });
  }
}

// Checks gradients after write(), where a forward has left the model whole and no backward has freed it.
double error_after_probe(const Way& way, int size, bool planted) {
  std::vector<double> errors(size);
  run_ranks(size, [&](World& world) {
    const Sharded<Net> net(std::make_shared<Net>());
    const auto layout = way.make(net, world.group);
    const at::Tensor probe = loss_of(net, world.rank, 7);
    layout->write({{"out", drawn({7, 6}, 50)}, {"block.mid", drawn({6, 6}, 51)}});
    {
      const auto whole = layout->whole_parameters();
      EXPECT_TRUE(at::equal(net->out, drawn({7, 6}, 50))) << way.name << size;
    }
    Net wanted;
    {
      const at::NoGradGuard no_grad;
      wanted.out.copy_(drawn({7, 6}, planted ? 2 : 50));
      wanted.block->mid.copy_(drawn({6, 6}, 51));
    }
    backward(*layout, net, world.rank, 0);
    reference_backward(wanted, size, 0);
    errors[world.rank] = worst(*layout, wanted, &DataParallel::View::gradient);
  });
  return *std::max_element(errors.begin(), errors.end());
}

TEST(Written, TheNextForwardReadsIt) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3, 4}) EXPECT_LE(error_after_probe(way, size, false), kExact) << way.name << size;
  EXPECT_GT(error_after_probe(ways()[1], 2, true), 1e-4);  // planted: the old values
}

enum class Writers { kFirst, kDiffering, kAll };

// The error of each rank where ranks do not write the same, into a parameter that is trained or a frozen one.
std::vector<std::string> told(const Way& way, int size, Writers writers, bool frozen = false) {
  std::vector<std::string> said(size);
  try {
    run_ranks(size,
              [&](World& world) {
                const Sharded<Net> net(std::make_shared<Net>());
                net->block->shift.set_requires_grad(!frozen);
                const auto layout = way.make(net, world.group);
                said[world.rank] = error_testing::error_of<Error>([&] {
                  {
                    const auto whole = layout->whole_parameters();
                    const at::NoGradGuard no_grad;
                    if (writers != Writers::kFirst || world.rank == 0)
                      (frozen ? net->block->shift : net->out)
                          .fill_(writers == Writers::kDiffering ? world.rank : 3);
                  }
                  layout->views();  // which notices them, and on which ranks is its caller's business
                  for (int step : {0, 1}) {
                    backward(*layout, net, world.rank, step);
                    global_norm(layout->buckets(), 0.0, world.group);
                  }
                });
              },
              {.timeout = std::chrono::seconds(5)});
  } catch (const std::exception&) {
  }
  return said;
}

TEST(Written, InPlaceIsTheSameOnAllRanks) {
  for (const Way& way : ways())
    for (const bool frozen : {false, true}) {
      if (way.shared && (way.units || !frozen)) continue;  // one copy, under units of frozen ones too
      const std::string parameter = frozen ? "parameter 'block.shift': found " : "parameter 'out': found ";
      for (int size : {2, 3}) {
        for (const std::string& one : told(way, size, Writers::kAll, frozen))
          EXPECT_EQ(one, "no error") << way.name;
        for (const std::string& one : told(way, size, Writers::kDiffering, frozen))
          EXPECT_THAT(one, HasSubstr(parameter + "other values written in place on rank 1")) << way.name;
        const auto alone = told(way, size, Writers::kFirst, frozen);
        EXPECT_THAT(alone[0], HasSubstr(parameter + "values written in place on this rank")) << way.name;
        for (int rank = 1; rank < size; ++rank) EXPECT_NE(alone[rank], "no error") << way.name << rank;
      }
    }
}

// Not finite: no update, nothing published. What is written then is the next step's.
TEST(Written, AfterASkippedStepIsTakenOver) {
  for (const Way& way : ways())
    for (int size : {1, 2})
      for (bool by_write : {true, false}) {
        if (way.shared && size > 1) continue;  // refused
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>(at::kBFloat16));
          const auto layout = way.make(net, world.group);
          const auto optimizer = adamw({.learning_rate = 1e-7, .weight_decay = 0});
          backward(*layout, net, world.rank, 0);
          {
            const auto whole = layout->whole_parameters();
            const at::NoGradGuard no_grad;
            net->out.fill_(3);
          }
          if (by_write) {
            EXPECT_EQ(error_of([&] {
                        layout->write({{"table", at::full({7, 6}, 0.5)}});
                      }),
                      "no error")
                << way.name;
          }
          backward(*layout, net, world.rank, 1);
          update(*layout, *optimizer);
          const auto views = layout->views();
          EXPECT_LT((view_of(views, "out").master - 3).abs().max().item<float>(), 1e-5) << way.name;
          if (by_write) {
            EXPECT_LT((view_of(views, "table").master - 0.5).abs().max().item<float>(), 1e-5) << way.name;
          }
        });
      }
}

// publish_parameters() refuses a write until it is taken over.
TEST(Written, ARefusedWriteIsNotForgotten) {
  for (const Way& way : ways()) {
    if (way.shared) continue;
    const Sharded<Net> net(std::make_shared<Net>(at::kBFloat16));
    const auto layout = way.make(net, Group::solo());
    backward(*layout, net, 0, 0);
    {
      const at::NoGradGuard no_grad;
      net->out.fill_(3);
    }
    EXPECT_THAT(error_of([&] { layout->publish_parameters(); }),
                HasSubstr("parameter 'out': found values written between finish_reduction()"))
        << way.name;
    layout->zero_gradients();
    EXPECT_TRUE(at::equal(view_of(layout->views(), "out").master, at::full({7, 6}, 3.f))) << way.name;
  }
}

TEST(Written, FrozenParametersCanBe) {
  const at::Tensor values = drawn({6}, 90);
  for (const Way& way : ways())
    for (const auto type : {at::kBFloat16, at::kDouble})
      for (int size : {1, 2, 3})
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>(type));
          net->block->shift.set_requires_grad(false);
          const auto layout = way.make(net, world.group);
          if (way.units && way.shared && size > 1) {
            in_turn(world, [&] { net->block->shift.mul_(2); });
            EXPECT_THAT(error_of([&] { layout->zero_gradients(); }), HasSubstr("Call write()"));
            world.group.barrier();
          }
          EXPECT_EQ(error_of([&] {
                      layout->write({{"block.shift", values}});
                    }),
                    "no error")
              << way.name << size;
          EXPECT_THAT(error_of([&] { layout->write({{"block.shift", drawn({7}, 1)}}); }), HasSubstr("[6]"));
          {
            const auto whole = layout->whole_parameters();
            EXPECT_TRUE(at::equal(net->block->shift, values.to(type))) << way.name << size;
          }
          net->block->shift.set_requires_grad(true);
          backward(*layout, net, world.rank, 0);
          const auto views = layout->views();
          const at::Tensor& master = view_of(views, "block.shift").master;
          EXPECT_TRUE(at::equal(master.to(type), values.to(type))) << way.name << size;
          world.group.barrier();
        });
}

TEST(Written, NothingWhereARankRefuses) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3})
      for (bool held : {true, false})
        run_ranks(size, [&](World& world) {
          if (held && (!way.units || way.shared || size == 1)) return;  // always whole
          const Sharded<Net> net(std::make_shared<Net>());
          const auto layout = way.make(net, world.group);
          const bool alone = world.rank == size - 1;
          auto whole = held ? layout->whole_parameters() : nullptr;
          const std::string said = error_of([&] {
            layout->write(
                {{"out", drawn({7, 6}, 60)}, {held || !alone ? "table" : "tabel", drawn({7, 6}, 61)}});
          });
          EXPECT_THAT(said,
                      HasSubstr(held    ? "write(): found a call while whole_parameters() is held"
                                : alone ? "'tabel': found no parameter of this name"
                                        : "write(): found an error on rank " + std::to_string(size - 1)))
              << way.name;
          whole = nullptr;
          EXPECT_TRUE(at::equal(view_of(layout->views(), "out").parameter, drawn({7, 6}, 2))) << way.name;
          layout->write({{"out", drawn({7, 6}, 60)}});
          EXPECT_TRUE(at::equal(view_of(layout->views(), "out").parameter, drawn({7, 6}, 60))) << way.name;
          world.group.barrier();
        });
}

TEST(Written, NothingWhereRanksAreGivenOtherValues) {
  for (const Way& way : ways())
    for (int size : {2, 3})
      for (const bool none : {false, true})
        run_ranks(size, [&](World& world) {
          const Sharded<Net> net(std::make_shared<Net>());
          net->block->shift.set_requires_grad(false);
          const auto layout = way.make(net, world.group);
          const bool alone = world.rank == size - 1;
          const std::string last = std::to_string(size - 1);
          for (const auto& [name, shape] :
               {std::pair("out", std::vector<std::int64_t>{7, 6}), {"block.shift", {6}}}) {
            std::vector<std::pair<std::string, at::Tensor>> values = {{"table", drawn({7, 6}, 70)}};
            if (!none || !alone) values.emplace_back(name, drawn(shape, alone ? 72 : 71));
            EXPECT_THAT(error_of([&] { layout->write(values); }),
                        HasSubstr(std::string("parameter '") + name + "': found " +
                                  (none ? "values given to write() on rank 0 and none on rank " + last
                                        : "other values given to write() on rank " + last)))
                << way.name;
          }
          const auto views = layout->views();
          EXPECT_TRUE(at::equal(view_of(views, "table").parameter, drawn({7, 6}, 1))) << way.name;
          EXPECT_TRUE(at::equal(view_of(views, "out").parameter, drawn({7, 6}, 2))) << way.name;
          {
            const auto whole = layout->whole_parameters();
            EXPECT_TRUE(at::equal(net->block->shift, drawn({6}, 4))) << way.name;
          }
          // Values that become the same are the same, of whatever type.
          const at::Tensor halves = at::full({7, 6}, 0.5, alone ? at::kFloat : at::kDouble);
          EXPECT_EQ(error_of([&] { layout->write({{"out", halves}}); }), "no error") << way.name;
          const at::Tensor wanted = at::full({7, 6}, 0.5, at::kDouble);
          EXPECT_TRUE(at::equal(view_of(layout->views(), "out").parameter, wanted)) << way.name;
          world.group.barrier();
        });
}

}  // namespace
}  // namespace isograd::layout_life
