// Wrong samplers, attention, random numbers and resumes: B20a, B25 to B27; and what waits for later axes.
#include "isograd/data.hpp"
#include "isograd/random.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

// B27: a data set of short documents, seven a step.
constexpr std::int64_t kPerStep = 7, kSteps = 2;

MicroBatches step_of(int rank, int size, Sampler::Position position) {
  Sampler sampler({.samples = 50, .samples_per_step = kPerStep, .rank = rank, .size = size, .seed = 4});
  sampler.seek(position);
  MicroBatches batches;
  for (auto sample : sampler.next()) batches.push_back(toy::make_batch({3 + sample % 9}, sample));
  return batches;
}

// The position of a sampler that saved how many samples each rank had consumed, on one rank more than now.
Sampler::Position resumed_position(int ranks) {
  std::int64_t consumed = 0;  // by rank 0
  for (std::int64_t step = 0; step < kSteps; ++step)
    consumed += static_cast<std::int64_t>(step_of(0, ranks + 1, {0, step}).size());
  return {0, consumed * ranks / kPerStep};
}

}  // namespace

void add_data(std::vector<Exhibit>& list) {
  list.push_back({.id = "B20a", .plant = [](VerifyProblem& p, World&) {
                    with_model(p, [](RoomModel& model) { model.leaks = true; });
                  }});
  list.push_back({.id = "B25", .plant = [](VerifyProblem& p, World& world) {
                    const auto by_rank = toy::make_step(world.size, 3);
                    if (world.rank == world.size - 1) p.local.push_back(by_rank[0][1]);
                  }});
  list.push_back({.id = "B26a", .plant = [](VerifyProblem& p, World& world) {
                    with_model(p, [rank = world.rank](RoomModel& model) {
                      model.toy.twice.detach().mul_(1 + 0.01 * rank);
                    });
                  }});
  list.push_back({.id = "B26b", .plant = [](VerifyProblem& p, World& world) {
                    with_model(p, [rank = world.rank](RoomModel& model) {
                      model.noise = keyed_by(static_cast<std::uint64_t>(rank) + 1);
                    });
                  }});
  list.push_back({.id = "B27", .plant = [](VerifyProblem& p, World& world) {
                    const int rank = world.rank, size = world.size;
                    p.local = step_of(rank, size, resumed_position(size));
                    p.whole = [] { return step_of(0, 1, {0, kSteps}); };
                    p.uninterrupted = [=] { return step_of(rank, size, {0, kSteps}); };
                  }});
}

}  // namespace isograd::museum
