// In which order the micro-batches of a step run, and the rules that any such schedule is held to.
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "train/step_work.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_schedule(std::string found, std::string expected) {
  refuse("StepOptions::schedule", std::move(found), std::move(expected),
         "Fix the schedule; one_after_another() is a correct example");
}

[[noreturn]] void refuse_halves(std::string of, std::string expected) {
  refuse("a half of a backward", std::move(of), std::move(expected),
         "Take a schedule of whole backwards, 1f1b for instance, or zero2 in place of zero3");
}

}  // namespace

void StepWork::run(const MicroBatchSchedule& schedule) {
  shares_ = std::vector<PendingLoss>(size() * parts_), left_ = size() * parts_;
  try {
    schedule(*this);
    if (left_ > 0)
      refuse_schedule(
          fmt::format("{} of {} backwards{}", shares_.size() - left_, shares_.size(),
                      parts_ > 1 ? fmt::format(" ({} micro-batches in {} parts)", size(), parts_) : ""),
          "a forward and a backward of each micro-batch");
  } catch (...) {
    shares_.clear();  // and with them what the forwards kept
    throw;
  }
}

// A rank with several stages has none of them for its turn outside of a step, and says so
// (Pipeline::stage()).
void StepWork::look() {
  shares_ = std::vector<PendingLoss>(size());
  for (std::size_t i = 0; i < size(); ++i) {
    forward(i);
    log(pending_loss(i, 0));
  }
}

void MicroBatchWork::backward_inputs(std::size_t, std::size_t) {
  refuse_halves("work that computes backwards whole", "backward()");
}
void MicroBatchWork::backward_weights(std::size_t, bool, std::size_t) {
  refuse_halves("work that computes backwards whole", "backward()");
}

void StepWork::backward_inputs(std::size_t i, std::size_t part) {
  if (!layout_.splits_backward())
    refuse_halves("parameters of ZeRO-3, whose units gather them for both halves at once",
                  "parameters that are whole between a step's forwards and backwards");
  PendingLoss& own = pending_loss(i, part);
  if (own.captured) compute(i, own);
  check(own.value.defined() && !own.weights, i, "forward(i) before backward_inputs(i), each once");
  own.weights.emplace();
  if (is_differentiable(own.value, batches_[i])) own.weights = backward_of_inputs(own.value);
}

void StepWork::backward_weights(std::size_t i, bool last, std::size_t part) {
  PendingLoss& own = pending_loss(i, part);
  check(own.weights.has_value(), i, "backward_inputs(i) before backward_weights(i), each once");
  begin_gradients(i, last);
  own.weights->run();
  log(own);
}

void StepWork::check(bool holds, std::size_t i, const char* expected) const {
  if (!holds)
    refuse_schedule(
        fmt::format("micro-batch {} (they are numbered 0 to {})", i, static_cast<std::int64_t>(size()) - 1),
        expected);
}

void one_after_another(MicroBatchWork& work) {
  for (std::size_t i = 0; i < work.size(); ++i) {
    work.forward(i);
    work.backward(i, i + 1 == work.size());
  }
}

StepOptions through(const Pipeline& pipeline, StepOptions others) {
  others.schedule = [&pipeline](MicroBatchWork& work) {
    pipeline.run(
        work.size(),
        {.forward = [&](std::size_t i, std::size_t part) { work.forward(i, part); },
         .backward = [&](std::size_t i, bool last, std::size_t part) { work.backward(i, last, part); },
         .inputs = [&](std::size_t i, std::size_t part) { work.backward_inputs(i, part); },
         .weights = [&](std::size_t i, bool last,
                        std::size_t part) { work.backward_weights(i, last, part); }});
  };
  others.parts = pipeline.own_stages().size();
  others.micro_batches_of = pipeline.micro_batches_of();
  return others;
}

}  // namespace isograd
