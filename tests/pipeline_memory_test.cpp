// The activations that a rank of a pipeline keeps, against what the table of its schedule says.
#include "isograd/pipeline_parallel.hpp"
#include "layout/cost/meter.hpp"
#include "parallel/pipeline/split_backward.hpp"
#include "tensor_step.hpp"

namespace isograd {
namespace {

struct Kept {
  std::string schedule;
  int pp, stages_of_rank, micro_batches;
};

// Rank by rank: bytes after the first forward of a step, and the most after any, beyond what was there
// before.
struct Bytes {
  std::int64_t of_one = 0, most = 0;
};

// Two layers a stage, so that embedding and output hardly count.
DecoderConfig shape_of(int stages) {
  DecoderConfig config = tensor::shape(4, 2, false);
  config.hidden = 96, config.head_dim = 24, config.feed_forward = 257, config.vocabulary = 7;
  config.layers = 2 * stages;
  return config;
}

// What one micro-batch of one process keeps between the halves of its backward, as a part of what its forward
// kept.
double measure_between_halves() {
  const DecoderConfig config = shape_of(1);
  const auto model = tensor::whole_model(config, at::kFloat);
  const Batch batch = make_batch({171, 85}, config.vocabulary, 1);
  MemoryMeter meter;
  const std::int64_t before = meter.alive();
  at::Tensor loss = model->outputs(batch).hidden.square().sum();
  const auto whole = static_cast<double>(meter.alive() - before);
  WeightsBackward left = backward_of_inputs(std::exchange(loss, {}));
  const auto halved = static_cast<double>(meter.alive() - before);
  left.run();
  return halved / whole;
}

std::vector<Bytes> measure(const Kept& kept) {
  std::vector<Bytes> found(static_cast<std::size_t>(kept.pp));
  run_ranks(kept.pp, [&](World& world) {
    const Mesh mesh(world, Grid({{kStageAxis, kept.pp}}));
    const DecoderConfig config = shape_of(kept.pp * kept.stages_of_rank);
    const auto model = tensor::whole_model(config, at::kFloat);
    const auto pipeline = std::make_shared<Pipeline>(
        mesh, PipelineOptions{.schedule = kept.schedule, .stages_of_rank = kept.stages_of_rank});
    split_decoder(*model, mesh, pipeline);
    const Batch batch = make_batch({171, 85}, config.vocabulary, 1);
    MemoryMeter meter;
    Bytes& own = found[static_cast<std::size_t>(world.rank)];
    // Twice: parameters' gradients and the memory of messages are there in the second step.
    for (int step = 0; step < 2; ++step) {
      std::map<std::pair<std::size_t, std::size_t>, at::Tensor> roots;
      std::map<std::pair<std::size_t, std::size_t>, WeightsBackward> weights;
      const std::int64_t before = meter.alive();
      own = {};
      pipeline->run(static_cast<std::size_t>(kept.micro_batches),
                    {.forward =
                         [&](std::size_t i, std::size_t part) {
                           const DecoderOutputs outputs = model->outputs(batch);
                           roots[{i, part}] = outputs.passed_on.defined() ? outputs.passed_on
                                                                          : outputs.hidden.square().sum();
                           own.most = std::max(own.most, meter.alive() - before);
                           if (own.of_one == 0) own.of_one = own.most;
                         },
                     .backward =
                         [&](std::size_t i, bool, std::size_t part) {
                           roots.at({i, part}).backward();
                           roots.erase({i, part});
                         },
                     .inputs =
                         [&](std::size_t i, std::size_t part) {
                           weights[{i, part}] = backward_of_inputs(roots.at({i, part}));
                           roots.erase({i, part});
                           own.most = std::max(own.most, meter.alive() - before);
                         },
                     .weights =
                         [&](std::size_t i, bool, std::size_t part) {
                           weights.at({i, part}).run();
                           weights.erase({i, part});
                         }});
      EXPECT_LE(meter.alive() - before, step == 0 ? INT64_MAX : own.of_one / 100) << "let go";
    }
  });
  return found;
}

TEST(PipelineMemory, ActivationsAreTheTables) {
  MemoryMeter::install();
  const double between_halves = measure_between_halves();
  EXPECT_GT(between_halves, 0.5) << "inputs of products, and the gradients of their outputs";
  EXPECT_LT(between_halves, 1) << "what is computed of activations alone is let go";
  for (const Kept& kept : {Kept{"one-after-another", 3, 1, 4},
                           {"gpipe", 3, 1, 5},
                           {"1f1b", 2, 1, 8},
                           {"1f1b", 4, 1, 9},
                           {"interleaved", 2, 2, 4},
                           {"interleaved", 3, 2, 6},
                           {"zb-h1", 2, 1, 8},
                           {"zb-h1", 4, 1, 9},
                           {"zb-v", 2, 2, 6}}) {
    const PipelineTable table =
        make_pipeline(kept.schedule, kept.pp, kept.stages_of_rank, kept.micro_batches);
    const PipelineTimeline timeline = simulate(table, uniform_times(table.stages), between_halves);
    const std::vector<Bytes> found = measure(kept);
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      const double live = static_cast<double>(found[rank].most) / static_cast<double>(found[rank].of_one);
      const double said = timeline.most_kept[rank];
      const std::string where = fmt::format("{}, {} ranks of {} stages, rank {}", kept.schedule, kept.pp,
                                            kept.stages_of_rank, rank);
      EXPECT_NEAR(live / said, 1, 0.1) << where;
      EXPECT_GT(std::abs(live / (said + 1) - 1), 0.1) << where << ": one micro-batch more would be seen";
    }
  }
}

}  // namespace
}  // namespace isograd
