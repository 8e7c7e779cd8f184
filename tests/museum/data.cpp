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
  list.push_back({.id = "B20a",
                  .title = "packed documents attend to each other",
                  .mistake = "Attention takes a pack for one document.",
                  .who = "Packing without document masks.",
                  .number = "Changing document A changes document B's logits and gradient.",
                  .diagnosis = "documents_leak",
                  .plant = [](VerifyProblem& p, World&) {
                    with_model(p, [](RoomModel& model) { model.leaks = true; });
                  }});
  list.push_back({.id = "B25",
                  .title = "the sampler repeats samples",
                  .mistake = "So that every rank gets equally many, the sampler gives some samples twice.",
                  .who = "Distributed samplers that pad.",
                  .number = "Sample ids counted twice; the loss is that of another batch.",
                  .diagnosis = "sample_twice",
                  .plant = [](VerifyProblem& p, World& world) {
                    const auto by_rank = toy::make_step(world.size, 3);
                    if (world.rank == world.size - 1) p.local.push_back(by_rank[0][1]);
                  }});
  list.push_back({.id = "B26a",
                  .title = "initialisation depends on the rank",
                  .mistake = "Each rank draws its initial parameters from a generator seeded with its rank.",
                  .who = "seed + rank, meant for dropout, set before the model is made.",
                  .number = "Parameters differ over ranks before the first step.",
                  .diagnosis = "initial_parameters_differ",
                  .plant = [](VerifyProblem& p, World& world) {
                    with_model(p, [rank = world.rank](RoomModel& model) {
                      model.toy.twice.detach().mul_(1 + 0.01 * rank);
                    });
                  }});
  list.push_back({.id = "B26b",
                  .title = "dropout depends on the rank",
                  .mistake =
                      "Random numbers are keyed by the rank, so that a sample's dropout depends on where it "
                      "lies.",
                  .who = "Generators seeded with the rank; every trainer that does not key by sample.",
                  .number = "Gradients differ, each run is reproducible, and without dropout all is well.",
                  .diagnosis = "noise_depends_on_layout",
                  .plant = [](VerifyProblem& p, World& world) {
                    with_model(p, [rank = world.rank](RoomModel& model) {
                      model.noise = keyed_by(static_cast<std::uint64_t>(rank) + 1);
                    });
                  }});
  list.push_back(
      {.id = "B27",
       .title = "resuming on another number of ranks changes the step",
       .mistake = "The sampler's position was saved as what each rank had consumed; on another number of "
                  "ranks that is another place in the data.",
       .who = "Checkpoints that store loader state by rank.",
       .number = "The loss jumps at the resumed step; other samples than without the interruption.",
       .diagnosis = "resume_changes_step",
       .plant = [](VerifyProblem& p, World& world) {
         const int rank = world.rank, size = world.size;
         p.local = step_of(rank, size, resumed_position(size));
         p.whole = [] { return step_of(0, 1, {0, kSteps}); };
         p.uninterrupted = [=] { return step_of(rank, size, {0, kSteps}); };
       }});
}

}  // namespace isograd::museum
